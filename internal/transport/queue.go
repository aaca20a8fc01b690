package transport

// Linked is an element of a Queue: a pointer to something that has a field for the next element.
type Linked[E any] interface {
	comparable
	// Link returns that field.
	Link() *E
}

// Queue is a first-in, first-out list. Its elements hold the links, so an element is in one
// queue at a time, and the queue allocates nothing. The zero Queue is empty.
type Queue[E Linked[E]] struct{ head, tail E }

// Front returns the oldest element, nil if there is none. The others follow by their links.
func (q *Queue[E]) Front() E { return q.head }

// Empty reports whether the queue has no element.
func (q *Queue[E]) Empty() bool {
	var none E
	return q.head == none
}

// Push appends e.
func (q *Queue[E]) Push(e E) {
	var none E
	*e.Link() = none
	if q.head == none {
		q.head = e
	} else {
		*q.tail.Link() = e
	}
	q.tail = e
}

// PushFront puts e before all others.
func (q *Queue[E]) PushFront(e E) {
	if q.Empty() {
		q.Push(e)
		return
	}
	*e.Link() = q.head
	q.head = e
}

// Pop removes and returns the oldest element, nil if there is none.
func (q *Queue[E]) Pop() E {
	var none E
	e := q.head
	if e != none {
		if q.head, *e.Link() = *e.Link(), none; q.head == none {
			q.tail = none // or an empty queue would keep the memory of e
		}
	}
	return e
}

// Remove removes e and reports whether it was in the queue. It looks at all elements before e.
func (q *Queue[E]) Remove(e E) bool {
	var none E
	if e == q.head {
		return q.Pop() != none
	}
	for before := q.head; before != none; before = *before.Link() {
		if next := before.Link(); *next == e {
			*next, *e.Link() = *e.Link(), none
			if q.tail == e {
				q.tail = before
			}
			return true
		}
	}
	return false
}

// Requests is a queue of requests.
type Requests struct{ Queue[*Request] }

// Complete ends all requests with err and empties the queue.
func (q *Requests) Complete(err error) {
	for r := q.Pop(); r != nil; r = q.Pop() {
		r.Complete(err)
	}
}
