package callback

import "fmt"

// Match matches values with takers by key: the n-th value of a key goes to its n-th taker,
// whichever comes first. It has no goroutines and no locks; its owner serialises calls. The zero
// value has no room for values; set Values and Bytes.
//
// It allocates nothing once it has had as many entries before.
type Match[K comparable, V, C any] struct {
	// Values and Bytes bound the values that wait for a taker.
	Values int
	Bytes  int64

	keys   map[K]line[V, C]
	free   *node[V, C]
	values int
	bytes  int64
	takers int
}

// line has the values or takers that wait under one key, never both.
type line[V, C any] struct {
	head, tail *node[V, C]
	values     bool
}

type node[V, C any] struct {
	value V
	taker C
	size  int64
	next  *node[V, C]
}

// FullError says that a value found no taker and no room.
type FullError struct {
	Values, MaxValues int
	Bytes, MaxBytes   int64 // of the values that wait, without the one that was refused
}

func (e *FullError) Error() string {
	return fmt.Sprintf("callback: %d values of %d bytes wait for callbacks, the limits are %d values and %d bytes", e.Values, e.Bytes, e.MaxValues, e.MaxBytes)
}

// Take hands c to the oldest value of k, if one waits. Otherwise c waits.
func (m *Match[K, V, C]) Take(k K, c C) (v V, ok bool) {
	if v, ok = m.TakeValue(k); ok {
		return v, true
	}
	n := m.node()
	n.taker = c
	m.push(k, n, false)
	m.takers++
	return v, false
}

// Put hands v to the oldest taker of k, if one waits. Otherwise v waits, if
// there is room for size bytes, and is refused with a *[FullError] if not.
func (m *Match[K, V, C]) Put(k K, v V, size int64) (c C, ok bool, err error) {
	if c, ok = m.TakeTaker(k); ok {
		return c, true, nil
	}
	if m.values >= m.Values || size > m.Bytes-m.bytes {
		return c, false, &FullError{m.values, m.Values, m.bytes, m.Bytes}
	}
	n := m.node()
	n.value, n.size = v, size
	m.push(k, n, true)
	m.values++
	m.bytes += size
	return c, false, nil
}

// Value returns the oldest value of k and leaves it.
func (m *Match[K, V, C]) Value(k K) (v V, ok bool) {
	if l := m.keys[k]; l.values {
		return l.head.value, true
	}
	return v, false
}

// Taker returns the oldest taker of k and leaves it.
func (m *Match[K, V, C]) Taker(k K) (c C, ok bool) {
	if l := m.keys[k]; l.head != nil && !l.values {
		return l.head.taker, true
	}
	return c, false
}

// TakeValue removes and returns the oldest value of k, if one waits.
func (m *Match[K, V, C]) TakeValue(k K) (v V, ok bool) {
	l, ok := m.keys[k]
	if !ok || !l.values {
		return v, false
	}
	v = l.head.value
	m.values--
	m.bytes -= l.head.size
	m.pop(k, l)
	return v, true
}

// TakeTaker removes and returns the oldest taker of k, if one waits.
func (m *Match[K, V, C]) TakeTaker(k K) (c C, ok bool) {
	l, ok := m.keys[k]
	if !ok || l.values {
		return c, false
	}
	c = l.head.taker
	m.takers--
	m.pop(k, l)
	return c, true
}

// Waiting returns how many values and takers wait, and the bytes of the values.
func (m *Match[K, V, C]) Waiting() (values int, bytes int64, takers int) {
	return m.values, m.bytes, m.takers
}

// Drop removes all values and takers, and passes them to the two functions, in order for each key. value may be
// nil.
func (m *Match[K, V, C]) Drop(value func(V), taker func(C)) {
	for k, l := range m.keys {
		delete(m.keys, k)
		for l.head != nil {
			n := l.head
			l.head = n.next
			v, c, size := n.value, n.taker, n.size
			m.release(n)
			if !l.values {
				m.takers--
				taker(c)
				continue
			}
			m.values--
			m.bytes -= size
			if value != nil {
				value(v)
			}
		}
	}
}

func (m *Match[K, V, C]) node() *node[V, C] {
	n := m.free
	if n == nil {
		return new(node[V, C])
	}
	m.free, n.next = n.next, nil
	return n
}

func (m *Match[K, V, C]) release(n *node[V, C]) {
	*n = node[V, C]{next: m.free}
	m.free = n
}

func (m *Match[K, V, C]) push(k K, n *node[V, C], values bool) {
	if m.keys == nil {
		m.keys = make(map[K]line[V, C])
	}
	l := m.keys[k]
	if l.head == nil {
		l = line[V, C]{head: n, values: values}
	} else {
		l.tail.next = n
	}
	l.tail = n
	m.keys[k] = l
}

func (m *Match[K, V, C]) pop(k K, l line[V, C]) {
	n := l.head
	if l.head = n.next; l.head == nil {
		delete(m.keys, k)
	} else {
		m.keys[k] = l
	}
	m.release(n)
}
