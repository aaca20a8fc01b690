package group

import (
	"cmp"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/work"
)

// feed gives the streams what an operation through the host has them do. That is nearly
// always little, and they get it at once. With hundreds of tensors or of runs of bytes they
// get it in parts: each part when the ones before it have left room.
//
// The host has to take its turns between parts, and where a call of the driver waits for one: so do
// launches with CUDA_LAUNCH_BLOCKING=1, and all calls on a full stream. So the operation goes to the
// goroutine of the host's part before the first part is enqueued.
type feed struct {
	o      *Operation
	batch  *edges.Batch
	copies []given // of the batch
	turns  int     // the host's, of the batch
	relays int     // those in which it sends on, which are of the same pieces
	err    error   // nothing is enqueued any more
}

// given is how many commands a stream gets, besides what orders it.
type given struct {
	s driver.Stream
	n int
}

// past is where a stream was when the operation was called.
type past struct {
	stream driver.Stream
	event  driver.Event // nil once a batch has it
	uses   []driver.Access
}

// temporary is memory of who enqueues an operation, kept for the next one.
type temporary struct {
	places   []*place.Place
	callers  []driver.Stream
	accesses []driver.Access
	feed     feed
}

// hostTurn is a turn of the host's, in a part.
type hostTurn struct{ part, number int }

// Commander takes the copies and kernels of an operation. Launches must not be changed.
type Commander interface {
	Copy(s driver.Stream, dst, src driver.Ptr, n int)
	Launch(s driver.Stream, l *driver.Launch)
}

// begin begins an operation on tensors in these places.
func (f *feed) begin(o *Operation, places []*place.Place) {
	f.o, f.err = o, nil
	f.next()
	o.prologue(f.batch, places)
	if !o.long {
		return
	}
	// A batch forgets what callers' streams did that nothing in it comes after. So all
	// streams of the operation wait for those at once, before they write a word for nobody.
	all := o.accesses[:0]
	for _, p := range places {
		p.Uses(func(x place.Span) { all = append(all, driver.Reads(p.Base+driver.Ptr(x.Off), x.N)) })
	}
	for _, s := range o.everyStream() {
		f.batch.Signal(s, o.staging.Ptr()+driver.Ptr(o.word), 0, all...)
	}
	o.accesses = all
}

// prologue orders the operation after what direct work and the callers' streams did with its tensors.
func (o *Operation) prologue(batch *edges.Batch, places []*place.Place) {
	if o.later {
		for i := range o.past {
			p := &o.past[i]
			batch.Past(p.stream, p.event, p.uses...)
		}
		return
	}
	for _, w := range o.B.Ways {
		w.Before(batch.Before, places)
	}
	o.callers(batch.Before, places)
}

// callers tells f which streams of the callers use which of the tensors.
func (o *Operation) callers(f func(s driver.Stream, access ...driver.Access), places []*place.Place) {
	var streams []driver.Stream
	if o.given != nil {
		streams = o.given.Before
	} else {
		streams = o.temporary.callers[:0]
		for _, p := range places {
			if p.Stream != nil && !slices.Contains(streams, p.Stream) {
				streams = append(streams, p.Stream)
			}
		}
		o.temporary.callers = streams
	}
	for _, s := range streams {
		// At once, as it is one point of the stream: what is said twice is recorded
		// twice.
		all := o.accesses[:0]
		for _, p := range places {
			if o.given != nil || p.Stream == s {
				p.Uses(func(x place.Span) { all = append(all, driver.Writes(p.Base+driver.Ptr(x.Off), x.N)) })
			}
		}
		f(s, all...)
		o.accesses = all
	}
	clear(o.temporary.callers)
}

// measure finds out whether the operation gets to the streams in parts.
func (o *Operation) measure() {
	count := func(p *place.Place) (n int) {
		switch {
		case p.Of != nil:
			p.Of.InOrder(0, func(kernels.Layout, driver.Ptr, driver.Ptr, int) { n++ })
			return n + o.pieces
		case p.Flat:
			return o.pieces
		}
		return max(len(p.Holes), 1)
	}
	down, up := 0, 0
	for i := range o.Legs {
		l := &o.Legs[i]
		if l.Src != nil {
			down += count(l.Src)
		}
		for _, d := range l.Dst {
			up += count(d)
		}
	}
	most := max(down, up) + 2*o.pieces
	if o.fillWithin != nil {
		most *= 3 // a copy there, a kernel and a copy back
	}
	o.long = most > mostCommands-spareCommands
}

// Copy is Batch.Copy.
func (f *feed) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	if f.fits(s) {
		f.batch.Copy(s, dst, src, n)
	}
}

// Launch is Batch.Launch.
func (f *feed) Launch(s driver.Stream, l *driver.Launch) {
	if f.fits(s) {
		f.batch.Launch(s, l)
	}
}

// host is Batch.Host, of a turn that is noted in a list of the operation's.
func (f *feed) host(list *[]hostTurn, h *edges.Host, access ...driver.Access) {
	most := 0
	for _, c := range f.copies {
		most = max(most, c.n)
	}
	if !f.room(most) {
		return
	}
	o := f.o
	if list == &o.relayed {
		f.relays++
	} else {
		f.turns++
	}
	t := hostTurn{len(o.parts), f.batch.Host(h, access...)}
	o.mu.Lock()
	*list = append(*list, t)
	o.mu.Unlock()
}

