package reduce

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// These tests compare every set of loops that this processor can run with the portable loops, to
// the bit, even if a faster set replaces it. The tests against the reference take any NaN for any
// other.

func hasAssembly() bool { return len(inAssembly.kernels) > 0 }

func needAssembly(t testing.TB) {
	if !hasAssembly() {
		t.Skip("no loops in assembly for this processor, or they are switched off")
	}
}

// differ returns the number of the first element at which two results differ,
// -1 if there is none. Of two NaNs a sum or product has either one, made quiet:
// the compiler may exchange the operands of the portable loop.
func differ(k Kind, d tensor.DType, dst, src, want, got []byte) int {
	if bytes.Equal(want, got) {
		return -1
	}
	p := part(d)
	n := p.Size()
	quiet := map[tensor.DType]uint64{
		tensor.Float16: 1 << 9, tensor.Float32: 1 << 22, tensor.Float64: 1 << 51,
		tensor.Float8E4M3: 0x7f, tensor.Float8E5M2: 0x7f, // of which only the sign stays
	}[p]
	for i := 0; i < len(want); i += n {
		if bytes.Equal(want[i:][:n], got[i:][:n]) {
			continue
		}
		a, b := bitsOf(p, dst[i:])|quiet, bitsOf(p, src[i:])|quiet
		either := []uint64{a, b}
		if (k == Sum || k == Product) && quiet != 0 &&
			math.IsNaN(decode(p, dst[i:][:n])) && math.IsNaN(decode(p, src[i:][:n])) &&
			slices.Contains(either, bitsOf(p, want[i:])) && slices.Contains(either, bitsOf(p, got[i:])) {
			continue
		}
		return i / n
	}
	return -1
}

// compare holds f against the portable loop on operands that it leaves as they are.
func compare(t *testing.T, p pair, f, twin Func, dst, src []byte) {
	t.Helper()
	want, got := slices.Clone(dst), slices.Clone(dst)
	twin(want, src)
	f(got, src)
	if i := differ(p.kind, p.dtype, dst, src, want, got); i >= 0 {
		at := i * part(p.dtype).Size()
		n := part(p.dtype).Size()
		t.Fatalf("%v of %v: element %d of %d: %x and %x make %x, not %x", p.kind, p.dtype, i, len(dst)/n,
			dst[at:][:n], src[at:][:n], want[at:][:n], got[at:][:n])
	}
}

func eachTwin(t *testing.T, test func(t *testing.T, p pair, f, twin Func)) {
	needAssembly(t)
	twins := portable()
	for _, set := range assemblies() {
		for p, f := range set.kernels {
			t.Run(fmt.Sprintf("%s/%v/%v", set.name, p.dtype, p.kind), func(t *testing.T) { test(t, p, f, twins[p]) })
		}
	}
}

// longest is the number of elements up to which all are tried: three steps and more.
func longest(d tensor.DType) int { return max(130, 200/d.Size()) }

// TestTwins tries every number of elements that some path of a loop has to
// itself, at aligned and other addresses, and in place.
func TestTwins(t *testing.T) {
	rng := must.Rand(t)
	eachTwin(t, func(t *testing.T, p pair, f, twin Func) {
		for elements := range longest(p.dtype) + 1 {
			for _, skip := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {rng.IntN(64), rng.IntN(64)}} {
				n := elements * p.dtype.Size()
				a, b := bytes.Repeat([]byte{0xee}, n+128), bytes.Repeat([]byte{0xdd}, n+128)
				dst, src := a[skip[0]:][:n], b[skip[1]:][:n]
				fill(rng, p.dtype, dst)
				fill(rng, p.dtype, src)
				compare(t, p, f, twin, dst, src)

				around, operand, want := slices.Clone(a), slices.Clone(b), slices.Clone(dst)
				f(dst, src)
				twin(want, src)
				require.Equal(t, -1, differ(p.kind, p.dtype, around[skip[0]:][:n], src, want, dst), "at unaligned addresses")
				copy(around[skip[0]:], dst)
				require.True(t, bytes.Equal(around, a), "%d bytes: bytes outside of the local operand were written", n)
				require.True(t, bytes.Equal(operand, b), "%d bytes: the received operand was written", n)

				fill(rng, p.dtype, dst)
				before := slices.Clone(dst)
				want = slices.Clone(dst)
				twin(want, want)
				f(dst, dst)
				require.Equal(t, -1, differ(p.kind, p.dtype, before, before, want, dst), "in place")
			}
		}
	})
}

