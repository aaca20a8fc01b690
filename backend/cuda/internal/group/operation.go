package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// line is what carries operations one after the other: a stream from each device
// to the host, one back, and the host's turns between them.
type line struct {
	host     *edges.Host
	relay    *edges.Host           // nil until a broadcast sends something on
	down, up map[int]driver.Stream // by device; touched only by who may use the line

	// broadcasts counts those from rank to rank, whose messages' tags need it: all
	// ranks count them alike, and operations not. The backend's calls guards it.
	broadcasts uint32

	// Of the prologue and what follows, kept for the next one.
	places   []*place.Place
	callers  []driver.Stream
	accesses []driver.Access
	feed     feed
}

func (b *Engine) newLine() (*line, error) {
	h, err := b.Tracker.Host("host")
	if err != nil {
		return nil, err
	}
	return &line{host: h, down: make(map[int]driver.Stream), up: make(map[int]driver.Stream)}, nil
}

// stream returns the line's stream of a device.
func (l *line) stream(b *Engine, m map[int]driver.Stream, dev int, name string) (driver.Stream, error) {
	if s, ok := m[dev]; ok {
		return s, nil
	}
	v, err := b.Driver.Device(dev)
	if err != nil {
		return nil, err
	}
	s, err := v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d %s.%d", b.Rank, name, dev)})
	if err != nil {
		return nil, err
	}
	m[dev] = s
	return s, nil
}

