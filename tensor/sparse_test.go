package tensor_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	musts "github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

func of[T tensor.Element](t testing.TB, data []T, shape ...int) *tensor.Tensor {
	t.Helper()
	return musts.Get(tensor.Of(data, shape...))
}

func data[T tensor.Element](t testing.TB, x *tensor.Tensor) []T {
	t.Helper()
	return musts.Get(tensor.Data[T](x))
}

func sparse(t testing.TB, indices, values *tensor.Tensor, shape ...int) *tensor.Tensor {
	t.Helper()
	return musts.Get(tensor.Sparse(indices, values, shape...))
}

func equal(t testing.TB, a, b *tensor.Tensor) {
	t.Helper()
	require.Truef(t, musts.Get(a.Equal(b)), "%+v\n%+v", a, b)
}

func TestCoalesce(t *testing.T) {
	const far = math.MaxInt / 64
	for _, c := range []struct {
		name           string
		indices        []int64
		nnz            int
		values         []float32
		shape          []int
		wantAt         []int64
		want           []float32
		sameMemory     bool
		coalescedShape []int // of the values
	}{
		{"none", nil, 0, nil, []int{4}, []int64{}, []float32{}, true, []int{0}},
		{"sorted", []int64{0, 2}, 2, []float32{1, 2}, []int{4}, []int64{0, 2}, []float32{1, 2}, true, []int{2}},
		{"swapped", []int64{2, 0}, 2, []float32{1, 2}, []int{4}, []int64{0, 2}, []float32{2, 1}, false, []int{2}},
		{"equal", []int64{3, 1, 3, 3}, 4, []float32{1, 2, 3, 4}, []int{4}, []int64{1, 3}, []float32{2, 8}, false, []int{2}},
		{"row major", []int64{1, 0, 0, 0, 5, 4}, 3, []float32{1, 2, 3}, []int{2, 6}, []int64{0, 0, 1, 4, 5, 0}, []float32{3, 2, 1}, false, []int{3}},
		{"dense rows", []int64{1, 0, 1}, 3, []float32{1, 2, 3, 4, 5, 6}, []int{2, 2}, []int64{0, 1}, []float32{3, 4, 6, 8}, false, []int{2, 2}},
		{"empty rows", []int64{1, 0, 1}, 3, nil, []int{2, 0}, []int64{0, 1}, []float32{}, false, []int{2, 0}},
		{"no sparse dimension", nil, 2, []float32{1, 2, 3, 4}, []int{2}, []int64{}, []float32{4, 6}, false, []int{1, 2}},
		{"far apart", []int64{far, 1, far}, 3, []float32{1, 2, 4}, []int{2 * far}, []int64{1, far}, []float32{2, 5}, false, []int{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dims := len(c.indices) / max(c.nnz, 1)
			if c.nnz == 0 {
				dims = 1
			}
			s := sparse(t, of(t, c.indices, dims, c.nnz), of(t, c.values, append([]int{c.nnz}, c.shape[dims:]...)...), c.shape...)
			require.False(t, s.IsCoalesced())
			before := slices.Clone(c.values)
			got := musts.Get(s.Coalesce())
			require.True(t, got.IsCoalesced())
			require.False(t, s.IsCoalesced())
			require.Equal(t, before, c.values)
			require.Equal(t, c.wantAt, data[int64](t, got.Indices()))
			require.Equal(t, c.want, data[float32](t, got.Values()))
			require.Equal(t, c.coalescedShape, got.Values().Shape())
			require.Equal(t, c.sameMemory, got.Values() == s.Values())
			require.Equal(t, s.Shape(), got.Shape())
			require.Same(t, got, musts.Get(got.Coalesce()))
		})
	}
}

