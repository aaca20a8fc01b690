package tcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

// slotOf is a slot of an operation.
func slotOf(number uint32) uint64 { return 4<<56 | uint64(number)<<24 }

// what is a call that comes first.
func what(a, b uint64) transport.Call { return transport.Call{What: [2]uint64{a, b}} }

func TestAgree(t *testing.T) {
	c := new(calls)
	say := func(number uint32, rank int, w uint64, op uint8) *transport.Fault {
		return c.agree(0, knownCall{number: number, rank: rank, call: what(w, 1), op: op, seq: uint64(number) + 100})
	}
	require.Nil(t, say(0, 1, 5, transport.NoOp), "a peer comes first")
	require.Zero(t, c.behind(slotOf(0)), "that is not this rank's call")
	require.Nil(t, say(0, 0, 5, 1))
	require.Equal(t, what(5, 1), c.behind(slotOf(0)))
	require.Zero(t, c.behind(0), "a single message")
	require.Zero(t, c.behind(slotOf(rememberCalls)), "another operation in the same place")
	require.Nil(t, say(0, 2, 5, transport.NoOp))

	f := say(0, 2, 6, transport.NoOp)
	require.Equal(t, transport.FaultMismatch, f.Kind)
	require.Equal(t, []any{2, 0, uint8(1), uint64(100)}, []any{f.Rank, f.Reporter, f.Op, f.Seq})
	require.ErrorContains(t, f, "as collective number 0 rank 0 called [0x5 0x1], rank 2 called [0x6 0x1]")

	require.Nil(t, say(7, 1, 5, transport.NoOp))
	f = say(7, 2, 6, transport.NoOp)
	require.Equal(t, []any{2, uint8(transport.Uncalled)}, []any{f.Rank, f.Op}, "two others disagree")
	f = say(7, 0, 6, 3)
	require.Equal(t, []any{1, uint8(3), uint64(107)}, []any{f.Rank, f.Op, f.Seq}, "this rank is the last to call")

	require.Nil(t, say(rememberCalls, 0, 6, 1))
	require.Nil(t, say(0, 2, 7, transport.NoOp), "too long ago to be known")
	require.Nil(t, c.agree(0, knownCall{number: rememberCalls, rank: 1}), "a message that says nothing")

	require.Nil(t, say(1<<32-1, 1, 5, transport.NoOp), "older, for numbers go round")
	require.Equal(t, uint32(rememberCalls), c.known[0].number)
}

// Ranks that disagree fail at their first message of any kind, with the same text on all of
// them. Ranks that only wait fail once one has announced its call.
func TestDisagreeingMeshes(t *testing.T) {
	for _, n := range []int{0, 100, 1 << 20} {
		for _, how := range []string{"sender first", "receiver first", "receiver only", "both wait"} {
			t.Run(fmt.Sprint(n, " ", how), func(t *testing.T) {
				ms := join(t, 3, polling())
				for _, m := range ms {
					m.Describe(func(what [2]uint64) string { return fmt.Sprintf("«%d»", what[1]) })
				}
				ms[0].Enter(4, what(1, 10), 2, 20)
				switch how {
				case "sender first":
					send(ms[0], 1, slotOf(4), make([]byte, n))
					ms[1].Enter(4, what(1, 11), 3, 21)
				case "receiver first":
					ms[1].Enter(4, what(1, 11), 3, 21)
					recv(ms[1], 0, slotOf(5), make([]byte, n))
					send(ms[0], 1, slotOf(4), make([]byte, n))
				case "receiver only":
					ms[1].Enter(4, what(1, 11), 3, 21)
					recv(ms[0], 1, slotOf(4), make([]byte, n))
					ms[0].Announce(1, 4)
				case "both wait":
					recv(ms[0], 1, slotOf(4), make([]byte, n))
					ms[0].Announce(1, 4)
					ms[1].Enter(4, what(1, 11), 3, 21)
					recv(ms[1], 0, slotOf(4), make([]byte, n))
					ms[1].Announce(0, 4)
				}
				for r, m := range ms {
					f := failed(t, m)
					require.Equal(t, transport.FaultMismatch, f.Kind, "rank %d: %v", r, f)
					require.ErrorContains(t, f, "disagree on the operation: as collective number 4", "rank %d", r)
					require.ErrorContains(t, f, "rank 0 called «10»", "rank %d", r)
					require.ErrorContains(t, f, "rank 1 called «11»", "rank %d", r)
				}
			})
		}
	}
}

// An announcement without a call, or to no rank, does no harm.
func TestAnnounceNothing(t *testing.T) {
	ms := join(t, 2)
	ms[0].Announce(1, 9)
	ms[0].Enter(9, what(1, 1), 0, 0)
	for _, peer := range []int{-1, 0, 1, 2} {
		ms[0].Announce(peer, 9)
	}
	ms[1].Enter(9, what(1, 1), 0, 0)
	require.NoError(t, wait(t, send(ms[0], 1, slotOf(9), nil)))
	require.NoError(t, wait(t, recv(ms[1], 0, slotOf(9), nil)))
	require.Nil(t, ms[1].Fault())
	require.NoError(t, ms[0].Close())
	ms[0].Announce(1, 9)
}

