package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// DeviceWork is the name of the all-reduce work that stays on the devices: a ring
// in which each rank's kernels write into the next rank's memory. It is usable
// where all ranks are on one host, their devices reach their neighbours', and
// there are kernels for the operator and the dtype. Its priority is 100.
const DeviceWork = "device"

// deviceCan returns why the ring cannot do a call. For a correct call the answer is the same on every
// rank: it depends on the operator, the dtype, and what the ranks told each other before.
func deviceCan(h *host) error {
	t, op := h.call.Tensors[0], h.call.Op
	if kernels.Step(op.Kind(), t.DType()) == "" {
		return fmt.Errorf("no kernel for %v of %v", op, t.DType())
	}
	if why := h.b.neighbours.why; why != nil {
		return why
	}
	if _, probe := t.Memory().(nowhere); probe {
		return nil
	}
	// Wrong calls are refused by the work that comes next.
	return h.b.typed(work.AllReduce, "tensors", output, t.DType(), h.call.Tensors)
}

// deviceMeet makes the ring at the first call, together with the other ranks.
func deviceMeet(h *host) error { return h.b.neighbours.ready(h, work.AllReduce) }

// deviceWork is an all-reduce on the devices. The operation that it belongs to
// enqueues it, waits for it, and ends it.
type deviceWork struct {
	op     *operation
	ring   *ring
	places []*place
	own    []driver.Ptr    // of each place's elements in order, on its own device if that is another one
	others []driver.Stream // that have done something for it, besides the ring's
	step   driver.Function
	by     int // what the result is divided by
	held   []driver.Memory
	issued bool
	batch  *edges.Batch // what comes next
	begins []*place     // what callers' streams have used that a later part may use
	err    error        // nothing is enqueued any more

	first, last progress // of the ring, before the operation and after it

	spread func() // of a broadcast, instead of all that makes an all-reduce
}

// prepareDeviceWork makes the call's operation an all-reduce on the devices.
func prepareDeviceWork(h *host) error {
	b, c, d := h.b, &h.call, h.call.Tensors[0].DType()
	if err := b.typed(work.AllReduce, "tensors", output, d, c.Tensors); err != nil {
		return err
	}
	if err := b.reduction(work.AllReduce, c.Op, d); err != nil {
		return err
	}
	w := &deviceWork{op: h.op, ring: b.neighbours.made(), by: 1}
	w.step = w.ring.steps[kernels.Step(c.Op.Kind(), d)]
	if c.Op.Kind() == backend.Avg().Kind() {
		w.by = b.size
	}
	if i, j, ok := shareMemory(c.Tensors); ok {
		return fmt.Errorf("tensors %d and %d share memory", i, j)
	}
	for _, t := range c.Tensors {
		w.places = append(w.places, placeOf(t))
	}
	h.op.device = w
	h.op.call = func(q *operation, _ []*tensor.Tensor) error { return w.Run(q.ctx) }
	return nil
}

// enqueue gives the ring's stream all that this rank does for the all-reduce.
func (w *deviceWork) enqueue(o *operation) (err error) {
	r, b := w.ring, o.b
	if err := b.neighbours.spoiled; err != nil {
		return fmt.Errorf("not enqueued after an operation that could not be: %w", err)
	}
	batch := b.tracker.Batch()
	o.prologue(batch, w.places...)
	// A driver may make the caller wait when it has been given very much: also
	// then a rank that does not come must not hold this one up.
	late := time.AfterFunc(o.timeout, func() {
		err := o.named(fmt.Errorf("%w after %v, while it was enqueued", work.ErrTimeout, o.timeout))
		b.fail(fmt.Errorf("the group has failed: %w", err), err)
	})
	defer late.Stop()
	r.begin()
	w.issued = true
	o.pending, err = w.run(batch)
	return err
}

