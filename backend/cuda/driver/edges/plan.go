package edges

import "slices"

// wait is an operation that another one has to come after: of this batch, or all
// that a lane had before it.
type wait struct {
	lane *lane
	op   int32 // -1: the lane's tail
}

// found is a wait that an operation may need.
type found struct {
	wait
	index   uint64 // the operation, on its lane, that it is needed for
	implied bool   // by others
}

// none stands for no operation in Batch.last, tail for a lane's tail.
const (
	none int32 = -2
	tail int32 = -1
)

// plan finds out which operation has to wait for which. It enqueues nothing.
func (b *Batch) plan() {
	t := b.t
	for i := range b.ops {
		o := &b.ops[i]
		if o.host != nil {
			o.lane = o.host.l
		} else {
			o.lane = t.laneOf(o.stream)
			if o.kind != kindBefore && o.kind != kindAfter {
				o.lane.foreign = false
			}
			o.proxy = none
		}
	}
	lanes := len(t.lanes)
	for _, l := range t.lanes {
		l.base, l.signal, l.ops, l.tails, l.tailed, l.calls = l.index, l.signals, l.ops[:0], 0, false, 0
		l.clock[l.id] = l.index
	}
	t.torn = t.torn && slices.ContainsFunc(t.lanes, (*lane).open)
	b.last = slices.Grow(b.last[:0], lanes)[:lanes]
	for i := range b.last {
		b.last[i] = none
	}
	for i := range b.ops {
		o := &b.ops[i]
		l := o.lane
		if len(l.ops) == 0 {
			l.before = len(b.tails)
			b.tails = append(b.tails, l.clock...)
		}
		l.index++
		o.index = l.index
		l.ops = append(l.ops, int32(i))
		// The tracker does not see what a Before or a WaitValue stands for: it waits for nothing here.
		// Nothing here waits for an After or a WriteValue.
		in := o.kind == kindBefore || o.kind == kindWaitValue
		out := o.kind == kindAfter || o.kind == kindWriteValue
		if !in {
			b.wait(i)
		}
		l.clock[l.id] = l.index
		b.clocks = append(b.clocks, l.clock...)
		if out {
			continue
		}
		for _, a := range b.acc[o.from:o.to] {
			t.hist.add(a, use{lane: l.id, index: o.index, alone: in})
		}
	}
	b.sinks()
}

// wait finds the operations that an operation has to wait for: in each lane the last one that conflicts with it,
// unless it comes after that already.
func (b *Batch) wait(i int) {
	t, o := b.t, &b.ops[i]
	l := o.lane
	b.hits = b.hits[:0]
	for _, a := range b.acc[o.from:o.to] {
		b.hits = t.hist.conflicts(b.hits, a)
	}
	for _, m := range t.lanes {
		if t.torn && m.open() {
			b.hits = append(b.hits, use{lane: m.id, index: m.torn})
		}
	}
	for _, u := range b.hits {
		from := t.lanes[u.lane]
		if u.lane == l.id || u.index <= l.clock[u.lane] || u.index <= from.finished.Load() {
			continue
		}
		op := tail
		if u.index > from.base {
			op = from.ops[u.index-from.base-1]
		}
		if b.last[u.lane] == none {
			b.found = append(b.found, found{wait: wait{from, op}})
		}
		b.last[u.lane] = max(b.last[u.lane], op)
		for k := range b.found {
			if f := &b.found[k]; f.lane == from && u.index >= f.index {
				f.op, f.index = op, u.index
			}
		}
	}
	o.waitFrom = len(b.waits)
	for k := range b.found {
		f := &b.found[k]
		b.last[f.lane.id] = none
		// The others may stand for everything that this one is there for.
		f.implied = true
		f.implied = b.covered()
		if !f.implied {
			b.waits = append(b.waits, f.wait)
		}
	}
	o.waitTo = len(b.waits)
	b.found = b.found[:0]
	for _, w := range b.waits[o.waitFrom:o.waitTo] {
		for id, n := range b.clock(w) {
			l.clock[id] = max(l.clock[id], n)
		}
		byHost := l.stream == nil
		switch {
		case w.lane.stream == nil:
		case w.lane.foreign && byHost:
			// Not by a word: the lane, and its word, may be another stream's before this one
			// has written it.
			b.ops[w.op].sink = true
		case w.op < 0 && byHost:
			w.lane.tailed = true
		case w.op < 0:
			w.lane.tails++
		case byHost:
			b.ops[w.op].byWord = true
		default:
			b.ops[w.op].byEvent = true
			b.ops[w.op].waiters++
		}
		if w.lane.foreign && !l.foreign {
			for _, j := range w.lane.ops {
				if p := &b.ops[j].proxy; j <= w.op && *p == none {
					*p = int32(i)
				}
			}
		}
	}
}

// covered reports whether the waits that were found and are not implied order all
// that they were found for.
func (b *Batch) covered() bool {
	for _, f := range b.found {
		if f.implied && !slices.ContainsFunc(b.found, func(g found) bool {
			return !g.implied && b.clock(g.wait)[f.lane.id] >= f.index
		}) {
			return false
		}
	}
	return true
}

// clock returns the clock of an operation, or of a lane's tail.
func (b *Batch) clock(w wait) []uint64 {
	lanes := len(b.t.lanes)
	switch {
	case w.op >= 0:
		return b.clocks[int(w.op)*lanes:][:lanes]
	case len(w.lane.ops) > 0:
		return b.tails[w.lane.before:][:lanes]
	}
	return w.lane.clock // the batch has nothing on it
}

// sinks marks the operations whose ends are the end of the batch: of each stream
// the last one, if no other stream's last one comes after it.
func (b *Batch) sinks() {
	lastOf := func(l *lane) int32 {
		if l.stream == nil {
			return none
		}
		for _, i := range slices.Backward(l.ops) {
			if k := b.ops[i].kind; k != kindBefore && k != kindAfter {
				return i
			}
		}
		return none
	}
	for _, l := range b.t.lanes {
		i := lastOf(l)
		if i == none {
			continue
		}
		covered := false
		for _, o := range b.t.lanes {
			if j := lastOf(o); o != l && j != none && b.clock(wait{o, j})[l.id] >= b.ops[i].index {
				covered = true
				break
			}
		}
		b.ops[i].sink = !covered
	}
}
