package blame

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// said reads what ranks have answered about collective number 1 (the second), rank after rank with " | " between them:
//
//	w1 2ms 244, 3 -1s | mute | idle
//
// Rank 0 waits for rank 1, whose answers take 2 ms, and 244 KiB a second move between them. Rank 3 has not answered
// rank 0 for 1 s. Rank 1 answers nobody. Rank 2 has not called the operation and waits for nobody. A rank that is
// "done" has done its part. One that has "left" is gone. PyTorch's ranks are "foreign". A rank of which nothing is
// known is ".".
func said(t *testing.T, text string) (all []transport.Health) {
	t.Helper()
	for rank, text := range strings.Split(text, " | ") {
		h := transport.Health{Rank: rank, Native: true, Answered: true, Issued: 2, Completed: 1, Op: transport.NoOp}
		switch text {
		case ".":
		case "mute":
			h = transport.Health{Rank: rank, Native: true}
		case "left":
			h = transport.Health{Rank: rank, Departed: true}
		case "foreign":
			h = transport.Health{Rank: rank}
		case "idle":
			h.Issued = 1
		case "done":
			h.Issued, h.Completed = 3, 2
		default:
			for _, text := range strings.Split(text, ", ") {
				h.Links = append(h.Links, link(t, text))
			}
		}
		all = append(all, h)
	}
	return all
}

// link reads one link of said.
func link(t *testing.T, text string) (l transport.Link) {
	t.Helper()
	words := strings.Fields(text)
	peer, waits := strings.CutPrefix(words[0], "w")
	n := must.Get(strconv.Atoi(peer))
	l.Peer, l.Waits = n, waits
	if len(words) > 1 {
		d := must.Get(time.ParseDuration(words[1]))
		l.Answered, l.RTT, l.Silent = d > 0, max(d, 0), max(-d, 0)
	}
	if len(words) > 2 {
		kilo := must.Get(strconv.Atoi(words[2]))
		l.Rate = uint64(kilo) << 10
	}
	return l
}

// String is what a table of tests expects of a verdict.
func (v Verdict) String() string {
	who := fmt.Sprintf("rank %d", v.Rank)
	switch {
	case v.Other >= 0:
		who = fmt.Sprintf("link %d-%d", v.Rank, v.Other)
	case v.Rank < 0:
		who = "nobody"
	}
	if v.weak {
		who = "weak, " + who
	}
	return who + ": " + v.Why
}

// heard returns the evidence of a rank that has asked so often and always got the same answers. Hosts has the host of
// each rank, nil if each is on one of its own.
func heard(t *testing.T, self int, hosts []int, text string, rounds int) *evidence {
	e := &evidence{self: self, silentFrom: 600 * time.Millisecond, call: Call{Collective: true, Number: 1, Peer: -1}}
	e.hosts = hosts
	for range rounds {
		e.hear(said(t, text))
	}
	return e
}

