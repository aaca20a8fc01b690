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
