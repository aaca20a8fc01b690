package directway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Call is one operation that is direct work. The Work is part of it.
//
// Its commands are on one stream: the caller's, if the call is part of one (InStream), else the
// group's own. An event comes after them. Who waits asks that event, so no goroutine has to be
// woken. A timer asks for operations that nobody waits for.
type Call struct {
	work.Promise
	d        *Group
	ctx      context.Context
	timeout  time.Duration
	deadline time.Time
	number   uint32 // of the direct operation
	Parts    []Part
	uses     []driver.Access // of the callers' memory
	held     []driver.Memory
	stream   driver.Stream
	given    int            // commands
	paces    []driver.Event // after each so many commands
	lost     bool           // nobody can tell when the streams are done with it

	one  [1]Part // the usual parts, uses and result
	two  [2]driver.Access
	sole [1]*tensor.Tensor

	// Guarded by d.mu.
	event   driver.Event // after the last command; nil while it is enqueued
	readers int          // of the event
	err     error
	failed  time.Time // since when it has to end
	ended   bool      // the Work has
	over    bool      // the stream is done with it
}

// Part is one collective of an operation. In and out are tensors whose elements, one tensor after
// the other, are the input and the output.
//
//   - all_reduce: in and out are the same list. The tensors, of n elements each, are combined here
//     first, and all get the result.
//   - broadcast: the root has the source in in, and the other tensors that get it in out. Elsewhere
//     out has all tensors. The first tensor of a rank is the first to have the data.
//   - reduce_scatter: in has this rank's inputs for all ranks, of n elements each.
//   - all_gather: out has the outputs of all ranks, of n elements each.
type Part struct {
	Out, In []*tensor.Tensor
	N       int
	Op      backend.ReduceOp
	Form    direct.Form
}

// NewCall returns an unused operation.
func (d *Group) NewCall() *Call {
	c := &Call{d: d}
	c.Parts, c.uses = c.one[:0], c.two[:0]
	return c
}

// NewAllReduce returns an all-reduce.
func (d *Group) NewAllReduce(ts []*tensor.Tensor, op backend.ReduceOp, f direct.Form) *Call {
	c := d.NewCall()
	ts = append(c.sole[:0], ts...)
	c.Parts = append(c.Parts, Part{Out: ts, In: ts, N: ts[0].Len(), Op: op, Form: f})
	return c
}

// Broadcast adds a broadcast of tensor number first.
func (c *Call) Broadcast(ts []*tensor.Tensor, first int, root bool, f direct.Form) {
	p := Part{N: ts[0].Len(), Form: f, Out: slices.Concat(ts[first:], ts[:first])}
	if root {
		p.In, p.Out = p.Out[:1], p.Out[1:]
	}
	c.Parts = append(c.Parts, p)
}

// A stream has room for some 1000 commands, see package driver. Operations that have not ended have
// mostFlying of them at most, as long as they are enqueued; one that needs more waits for its own
// every paceCommands.
const (
	mostFlying   = 256
	paceCommands = 64
)

// Issue starts an operation.
func (d *Group) Issue(ctx context.Context, op work.OpType, timeout time.Duration, c *Call, print board.Call, result ...*tensor.Tensor) (*work.Work, error) {
	b := d.B
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, timeout)
	if err != nil {
		return nil, err
	}
	c.Init(info)
	c.ctx, c.timeout, c.deadline, c.number = ctx, timeout, time.Now().Add(timeout), d.made
	d.made++
	c.RunBy(c)
	c.SetResult(result...)
	c.Start()
	print.Op = op
	err = b.Enter(info, print)
	b.Issued(c.Work())
	pool.Underway.Add(1)
	d.begin(c)
	if err == nil {
		err = c.enqueue()
	}
	d.enqueued(c, err)
	return c.Work(), nil
}

