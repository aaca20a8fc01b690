package cuda_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestSlicesToADeviceAndBack: the simulator finds no access without an order, and nothing that was not closed.
func TestSlicesToADeviceAndBack(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Devices: 2}))
	gpu := must.Get(d.Device(1))
	s := must.Get(gpu.NewStream())
	ctx := t.Context()
	x := must.Get(cuda.ToDevice(ctx, d, s, []float32{1, 2, 3, 4, 5, 6}, 3, 2))
	require.Equal(t, []int{3, 2}, x.Shape())
	require.Equal(t, tensor.Device{Type: tensor.CUDA, Index: 1}, x.Device())
	v := must.Get(cuda.ToHost[float32](ctx, d, s, x))
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6}, v)
	part := must.Get(x.Slice(0, 1, 3))
	v = must.Get(cuda.ToHost[float32](ctx, d, s, part))
	require.Equal(t, []float32{3, 4, 5, 6}, v)

	turned, err := x.Transpose(0, 1)
	require.NoError(t, err)
	_, err = cuda.ToHost[float32](ctx, d, s, turned)
	require.ErrorContains(t, err, "not a contiguous one of float32 in device memory")
	require.Error(t, must.Err(cuda.ToHost[int32](ctx, d, s, x)), "another type")
	require.ErrorIs(t, must.Err(cuda.ToDevice(ctx, d, s, []int8{1, 2}, 3)), tensor.ErrInvalid)
	require.Error(t, cuda.Free(must.Get(tensor.Of([]int8{1}))))

	none := must.Get(cuda.ToDevice(ctx, d, s, []int64{}))
	require.Empty(t, must.Get(cuda.ToHost[int64](ctx, d, s, none)))
	require.NoError(t, cuda.Free(none))
	require.NoError(t, cuda.Free(x))
	require.NoError(t, s.Close())
	require.NoError(t, d.Close())
}
