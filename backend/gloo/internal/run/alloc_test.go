package run_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// pool gives tensors out of one of Alloc, at odd places, or ordinary ones, as rng says.
type pool struct {
	rng  *rand.Rand
	from *tensor.Tensor // of one dimension
	next int
}

func (p *pool) filled(t *testing.T, n, first int) *tensor.Tensor {
	x := filled(n, first)
	skip := 1 + p.rng.IntN(50)
	if p.rng.IntN(3) == 0 || p.next+skip+n > p.from.Len() {
		return x
	}
	v := must.Get(p.from.Slice(0, p.next+skip, p.next+skip+n))
	require.NoError(t, v.CopyFrom(x))
	p.next += skip + n
	return v
}

// TestAlloc: on every wire there are tensors, and operations with some of them, and some
// others, have the results that they always have. They are long enough to be copied once.
func TestAlloc(t *testing.T) {
	seed := must.Seed(t)
	ctx := context.Background()
	const p, n = 3, 300_001 // floats
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Parallel()
		bs := connected(t, run.GroupTimeout, same(wire, p)...)
		onAll(t, bs, func(r int, b *gloo.Backend) {
			from, err := b.Alloc(ctx, tensor.Float32, 20*n)
			if !assert.NoError(t, err) {
				return
			}
			assert.Equal(t, make([]byte, 80*n), from.Bytes())
			other, err := b.Alloc(ctx, tensor.Float64, r, 3) // one of them empty
			assert.NoError(t, err)
			assert.Equal(t, []int{r, 3}, other.Shape())
			for round := range testsize.Of(1, 1, 4) {
				all := &pool{rng: rand.New(rand.NewPCG(seed, uint64(10*round+r))), from: from}
				allocatedMoves(ctx, t, b, p, n, all)
			}
			assert.NoError(t, b.Free(other))
			assert.NoError(t, b.Free(from))
			assert.NoError(t, barrier(b))
		})
	})
}

func allocatedMoves(ctx context.Context, t *testing.T, b *gloo.Backend, p, n int, all *pool) {
	r := b.Rank()
	get := func(n, first int) *tensor.Tensor { return all.filled(t, n, first) }
	equal := func(what string, want *tensor.Tensor, got *tensor.Tensor) {
		assert.Equal(t, want.Bytes(), got.Bytes(), "%s, rank %d", what, r)
	}

	sum := get(n, r)
	assert.NoError(t, wait(b.AllReduce(ctx, list(sum), backend.AllReduceOptions{})))
	sums := make([]float32, n)
	for i := range sums {
		sums[i] = float32(p*i + p*(p-1)/2)
	}
	equal("all_reduce", vec(sums...), sum)

	out, in := get(n*p, -1), get(n, r*n)
	assert.NoError(t, wait(b.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{})))
	equal("all_gather", filled(n*p, 0), out)

	var parts []*tensor.Tensor // of different lengths
	for q := range p {
		parts = append(parts, get(n-q, -1))
	}
	assert.NoError(t, wait(b.AllGatherV(ctx, parts, get(n-r, r*n), backend.AllGatherOptions{})))
	for q, part := range parts {
		equal("all_gather_v", filled(n-q, q*n), part)
	}

	blocks := each(p, func(int) *tensor.Tensor { return get(n, -1) })
	mine := each(p, func(q int) *tensor.Tensor { return get(n, (r*p+q)*1000) })
	assert.NoError(t, wait(b.AllToAll(ctx, blocks, mine, backend.AllToAllOptions{})))
	for q, block := range blocks {
		equal("all_to_all", filled(n, (q*p+r)*1000), block)
	}

	part := get(n, -1)
	whole := get(n*p, 0)
	assert.NoError(t, wait(b.ReduceScatterTensor(ctx, part, whole, backend.ReduceScatterOptions{Op: backend.Max()})))
	equal("reduce_scatter", filled(n, r*n), part)

	in = get(n*p, 0)
	out = get(n*p, -1)
	assert.NoError(t, wait(b.AllToAllSingle(ctx, out, in, nil, nil, backend.AllToAllOptions{})))
	for q := range p {
		assert.Equal(t, filled(n, r*n).Bytes(), out.Bytes()[4*q*n:][:4*n])
	}

	buf := get(n, 7*r)
	assert.NoError(t, wait(b.Broadcast(ctx, list(buf), backend.BroadcastOptions{Root: 1})))
	equal("broadcast", filled(n, 7), buf)

	one := get(n, -1)
	var ins []*tensor.Tensor
	if r == 2 {
		for q := range p {
			ins = append(ins, get(n, q))
		}
	}
	assert.NoError(t, wait(b.Scatter(ctx, one, ins, backend.ScatterOptions{Root: 2})))
	equal("scatter", filled(n, r), one)
	var outs []*tensor.Tensor
	if r == 0 {
		for range p {
			outs = append(outs, get(n, -1))
		}
	}
	assert.NoError(t, wait(b.Gather(ctx, outs, one, backend.GatherOptions{})))
	for q, got := range outs {
		equal("gather", filled(n, q), got)
	}

	next, last := (r+1)%p, (r+p-1)%p
	sent, err := b.Send(ctx, get(n, r*n), next, backend.P2POptions{})
	if assert.NoError(t, err) {
		got := get(n, -1)
		assert.NoError(t, wait(b.Recv(ctx, got, last, backend.P2POptions{})))
		assert.NoError(t, sent.Wait(ctx))
		equal("send_recv", filled(n, last*n), got)
	}
}

