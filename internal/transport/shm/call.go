package shm

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/internal/transport"
)

// rememberCalls is how many of its latest calls a rank shows to the others. It is a power of
// two.
const rememberCalls = 64

// called is a call of one rank, in its part of the memory. Its owner writes it before it stores
// the call's number in segment.last. After rememberCalls more calls it is overwritten. Other
// ranks read it only to find out how ranks disagree.
type called struct {
	what    [2]uint64
	history uint64
}

// Compile-time check: the calls fit in the page.
const _ = uint(page - atCalls - rememberCalls*unsafe.Sizeof(called{}))

// entered marks a number in segment.last, so that no call and call 0 differ.
const entered = 1 << 63

// Describe sets how the What of calls is shown to people. It has to be called before Enter. f
// must accept any values.
func (g *Group) Describe(f func(what [2]uint64) string) { g.describe = f }

// Enter shows the other ranks this rank's call of operation number. Numbers count up by one.
// One goroutine at a time calls it, and none after Close.
func (g *Group) Enter(number uint32, c *transport.Call) {
	e := &g.self.calls[number%rememberCalls]
	e.what, e.history = c.What, c.History
	atomic.StoreUint64(g.self.last, entered|uint64(number))
}

// Begin sets the operation that the next collectives belong to. Their pieces carry its history, so that ranks
// with another history notice. Nothing else of the group may run meanwhile.
func (g *Group) Begin(number uint32, history uint64) {
	g.number, g.history = number, history
}

// called returns the rank's call of a number, if the rank has made it and it is still there.
func (s *segment) called(number uint32) (c transport.Call, ok bool) {
	there := func() bool {
		last := atomic.LoadUint64(s.last)
		since := int32(uint32(last) - number)
		// The owner may be writing the next ones.
		return last&entered != 0 && since >= 0 && since < rememberCalls-4
	}
	if !there() {
		return c, false
	}
	e := &s.calls[number%rememberCalls]
	c.What[0], c.What[1] = atomic.LoadUint64(&e.what[0]), atomic.LoadUint64(&e.what[1])
	c.History = atomic.LoadUint64(&e.history)
	return c, c.What[0] != 0 && there()
}

// compare returns how the calls of rank r differ from this rank's, up to a number. It returns
// nil if they are the same, or are no longer remembered.
func (g *Group) compare(r int, number uint32) error {
	last := atomic.LoadUint64(g.segs[r].last)
	if last&entered == 0 {
		return nil
	}
	if int32(uint32(last)-number) < 0 {
		number = uint32(last)
	}
	mine, theirs, differ := g.differ(r, number)
	if !differ {
		return nil
	}
	for {
		m, t, differ := g.differ(r, number-1)
		if !differ {
			break
		}
		mine, theirs, number = m, t, number-1
	}
	d := transport.Disagree(number, g.rank, g.text(mine), r, g.text(theirs))
	d.Earlier = mine.What == theirs.What
	return &disagreement{d}
}

// differ returns the calls of this rank and rank r with a number. differ is true if both are
// known and not the same.
func (g *Group) differ(r int, number uint32) (mine, theirs transport.Call, differ bool) {
	mine, known := g.self.called(number)
	theirs, ok := g.segs[r].called(number)
	return mine, theirs, known && ok && mine.History != theirs.History
}

func (g *Group) text(c transport.Call) string {
	if g.describe == nil {
		return fmt.Sprintf("%#x", c.What)
	}
	return g.describe(c.What)
}

// disagreement is a transport.Disagreement that is an ErrMismatch too.
type disagreement struct{ *transport.Disagreement }

func (d *disagreement) Is(target error) bool { return target == ErrMismatch }
func (d *disagreement) Unwrap() error        { return d.Disagreement }

// mismatch ends the group because rank r has published another header than this rank expects.
func (g *Group) mismatch(r int, got, want header) error {
	if err := g.compare(r, g.number); err != nil {
		return g.giveUp(&RankError{Rank: r, Err: err})
	}
	there := "nothing"
	if got.isOf(want.piece) {
		there = got.String()
	}
	return g.disagree(r, "rank %d expects %v, rank %d publishes %s", g.rank, want, r, there)
}

// disagree ends the group because the data of rank r do not fit, though it has made the same
// call.
func (g *Group) disagree(r int, format string, args ...any) error {
	during := ""
	if c, ok := g.self.called(g.number); ok {
		during = fmt.Sprintf(" in collective number %d, %s", g.number, g.text(c))
	}
	return g.giveUp(&RankError{Rank: r, Err: fmt.Errorf("%w%s: %s", ErrMismatch, during, fmt.Sprintf(format, args...))})
}

// String returns the collective and what is known of its size.
func (h header) String() string {
	s := h.kind.String()
	switch h.kind {
	case opBarrier, opAlloc, opAllToAllV:
		return s
	case opReduce, opBroadcast, opGather, opScatter:
		s += fmt.Sprintf(" with root %d", h.root)
	}
	s += fmt.Sprintf(" of %d bytes", h.bytes)
	if h.elem > 0 {
		s += fmt.Sprintf(" in elements of %d", h.elem)
	}
	return s
}

// CompareCalls waits until every other rank has made as many calls as this rank, or is gone, and
// compares the calls. If they differ the group ends, with a *RankError. Once ctx has ended, it compares
// the calls made so far. It may be called at any time.
func (g *Group) CompareCalls(ctx context.Context) error {
	for r := range g.size {
		if r == g.rank {
			continue
		}
		behind, err := g.catchUp(r)
		for sleep := minLookPause; behind && err == nil && ctx.Err() == nil; behind, err = g.catchUp(r) {
			if sleep < yieldFor {
				sleep += minLookPause
				yield()
				runtime.Gosched()
				continue
			}
			sleep = min(2*sleep, maxSleep)
			time.Sleep(sleep)
		}
		if err != nil {
			return err
		}
	}
	return g.Err()
}

// catchUp compares the calls of rank r, and reports whether it has made fewer than this rank.
func (g *Group) catchUp(r int) (behind bool, err error) {
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return false, ErrClosed
	}
	mine := atomic.LoadUint64(g.self.last)
	if r == g.rank || mine&entered == 0 {
		return false, nil
	}
	gone := g.gone(r) != nil
	theirs := atomic.LoadUint64(g.segs[r].last)
	if err := g.compare(r, uint32(mine)); err != nil {
		return false, g.giveUp(&RankError{Rank: r, Err: err})
	}
	behind = theirs&entered == 0 || int32(uint32(theirs)-uint32(mine)) < 0
	return behind && !gone && g.refusal() == nil, nil
}

// minLookPause is the shortest time between two looks of CompareCalls.
const minLookPause = 10 * time.Microsecond