// fits counts a command, and reports whether the stream may get it.
func (f *feed) fits(s driver.Stream) bool {
	at := func() *given {
		for i := range f.copies {
			if f.copies[i].s == s {
				return &f.copies[i]
			}
		}
		f.copies = append(f.copies, given{s: s})
		return &f.copies[len(f.copies)-1]
	}
	if !f.room(at().n) {
		return false
	}
	at().n++
	return true
}

// room makes sure that an operation with so many commands has room for another one. Each of the
// host's turns takes two more: a stream waits for it, and tells the host of its end.
func (f *feed) room(n int) bool {
	if f.err == nil && n+2*max(f.turns, f.relays) >= mostCommands-spareCommands {
		f.part()
	}
	return f.err == nil
}

// part enqueues the batch, waits until there is room for another part, and begins that.
func (f *feed) part() {
	o := f.o
	if f.run(); f.err != nil {
		return
	}
	o.mu.Lock()
	o.parts, o.pending = append(o.parts, o.pending), nil
	o.mu.Unlock()
	if f.err = o.room(); f.err == nil {
		f.next()
	}
}

// run enqueues the batch, which is pending from then on.
func (f *feed) run() {
	o := f.o
	o.mu.Lock()
	if o.halted {
		o.mu.Unlock()
		f.err = cmp.Or(o.B.Broken(), work.ErrAborted)
		return
	}
	o.pending = f.batch.Pending()
	o.mu.Unlock()
	f.batch.KeepTurns() // the host may be in one
	if !o.handed {
		o.hand()
	}
	p, err := o.give(f.batch)
	f.err = err
	o.occupy(p.Calls())
}

func (f *feed) next() {
	clear(f.copies)
	f.batch, f.copies, f.turns, f.relays = f.o.B.Tracker.Batch(), f.copies[:0], 0, 0
}

// end enqueues the last part, or the only one.
func (f *feed) end() error {
	o := f.o
	if f.err == nil {
		o.ends(f.batch)
		f.run()
	}
	err := f.err
	f.o, f.batch, f.err = nil, nil, nil
	o.mu.Lock()
	o.feedErr = err // the last part may lack turns
	n := len(o.parts)
	if o.pending == nil && n > 0 {
		o.pending, o.parts = o.parts[n-1], o.parts[:n-1]
	}
	o.mu.Unlock()
	return err
}

// hand gives the operation to the goroutine of the host's part.
func (o *Operation) hand() {
	o.handed = true
	o.feeding.Add(1)
	if o.serve != nil {
		o.serve()
		return
	}
	o.B.Mu.Lock()
	closed := o.B.todo.closed
	if !closed {
		o.B.todo.Put(o)
	}
	o.B.Mu.Unlock()
	if closed { // a call of the driver has returned long after Close
		o.Complete(o.named(work.ErrClosed))
	}
}

// give enqueues a batch of the operation.
func (o *Operation) give(b *edges.Batch) (*edges.Pending, error) {
	for i := range o.past {
		o.past[i].event = nil
	}
	o.driving.Store(true)
	defer o.driving.Store(false)
	return b.Run()
}

// ends has the last batch of a postponed operation end its mark. That of a message ends with its claim, by the host.
func (o *Operation) ends(b *edges.Batch) {
	if !o.later {
		return
	}
	// Where there is a stream for the way up, the operation's last commands are there, or soon after.
	l := &o.Legs[0]
	s := l.Src
	if len(l.Dst) > 0 {
		s = l.Dst[0]
	}
	b.Mark(cmp.Or(s.Up, s.Down), o.mark, o.uses...)
}

// begin waits until a turn is the host's.
func (o *Operation) begin(list *[]hostTurn, k int) error {
	pause := 10 * time.Microsecond
	for {
		p, n, err := o.turn(list, k)
		if err != nil {
			return err
		}
		if p != nil {
			return p.Begin(Asks(o.AskDriver), n)
		}
		if err := o.AskDriver(); err != nil {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, 100*time.Microsecond)
	}
}

// done ends a turn that has begun, also if the rest of the operation could not be enqueued: the other line may
// wait for the end.
func (o *Operation) done(list *[]hostTurn, k int) {
	o.mu.Lock()
	p, n := o.partOf((*list)[k])
	o.mu.Unlock()
	p.End(n)
}

// partOf returns the part that a turn is of, nil if that is still to be made, and the turn's number there. The caller
// holds mu.
func (o *Operation) partOf(t hostTurn) (*edges.Pending, int) {
	if t.part < len(o.parts) {
		return o.parts[t.part], t.number
	}
	return o.pending, t.number // nil between parts
}

// turn returns the part that a turn is of, nil if that is still to be made, and the
// turn's number there.
func (o *Operation) turn(list *[]hostTurn, k int) (*edges.Pending, int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.feedErr != nil {
		return nil, 0, o.feedErr
	}
	if k >= len(*list) {
		return nil, 0, nil
	}
	p, n := o.partOf((*list)[k])
	return p, n, nil
}
