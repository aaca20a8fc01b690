package reduce

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
)

// special holds values at which floats change their ways: zeros, the smallest
// and largest subnormal, normal and overflowing numbers of each width, ties.
var special = func() []float64 {
	v := []float64{
		0, 1, 2, 3, 0.5, 1.0 / 3, math.Inf(1), math.NaN(), math.MaxFloat64, math.SmallestNonzeroFloat64,
		math.MaxFloat32, math.SmallestNonzeroFloat32, 65504, 65519, 65520, 61439, 61440, 57344, 448, 464, 465, 480,
		1 + 1.0/256, 1 + 3.0/256, 1 + 1.0/2048, 1 + 3.0/2048, 1 + 1.0/16, 1 + 3.0/16, 1 + 1.0/8, 1 + 3.0/8,
	}
	for _, e := range []int{-150, -149, -127, -126, -25, -24, -15, -14, -17, -16, -10, -9, -7, -6} {
		v = append(v, math.Ldexp(1, e), math.Ldexp(1.5, e), math.Ldexp(1.875, e))
	}
	for _, x := range slices.Clone(v) {
		v = append(v, math.Copysign(x, -1))
	}
	return v
}()

// fill sets b to random elements of dtype d, many of them special.
func fill(rng *rand.Rand, d tensor.DType, b []byte) {
	d = part(d)
	for i := 0; i < len(b); i += d.Size() {
		e := b[i:][:d.Size()]
		setBits(d, e, rng.Uint64())
		switch rng.IntN(4) {
		case 0:
			if d.IsFloat() {
				encode(d, e, special[rng.IntN(len(special))])
			} else {
				setBits(d, e, []uint64{0, 1, math.MaxUint64, 1 << (8*d.Size() - 1), 1<<(8*d.Size()-1) - 1}[rng.IntN(5)])
			}
		case 1:
			if d.IsFloat() {
				encode(d, e, rng.NormFloat64())
			}
		}
	}
}

func check(t *testing.T, k Kind, d tensor.DType, dst, src, want, got []byte) {
	t.Helper()
	p := part(d)
	for i := 0; i < len(got); i += p.Size() {
		if !same(k, p, want[i:][:p.Size()], got[i:][:p.Size()]) {
			t.Fatalf("%v of %v: element %d: %x and %x make %x, not %x", k, d, i/d.Size(),
				dst[i:][:p.Size()], src[i:][:p.Size()], want[i:][:p.Size()], got[i:][:p.Size()])
		}
	}
}

func eachKernel(t *testing.T, test func(t *testing.T, k Kind, d tensor.DType, f Func)) {
	for _, d := range tensor.DTypes() {
		for k := Sum; k < Custom; k++ {
			if f, err := Kernel(k, d); err == nil {
				t.Run(fmt.Sprintf("%v/%v", d, k), func(t *testing.T) { test(t, k, d, f) })
			}
		}
	}
	if hasAssembly() {
		for p, f := range portable() {
			t.Run(fmt.Sprintf("portable/%v/%v", p.dtype, p.kind), func(t *testing.T) { test(t, p.kind, p.dtype, f) })
		}
	}
}

func TestKernels(t *testing.T) {
	rng := must.Rand(t)
	lengths := []int{0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 4099}
	lengths = lengths[:testsize.Of(12, 13, 14)] // 12 under an emulator
	eachKernel(t, func(t *testing.T, k Kind, d tensor.DType, f Func) {
		for _, n := range lengths {
			for _, skip := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {3, 5}, {d.Size(), 0}} {
				bytes := n * d.Size()
				a, b := make([]byte, bytes+32), make([]byte, bytes+32)
				for _, x := range [][]byte{a, b} {
					for i := range x {
						x[i] = 0xee
					}
				}
				dst, src := a[skip[0]:][:bytes], b[skip[1]:][:bytes]
				fill(rng, d, dst)
				fill(rng, d, src)
				before, operand, want := slices.Clone(dst), slices.Clone(b), slices.Clone(dst)
				reference(k, d, want, src)
				f(dst, src)
				check(t, k, d, before, src, want, dst)
				require.Equal(t, operand, b, "the received operand was written")
				for i, x := range a {
					if i < skip[0] || i >= skip[0]+bytes {
						require.EqualValues(t, 0xee, x, "byte %d outside of the operand was written", i)
					}
				}

				same := slices.Clone(dst)
				want = slices.Clone(dst)
				reference(k, d, want, slices.Clone(dst))
				f(dst, dst)
				check(t, k, d, same, same, want, dst)
			}
		}
	})
}

