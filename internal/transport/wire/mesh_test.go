package wire

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestReservedSlots: programs cannot use the slots of control messages.
func TestReservedSlots(t *testing.T) {
	ms, b := group(t, 2), make([]byte, 1)
	require.ErrorContains(t, wait(t, send(ms[0], 1, 0xC1<<56, b)), "reserved")
	require.ErrorContains(t, wait(t, recvAny(ms[0], 0xC1<<56|7, b)), "reserved")
	require.Nil(t, ms[0].Fault())
}

func TestRequestsBeforeConnection(t *testing.T) {
	a, b := New(0, 2, Options{}), New(1, 2, Options{})
	defer a.Close()
	defer b.Close()
	in := make([]byte, 5)
	s, r := send(a, 1, 1, []byte("early")), recv(b, 0, 1, in)
	x, y := tcpPair(t)
	require.NoError(t, a.Attach(1, x))
	require.NoError(t, b.Attach(0, y))
	require.NoError(t, wait(t, s))
	require.NoError(t, wait(t, r))
	require.Equal(t, "early", string(in))

	x, y = tcpPair(t)
	defer y.Close()
	require.ErrorContains(t, a.Attach(1, x), "connected already")
}

// A rank of this library that stops before it has said hello counts as one that does not answer.
func TestSilentBeforeHello(t *testing.T) {
	for _, all := range []bool{true, false} {
		m := New(0, 2, Options{Native: all})
		x, y := tcpPair(t)
		require.NoError(t, m.Attach(1, x))
		h := m.Diagnose(time.Millisecond)[1]
		require.Equal(t, all, h.Native)
		require.False(t, h.Answered)
		y.Close()
		m.Close()
	}
}

// Receives from any rank take messages in the order of their announcement.
func TestRecvAnyOrder(t *testing.T) {
	ms := group(t, 3)
	in := make([]byte, 1)
	noticed := func(n int) func() bool {
		return func() bool { _, k := state(ms[0]); return k == n }
	}
	b := send(ms[2], 0, 5, []byte{2})
	eventually(t, "first notice", noticed(1))
	c := send(ms[1], 0, 5, []byte{3})
	eventually(t, "second notice", noticed(2))
	for _, want := range []struct{ peer, value int }{{2, 2}, {1, 3}} {
		r := recvAny(ms[0], 5, in)
		require.NoError(t, wait(t, r))
		require.Equal(t, want.peer, r.Peer)
		require.Equal(t, want.value, int(in[0]))
	}
	require.NoError(t, wait(t, b))
	require.NoError(t, wait(t, c))
}

// Slots are forgotten once they are empty, whichever side came first.
func TestSlotsAreForgotten(t *testing.T) {
	ms := group(t, 2)
	b := make([]byte, 1)
	for slot := range uint64(1000) {
		s := send(ms[0], 1, slot, b)
		require.NoError(t, wait(t, recv(ms[1], 0, slot, b)))
		require.NoError(t, wait(t, s))
	}
	for _, m := range ms {
		slots, notices := state(m)
		require.Zero(t, slots)
		require.Zero(t, notices)
	}
}