// begin adds an operation to those under way, before a stream is given anything: the timer then
// ends it if the driver keeps the caller waiting.
func (d *Group) begin(c *Call) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, c)
	d.pause = shortWatch
	if d.watching || d.closed {
		return
	}
	d.watching = true
	if d.watch == nil {
		d.watch = time.AfterFunc(d.pause, d.look)
	} else {
		d.watch.Reset(d.pause)
	}
}

// enqueued notes that the operation is on its stream, or why it is not as a whole.
func (d *Group) enqueued(c *Call, err error) {
	var event driver.Event
	if c.stream != nil {
		var lost error
		if event, lost = c.stream.Record(); lost != nil {
			err = cmp.Or(err, lost)
			event, lost = c.stream.Record() // it has to be known when the stream is done
		}
		if err != nil && lost == nil {
			lost = c.rejoin()
		}
		c.lost = lost != nil && c.stream.Err() == nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, window.ErrAborted) {
		err = cmp.Or(d.B.Broken(), err) // why the window was aborted
	}
	d.commands += c.given
	c.event, c.over = event, event == nil && !c.lost
	if err == nil {
		if d.last != nil {
			d.last.drop()
		}
		d.last = c
		c.readers++
		return
	}
	c.err = cmp.Or(c.err, err)
	d.fail(c, err)
	d.sweep()
}

// rejoin has the stream wait for the group's others, after an error: what they have been given may
// not have been waited for.
func (c *Call) rejoin() (err error) {
	for _, s := range c.d.others {
		err = cmp.Or(err, follow(c.stream, s))
	}
	return err
}

// enqueue gives the stream all commands.
func (c *Call) enqueue() error {
	d := c.d
	s := place.StreamsOf(c.ctx)
	if err := c.room(); err != nil {
		return err
	}
	c.collect()
	c.stream = d.stream
	if s != nil && s.In != nil && s.In.Device().Index == d.Dev {
		c.stream = s.In
	}
	if d.last != nil && d.last.stream != c.stream {
		if err := d.after(c.stream, d.last); err != nil {
			return err
		}
	}
	if err := c.afterCallers(s); err != nil {
		return err
	}
	if d.B.Staged.Load() > 0 {
		// Operations of other kinds are under way, which may use the same memory.
		batch := d.B.Tracker.Batch()
		batch.After(c.stream, c.uses...)
		p, err := batch.Run()
		if p != nil {
			p.Release()
		}
		if err != nil {
			return err
		}
	}
	for i := range c.Parts {
		if err := c.do(&c.Parts[i]); err != nil {
			return err
		}
	}
	if s != nil && s.In != nil && s.In != c.stream {
		return follow(s.In, c.stream)
	}
	return nil
}