// TestPieces crosses the bounds of pieces and of unaligned blocks.
func TestPieces(t *testing.T) {
	rng := must.Rand(t)
	for _, d := range []tensor.DType{tensor.Float32, tensor.Complex128, tensor.Bool, tensor.Float16} {
		f := must.Get(Kernel(Sum, d))
		for _, bytes := range []int{block, block + 16, piece, piece + 16, 2*piece + 48} {
			for skip := range 2 {
				a, src := make([]byte, bytes+1), make([]byte, bytes)
				dst := a[skip:][:bytes]
				fill(rng, d, src)
				small := slices.Clone(dst)
				for i := 0; i < bytes; i += 16 {
					f(small[i:][:16], src[i:][:16])
				}
				f(dst, src)
				require.True(t, slices.Equal(small, dst), "%v, %d bytes", d, bytes)
			}
		}
	}
}

// TestAlignment proves that loops see aligned elements only: some processors
// fault on others.
func TestAlignment(t *testing.T) {
	calls := 0
	f := bounded(8, func(dst, src []uint64) {
		calls++
		for _, p := range []*uint64{&dst[0], &src[0]} {
			require.Zero(t, uintptr(unsafe.Pointer(p))%unsafe.Alignof(*p))
		}
	})
	a, b := make([]byte, 64), make([]byte, 64)
	for i := range 8 {
		for j := range 8 {
			f(a[i:][:16], b[j:][:16])
		}
	}
	require.Equal(t, 64, calls)
}

// TestNarrow tries every value of the two-byte floats, and every pair of fp8.
func TestNarrow(t *testing.T) {
	rng := must.Rand(t)
	for d := range layouts {
		for _, k := range []Kind{Sum, Product, Min, Max} {
			t.Run(fmt.Sprintf("%v/%v", d, k), func(t *testing.T) {
				f := must.Get(Kernel(k, d))
				const n = 1 << 16
				dst, src := make([]byte, n*d.Size()), make([]byte, n*d.Size())
				fill(rng, d, src)
				for i := range n {
					if d.Size() == 1 {
						dst[i], src[i] = uint8(i>>8), uint8(i)
					} else {
						setBits(d, dst[2*i:], uint64(i))
					}
				}
				before, want := slices.Clone(dst), slices.Clone(dst)
				reference(k, d, want, src)
				f(dst, src)
				check(t, k, d, before, src, want, dst)
			})
		}
	}
}

// TestRoundF16 holds the quick rounding against the tensor package's.
func TestRoundF16(t *testing.T) {
	rng := must.Rand(t)
	try := func(b uint32) {
		f := math.Float32frombits(b)
		want := uint16(tensor.F16From(f))
		got, ok := roundF16(f)
		if normal := math.Abs(float64(f)) >= 0x1p-14 && math.Abs(float64(f)) < 65520; ok != normal || ok && want != got {
			t.Fatalf("%#x rounds to %#x, not to %#x (%v)", b, want, got, ok)
		}
	}
	for range 1 << 20 {
		try(rng.Uint32())
	}
	for exp := range uint32(256) { // the ties, and what is next to them, in every binade
		for man := range uint32(1 << 11) {
			for near := range uint32(3) {
				b := exp<<23 | man<<12
				try(b + near - 1)
				try(b + near - 1 | 1<<31)
			}
		}
	}
}

