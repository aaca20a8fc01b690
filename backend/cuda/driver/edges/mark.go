package edges

import "github.com/c10d-go/c10d/backend/cuda/driver"

// Mark is the end of work that batches will do later. A stream can wait for it before the work has been
// enqueued, which no event allows. It is a word in page-locked memory that is counted up with each use, so a
// wait for an earlier use never lasts. The zero value is no mark.
type Mark struct {
	t     *Tracker
	word  driver.HostMemory
	at    int
	value uint32
}

// Mark returns a mark that has not ended. It does not wait for a Run.
func (t *Tracker) Mark() (Mark, error) {
	for {
		t.mu.Lock()
		if n := len(t.marks); n > 0 {
			m := t.marks[n-1]
			t.marks = t.marks[:n-1]
			t.mu.Unlock()
			m.value++
			return m, nil
		}
		closed := t.closed
		t.mu.Unlock()
		if closed {
			return Mark{}, errClosed()
		}
		h, err := t.d.AllocHost(manyWords * wordSize)
		if err != nil {
			return Mark{}, err
		}
		t.mu.Lock()
		t.marked = append(t.marked, h)
		for i := range manyWords {
			t.marks = append(t.marks, Mark{t: t, word: h, at: i * wordSize})
		}
		t.mu.Unlock()
	}
}

// Order makes s wait for the mark.
func (m Mark) Order(s driver.Stream) error { return m.t.await(s, m.ptr(), m.value) }

// Mark has s end a mark, after what precedes and conflicts with the accesses.
func (b *Batch) Mark(s driver.Stream, m Mark, access ...driver.Access) {
	b.WriteValue(s, m.ptr(), m.value, access...)
}

// End ends the mark if no stream has, and gives it back. No stream will write it any more.
func (m Mark) End() {
	if !driver.AtLeast.Holds(m.word.Load32(m.at), m.value) {
		m.word.Store32(m.at, m.value)
	}
	m.t.mu.Lock()
	defer m.t.mu.Unlock()
	m.t.marks = append(m.t.marks, m)
}

func (m Mark) ptr() driver.Ptr { return m.word.Ptr() + driver.Ptr(m.at) }
