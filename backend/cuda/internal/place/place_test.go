package place

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestSpans compares the runs of bytes with those of each element.
func TestSpans(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var shape, strides []int
		for range rng.IntN(4) {
			shape = append(shape, 1+rng.IntN(4))
			strides = append(strides, rng.IntN(15)-5)
		}
		const offset, es = 100, 2
		at := map[int]bool{}
		var visit func(dim, o int)
		visit = func(dim, o int) {
			if dim == len(shape) {
				at[o*es], at[o*es+1] = true, true
				return
			}
			for i := range shape[dim] {
				visit(dim+1, o+i*strides[dim])
			}
		}
		visit(0, offset)
		var want []int
		for o := range at {
			want = append(want, o)
		}
		slices.Sort(want)
		lo, hi, runs := spans(shape, strides, offset, es)
		require.Equal(t, want[0], lo, "%v %v", shape, strides)
		require.Equal(t, want[len(want)-1]+1, hi, "%v %v", shape, strides)
		if runs == nil {
			runs = []Span{{lo, hi - lo}}
		}
		var got []int
		for _, r := range runs {
			for i := range r.N {
				got = append(got, r.Off+i)
			}
		}
		slices.Sort(got)
		require.Equal(t, want, got, "%v %v", shape, strides)
	}
}

// TestUses holds that few runs count as used one by one, and of many all between them.
func TestUses(t *testing.T) {
	for _, n := range []int{1, mostRuns, mostRuns + 1} {
		whole := must.Get(tensor.OnDevice(tensor.Int16, huge{1 << 20, 6 * n}, 3*n))
		column := must.Get(whole.AsStrided([]int{n}, []int{3}, 1))
		var all []Span
		Of(column).Uses(func(s Span) { all = append(all, s) })
		if n > mostRuns {
			require.Equal(t, []Span{{2, 6*n - 4}}, all)
			continue
		}
		require.Len(t, all, n)
		require.Equal(t, Span{6*n - 4, 2}, all[n-1])
	}
}

func TestCollapsed(t *testing.T) {
	for _, c := range []struct{ shape, strides, wantShape, wantStrides []int }{
		{[]int{2, 3, 4}, []int{12, 4, 1}, []int{24}, []int{1}},
		{[]int{4, 1, 3}, []int{1, 9, 4}, []int{4, 3}, []int{1, 4}},
		{[]int{2, 3, 4}, []int{24, 4, 1}, []int{2, 12}, []int{24, 1}},
		{[]int{1, 1}, []int{5, 7}, nil, nil},
	} {
		s, u := collapsed(c.shape, c.strides)
		require.Equal(t, c.wantShape, s)
		require.Equal(t, c.wantStrides, u)
	}
}

// huge is memory that is nowhere.
type huge struct {
	ptr driver.Ptr
	n   int
}

func (huge) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (h huge) Len() int            { return h.n }
func (h huge) Ptr() driver.Ptr     { return h.ptr }
