package tensor_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	musts "github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// places is the naive reference of a view: for each element in row-major order
// its place in the storage.
type places struct {
	shape []int
	at    []int
}

func (p places) count() int {
	n := 1
	for _, d := range p.shape {
		n *= d
	}
	return n
}

// each calls f with every index of shape, in row-major order.
func each(shape []int, f func(index []int)) {
	if slices.Contains(shape, 0) {
		return
	}
	index := make([]int, len(shape))
	for {
		f(index)
		d := len(shape) - 1
		for ; d >= 0; d-- {
			if index[d]++; index[d] < shape[d] {
				break
			}
			index[d] = 0
		}
		if d < 0 {
			return
		}
	}
}

func (p places) get(index []int) int {
	k := 0
	for d, i := range index {
		k = k*p.shape[d] + i
	}
	return p.at[k]
}

// remap builds the reference of a view: shape and, for each of its indices, the
// index of p.
func (p places) remap(shape []int, from func(index []int) []int) places {
	v := places{shape: slices.Clone(shape)}
	each(shape, func(index []int) { v.at = append(v.at, p.get(from(slices.Clone(index)))) })
	return v
}

func asStrided(shape, strides []int, offset int) places {
	v := places{shape: slices.Clone(shape)}
	each(shape, func(index []int) {
		at := offset
		for d, i := range index {
			at += i * strides[d]
		}
		v.at = append(v.at, at)
	})
	return v
}

