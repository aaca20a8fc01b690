package shm_test

import (
	"fmt"
	"testing"

	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/stretchr/testify/require"
)

// TestPost: a rank that posts its part lets the others end, and need not wait itself once all have
// posted or called.
func TestPost(t *testing.T) {
	const earlyBytes = 4 << 10
	for _, c := range []struct {
		name  string
		bytes []int // of a rank's part
		post  func(g *shm.Group, buf []byte) bool
		call  func(g *shm.Group, buf []byte) error
	}{
		{"allreduce", []int{4, 32, 33, earlyBytes}, func(g *shm.Group, buf []byte) bool { return g.PostAllReduce(buf, 1) },
			func(g *shm.Group, buf []byte) error { return g.AllReduce(buf, by(1, mix(1)), late()) }},
		{"allgather", []int{4, 32, 33, earlyBytes}, (*shm.Group).PostAllGather,
			func(g *shm.Group, buf []byte) error { return g.AllGather(make([]byte, 2*len(buf)), buf, late()) }},
		{"barrier", []int{0}, func(g *shm.Group, _ []byte) bool { return g.PostBarrier() },
			func(g *shm.Group, _ []byte) error { return g.Barrier(late()) }},
	} {
		for _, n := range c.bytes {
			t.Run(fmt.Sprintf("%s of %d", c.name, n), func(t *testing.T) {
				gs := join(t, 2, shm.Options{})
				a, b := input(1, 0, 0, n), input(1, 0, 1, n)
				for range 9 { // more than there are slots
					require.False(t, c.post(gs[0], a), "rank 1 has not called")
					require.NoError(t, c.call(gs[1], b), "this rank waits for nobody")
					require.NoError(t, c.call(gs[0], a))

					require.False(t, c.post(gs[1], b))
					require.True(t, c.post(gs[0], a), "rank 1 has posted")
					require.NoError(t, c.call(gs[0], a))
					require.NoError(t, c.call(gs[1], b))
				}
			})
		}
	}
}

// TestPostWaitsForNobody: what has to wait, or is too long for one piece, is left to the collective.
func TestPostWaitsForNobody(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	long := make([]byte, 4<<10+1)
	for range 2 { // nothing was published
		require.False(t, gs[0].PostAllReduce(long, 1))
		require.False(t, gs[0].PostAllGather(long))
		require.False(t, gs[0].PostAllReduce(nil, 1))
		require.False(t, gs[0].PostAllGather(nil))
	}
	for range 2 { // slots
		require.NoError(t, gs[0].Gather(nil, long, 1, late()))
	}
	require.False(t, gs[0].PostBarrier(), "no slot is free")
	for range 2 {
		require.NoError(t, gs[1].Gather(make([]byte, 2*len(long)), long, 1, late()))
	}
	each(t, gs, func(g *shm.Group) error { return g.Barrier(late()) })

	require.False(t, gs[1].PostBarrier())
	require.ErrorIs(t, gs[0].Gather(make([]byte, 2), make([]byte, 1), 0, late()), shm.ErrMismatch)
	require.False(t, gs[1].PostBarrier(), "the group has ended")
	require.Error(t, gs[1].Barrier(late()))
}
