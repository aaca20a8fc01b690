package runs

import "math/bits"

// Merger joins runs. The zero value is ready; its memory is used again. It is
// for one goroutine at a time.
type Merger struct {
	union []uint64
	at    [][]int // by run and key: which of the union's it is
	flat  []int   // what at is cut from
	words []uint64
	below []int // keys in the words before
	heap  []head
	next  []int
	rows  [][]byte
}

// head is the next key of a run.
type head struct {
	key uint64
	run int
}

// before orders by key, then by run.
func (h head) before(o head) bool { return h.key < o.key || h.key == o.key && h.run < o.run }

// perKey is up to how many words of 64 bits for each key of the runs Union goes
// by bits. BenchmarkUnion: with two they take as long as the heap.
const perKey = 2

// Union returns the keys of all runs, ascending, each once. They all lie within
// span keys from from. The slice is good until the next call.
func (m *Merger) Union(runs [][]uint64, from, span uint64) []uint64 {
	total := 0
	for _, r := range runs {
		total += len(r)
	}
	m.flat, m.at = sized(m.flat, total), sized(m.at, len(runs))
	flat := m.flat
	for i, r := range runs {
		m.at[i], flat = flat[:len(r):len(r)], flat[len(r):]
	}
	m.union = sized(m.union, total)[:0]
	if span/64/perKey < uint64(total) {
		m.byBits(runs, from, int(span/64)+1)
	} else {
		m.byHeap(runs)
	}
	return m.union
}

func (m *Merger) byBits(runs [][]uint64, from uint64, words int) {
	m.words, m.below = sized(m.words, words), sized(m.below, words)
	clear(m.words)
	for _, r := range runs {
		for _, k := range r {
			m.words[(k-from)/64] |= 1 << ((k - from) % 64)
		}
	}
	for i, w := range m.words {
		m.below[i] = len(m.union)
		for ; w != 0; w &= w - 1 {
			m.union = append(m.union, from+uint64(64*i+bits.TrailingZeros64(w)))
		}
	}
	for i, r := range runs {
		at := m.at[i]
		for j, k := range r {
			w, bit := (k-from)/64, (k-from)%64
			at[j] = m.below[w] + bits.OnesCount64(m.words[w]&(1<<bit-1))
		}
	}
}

func (m *Merger) byHeap(runs [][]uint64) {
	h := m.heap[:0]
	m.next = sized(m.next, len(runs))
	for i, r := range runs {
		m.next[i] = 1
		if len(r) > 0 {
			h = append(h, head{r[0], i})
		}
	}
	m.heap = h
	for i := len(h)/2 - 1; i >= 0; i-- {
		sift(h, i)
	}
	for len(h) > 0 {
		k, run := h[0].key, h[0].run
		if n := len(m.union); n == 0 || m.union[n-1] != k {
			m.union = append(m.union, k)
		}
		j := m.next[run]
		m.at[run][j-1] = len(m.union) - 1
		if j < len(runs[run]) {
			h[0].key = runs[run][j]
			m.next[run]++
		} else {
			h[0] = h[len(h)-1]
			h = h[:len(h)-1]
		}
		sift(h, 0)
	}
}

func sift(h []head, i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1].before(h[c]) {
			c++
		}
		if !h[c].before(h[i]) {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}

// Sum adds up the rows of the runs that Union was called with last: values[i] has row bytes for
// each key of run i. Row k of dst becomes the rows that the runs have for key k of the union,
// combined in the order of the runs. Its old contents do not matter.
func (m *Merger) Sum(dst []byte, row int, values [][]byte, combine func(dst, src []byte)) {
	if row == 0 {
		return
	}
	m.words = sized(m.words, len(m.union)/64+1)
	clear(m.words)
	filled := func(at int) bool { return m.words[at/64]>>(at%64)&1 != 0 }
	for r, at := range m.at {
		v := values[r]
		for i := 0; i < len(at); {
			// Rows that lie side by side go together.
			first, more, j := at[i], filled(at[i]), i+1
			for j < len(at) && at[j] == first+j-i && filled(at[j]) == more {
				j++
			}
			d, s := dst[first*row:(first+j-i)*row], v[i*row:j*row]
			if more {
				combine(d, s)
			} else {
				copy(d, s)
				for k := first; k < first+j-i; k++ {
					m.words[k/64] |= 1 << (k % 64)
				}
			}
			i = j
		}
	}
}

// SumAtOnce is Sum with a function that takes all rows of a key at a time.
func (m *Merger) SumAtOnce(dst []byte, row int, values [][]byte, sum func(dst []byte, rows [][]byte)) {
	if row == 0 {
		return
	}
	m.next = sized(m.next, len(m.at))
	clear(m.next)
	for k := range m.union {
		m.rows = m.rows[:0]
		for r, at := range m.at {
			if i := m.next[r]; i < len(at) && at[i] == k {
				m.rows = append(m.rows, values[r][i*row:(i+1)*row])
				m.next[r]++
			}
		}
		d := dst[k*row : (k+1)*row]
		if len(m.rows) == 1 {
			copy(d, m.rows[0])
		} else {
			sum(d, m.rows)
		}
	}
	clear(m.rows)
}

// Size is how many bytes of memory the merger keeps for its next use.
func (m *Merger) Size() int {
	return 8 * (cap(m.union) + cap(m.flat) + cap(m.words) + cap(m.below) + cap(m.next) + 3*cap(m.at) + 2*cap(m.heap) + 3*cap(m.rows))
}

// sized returns s with length n, and what is in it undefined.
func sized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