// fill puts everything into the batch, and into those that follow if it is too much for
// one: the tensors' elements in order and on the ring's device, all of this rank
// combined, the ring, and the way back.
func (w *deviceWork) fill() error {
	r := w.ring
	r.used = 0
	w.own = make([]driver.Ptr, len(w.places))
	if w.spread != nil {
		w.spread()
		return w.err
	}
	t := w.places[0].t
	n, es := t.Len(), t.DType().Size()
	if n == 0 {
		return nil
	}
	w.begins = w.places
	at := make([]driver.Ptr, len(w.places))
	for i := range w.places {
		at[i] = w.bring(i)
	}
	w.begins = nil
	for _, a := range at[1:] {
		w.launch(r.stream, w.step, n*es, func(x *driver.Args) { x.Ptr(at[0]).Ptr(0).Ptr(at[0]).Ptr(a).Uint64(uint64(n)).Uint32(1) },
			driver.Writes(at[0], n*es), driver.Reads(a, n*es))
	}
	w.first = progress{r.sent, r.got}
	unit := max(16/es, 1)
	hops(r.b.rank, r.b.size, n, r.chunk/(unit*es)*unit, unit, func(h hop) { w.hop(h, at[0], es, w.step, w.by) })
	w.last = progress{r.sent, r.got}
	r.count()
	for _, a := range at[1:] {
		w.Copy(r.stream, a, at[0], n*es)
	}
	for i := range w.places {
		w.putBack(i, at[i])
	}
	return w.err
}

// scratch returns memory on a device until the operation has ended.
func (w *deviceWork) scratch(dev, n int) driver.Ptr {
	if w.err != nil {
		return 0
	}
	m, err := w.ring.b.scratch.get(dev, n)
	if w.err = err; err != nil {
		return 0
	}
	w.held = append(w.held, m)
	return m.Ptr()
}

// stream returns a stream of a device that is not the ring's.
func (w *deviceWork) stream(m map[int]driver.Stream, name string, dev int) driver.Stream {
	if w.err != nil {
		return nil
	}
	s, err := w.op.line.stream(w.ring.b, m, dev, name)
	if w.err = err; err == nil {
		w.others = append(w.others, s)
	}
	return s
}

// packer returns the kernels of such a device.
func (w *deviceWork) packer(dev int) *packer {
	k := w.ring.b.packer(dev)
	w.err = cmp.Or(w.err, k.err)
	return k
}

// bring returns where a tensor's elements are in order on the ring's device: where
// they are, or where they have been brought.
func (w *deviceWork) bring(i int) driver.Ptr {
	r, p := w.ring, w.places[i]
	from, n := p.base+driver.Ptr(p.lo), p.t.ByteLen()
	if p.dev == r.dev && p.flat {
		return from
	}
	at := w.scratch(r.dev, n)
	if p.dev == r.dev {
		w.pack(r.stream, r.pack, p, at)
		return at
	}
	// By its own device: what other devices fetch waits in one queue, see package driver.
	s := w.stream(w.op.line.down, "down", p.dev)
	if !p.flat {
		from = w.scratch(p.dev, n)
		w.pack(s, w.packer(p.dev).pack, p, from)
	}
	w.own[i] = from
	w.Copy(s, at, from, n)
	return at
}

// putBack is the way back from bring.
func (w *deviceWork) putBack(i int, at driver.Ptr) {
	r, p := w.ring, w.places[i]
	switch {
	case p.dev != r.dev:
		w.Copy(r.stream, w.own[i], at, p.t.ByteLen())
		if !p.flat {
			w.pack(w.stream(w.op.line.up, "up", p.dev), w.packer(p.dev).unpack, p, w.own[i])
		}
	case !p.flat:
		w.pack(r.stream, r.unpack, p, at)
	}
}

// pack brings the elements of a tensor in order, or puts them back.
func (w *deviceWork) pack(s driver.Stream, f driver.Function, p *place, at driver.Ptr) {
	p.inOrder(at, func(l kernels.Layout, packed, spread driver.Ptr, n int) {
		w.launch(s, f, n, func(a *driver.Args) { l.Append(a.Ptr(packed).Ptr(spread)) },
			driver.Writes(packed, n), driver.Writes(p.base+driver.Ptr(p.lo), p.hi-p.lo))
	})
}

// launch adds a kernel over n bytes to the work, Copy a copy.
func (w *deviceWork) launch(s driver.Stream, f driver.Function, n int, args func(*driver.Args), access ...driver.Access) {
	if w.fits(1) {
		w.ring.launch(w.batch, s, f, n, args, access...)
	}
}

func (w *deviceWork) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	if w.fits(1) {
		w.batch.Copy(s, dst, src, n)
	}
}

// Run waits until the devices have done the all-reduce. Nothing of it is the
// host's, but the host is who notices that it cannot end.
func (w *deviceWork) Run(context.Context) error {
	o := w.op
	pause := 10 * time.Microsecond
	for i := 0; ; i++ {
		// After a mark this may be the end of anything. Why the group has failed is on its
		// way then.
		if done, err := o.pending.Done(); done && (err != nil || w.ring.marked() < 0) {
			return err
		}
		if i < 200 {
			runtime.Gosched()
			continue
		}
		if err := (stopped{o}).Err(); err != nil {
			return w.blame(err)
		}
		if err := w.ring.stream.Err(); err != nil {
			return err
		}
		if err := o.b.cpuErr(); err != nil {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, 200*time.Microsecond)
	}
}