func (l *line) close(t *edges.Tracker) error {
	var errs []error
	for _, m := range []map[int]driver.Stream{l.down, l.up} {
		for _, s := range m {
			t.Forget(s)
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(errs...)
}

// Leg is a part of what an operation moves: n elements that are read from one
// tensor, written to several, or both, through one place on the host.
type Leg struct {
	N     int
	DType tensor.DType
	Src   *place.Place // nil if nothing is read
	Dst   []*place.Place
}

func (l *Leg) size() int { return l.DType.Size() }

// flat reports whether the leg can go piece by piece.
func (l *Leg) flat() bool {
	for _, d := range l.Dst {
		if !d.Flat {
			return false
		}
	}
	return l.Src == nil || l.Src.Flat
}

func (l *Leg) each(f func(*place.Place)) {
	for _, d := range l.Dst {
		f(d)
	}
	if l.Src != nil {
		for _, d := range l.Dst {
			if d.T == l.Src.T {
				return
			}
		}
		f(l.Src)
	}
}

// From is a leg that is only read, to one that is only written, both one that is
// read and written.
func From(t *tensor.Tensor) Leg { return Leg{N: t.Len(), DType: t.DType(), Src: place.Of(t)} }
func To(t *tensor.Tensor) Leg {
	return Leg{N: t.Len(), DType: t.DType(), Dst: []*place.Place{place.Of(t)}}
}
func Both(t *tensor.Tensor) Leg {
	p := place.Of(t)
	return Leg{N: t.Len(), DType: t.DType(), Src: p, Dst: []*place.Place{p}}
}

func Legs(f func(*tensor.Tensor) Leg, ts ...*tensor.Tensor) []Leg {
	all := make([]Leg, len(ts))
	for i, t := range ts {
		all[i] = f(t)
	}
	return all
}

// Operation is one call on its way. The Work is part of it.
type Operation struct {
	work.Promise
	B        *Engine
	Ctx      context.Context
	timeout  time.Duration
	deadline time.Time
	line     *line

	Legs   []Leg
	Print  board.Call
	number uint64 // of the collective

	// Call does the host's part for a piece: the same range of elements of every
	// leg, as one-dimensional CPU tensors. It must be the same on every rank.
	Call func(o *Operation, legs []*tensor.Tensor) error

	// Whole is for operations whose pieces the ranks cannot agree on.
	Whole bool

	// Width is over how many legs a chunk is spread, the same on every rank.
	Width int

	given   *place.CallStreams // of the call's context
	grain   int                // elements of a leg in a piece
	pieces  int
	slots   int
	slot    int   // bytes
	at      []int // of each leg within a slot
	staging driver.HostMemory
	long    bool                    // it may get to the streams in parts
	word    int                     // that its streams write, in staging
	raw     []rawPlace              // tensors that the host packs and unpacks
	packed  []packedPlace           // those that devices do
	Shared  *shared                 // of an all-reduce through memory that the ranks share
	Relay   *oneToAll               // of a broadcast from rank to rank
	relayed []hostTurn              // its turns to send chunks on
	Sync    func(work.Stream) error // orders a stream after a work of somebody else's
	before  *work.Work              // of a barrier: what has to end first
	claim   *edges.Host             // of a message, and the turn in which it uses the tensor
	claimed int
	flying  bool           // it has left copies on its stream
	queued  bool           // who does the host's part has it; for who issues it
	feeding sync.WaitGroup // until it has been enqueued, if it was given to that one before
	unwatch func() bool    // stops watching ctx
	err     error

	mu       sync.Mutex
	turns    []hostTurn
	parts    []*edges.Pending // enqueued before the last one
	pending  *edges.Pending   // the last or only one
	feedErr  error            // why not all parts were
	launched bool             // it counts in underway
	over     bool             // the batches have ended, and are released; only settled writes it

	commands int // of engine.queued
}

// rawPlace is where the bytes of a tensor that is not contiguous are staged.
type rawPlace struct {
	p     *place.Place
	leg   int
	at    int
	read  bool
	write bool
}

const stagingAlign = 256

func Align(n int) int { return (n + stagingAlign - 1) &^ (stagingAlign - 1) }

// mostPieces is how many chunks an all-reduce through memory that the ranks share has.
const mostPieces = 256

// layout decides on pieces and staging.
func (o *Operation) layout() (bytes int) {
	flat, longest, wide := true, 0, 1
	for i := range o.Legs {
		l := &o.Legs[i]
		flat = flat && l.flat()
		longest = max(longest, l.N)
		wide = max(wide, l.size())
	}
	o.grain, o.pieces = max(longest, 1), 1
	switch {
	case o.Shared != nil:
		o.grain, o.pieces = o.Shared.grain, o.Shared.chunks
	case !o.Whole:
		o.grain = o.B.grain(wide, max(o.Width, 1), longest)
		o.pieces = max(1, (longest+o.grain-1)/o.grain)
	}
	o.slots = min(o.pieces, o.B.slots)
	most := o.grain
	if !flat {
		// The host brings the elements in order first, and cuts them then.
		o.slots, most = 1, longest
	}
	o.at = make([]int, len(o.Legs))
	for i := range o.Legs {
		l := &o.Legs[i]
		o.at[i] = o.slot
		o.slot += Align(min(l.N, most) * l.size())
	}
	bytes = o.slot * o.slots
	if flat {
		return bytes
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		l.each(func(p *place.Place) {
			if p.Flat {
				return
			}
			r := rawPlace{p: p, leg: i, at: bytes, read: p == l.Src}
			for _, d := range l.Dst {
				r.write = r.write || d == p
			}
			o.raw = append(o.raw, r)
			bytes += Align(p.Hi - p.Lo)
		})
	}
	return bytes
}

// inTurn reports whether the operation is one turn of the host.
func (o *Operation) inTurn() bool { return len(o.raw) > 0 }

// elements returns the range of a leg that piece k takes.
func (o *Operation) elements(l *Leg, k int) (from, to int) {
	return min(k*o.grain, l.N), min((k+1)*o.grain, l.N)
}

// enqueue gives the streams all that they will do for the operation. The host's
// part comes later, in its turns.
func (o *Operation) enqueue() error {
	if err := o.room(mostCommands); err != nil {
		return err
	}
	all := o.line.places[:0]
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) { all = append(all, p.Tensor()) })
	}
	err := o.enqueueOn(all)
	clear(all)
	o.line.places = all
	return err
}

func (o *Operation) enqueueOn(places []*place.Place) error {
	if o.claim != nil {
		return o.enqueueClaim(places)
	}
	batch := &o.line.feed
	batch.begin(o, places)
	o.pack(batch)
	switch {
	case o.inTurn():
		o.fillTurn(batch)
	case o.alone():
		o.fillLocal(batch)
	case o.Relay != nil:
		o.fillOneToAll(batch)
	default:
		o.fill(batch)
	}
	o.unpack(batch)
	return batch.end()
}

