package reduce

import (
	"fmt"

	"github.com/c10d-go/c10d/tensor"
)

// JoinFunc combines any number of operands, one at least, in one pass:
// dst = ((operands[0] op operands[1]) op operands[2]) ... All have the length of dst. dst may be one of
// the operands, but must not overlap any in part. The bits are those of a Func that is called for
// one operand after the other.
//
// It panics on wrong lengths, as a Func does.
type JoinFunc func(dst []byte, operands [][]byte)

// Join returns the function that combines any number of operands as Kernel's function combines
// two. It returns nil where one pass is no faster than several: only sums of float32 and
// float64 gain, on processors with AVX2.
func Join(k Kind, d tensor.DType) JoinFunc {
	if k == Avg || k == PreMulSum {
		k = Sum
	}
	if int(k) >= len(joins) || !d.Valid() {
		return nil
	}
	return joins[k][d]
}

// joins is the dispatch table of Join.
var joins = func() (t [len(kindNames)][dtypes]JoinFunc) {
	for p, loop := range inAssembly.joiners {
		t[p.kind][p.dtype] = joined(p.dtype.Size(), loop, kernels[p.kind][p.dtype])
	}
	return t
}()

// joiner is a loop in assembly. It combines, from byte at on, as many bytes of each operand as
// dst has, which are whole steps.
type joiner = func(dst []byte, operands [][]byte, at int)

// joined returns the JoinFunc that runs loop over whole steps, and f over the bytes after the last
// one.
func joined(size int, loop joiner, f Func) JoinFunc {
	return func(dst []byte, operands [][]byte) {
		for _, src := range operands {
			checkLengths(dst, src, size)
		}
		if len(operands) == 0 {
			panic(fmt.Sprintf("reduce: %d bytes of no operand", len(dst)))
		}
		// A goroutine cannot be stopped in a loop in assembly.
		most := max(piece/len(operands)&^(step-1), step)
		at := 0
		for whole := len(dst) &^ (step - 1); at < whole; {
			n := min(whole-at, most)
			for _, src := range operands {
				accessed(dst[at:at+n], src[at:at+n])
			}
			loop(dst[at:at+n], operands, at)
			at += n
		}
		if rest := len(dst) - at; rest > 0 {
			var room [step]byte
			sum := kept(&room)[:rest]
			copy(sum, operands[0][at:])
			for _, src := range operands[1:] {
				f(sum, src[at:])
			}
			copy(dst[at:], sum)
		}
	}
}