// progress is how many messages have gone to the right and come from the left.
type progress struct{ sent, got uint64 }

// blame says, of an operation that ran out of time, what the neighbours have done
// for it.
func (w *deviceWork) blame(err error) error {
	r, o := w.ring, w.op
	if by := r.marked(); errors.Is(err, work.ErrTimeout) && by >= 0 && by != o.b.rank {
		return &work.Error{Info: o.Info(), Peer: by, Err: fmt.Errorf("cuda: %w; rank %d has failed and has not said why", err, by)}
	}
	due := progress{w.last.sent - w.first.sent, w.last.got - w.first.got}
	if !errors.Is(err, work.ErrTimeout) || due.got == 0 || due.sent == 0 {
		return err
	}
	done := func(word func(slot int) int, before, due uint64) uint64 {
		all := uint32(0)
		for slot := range ringSlots {
			all += r.own.words.Load32(word(slot))
		}
		return uint64(min(max(int32(all-uint32(before)), 0), int32(due)))
	}
	got, taken := done(arrivedAt, w.first.got, due.got), done(takenAt, w.first.sent, due.sent)
	peer := -1
	if got == 0 {
		peer = r.left.rank
	}
	return &work.Error{Info: o.Info(), Peer: peer, Err: fmt.Errorf("cuda: %w; rank %d has sent %d of %d pieces, rank %d has taken %d of %d",
		err, r.left.rank, got, due.got, r.right.rank, taken, due.sent)}
}

// cpuErr returns what ended the group of the host's part, if its backend says so.
func (b *Backend) cpuErr() error {
	if e, ok := b.cpu.(interface{ Err() error }); ok {
		return e.Err()
	}
	return nil
}

// ended gives back what the work has, which has left the device.
func (w *deviceWork) ended() {
	for _, m := range w.held {
		w.ring.b.scratch.put(m.Device().Index, m)
	}
	w.held = nil
	if w.issued {
		w.issued = false
		w.ring.end()
	}
}

// A rank's neighbours write its slots and its words. For each slot there is a word
// that the left neighbour sets when it has filled the slot, and one for the slot
// of the right neighbour, which that one sets when it has taken what was there.
// They count how often. Slots are in device memory, words in page-locked memory
// that the ranks' processes share.
//
// With twice as many slots as rounds side by side, a rank may begin a step when its
// neighbours have ended the one before the last: neither waits for words that are
// on their way.
const (
	ringSlots = 2 * roundsAtOnce
	wordEach  = 64 // so that no two share a line
)

func arrivedAt(slot int) int { return slot * wordEach }
func takenAt(slot int) int   { return (ringSlots + slot) * wordEach }

// ring is what a rank has for work on the devices: memory that its neighbours
// write, and theirs.
type ring struct {
	b     *Backend
	dev   int
	v     driver.Device
	chunk int // bytes of a slot

	stream driver.Stream
	module driver.Module
	steps  map[string]driver.Function
	copy   driver.Function
	pack   driver.Function
	unpack driver.Function

	own         *workspace
	left, right *mapping // the same one in a ring of two
	opened      []*mapping
	marks       *region // of rank 0; nil in a ring of one

	sent, got uint64        // messages to the right and from the left, since the ring was made
	top       atomic.Uint32 // no word has counted beyond it

	boxes []*launchBox // of the batch that is being made
	used  int

	mu        sync.Mutex
	active    int  // operations that the stream may still have to do
	failed    bool // the group has
	releasing bool
	closed    bool
	quit      chan struct{}
	wg        sync.WaitGroup
}

// launchBox is a launch with what belongs to it.
type launchBox struct {
	driver.Launch
	args   driver.Args
	access [4]driver.Access
}

// launch adds a kernel over n bytes to the batch.
func (r *ring) launch(batch *edges.Batch, s driver.Stream, f driver.Function, n int, args func(*driver.Args), access ...driver.Access) {
	x := r.box()
	args(x.args.Reset())
	x.Launch = driver.Launch{Function: f, Grid: kernels.Blocks(n), Block: driver.Dim{X: kernels.Block}, Args: &x.args, Access: x.access[:copy(x.access[:], access)]}
	batch.Launch(s, &x.Launch)
}