func (o *Operation) fill(batch *feed) {
	base := o.staging.Ptr()
	for k := range o.pieces {
		slot := base + driver.Ptr(k%o.slots*o.slot)
		for i := range o.Legs {
			l := &o.Legs[i]
			lo, hi := o.elements(l, k)
			if l.Src != nil && lo < hi {
				batch.Copy(l.Src.Down, slot+driver.Ptr(o.at[i]), l.Src.Base+driver.Ptr(l.Src.Lo+lo*l.size()), (hi-lo)*l.size())
			}
		}
		batch.host(&o.turns, o.line.host, o.touched(slot, o.slot)...)
		for i := range o.Legs {
			l := &o.Legs[i]
			lo, hi := o.elements(l, k)
			for _, d := range l.Dst {
				if lo < hi {
					batch.Copy(d.Up, d.Base+driver.Ptr(d.Lo+lo*l.size()), slot+driver.Ptr(o.at[i]), (hi-lo)*l.size())
				}
			}
		}
	}
}

// touched is what the host uses in its turn: the staging and, if it copies to the
// ranks' exchange itself, this rank's slots there.
func (o *Operation) touched(p driver.Ptr, n int) []driver.Access {
	all := []driver.Access{driver.Writes(p, n)}
	if s := o.Shared; s != nil && s.x.Memory != nil {
		all = append(all, driver.Writes(s.x.Ptr(s.x.In(s.x.Rank, 0)), s.x.Slots*s.x.Chunk))
	}
	return all
}

// direct reports whether the devices copy to the ranks' exchange.
func (o *Operation) direct() bool { return o.Shared != nil && o.Shared.direct }

// fillTurn moves everything down, gives the host one turn, and moves everything up.
func (o *Operation) fillTurn(batch *feed) {
	bytes := o.slot
	for _, r := range o.raw {
		bytes = r.at + Align(r.p.Hi-r.p.Lo)
	}
	o.allDown(batch)
	batch.host(&o.turns, o.line.host, o.touched(o.staging.Ptr(), bytes)...)
	o.allUp(batch)
}

// allDown copies what is read to the staging, allUp copies what is written from there.
func (o *Operation) allDown(to commander) {
	down := func(p *place.Place, at int) {
		p.Each(func(s place.Span) {
			to.Copy(p.Down, o.staging.Ptr()+driver.Ptr(at+s.Off-p.Lo), p.Base+driver.Ptr(s.Off), s.N)
		})
	}
	for i := range o.Legs {
		if l := &o.Legs[i]; l.Src != nil && l.Src.Flat {
			down(l.Src, o.at[i])
		}
	}
	for _, r := range o.raw {
		if r.read {
			down(r.p, r.at)
		}
	}
}

func (o *Operation) allUp(to commander) {
	up := func(p *place.Place, at int) {
		p.Each(func(s place.Span) {
			to.Copy(p.Up, p.Base+driver.Ptr(s.Off), o.staging.Ptr()+driver.Ptr(at+s.Off-p.Lo), s.N)
		})
	}
	for i := range o.Legs {
		for _, d := range o.Legs[i].Dst {
			if d.Flat {
				up(d, o.at[i])
			}
		}
	}
	for _, r := range o.raw {
		if r.write {
			up(r.p, r.at)
		}
	}
}

// prologue orders the operation after what the caller's streams did with its
// tensors.
func (o *Operation) prologue(batch *edges.Batch, places ...*place.Place) {
	for _, w := range o.B.Ways {
		w.Before(batch, places)
	}
	var streams []driver.Stream
	if o.given != nil {
		streams = o.given.Before
	} else {
		streams = o.line.callers[:0]
		for _, p := range places {
			if p.Stream != nil && !slices.Contains(streams, p.Stream) {
				streams = append(streams, p.Stream)
			}
		}
		o.line.callers = streams
	}
	for _, s := range streams {
		// At once, as it is one point of the stream: what is said twice is recorded
		// twice.
		all := o.line.accesses[:0]
		for _, p := range places {
			if o.given != nil || p.Stream == s {
				p.Uses(func(x place.Span) { all = append(all, driver.Writes(p.Base+driver.Ptr(x.Off), x.N)) })
			}
		}
		batch.Before(s, all...)
		o.line.accesses = all
	}
	clear(o.line.callers)
}