// TestSparseSumsRoundEachAddition: 2048 + 1 is 2048 in float16, so that the
// order and the rounding of the additions show.
func TestSparseSumsRoundEachAddition(t *testing.T) {
	at := of(t, []int64{0, 0, 0}, 1, 3)
	for _, c := range []struct {
		values *tensor.Tensor
		want   float64
	}{
		{of(t, []tensor.F16{tensor.F16From(2048), tensor.F16From(1), tensor.F16From(1)}, 3), 2048},
		{of(t, []tensor.F16{tensor.F16From(1), tensor.F16From(1), tensor.F16From(2048)}, 3), 2050},
		{of(t, []tensor.BF16{tensor.BF16From(256), tensor.BF16From(1), tensor.BF16From(1)}, 3), 256},
		{of(t, []tensor.BF16{tensor.BF16From(1), tensor.BF16From(1), tensor.BF16From(256)}, 3), 258},
		{of(t, []tensor.F8E4M3{tensor.F8E4M3From(16), tensor.F8E4M3From(1), tensor.F8E4M3From(1)}, 3), 16},
		{of(t, []tensor.F8E5M2{tensor.F8E5M2From(1), tensor.F8E5M2From(1), tensor.F8E5M2From(8)}, 3), 10},
		{of(t, []uint8{200, 100, 1}, 3), 45},
		{of(t, []int8{100, 100, 0}, 3), -56},
		{of(t, []bool{false, true, true}, 3), 1},
	} {
		s := sparse(t, at, c.values, 1)
		sum := musts.Get(s.Coalesce())
		got := musts.Get(sum.Values().Float64At(0))
		require.Equalf(t, c.want, got, "%v", c.values)
		dense := musts.Get(s.Dense())
		got = musts.Get(dense.Float64At(0))
		require.Equalf(t, c.want, got, "%v", c.values)
	}
}

// randomSparse has small integer values, whose sums are exact in every dtype.
func randomSparse(t *testing.T, r *rand.Rand, d tensor.DType, sparseDims int, shape ...int) *tensor.Tensor {
	t.Helper()
	nnz := r.IntN(20)
	if slices.Contains(shape[:sparseDims], 0) {
		nnz = 0
	}
	at := make([]int64, sparseDims*nnz)
	for i := range at {
		at[i] = int64(r.IntN(shape[i/nnz]))
	}
	values := musts.Get(tensor.New(d, append([]int{nnz}, shape[sparseDims:]...)...))
	each(values.Shape(), func(index []int) { require.NoError(t, values.SetFloat64(float64(r.IntN(2)), index...)) })
	return sparse(t, of(t, at, sparseDims, nnz), values, shape...)
}

func TestSparseAgainstDense(t *testing.T) {
	r := seeded(t)
	for round := range 400 {
		all := tensor.DTypes()
		d := all[round%len(all)]
		shape := make([]int, r.IntN(4))
		for i := range shape {
			shape[i] = r.IntN(5)
			if r.IntN(4) > 0 {
				shape[i]++
			}
		}
		dims := r.IntN(len(shape) + 1)
		want := musts.Get(tensor.New(d, shape...))
		var ts []*tensor.Tensor
		for range 1 + r.IntN(4) {
			s := randomSparse(t, r, d, dims, shape...)
			ts = append(ts, s)
			at := data[int64](t, s.Indices())
			each(s.Values().Shape(), func(index []int) {
				place := []int{}
				for dim := range dims {
					place = append(place, int(at[dim*s.NNZ()+index[0]]))
				}
				place = append(place, index[1:]...)
				a := musts.Get(realAt(want, place))
				require.NoError(t, want.SetFloat64(a+musts.Get(realAt(s.Values(), index)), place...))
			})
		}
		sum := musts.Get(tensor.SumSparse(ts...))
		require.True(t, sum.IsCoalesced())
		got := musts.Get(sum.Dense())
		equal(t, want, got)

		back := musts.Get(tensor.FromDense(want, dims))
		require.True(t, back.IsCoalesced())
		require.Equal(t, dims, back.SparseDims())
		got = musts.Get(back.Dense())
		equal(t, want, got)

		// SetSparse looks at the order: whatever claims to be coalesced is.
		for _, s := range []*tensor.Tensor{sum, back} {
			require.NoError(t, ts[0].SetSparse(s.Indices(), s.Values(), true))
			require.True(t, ts[0].IsCoalesced())
			equal(t, s, ts[0])
			c := musts.Get(s.Clone())
			equal(t, s, c)
		}
	}
}

// realAt is Float64At, of a complex tensor the real part.
func realAt(x *tensor.Tensor, index []int) (_ float64, err error) {
	defer musts.Catch(&err)
	if x.DType().IsComplex() {
		return musts.Get(x.ViewAsReal()).Float64At(append(slices.Clone(index), 0)...)
	}
	return x.Float64At(index...)
}

func TestFromDenseKeepsWhatIsNotZero(t *testing.T) {
	negZero := math.Copysign(0, -1)
	x := of(t, []float64{0, negZero, math.NaN(), 0, 0, 0, 5e-324, 0}, 4, 2)
	s := musts.Get(tensor.FromDense(x, 1))
	require.Equal(t, []int64{1, 3}, data[int64](t, s.Indices()))
	s = musts.Get(tensor.FromDense(x, 2))
	require.Equal(t, []int64{1, 3, 0, 0}, data[int64](t, s.Indices()))
	flipped, err := x.Transpose(0, 1)
	require.NoError(t, err)
	s = musts.Get(tensor.FromDense(flipped, 1))
	require.Equal(t, []int64{0}, data[int64](t, s.Indices()))
	for _, dims := range []int{-1, 3} {
		require.ErrorIs(t, musts.Err(tensor.FromDense(x, dims)), tensor.ErrInvalid)
	}
}

