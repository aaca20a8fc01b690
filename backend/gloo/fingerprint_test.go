package gloo_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestDisagreement makes one rank call something else than the others. All have to say
// at once, long before any deadline, who called what.
func TestDisagreement(t *testing.T) {
	const size = 3
	ctx := context.Background()
	zeros := func(d tensor.DType, n int) *tensor.Tensor {
		x, err := tensor.New(d, n)
		require.NoError(t, err)
		return x
	}
	blocks := func(n int) []*tensor.Tensor {
		var all []*tensor.Tensor
		for range size {
			all = append(all, zeros(tensor.Float32, n))
		}
		return all
	}
	type call func(b *gloo.Backend) error
	reduce := func(d tensor.DType, n int, op backend.ReduceOp) call {
		return func(b *gloo.Backend) error {
			return wait(b.AllReduce(ctx, list(zeros(d, n)), backend.AllReduceOptions{Op: op}))
		}
	}
	broadcast := func(root int) call {
		return func(b *gloo.Backend) error {
			return wait(b.Broadcast(ctx, list(zeros(tensor.Float32, 4)), backend.BroadcastOptions{Root: root}))
		}
	}
	allGather := func(n int) call {
		return func(b *gloo.Backend) error {
			return wait(b.AllGather(ctx, blocks(n), zeros(tensor.Float32, n), backend.AllGatherOptions{}))
		}
	}
	gather := func(root int) call {
		return func(b *gloo.Backend) error {
			var out []*tensor.Tensor
			if b.Rank() == root {
				out = blocks(2)
			}
			return wait(b.Gather(ctx, out, zeros(tensor.Float32, 2), backend.GatherOptions{Root: root}))
		}
	}
	for _, tc := range []struct {
		name        string
		most, other call
		says, said  string
	}{
		{"operation", reduce(tensor.Float32, 1, backend.Sum), barrier, "all_reduce (sum) of 4 bytes of float32", "barrier"},
		{"operation with a root", reduce(tensor.Float32, 4, backend.Sum), broadcast(1), "all_reduce (sum) of 16 bytes of float32", "broadcast of 16 bytes of float32 with root 1"},
		{"dtype", reduce(tensor.Float32, 1, backend.Sum), reduce(tensor.Int32, 1, backend.Sum), "4 bytes of float32", "4 bytes of int32"},
		{"size", reduce(tensor.Float32, 1, backend.Sum), reduce(tensor.Float32, 2, backend.Sum), "all_reduce (sum) of 4 bytes", "all_reduce (sum) of 8 bytes"},
		{"large size", reduce(tensor.Float32, 1<<20, backend.Sum), reduce(tensor.Float32, 1<<19, backend.Sum), "4194304 bytes", "2097152 bytes"},
		{"operator", reduce(tensor.Float32, 1, backend.Sum), reduce(tensor.Float32, 1, backend.Max), "all_reduce (sum)", "all_reduce (max)"},
		{"root", broadcast(0), broadcast(1), "with root 0", "with root 1"},
		{"all wait", broadcast(1), broadcast(0), "with root 1", "with root 0"},
		{"gather's root", gather(0), gather(1), "gather of 24 bytes of float32 with root 0", "gather of 24 bytes of float32 with root 1"},
		{"block", allGather(1), allGather(2), "all_gather of 12 bytes", "all_gather of 24 bytes"},
		{"monitored", func(b *gloo.Backend) error {
			return b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{})
		}, reduce(tensor.Float32, 1, backend.Sum), "barrier with root 0", "all_reduce (sum)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bs := connected(t, gloo.GroupTimeout, gloo.WireTCP, gloo.WireTCP, gloo.WireTCP)
			var wg sync.WaitGroup
			for _, b := range bs {
				wg.Go(func() { assert.NoError(t, barrier(b)) })
			}
			gloo.Finish(t, "all ranks", &wg)
			for r, b := range bs {
				wg.Go(func() {
					run := tc.most
					if r == 1 {
						run = tc.other
					}
					err := run(b)
					if err == nil {
						// It had to wait for nobody, and hears of it later.
						err = barrier(b)
					}
					var e *work.Error
					if !assert.ErrorIs(t, err, work.ErrMismatch, "rank %d", r) || !assert.ErrorAs(t, err, &e) {
						return
					}
					assert.Contains(t, err.Error(), "the ranks disagree on the operation")
					assert.Contains(t, err.Error(), "rank 1 called ", "rank %d", r)
					assert.Contains(t, err.Error(), tc.says, "rank %d", r)
					assert.Contains(t, err.Error(), tc.said, "rank %d", r)
					assert.Contains(t, err.Error(), "number 1")
				})
			}
			gloo.Finish(t, "all ranks", &wg)
		})
	}
}

// What may differ between ranks is no disagreement.
func TestMayDiffer(t *testing.T) {
	ctx := context.Background()
	bs := connected(t, gloo.GroupTimeout, gloo.WireTCP, gloo.WireTCP)
	var wg sync.WaitGroup
	for r, b := range bs {
		wg.Go(func() {
			zeros := func(n int) *tensor.Tensor {
				x, err := tensor.New(tensor.Float32, n)
				assert.NoError(t, err)
				return x
			}
			var out []*tensor.Tensor
			if r == 0 {
				out = []*tensor.Tensor{zeros(1), zeros(2)}
			}
			assert.NoError(t, wait(b.GatherV(ctx, out, zeros(1+r), backend.GatherOptions{})))
			assert.NoError(t, wait(b.AllGatherV(ctx, []*tensor.Tensor{zeros(1), zeros(2)}, zeros(1+r), backend.AllGatherOptions{})))
			// Rank 0 sends 3 and 1 to itself and rank 1, which sends 2 and 5.
			in, got := [][]int{{3, 1}, {2, 5}}[r], [][]int{{3, 2}, {1, 5}}[r]
			assert.NoError(t, wait(b.AllToAllSingle(ctx, zeros(got[0]+got[1]), zeros(in[0]+in[1]), got, in, backend.AllToAllOptions{})))
			if r == 0 {
				assert.NoError(t, wait(b.AllGather(ctx, []*tensor.Tensor{zeros(1), zeros(1)}, zeros(1), backend.AllGatherOptions{})))
			} else {
				assert.NoError(t, wait(b.AllGatherIntoTensor(ctx, zeros(2), zeros(1), backend.AllGatherOptions{})))
			}
			assert.NoError(t, barrier(b))
		})
	}
	gloo.Finish(t, "all ranks", &wg)
}