// The words of an ABORT are bounded, and fit to print.
func TestWordsOfAbort(t *testing.T) {
	f := &transport.Fault{Kind: transport.FaultMismatch, Rank: 1, Err: errors.New("a\x1b[31m" + strings.Repeat("é", maxWords))}
	it := abortItem(f)
	require.LessOrEqual(t, len(it.req.Buf), maxWords)
	h := must.Get(parseFrame(raw(it.f)))
	require.EqualValues(t, len(it.req.Buf), h.call.What[0])
	told := must.Get(parseAbort(h, it.req.Buf, 2))
	require.True(t, strings.HasPrefix(told.Err.Error(), "a?[31mé"), told.Err)
	require.Nil(t, abortItem(&transport.Fault{Kind: transport.FaultAborted}).req)

	m, _, c := alone(t)
	put(t, c, it.f, it.req.Buf[:5])
	c.Close()
	require.Equal(t, transport.FaultPeerDied, failed(t, m).Kind, "cut off")
}

// history makes the calls with these words, one after the other.
func history(words ...uint64) []transport.Call {
	var all []transport.Call
	var last transport.Call
	for _, w := range words {
		c := what(w, 0)
		c.Follow(last.What, last.History)
		all, last = append(all, c), c
	}
	return all
}

func enter(m *Mesh, first uint32, calls []transport.Call) {
	for i, c := range calls {
		m.Enter(first+uint32(i), c, 1, uint64(i))
	}
}

// Ranks whose last call is the same have not always called the same before.
func TestHistoryDiffers(t *testing.T) {
	for name, tc := range map[string]struct {
		other []uint64
		want  string
	}{
		"the call before": {[]uint64{1, 3, 9}, "transport: the ranks disagree on the operation: as collective number 1 rank 0 called [0x2 0x0], rank 1 called [0x3 0x0]"},
		"one long ago":    {[]uint64{4, 2, 9}, "transport: the ranks disagree on an operation: rank 0 and rank 1 both called [0x9 0x0] as collective number 2, but an earlier call of theirs differs"},
	} {
		t.Run(name, func(t *testing.T) {
			ms := join(t, 2)
			enter(ms[0], 0, history(1, 2, 9))
			enter(ms[1], 0, history(tc.other...))
			send(ms[0], 1, slotOf(2), nil)
			for _, m := range ms {
				require.ErrorContains(t, failed(t, m), tc.want)
			}
		})
	}
}

// soon returns a context that ends in a millisecond.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestSettle(t *testing.T) {
	settle := func(t *testing.T, m *Mesh) <-chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.CompareCalls(t.Context())
		}()
		return done
	}
	disagree := func(t *testing.T, ms []*Mesh, number int, one, other uint64) {
		t.Helper()
		for r, m := range ms {
			require.ErrorContains(t, failed(t, m), fmt.Sprintf("as collective number %d rank 0 called [%#x 0x0], rank 1 called [%#x 0x0]", number, one, other), "rank %d", r)
		}
	}
	t.Run("nothing called", func(t *testing.T) {
		join(t, 2)[0].CompareCalls(t.Context())
	})
	t.Run("all alike", func(t *testing.T) {
		ms := join(t, 3)
		for _, m := range ms {
			enter(m, 0, history(1, 2, 3))
		}
		for _, m := range ms {
			m.CompareCalls(t.Context())
		}
		for _, m := range ms {
			require.Nil(t, m.Fault())
		}
	})
	t.Run("one comes later", func(t *testing.T) {
		ms := join(t, 2)
		calls := history(1, 2, 3)
		enter(ms[0], 0, calls)
		enter(ms[1], 0, calls[:2])
		done := settle(t, ms[0])
		for asked := false; !asked; {
			ms[1].Mu.Lock()
			asked = ms[1].pairs[0].asked.ok
			ms[1].Mu.Unlock()
		}
		enter(ms[1], 2, calls[2:])
		<-done
		require.Nil(t, ms[0].Fault())
		require.Zero(t, ms[1].asking)
	})
	t.Run("one called something else", func(t *testing.T) {
		ms := join(t, 3)
		enter(ms[0], 0, history(1, 2))
		enter(ms[1], 0, history(1, 3))
		enter(ms[2], 0, history(1, 2))
		ms[0].CompareCalls(t.Context())
		disagree(t, ms, 1, 2, 3)
	})
	t.Run("one that is behind called something else", func(t *testing.T) {
		ms := join(t, 2)
		enter(ms[0], 0, history(1, 2))
		enter(ms[1], 0, history(5))
		ms[0].CompareCalls(t.Context())
		disagree(t, ms, 0, 1, 5)
	})
	t.Run("one that is ahead called something else", func(t *testing.T) {
		ms := join(t, 2)
		enter(ms[0], 0, history(1))
		enter(ms[1], 0, history(5, 6, 7))
		ms[0].CompareCalls(t.Context())
		disagree(t, ms, 0, 1, 5)
	})
	t.Run("one never calls", func(t *testing.T) {
		ms := join(t, 2)
		enter(ms[0], 0, history(1))
		ms[0].CompareCalls(soon(t))
		require.Nil(t, ms[0].Fault())
		require.NoError(t, ms[0].Close())
		enter(ms[1], 0, history(1))
		require.Nil(t, ms[1].Fault())
	})
	t.Run("one calls something else when the other has closed", func(t *testing.T) {
		ms := join(t, 2)
		enter(ms[0], 0, history(1))
		ms[0].CompareCalls(soon(t))
		require.NoError(t, ms[0].Close())
		for gone := false; !gone; {
			ms[1].Mu.Lock()
			gone = ms[1].pairs[0].Gone != nil
			ms[1].Mu.Unlock()
		}
		enter(ms[1], 0, history(2))
		disagree(t, ms[1:], 0, 1, 2)
	})
	t.Run("one leaves", func(t *testing.T) {
		ms := join(t, 2)
		enter(ms[0], 0, history(1))
		done := settle(t, ms[0])
		require.NoError(t, ms[1].Close())
		<-done
		require.Nil(t, ms[0].Fault())
	})
}
