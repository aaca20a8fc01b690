package detail

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func zeros(t *testing.T, d tensor.DType, shape ...int) *tensor.Tensor {
	t.Helper()
	return must.Get(tensor.New(d, shape...))
}

var v1, v2 = form{}, form{numbered: true}

// TestOwn: what ranks of this library tell each other besides.
func TestOwn(t *testing.T) {
	max := backend.Max()
	c := call{
		op: work.Reduce, tensors: one(zeros(t, tensor.Int32, 7)), more: one(zeros(t, tensor.Complex64, 2)),
		root: 3, reduce: &max,
	}
	f := c.fingerprint(true)
	require.Equal(t, "reduce with max of int32 [7] on cpu, complex64 [2] on cpu, root 2", f.String())
	m := form{numbered: true, own: true}
	w := f.words(m)
	require.Equal(t, []int64{3, 0, 2, 3, 9, 0, 0, 1, 7, 1, 2, 2, 4}, w)
	require.Equal(t, f, must.Get(parse(w, m)))
	for _, bad := range [][]int64{{3, 0, 0}, {15, 0, 0, -2, -1}, {15, 0, 0, 0, 256}, {15, 0, 0, 1 << 40, 0}} {
		require.ErrorContains(t, must.Err(parse(bad, m)), "no fingerprint", "%v", bad)
	}
	require.Equal(t, "reduce of int32 [7] on cpu", c.fingerprint(false).String())
}

// TestGolden holds fingerprints against what PyTorch 1.13.1 and 2.6.0 sent for
// the same calls, read off their control groups.
func TestGolden(t *testing.T) {
	x := func(d tensor.DType, shape ...int) *tensor.Tensor { return zeros(t, d, shape...) }
	for _, c := range []struct {
		name   string
		op     work.OpType
		seq    uint64
		asReal bool
		ts     []*tensor.Tensor
		v1, v2 []int64
		text   string
	}{
		{"all_reduce", work.AllReduce, 0, true, one(x(tensor.Float32, 2, 3)),
			[]int64{1, 1, 6, 0, 2, 2, 3}, []int64{1, 0, 1, 6, 0, 2, 2, 3}, "all_reduce of float32 [2 3] on cpu"},
		{"a scalar", work.AllReduce, 1, true, one(x(tensor.Int8)),
			[]int64{1, 1, 1, 0, 0}, []int64{1, 1, 1, 1, 0, 0}, "all_reduce of int8 [] on cpu"},
		{"complex numbers as real ones", work.AllReduce, 2, true, one(x(tensor.Complex64, 2, 3)),
			[]int64{1, 1, 6, 0, 3, 2, 3, 2}, []int64{1, 2, 1, 6, 0, 3, 2, 3, 2}, "all_reduce of float32 [2 3 2] on cpu"},
		{"no tensors", work.AllReduceCoalesced, 3, false, nil,
			[]int64{2, 0}, []int64{2, 3, 0}, "all_reduce_coalesced"},
		{"broadcast", work.Broadcast, 4, false, one(x(tensor.Float64, 4)),
			[]int64{0, 1, 7, 0, 1, 4}, []int64{0, 4, 1, 7, 0, 1, 4}, "broadcast of float64 [4] on cpu"},
		{"reduce", work.Reduce, 5, false, one(x(tensor.Int32, 4)),
			[]int64{3, 1, 3, 0, 1, 4}, []int64{3, 5, 1, 3, 0, 1, 4}, "reduce of int32 [4] on cpu"},
		{"all_gather", work.AllGather, 6, true, one(x(tensor.Float16, 5, 2)),
			[]int64{4, 1, 5, 0, 2, 5, 2}, []int64{4, 6, 1, 5, 0, 2, 5, 2}, "all_gather of float16 [5 2] on cpu"},
		{"gather", work.Gather, 7, false, one(x(tensor.Uint8, 5)),
			[]int64{7, 1, 0, 0, 1, 5}, []int64{7, 7, 1, 0, 0, 1, 5}, "gather of uint8 [5] on cpu"},
		{"complex numbers as they are", work.Gather, 24, false, one(x(tensor.Complex64, 2, 3)),
			[]int64{7, 1, 9, 0, 2, 2, 3}, []int64{7, 24, 1, 9, 0, 2, 2, 3}, "gather of complex64 [2 3] on cpu"},
		{"scatter", work.Scatter, 8, true, one(x(tensor.Int64, 5)),
			[]int64{8, 1, 4, 0, 1, 5}, []int64{8, 8, 1, 4, 0, 1, 5}, "scatter of int64 [5] on cpu"},
		{"barrier", work.Barrier, 9, false, nil, []int64{15, 0}, []int64{15, 9, 0}, "barrier"},
		{"all_to_all_single", work.AllToAllSingle, 10, false, nil, []int64{10, 0}, []int64{10, 10, 0}, "all_to_all_single"},
		{"all_gather_into_tensor", work.AllGatherIntoTensor, 17, true, one(x(tensor.Float32, 2)),
			nil, []int64{5, 17, 1, 6, 0, 1, 2}, "all_gather_into_tensor of float32 [2] on cpu"},
		{"reduce_scatter_tensor", work.ReduceScatterTensor, 19, false, []*tensor.Tensor{x(tensor.Float32, 4, 7), x(tensor.Float32, 2, 7)},
			nil, []int64{16, 19, 2, 6, 6, 0, 0, 2, 4, 7, 2, 2, 7}, "reduce_scatter_tensor of float32 [4 7] on cpu, float32 [2 7] on cpu"},
		{"bfloat16", work.AllReduce, 20, true, one(x(tensor.BFloat16, 1)),
			nil, []int64{1, 20, 1, 15, 0, 1, 1}, "all_reduce of bfloat16 [1] on cpu"},
		{"bool", work.AllReduce, 21, true, one(x(tensor.Bool, 1)),
			nil, []int64{1, 21, 1, 11, 0, 1, 1}, "all_reduce of bool [1] on cpu"},
		{"int16", work.AllReduce, 29, true, one(x(tensor.Int16, 1)),
			[]int64{1, 1, 2, 0, 1, 1}, []int64{1, 29, 1, 2, 0, 1, 1}, "all_reduce of int16 [1] on cpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := (&call{op: c.op, tensors: c.ts, real: c.asReal}).fingerprint(false)
			f.Seq = c.seq
			require.Equal(t, c.text, f.String())
			require.Equal(t, c.v2, f.words(v2))
			back := must.Get(parse(c.v2, v2))
			require.Equal(t, c.v2, back.words(v2))
			if c.v1 == nil {
				return // PyTorch 1.13 has no such operation
			}
			require.Equal(t, c.v1, f.words(v1))
			back = must.Get(parse(c.v1, v1))
			require.Equal(t, c.v1, back.words(v1))
			require.Zero(t, back.Seq)
		})
	}
}