func TestNaN(t *testing.T) {
	for _, d := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Float8E4M3, tensor.Float8E5M2} {
		for _, k := range []Kind{Min, Max} {
			f := must.Get(Kernel(k, d))
			nan, one := make([]byte, d.Size()), make([]byte, d.Size())
			encode(d, nan, math.NaN())
			encode(d, one, 1)
			dst := slices.Clone(nan)
			f(dst, one)
			require.Equal(t, nan, dst, "%v of %v: a local NaN stays", k, d)
			dst = slices.Clone(one)
			f(dst, nan)
			require.Equal(t, one, dst, "%v of %v: a received NaN is dropped", k, d)

			zero, minus := make([]byte, d.Size()), make([]byte, d.Size())
			encode(d, minus, math.Copysign(0, -1))
			dst = slices.Clone(zero)
			f(dst, minus)
			require.Equal(t, zero, dst, "%v of %v: zeros are equal, the local one stays", k, d)
		}
	}
}

func TestBool(t *testing.T) {
	for k, want := range map[Kind][4]byte{ // of 0 0, 0 x, x 0, x y
		Sum: {0, 1, 1, 1}, Max: {0, 1, 1, 1}, BOr: {0, 1, 1, 1},
		Product: {0, 0, 0, 1}, Min: {0, 0, 0, 1}, BAnd: {0, 0, 0, 1},
		BXor: {0, 1, 1, 0},
	} {
		f := must.Get(Kernel(k, tensor.Bool))
		for x := 1; x < 256; x++ {
			for y := 1; y < 256; y++ {
				// Twelve bytes: a word, and what is left over.
				a := []byte{0, 0, byte(x), byte(x), 0, 0, byte(x), byte(x), 0, 0, byte(x), byte(x)}
				b := []byte{0, byte(y), 0, byte(y), 0, byte(y), 0, byte(y), 0, byte(y), 0, byte(y)}
				f(a, b)
				if !slices.Equal(slices.Repeat(want[:], 3), a) {
					t.Fatalf("%v of %d and %d: %v", k, x, y, a)
				}
			}
		}
	}
}

func TestUnsupported(t *testing.T) {
	bitwise := []Kind{BAnd, BOr, BXor}
	refused := func(d tensor.DType) []Kind {
		switch {
		case d == tensor.Bool:
			return []Kind{Avg, PreMulSum}
		case d.IsInteger():
			return []Kind{Avg}
		case d.IsComplex():
			return append([]Kind{Product, Min, Max}, bitwise...)
		}
		return bitwise
	}
	for _, d := range tensor.DTypes() {
		for k := Sum; k < Custom; k++ {
			f, err := Kernel(k, d)
			if slices.Contains(refused(d), k) {
				u := must.As[*UnsupportedError](t, err)
				require.ErrorIs(t, err, ErrUnsupported)
				require.Equal(t, [2]any{k, d}, [2]any{u.Kind, u.DType})
				require.Contains(t, err.Error(), fmt.Sprintf("reduce: %v of %v: ", k, d))
				require.Nil(t, f)
			} else {
				require.NoError(t, err)
				require.NotNil(t, f, "%v of %v", k, d)
			}
		}
		_, err := Divide(d, 2)
		require.Equal(t, slices.Contains(refused(d), Avg), errors.Is(err, ErrUnsupported), "divide %v", d)
		_, err = PreMul(d, 2)
		require.Equal(t, slices.Contains(refused(d), PreMulSum), errors.Is(err, ErrUnsupported), "premul %v", d)
	}
	for _, c := range []struct {
		k Kind
		d tensor.DType
	}{{Custom, tensor.Float32}, {Custom + 1, tensor.Float32}, {Sum, tensor.Invalid}, {Sum, 200}} {
		require.ErrorIs(t, must.Err(Kernel(c.k, c.d)), ErrUnsupported)
	}
	for _, n := range []int{0, -1} {
		require.Error(t, must.Err(Divide(tensor.Float32, n)))
	}
	for _, factor := range []float64{0.5, math.NaN(), math.Inf(1), math.Inf(-1), 1 << 54} {
		require.ErrorIs(t, must.Err(PreMul(tensor.Int32, factor)), ErrUnsupported, "%v", factor)
	}
}

