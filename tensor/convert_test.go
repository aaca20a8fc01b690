package tensor_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/tensor"
)

// format is one narrow floating type: its layout for the reference below, and
// the functions under test.
type format struct {
	name       string
	exp, man   int  // bits
	infinities bool // else the largest exponent holds numbers, and NaN only with a full mantissa
	widen      func(uint32) float32
	round      func(float32) uint32
	torchNaN   uint32 // every NaN becomes this; 0 if sign and payload count
}

var formats = []format{
	{
		name: "float16", exp: 5, man: 10, infinities: true,
		widen: func(c uint32) float32 { return tensor.F16(c).Float32() },
		round: func(f float32) uint32 { return uint32(tensor.F16From(f)) },
	}, {
		name: "bfloat16", exp: 8, man: 7, infinities: true, torchNaN: 0x7fc0,
		widen: func(c uint32) float32 { return tensor.BF16(c).Float32() },
		round: func(f float32) uint32 { return uint32(tensor.BF16From(f)) },
	}, {
		name: "float8_e5m2", exp: 5, man: 2, infinities: true,
		widen: func(c uint32) float32 { return tensor.F8E5M2(c).Float32() },
		round: func(f float32) uint32 { return uint32(tensor.F8E5M2From(f)) },
	}, {
		name: "float8_e4m3fn", exp: 4, man: 3,
		widen: func(c uint32) float32 { return tensor.F8E4M3(c).Float32() },
		round: func(f float32) uint32 { return uint32(tensor.F8E4M3From(f)) },
	},
}

func (f format) bits() int { return 1 + f.exp + f.man }

// value decodes a code by the definition of the format, in float64.
func (f format) value(code uint32) float64 {
	sign := 1.0
	if code>>(f.exp+f.man)&1 == 1 {
		sign = -1
	}
	e := int(code>>f.man) & (1<<f.exp - 1)
	m := float64(code & (1<<f.man - 1))
	full := 1<<f.exp - 1
	switch bias := full / 2; {
	case f.infinities && e == full && m == 0:
		return math.Inf(int(sign))
	case f.infinities && e == full, !f.infinities && code&(1<<(f.exp+f.man)-1) == 1<<(f.exp+f.man)-1:
		return math.NaN()
	case e == 0:
		return sign * math.Ldexp(m, 1-bias-f.man)
	default:
		return sign * math.Ldexp(m+float64(int(1)<<f.man), e-bias-f.man)
	}
}

// nearest rounds by looking for the closest of all codes, ties to the even
// one. Beyond the largest finite code lies one more step of its size: from half
// way there on a format with infinities gives infinity, the other NaN.
//
// values holds value of every code.
func (f format) nearest(values []float64, x float64) uint32 {
	var sign uint32
	if math.Signbit(x) {
		sign = 1 << (f.exp + f.man)
		x = -x
	}
	top := uint32(1)<<(f.exp+f.man) - 1 // e4m3fn: NaN, one after the largest number
	if f.infinities {
		top = uint32(1<<f.exp-1) << f.man
	}
	at := func(code uint32) float64 {
		if code == top {
			return 2*values[top-1] - values[top-2]
		}
		return values[code]
	}
	lo, hi := uint32(0), top
	if x >= at(top) {
		return sign | top
	}
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; at(mid) <= x {
			lo = mid
		} else {
			hi = mid
		}
	}
	// Both differences are exact: the neighbours are at most a factor 2 apart
	// or lie on the subnormal grid, and float64 has bits to spare.
	below, above := x-at(lo), at(hi)-x
	if above < below || above == below && hi%2 == 0 {
		return sign | hi
	}
	return sign | lo
}

func TestNarrowFloatsRoundTrip(t *testing.T) {
	for _, f := range formats {
		t.Run(f.name, func(t *testing.T) {
			for code := range uint32(1) << f.bits() {
				want, got := f.value(code), f.widen(code)
				if math.IsNaN(want) {
					require.Truef(t, got != got, "code %#x", code)
					back := f.round(got)
					require.Truef(t, math.IsNaN(f.value(back)), "NaN %#x became %#x", code, back)
					continue
				}
				if back := f.round(got); math.Float64bits(want) != math.Float64bits(float64(got)) || back != code {
					t.Fatalf("%#x is %v, got %v and back %#x", code, want, got, back)
				}
			}
		})
	}
}