// Order makes s wait for all that the operation does on devices. It waits for the
// Work only where there is nothing on a device to wait for.
func (o *Operation) Order(s work.Stream) error {
	switch {
	case o.Sync != nil:
		return o.Sync(s)
	case len(o.Legs) == 0:
		return o.Work().Wait(context.Background())
	}
	st, ok := s.(driver.Stream)
	if !ok {
		return o.named(fmt.Errorf("synchronize: %T is no stream of package driver", s))
	}
	o.mu.Lock()
	if o.pending == nil || o.over {
		o.mu.Unlock()
		return o.Work().Wait(context.Background())
	}
	// s may be full: o.mu is not held meanwhile, which the worker needs.
	var few [4]*edges.Pending
	all := append(append(few[:0], o.pending), o.parts...)
	for _, p := range all {
		p.Retain()
	}
	o.mu.Unlock()
	if err := OrderAfter(st, all); err != nil {
		return o.named(fmt.Errorf("synchronize: %w", err))
	}
	return o.Work().Err()
}

// OrderAfter makes s wait for batches, and releases them.
func OrderAfter(s driver.Stream, all []*edges.Pending) (err error) {
	for _, p := range all {
		err = cmp.Or(err, p.Order(s))
		p.Release()
	}
	return err
}

// Abort ends the group because of this operation.
func (o *Operation) Abort(cause error) { o.B.Abort(cause) }

// stopped is the context of waiting for a device: it ends with the call's, with the
// operation's time, with the group, and with the device.
type stopped struct{ o *Operation }

func (stopped) Deadline() (time.Time, bool) { return time.Time{}, false }
func (stopped) Done() <-chan struct{}       { return nil }
func (stopped) Value(any) any               { return nil }

