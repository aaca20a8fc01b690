//go:build unix

package agent

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/launch"
)

func TestJudge(t *testing.T) {
	begin := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	// died is a rank that failed ms milliseconds after the beginning.
	died := func(rank, ms int, text ...string) Failure {
		f := Failure{Rank: rank, ExitCode: 1, Time: begin.Add(time.Duration(ms) * time.Millisecond)}
		var c crash
		for _, line := range text {
			c.line(line)
		}
		f.Stderr, f.Crash, f.Error = text, c.head, c.why
		return f
	}
	noted := func(f Failure, peer int) Failure {
		f.Blames = &launch.Blame{Rank: f.Rank, Peer: peer, Message: "noted", Time: f.Time}
		return f
	}
	killed := func(f Failure) Failure {
		f.ExitCode, f.Signal = 137, "SIGKILL"
		return f
	}
	alive := func(rank int, state string) Failure { return Failure{Rank: rank, State: state} }
	const (
		left     = `work: all_reduce seq 3 on rank 0 of group "0": rank 1 left the group (noticed by rank 0)`
		goPanic  = "panic: runtime error: index out of range [5] with length 3"
		trace    = "goroutine 1 [running]:"
		python   = "Traceback (most recent call last):"
		pyClosed = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
	)
	for _, c := range []struct {
		name  string
		ranks []Failure
		want  int
		by    []int
		said  string
	}{
		{name: "alone", ranks: []Failure{died(2, 0), alive(0, stateRunning)}, want: 2},
		{name: "the first of two", ranks: []Failure{died(0, 5), died(2, 1)}, want: 2},
		{name: "what ranks print does not count", ranks: []Failure{died(0, 1, left), died(1, 9)}, want: 0},
		{name: "a panic after an exit code", ranks: []Failure{died(0, 1), died(1, 9, goPanic, "", trace)}, want: 1},
		{name: "the first of two tracebacks", ranks: []Failure{died(0, 9, python, pyClosed), died(1, 1, python, "  File x", "ValueError: on purpose")}, want: 1},
		{name: "a traceback after an exit code", ranks: []Failure{died(0, 1), died(1, 9, "[rank1]: "+python, "[rank1]:   File x", "[rank1]: "+pyClosed)}, want: 0},
		{name: "a signal after an exit code", ranks: []Failure{died(0, 1), killed(died(1, 9))}, want: 1},
		{name: "a panic with another's fault is no fault", ranks: []Failure{noted(died(0, 1, "panic: "+left, trace), 1), died(1, 9)}, want: 1, by: []int{0}},
		{name: "a rank of PyTorch that Go ranks name", ranks: []Failure{noted(died(0, 1), 1), died(2, 2, python, pyClosed), died(1, 9, python)}, want: 1, by: []int{0}},
		{name: "notes before time", ranks: []Failure{noted(died(0, 1), 1), died(2, 0)}, want: 1, by: []int{0}, said: "noted"},
		{name: "notes before a signal", ranks: []Failure{noted(died(0, 1), 1), killed(died(2, 2)), alive(1, stateRunning)}, want: 1, by: []int{0}},
		{name: "a chain", ranks: []Failure{noted(died(0, 1), 1), noted(died(1, 2), 2), killed(died(2, 3))}, want: 2, by: []int{0, 1}, said: "noted"},
		{name: "a circle and one that is not in it", ranks: []Failure{noted(died(0, 1), 1), noted(died(1, 2), 0), noted(died(2, 3), 1)}, want: 1, by: []int{0, 2}},
		{name: "who aborts the group says so itself", ranks: []Failure{noted(died(0, 9), 0), noted(died(1, 1), 0)}, want: 0, by: []int{1}},
		{name: "a stopped rank", ranks: []Failure{noted(died(1, 1), 2), noted(died(0, 2), 1), alive(2, stateStopped)}, want: 2, by: []int{0, 1}},
		{name: "a rank that left with exit code 0", ranks: []Failure{noted(died(0, 1), 3), noted(died(1, 2), 3), {Rank: 3, Time: begin}}, want: 3, by: []int{0, 1}},
		{name: "a rank nobody reports", ranks: []Failure{noted(died(0, 1), 3)}, want: 3, by: []int{0}},
		{name: "more say so", ranks: []Failure{noted(died(0, 1), 3), noted(died(1, 2), 2), noted(died(4, 2), 2)}, want: 2, by: []int{1, 4}},
		{name: "cut off", ranks: []Failure{noted(died(0, 1), -1), noted(died(1, 2), -1), died(2, 3)}, want: 2},
		{name: "a rank that is none", ranks: []Failure{noted(died(0, 1), 99), died(1, 2)}, want: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := judge(c.ranks, 5)
			require.NotNil(t, f)
			require.Equal(t, c.want, f.Rank)
			require.Equal(t, c.by, f.NamedBy)
			if c.said != "" {
				require.Equal(t, c.said, f.Said)
			}
		})
	}
	require.Nil(t, judge([]Failure{alive(0, stateRunning)}, 1))
}

func TestCrash(t *testing.T) {
	var c crash
	for _, line := range []string{"panic is no panic", "Traceback (most recent call last):", "  File x", "KeyError: 3"} {
		c.line(line)
	}
	require.Equal(t, "KeyError: 3", c.why)
	c.line("panic: at last\r")
	c.line("\tpanic: again")
	require.Equal(t, "panic: at last", c.why)
	for range 2 * tailLines {
		c.line("x")
	}
	require.Len(t, c.head, tailLines)
	require.Equal(t, []string{"panic: at last", "\tpanic: again"}, c.head[:2])
	// Of a long traceback the line that says what happened is kept.
	c.line("Traceback (most recent call last):")
	for range 2 * tailLines {
		c.line("  File x")
	}
	c.line("KeyError: 3")
	require.Len(t, c.head, tailLines)
	require.Equal(t, "KeyError: 3", c.head[tailLines-1])
}
