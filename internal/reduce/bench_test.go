package reduce

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/c10d-go/c10d/tensor"
)

// benchBytes returns operands whose repeated combination neither overflows nor
// underflows: floats from 1 to 2, the second of a product 1.
func benchBytes(k Kind, d tensor.DType, n int) (dst, src []byte) {
	rng := rand.New(rand.NewPCG(1, 2))
	dst, src = make([]byte, n), make([]byte, n)
	p := part(d)
	for i := 0; i < n; i += p.Size() {
		if !p.IsFloat() {
			setBits(p, dst[i:], rng.Uint64())
			setBits(p, src[i:], rng.Uint64())
			continue
		}
		encode(p, dst[i:], 1+rng.Float64())
		encode(p, src[i:], 1+rng.Float64())
		if k == Product {
			encode(p, src[i:], 1)
		}
	}
	return dst, src
}

// BenchmarkKernel reports the bytes of one operand a second.
func BenchmarkKernel(b *testing.B) {
	for _, d := range tensor.DTypes() {
		for k := Sum; k < PreMulSum; k++ {
			f, err := Kernel(k, d)
			if err != nil || k == Avg {
				continue
			}
			b.Run(fmt.Sprintf("%v/%v", d, k), func(b *testing.B) {
				dst, src := benchBytes(k, d, 1<<20)
				b.SetBytes(1 << 20)
				for b.Loop() {
					f(dst, src)
				}
			})
		}
	}
}

// BenchmarkSize shows the cost of small calls, of pieces, and of unaligned bytes.
func BenchmarkSize(b *testing.B) {
	f, err := Kernel(Sum, tensor.Float32)
	if err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{16, 1 << 10, 64 << 10, 1 << 20, 16 << 20} {
		for skip := range 2 {
			b.Run(fmt.Sprintf("bytes=%d/unaligned=%d", n, skip), func(b *testing.B) {
				dst, src := make([]byte, n+8), make([]byte, n+8)
				dst, src = dst[:n], src[skip:][:n]
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					f(dst, src)
				}
			})
		}
	}
}

func BenchmarkScale(b *testing.B) {
	for _, d := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.BFloat16, tensor.Float16, tensor.Float8E4M3} {
		div, err := Divide(d, 3)
		if err != nil {
			b.Fatal(err)
		}
		mul, err := PreMul(d, 1)
		if err != nil {
			b.Fatal(err)
		}
		for name, f := range map[string]func(b []byte){"divide": div, "premul": mul} {
			b.Run(fmt.Sprintf("%v/%s", d, name), func(b *testing.B) {
				x, _ := benchBytes(Sum, d, 1<<20)
				keep := append([]byte(nil), x...)
				b.SetBytes(1 << 20)
				for b.Loop() {
					copy(x, keep) // lest repeated division end in subnormals
					f(x)
				}
			})
		}
	}
}

// BenchmarkCopy is the memory's share: no kernel is faster than this.
func BenchmarkCopy(b *testing.B) {
	dst, src := make([]byte, 1<<20), make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	for b.Loop() {
		copy(dst, src)
	}
}
