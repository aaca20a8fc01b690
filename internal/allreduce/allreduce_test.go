package allreduce_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/allreduce"
	"github.com/c10d-go/c10d/tensor"
)

func TestWorksAreInOrder(t *testing.T) {
	const odd tensor.DeviceType = 77 // a device type of a user's own
	names := func(l tensor.Layout) (names []string) {
		for _, w := range allreduce.Works(odd, l) {
			require.NoError(t, w.Can(nil), "a work without a Can can do every call")
			names = append(names, w.Name)
		}
		return names
	}
	require.Empty(t, names(tensor.Strided))
	nop := func(*allreduce.Call) (allreduce.Runner, error) { return nil, nil }
	for i, name := range []string{"middle", "first", "last"} {
		w := allreduce.Work{Name: name, Device: odd, Priority: []int{0, 1, math.MinInt}[i], New: nop}
		before := allreduce.Works(odd, tensor.Strided)
		require.NoError(t, allreduce.Register(w))
		require.Len(t, before, i, "a list that somebody has does not change")
		require.ErrorContains(t, allreduce.Register(w), "clashes")
	}
	require.Equal(t, []string{"first", "middle", "last"}, names(tensor.Strided))
	require.Empty(t, names(tensor.SparseCOO))
	sparse := allreduce.Work{Name: "first", Device: odd, Layout: tensor.SparseCOO, Priority: 1, New: nop}
	require.NoError(t, allreduce.Register(sparse))
	require.Equal(t, []string{"first"}, names(tensor.SparseCOO))
	require.Len(t, names(tensor.Strided), 3)
	require.Error(t, allreduce.Register(allreduce.Work{Name: "x"}))
}
