package backend_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestNames: the backends are listed in order, also in the error about one that is unknown.
func TestNames(t *testing.T) {
	defer backend.Forget()()
	for _, name := range []string{"d", "b", "e", "a", "c"} {
		register(t, name, tensor.CPU)
	}
	require.Equal(t, []string{"a", "b", "c", "d", "e"}, backend.Names())
	for _, text := range []string{"nccl", "cpu:nccl", "cpu:a,cuda:nccl"} {
		_, err := backend.ParseDevices(text)
		require.ErrorIs(t, err, backend.ErrUnknownBackend, "%q", text)
		require.ErrorContains(t, err, `"nccl": backend not registered (known: a, b, c, d, e)`, "%q", text)
	}
}

// TestCustomOf: an operator of two elements combines each element of dst with that of src.
func TestCustomOf(t *testing.T) {
	op := backend.CustomOf("minus", func(a, b int16) int16 { return a - b })
	red := must.Get(op.Reduction(tensor.Int16, 3))
	dst := must.Get(tensor.Of([]int16{10, 20, 30}, 3))
	src := must.Get(tensor.Of([]int16{1, 2, 3}, 3))
	red.Combine(dst.Bytes(), src.Bytes())
	red.Combine(nil, nil)
	got, err := tensor.Data[int16](dst)
	require.NoError(t, err)
	require.Equal(t, []int16{9, 18, 27}, got)
	_, err = op.Reduction(tensor.Int32, 3)
	require.ErrorContains(t, err, `custom operator "minus" is for int16, not int32`)
}