// afterCallers orders the stream after those that use the tensors.
func (c *Call) afterCallers(s *place.CallStreams) error {
	if s != nil {
		for _, x := range s.Before {
			if x != c.stream {
				if err := follow(c.stream, x); err != nil {
					return err
				}
			}
		}
		return nil
	}
	var few [4]driver.Stream
	seen := few[:0]
	for i := range c.Parts {
		for _, list := range [2][]*tensor.Tensor{c.Parts[i].In, c.Parts[i].Out} {
			for _, t := range list {
				m, ok := t.Memory().(place.Streamer)
				if !ok || m.Stream() == nil || slices.Contains(seen, m.Stream()) {
					continue
				}
				seen = append(seen, m.Stream())
				if err := follow(c.stream, m.Stream()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// follow has one stream wait for what the other one has been given.
func follow(s, first driver.Stream) error {
	e, err := first.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return s.Wait(e)
}

// after has a stream wait for an operation.
func (d *Group) after(s driver.Stream, c *Call) error {
	d.mu.Lock()
	event := c.event
	if c.over || event == nil {
		d.mu.Unlock()
		return nil
	}
	c.readers++
	d.mu.Unlock()
	err := s.Wait(event) // s may be full: without the lock
	d.mu.Lock()
	defer d.mu.Unlock()
	c.drop()
	return err
}

// drop ends one use of the operation's event; the caller holds d.mu.
func (c *Call) drop() {
	if c.readers--; c.readers == 0 && c.over && c.event != nil {
		c.event.Release()
		c.event = nil
	}
}

// release is drop for who does not hold d.mu.
func (c *Call) release() {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.drop()
}

// Order makes s wait for the operation.
func (c *Call) Order(s work.Stream) error {
	st, ok := s.(driver.Stream)
	if !ok {
		return c.named(fmt.Errorf("synchronize: %T is no stream of package driver", s))
	}
	if st != c.stream {
		if err := c.d.after(st, c); err != nil {
			return c.named(fmt.Errorf("synchronize: %w", err))
		}
	}
	return c.Work().Err()
}

// Abort ends the group because of this operation.
func (c *Call) Abort(cause error) { c.d.B.Abort(cause) }

// Poll ends the operation if the stream is done with it.
func (c *Call) Poll() { c.polled() }

// polled is Poll, and reports whether the operation has ended.
func (c *Call) polled() bool {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.d.sweep()
	return c.ended
}

// Help waits until the operation has ended, or ctx has. It asks the event.
func (c *Call) Help(ctx context.Context) {
	const yields = 1000
	pause := 10 * time.Microsecond
	for i := 0; ; i++ {
		if c.polled() {
			return
		}
		if i < yields {
			runtime.Gosched()
			continue
		}
		if ctx.Err() != nil {
			return
		}
		c.d.check()
		time.Sleep(pause)
		pause = min(2*pause, 200*time.Microsecond)
	}
}

// shortWatch and longWatch are how often the timer looks for operations that nobody waits for: soon
// after a call, and later ever more seldom.
const (
	shortWatch = time.Millisecond
	longWatch  = 20 * time.Millisecond
)

// look is what the timer does.
func (d *Group) look() {
	d.check()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || !slices.ContainsFunc(d.calls, func(c *Call) bool { return !c.ended }) {
		d.watching = false
		return
	}
	d.pause = min(2*d.pause, longWatch)
	d.watch.Reset(d.pause)
}

// sweep ends the operations that the streams are done with; the caller holds d.mu.
func (d *Group) sweep() {
	for len(d.calls) > 0 && d.calls[0].done() {
		c := d.calls[0]
		n := copy(d.calls, d.calls[1:])
		d.calls[n] = nil
		d.calls = d.calls[:n]
		d.commands -= c.given
		c.finish()
		c.end()
	}
}

// done reports whether the stream is done with an operation that has been enqueued.
func (c *Call) done() bool {
	if c.over || c.event == nil || c.lost {
		return c.over
	}
	done, err := c.event.Done()
	if err != nil {
		c.err = cmp.Or(c.err, err)
	}
	return done || err != nil
}

// finish gives back what the operation has, which has left the device.
func (c *Call) finish() {
	c.over = true
	if c.readers == 0 && c.event != nil {
		c.event.Release()
		c.event = nil
	}
	for _, e := range c.paces {
		e.Done() // the last ones have not been asked yet
		e.Release()
	}
	for _, m := range c.held {
		c.d.B.Scratch.Put(m.Device().Index, m)
	}
	c.paces, c.held = nil, nil
	pool.Underway.Add(-1)
}

// end ends the Work.
func (c *Call) end() {
	if c.ended {
		return
	}
	c.ended = true
	d := c.d
	if err := cmp.Or(c.err, d.comm.Err()); err != nil && c.failed.IsZero() {
		// A kernel that gave up does not say why. The reason is there, or on its way.
		d.fail(c, cmp.Or(c.err, d.B.Broken(), d.B.CPUErr(), err))
	}
	c.Complete(c.err)
}

// check ends operations that cannot go on: their context or their time has ended, the group has
// failed, or the timer finds their device lost.
func (d *Group) check() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep()
	if len(d.calls) == 0 {
		return
	}
	now := time.Now()
	for _, c := range d.calls {
		if c.failed.IsZero() {
			if why := c.stopped(now); why != nil {
				d.fail(c, why)
			}
		}
	}
	d.sweep()
	// What still has not ended leaves its Work without waiting.
	for _, c := range d.calls {
		if !c.ended && !c.failed.IsZero() && now.Sub(c.failed) > group.Grace {
			c.end()
		}
	}
}

// stopped returns why the operation has to end, nil if it may go on.
func (c *Call) stopped(now time.Time) error {
	switch {
	case c.ctx.Err() != nil:
		return group.Canceled(c.ctx)
	case now.After(c.deadline):
		return fmt.Errorf("%w after %v", work.ErrTimeout, c.timeout)
	}
	if err := cmp.Or(c.d.B.Broken(), c.d.B.CPUErr()); err != nil {
		return err
	}
	if r, left := c.d.left(c.number); left {
		return &work.Error{Info: c.Info(), Peer: r, Err: fmt.Errorf("cuda: %w: rank %d closed the group and did not take part", work.ErrPeerLeft, r)}
	}
	return nil
}

// fail ends the group because of what an operation ran into, and lets the kernels end. The caller
// holds d.mu.
func (d *Group) fail(c *Call, why error) {
	d.window.Abort()
	if errors.Is(why, work.ErrTimeout) && d.B.Broken() == nil {
		why = c.blame(why)
	}
	c.failed = time.Now()
	c.err = c.named(why)
	d.B.Fail(fmt.Errorf("the group has failed: %w", c.err), c.err)
}

// reportLimit bounds how long a kernel may take to report that it was told to end.
const reportLimit = time.Second

// blame says for whom the kernel waited. It has just been told to end, and reports that then.
func (c *Call) blame(why error) error {
	d := c.d
	var stuck *window.Failure
	for end := time.Now().Add(reportLimit); !errors.As(d.comm.Err(), &stuck); time.Sleep(50 * time.Microsecond) {
		if c.event == nil || time.Now().After(end) {
			return fmt.Errorf("%w, waiting for the device", why)
		}
		if done, _ := c.event.Done(); done && !errors.As(d.comm.Err(), &stuck) {
			return fmt.Errorf("%w, waiting for the device", why)
		}
	}
	return &work.Error{Info: c.Info(), Peer: stuck.Peer, Err: fmt.Errorf("cuda: %w; the device of rank %d has not done its part", why, stuck.Peer)}
}

// named makes an error that names this operation.
func (c *Call) named(err error) error {
	return c.d.B.Named(c.Info(), err, func() string { return c.d.B.Crowd(c.d.Dev) })
}

// room waits until the operation may be enqueued.
func (c *Call) room() error {
	d := c.d
	d.mu.Lock()
	n := d.commands
	d.mu.Unlock()
	if n <= mostFlying {
		return nil
	}
	return d.B.Poll(c.ctx, c.timeout, func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.sweep()
		return d.commands <= mostFlying, c.err
	})
}

// pace counts a command. After many it waits for earlier ones.
func (c *Call) pace() error {
	if c.given++; c.given%paceCommands != 0 {
		return nil
	}
	e, err := c.stream.Record()
	if err != nil {
		return err
	}
	c.paces = append(c.paces, e)
	n := len(c.paces) - mostFlying/paceCommands
	if n < 0 {
		return nil
	}
	return c.d.B.Poll(c.ctx, c.timeout, func() (bool, error) {
		c.d.mu.Lock()
		err := c.err
		c.d.mu.Unlock()
		if err != nil {
			return false, err
		}
		return c.paces[n].Done()
	})
}

// collect notes what the operation uses of the callers' memory, for operations of other kinds.
func (c *Call) collect() {
	c.uses = slices.Grow(c.uses, 2*len(c.Parts))
	for i := range c.Parts {
		p := &c.Parts[i]
		for _, t := range p.Out {
			c.use(t, driver.Writes)
		}
		if len(p.In) > 0 && len(p.Out) > 0 && &p.In[0] == &p.Out[0] {
			continue
		}
		for _, t := range p.In {
			access := driver.Reads
			if c.Info().Op == work.Broadcast {
				access = driver.Writes // the bits that are there
			}
			c.use(t, access)
		}
	}
}

func (c *Call) use(t *tensor.Tensor, access func(driver.Ptr, int) driver.Access) {
	if t.IsContiguous() {
		c.uses = append(c.uses, access(place.Start(t), t.ByteLen()))
		return
	}
	p := place.Of(t)
	p.Uses(func(x place.Span) { c.uses = append(c.uses, access(p.Base+driver.Ptr(x.Off), x.N)) })
}

// Before has a batch come after direct operations that use the same memory as the batch will.
func (d *Group) Before(batch *edges.Batch, places []*place.Place) {
	d.mu.Lock()
	d.sweep()
	var last driver.Stream
	var all []driver.Access
	for _, p := range places {
		p.Uses(func(x place.Span) {
			a := driver.Writes(p.Base+driver.Ptr(x.Off), x.N)
			for _, c := range d.calls {
				if slices.ContainsFunc(c.uses, func(u driver.Access) bool { return u.Ptr < a.Ptr+driver.Ptr(a.Len) && a.Ptr < u.Ptr+driver.Ptr(u.Len) }) {
					last = d.calls[len(d.calls)-1].stream
					all = append(all, a)
					return
				}
			}
		})
	}
	d.mu.Unlock()
	if last != nil {
		batch.Before(last, all...)
	}
}

// inOrder returns where the elements of tensors are, one tensor after the other, on the group's
// device; false if they are not.
func (d *Group) inOrder(ts []*tensor.Tensor) (at driver.Ptr, bytes int, ok bool) {
	for _, t := range ts {
		n := t.ByteLen()
		if n == 0 {
			continue
		}
		if t.Device().Index != d.Dev || !t.IsContiguous() || bytes > 0 && place.Start(t) != at+driver.Ptr(bytes) {
			return 0, 0, false
		}
		if bytes == 0 {
			at = place.Start(t)
		}
		bytes += n
	}
	return at, bytes, true
}

// do gives the stream the commands of one collective.
func (c *Call) do(p *Part) error {
	d, op := c.d, c.Info().Op
	if op == work.Broadcast {
		return c.spread(p)
	}
	dtype, es := p.Out[0].DType(), p.Out[0].DType().Size()
	switch op {
	case work.AllReduce, work.AllReduceCoalesced:
		if p.N == 0 {
			return nil
		}
		at, err := c.bring(p.In[:1])
		if err != nil {
			return err
		}
		var others []driver.Ptr
		if len(p.In) > 1 {
			others = make([]driver.Ptr, len(p.In)-1)
		}
		for i := range others {
			if others[i], err = c.bring(p.In[i+1 : i+2]); err != nil {
				return err
			}
			if err = c.combine(p, at, others[i]); err != nil {
				return err
			}
		}
		if err = c.launched(d.comm.AllReduce(c.stream, at, at, p.N, dtype, p.Op, p.Form)); err != nil {
			return err
		}
		for i, o := range others {
			if err = c.copy(c.stream, o, at, p.N*es); err == nil {
				err = c.putBack(p.Out[i+1:i+2], o)
			}
			if err != nil {
				return err
			}
		}
		return c.putBack(p.Out[:1], at)
	case work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced:
		return c.exchange(p, d.B.Rank*p.N*es, func(out, in driver.Ptr) error { return d.comm.AllGather(c.stream, out, in, p.N*es, p.Form) })
	default:
		return c.exchange(p, d.B.Rank*p.N*es, func(out, in driver.Ptr) error {
			return d.comm.ReduceScatter(c.stream, out, in, p.N, dtype, p.Op, p.Form)
		})
	}
}

// spread does a broadcast: an all-reduce of the bits, to which only the root adds any.
func (c *Call) spread(p *Part) (err error) {
	all := slices.Concat(p.In, p.Out)
	dtype, n := integers(all[0].DType(), p.N)
	if n == 0 {
		return nil
	}
	bytes := n * dtype.Size()
	at, _, there := c.d.inOrder(all[:1])
	switch {
	case len(p.In) > 0:
		at, err = c.bring(p.In)
	case !there:
		at, err = c.scratch(c.d.Dev, bytes)
	}
	if err == nil && len(p.In) == 0 {
		err = cmp.Or(c.stream.Memset(at, 0, bytes), c.pace())
	}
	if err == nil {
		err = c.launched(c.d.comm.AllReduce(c.stream, at, at, n, dtype, backend.BOr(), p.Form))
	}
	for i := range p.Out {
		err = cmp.Or(err, c.putBack(p.Out[i:i+1], at))
	}
	return err
}

// integers returns a dtype with kernels for bits, and how many of it n elements of d are.
func integers(d tensor.DType, n int) (tensor.DType, int) {
	switch es := d.Size(); {
	case es%8 == 0:
		return tensor.Int64, n * (es / 8)
	case es == 4:
		return tensor.Int32, n
	default:
		return tensor.Uint8, n * es
	}
}

// exchange does a collective whose input and output differ in length: the shorter may be the
// longer's bytes from mine on, but must not overlap it otherwise.
func (c *Call) exchange(p *Part, mine int, launch func(out, in driver.Ptr) error) error {
	if p.N == 0 {
		return nil
	}
	in, err := c.bring(p.In)
	if err != nil {
		return err
	}
	out, n, whole := c.d.inOrder(p.Out)
	m := length(p.In)
	if whole && in < out+driver.Ptr(n) && out < in+driver.Ptr(m) {
		apart := out - in
		if m < n {
			apart = in - out
		}
		whole = apart == driver.Ptr(mine)
	}
	if !whole {
		if out, err = c.scratch(c.d.Dev, length(p.Out)); err != nil {
			return err
		}
	}
	if err := c.launched(launch(out, in)); err != nil || whole {
		return err
	}
	return c.putBack(p.Out, out)
}

func length(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.ByteLen()
	}
	return n
}

// launched counts the launches of a collective.
func (c *Call) launched(err error) error { return cmp.Or(err, c.pace()) }

// scratch returns memory on a device until the operation has ended.
func (c *Call) scratch(dev, n int) (driver.Ptr, error) {
	m, err := c.d.B.Scratch.Get(dev, n)
	if err != nil {
		return 0, err
	}
	c.held = append(c.held, m)
	return m.Ptr(), nil
}

// bring returns where the elements of tensors are in order on the group's device: where they are,
// or where they have been brought.
func (c *Call) bring(ts []*tensor.Tensor) (driver.Ptr, error) {
	if at, _, ok := c.d.inOrder(ts); ok {
		return at, nil
	}
	at, err := c.scratch(c.d.Dev, length(ts))
	if err != nil {
		return 0, err
	}
	to := at
	for _, t := range ts {
		if err := c.move(t, to, true); err != nil {
			return 0, err
		}
		to += driver.Ptr(t.ByteLen())
	}
	return at, nil
}

// putBack is the way back from bring.
func (c *Call) putBack(ts []*tensor.Tensor, at driver.Ptr) error {
	if from, _, ok := c.d.inOrder(ts); ok && from == at {
		return nil
	}
	for _, t := range ts {
		if err := c.move(t, at, false); err != nil {
			return err
		}
		at += driver.Ptr(t.ByteLen())
	}
	return nil
}

// move brings the elements of a tensor to a place on the group's device, or from there.
func (c *Call) move(t *tensor.Tensor, at driver.Ptr, bring bool) error {
	n := t.ByteLen()
	if n == 0 {
		return nil
	}
	dev, flat, s := t.Device().Index, t.IsContiguous(), c.stream
	if dev == c.d.Dev {
		switch {
		case !flat:
			return c.pack(s, t, at, bring)
		case bring:
			return c.copy(s, at, place.Start(t), n)
		}
		return c.copy(s, place.Start(t), at, n)
	}
	// By the tensor's device: what other devices fetch waits in one queue, see package driver.
	other, err := c.otherStream(dev)
	if err != nil {
		return err
	}
	own := place.Start(t)
	if !flat {
		if own, err = c.scratch(dev, n); err != nil {
			return err
		}
	}
	if bring {
		if err = follow(other, s); err == nil && !flat {
			err = c.pack(other, t, own, true)
		}
		if err == nil {
			err = c.copy(other, at, own, n)
		}
		return cmp.Or(err, follow(s, other))
	}
	if err = c.copy(s, own, at, n); err != nil || flat {
		return err
	}
	if err = follow(other, s); err == nil {
		err = c.pack(other, t, own, false)
	}
	return cmp.Or(err, follow(s, other))
}

// otherStream returns the group's stream of another device.
func (c *Call) otherStream(dev int) (driver.Stream, error) {
	d := c.d
	if s, ok := d.others[dev]; ok {
		return s, nil
	}
	v, err := d.B.Driver.Device(dev)
	if err != nil {
		return nil, err
	}
	s, err := v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d direct.%d", d.B.Rank, dev)})
	if err != nil {
		return nil, err
	}
	if d.others == nil {
		d.others = make(map[int]driver.Stream)
	}
	d.others[dev] = s
	return s, nil
}

func (c *Call) copy(s driver.Stream, dst, src driver.Ptr, n int) error {
	return cmp.Or(s.Copy(dst, src, n), c.pace())
}

// pack brings the elements of a tensor in order, or puts them back, on its device.
func (c *Call) pack(s driver.Stream, t *tensor.Tensor, at driver.Ptr, bring bool) (err error) {
	k := c.d.B.Packer(t.Device().Index)
	if k.Err != nil {
		return k.Err
	}
	f := k.Unpack
	if bring {
		f = k.Pack
	}
	p := place.Of(t)
	p.InOrder(at, func(l kernels.Layout, packed, spread driver.Ptr, n int) {
		if err == nil {
			err = c.launch(s, f, n, l.Append(new(driver.Args).Ptr(packed).Ptr(spread)),
				driver.Writes(packed, n), driver.Writes(p.Base+driver.Ptr(p.Lo), p.Hi-p.Lo))
		}
	})
	return err
}

func (c *Call) launch(s driver.Stream, f driver.Function, n int, args *driver.Args, access ...driver.Access) error {
	err := s.Launch(&driver.Launch{Function: f, Grid: kernels.Blocks(n), Block: driver.Dim{X: kernels.Block}, Args: args, Access: access})
	return cmp.Or(err, c.pace())
}

// combine combines another tensor of this rank into the first one.
func (c *Call) combine(p *Part, into, from driver.Ptr) error {
	t := p.In[0]
	k := c.d.B.Packer(c.d.Dev)
	if k.Err != nil {
		return k.Err
	}
	f, err := k.Module.Function(kernels.Step(p.Op.Kind(), t.DType()))
	if err != nil {
		return err
	}
	bytes := p.N * t.DType().Size()
	args := new(driver.Args).Ptr(into).Ptr(0).Ptr(into).Ptr(from).Uint64(uint64(p.N)).Uint32(1)
	return c.launch(c.stream, f, bytes, args, driver.Writes(into, bytes), driver.Reads(from, bytes))
}
