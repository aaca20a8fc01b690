package edges

import (
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// issue enqueues the operations.
func (b *Batch) issue(p *Pending) error {
	t := b.t
	for _, l := range t.lanes {
		if l.tails > 0 {
			e, err := l.record()
			if err != nil {
				return err
			}
			l.tail = e
		}
		if l.tailed {
			if err := t.needWord(l); err != nil {
				return err
			}
			if err := l.write(); err != nil {
				return err
			}
			l.signal = l.signals
		}
	}
	for i := range b.ops {
		o := &b.ops[i]
		if o.host != nil {
			b.turn(p, i)
			continue
		}
		for _, w := range b.waits[o.waitFrom:o.waitTo] {
			if t.Trace != nil {
				t.Trace(Edge{int(w.op), i, w.lane.String(), o.lane.String(), w.lane.stream == nil})
			}
			o.lane.calls++
			if err := b.waitFor(o.stream, w); err != nil {
				return err
			}
		}
		p.touch(o)
		if o.kind != kindBefore && o.kind != kindAfter {
			o.lane.calls++
		}
		if err := b.enqueue(o); err != nil {
			return err
		}
		if o.byWord {
			if err := t.needWord(o.lane); err != nil {
				return err
			}
			if err := o.lane.write(); err != nil {
				return err
			}
			o.signal = o.lane.signals
		}
		if o.byEvent || o.sink {
			if !o.past {
				e, err := o.lane.record()
				if err != nil {
					return err
				}
				o.event = e
			}
			if o.sink {
				p.events = append(p.events, o.event)
			}
		}
	}
	return nil
}

// waitFor makes a stream wait for an operation.
func (b *Batch) waitFor(s driver.Stream, w wait) error {
	if w.lane.stream == nil {
		return s.WaitValue(w.lane.wordPtr(), b.signal(w), driver.AtLeast)
	}
	event, waiters, keep := &w.lane.tail, &w.lane.tails, false
	if w.op >= 0 {
		o := &b.ops[w.op]
		event, waiters, keep = &o.event, &o.waiters, o.sink
	}
	if err := s.Wait(*event); err != nil {
		return err
	}
	if *waiters--; *waiters == 0 && !keep {
		(*event).Release()
		*event = nil
	}
	return nil
}

// signal returns the value of a lane's word that stands for what w waits for.
func (b *Batch) signal(w wait) uint32 {
	if w.op < 0 {
		return w.lane.signal
	}
	return b.ops[w.op].signal
}

func (b *Batch) enqueue(o *operation) error {
	switch o.kind {
	case kindCopy:
		return o.stream.Copy(o.dst, o.src, o.n)
	case kindMemset:
		return o.stream.Memset(o.dst, byte(o.value), o.n)
	case kindLaunch:
		return o.stream.Launch(o.launch)
	case kindWaitValue:
		return o.stream.WaitValue(o.dst, o.value, o.cond)
	case kindWriteValue, kindSignal:
		return o.stream.WriteValue(o.dst, o.value)
	}
	return nil
}

// turn notes what the host has to wait for.
func (b *Batch) turn(p *Pending, i int) {
	o := &b.ops[i]
	p.mu.Lock() // the host may be at an earlier turn
	defer p.mu.Unlock()
	from := len(p.needs)
	for _, w := range b.waits[o.waitFrom:o.waitTo] {
		if b.t.Trace != nil {
			b.t.Trace(Edge{int(w.op), i, w.lane.String(), o.lane.String(), true})
		}
		n := need{lane: w.lane, id: w.lane.id, stream: w.lane.stream, signal: b.signal(w)}
		if w.lane.foreign && w.lane.stream != nil {
			n.event = b.ops[w.op].event
		}
		p.needs = append(p.needs, n)
	}
	first := len(p.accesses)
	for _, a := range b.acc[o.from:o.to] {
		if a.Mode != driver.Shared {
			p.accesses = append(p.accesses, a)
		}
	}
	o.lane.signals++
	o.signal = o.lane.signals
	if o.kind == kindClaim {
		p.ends = append(p.ends, need{lane: o.lane, signal: o.signal})
	}
	p.turns = append(p.turns, turn{
		op: i, lane: o.lane, index: o.index, signal: o.signal,
		from: from, to: len(p.needs), first: first, last: len(p.accesses),
	})
}

// settle ends the lanes of streams that occur in Before and After only. After a
// failure it also makes p stand for what was enqueued.
func (b *Batch) settle(p *Pending, failed bool) {
	t := b.t
	if failed {
		b.tear(p)
		for i := range b.ops {
			if o := &b.ops[i]; o.event != nil && !o.sink && !o.past {
				p.events = append(p.events, o.event)
			}
		}
		for _, l := range t.lanes {
			if l.tail != nil {
				p.events = append(p.events, l.tail)
				l.tail = nil
			}
		}
		for _, e := range p.lanes {
			end, err := e.lane.stream.Record()
			if err != nil {
				p.err = err
				continue
			}
			p.events = append(p.events, end)
		}
	}
	// From now on the earlier commands of a caller's stream count as part of the first operation
	// that came after them.
	before := false
	for i := range b.ops {
		before = before || b.ops[i].kind == kindBefore && b.ops[i].lane.foreign
	}
	if before {
		t.hist.each(func(u *use) {
			if l := t.lanes[u.lane]; u.alone && l.foreign && u.index > l.base {
				if p := b.ops[l.ops[u.index-l.base-1]].proxy; p != none {
					u.lane, u.index = b.ops[p].lane.id, b.ops[p].index
				}
			}
		})
		t.hist.drop(func(u use) bool { return t.lanes[u.lane].foreign })
	}
	for _, l := range slices.Backward(t.lanes) {
		if l.foreign {
			t.forget(l)
		}
	}
}

// tear is for a batch that was not enqueued as a whole. Its plan does not hold, because some operation was
// not enqueued, and others count on its waits. So later operations wait for all that other lanes have been
// given.
func (b *Batch) tear(p *Pending) {
	t := b.t
	t.torn = true
	for _, l := range t.lanes {
		l.torn = l.base
		if len(l.ops) > 0 {
			copy(l.clock, b.tails[l.before:][:len(t.lanes)])
			l.clock[l.id] = l.index
		}
	}
	for _, e := range p.lanes {
		e.lane.torn = e.index
	}
	for _, u := range p.turns {
		u.lane.torn = u.index
	}
}