func TestSparseErrors(t *testing.T) {
	at := of(t, []int64{0, 3}, 1, 2)
	values := of(t, []float32{1, 2}, 2)
	s := sparse(t, at, values, 4)
	dense, err := s.Dense()
	require.NoError(t, err)
	other := sparse(t, of(t, []int64{0}, 1, 1), of(t, []float64{1}, 1), 4)

	for name, call := range map[string]func() error{
		"nil indices":       func() error { _, err := tensor.Sparse(nil, values, 4); return err },
		"nil values":        func() error { _, err := tensor.Sparse(at, nil, 4); return err },
		"outside":           func() error { _, err := tensor.Sparse(at, values, 3); return err },
		"negative index":    func() error { _, err := tensor.Sparse(of(t, []int64{0, -1}, 1, 2), values, 4); return err },
		"int32 indices":     func() error { _, err := tensor.Sparse(of(t, []int32{0, 1}, 1, 2), values, 4); return err },
		"flat indices":      func() error { _, err := tensor.Sparse(of(t, []int64{0, 1}, 2), values, 4); return err },
		"too few values":    func() error { _, err := tensor.Sparse(at, of(t, []float32{1}, 1), 4); return err },
		"scalar values":     func() error { _, err := tensor.Sparse(at, of(t, []float32{1}), 4); return err },
		"other dense shape": func() error { _, err := tensor.Sparse(at, values, 4, 2); return err },
		"too many sparse": func() error {
			return musts.Err(tensor.Sparse(of(t, []int64{0, 0}, 2, 1), of(t, []float32{1}, 1), 4))
		},
		"huge shape":        func() error { _, err := tensor.Sparse(at, values, 4, math.MaxInt/2+1, 4); return err },
		"sparse values":     func() error { _, err := tensor.Sparse(at, s, 4); return err },
		"set dense":         func() error { return dense.SetSparse(at, values, false) },
		"set other dtype":   func() error { return s.SetSparse(at, other.Values(), false) },
		"set other dtype 2": func() error { return s.SetSparse(other.Indices(), other.Values(), false) },
		"set outside":       func() error { return s.SetSparse(of(t, []int64{0, 4}, 1, 2), values, false) },
		"set unsorted":      func() error { return s.SetSparse(of(t, []int64{3, 0}, 1, 2), values, true) },
		"set twice":         func() error { return s.SetSparse(of(t, []int64{3, 3}, 1, 2), values, true) },
		"set other dims":    func() error { return s.SetSparse(of(t, []int64{}, 0, 1), of(t, []float32{1, 2, 3, 4}, 1, 4), true) },
		"set nil":           func() error { return s.SetSparse(nil, nil, true) },
		"sum nothing":       func() error { _, err := tensor.SumSparse(); return err },
		"sum nil":           func() error { _, err := tensor.SumSparse(s, nil); return err },
		"sum dtypes":        func() error { _, err := tensor.SumSparse(s, other); return err },
		"sum dense":         func() error { _, err := tensor.SumSparse(dense); return err },
		"coalesce dense":    func() error { _, err := dense.Coalesce(); return err },
		"dense dense":       func() error { _, err := dense.Dense(); return err },
		"from sparse":       func() error { _, err := tensor.FromDense(s, 1); return err },
		"pack sparse":       func() error { return s.Pack(make([]byte, s.ByteLen())) },
		"copy from sparse":  func() error { return dense.CopyFrom(s) },
		"compare":           func() error { _, err := s.Equal(dense); return err },
		"slice sparse":      func() error { _, err := s.Slice(0, 0, 1); return err },
		"element of sparse": func() error { _, err := s.Float64At(0); return err },
	} {
		err := call()
		require.ErrorIs(t, err, tensor.ErrInvalid, name)
		require.Contains(t, err.Error(), "tensor: ", name)
	}
	require.Equal(t, []int64{0, 3}, data[int64](t, s.Indices()), "a refused SetSparse keeps the entries")
}