func TestLengths(t *testing.T) {
	f := must.Get(Kernel(Sum, tensor.Complex64))
	require.Panics(t, func() { f(make([]byte, 8), make([]byte, 16)) })
	require.Panics(t, func() { f(make([]byte, 12), make([]byte, 12)) })
	div := must.Get(Divide(tensor.Float32, 2))
	require.Panics(t, func() { div(make([]byte, 3)) })
}

func TestScale(t *testing.T) {
	rng := must.Rand(t)
	for _, d := range tensor.DTypes() {
		p := part(d)
		for _, x := range []float64{1, 2, 3, 7, -3, 0.1, 48, 1000, 3001, 65537} {
			for skip := range 2 {
				b := make([]byte, 333*d.Size()+1)[skip:][:333*d.Size()]
				fill(rng, d, b)
				before := slices.Clone(b)
				compare := func(what string, f func(b []byte), want func(e []byte)) {
					got := slices.Clone(b)
					if skip == 1 {
						got = append([]byte{0}, before...)[1:]
					}
					f(got)
					for i := 0; i < len(b); i += p.Size() {
						e := slices.Clone(before[i:][:p.Size()])
						want(e)
						if !same(Sum, p, e, got[i:][:p.Size()]) {
							t.Fatalf("%v: %s %v: %x becomes %x, not %x", d, what, x, before[i:][:p.Size()], e, got[i:][:p.Size()])
						}
					}
				}
				if n := int(x); float64(n) == x && n > 0 {
					if f, err := Divide(d, n); err == nil {
						compare("divided by", f, func(e []byte) { encode(p, e, decode(p, e)/x) })
					}
				}
				if f, err := PreMul(d, x); err == nil {
					compare("multiplied by", f, func(e []byte) {
						switch {
						case d.IsInteger():
							setWhole(p, e, new(big.Int).Mul(whole(p, e), big.NewInt(int64(x))))
						case p == tensor.Float64:
							encode(p, e, decode(p, e)*x)
						default:
							encode(p, e, decode(p, e)*float64(float32(x)))
						}
					})
				}
			}
		}
	}
}

func TestKinds(t *testing.T) {
	want := []string{"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "custom"}
	for k := Sum; k <= Custom; k++ {
		require.Equal(t, want[k], k.String())
		require.Equal(t, k, must.Get(ParseKind(want[k])))
	}
	require.ErrorContains(t, must.Err(ParseKind("SUM")), `"SUM"`)
	require.Equal(t, "reduction(10)", (Custom + 1).String())
}

func TestAllocations(t *testing.T) {
	for _, d := range []tensor.DType{tensor.Float32, tensor.Float16, tensor.Bool} {
		f := must.Get(Kernel(Sum, d))
		dst, src := make([]byte, 4096+step/2), make([]byte, 4096+step/2) // whole steps, and a part of one
		require.Zero(t, testing.AllocsPerRun(100, func() { f(dst, src) }))
	}
}

// FuzzKernels compares kernels with the reference over any bits.
func FuzzKernels(f *testing.F) {
	dtypes := tensor.DTypes()
	for i := range dtypes {
		f.Add(uint8(i), uint8(i), uint8(0), []byte("0123456789abcdef0123456789abcdef0123456789"))
	}
	f.Fuzz(func(t *testing.T, dtype, kind, skip uint8, data []byte) {
		d, k := dtypes[int(dtype)%len(dtypes)], Kind(kind)%Custom
		kernel, err := Kernel(k, d)
		if err != nil {
			return
		}
		n := len(data) / 2 / d.Size() * d.Size()
		a := make([]byte, n+8)
		dst := a[skip%8:][:n]
		copy(dst, data)
		src := data[len(data)-n:]
		before, want := slices.Clone(dst), slices.Clone(dst)
		reference(k, d, want, src)
		kernel(dst, src)
		check(t, k, d, before, src, want, dst)
	})
}
