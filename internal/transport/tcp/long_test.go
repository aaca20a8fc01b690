package tcp

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport/mesh"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// A long question is answered, and so is the one that it causes. Neither counts as messages, and messages
// between them count.
func TestLongQuestion(t *testing.T) {
	ms := join(t, 3)
	sizes := []int{1000, 100_000, 3 << 20}
	total := 0
	messages := func() {
		for slot, n := range sizes {
			s, r := send(ms[0], 2, uint64(slot), make([]byte, n)), recv(ms[2], 0, uint64(slot), make([]byte, n))
			require.NoError(t, wait(t, s))
			require.NoError(t, wait(t, r))
			total += n
		}
	}
	messages()
	for range 5 {
		require.NotZero(t, transporttest.LongOf(ms[0].DiagnoseLink(patience, 0, 1, 2), 0, 2))
	}
	eventually(t, "rank 2 has asked rank 1", func() bool { return transporttest.LongOf(ms[0].DiagnoseLink(patience, 0, 1, 2), 2, 1) > 0 })
	messages()
	ms[2].Mu.Lock()
	defer ms[2].Mu.Unlock()
	got := int(ms[2].pairs[0].Received())
	require.GreaterOrEqual(t, got, total)
	require.Less(t, got, total+mesh.LongBytes)
	require.Zero(t, ms[2].pairs[1].Received())
}

// A PING of round 0 gets no answer. Padding is many of them. It leaves behind the frames that were queued before,
// and before those that were queued later.
func TestPadding(t *testing.T) {
	m, _, c := alone(t)
	put(t, c, padding(), frame{kind: kPing, slot: 7})
	require.EqualValues(t, 7, next(t, c).slot)

	m.Mu.Lock()
	p := m.pairs[1]
	require.Nil(t, p.s.send(req(1, 5, make([]byte, 100))))
	p.Pad()
	require.True(t, p.Ping(mesh.Ping{Round: 3, About: [2]int{-1, -1}}))
	m.Mu.Unlock()
	f := next(t, c)
	require.Equal(t, uint8(kEager), f.kind)
	_, err := io.CopyN(io.Discard, c, int64(f.length))
	require.NoError(t, err)
	for range len(padding()) / headerLen {
		require.Equal(t, frame{kind: kPing}, next(t, c))
	}
	require.Equal(t, frame{kind: kPing, slot: 3}, next(t, c))
}

// Padding that waits when a mesh closes would delay the last frame. It is dropped.
func TestNoPaddingAtTheEnd(t *testing.T) {
	m, _, c := alone(t)
	m.Mu.Lock()
	p := m.pairs[1]
	p.Pad()
	p.Pad()
	m.Mu.Unlock()
	go m.Close()
	require.Equal(t, frame{kind: kBye}, next(t, c))
}
