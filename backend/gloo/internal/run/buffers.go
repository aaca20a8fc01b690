package run

import (
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
)

func single(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }

// grow returns n bytes of *b, which it replaces if it is too small.
func grow(b *[]byte, n int) []byte {
	if cap(*b) < n {
		// New returns bytes that are aligned for every element type.
		t, err := tensor.New(tensor.Uint8, n)
		if err != nil {
			panic(err) // n is the size of tensors that exist
		}
		*b = t.Bytes()
	}
	return (*b)[:n]
}

// total is the packed length of a list.
func total(ts []*tensor.Tensor) int {
	n := 0
	for _, t := range ts {
		n += t.ByteLen()
	}
	return n
}

// pack copies a list one after the other.
func pack(dst []byte, ts []*tensor.Tensor) error {
	for _, t := range ts {
		n := t.ByteLen()
		if err := t.Pack(dst[:n]); err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

// unpack is the inverse of pack.
func unpack(ts []*tensor.Tensor, src []byte) error {
	for _, t := range ts {
		n := t.ByteLen()
		if err := t.Unpack(src[:n]); err != nil {
			return err
		}
		src = src[n:]
	}
	return nil
}

// blocksOf is a call with a block of counts[i] bytes for rank i.
func blocksOf(counts []int64, elem int64) plan.Call {
	if even(counts) {
		return plan.Call{Bytes: counts[0], Elem: elem}
	}
	return plan.Call{Counts: counts, Elem: elem}
}

func even(counts []int64) bool {
	for _, n := range counts {
		if n != counts[0] {
			return false
		}
	}
	return true
}

// split cuts buf into consecutive parts.
func split(buf []byte, counts []int64) [][]byte {
	parts := make([][]byte, len(counts))
	for i, n := range counts {
		parts[i], buf = buf[:n:n], buf[n:]
	}
	return parts
}

func totalOf(lengths []int64) (n int64) {
	for _, m := range lengths {
		n += m
	}
	return n
}

// lengthsOf appends the bytes of each tensor to counts.
func lengthsOf(counts []int64, ts []*tensor.Tensor) []int64 {
	for _, t := range ts {
		counts = append(counts, int64(t.ByteLen()))
	}
	return counts
}

// bytesOf returns the memory of v.
func bytesOf(v []int64) []byte {
	t, err := tensor.Of(v, len(v))
	if err != nil {
		panic(err) // the shape is the length
	}
	return t.Bytes()
}

// room returns s with length n and undefined contents.
func room[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// cleanBools makes every true byte 1: PyTorch adds bools as bytes, and in Go
// any other value is no bool.
func cleanBools(ts []*tensor.Tensor) error {
	for _, t := range ts {
		if t.DType() != tensor.Bool || t.Layout() != tensor.Strided {
			continue
		}
		c, err := t.Contiguous()
		if err != nil {
			return err
		}
		buf, dirty := c.Bytes(), false
		for i, v := range buf {
			if v > 1 {
				buf[i], dirty = 1, true
			}
		}
		if dirty && c != t {
			if err := t.Unpack(buf); err != nil {
				return err
			}
		}
	}
	return nil
}