// box returns an unused box.
func (r *ring) box() *launchBox {
	if r.used == len(r.boxes) {
		r.boxes = append(r.boxes, new(launchBox))
	}
	r.used++
	return r.boxes[r.used-1]
}

// turn returns the slot of a message, and how often it has then been used.
func turn(message uint64) (slot int, count uint32) {
	return int(message % ringSlots), uint32(message/ringSlots) + 1
}

func (r *ring) slot(base driver.Ptr, i int) driver.Ptr {
	return base + driver.Ptr(i*r.chunk)
}

// hop adds one step to the batch. All is on one stream; the words order it against the
// neighbours'.
func (r *ring) hop(batch *edges.Batch, h hop, x driver.Ptr, es int, step driver.Function, by int) {
	s := r.stream
	at, bytes := x+driver.Ptr(h.lo*es), (h.hi-h.lo)*es
	var from, out, to driver.Ptr
	var inSlot, outSlot int
	var inCount, outCount uint32
	if h.take {
		inSlot, inCount = turn(r.got)
		r.got++
		from = r.slot(r.own.ptr(), inSlot)
		batch.WaitValue(s, r.own.word(arrivedAt(inSlot)), inCount, driver.AtLeast, driver.Writes(from, bytes))
	}
	if h.pass {
		outSlot, outCount = turn(r.sent)
		r.sent++
		to = r.slot(r.right.ptr(), outSlot)
		if outCount > 1 {
			batch.WaitValue(s, r.own.word(takenAt(outSlot)), outCount-1, driver.AtLeast, driver.Writes(to, bytes))
		}
	}
	if h.keep {
		out = at
	}
	var acc [4]driver.Access
	uses := acc[:0]
	if h.keep {
		uses = append(uses, driver.Writes(at, bytes))
	} else if h.combine || !h.take {
		uses = append(uses, driver.Reads(at, bytes))
	}
	if h.take {
		uses = append(uses, driver.Reads(from, bytes))
	}
	if h.pass {
		uses = append(uses, driver.Writes(to, bytes))
	}
	if h.combine {
		divide := 1
		if h.whole {
			divide = by
		}
		r.launch(batch, s, step, bytes, func(a *driver.Args) {
			a.Ptr(out).Ptr(to).Ptr(at).Ptr(from).Uint64(uint64(h.hi - h.lo)).Uint32(uint32(divide))
		}, uses...)
	} else {
		source := at
		if h.take {
			source = from
		}
		r.launch(batch, s, r.copy, bytes, func(a *driver.Args) { a.Ptr(out).Ptr(to).Ptr(source).Uint64(uint64(bytes)) }, uses...)
	}
	if h.pass {
		batch.WriteValue(s, r.right.word(arrivedAt(outSlot)), outCount, driver.Writes(to, bytes))
	}
	if h.take {
		batch.WriteValue(s, r.left.word(takenAt(inSlot)), inCount, driver.Writes(from, bytes))
	}
}

// count notes how far words will have counted.
func (r *ring) count() {
	_, a := turn(r.sent)
	_, b := turn(r.got)
	r.top.Store(max(a, b))
}

// begin notes that the stream is given an operation, end that one has ended.
func (r *ring) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.active++
	r.letGo()
}

func (r *ring) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.active--
}

// abandon lets the stream go on, whatever it waits for: the group has failed. The
// stream then passes on anything, so the mark comes first.
func (r *ring) abandon() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	if r.marks != nil && !r.closed {
		r.mark().CompareAndSwap(0, uint32(r.b.rank)+1)
	}
	r.letGo()
}

// letGo starts release where it is needed; the caller holds r.mu.
func (r *ring) letGo() {
	if r.failed && r.active > 0 && !r.releasing && !r.closed {
		r.releasing = true
		r.wg.Go(r.release)
	}
}

// release writes the words that the ring's stream waits for until nothing is left
// that it could wait for. Once is not enough, as a neighbour that still goes on
// counts where it was.
func (r *ring) release() {
	pause := 50 * time.Microsecond
	for {
		r.mu.Lock()
		if r.active == 0 || r.closed {
			r.releasing = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		for slot := range ringSlots {
			// Beyond all that is waited for.
			r.own.words.Store32(arrivedAt(slot), r.top.Load()+1<<29)
			r.own.words.Store32(takenAt(slot), r.top.Load()+1<<29)
		}
		select {
		case <-r.quit:
		case <-time.After(pause):
		}
		pause = min(2*pause, 20*time.Millisecond)
	}
}
