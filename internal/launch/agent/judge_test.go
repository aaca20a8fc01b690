//go:build unix

package agent

import (
	"strings"
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
	reason := func(f Failure, text string) Failure {
		f.Message = text
		return f
	}
	alive := func(rank int, state string) Failure { return Failure{Rank: rank, State: state} }
	left := func(peer string) string {
		return `work: all_reduce seq 3 on rank 0 of group "0": rank ` + peer + " left the group (noticed by rank 0)"
	}
	const (
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
		{name: "an exit code of its own before one that names it", ranks: []Failure{died(0, 1, left("1")), died(1, 9)}, want: 1, by: []int{0}, said: left("1")},
		{name: "a panic after those that name nobody", ranks: []Failure{died(0, 1), died(1, 9, goPanic, "", trace)}, want: 1},
		{name: "a traceback", ranks: []Failure{died(0, 1, python, pyClosed), died(1, 9, python, "  File x", "ValueError: on purpose")}, want: 1},
		{name: "a traceback of PyTorch's", ranks: []Failure{died(0, 1), died(1, 9, "[rank1]: "+python, "[rank1]:   File x", "[rank1]: ValueError: on purpose")}, want: 1},
		{name: "a signal after an exit code", ranks: []Failure{died(0, 1), killed(died(1, 9))}, want: 1},
		{name: "a panic with another's fault is no fault", ranks: []Failure{died(0, 1, "panic: "+left("2"), trace), died(2, 9)}, want: 2, by: []int{0}},
		{name: "calls of a panic name nobody", ranks: []Failure{died(0, 1), died(1, 9, goPanic, trace, "rank 0 died")}, want: 1},
		{name: "what groups noted before what was written", ranks: []Failure{noted(died(0, 1, left("2")), 1), died(2, 2)}, want: 1, by: []int{0}, said: "noted"},
		{name: "what groups noted before a signal", ranks: []Failure{noted(died(0, 1), 1), killed(died(2, 2)), alive(1, stateRunning)}, want: 1, by: []int{0}},
		{name: "a chain", ranks: []Failure{noted(died(0, 1), 1), noted(died(1, 2), 2), killed(died(2, 3))}, want: 2, by: []int{0, 1}, said: "noted"},
		{name: "a circle and one that is not in it", ranks: []Failure{noted(died(0, 1), 1), noted(died(1, 2), 0), noted(died(2, 3), 1)}, want: 1, by: []int{0, 2}},
		{name: "who aborts the group says so itself", ranks: []Failure{noted(died(0, 9), 0), noted(died(1, 1), 0)}, want: 0, by: []int{1}},
		{name: "a stopped rank", ranks: []Failure{died(1, 1, "rank 2 did not take part in time"), died(0, 2, left("1")), alive(2, stateStopped)}, want: 2, by: []int{0, 1}},
		{name: "a rank that left with exit code 0", ranks: []Failure{died(0, 1, left("3")), died(1, 2, left("3")), {Rank: 3, Time: begin}}, want: 3, by: []int{0, 1}},
		{name: "a rank nobody reports", ranks: []Failure{died(0, 1, "rank 3 died")}, want: 3, by: []int{0}},
		{name: "more say so", ranks: []Failure{died(0, 1, left("3")), died(1, 2, left("2")), died(4, 2, left("2"))}, want: 2, by: []int{1, 4}},
		{name: "cut off", ranks: []Failure{died(0, 1, pyClosed), died(1, 2, "read: connection reset by peer"), died(2, 3, "no such file")}, want: 2},
		{name: "ranks of another group are counted otherwise", ranks: []Failure{died(0, 1, strings.Replace(left("1"), `"0"`, `"7"`, 1)), died(3, 9)}, want: 3},
		{name: "global ranks of another group", ranks: []Failure{died(0, 1, `work: all_reduce seq 3 on rank 1 (global rank 0) of group "7" (evaluation): rank 0 (global rank 4) died (noticed by rank 1 (global rank 0))`), died(3, 9)}, want: 4, by: []int{0}},
		{name: "global ranks of a group that is not made", ranks: []Failure{died(0, 1, `pg: group "1" (evaluation), rank 1 (global rank 0) of 2: rendezvous: rank 1 (global rank 0) of 2: rank 0 (global rank 4) published no address within 1m0s`), died(3, 9)}, want: 4, by: []int{0}},
		{name: "a rank that is none", ranks: []Failure{died(0, 2, left("99")), died(1, 1)}, want: 1},
		{name: "an error file", ranks: []Failure{reason(died(0, 1), "rank 2 cancelled the operation"), died(2, 5)}, want: 2, by: []int{0}},
		{name: "the words of a rank of several", ranks: []Failure{died(0, 1, "rank 2 of 5 panicked: oops"), died(2, 5)}, want: 2, by: []int{0}},
		{name: "monitored barrier", ranks: []Failure{died(0, 1, "[Rank 0]: Rank 3 failed to pass monitoredBarrier in 1000 ms"), died(3, 5)}, want: 3, by: []int{0}},
		{name: "a log line of a wait that ended well", ranks: []Failure{
			died(0, 5, python, pyClosed),
			died(1, 1, `2026/11/23 16:09:38 WARN c10d: waiting for rank 0 to call Init group=0 rank=1 missing="rank 0 has not called Init" waited=10s`, "ddp: ranks disagree on parameter 0"),
		}, want: 1},
		{name: "rendezvous", ranks: []Failure{died(0, 1, "rank 4 published no address within 1m0s"), alive(4, stateRunning)}, want: 4, by: []int{0}},
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