// TestParse gives parse all kinds of numbers: it returns an error or what
// makes the same numbers again.
func TestParse(t *testing.T) {
	for _, bad := range [][]int64{
		nil, {1}, {1, 0}, {-1, 0, 0}, {256, 0, 0}, {1, 0, -1}, {1, 0, 1}, {1, 0, 1 << 62}, {1, 0, 1, 6, 0},
		{1, 0, 1, 6, 0, 2, 3}, {1, 0, 1, 6, 0, -1}, {1, 0, 1, 6, 0, 1 << 62, 1}, {15, 0, 0, 7}, {1, 0, 1, 6, 0, 1, 5, 5},
	} {
		require.ErrorContains(t, must.Err(parse(bad, v2)), "no fingerprint", "%v", bad)
	}
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 20000 {
		w := make([]int64, rng.IntN(14))
		for i := range w {
			w[i] = int64(rng.IntN(6) - 1)
		}
		for _, m := range []form{v1, v2, form{own: true}, form{numbered: true, own: true}} {
			if f, err := parse(w, m); err == nil {
				require.Equal(t, w, f.words(m), "seed %d", seed)
				require.NotEmpty(t, f.String())
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{1, 0, 1, 6, 0, 2, 2, 3}, true, false)
	f.Add([]byte{15, 0}, false, false)
	f.Add([]byte{3, 0, 1, 6, 0, 1, 2, 1, 4}, true, true)
	f.Add([]byte{1, 0, 255, 6, 0, 200, 2, 3}, true, false)
	f.Fuzz(func(t *testing.T, b []byte, numbered, own bool) {
		m := form{numbered, own}
		w := make([]int64, len(b))
		for i, x := range b {
			w[i] = int64(int8(x))
			if x > 250 {
				w[i] <<= 56 // beyond what any count may be
			}
		}
		if got, err := parse(w, m); err == nil {
			require.Equal(t, w, got.words(m))
			require.NotEmpty(t, got.String())
		}
	})
}

func TestWords(t *testing.T) {
	for _, c := range []struct {
		n    int64
		form form
		want string
	}{
		{2, v1, "not compared"},
		{3, v2, "not compared"},
		{5, v1, "a tensor of 0 dimensions"},
		{8, v2, "a tensor of 2 dimensions"},
		{1, v2, "fingerprint of 1 numbers"},
		{-1 << 63, v2, "a fingerprint of -9223372036854775808 numbers"},
	} {
		require.Contains(t, ofLength(c.n, c.form), c.want)
	}
	strange := Fingerprint{Op: 77, Tensors: []Tensor{{DType: 99, Device: -1}}, Root: -1, Operator: -1}
	require.Equal(t, "op(77) of dtype 99 of PyTorch [] on device type -1 of PyTorch", strange.String())
	require.Equal(t, "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more call", ranks([]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}))
}
