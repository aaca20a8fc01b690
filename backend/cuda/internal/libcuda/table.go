package libcuda

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// span is memory that came out of a Driver.
type span struct {
	base, end driver.Ptr
	device    int // -1: the host's
	foreign   bool
	refs      int // of Borrow, for foreign spans
}

func (s span) String() string {
	where := "page-locked memory"
	if s.device >= 0 {
		where = fmt.Sprintf("memory of device %d", s.device)
	}
	return fmt.Sprintf("the %d bytes of %s at %v", s.end-s.base, where, s.base)
}

// table is the spans of a Driver in the order of their addresses. Looking
// something up takes no lock.
type table struct {
	mu    sync.Mutex
	spans atomic.Pointer[[]span]
}

func (t *table) all() []span {
	if p := t.spans.Load(); p != nil {
		return *p
	}
	return nil
}

// at returns the index of the span that p is in, or of the first after it.
func at(spans []span, p driver.Ptr) (int, bool) {
	lo, hi := 0, len(spans)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if spans[mid].end <= p {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(spans) && spans[lo].base <= p
}

// find returns the span that n bytes at p lie in. Memory that somebody else
// mapped piece by piece may go on in the next one.
func (t *table) find(p driver.Ptr, n int) (span, error) {
	spans := t.all()
	i, ok := at(spans, p)
	if !ok {
		return span{}, fmt.Errorf("%w: no memory of this driver at %v", driver.ErrInvalid, p)
	}
	s := spans[i]
	for end := p + driver.Ptr(n); end > s.end; i++ {
		if !s.foreign || i+1 == len(spans) || !spans[i+1].foreign || spans[i+1].base != s.end || spans[i+1].device != s.device {
			return span{}, fmt.Errorf("%w: %d bytes at %v end %d bytes beyond %v", driver.ErrInvalid, n, p, end-s.end, s)
		}
		s.end = spans[i+1].end
	}
	return s, nil
}

// overlaps returns a span that has some of n bytes at p.
func (t *table) overlaps(p driver.Ptr, n int) (span, bool) {
	spans := t.all()
	i, _ := at(spans, p)
	if i < len(spans) && spans[i].base < p+driver.Ptr(n) {
		return spans[i], true
	}
	return span{}, false
}

func (t *table) insert(s span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	spans := slices.Clone(t.all())
	if !s.foreign {
		// What was borrowed here must have been freed without a Close.
		spans = slices.DeleteFunc(spans, func(o span) bool { return o.foreign && o.base < s.end && s.base < o.end })
	}
	i, in := at(spans, s.base)
	if in && s.foreign && spans[i].foreign && spans[i].base == s.base {
		spans[i].refs++
	} else {
		s.refs = 1
		spans = slices.Insert(spans, i, s)
	}
	t.spans.Store(&spans)
}

// remove takes out what insert put in.
func (t *table) remove(base driver.Ptr, foreign bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	spans := slices.Clone(t.all())
	i, in := at(spans, base)
	if !in || spans[i].base != base || spans[i].foreign != foreign {
		return
	}
	if spans[i].refs--; spans[i].refs == 0 {
		spans = slices.Delete(spans, i, i+1)
	}
	t.spans.Store(&spans)
}
