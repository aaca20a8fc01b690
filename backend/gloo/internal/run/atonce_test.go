package run_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestGivesAtOnce: a small call in shared memory in which a rank only gives data has ended when it
// returns, as long as a slot is free. The next one ends when another rank has taken some.
func TestGivesAtOnce(t *testing.T) {
	ctx := context.Background()
	type call func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error)
	parts := func(b *gloo.Backend, root int) []*tensor.Tensor {
		if b.Rank() != root {
			return nil
		}
		return []*tensor.Tensor{vec(7), vec(7)}
	}
	for _, c := range []struct {
		name string
		call call
	}{
		{"broadcast", func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, list(x), backend.BroadcastOptions{})
		}},
		{"scatter", func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.Scatter(ctx, x, parts(b, 0), backend.ScatterOptions{})
		}},
		{"gather", func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.Gather(ctx, parts(b, 1), x, backend.GatherOptions{Root: 1})
		}},
		{"reduce", func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.Reduce(ctx, x, backend.ReduceOptions{Root: 1})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bs := connected(t, run.GroupTimeout, same(gloo.WireNative, 2)...)
			if !bs[0].InTurn() {
				t.Skip("the ranks do not share memory")
			}
			const free = 14 // slots
			var given []*work.Work
			for i := range free + 1 {
				w := must.Get(c.call(bs[0], vec(7)))
				assert.Equal(t, i < free, w.IsCompleted(), "call %d", i)
				given = append(given, w)
			}
			for range given {
				x := vec(7)
				require.NoError(t, wait(c.call(bs[1], x)))
				want := float32(7)
				if c.name == "reduce" {
					want = 14
				}
				assert.Equal(t, want, must.Get(tensor.Data[float32](x))[0])
			}
			must.Receive(t, "the last call", given[free].Done())
			assert.NoError(t, work.WaitAll(ctx, given...))
		})
	}
}

// TestGivesWithoutWaiting: a call returns at once while a rank that takes data is some calls behind.
func TestGivesWithoutWaiting(t *testing.T) {
	ctx := context.Background()
	bs := connected(t, run.GroupTimeout, same(gloo.WireNative, 2)...)
	if !bs[0].InTurn() {
		t.Skip("the ranks do not share memory")
	}
	give := func() *work.Work {
		return must.Get(bs[0].Reduce(ctx, vec(7), backend.ReduceOptions{Root: 1}))
	}
	take := func() { require.NoError(t, wait(bs[1].Reduce(ctx, vec(7), backend.ReduceOptions{Root: 1}))) }
	for range 14 {
		give()
	}
	for range 4 {
		take()
		give() // no other goroutine takes anything meanwhile
	}
	for range 14 {
		take()
	}
	bs[0].Close()
}

// TestPostsAtOnce: the call of a small collective that needs all ranks publishes this rank's part. So the
// call of the last rank has all it needs, though no other rank waits.
func TestPostsAtOnce(t *testing.T) {
	ctx := context.Background()
	sum := func(b *gloo.Backend, x *tensor.Tensor, op backend.ReduceOp) (*work.Work, error) {
		return b.AllReduce(ctx, list(x), backend.AllReduceOptions{Op: op})
	}
	double := backend.CustomOf("double", func(a, b float32) float32 { return a + b })
	for _, c := range []struct {
		name   string
		atOnce bool
		want   float32 // of 7 on each rank
		call   func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error)
	}{
		{"all_reduce", true, 14, func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) { return sum(b, x, backend.Sum()) }},
		{"all_reduce of products", false, 28, func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return sum(b, x, backend.PreMulSum(2))
		}},
		{"all_reduce of a custom operator", false, 14, func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return sum(b, x, double)
		}},
		{"all_gather", true, 7, func(b *gloo.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.AllGather(ctx, []*tensor.Tensor{vec(0), vec(0)}, x, backend.AllGatherOptions{})
		}},
		{"barrier", true, 7, func(b *gloo.Backend, _ *tensor.Tensor) (*work.Work, error) {
			return b.Barrier(ctx, backend.BarrierOptions{})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bs := connected(t, run.GroupTimeout, same(gloo.WireNative, 2)...)
			if !bs[0].InTurn() {
				t.Skip("the ranks do not share memory")
			}
			for i := range 20 { // more than there are slots
				first, second := bs[i%2], bs[1-i%2]
				x, y := vec(7), vec(7)
				w := must.Get(c.call(first, x))
				v := must.Get(c.call(second, y))
				if c.atOnce {
					assert.True(t, v.IsCompleted(), "call %d", i)
				}
				require.NoError(t, work.WaitAll(ctx, w, v))
				for _, z := range []*tensor.Tensor{x, y} {
					assert.Equal(t, c.want, must.Get(tensor.Data[float32](z))[0])
				}
			}
		})
	}
}
