package tcp

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo/transport"
)

// slotOf is a slot of an operation.
func slotOf(number uint32) uint64 { return 4<<56 | uint64(number)<<24 }

func TestAgree(t *testing.T) {
	c := new(calls)
	say := func(number uint32, rank int, w uint64, op uint8) *transport.Fault {
		return c.agree(0, known{number: number, rank: rank, call: Call{w, 1}, op: op, seq: uint64(number) + 100})
	}
	require.Nil(t, say(0, 1, 5, noOp), "a peer comes first")
	require.Zero(t, c.of(slotOf(0)), "that is not this rank's call")
	require.Nil(t, say(0, 0, 5, 1))
	require.Equal(t, Call{5, 1}, c.of(slotOf(0)))
	require.Zero(t, c.of(0), "a single message")
	require.Zero(t, c.of(slotOf(rememberCalls)), "another operation in the same place")
	require.Nil(t, say(0, 2, 5, noOp))

	f := say(0, 2, 6, noOp)
	require.Equal(t, transport.FaultMismatch, f.Kind)
	require.Equal(t, []any{2, 0, uint8(1), uint64(100)}, []any{f.Rank, f.Reporter, f.Op, f.Seq})
	require.ErrorContains(t, f, "as collective number 0 rank 2 called [0x6 0x1], rank 0 called [0x5 0x1]")

	require.Nil(t, say(7, 1, 5, noOp))
	f = say(7, 2, 6, noOp)
	require.Equal(t, []any{2, uint8(noOp)}, []any{f.Rank, f.Op}, "two others disagree")
	f = say(7, 0, 6, 3)
	require.Equal(t, []any{1, uint8(3), uint64(107)}, []any{f.Rank, f.Op, f.Seq}, "this rank is the last to call")

	require.Nil(t, say(rememberCalls, 0, 6, 1))
	require.Nil(t, say(0, 2, 7, noOp), "too long ago to be known")
	require.Nil(t, c.agree(0, known{number: rememberCalls, rank: 1}), "a message that says nothing")

	require.Nil(t, say(1<<32-1, 1, 5, noOp), "older, for numbers go round")
	require.Equal(t, uint32(rememberCalls), c.known[0].number)
}

// Ranks that disagree fail at their first message, of every kind, whoever comes first, with
// the same words on all of them; and those that only wait do once one has announced itself.
func TestDisagreeingMeshes(t *testing.T) {
	for _, n := range []int{0, 100, 1 << 20} {
		for _, how := range []string{"sender first", "receiver first", "receiver only", "both wait"} {
			t.Run(fmt.Sprint(n, " ", how), func(t *testing.T) {
				ms := join(t, 3, polling())
				for _, m := range ms {
					m.Describe(func(c Call) string { return fmt.Sprintf("«%d»", c[1]) })
				}
				ms[0].Enter(4, Call{1, 10}, 2, 20)
				switch how {
				case "sender first":
					send(ms[0], 1, slotOf(4), make([]byte, n))
					ms[1].Enter(4, Call{1, 11}, 3, 21)
				case "receiver first":
					ms[1].Enter(4, Call{1, 11}, 3, 21)
					recv(ms[1], 0, slotOf(5), make([]byte, n))
					send(ms[0], 1, slotOf(4), make([]byte, n))
				case "receiver only":
					ms[1].Enter(4, Call{1, 11}, 3, 21)
					recv(ms[0], 1, slotOf(4), make([]byte, n))
					ms[0].Announce(1, 4)
				case "both wait":
					recv(ms[0], 1, slotOf(4), make([]byte, n))
					ms[0].Announce(1, 4)
					ms[1].Enter(4, Call{1, 11}, 3, 21)
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

// What is announced in vain, or to nobody, does no harm.
func TestAnnounceNothing(t *testing.T) {
	ms := join(t, 2)
	ms[0].Announce(1, 9)
	ms[0].Enter(9, Call{1, 1}, 0, 0)
	for _, peer := range []int{-1, 0, 1, 2} {
		ms[0].Announce(peer, 9)
	}
	ms[1].Enter(9, Call{1, 1}, 0, 0)
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
	h, err := parseFrame(raw(it.f))
	require.NoError(t, err)
	require.EqualValues(t, len(it.req.Buf), h.call[0])
	told, err := parseAbort(h, it.req.Buf, 2)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(told.Err.Error(), "a?[31mé"), told.Err)
	require.Nil(t, abortItem(&transport.Fault{Kind: transport.FaultAborted}).req)

	m, _, c := alone(t)
	put(t, c, it.f, it.req.Buf[:5])
	c.Close()
	require.Equal(t, transport.FaultPeerDied, failed(t, m).Kind, "cut off")
}
