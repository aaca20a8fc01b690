package tensor_test

import (
	"math/rand/v2"
	"strconv"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	musts "github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// placed is memory at an address.
type placed struct {
	address uint64
	n       int
}

func (placed) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (p placed) Len() int            { return p.n }
func (p placed) Address() uint64     { return p.address }

// offsets returns the bytes of the storage that the elements take.
func offsets(t *tensor.Tensor) map[int]bool {
	all, es := map[int]bool{}, t.DType().Size()
	at := []int{t.Offset()}
	for i, n := range t.Shape() {
		var next []int
		for _, o := range at {
			for k := range n {
				next = append(next, o+k*t.Strides()[i])
			}
		}
		at = next
	}
	for _, o := range at {
		for k := range es {
			all[o*es+k] = true
		}
	}
	return all
}

// TestOverlaps compares with the sets of bytes, for random views of one storage, also of two dtypes.
func TestOverlaps(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	storage := make([]uint64, 60)
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&storage[0])), 8*len(storage))
	whole := func(d tensor.DType, device bool) *tensor.Tensor {
		n := len(bytes) / d.Size()
		if device {
			return musts.Get(tensor.OnDevice(d, placed{1 << 40, len(bytes)}, n))
		}
		return musts.Get(tensor.FromBytes(d, bytes, n))
	}
	dtypes := []tensor.DType{tensor.Uint8, tensor.Float16, tensor.Float32, tensor.Float64}
	apart, shared := 0, 0
	for range 20_000 {
		device := rng.IntN(4) == 0
		draw := func() *tensor.Tensor {
			all := whole(dtypes[rng.IntN(len(dtypes))], device)
			for {
				shape, strides := make([]int, rng.IntN(4)), []int{}
				for i := range shape {
					shape[i] = rng.IntN(5)
					strides = append(strides, rng.IntN(25)-8)
				}
				if v, err := all.AsStrided(shape, strides, rng.IntN(all.Len())); err == nil {
					return v
				}
			}
		}
		a, b := draw(), draw()
		in, want := offsets(a), false
		lo, hi := 1<<30, 0
		for o := range in {
			lo, hi = min(lo, o), max(hi, o+1)
		}
		for o := range offsets(b) {
			want = want || in[o]
		}
		if want {
			shared++
		} else {
			apart++
		}
		require.Equal(t, want, a.Overlaps(b), "%v %v at %d and %v %v at %d", a, a.Strides(), a.Offset(), b, b.Strides(), b.Offset())
		require.Equal(t, want, b.Overlaps(a))
		require.Equal(t, a.Len() > 0, a.Overlaps(a))
		from, to := a.Range()
		if a.Len() == 0 {
			require.Zero(t, from+to)
			continue
		}
		base, _ := whole(tensor.Uint8, device).Range()
		require.Equal(t, [2]uint64{uint64(lo), uint64(hi)}, [2]uint64{from - base, to - base})
	}
	require.Greater(t, min(apart, shared), 500)
}

// TestOverlapsOfLargeViews has views whose elements nobody counts.
func TestOverlapsOfLargeViews(t *testing.T) {
	if strconv.IntSize < 64 {
		t.Skip("a tensor of 1 GiB does not fit a program of 32 bits")
	}
	all := musts.Get(tensor.OnDevice(tensor.Float32, placed{1 << 40, 1 << 30}, 1<<28))
	view := func(shape, strides []int, offset int) *tensor.Tensor {
		return musts.Get(all.AsStrided(shape, strides, offset))
	}
	const rows, columns = 1 << 18, 1 << 10
	column := func(i int) *tensor.Tensor { return view([]int{rows}, []int{columns}, i) }
	tile := func(i, j int) *tensor.Tensor { return view([]int{rows / 2, 100}, []int{columns, 1}, i*columns+j) }
	for _, c := range []struct {
		name string
		a, b *tensor.Tensor
		want bool
	}{
		{"columns", column(5), column(6), false},
		{"a column with itself", column(5), column(5), true},
		{"tiles side by side", tile(0, 0), tile(7, 100), false},
		{"tiles with a common column", tile(0, 0), tile(7, 99), true},
		{"a row and a column", view([]int{columns}, []int{1}, 7*columns), column(9), true},
		{"a row without the end, and the last column", view([]int{columns - 1}, []int{1}, 7*columns), column(columns - 1), false},
		{"a matrix and its transpose", view([]int{columns, columns}, []int{columns, 1}, 0), view([]int{columns, columns}, []int{1, columns}, 0), true},
		{"even and odd, in other steps", view([]int{1 << 26}, []int{2}, 0), view([]int{1 << 25}, []int{4}, 1), false},
		{"other steps", view([]int{1 << 26}, []int{2}, 0), view([]int{1 << 25}, []int{3}, 1), true},
		{"backwards", view([]int{rows}, []int{-columns}, (rows-1)*columns), column(1), false},
	} {
		require.Equal(t, c.want, c.a.Overlaps(c.b), c.name)
		require.Equal(t, c.want, c.b.Overlaps(c.a), c.name)
		require.Zero(t, testing.AllocsPerRun(10, func() { c.a.Overlaps(c.b) }), c.name)
	}
	other := musts.Get(tensor.OnDevice(tensor.Float32, unplaced{16}, 4))
	require.False(t, other.Overlaps(other), "memory without addresses")
}

// unplaced is memory without an address.
type unplaced struct{ n int }

func (unplaced) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (u unplaced) Len() int            { return u.n }