// TestJudge: what answers show, and whom they blame.
func TestJudge(t *testing.T) {
	hosts := []int{0, 0, 1, 1, 2}
	for _, c := range []struct {
		name  string
		self  int
		hosts []int
		said  string
		want  string // how the verdict begins
	}{
		{"a rank answers nobody", 0, nil,
			"w1 -1s | mute | w1 -1s",
			"rank 1: rank 1 does not answer"},
		{"others have not said so yet", 0, nil,
			"w1 -1s | mute | .",
			"weak, rank 1: rank 1 does not answer"},
		{"a silent rank, and one that is idle", 0, nil,
			"w1 -1s | mute | idle",
			"weak, rank 1: rank 1 does not answer (stopped or unreachable); rank 2 has not called it"},
		{"nobody answers", 0, nil,
			"w1 -1s, w2 -1s | mute | mute",
			"weak, rank 0: no other rank answers this one: its network does not work"},
		{"own link", 2, nil,
			"1 1ms | mute | w1 -2.1s",
			"link 1-2: no data for 2.1 s, both alive"},
		{"own link, too early to say", 2, nil,
			"1 1ms | mute | w1 -300ms",
			"weak, link 1-2: no data for 0.3 s, both alive"},
		{"another link", 2, nil,
			"w1 -1s | w0 -1s | w1 1ms",
			"link 0-1: no data for 1.0 s, both alive"},
		{"a late answer on another link", 2, nil,
			"w1 -1s, w2 1ms | 0 1ms, w2 1ms | w1 1ms",
			"nobody: ranks 1, 2 wait for each other"},
		{"one is idle", 0, nil,
			"w1 1ms | w2 1ms | idle",
			"rank 2: rank 2 has not called it"},
		{"one is idle behind a broken link", 3, nil,
			"w2 -1s | w2 1ms | idle | w2 1ms",
			"link 0-2: no data for 1.0 s, both alive"},
		{"the end of the chain", 0, nil,
			"w1 1ms | w2 1ms | .",
			"rank 2: rank 2 did not send or receive what was expected"},
		{"the chain leads to PyTorch", 0, nil,
			"w1 1ms | w2 | foreign",
			"rank 2: rank 2 did not send"},
		{"one is idle, and has moved data", 0, nil,
			"2 1ms 244 | w0 1ms | idle",
			"nobody: " + "rank 2 has not called it: it has issued 1 collectives, this is number 1" +
				"\nranks 0 and 1: answers take 1ms, rank 1 waits"},
		{"one is idle, and others move data", 0, nil,
			"1 1ms 244 | w2 1ms | idle",
			"rank 2: rank 2 has not called it"},
		{"a circle", 0, nil,
			"w1 1ms | w2 1ms | w0 1ms",
			"nobody: ranks 0, 1, 2 wait for each other"},
		{"a slow link", 3, nil,
			"w1 -1s 244, 2 1ms | w0 -1s 244, 2 1ms | w1 1ms | w0 1ms",
			"nobody: " + noneMissing +
				"\nranks 0 and 1: answers take 1s, 244 KiB/s, both wait" +
				"\nranks 0 and 2: answers take 1ms" +
				"\nranks 0 and 3: answers take 1ms, rank 3 waits" +
				"\nranks 1 and 2: answers take 1ms, rank 2 waits"},
		{"a slow link, or one of its ranks", 0, nil,
			"w2 -1s 244, 1 1ms | . | w0 -1s 244",
			"nobody: " + noneMissing},
		{"no other link", 0, nil,
			"w1 -1s 244 | w0 -1s 244",
			"nobody: " + noneMissing},
		{"a slow rank, by its answers", 3, nil,
			"w1 -1s 244 | w0 -1s 244 | 1 60ms, 0 1ms | 0 1ms, w2 1ms",
			"nobody: " + noneMissing},
		{"a slow rank, while all links move", 1, nil,
			"1 1ms 244, 3 8ms 244 | 0 1ms 244, w2 -1s 244, 3 1ms 244 | mute | 0 1ms 244, 2 120ms 244",
			"nobody: " + noneMissing +
				"\nranks 1 and 2: answers take 1s, 244 KiB/s, rank 1 waits" +
				"\nranks 2 and 3: answers take 120ms, 244 KiB/s" +
				"\nranks 0 and 3: answers take 8ms, 244 KiB/s" +
				"\nranks 0 and 1: answers take 1ms, 244 KiB/s" +
				"\nother pairs: answers take 1ms at most"},
		{"a slow rank with a link that stands still", 3, nil,
			"1 90ms 244, 2 1ms | 0 90ms 244, w2 -1s | w1 -1s | 0 1ms, 2 1ms",
			"nobody: " + noneMissing},
		{"this rank is slow, others hear the silent one", 1, nil,
			"2 2ms, 1 300ms | 0 300ms, w2 -1s | mute",
			"nobody: " + noneMissing +
				"\nranks 1 and 2: answers take 1s, rank 1 waits" +
				"\nranks 0 and 1: answers take 300ms" +
				"\nranks 0 and 2: answers take 2ms"},
		{"this rank is slow, one does not answer yet", 1, nil,
			"1 300ms, 3 1ms | 0 300ms, w2 -1s, 3 270ms | mute | 0 1ms",
			"weak, nobody: " + noneMissing},
		{"all ranks are slow, one is stopped", 1, nil,
			"1 300ms, w2 -1s | 0 300ms, w2 -1s | mute",
			"rank 2: rank 2 does not answer"},
		{"all ranks are slow, a link is broken", 1, nil,
			"2 200ms, 1 300ms | 0 300ms, w2 -1s | mute",
			"nobody: " + noneMissing},
		{"a slow rank that no answer reaches", 0, nil,
			"w1 -1s 244, w2 -1s | mute | mute",
			"weak, nobody: " + noneMissing},
		{"a slow link of two ranks", 0, []int{0, 0, 1, 2},
			"w2 -1s 244, 3 1ms | w2 -1s 244, 3 1ms | w0 -1s 244, w1 -1s 244 | 2 1ms",
			"nobody: " + noneMissing},
		{"a rank that waits in memory", 0, hosts,
			"w3 1ms | . | w4 1ms | . | w2 1ms",
			"nobody: ranks 2, 4 wait for each other"},
		{"a rank that waits in memory for one that left", 0, hosts,
			"w3 1ms | . | left | . | .",
			"rank 2: rank 2 has left"},
		{"a link cut, behind a rank in memory", 0, hosts,
			"w3 1ms | . | w4 -1s | . | w2 -1s",
			"link 2-4: no data for 1.0 s, both alive"},
		{"this rank waits in memory", 0, hosts,
			". | w2 1ms | . | w4 -1s | w3 -1s",
			"link 3-4: no data for 1.0 s, both alive"},
		{"this rank waits in memory, and one left", 0, hosts,
			". | w4 1ms | . | . | left",
			"rank 4: rank 4 has left"},
		{"a rank that has done its part", 0, nil,
			"w1 1ms | done | w0 1ms",
			"rank 1: rank 1 did not send or receive what was expected"},
		{"a rank that has done its part, beside one that has not", 0, nil,
			"w1 1ms, w2 1ms | done | .",
			"rank 2: rank 2 did not send or receive what was expected"},
		{"a silent link of a slow rank", 1, nil,
			"1 1ms | 0 1ms, 3 300ms | w3 -1s | w2 -1s",
			"nobody: " + noneMissing},
		{"a silent link of the second rank of a slow host", 4, hosts,
			"w3 -1s | 4 1ms | 4 300ms | w0 -1s | 1 1ms, 2 300ms",
			"nobody: " + noneMissing},
		{"own link to a slow rank", 3, nil,
			"w1 -1s, 2 1ms | mute | w1 -1s 244 | w1 -1s, 0 1ms, 2 1ms",
			"nobody: " + noneMissing},
		{"a slow host that no answer reaches", 0, hosts,
			"1 1ms, w2 -1s 244, w4 -1s 244 | 0 1ms, w2 -1s | mute | mute | mute",
			"weak, nobody: " + noneMissing},
		{"one host of two is stopped", 0, []int{0, 0, 1, 1},
			"1 1ms, w2 -1s, w3 -1s | 0 1ms, w2 -1s, w3 -1s | mute | mute",
			"rank 2: rank 2 does not answer"},
		{"the first rank of a slow host, whose other rank moves data", 2, hosts,
			"mute | mute | w0 -1s, w1 -1s, 3 1ms, w4 -1s | w0 -1s 244, w1 -1s 244, w4 -1s | mute",
			"weak, nobody: " + noneMissing},
		{"the quiet rank of a slow host, whose other rank moves data", 3, []int{0, 0, 1, 2},
			"mute | mute | w0 -820ms, w1 -820ms 142 | w0 -865ms, w1 -865ms 85, 2 1ms",
			"weak, nobody: " + noneMissing},
		{"own link, and a rank that has not answered yet", 2, []int{0, 0, 1, 2},
			"mute | w3 1ms | w0 1ms, 1 1ms, w3 -1.2s | mute",
			"link 2-3: no data for 1.2 s, both alive"},
		{"a silent link on a machine that is a bit late", 1, nil,
			"1 1ms | 0 1ms, 3 30ms | w3 -1s | w2 -1s",
			"link 2-3: no data for 1.0 s, both alive"},
		{"a silent link on a machine that is late, as data move", 1, nil,
			"w2 -1s, 1 34ms 244 | 0 47ms 244, w2 1ms, 3 9ms 244 | w0 -1s | 0 47ms, 2 1ms",
			"nobody: " + noneMissing},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := heard(t, c.self, c.hosts, c.said, 2*leastRounds).judge().String()
			require.Truef(t, strings.HasPrefix(got, c.want), "got %q\nwant %q", got, c.want)
		})
	}
}