func TestNarrowFloatsRound(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	n := testsize.Of(50_000, 200_000, 1_000_000)
	for _, f := range formats {
		t.Run(f.name, func(t *testing.T) {
			values := make([]float64, 1<<f.bits())
			for code := range values {
				values[code] = f.value(uint32(code))
			}
			check := func(b uint32) {
				x := math.Float32frombits(b)
				got := f.round(x)
				if x != x {
					if !math.IsNaN(values[got]) || f.torchNaN != 0 && got != f.torchNaN {
						t.Fatalf("NaN %#x became %#x", b, got)
					}
					return
				}
				if want := f.nearest(values, float64(x)); got != want {
					t.Fatalf("%v (%#x) became %#x = %v, want %#x = %v", x, b, got, f.value(got), want, f.value(want))
				}
			}
			// Every code, every midpoint between two, and their neighbours.
			for code := range uint32(1) << f.bits() {
				b := math.Float32bits(f.widen(code))
				mid := b + 1<<(22-f.man) // for subnormal codes just another pattern
				tie := math.Float32bits(float32((values[code] + values[(code+1)%uint32(len(values))]) / 2))
				for d := range uint32(5) {
					check(b + d - 2)
					check(mid + d - 2)
					check(tie + d - 2)
				}
			}
			// Each exponent with mantissas of few bits, where ties live.
			for e := range uint32(512) {
				for i := range uint32(23) {
					for _, m := range []uint32{0, 1<<i - 1, 1 << i, 1<<i + 1, 3 << i & 0x7fffff, 0x7fffff, 0x7fffff &^ (1<<i - 1)} {
						check(e<<23 | m)
					}
				}
			}
			r := rand.New(rand.NewPCG(seed, 1))
			for range n {
				check(r.Uint32())
				// The range of the narrow exponents, which random bits seldom hit.
				check(r.Uint32()&0x807fffff | (96+r.Uint32N(64))<<23)
			}
		})
	}
}

func runPython(t *testing.T, script string, in []byte) []byte {
	t.Helper()
	cmd := torchtest.Command(t.Context(), t, "-c", script)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &stderr
	out, err := cmd.Output()
	require.NoErrorf(t, err, "%s", stderr.Bytes())
	return out
}

func TestNarrowFloatsAgreeWithTorch(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var patterns []uint32
	for range 200_000 {
		patterns = append(patterns, r.Uint32(), r.Uint32()&0x807fffff|(96+r.Uint32N(64))<<23)
	}
	for e := range uint32(512) {
		for i := range uint32(23) {
			patterns = append(patterns, e<<23|1<<i, e<<23|(1<<i-1), e<<23|0x7fffff&^(1<<i-1))
		}
	}
	in := make([]byte, 4*len(patterns))
	for i, p := range patterns {
		binary.LittleEndian.PutUint32(in[4*i:], p)
	}
	out := runPython(t, `
import sys, torch
f = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32)
for d in (torch.float16, torch.bfloat16):
    h = f.to(d)
    sys.stdout.buffer.write(bytes(h.view(torch.int16).numpy().tobytes()))
    sys.stdout.buffer.write(bytes(h.to(torch.float32).numpy().tobytes()))
`, in)
	require.Len(t, out, 2*6*len(patterns))
	for _, f := range formats[:2] {
		codes := out[:2*len(patterns)]
		back := out[len(codes) : 6*len(patterns)]
		out = out[6*len(patterns):]
		for i, p := range patterns {
			x := math.Float32frombits(p)
			code := uint32(binary.LittleEndian.Uint16(codes[2*i:]))
			if x != x { // PyTorch's vector and scalar paths differ in the bits of a NaN
				require.True(t, math.IsNaN(f.value(code)))
				require.True(t, math.IsNaN(f.value(f.round(x))))
				continue
			}
			wide := binary.LittleEndian.Uint32(back[4*i:])
			if f.round(x) != code || math.Float32bits(f.widen(code)) != wide {
				t.Fatalf("%s of %v (%#x) is %#x and back %#x, got %#x and %#x",
					f.name, x, p, code, wide, f.round(x), math.Float32bits(f.widen(code)))
			}
		}
	}
}
