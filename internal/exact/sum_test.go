package exact

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/tensor"
)

var seed = flag.Uint64("seed", 0, "seed of random operands; 0 takes one from the clock")

func newRand(t testing.TB) *rand.Rand {
	n := *seed
	if n == 0 {
		n = uint64(time.Now().UnixNano())
	}
	t.Logf("repeat with -seed %d", n)
	return rand.New(rand.NewPCG(n, 0))
}

func sumOf(t testing.TB, d tensor.DType) Func {
	f, err := Sum(d)
	require.NoError(t, err)
	return f
}

// kind is how operands of one test case are drawn.
type kind int

const (
	anything kind = iota // every bit at random, but finite
	near                 // exponents close together
	cancel               // pairs that cancel but for a little
	tiny                 // subnormal or nearly
	huge                 // near the largest number
	kinds
)

// draw returns the bits of operands of a type with exponents of eb bits and mb
// bits of mantissa.
func draw(rng *rand.Rand, k kind, n, eb, mb int) []uint64 {
	ops := make([]uint64, n)
	most := uint64(1)<<eb - 2 // largest exponent of a finite number
	for i := range ops {
		sign, m := rng.Uint64()&1<<(eb+mb), rng.Uint64()&(1<<mb-1)
		e := rng.Uint64N(most + 1)
		switch k {
		case near:
			e = most/2 + rng.Uint64N(min(most/2, 12))
		case tiny:
			e = rng.Uint64N(3)
		case huge:
			e = most - rng.Uint64N(2)
		case cancel:
			if i%2 == 1 {
				ops[i] = ops[i-1] ^ 1<<(eb+mb) ^ rng.Uint64()&1
				continue
			}
		}
		ops[i] = sign | e<<mb | m
	}
	rng.Shuffle(n, func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
	return ops
}

// real returns the exact sum of what value makes of bits.
func real(ops []uint64, value func(b uint64) float64) *big.Float {
	total := new(big.Float).SetPrec(5000)
	for _, b := range ops {
		total.Add(total, new(big.Float).SetFloat64(value(b)))
	}
	return total
}

// pack makes an operand of one element from each of bits.
func pack(size int, ops []uint64) [][]byte {
	all := make([][]byte, len(ops))
	for i, b := range ops {
		all[i] = element(size, b)
	}
	return all
}

func element(size int, b uint64) []byte {
	switch size {
	case 1:
		return []byte{byte(b)}
	case 2:
		return binary.NativeEndian.AppendUint16(nil, uint16(b))
	case 4:
		return binary.NativeEndian.AppendUint32(nil, uint32(b))
	}
	return binary.NativeEndian.AppendUint64(nil, b)
}

func bitsOf(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	}
	return binary.NativeEndian.Uint64(b)
}

// format is a type under test: its sizes, and its numbers.
type format struct {
	d      tensor.DType
	eb, mb int
	value  func(b uint64) float64
}

var formats = []format{
	{tensor.Float32, 8, 23, func(b uint64) float64 { return float64(math.Float32frombits(uint32(b))) }},
	{tensor.Float64, 11, 52, math.Float64frombits},
	{tensor.Float16, 5, 10, func(b uint64) float64 { return float64(tensor.F16(b).Float32()) }},
	{tensor.BFloat16, 8, 7, func(b uint64) float64 { return float64(tensor.BF16(b).Float32()) }},
	{tensor.Float8E5M2, 5, 2, func(b uint64) float64 { return float64(tensor.F8E5M2(b).Float32()) }},
	{tensor.Float8E4M3, 4, 3, func(b uint64) float64 { return float64(tensor.F8E4M3(b).Float32()) }},
}