// TestSure: a rank in a collective may be between two messages if it waits for no rank. It takes all rounds to
// blame it. A rank that does not send a message is blamed sooner. One in an earlier operation is blamed later: it may
// be about to say for whom it waited there.
func TestSure(t *testing.T) {
	for name, c := range map[string]struct {
		issued, completed uint64
		collective        bool
		sure, weak        bool
	}{
		"in an earlier operation": {1, 0, true, false, true},
		"in this operation":       {2, 1, true, false, false},
		"a message does not come": {2, 1, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := heard(t, 0, nil, "w1 1ms | .", 1)
			e.call.Collective, e.call.Peer = c.collective, 1
			e.health[1].Issued, e.health[1].Completed = c.issued, c.completed
			e.hear(e.health)
			v := e.judge()
			require.Equal(t, 1, v.Rank, v.Why)
			require.Equal(t, c.sure, v.sure)
			require.Equal(t, c.weak, v.weak)
			for e.round < idleRounds {
				e.hear(e.health)
			}
			require.False(t, e.judge().weak)
		})
	}
}

// TestWords: a table fits into what other ranks are told.
func TestWords(t *testing.T) {
	const n = 40
	var links []string
	for r := 1; r < n; r++ {
		links = append(links, fmt.Sprintf("w%d -%dms 99999999", r, 900000+r))
	}
	e := heard(t, 0, nil, strings.Join(links, ", ")+strings.Repeat(" | .", n-1), 1)
	f := transport.NewFault(transport.FaultTimeout, -1, 0, fmt.Errorf("timed out after 30m0s; %s", e.judge().Why))
	require.Contains(t, f.Words(), "; other pairs: answers take")
	require.Less(t, len(f.Words()), transport.MaxWords)
}