// TestTwinsPatterns tries all pairs of one byte, all values of two bytes beside
// NaNs and some special ones, and many values of the wider types.
func TestTwinsPatterns(t *testing.T) {
	rng := must.Rand(t)
	eachTwin(t, func(t *testing.T, p pair, f, twin Func) {
		d := p.dtype
		const n = 1 << 16
		dst, src := make([]byte, n*d.Size()), make([]byte, n*d.Size())
		switch d.Size() {
		case 1:
			for i := range n {
				dst[i], src[i] = uint8(i>>8), uint8(i)
			}
			compare(t, p, f, twin, dst, src)
		case 2:
			for i := range n {
				setBits(d, dst[2*i:], uint64(i))
			}
			beside := []uint64{0, 0x7c00, 0xffff, 0x7c01, 0xfdff, 0x7f80, 0x7f81, 0xffbf} // signalling NaNs are among them
			for range 8 {
				v := special[rng.IntN(len(special))]
				if d.IsFloat() {
					encode(d, src, v)
				} else {
					setBits(d, src, rng.Uint64())
				}
				beside = append(beside, bitsOf(d, src))
			}
			for _, bits := range beside {
				setBits(d, src, bits)
				src := bytes.Repeat(src[:2], n)
				compare(t, p, f, twin, dst, src)
				compare(t, p, f, twin, src, dst)
			}
			fallthrough
		default:
			for range 4 {
				fill(rng, d, dst)
				fill(rng, d, src)
				compare(t, p, f, twin, dst, src)
			}
		}
	})
}

// TestTwinsScale holds the loops of Divide and PreMul against the portable ones.
func TestTwinsScale(t *testing.T) {
	needAssembly(t)
	rng := must.Rand(t)
	try := func(t *testing.T, d tensor.DType, f, twin func(b []byte), b []byte) {
		t.Helper()
		want := slices.Clone(b)
		twin(want)
		skip := rng.IntN(64)
		room := bytes.Repeat([]byte{0xee}, len(b)+128)
		around := slices.Clone(room)
		copy(room[skip:], b)
		copy(around[skip:], want)
		f(room[skip:][:len(b)])
		if bytes.Equal(around, room) {
			return
		}
		for i := range room {
			if room[i] != around[i] {
				e := (i - skip) / d.Size() * d.Size()
				t.Fatalf("byte %d of %d: %x becomes %x, not %x", i-skip, len(b),
					b[e:][:d.Size()], room[skip+e:][:d.Size()], want[e:][:d.Size()])
			}
		}
	}
	sweep := func(t *testing.T, d tensor.DType, first bool, f, twin func(b []byte)) {
		t.Helper()
		lengths := 9
		if first { // the factor does not change how a loop takes its bytes
			lengths = longest(d) + 1
		}
		for n := range lengths {
			b := make([]byte, n*d.Size())
			fill(rng, d, b)
			try(t, d, f, twin, b)
		}
		b := make([]byte, 1<<16*d.Size())
		fill(rng, d, b)
		if d.Size() <= 2 {
			for i := range len(b) / d.Size() {
				setBits(d, b[i*d.Size():], uint64(i))
			}
		}
		try(t, d, f, twin, b)
	}
	for _, set := range assemblies() {
		for d, loop := range set.dividers {
			for i, n := range []int{3, 1, 2, 7, 48, 1000, 65537} {
				t.Run(fmt.Sprintf("%s/%v/divide/%d", set.name, d, n), func(t *testing.T) {
					sweep(t, d, i == 0, loop.by(d, float64(n)), portableDivide(d, n))
				})
			}
		}
		for d, loop := range set.multipliers {
			for i, x := range []float64{-3, 0, 1, 7, 1 << 40, 0.1, 1.0 / 3, 1e-8, 1e30, math.Inf(-1), math.NaN()} {
				if _, err := PreMul(d, x); err == nil {
					t.Run(fmt.Sprintf("%s/%v/premul/%v", set.name, d, x), func(t *testing.T) {
						sweep(t, d, i == 0, loop.by(d, x), portablePreMul(d, x))
					})
				}
			}
		}
	}
}

// TestTable holds what goes by loops in assembly.
func TestTable(t *testing.T) {
	needAssembly(t)
	inGo := func(k Kind, d tensor.DType) bool {
		switch {
		case d == tensor.Float8E4M3 || d == tensor.Float8E5M2:
			return true
		case !d.IsInteger() || k == BAnd || k == BOr || k == BXor:
			return false
		case k == PreMulSum:
			return true
		}
		switch d {
		case tensor.Int8, tensor.Uint8:
			return k == Product
		case tensor.Int16, tensor.Uint16:
			return true
		case tensor.Uint32:
			return k == Min || k == Max
		case tensor.Uint64:
			return k != Sum && (k != Product || runtime.GOARCH == "arm64")
		}
		return d == tensor.Int64 && k == Product && runtime.GOARCH == "arm64"
	}
	for p := range portable() {
		require.Equal(t, !inGo(p.kind, p.dtype), inAssembly.kernels[p] != nil, "%v of %v", p.kind, p.dtype)
	}
	for _, d := range tensor.DTypes() {
		require.Equal(t, !inGo(Avg, d) && supported(Avg, d) == nil, inAssembly.dividers[d] != nil, "divide %v", d)
		require.Equal(t, !inGo(PreMulSum, d) && supported(PreMulSum, d) == nil, inAssembly.multipliers[d] != nil, "multiply %v", d)
	}
}