// round returns the bits of the finite number nearest to x; ok is false if x
// is beyond all of them.
func (f format) round(x *big.Float) (b uint64, ok bool) {
	// The numbers grow with their bits: look for the largest not above |x|.
	abs := new(big.Float).Abs(x)
	most := (uint64(1)<<f.eb-1)<<f.mb - 1
	if f.d == tensor.Float8E4M3 {
		most += 7 // the highest exponent is for numbers too
	}
	lo, hi := uint64(0), most
	at := func(b uint64) *big.Float { return new(big.Float).SetPrec(5000).SetFloat64(f.value(b)) }
	for lo < hi {
		mid := lo + (hi-lo+1)/2
		if at(mid).Cmp(abs) <= 0 {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	below := new(big.Float).Sub(abs, at(lo))
	switch above := new(big.Float); {
	case lo == most && below.Sign() != 0:
		return 0, false
	case lo == most:
	default:
		above.Sub(at(lo+1), abs)
		if c := below.Cmp(above); c > 0 || c == 0 && lo&1 == 1 {
			lo++
		}
	}
	if x.Signbit() && x.Sign() != 0 {
		lo |= 1 << (f.eb + f.mb)
	}
	return lo, true
}

// TestSum compares sums with those of big numbers, rounded by search.
func TestSum(t *testing.T) {
	rng := newRand(t)
	rounds := 400
	if testing.Short() {
		rounds = 50
	}
	for _, f := range formats {
		t.Run(f.d.String(), func(t *testing.T) {
			sum, size, compared := sumOf(t, f.d), f.d.Size(), 0
			for k := range kinds {
				for range rounds {
					ops := draw(rng, k, 1+rng.IntN(40), f.eb, f.mb)
					want, ok := f.round(real(ops, f.value))
					if !ok {
						continue // TestOverflow
					}
					if want == 0 && len(ops) == 1 {
						want = ops[0] // may be -0
					}
					compared++
					dst := make([]byte, size)
					sum(dst, pack(size, ops))
					if want == 0 && bitsOf(dst) == 1<<(f.eb+f.mb) {
						for _, b := range ops {
							require.EqualValues(t, uint64(1)<<(f.eb+f.mb), b, "-0 from others than -0")
						}
						continue
					}
					require.Equal(t, want, bitsOf(dst), "%x, %v", ops, k)
				}
			}
			require.Greater(t, compared, rounds)
		})
	}
}

// TestOrder proves that neither the order of operands nor zeros among them
// change a sum, whatever else is among them.
func TestOrder(t *testing.T) {
	rng := newRand(t)
	for _, f := range formats {
		sum, size := sumOf(t, f.d), f.d.Size()
		for range 300 {
			ops := draw(rng, kind(rng.IntN(int(kinds))), 2+rng.IntN(30), f.eb, f.mb)
			ops[0] = rng.Uint64() & (1<<(f.eb+f.mb+1) - 1) // NaN and infinity too
			first, again := make([]byte, size), make([]byte, size)
			sum(first, pack(size, ops))
			if f.value(bitsOf(first)) != 0 {
				ops = append(ops, 0, 1<<(f.eb+f.mb), 0)
			}
			rng.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
			sum(again, pack(size, ops))
			require.Equal(t, first, again, "%v: %x", f.d, ops)
		}
	}
}

// TestSplit proves that a sum does not depend on over how many ranks the same
// numbers are spread, where each rank's own sum is exact.
func TestSplit(t *testing.T) {
	rng := newRand(t)
	sum := sumOf(t, tensor.Float32)
	for range 200 {
		numbers := make([]uint64, 64)
		for i := range numbers { // 12 bits each: any 64 add up exactly in 24
			numbers[i] = uint64(math.Float32bits(float32(rng.IntN(1<<13)-1<<12) / 8))
		}
		want := make([]byte, 4)
		sum(want, pack(4, numbers))
		for world := 1; world <= 64; world *= 2 {
			partial := make([][]byte, world)
			for r := range partial {
				var own float32
				for i := r; i < len(numbers); i += world {
					own += math.Float32frombits(uint32(numbers[i]))
				}
				partial[r] = element(4, uint64(math.Float32bits(own)))
			}
			got := make([]byte, 4)
			sum(got, partial)
			require.Equal(t, want, got, "%d ranks", world)
		}
	}
}

func TestSpecial(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	zero := 0.0
	for _, c := range []struct {
		ops  []float64
		want float64
	}{
		{[]float64{1e308, 1e308, -1e308}, 1e308},
		{[]float64{1e308, 1e308}, inf},
		{[]float64{-1e308, -1e308, 1}, -inf},
		{[]float64{math.MaxFloat64, 9.9e291}, math.MaxFloat64},
		{[]float64{math.MaxFloat64, 1e292}, inf},
		{[]float64{inf, 1, -5}, inf},
		{[]float64{-inf}, -inf},
		{[]float64{inf, 1e308, -inf}, nan},
		{[]float64{nan, 1}, nan},
		{[]float64{nan, inf}, nan},
		{[]float64{1, -1}, 0},
		{[]float64{-zero, 0}, 0},
		{[]float64{math.Copysign(0, -1), math.Copysign(0, -1)}, math.Copysign(0, -1)},
		{[]float64{1e16, 1, -1e16}, 1},
		{[]float64{1, 1e-300, -1}, 1e-300},
		{[]float64{1, math.SmallestNonzeroFloat64, -1}, math.SmallestNonzeroFloat64},
		{[]float64{1 << 53, 1, math.SmallestNonzeroFloat64}, 1<<53 + 2},
		{[]float64{1 << 53, 1}, 1 << 53},
		{[]float64{1 << 53, 1, -math.SmallestNonzeroFloat64}, 1 << 53},
	} {
		ops := make([]uint64, len(c.ops))
		for i, x := range c.ops {
			ops[i] = math.Float64bits(x)
		}
		got := make([]byte, 8)
		sumOf(t, tensor.Float64)(got, pack(8, ops))
		want := math.Float64bits(c.want)
		if math.IsNaN(c.want) {
			want = 0x7ff8000000000000
		}
		require.Equal(t, want, bitsOf(got), "%v: %v", c.ops, math.Float64frombits(bitsOf(got)))
	}
}

// TestOverflow adds the largest numbers and what makes them round beyond.
func TestOverflow(t *testing.T) {
	for _, c := range []struct {
		d    tensor.DType
		ops  []uint64
		want uint64
	}{
		{tensor.Float32, []uint64{0x7f7fffff, 0x72ffffff, 0}, 0x7f7fffff}, // less than half a step more
		{tensor.Float32, []uint64{0x7f7fffff, 0x73000000}, 0x7f800000},
		{tensor.Float32, []uint64{0x7f7fffff, 0x73000000, 0x80000001}, 0x7f7fffff},
		{tensor.Float32, []uint64{0xff7fffff, 0xf3000000}, 0xff800000},
		{tensor.Float32, []uint64{0x7fa00001, 0}, 0x7fc00000},
		{tensor.Float32, []uint64{0x7f800000, 0xff800000}, 0x7fc00000},
		{tensor.Float16, []uint64{0x7bff, 0x4bff}, 0x7bff},
		{tensor.Float16, []uint64{0x7bff, 0x4c00}, 0x7c00},
		{tensor.Float16, []uint64{0x7bff, 0x4c00, 0x8001}, 0x7bff},
		{tensor.BFloat16, []uint64{0x7f7f, 0x7aff}, 0x7f7f},
		{tensor.BFloat16, []uint64{0x7f7f, 0x7b00}, 0x7f80},
		{tensor.BFloat16, []uint64{0x7f7f, 0x7b00, 0x8001}, 0x7f7f},
		{tensor.BFloat16, []uint64{0x7f7f, 0x7f7f}, 0x7f80},
		{tensor.BFloat16, []uint64{0x7f7f, 0x7f7f, 0xff7f}, 0x7f7f},
		{tensor.Float8E5M2, []uint64{0x7b, 0x6b}, 0x7b},
		{tensor.Float8E5M2, []uint64{0x7b, 0x6c}, 0x7c},
		{tensor.Float8E4M3, []uint64{0x7e, 0x58}, 0x7e}, // 448 + 16
		{tensor.Float8E4M3, []uint64{0x7e, 0x59}, 0x7f}, // 448 + 18
	} {
		got := make([]byte, c.d.Size())
		sumOf(t, c.d)(got, pack(c.d.Size(), c.ops))
		require.Equal(t, c.want, bitsOf(got), "%v: %x gives %x", c.d, c.ops, bitsOf(got))
	}
}

// TestMany adds more float16s than float64 holds exactly.
func TestMany(t *testing.T) {
	const n = 20000
	ops := make([]uint64, n+1)
	for i := range n {
		ops[i] = 0x7bff // 65504
		if i%2 == 1 {
			ops[i] = 0xfbff
		}
	}
	ops[0], ops[n] = 0x0001, 0x7bff
	got := make([]byte, 2)
	sumOf(t, tensor.Float16)(got, pack(2, ops))
	require.EqualValues(t, 0x0001, bitsOf(got))
}

func TestWhole(t *testing.T) {
	rng := newRand(t)
	for _, d := range []tensor.DType{tensor.Float32, tensor.Complex128, tensor.BFloat16, tensor.Float8E5M2} {
		const n = 100
		operands := make([][]byte, 7)
		for k := range operands {
			buf := make([]byte, n*d.Size()+1)
			for i := range buf {
				buf[i] = byte(rng.Uint32())
			}
			operands[k] = buf[1:] // not aligned
		}
		sum := sumOf(t, d)
		want, part := make([]byte, n*d.Size()), d.Size()
		if d == tensor.Complex128 {
			part = 8
		}
		one := sum
		if d == tensor.Complex128 {
			one = sumOf(t, tensor.Float64)
		}
		for i := 0; i < len(want); i += part {
			ops := make([][]byte, len(operands))
			for k := range ops {
				ops[k] = operands[k][i:][:part]
			}
			one(want[i:][:part], ops)
		}
		sum(operands[3], operands)
		require.Equal(t, want, operands[3], "%v", d)
		sum(nil, [][]byte{nil, {}})
	}
}

func TestMisuse(t *testing.T) {
	for _, d := range []tensor.DType{tensor.Int32, tensor.Bool, tensor.Invalid} {
		_, err := Sum(d)
		require.ErrorContains(t, err, fmt.Sprintf("exact: no sum of %v", d))
	}
	sum := sumOf(t, tensor.Float32)
	require.Panics(t, func() { sum(make([]byte, 4), nil) })
	require.Panics(t, func() { sum(make([]byte, 5), [][]byte{make([]byte, 5)}) })
	require.Panics(t, func() { sum(make([]byte, 8), [][]byte{make([]byte, 8), make([]byte, 4)}) })
}

func TestAllocations(t *testing.T) {
	for _, f := range formats {
		sum, ops := sumOf(t, f.d), pack(f.d.Size(), []uint64{1, 2, 0x7f, 3})
		dst := make([]byte, f.d.Size())
		require.Zero(t, testing.AllocsPerRun(100, func() { sum(dst, ops) }), "%v", f.d)
	}
}

// BenchmarkSum adds eight operands of normally distributed numbers, exactly and
// with rounding.
func BenchmarkSum(b *testing.B) {
	const elements, n = 1 << 14, 8
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16} {
		operands := make([][]byte, n)
		for k := range operands {
			for range elements {
				x := rng.NormFloat64()
				switch d {
				case tensor.Float32:
					operands[k] = binary.NativeEndian.AppendUint32(operands[k], math.Float32bits(float32(x)))
				case tensor.Float64:
					operands[k] = binary.NativeEndian.AppendUint64(operands[k], math.Float64bits(x))
				case tensor.Float16:
					operands[k] = binary.NativeEndian.AppendUint16(operands[k], uint16(tensor.F16From(float32(x))))
				case tensor.BFloat16:
					operands[k] = binary.NativeEndian.AppendUint16(operands[k], uint16(tensor.BF16From(float32(x))))
				}
			}
		}
		dst := make([]byte, len(operands[0]))
		b.Run(d.String()+"/exact", func(b *testing.B) {
			sum := sumOf(b, d)
			b.SetBytes(int64(n * len(dst)))
			for b.Loop() {
				sum(dst, operands)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*elements*n), "ns/operand")
		})
		b.Run(d.String()+"/rounded", func(b *testing.B) {
			add, err := reduce.Kernel(reduce.Sum, d)
			require.NoError(b, err)
			b.SetBytes(int64(n * len(dst)))
			for b.Loop() {
				copy(dst, operands[0])
				for _, o := range operands[1:] {
					add(dst, o)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*elements*n), "ns/operand")
		})
	}
}
