// Package ring has a queue whose items leave without moving the others.
package ring

import "iter"

// Queue is a first-in first-out queue of a slice that its items go round. The zero value is empty. Put allocates only if
// the queue has never been that long. A place without an item is zero, so it keeps no memory alive.
type Queue[T any] struct {
	places []T // a power of two
	first  int // place of the oldest item
	n      int
}

// Len returns the number of items.
func (q *Queue[T]) Len() int { return q.n }

// At returns item i, from 0, the oldest, to Len()-1.
func (q *Queue[T]) At(i int) T {
	if uint(i) >= uint(q.n) {
		panic("ring: no such item")
	}
	return *q.at(i)
}

func (q *Queue[T]) at(i int) *T { return &q.places[(q.first+i)&(len(q.places)-1)] }

// All returns the items, oldest first. They must not change meanwhile.
func (q *Queue[T]) All() iter.Seq[T] {
	return func(yield func(T) bool) {
		for i := range q.n {
			if !yield(*q.at(i)) {
				return
			}
		}
	}
}

// Put appends an item.
func (q *Queue[T]) Put(x T) {
	if q.n == len(q.places) {
		q.grow()
	}
	q.n++
	*q.at(q.n - 1) = x
}

func (q *Queue[T]) grow() {
	places := make([]T, max(8, 2*len(q.places)))
	n := copy(places, q.places[q.first:])
	copy(places[n:], q.places[:q.first])
	q.places, q.first = places, 0
}

// Take removes the oldest item and returns it.
func (q *Queue[T]) Take() T { return q.Remove(0) }

// Remove removes item i and returns it. It moves the items before it.
func (q *Queue[T]) Remove(i int) T {
	x := q.At(i)
	for ; i > 0; i-- {
		*q.at(i) = *q.at(i - 1)
	}
	var none T
	*q.at(0) = none
	q.first = (q.first + 1) & (len(q.places) - 1)
	q.n--
	return x
}
