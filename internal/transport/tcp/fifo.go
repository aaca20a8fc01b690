package tcp

import (
	"math/bits"
)

// fifo is a queue of values that keeps its memory.
type fifo[T any] struct {
	items   []T // a power of two
	head, n int
}

func (q *fifo[T]) len() int { return q.n }

func (q *fifo[T]) push(x T) {
	if q.n == len(q.items) {
		more := make([]T, max(16, 2*q.n))
		for i := range q.n {
			more[i] = q.items[(q.head+i)&(len(q.items)-1)]
		}
		q.items, q.head = more, 0
	}
	q.items[(q.head+q.n)&(len(q.items)-1)] = x
	q.n++
}

// front returns the oldest element; there has to be one.
func (q *fifo[T]) front() *T { return q.at(0) }

// at returns the element behind so many others.
func (q *fifo[T]) at(i int) *T { return &q.items[(q.head+i)&(len(q.items)-1)] }

func (q *fifo[T]) pop() {
	var zero T
	q.items[q.head] = zero
	q.head = (q.head + 1) & (len(q.items) - 1)
	q.n--
}

// blocks is the memory for unexpected messages, in sizes of powers of two. Memory that is kept
// for reuse is bounded by keepBlocks, memory in use by the windows.
type blocks struct {
	free [32][][]byte
	kept int
}

// keepBlocks is how many bytes a mesh keeps of blocks that are not in use.
const keepBlocks = 8 << 20

// get returns a block of n bytes, nil for none.
func (b *blocks) get(n int) []byte {
	if n == 0 {
		return nil
	}
	c := max(bits.Len(uint(n-1)), 6)
	if k := len(b.free[c]); k > 0 {
		block := b.free[c][k-1]
		b.free[c] = b.free[c][:k-1]
		b.kept -= 1 << c
		return block[:n]
	}
	return make([]byte, n, 1<<c)
}

func (b *blocks) put(block []byte) {
	n := cap(block)
	if n == 0 || b.kept+n > keepBlocks {
		return
	}
	c := bits.Len(uint(n - 1))
	b.free[c] = append(b.free[c], block)
	b.kept += n
}
