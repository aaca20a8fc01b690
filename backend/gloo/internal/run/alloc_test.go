package run_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

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
	part := must.Get(kept[0].Slice(0, 0, 10))
	require.Error(t, bs[0].Free(part))

	// What has been allocated outlives the group.
	for _, b := range bs {
		wg.Go(func() { assert.NoError(t, b.Close()) })
	}
	run.Finish(t, "all ranks to close", &wg)
	for r, b := range bs {
		require.NoError(t, kept[r].Fill(3))
		again := must.Get(kept[r].Reshape(3, 100_000))
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
