package edges

import (
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Lanes returns how many streams and hosts a tracker knows.
func Lanes(t *Tracker) int { return len(t.lanes) }

// Clocks returns how many numbers of clocks a batch has room for.
func Clocks(b *Batch) int { return cap(b.clocks) + cap(b.tails) }

// History is a history, as a test sees it.
type History struct{ h history }

// Use is what History remembers of an access.
type Use struct {
	Lane  int
	Index uint64
	Mode  driver.Mode
	Alone bool
}

func exported(u use) Use { return Use{u.lane, u.index, u.mode, u.alone} }

func (h *History) Add(a driver.Access, u Use) {
	h.h.add(a, use{lane: u.Lane, index: u.Index, alone: u.Alone})
}

func (h *History) Drop(f func(Use) bool) { h.h.drop(func(u use) bool { return f(exported(u)) }) }

// Conflicts returns the uses that an access conflicts with, each once.
func (h *History) Conflicts(a driver.Access) map[Use]bool {
	all := make(map[Use]bool)
	for _, u := range h.h.conflicts(nil, a) {
		all[exported(u)] = true
	}
	return all
}

// Segments returns how many segments there are, and checks that they are in order.
func (h *History) Segments() (int, error) {
	n, end := 0, driver.Ptr(0)
	for i, b := range h.h.blocks {
		if len(b) == 0 {
			return 0, fmt.Errorf("block %d is empty", i)
		}
		for _, s := range b {
			if s.lo < end || s.hi <= s.lo || len(s.uses) == 0 {
				return 0, fmt.Errorf("segment %d, from %d to %d after %d, with %d uses", n, s.lo, s.hi, end, len(s.uses))
			}
			n, end = n+1, s.hi
		}
	}
	if n != h.h.n {
		return 0, fmt.Errorf("%d segments, counted %d", n, h.h.n)
	}
	return n, nil
}