// TestAllocExplained: Explain tells where tensors are.
func TestAllocExplained(t *testing.T) {
	onLinux(t)
	in64Bits(t)
	for wire, want := range map[gloo.Wire]string{
		gloo.WireGloo: "ordinary memory", gloo.WireTCP: "ordinary memory", gloo.WireNative: "shared memory", onHosts: "shared memory",
	} {
		for _, b := range connected(t, run.GroupTimeout, same(wire, 4)...) {
			cs := choicesOf(b, "alloc")
			require.Len(t, cs, 1)
			require.Equal(t, want, cs[0].Algorithm, "%s: %s", wire, cs[0].Why)
		}
	}
}

// TestAllocErrors: wrong calls change nothing; a rank without room costs nobody the group.
func TestAllocErrors(t *testing.T) {
	onLinux(t)
	in64Bits(t)
	ctx := context.Background()
	bs := connected(t, run.GroupTimeout, same(gloo.WireNative, 2)...)
	for _, shape := range [][]int{{-1}, {0, -1}, {math.MaxInt, 2}, {math.MaxInt >> 23, math.MaxInt >> 23}} {
		require.ErrorIs(t, must.Err(bs[0].Alloc(ctx, tensor.Float32, shape...)), tensor.ErrInvalid, "%v", shape)
	}
	_, err := bs[0].Alloc(ctx, tensor.Invalid, 1)
	require.ErrorIs(t, err, tensor.ErrInvalid)
	require.Zero(t, bs[0].Seq())

	var wg sync.WaitGroup
	kept := make([]*tensor.Tensor, 2)
	for r, b := range bs {
		wg.Go(func() {
			n := 1
			if r == 1 {
				n = math.MaxInt >> 13
			}
			x, err := b.Alloc(ctx, tensor.Uint8, n)
			assert.ErrorIs(t, err, gloo.ErrExhausted)
			assert.Nil(t, x)
			x, err = b.Alloc(ctx, tensor.Uint8, 300_000)
			assert.NoError(t, err)
			assert.NoError(t, wait(b.AllReduce(ctx, list(x), backend.AllReduceOptions{})))
			kept[r] = x
		})
	}
	run.Finish(t, "all ranks", &wg)
	require.Error(t, bs[0].Free(nil))
	require.Error(t, bs[0].Free(vec(1)))
	part, err := kept[0].Slice(0, 0, 10)
	require.NoError(t, err)
	require.Error(t, bs[0].Free(part))

	// What has been allocated outlives the group.
	for _, b := range bs {
		wg.Go(func() { assert.NoError(t, b.Close()) })
	}
	run.Finish(t, "all ranks to close", &wg)
	for r, b := range bs {
		require.NoError(t, kept[r].Fill(3))
		again, err := kept[r].Reshape(3, 100_000)
		require.NoError(t, err)
		require.NoError(t, b.Free(again))
		require.Error(t, b.Free(kept[r]))
		require.ErrorIs(t, must.Err(b.Alloc(ctx, tensor.Uint8, 1)), work.ErrClosed)
	}
}

// TestAllocAlone: a rank that calls it alone waits for the others, no longer than it wants to.
func TestAllocAlone(t *testing.T) {
	onLinux(t)
	in64Bits(t)
	bs := connected(t, run.GroupTimeout, same(gloo.WireNative, 2)...)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("test: enough")
	cancel(why)
	require.ErrorIs(t, must.Err(bs[0].Alloc(ctx, tensor.Uint8, 1)), work.ErrCanceled)
	ctx, cancel = context.WithCancelCause(context.Background())
	time.AfterFunc(10*time.Millisecond, func() { cancel(why) })
	require.ErrorIs(t, must.Err(bs[0].Alloc(ctx, tensor.Uint8, 1)), why)
	require.Error(t, barrier(bs[1]))
}