// TestCoalesceAgreesWithTorch compares the bits of a rank-order sum with what
// PyTorch's add and coalesce make of the same entries.
func TestCoalesceAgreesWithTorch(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	type job struct {
		DType   string    `json:"dtype"`
		Shape   []int     `json:"shape"`
		Indices [][]int64 `json:"indices"`
		Values  []string  `json:"values"`
		ts      []*tensor.Tensor
	}
	var jobs []job
	for _, d := range []tensor.DType{
		tensor.Uint8, tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64, tensor.Float16,
		tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Complex64, tensor.Complex128,
	} {
		for round := range 6 {
			j := job{DType: d.String(), Shape: []int{7, 5, 3}}
			for range 1 + round {
				// Unique: PyTorch sorts coordinates of one tensor unstably.
				cells := r.Perm(35)[:r.IntN(36)]
				nnz := len(cells)
				at := make([]int64, 2*nnz)
				for i, c := range cells {
					at[i], at[nnz+i] = int64(c/5), int64(c%5)
				}
				values := musts.Get(tensor.New(d, nnz, 3))
				flat := values
				if d.IsComplex() {
					flat = musts.Get(values.ViewAsReal())
				}
				each(flat.Shape(), func(index []int) {
					v := r.NormFloat64() * math.Exp2(float64(r.IntN(8)))
					if d.IsUnsigned() {
						v = math.Min(math.Abs(v), 255)
					}
					require.NoError(t, flat.SetFloat64(max(min(v, 255), -128)*clamp(d), index...))
				})
				s := musts.Get(sparse(t, of(t, at, 2, nnz), values, j.Shape...).Coalesce())
				j.ts = append(j.ts, s)
				j.Indices = append(j.Indices, at)
				j.Values = append(j.Values, hex.EncodeToString(values.Bytes()))
			}
			jobs = append(jobs, j)
		}
	}
	in := musts.Get(json.Marshal(jobs))
	out := runPython(t, `
import json, sys, torch
def raw(t):
    n = t.numel() * t.element_size()
    return bytes(t.contiguous().view(torch.uint8).numpy().tobytes()).hex() if n else ""
def real(t):
    return torch.view_as_real(t) if t.is_complex() else t
for j in json.load(sys.stdin):
    d = getattr(torch, j["dtype"])
    parts = []
    for at, v in zip(j["indices"], j["values"]):
        at = torch.tensor(at, dtype=torch.int64).reshape(2, -1)
        b = bytearray.fromhex(v)
        vals = torch.frombuffer(b, dtype=d) if b else torch.empty(0, dtype=d)
        s = torch.sparse_coo_tensor(at, vals.reshape(-1, 3), j["shape"]).coalesce()
        parts.append(torch.sparse_coo_tensor(s.indices(), s.values(), j["shape"]))
    if d in (torch.float16, torch.bfloat16):  # have no sparse addition on the CPU
        total = torch.zeros(j["shape"], dtype=d)
        mask = torch.zeros(j["shape"][:2], dtype=torch.bool)
        for p in parts:
            i, k = p._indices()
            z = torch.zeros(j["shape"], dtype=d)
            z[i, k] = p._values()
            mask[i, k] = True
            total = total + z
        i, k = mask.nonzero().t()
        total = torch.sparse_coo_tensor(torch.stack([i, k]), total[i, k], j["shape"])
    else:
        total = parts[0]
        for p in parts[1:]:
            total = total + p
    total = total.coalesce()
    print(raw(total.indices()) + " " + raw(real(total.values())))
`, in)
	lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	require.Len(t, lines, len(jobs))
	for i, j := range jobs {
		sum := musts.Get(tensor.SumSparse(j.ts...))
		got := fmt.Sprintf("%s %s", hex.EncodeToString(little(sum.Indices())), hex.EncodeToString(little(sum.Values())))
		require.Equalf(t, lines[i], got, "%s, %d tensors", j.DType, len(j.ts))
	}
}

// clamp keeps values within int8.
func clamp(d tensor.DType) float64 {
	if d == tensor.Int8 {
		return 0.49
	}
	return 1
}

// little returns the bytes as a little-endian host has them, as the tests'
// PyTorch does: both run on one machine.
func little(x *tensor.Tensor) []byte {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		panic("big-endian host")
	}
	return x.Bytes()
}

func BenchmarkCoalesce(b *testing.B) {
	const nnz = 1 << 20
	r := rand.New(rand.NewPCG(1, 1))
	at := make([]int64, nnz)
	for i := range at {
		at[i] = r.Int64N(1 << 22)
	}
	s := sparse(b, of(b, at, 1, nnz), of(b, make([]float32, nnz), nnz), 1<<22)
	b.SetBytes(12 * nnz)
	for b.Loop() {
		if _, err := s.Coalesce(); err != nil {
			b.Fatal(err)
		}
	}
}
