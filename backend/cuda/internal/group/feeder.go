package group

import (
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
)

// A call enqueues an operation of few commands itself, if the streams have room. All others it leaves to the
// feeder, a goroutine that enqueues them in the order of the calls when the operations before have left room.
// Such a call gives nothing to the group's streams. It records an event on each stream that the operation comes
// after. It takes a mark, which later work can wait for.

// commanded reports whether the streams have to do something for the operation.
func (o *Operation) commanded() bool { return o.err == nil && len(o.Legs) > 0 && !o.onHost() }

// waits reports whether the feeder enqueues the operation, as far as that is known before it is staged. A message
// need not come after operations that have not been enqueued, unless they use its tensor. Two sends of one tensor
// come in order too: to the tracker, what the callers' streams did before the second is part of it. The caller
// holds Calls.
func (b *Engine) waits(o *Operation) bool {
	if !o.commanded() {
		return false
	}
	busy := !b.Fed()
	if o.line == b.messages {
		return busy && len(b.unfedMarks(usesOf(o.everyPlace(nil), driver.Writes))) > 0
	}
	return busy || o.Later || b.queued.Load() > MostQueued
}

// Fed reports whether the feeder has enqueued all operations that were called.
func (b *Engine) Fed() bool {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return b.unfed.Len() == 0
}

// unfedMarks returns the marks of the operations that use the same memory and may not have been enqueued.
func (b *Engine) unfedMarks(uses []driver.Access) (all []edges.Mark) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for o := range b.unfed.All() {
		if meet(o.uses, uses) {
			all = append(all, o.mark)
		}
	}
	return all
}

// meet reports whether two lists have a byte in common that one of them writes.
func meet(a, b []driver.Access) bool {
	for _, x := range a {
		for _, y := range b {
			if x.Ptr < y.Ptr+driver.Ptr(y.Len) && y.Ptr < x.Ptr+driver.Ptr(x.Len) && x.Mode.Conflicts(y.Mode) {
				return true
			}
		}
	}
	return false
}

// postpone leaves the operation to the feeder. The caller holds Calls.
func (o *Operation) postpone() (err error) {
	b := o.B
	if o.mark, err = b.Tracker.Mark(); err != nil {
		return err
	}
	o.later, o.temporary = true, new(temporary) // the call's and the feeder's may be in use
	places := o.everyPlace(nil)
	access := driver.Writes
	if o.claim != nil && o.Legs[0].Src != nil { // a send
		access = driver.Reads
	}
	o.uses = usesOf(places, access)
	note := func(s driver.Stream, uses ...driver.Access) {
		if !meet(o.uses, uses) {
			return
		}
		i := slices.IndexFunc(o.past, func(p past) bool { return edges.Same(p.stream, s) })
		if i < 0 {
			i = len(o.past)
			o.past = append(o.past, past{stream: s})
		}
		o.past[i].uses = append(o.past[i].uses, uses...)
	}
	for _, w := range b.Ways {
		w.Before(note, places)
	}
	o.callers(note, places)
	for i := range o.past {
		if o.past[i].event, err = o.past[i].stream.Record(); err != nil {
			return err
		}
	}
	return nil
}

// usesOf returns what an operation uses of the memory of its places.
func usesOf(places []*place.Place, access func(driver.Ptr, int) driver.Access) (all []driver.Access) {
	for _, p := range places {
		p.Uses(func(x place.Span) { all = append(all, access(p.Base+driver.Ptr(x.Off), x.N)) })
	}
	return all
}

// pass has the feeder enqueue an operation, or enqueues it. The caller holds Calls.
func (b *Engine) pass(o *Operation) {
	b.Mu.Lock()
	if !b.fed && (o.later || o.line == b.line && b.unfed.Len() > 0) {
		b.unfed.Put(o)
		b.feeds.Broadcast()
		b.Mu.Unlock()
		return
	}
	b.Mu.Unlock()
	o.enter(&b.byCall)
}

// feed is the feeder.
func (b *Engine) feed() {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for {
		for b.unfed.Len() == 0 {
			if b.fed {
				return
			}
			b.feeds.Wait()
		}
		o := b.unfed.At(0)
		b.Mu.Unlock()
		o.enter(&b.byFeeder)
		b.Mu.Lock()
		b.unfed.Take()
		b.feeds.Broadcast()
	}
}

// enter gives an operation to the streams, and to the goroutine of the host's part.
func (o *Operation) enter(t *temporary) {
	o.temporary = t
	if o.later && o.err == nil {
		if o.err = o.B.Broken(); o.err == nil {
			o.err = o.room()
		}
		if o.err == nil && !o.staged {
			o.err = o.stage()
		}
	}
	if o.commanded() {
		if err := o.enqueue(); err != nil && !o.handed {
			o.err = err
		}
	}
	o.issued.Store(true)
	for i := range o.past {
		if e := o.past[i].event; e != nil { // it has not come to that
			e.Release()
		}
	}
	o.past = nil
	if !o.handed {
		o.hand()
	}
	o.feeding.Done()
}

// fedWithin ends the feeder; false if a call of the driver keeps it longer than limit.
func (b *Engine) fedWithin(limit time.Duration) bool {
	late := false
	timer := time.AfterFunc(limit, func() {
		b.Mu.Lock()
		defer b.Mu.Unlock()
		late = true
		b.feeds.Broadcast()
	})
	defer timer.Stop()
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.fed = true
	b.feeds.Broadcast()
	for b.unfed.Len() > 0 && !late {
		b.feeds.Wait()
	}
	return b.unfed.Len() == 0
}

// After has s, a stream that the tracker does not know, come after the group's operations that use memory so.
// The caller holds Calls.
func (b *Engine) After(s driver.Stream, uses ...driver.Access) error {
	if b.Staged.Load() == 0 || len(uses) == 0 {
		return nil
	}
	for _, m := range b.unfedMarks(uses) {
		if err := m.Order(s); err != nil {
			return err
		}
	}
	batch := b.Tracker.Batch()
	batch.After(s, uses...)
	p, err := batch.Run()
	if p != nil {
		p.Release()
	}
	return err
}