// TestSwitchOff proves that GODEBUG leaves out a set, and those that build on it.
func TestSwitchOff(t *testing.T) {
	var names []string
	for _, set := range assemblies() {
		names = append(names, set.name)
	}
	if want, ok := os.LookupEnv("REDUCE_TEST_SETS"); ok {
		require.Equal(t, want, strings.Join(names, " "))
		require.Equal(t, want != "", hasAssembly())
		return
	}
	needAssembly(t)
	options := map[string][]string{
		"amd64": {"cpu.avx2=off", "cpu.avx512f=off"},
		"arm64": {"cpu.asimd=off"},
	}[runtime.GOARCH]
	for i, option := range options[:len(names)] {
		cmd := exec.Command(os.Args[0], "-test.run=^(TestSwitchOff|TestBool|TestNaN)$", "-test.v")
		cmd.Env = append(os.Environ(), "GODEBUG="+option, "REDUCE_TEST_SETS="+strings.Join(names[:i], " "))
		out, err := cmd.CombinedOutput()
		if errors.Is(err, syscall.ENOEXEC) {
			t.Skip("an emulated program can start no other; make arm64 runs this with REDUCE_TEST_SETS")
		}
		require.NoError(t, err, "%s: %s", option, out)
		require.Contains(t, string(out), "--- PASS: TestSwitchOff")
	}
}

// FuzzTwins compares what is in the tables with the portable loops.
func FuzzTwins(f *testing.F) {
	twins := portable()
	dtypes := tensor.DTypes()
	for i := range dtypes {
		f.Add(uint8(i), uint8(i), uint8(i), []byte("0123456789abcdef0123456789abcdef0123456789"))
	}
	f.Fuzz(func(t *testing.T, dtype, kind, skip uint8, data []byte) {
		p := pair{Kind(kind) % Custom, dtypes[int(dtype)%len(dtypes)]}
		twin, ok := twins[p]
		if !ok {
			return
		}
		n := len(data) / 2 / p.dtype.Size() * p.dtype.Size()
		a := make([]byte, n+32)
		dst := a[skip%32:][:n]
		copy(dst, data)
		src := data[len(data)-n:]
		before, want := slices.Clone(dst), slices.Clone(dst)
		twin(want, src)
		for _, set := range assemblies() {
			if loop := set.kernels[p]; loop != nil {
				copy(dst, before)
				loop(dst, src)
				if i := differ(p.kind, p.dtype, before, src, want, dst); i >= 0 {
					t.Fatalf("%s: %v of %v: element %d of %x and %x: want %x, got %x", set.name, p.kind, p.dtype, i, before, src, want, dst)
				}
			}
		}
	})
}

// BenchmarkTwins sets the sets of loops side by side: on 16 KiB, where
// arithmetic is what takes time, and on a whole piece.
func BenchmarkTwins(b *testing.B) {
	sets := append([]fast{{name: "portable", kernels: portable()}}, assemblies()...)
	for _, d := range tensor.DTypes() {
		for k := Sum; k <= BAnd; k++ {
			for _, set := range sets {
				f := set.kernels[pair{k, d}]
				if f == nil {
					continue
				}
				for _, n := range []int{16 << 10, piece} {
					b.Run(fmt.Sprintf("%v/%v/%d/%s", d, k, n, set.name), func(b *testing.B) {
						dst, src := benchBytes(k, d, n)
						b.SetBytes(int64(n))
						for b.Loop() {
							f(dst, src)
						}
					})
				}
			}
		}
	}
}

// TestStackGrows has kernels run at every depth of a goroutine's stack, so that the stack grows in
// the middle of one. A kernel copies the elements that do not fill a step to the stack.
func TestStackGrows(t *testing.T) {
	sum := must.Get(Kernel(Sum, tensor.Int32))
	for depth := range 600 {
		done := make(chan []byte)
		go func() {
			dst := []byte{1, 0, 0, 0, 2, 0, 0, 0}
			deeper(depth, func() { sum(dst, []byte{10, 0, 0, 0, 20, 0, 0, 0}) })
			done <- dst
		}()
		require.Equal(t, []byte{11, 0, 0, 0, 22, 0, 0, 0}, <-done, "depth %d", depth)
	}
}

// deeper calls f from a stack with so many more frames.
//
//go:noinline
func deeper(depth int, f func()) int {
	if depth > 0 {
		return deeper(depth-1, f) + 1
	}
	f()
	return 0
}