// TestWaiting: for whom a rank waits, while there is time.
func TestWaiting(t *testing.T) {
	collective := Call{Op: work.AllReduce, Collective: true, Number: 1, Peer: -1}
	send, recv := Call{Op: work.Send, Peer: 1, Tag: 7}, Call{Op: work.Recv, Peer: 2, Tag: 7}
	for _, c := range []struct {
		call   Call
		checks bool
		said   string
		want   string
		each   []string
	}{
		{collective, false, ". | idle | mute", "all_reduce waits for ranks 1 and 2",
			[]string{
				"rank 1 has not called it: it has issued 1 collectives, this is number 1",
				"rank 2 does not answer (stopped or unreachable)",
			}},
		{collective, true, ". | idle | .", "all_reduce waits for rank 1", []string{"rank 1 has not called it"}},
		{collective, false, ". | . | left", "all_reduce takes long; every rank has called it", nil},
		{collective, false, ". | foreign | .",
			"all_reduce waits for one of rank 1, which cannot say how far they are (PyTorch)", nil},
		{send, false, ". | . | mute", "send waits for rank 1", []string{"rank 1 has not received it (tag 7)"}},
		{recv, false, ". | mute | .", "recv waits for rank 2", []string{"rank 2 has not sent it (tag 7)"}},
		{recv, false, ". | . | left", "recv waits for rank 2", []string{"rank 2 has left the group"}},
	} {
		text, ranks, each := Waiting(c.call, 0, c.checks, said(t, c.said))
		assert.Equal(t, c.want, text)
		assert.Equal(t, c.each, each)
		assert.Len(t, ranks, len(each))
	}
}
