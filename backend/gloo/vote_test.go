package gloo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// onMeshes calls run once for each rank of a mesh in memory.
func onMeshes(t *testing.T, size int, run func(r int, m transport.Mesh)) {
	t.Helper()
	f := mem.NewFabric()
	var wg sync.WaitGroup
	for r := range size {
		m := must.Get(f.Join("vote", r, size))
		t.Cleanup(func() { m.Close() })
		wg.Go(func() { run(r, m) })
	}
	wg.Wait()
}

// TestVotes: every rank hears of every vote against, with its reason.
func TestVotes(t *testing.T) {
	const size = 3
	for _, against := range [][]int{nil, {0}, {2}, {0, 1}, {0, 1, 2}} {
		t.Run(fmt.Sprint("against: ", against), func(t *testing.T) {
			onMeshes(t, size, func(r int, m transport.Mesh) {
				ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
				defer cancel()
				var err error
				if slices.Contains(against, r) {
					err = fmt.Errorf("rank %d cannot", r)
				}
				v := newVote(m)
				v.cast(err)
				told := 0
				got := v.hear(ctx, func(error) { told++ })
				assert.NoError(t, v.end(ctx), "rank %d", r)
				others := slices.DeleteFunc(slices.Clone(against), func(q int) bool { return q == r })
				if len(others) == 0 {
					assert.NoError(t, got, "rank %d", r)
					assert.Zero(t, told, "rank %d", r)
					return
				}
				var d *dissent
				if assert.ErrorAs(t, got, &d, "rank %d", r) {
					assert.Contains(t, others, d.rank, "rank %d", r)
					assert.Equal(t, fmt.Sprintf("%q", fmt.Sprintf("rank %d cannot", d.rank)), d.why, "rank %d", r)
				}
				assert.Equal(t, 1, told, "rank %d", r)
			})
		})
	}
}

// TestVotesWait: waiting for a vote ends with its context, and then ends the mesh.
func TestVotesWait(t *testing.T) {
	onMeshes(t, 2, func(r int, m transport.Mesh) {
		if r == 1 {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		v := newVote(m)
		v.cast(nil)
		err := v.hear(ctx, func(error) {})
		var f *transport.Fault
		if assert.ErrorAs(t, err, &f) {
			assert.Equal(t, transport.FaultTimeout, f.Kind)
			assert.Equal(t, 1, f.Rank)
		}
		assert.Error(t, v.end(ctx))
	})
}

// Rank 2 has stopped and rank 0 waits for it. Rank 1, whose time runs out first, waits for rank 0.
func TestVotesBlameAStoppedRank(t *testing.T) {
	f := mem.NewFabric()
	var ms [3]transport.Mesh
	for r := range ms {
		ms[r] = must.Get(f.Join("vote", r, len(ms)))
		t.Cleanup(func() { ms[r].Close() })
	}
	f.Freeze("vote", 2)
	zero, one := newVote(ms[0]), newVote(ms[1])
	one.cast(nil)
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	errs := [2]error{1: one.wait(ctx, 0, one.recvs[0])}
	errs[0] = zero.hear(context.Background(), func(error) {})
	for r, err := range errs {
		f := must.As[*transport.Fault](t, err, "rank %d", r)
		require.Equal(t, transport.FaultTimeout, f.Kind)
		require.Equal(t, 2, f.Rank, "rank %d: %v", r, f)
	}
}

// The vote of a rank that another one has told why there is no group blames no rank that waits.
func TestVotesCanceled(t *testing.T) {
	onMeshes(t, 3, func(r int, m transport.Mesh) {
		v := newVote(m)
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		if r == 1 {
			cancel(transport.NewFault(transport.FaultPeerDied, 2, 1, nil))
		}
		err := v.hear(ctx, func(error) {})
		var f *transport.Fault
		if assert.ErrorAs(t, err, &f, "rank %d", r) {
			assert.Equal(t, transport.FaultAborted, f.Kind, "rank %d", r)
			assert.Equal(t, 2, f.Rank, "rank %d: %v", r, f)
		}
	})
}

// TestFailedJoinOfMemory has one rank fail to join the memory that the others join: they hear of it
// at once, and none of them has memory.
func TestFailedJoinOfMemory(t *testing.T) {
	if _, err := shm.NewEndpoint(); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("memory is shared on Linux only")
	}
	const size = 3
	for culprit := range size {
		t.Run(fmt.Sprintf("rank %d", culprit), func(t *testing.T) {
			natives := make([]*native, size)
			records := make([]record, size)
			for r := range natives {
				e := must.Get(shm.NewEndpoint())
				natives[r] = &native{rank: r, size: size, shm: e}
				records[r].Shm = e.Addr()
				t.Cleanup(natives[r].close)
			}
			begun := time.Now()
			errs := make([]error, size)
			onMeshes(t, size, func(r int, m transport.Mesh) {
				n := natives[r]
				n.all = records
				if r == culprit {
					n.all = slices.Clone(records)
					n.all[r].Shm = "no address"
				}
				ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
				defer cancel()
				g, err := n.share(ctx, m, cluster.New(make([]int, size), nil))
				assert.Nil(t, g, "rank %d", r)
				assert.ErrorIs(t, err, errApart, "rank %d", r)
				errs[r] = err
			})
			require.Less(t, time.Since(begun), joinLimit)
			if culprit > 0 { // who cannot reach rank 0 says that
				require.ErrorContains(t, errors.Join(errs...), "no address")
			}
		})
	}
}
