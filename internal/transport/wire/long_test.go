package wire

import (
	"io"
	"net"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// A long question is answered, and so is the one that it causes. Neither counts as messages, and messages
// between them count in full.
func TestLongQuestion(t *testing.T) {
	ms := group(t, 3)
	for _, m := range ms { // HELLOs may still be on their way
		eventually(t, "everybody answers", func() bool {
			return !slices.ContainsFunc(m.Diagnose(patience), func(h transport.Health) bool { return !h.Answered })
		})
	}
	const n = 100_000
	message := func() {
		s, r := send(ms[0], 2, 9, make([]byte, n)), recv(ms[2], 0, 9, make([]byte, n))
		require.NoError(t, wait(t, s))
		require.NoError(t, wait(t, r))
	}
	message()
	for range 5 {
		h := ms[0].DiagnoseLink(patience, 0, 1, 2)
		require.NotZero(t, transporttest.LongOf(h, 0, 2))
	}
	eventually(t, "rank 2 has asked rank 1", func() bool { return transporttest.LongOf(ms[0].DiagnoseLink(patience, 0, 1, 2), 2, 1) > 0 })
	message()
	ms[2].Mu.Lock()
	got, none := ms[2].pairs[0].got.Load(), ms[2].pairs[1].got.Load()
	ms[2].Mu.Unlock()
	require.EqualValues(t, 2*(n+2*headerLen), got, "SEND_READY and DATA, twice")
	require.Zero(t, none)
}

// Ranks whose HELLO has version 3 get PINGs of round 0, which ask them nothing, before the PING. Ranks of
// PyTorch get nothing.
func TestLongQuestionToOthers(t *testing.T) {
	m := New(0, 3, Options{})
	defer m.Close()
	var peers [3]net.Conn
	for r := 1; r < 3; r++ {
		a, b := tcpPair(t)
		defer b.Close()
		require.NoError(t, m.Attach(r, a))
		next(t, b) // HELLO
		peers[r] = b
	}
	old := helloHeader()
	old.length = 3
	put(t, peers[1], old)
	put(t, peers[2], note(opSendReady, 7, 3))
	eventually(t, "both are known", func() bool {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		return m.pairs[1].known && m.pairs[2].known
	})
	health := make(chan []transport.Health)
	go func() { health <- m.DiagnoseLink(patience, 1, 2, 1, 2) }()
	zeros := 0
	ping := next(t, peers[1])
	for ; ping.offset == 0; ping = next(t, peers[1]) {
		require.Equal(t, control(ctlPing), ping)
		zeros++
	}
	require.GreaterOrEqual(t, zeros*headerLen, mesh.LongBytes)
	pong := control(ctlPong)
	pong.offset = ping.offset
	put(t, peers[1], pong)
	h := <-health
	require.NotZero(t, transporttest.LongOf(h, 0, 1))
	require.Zero(t, transporttest.LongOf(h, 0, 2))
	require.False(t, h[2].Native)
	require.NoError(t, m.Close())
	rest, err := io.ReadAll(peers[2])
	require.NoError(t, err)
	require.Equal(t, raw(control(ctlBye)), rest)
}

// The writer has taken padding with the message before it when the mesh fails. ABORT does not wait behind the
// padding.
func TestNoPaddingAtTheEnd(t *testing.T) {
	m := New(0, 2, Options{})
	defer m.Close()
	a, b := net.Pipe()
	defer b.Close()
	require.NoError(t, m.Attach(1, a))
	next(t, b) // HELLO
	put(t, b, helloHeader())
	eventually(t, "the peer is known", func() bool { m.Mu.Lock(); defer m.Mu.Unlock(); return m.pairs[1].known })
	ping := control(ctlPing)
	ping.offset = 3
	m.Mu.Lock()
	p := m.pairs[1]
	p.enqueue(item{h: ping})
	p.Pad()
	m.Mu.Unlock()
	got := make([]byte, headerLen)
	_, err := io.ReadFull(b, got[:1]) // the writer is in the message
	require.NoError(t, err)
	m.Abort(transport.NewFault(transport.FaultPeerDied, 1, 0, nil))
	_, err = io.ReadFull(b, got[1:])
	require.NoError(t, err)
	require.Equal(t, raw(ping), got)
	h := next(t, b)
	require.NotEqual(t, control(ctlPing), h)
	for controlCode(h.slot) == ctlWords {
		h = next(t, b)
	}
	require.EqualValues(t, ctlAbort, controlCode(h.slot))
}