func seeded(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// randomView applies a random view operation to both; it reports what it did.
func randomView(t *testing.T, r *rand.Rand, v *tensor.Tensor, p places, storage int) (*tensor.Tensor, places, string) {
	t.Helper()
	switch op := r.IntN(6); {
	case op == 0 && len(p.shape) > 0:
		dim := r.IntN(len(p.shape))
		from := r.IntN(p.shape[dim] + 1)
		to := from + r.IntN(p.shape[dim]-from+1)
		w := musts.Get(v.Slice(dim, from, to))
		shape := slices.Clone(p.shape)
		shape[dim] = to - from
		return w, p.remap(shape, func(i []int) []int { i[dim] += from; return i }), fmt.Sprintf("Slice(%d, %d, %d)", dim, from, to)
	case op == 1 && len(p.shape) > 0:
		dim := r.IntN(len(p.shape))
		if p.shape[dim] == 0 {
			require.ErrorIs(t, musts.Err(v.Select(dim, 0)), tensor.ErrInvalid)
			return v, p, "refused Select"
		}
		k := r.IntN(p.shape[dim])
		w := musts.Get(v.Select(dim, k))
		shape := slices.Delete(slices.Clone(p.shape), dim, dim+1)
		return w, p.remap(shape, func(i []int) []int { return slices.Insert(i, dim, k) }), fmt.Sprintf("Select(%d, %d)", dim, k)
	case op == 2 && len(p.shape) > 0:
		a, b := r.IntN(len(p.shape)), r.IntN(len(p.shape))
		w := musts.Get(v.Transpose(a, b))
		shape := slices.Clone(p.shape)
		shape[a], shape[b] = shape[b], shape[a]
		return w, p.remap(shape, func(i []int) []int { i[a], i[b] = i[b], i[a]; return i }), fmt.Sprintf("Transpose(%d, %d)", a, b)
	case op == 3 && v.IsContiguous():
		shape := []int{}
		for rest := p.count(); rest > 1 && len(shape) < 4; {
			n := 1 + r.IntN(rest)
			for rest%n != 0 {
				n--
			}
			shape = append(shape, n)
			rest /= n
			if len(shape) == 4 {
				shape = append(shape, rest)
			}
		}
		left := p.count()
		for _, n := range shape {
			left /= n
		}
		shape = append(shape, left) // 0 for an empty view
		asked := slices.Clone(shape)
		if p.count() > 0 && r.IntN(2) == 0 {
			asked[r.IntN(len(asked))] = -1
		}
		return musts.Get(v.Reshape(asked...)), places{shape: shape, at: p.at}, fmt.Sprintf("Reshape%v", asked)
	case op == 4:
		dims := r.IntN(5)
		shape, strides := make([]int, dims), make([]int, dims)
		for d := range dims {
			shape[d], strides[d] = r.IntN(5), r.IntN(2*storage/3+3)-storage/3-1
			if r.IntN(3) > 0 {
				strides[d] = r.IntN(9) - 4
			}
		}
		offset := r.IntN(storage + 1)
		w, err := v.AsStrided(shape, strides, offset)
		q := asStrided(shape, strides, offset)
		inside := true
		for _, at := range q.at {
			inside = inside && at >= 0 && at < storage
		}
		require.Equalf(t, inside, err == nil, "AsStrided(%v, %v, %d) of %d: %v", shape, strides, offset, storage, err)
		if err != nil {
			require.ErrorIs(t, err, tensor.ErrInvalid)
			return v, p, "refused AsStrided"
		}
		return w, q, fmt.Sprintf("AsStrided(%v, %v, %d)", shape, strides, offset)
	}
	return v, p, "nothing"
}

// storageOf returns a tensor of n elements whose bytes tell elements apart.
func storageOf(t *testing.T, d tensor.DType, n int) *tensor.Tensor {
	t.Helper()
	s := musts.Get(tensor.New(d, n))
	for i := range s.Bytes() {
		s.Bytes()[i] = byte(i*7 + i/d.Size()*13 + i>>8)
	}
	return s
}

func checkView(t *testing.T, v *tensor.Tensor, p places, storage *tensor.Tensor, what string) {
	t.Helper()
	require.Equal(t, len(p.shape), v.Dims(), what)
	require.Equal(t, p.shape, append([]int{}, v.Shape()...), what)
	require.Equal(t, p.count(), v.Len(), what)

	es, mem := v.DType().Size(), storage.Bytes()
	want := []byte{}
	adjacent, overlap := true, false
	seen := map[int]bool{}
	for k, at := range p.at {
		want = append(want, mem[at*es:(at+1)*es]...)
		adjacent = adjacent && at == p.at[0]+k
		overlap = overlap || seen[at]
		seen[at] = true
	}
	require.Equal(t, adjacent, v.IsContiguous(), what)
	require.Equal(t, overlap, v.HasOverlap(), what)

	got := make([]byte, v.ByteLen())
	require.NoError(t, v.Pack(got), what)
	require.Equal(t, want, got, what)
	require.Equal(t, want, append([]byte{}, musts.Get(v.Contiguous()).Bytes()...), what)
	require.ErrorIs(t, v.Pack(make([]byte, len(got)+1)), tensor.ErrInvalid)
	require.ErrorIs(t, v.Unpack(make([]byte, len(got)+1)), tensor.ErrInvalid)

	// Writing back what is there already must change nothing, overlap or not.
	before := slices.Clone(mem)
	require.NoError(t, v.Unpack(got), what)
	require.Equal(t, before, mem, what)
	if overlap {
		return
	}
	for i := range got {
		got[i] ^= 0x5a
	}
	wantMem := slices.Clone(before)
	for k, at := range p.at {
		copy(wantMem[at*es:(at+1)*es], got[k*es:])
	}
	require.NoError(t, v.Unpack(got), what)
	require.Equal(t, wantMem, mem, what)

	// From a view of another stride pattern.
	copy(mem, before)
	other := musts.Get(tensor.New(v.DType(), append(v.Shape(), 2)...))
	strided := musts.Get(other.Select(v.Dims(), 1))
	require.NoError(t, strided.Unpack(got), what)
	require.NoError(t, v.CopyFrom(strided), what)
	require.Equal(t, wantMem, mem, what)
	copy(mem, before)
}

func TestViewsAgainstPlaces(t *testing.T) {
	r := seeded(t)
	for round := range 1500 {
		all := tensor.DTypes()
		d := all[round%len(all)]
		n := r.IntN(200)
		s := storageOf(t, d, n)
		v, p := s, asStrided([]int{n}, []int{1}, 0)
		what := d.String()
		for range 1 + r.IntN(6) {
			var op string
			v, p, op = randomView(t, r, v, p, n)
			what += " " + op
			checkView(t, v, p, s, what)
		}
	}
}

func TestTransposeLarge(t *testing.T) {
	for _, d := range []tensor.DType{tensor.Uint8, tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Complex128} {
		for _, shape := range [][]int{{67, 129}, {3, 500}, {500, 3}, {16, 16}, {5, 33, 47}, {2, 17, 3, 31}} {
			n := asStrided(shape, make([]int, len(shape)), 0).count()
			s := storageOf(t, d, n)
			v := musts.Get(s.Reshape(shape...))
			p := places{shape: shape, at: asStrided([]int{n}, []int{1}, 0).at}
			for a := range shape {
				for b := range a {
					w := musts.Get(v.Transpose(a, b))
					swapped := slices.Clone(shape)
					swapped[a], swapped[b] = swapped[b], swapped[a]
					q := p.remap(swapped, func(i []int) []int { i[a], i[b] = i[b], i[a]; return i })
					checkView(t, w, q, s, fmt.Sprintf("%v%v Transpose(%d, %d)", d, shape, a, b))
				}
			}
		}
	}
}

func TestManyDimensions(t *testing.T) {
	// More axes than a copy keeps on the stack, none of which merge.
	shape, strides := make([]int, 12), make([]int, 12)
	for i := range shape {
		shape[i], strides[i] = 2, 1<<i
	}
	s := storageOf(t, tensor.Int16, 1<<12)
	v := musts.Get(s.AsStrided(shape, strides, 0))
	checkView(t, v, asStrided(shape, strides, 0), s, "bit reversal")
}

func TestAsStridedRefusesWhatLeavesTheStorage(t *testing.T) {
	const big = int(^uint(0) >> 1)
	s := storageOf(t, tensor.Complex128, 10)
	for _, c := range []struct {
		shape, strides []int
		offset         int
	}{
		{[]int{11}, []int{1}, 0},
		{[]int{2}, []int{1}, 9},
		{[]int{2}, []int{-1}, 0},
		{[]int{}, []int{}, 10},
		{[]int{}, []int{}, -1},
		{[]int{0}, []int{1}, 11},
		{[]int{2}, []int{1}, big}, // the last element's place overflows
		{[]int{1}, []int{1}, big},
		{[]int{3}, []int{-big - 1}, 5}, // twice the stride is 0 in 64 bits
		{[]int{3}, []int{big}, 5},
		{[]int{5, 5}, []int{big/4 + 1, 1}, 0},
		{[]int{big / 2}, []int{0}, 0},  // bytes overflow
		{[]int{big / 64}, []int{1}, 0}, // elements leave
		{[]int{-1}, []int{1}, 0},       // negative
		{[]int{2, 2}, []int{1}, 0},     // a stride is missing
		{[]int{2, 2}, []int{9, -9}, 0}, // the corners cancel out
	} {
		_, err := s.AsStrided(c.shape, c.strides, c.offset)
		var e *tensor.Error
		require.ErrorAsf(t, err, &e, "%+v", c)
		require.ErrorIs(t, err, tensor.ErrInvalid)
		require.Equal(t, "AsStrided", e.Op)
	}
	// Strides of what has no second element do not matter.
	for _, shape := range [][]int{{1}, {0}, {0, 5}} {
		v := musts.Get(s.AsStrided(shape, []int{-big - 1, big}[:len(shape)], 5))
		require.True(t, v.IsContiguous())
		require.NoError(t, v.Pack(make([]byte, v.ByteLen())))
	}
}

func TestHasOverlap(t *testing.T) {
	s := storageOf(t, tensor.Uint8, 100)
	for _, c := range []struct {
		shape, strides []int
		want           bool
	}{
		{[]int{4, 3}, []int{3, 1}, false},
		{[]int{4, 3}, []int{2, 1}, true},
		{[]int{3}, []int{0}, true},
		{[]int{1}, []int{0}, false},
		{[]int{0, 3}, []int{0, 0}, false},
		{[]int{3, 4}, []int{5, 3}, false}, // 0 3 6 9, 5 8 11 14, 10 13 16 19: strides do not nest
		{[]int{4, 6}, []int{5, 3}, true},  // 15 = 3*5 = 5*3
		{[]int{3, 4}, []int{-5, 3}, false},
	} {
		v := musts.Get(s.AsStrided(c.shape, c.strides, 20))
		require.Equalf(t, c.want, v.HasOverlap(), "%v %v", c.shape, c.strides)
	}
}

// FuzzAsStrided looks for a view that AsStrided lets through and that Pack or
// Unpack then leaves the storage with.
func FuzzAsStrided(f *testing.F) {
	f.Add(uint8(6), 16, 2, 3, 4, 8, 4, 1, 0)
	f.Add(uint8(1), 9, 3, 1, 3, math.MinInt, 0, -1, 4)
	f.Add(uint8(10), 0, 0, 5, math.MaxInt/2+1, math.MaxInt/2+1, 1, 0, 0)
	f.Add(uint8(9), 100, 1<<(strconv.IntSize/2-1), 1<<(strconv.IntSize/2-1), 4, 0, 0, 0, 3)
	f.Fuzz(func(t *testing.T, dtype uint8, n, d0, d1, d2, s0, s1, s2, offset int) {
		d := tensor.DType(dtype)
		if !d.Valid() || n < 0 || n > 1<<12 {
			return
		}
		s := musts.Get(tensor.New(d, n))
		v, err := s.AsStrided([]int{d0, d1, d2}, []int{s0, s1, s2}, offset)
		if err != nil {
			require.ErrorIs(t, err, tensor.ErrInvalid)
			return
		}
		if v.Len() > 1<<16 {
			return // stride 0 makes as many elements as one likes
		}
		packed := make([]byte, v.ByteLen())
		for i := range packed {
			packed[i] = byte(i)
		}
		require.NoError(t, v.Unpack(packed))
		got := make([]byte, len(packed))
		require.NoError(t, v.Pack(got))
		if !v.HasOverlap() {
			require.Equal(t, packed, got)
		}
		if v.Len() > 0 {
			lo, hi := v.Offset(), v.Offset()
			for i, k := range v.Shape() {
				lo += min(0, (k-1)*v.Strides()[i])
				hi += max(0, (k-1)*v.Strides()[i])
			}
			require.GreaterOrEqual(t, lo, 0)
			require.Less(t, hi, n)
		}
	})
}

func TestAllocations(t *testing.T) {
	data := make([]float32, 12)
	// Through variables, so that the compiler cannot fold the calls away.
	var v *tensor.Tensor
	var b []byte
	var f []float32
	var err error
	count := func(want int, what string, call func()) {
		t.Helper()
		got := testing.AllocsPerRun(100, call)
		require.NoError(t, err)
		require.LessOrEqualf(t, got, float64(want), what)
	}
	count(2, "Of", func() { v, err = tensor.Of(data, 3, 4) })
	count(2, "Of without a shape", func() { v, err = tensor.Of(data) })
	count(1, "Of a scalar", func() { v, err = tensor.Of(data[:1], []int{}...) })
	v = musts.Get(tensor.Of(data, 3, 4))
	whole := v
	count(0, "Bytes", func() { b = whole.Bytes() })
	require.Len(t, b, 48)
	count(0, "Data", func() { f, err = tensor.Data[float32](whole) })
	require.Len(t, f, 12)
	count(2, "Slice", func() { v, err = whole.Slice(1, 1, 3) })
	cols := v
	packed := make([]byte, cols.ByteLen())
	count(0, "Pack", func() { err = cols.Pack(packed) })
	count(0, "Unpack", func() { err = cols.Unpack(packed) })
	count(0, "CopyFrom", func() { err = cols.CopyFrom(cols) })
	count(0, "Fill", func() { err = cols.Fill(3) })
	count(0, "SetFloat64", func() { err = cols.SetFloat64(3, 1, 1) })
	count(0, "Float64At", func() { _, err = cols.Float64At(1, 1) })
	flipped, err := whole.Transpose(0, 1)
	require.NoError(t, err)
	full := make([]byte, flipped.ByteLen())
	count(0, "Pack of a transpose", func() { err = flipped.Pack(full) })
}

// BenchmarkPack sets strided copies beside a plain one of as many bytes.
func BenchmarkPack(b *testing.B) {
	const n = 2048
	for _, d := range []tensor.DType{tensor.Uint8, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		whole := musts.Get(tensor.New(d, n, n))
		for _, c := range []struct {
			name           string
			shape, strides []int
		}{
			{"memcpy", []int{n, n / 2}, []int{n / 2, 1}},
			{"columns1024", []int{n, 1024}, []int{n, 1}},
			{"columns16", []int{n, 16}, []int{n, 1}},
			{"column", []int{n, 1}, []int{n, 1}},
			{"everySecond", []int{n, n / 2}, []int{n, 2}},
			{"transpose", []int{n, n}, []int{1, n}},
			{"narrowTranspose", []int{n * n / 4, 4}, []int{1, n * n / 4}},
		} {
			v := musts.Get(whole.AsStrided(c.shape, c.strides, 0))
			packed := make([]byte, v.ByteLen())
			b.Run(fmt.Sprintf("%s/%v", c.name, d), func(b *testing.B) {
				b.SetBytes(int64(len(packed)))
				for b.Loop() {
					if err := v.Pack(packed); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("un%s/%v", c.name, d), func(b *testing.B) {
				b.SetBytes(int64(len(packed)))
				for b.Loop() {
					if err := v.Unpack(packed); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