func (s stopped) Err() error {
	o := s.o
	if err := o.Ctx.Err(); err != nil {
		return Canceled(o.Ctx)
	}
	if time.Now().After(o.deadline) {
		return fmt.Errorf("%w after %v", work.ErrTimeout, o.timeout)
	}
	if err := cmp.Or(o.B.Broken(), o.B.CPUErr()); err != nil {
		return err
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		if l.Src != nil && l.Src.Down != nil {
			if err := l.Src.Down.Err(); err != nil {
				return err
			}
		}
		for _, d := range l.Dst {
			if err := d.Up.Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Canceled says why a context ended.
func Canceled(ctx context.Context) error {
	kind := work.ErrCanceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = work.ErrTimeout
	}
	if cause := context.Cause(ctx); cause != ctx.Err() {
		return fmt.Errorf("%w: %w: %w", kind, ctx.Err(), cause)
	}
	return fmt.Errorf("%w: %w", kind, ctx.Err())
}

// Left returns what is left of the operation's time; an operation of the CPU
// backend takes 0 for its default.
func (o *Operation) Left() time.Duration { return max(time.Until(o.deadline), time.Nanosecond) }

// Wait waits for the host's part of a piece.
func (o *Operation) Wait(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

// run does the host's part.
func (o *Operation) run() error {
	o.Start()
	o.deadline = time.Now().Add(o.timeout)
	if o.err != nil {
		return o.err
	}
	if err := o.runHost(); err != nil {
		return err
	}
	o.feeding.Wait()
	return o.feedErr
}

func (o *Operation) runHost() error {
	if o.before != nil {
		if err := o.await(o.before); err != nil {
			return err
		}
		o.before = nil
	}
	if err := o.B.Broken(); err != nil {
		return err
	}
	switch {
	case o.alone():
		return nil
	case o.claim != nil:
		return o.runMessage()
	case o.direct():
		return o.Shared.run(o)
	case o.Relay != nil && !o.inTurn():
		return o.runOneToAll()
	case len(o.Legs) == 0:
		return o.Call(o, nil)
	}
	if o.inTurn() {
		return o.runTurn()
	}
	shadows := make([]*tensor.Tensor, len(o.Legs))
	for k := range o.pieces {
		if err := o.begin(&o.turns, k); err != nil {
			return err
		}
		slot := o.staging.Bytes()[k%o.slots*o.slot:][:o.slot]
		if err := o.shadow(shadows, slot, k); err != nil {
			return err
		}
		if err := o.Call(o, shadows); err != nil {
			return err
		}
		o.done(&o.turns, k)
	}
	return nil
}

// shadow makes the CPU tensors of piece k, whose bytes begin at the legs' places
// in slot.
func (o *Operation) shadow(shadows []*tensor.Tensor, slot []byte, k int) error {
	for i := range o.Legs {
		l := &o.Legs[i]
		lo, hi := o.elements(l, k)
		if o.inTurn() {
			slot = o.staging.Bytes()[lo*l.size():]
		}
		t, err := tensor.FromBytes(l.DType, slot[o.at[i]:][:(hi-lo)*l.size()], hi-lo)
		if err != nil {
			return err
		}
		shadows[i] = t
	}
	return nil
}

// runTurn does all pieces in one turn, between bringing elements in order and
// putting them back.
func (o *Operation) runTurn() error {
	if err := o.begin(&o.turns, 0); err != nil {
		return err
	}
	if err := o.packRaw(); err != nil {
		return err
	}
	shadows := make([]*tensor.Tensor, len(o.Legs))
	for k := range o.pieces {
		if err := o.shadow(shadows, nil, k); err != nil {
			return err
		}
		if err := o.Call(o, shadows); err != nil {
			return err
		}
	}
	if err := o.unpackRaw(); err != nil {
		return err
	}
	o.done(&o.turns, 0)
	return nil
}

// packRaw has the host bring elements in order that were copied as they lie, unpackRaw
// has it put them back.
func (o *Operation) packRaw() error {
	return o.eachRaw(func(r rawPlace) bool { return r.read }, (*tensor.Tensor).Pack)
}

func (o *Operation) unpackRaw() error {
	return o.eachRaw(func(r rawPlace) bool { return r.write }, (*tensor.Tensor).Unpack)
}

func (o *Operation) eachRaw(which func(rawPlace) bool, f func(t *tensor.Tensor, packed []byte) error) error {
	for _, r := range o.raw {
		if !which(r) {
			continue
		}
		l := &o.Legs[r.leg]
		t, err := r.p.Over(o.staging.Bytes()[r.at:][:r.p.Hi-r.p.Lo])
		if err == nil {
			err = f(t, o.staging.Bytes()[o.at[r.leg]:][:l.N*l.size()])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// await waits until an earlier operation has ended, well or not.
func (o *Operation) await(earlier *work.Work) error {
	ctx, cancel := context.WithTimeout(o.Ctx, o.timeout)
	defer cancel()
	earlier.Wait(ctx) // its error is for whoever waits for it
	switch {
	case earlier.IsCompleted():
		return nil
	case o.Ctx.Err() != nil:
		return Canceled(o.Ctx)
	}
	return fmt.Errorf("%w after %v, waiting for an earlier %v", work.ErrTimeout, o.timeout, earlier.Info().Op)
}

// failed ends the group because of what an operation ran into, and lets the
// streams go on.
func (o *Operation) failed(err error) {
	o.err = o.named(err)
	o.B.Fail(fmt.Errorf("the group has failed: %w", o.err), o.err)
	if x := o.B.usable(); x != nil {
		x.Fail()
	}
	o.feeding.Wait() // not for long: it has noticed
	switch {
	case o.direct():
		o.Shared.abort()
	case o.pending != nil:
		for _, p := range o.parts {
			p.Abort()
		}
		o.pending.Abort()
	}
}

// Named makes an error that names this operation.
func (o *Operation) named(err error) error { return o.B.Named(o.Info(), err, o.crowd) }

// Named makes an error that names an operation. The CPU backend's has its own numbers. Crowd is
// asked for what may have held up an operation that was not done in time.
func (b *Engine) Named(info work.Info, err error, crowd func() string) error {
	if b.cut.Load() != nil {
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	peer := b.culprit(err)
	crowding := ""
	if errors.Is(err, work.ErrTimeout) && !strings.Contains(err.Error(), crowded) {
		crowding = crowd() // unless another rank has said so
	}
	var inner *work.Error
	if errors.As(err, &inner) {
		if inner.Info == info {
			if crowding == "" {
				return err
			}
			return &work.Error{Info: inner.Info, Peer: inner.Peer, Err: fmt.Errorf("%w%s", inner.Err, crowding)}
		}
		if inner.Group == b.group+CPUGroup {
			err = fmt.Errorf("on the host: %w", inner.Err)
		}
	}
	return &work.Error{Info: info, Peer: peer, Err: fmt.Errorf("cuda: %w%s", err, crowding)}
}

const crowded = "in which those that wait for other ranks hold up others"

// Crowd says, for an operation that was not done in time, that a device of it has more
// streams than queues: then it may be another operation that held it up, while that one
// waited for the same on another rank.
func (o *Operation) crowd() (crowd string) {
	look := func(p *place.Place) { crowd = cmp.Or(o.B.Crowd(p.Dev), crowd) }
	for i := range o.Legs {
		o.Legs[i].each(look)
	}
	return crowd
}

// Crowd is the operations' for one device.
func (b *Engine) Crowd(dev int) string {
	v, err := b.Driver.Device(dev)
	if err != nil {
		return ""
	}
	if q, ok := v.(driver.Queuer); ok {
		if streams, queues := q.Queues(); streams > queues {
			return fmt.Sprintf("; the %d streams of device %d share %d queues, %s", streams, dev, queues, crowded)
		}
	}
	return ""
}

// Grace is how long the Work of an operation that failed waits for its streams
// to go on, so that they are done with the tensors when it ends. If something
// else holds them up, it ends without them.
const Grace = 50 * time.Millisecond

// end completes the operation: its streams are done, or will not be waited for.
func (o *Operation) end() {
	limit := o.deadline
	if o.err != nil {
		limit = time.Now().Add(Grace)
	}
	ctx, cancel := context.Background(), func() {}
	if o.err == nil {
		ctx = o.Ctx
	}
	if o.err == nil && o.direct() {
		// A word costs the driver nothing, an event that is asked again and again a lot.
		if err := o.Shared.leave(o); err != nil {
			o.failed(err)
			limit = time.Now().Add(Grace)
		}
	}
	quiet := false
	if o.pending == nil {
		quiet = o.settled(ctx)
	} else if done, err := o.pending.Done(); done && err == nil && len(o.parts) == 0 {
		quiet = o.settled(ctx)
	} else {
		ctx, cancel = context.WithDeadline(ctx, limit)
		err := o.passed(ctx)
		if err != nil && o.err == nil {
			switch {
			case o.Ctx.Err() != nil:
				err = Canceled(o.Ctx)
			case ctx.Err() != nil:
				err = fmt.Errorf("%w after %v, waiting for the device", work.ErrTimeout, o.timeout)
			}
			o.failed(err)
		}
		quiet = o.settled(ctx)
	}
	cancel()
	if o.unwatch != nil {
		o.unwatch()
	}
	if !quiet {
		o.B.Mu.Lock()
		o.B.late = append(o.B.late, o)
		o.B.Mu.Unlock()
	}
	o.Complete(o.err)
}

// settled waits until the operation has left the devices, and then gives back
// what it has; false if ctx ends first. One goroutine at a time calls it.
func (o *Operation) settled(ctx context.Context) bool {
	if o.over {
		return true
	}
	cut := false
	if o.pending != nil {
		err := o.passed(ctx)
		cut = o.direct() && o.Shared.failed.Load() // then the last batch may lack the end of those before
		if (err != nil || cut || o.flying) && !o.drained(ctx) {
			return false
		}
	}
	o.mu.Lock()
	o.over = true // from here on Order leaves the batches alone
	o.mu.Unlock()
	if o.pending != nil {
		if o.direct() {
			o.Shared.release()
		}
		for _, p := range o.parts {
			p.Release()
		}
		o.parts = nil
		o.pending.Release()
		if s := o.Shared; s != nil && o.err == nil && !cut {
			o.Shared = nil
			o.B.putShared(s)
		}
	}
	o.B.queued.Add(int64(-o.commands))
	if o.staging != nil {
		o.B.Pinned.Put(pool.OnHost, o.staging)
		o.staging = nil
	}
	o.unstage()
	if o.launched {
		pool.Underway.Add(-1)
		o.B.Staged.Add(-1)
	}
	return true
}

// passed waits until the streams have done all parts.
func (o *Operation) passed(ctx context.Context) error {
	for _, p := range o.parts {
		if err := p.Sync(ctx); err != nil {
			return err
		}
	}
	return o.pending.Sync(ctx)
}

// Drained is for when the events of an operation do not tell whether it has
// ended: it waits until the streams have done all that they were given. A device
// that is lost does nothing any more.
func (o *Operation) drained(ctx context.Context) bool {
	return Drained(ctx, o.everyStream())
}

// everyStream returns the streams that have the operation's copies.
func (o *Operation) everyStream() (all []driver.Stream) {
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) {
			for _, s := range []driver.Stream{p.Down, p.Up} {
				if s != nil && !slices.Contains(all, s) {
					all = append(all, s)
				}
			}
		})
	}
	return all
}

func Drained(ctx context.Context, streams []driver.Stream) bool {
	for i, s := range streams {
		if s == nil || slices.Contains(streams[:i], s) || s.Err() != nil {
			continue
		}
		e, err := s.Record()
		if err == nil {
			err = e.Sync(ctx)
			e.Release()
		}
		if err != nil && s.Err() == nil {
			return false
		}
	}
	return true
}

// Fifo is a queue between goroutines.
type Fifo[T any] struct {
	cond   sync.Cond
	list   []*T
	closed bool
	ready  atomic.Bool // take would not wait
}

func (q *Fifo[T]) Init(mu *sync.Mutex) { q.cond.L = mu }

// Linger polls for a while, so that what comes next finds its goroutine awake.
func (q *Fifo[T]) linger(limit time.Duration) { hostshm.PollFor(limit, q.ready.Load) }

// Put, take and close need the mutex. take returns nil when the queue is closed
// and empty.
func (q *Fifo[T]) Put(o *T) {
	q.list = append(q.list, o)
	q.ready.Store(true)
	q.cond.Signal()
}

func (q *Fifo[T]) Take() *T {
	for len(q.list) == 0 && !q.closed {
		q.cond.Wait()
	}
	if len(q.list) == 0 {
		return nil
	}
	o := q.list[0]
	n := copy(q.list, q.list[1:])
	q.list[n] = nil
	q.list = q.list[:n]
	q.ready.Store(n > 0 || q.closed)
	return o
}

func (q *Fifo[T]) Close() {
	q.closed = true
	q.ready.Store(true)
	q.cond.Broadcast()
}

// work does the host's part of collectives, in the order of the calls.
func (b *Engine) work() {
	left := false
	defer func() {
		if !left { // an operator has ended the goroutine: runtime.Goexit
			b.wg.Go(b.work)
		}
	}()
	for {
		b.Mu.Lock()
		o := b.todo.Take()
		b.Mu.Unlock()
		if o == nil {
			break
		}
		if b.perform(o) {
			b.todo.linger(hostshm.LingerFor)
		}
	}
	b.Mu.Lock()
	b.ending.Close()
	b.Mu.Unlock()
	left = true
}

// perform does the host's part of an operation, and hands it to the finisher also if a function of
// the program has panicked in it. It reports whether the next one may come soon.
func (b *Engine) perform(o *Operation) (linger bool) {
	var err error
	returned := false
	defer func() {
		if !returned {
			err = work.Recovered(recover())
		}
		if err != nil {
			o.failed(err)
		}
		linger = o.direct() && o.Shared.x.Eager
		b.Mu.Lock()
		b.ending.Put(o)
		b.Mu.Unlock()
	}()
	err = o.run()
	returned = true
	return linger
}

// finish ends operations when the devices are done with them.
func (b *Engine) finish() {
	for {
		b.Mu.Lock()
		o := b.ending.Take()
		b.Mu.Unlock()
		if o == nil {
			return
		}
		linger := o.direct() && o.Shared.x.Eager
		o.end()
		if linger {
			b.ending.linger(hostshm.LingerFor)
		}
	}
}

// Admit checks that an operation can start. It returns its description and its limit.
func (b *Engine) Admit(ctx context.Context, op work.OpType, timeout time.Duration) (work.Info, time.Duration, error) {
	ended := ctx.Err() != nil
	failed := b.Broken()
	if failed == nil {
		if failed = b.CPUErr(); failed != nil {
			failed = fmt.Errorf("on the host: %w", failed)
		}
	}
	b.Mu.Lock()
	defer b.Mu.Unlock()
	info := work.Info{Op: op, Seq: b.seq, Group: b.group, Rank: b.Rank}
	var err error
	peer := -1
	switch {
	case b.closing || b.draining:
		err = work.ErrClosed
	case failed != nil:
		err, peer = failed, b.culprit(failed)
	case ended:
		err = fmt.Errorf("not started: %w", Canceled(ctx))
		b.uncalled = &work.Error{Info: info, Peer: b.Rank, Err: err}
	}
	if err != nil {
		return info, 0, &work.Error{Info: info, Peer: peer, Err: err}
	}
	if timeout <= 0 {
		timeout = time.Duration(b.timeout.Load())
	}
	return info, timeout, nil
}

// Init prepares an operation that was admitted.
func (o *Operation) init(b *Engine, ctx context.Context, info work.Info, timeout time.Duration) {
	o.Init(info)
	o.B, o.Ctx, o.timeout = b, ctx, timeout
	o.given = place.StreamsOf(ctx)
	o.RunBy(o)
}

// stage gives the operation its streams and its memory on the host.
func (o *Operation) stage() error {
	var err error
	if o.Shared != nil {
		o.Shared.stage(o)
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		if l.Src != nil && err == nil {
			l.Src.Down, err = o.line.stream(o.B, o.line.down, l.Src.Dev, "down")
		}
		if l.Src != nil && o.Relay != nil && len(l.Dst) > 0 && err == nil {
			l.Src.Up, err = o.line.stream(o.B, o.line.up, l.Src.Dev, "up")
		}
		for _, d := range l.Dst {
			if err == nil {
				d.Up, err = o.line.stream(o.B, o.line.up, d.Dev, "up")
			}
		}
	}
	if err != nil {
		return err
	}
	if len(o.Legs) == 0 || o.direct() {
		return nil
	}
	if o.Relay != nil {
		if _, err := o.line.relays(o.B.Tracker); err != nil {
			return err
		}
	}
	if err := o.stagePacked(); err != nil {
		o.unstage()
		return err
	}
	bytes := o.layout()
	if o.alone() {
		bytes = 0
	}
	if o.measure(); o.long || o.claim != nil {
		o.word = Align(max(bytes, 1))
		bytes = o.word + stagingAlign
	}
	h, err := o.B.Pinned.Get(pool.OnHost, bytes)
	if err != nil {
		o.unstage()
		return err
	}
	o.staging = h
	return nil
}

// Issue starts a collective.
func (b *Engine) Issue(ctx context.Context, op work.OpType, timeout time.Duration, o *Operation, result ...*tensor.Tensor) (*work.Work, error) {
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, timeout)
	if err != nil {
		return nil, err
	}
	o.init(b, ctx, info, timeout)
	o.line = b.line
	o.Print.Op, o.number = op, b.collectives
	o.err = b.Enter(info, o.Print)
	if err := b.launch(o, result); err != nil {
		return nil, err
	}
	if !o.queued {
		b.queue(o)
	}
	o.beforeStream()
	b.collectives++
	return o.Work(), nil
}

// beforeStream has the stream of a call that is part of one wait for the operation. An error is
// also the operation's.
func (o *Operation) beforeStream() {
	if o.given != nil && o.given.In != nil && len(o.Legs) > 0 {
		o.Order(o.given.In)
	}
}

// queue hands a collective to the worker. The caller holds b.calls.
func (b *Engine) queue(o *Operation) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if o.Info().Op == work.Barrier {
		o.before = b.Last
	}
	if o.Relay != nil {
		o.Relay.tag = OwnTags | o.line.broadcasts<<1
		o.line.broadcasts = (o.line.broadcasts + 1) & (1<<30 - 1)
	}
	b.Last = o.Work()
	b.todo.Put(o)
}

// launch gives an operation that was admitted to the streams. An error means that
// it has not been issued; what goes wrong on the streams is the operation's.
func (b *Engine) launch(o *Operation, result []*tensor.Tensor) error {
	if o.err == nil {
		if err := o.stage(); err != nil {
			return o.named(err)
		}
	}
	pool.Underway.Add(1)
	b.Staged.Add(1)
	o.launched = true
	o.SetResult(result...)
	if o.Ctx.Done() != nil {
		// The host may be busy with earlier operations when the context ends.
		o.unwatch = context.AfterFunc(o.Ctx, func() {
			err := o.named(Canceled(o.Ctx))
			b.Fail(fmt.Errorf("the group has failed: %w", err), err)
		})
	}
	b.Mu.Lock()
	b.seq++
	b.Mu.Unlock()
	if s := o.Shared; s != nil {
		s.first, s.number = s.x.Next, s.x.Number
		s.x.Next += uint64(s.chunks)
		s.x.Number++
		if s.direct {
			if o.err == nil {
				o.err = o.room(s.commands())
			}
			o.occupy(s.commands())
			// The operation may have ended, and given s back, before this returns.
			wrong := o.err != nil
			s.ending.Add(1)
			o.queued = true
			b.queue(o)
			s.enqueue(o, wrong)
			return nil
		}
	}
	if o.err == nil && len(o.Legs) > 0 {
		if err := o.enqueue(); err != nil && !o.queued {
			o.err = err
		}
	}
	return nil
}
