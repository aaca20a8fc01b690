package directway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Call is one operation that is direct work. The Work is part of it.
//
// Its commands are on one stream: the caller's, if the call is part of one (InStream), else the group's
// own. The kernel tells the host that it has ended. Where commands come after it, an event does. The
// waiter asks for that itself, so no goroutine has to be woken. A timer asks for operations that nobody
// waits for.
//
// An operation that ends with its kernel has an event only where one is needed. That is before the
// group's own stream is given more, when another stream has to come after the operation, and when the
// group fails. In the caller's stream the event comes after what the stream has been given meanwhile.
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
	within   bool           // it is one of the caller's
	launched uint32         // the number of its kernel, if that is its last command; else 0
	given    int            // commands
	paces    []driver.Event // after each so many commands
	trees    []*edges.Pending
	lost     bool // nobody can tell when the streams are done with it
	captured bool // it becomes part of a graph
	inTurn   bool // it follows all earlier ones on the device

	one  [1]Part // the usual parts, uses and result
	two  [2]driver.Access
	sole [1]*tensor.Tensor

	// Guarded by d.mu.
	ends    uint32       // launched, once the operation is on its stream
	event   driver.Event // after the last command; nil while it is enqueued, and where ends is enough
	marked  bool         // it ends by the event, since its kernel may have failed
	asked   bool         // the event has been asked
	readers int          // of the event
	err     error
	failed  time.Time // since when it has to end
	blaming bool      // somebody finds out why
	ended   bool      // the Work has
	over    bool      // the stream is done with it
}

// besideBlocks are those of calls that leave multiprocessors to the caller's kernels (decision 43).
const besideBlocks = 16

// Part is one collective of an operation. In and out are tensors whose elements, one tensor after
// the other, are the input and the output.
//
//   - all_reduce: in and out are the same list. The tensors, of n elements each, are combined here
//     first, and all get the result. If it is joined, the tensors have n elements together, and each
//     gets its own result.
//   - broadcast: the root has the source in in, and the other tensors that get it in out. Elsewhere
//     out has all tensors. The first tensor of a rank is the first to have the data.
//   - reduce_scatter: in has this rank's inputs for all ranks, of n elements each.
//   - all_gather: out has the outputs of all ranks, of n elements each.
//   - reduce: in has the rank's tensor, and out the root's.
//   - gather: out has the root's outputs for all ranks, of n elements each.
//   - scatter: in has the root's inputs for all ranks, of n elements each.
//   - barrier: there are no tensors.
//   - all_to_all: in and out have this rank's parts for all ranks, and from all.
type Part struct {
	Out, In []*tensor.Tensor
	N       int
	Root    int
	Uneven  bool // lengths differ from rank to rank; in a gather each rank knows its own only
	Joined  bool // see all_reduce
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
func (c *Call) Broadcast(ts []*tensor.Tensor, first, root int, f direct.Form) {
	p := Part{N: ts[0].Len(), Form: f, Out: slices.Concat(ts[first:], ts[:first]), Root: root}
	if c.d.B.Rank == root {
		p.In, p.Out = p.Out[:1], p.Out[1:]
	}
	c.Parts = append(c.Parts, p)
}

// Issue starts an operation.
func (d *Group) Issue(ctx context.Context, op work.OpType, timeout time.Duration, c *Call, print board.Call, result ...*tensor.Tensor) (*work.Work, error) {
	if captured(ctx) {
		return d.capture(ctx, op, c, print, result...)
	}
	b := d.B
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, timeout)
	if err != nil {
		return nil, err
	}
	c.Init(&b.Issuer, info.Op, info.Seq)
	c.ctx, c.timeout, c.deadline, c.number = ctx, timeout, time.Now().Add(timeout), d.Next()
	c.RunBy(c)
	c.SetResult(result...)
	c.Start()
	print.Op = op
	err = b.Enter(ctx, info, print)
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

// enqueue gives the stream all commands.
func (c *Call) enqueue() error {
	d := c.d
	s := place.StreamsOf(c.ctx)
	alone, err := c.room()
	if err != nil {
		return err
	}
	d.mapOthers()
	// Who calls while other operations are under way does not wait for each.
	d.comm.Quiet(!alone)
	c.collect()
	c.stream = d.stream
	if s != nil && s.In != nil && s.In.Device().Index == d.Dev {
		c.stream, c.within = s.In, true
	}
	if s != nil && s.Beside {
		for i := range c.Parts {
			f := &c.Parts[i].Form
			f.Blocks = min(cmp.Or(f.Blocks, besideBlocks), besideBlocks)
		}
	}
	if c.stream == d.stream {
		if err := d.seal(); err != nil {
			return err
		}
	}
	if d.last != nil && d.last.stream != c.stream {
		if d.last == d.tail {
			if err := d.seal(); err != nil {
				return err
			}
		}
		if err := d.after(c.stream, d.last); err != nil {
			return err
		}
	}
	if err := c.afterCallers(s); err != nil {
		return err
	}
	if err := d.B.After(c.stream, c.uses...); err != nil {
		return err
	}
	if err := c.afterMessages(); err != nil {
		return err
	}
	c.inTurn, d.turns.used = true, 0
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

// seal gives the last operation of the group's own stream an event, if it needs one.
func (d *Group) seal() error {
	c := d.tail
	d.tail = nil
	if c == nil {
		return nil
	}
	return c.record()
}

// room waits until the operation may be enqueued. It reports whether no other one is under way.
func (c *Call) room() (alone bool, err error) {
	d := c.d
	d.mu.Lock()
	n, alone := d.commands, len(d.calls) == 1
	d.mu.Unlock()
	if n <= mostFlying {
		return alone, nil
	}
	return false, d.B.Poll(c.ctx, c.timeout, func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.sweep()
		return d.commands <= mostFlying, c.err
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
	sortUses(c.uses)
}

func (c *Call) use(t *tensor.Tensor, access func(driver.Ptr, int) driver.Access) {
	if t.IsContiguous() {
		c.uses = append(c.uses, access(place.Start(t), t.ByteLen()))
		return
	}
	p := place.Of(t)
	p.Uses(func(x place.Span) { c.uses = append(c.uses, access(p.Base+driver.Ptr(x.Off), x.N)) })
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

// enqueued notes that the operation is on its stream, or why it is not as a whole.
func (d *Group) enqueued(c *Call, err error) {
	var event driver.Event
	unknown := false
	if c.stream != nil && (err != nil || c.launched == 0) {
		var lost error
		if event, lost = c.stream.Record(); lost != nil {
			err = cmp.Or(err, lost)
			event, lost = c.stream.Record() // it has to be known when the stream is done
		}
		if err != nil && lost == nil {
			lost = c.rejoin()
		}
		unknown = lost != nil && c.stream.Err() == nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, window.ErrAborted) {
		err = cmp.Or(d.B.Broken(), err) // why the window was aborted
	}
	d.commands += c.given
	c.event, c.ends, c.lost = event, c.launched, unknown
	c.over = event == nil && !c.lost && c.ends == 0
	if err == nil {
		if c.ends != 0 && !c.within {
			d.tail = c
		}
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

// Before tells f which streams have direct operations that use the same memory as one in these places will.
func (d *Group) Before(f func(s driver.Stream, access ...driver.Access), places []*place.Place) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep()
	d.sweepMessages()
	if len(d.calls) == 0 && len(d.lanes.open) == 0 {
		return
	}
	uses := d.uses[:0]
	for _, p := range places {
		p.Uses(func(x place.Span) { uses = append(uses, driver.Writes(p.Base+driver.Ptr(x.Off), x.N)) })
	}
	sortUses(uses)
	used := slices.Grow(d.used[:0], len(uses))[:len(uses)]
	clear(used)
	d.uses, d.used = uses, used
	for _, c := range d.calls {
		for i := range meeting(uses, c.uses, 0) {
			used[i] = true
		}
	}
	var last driver.Stream
	if n := len(d.calls); n > 0 {
		last = d.calls[n-1].stream
	}
	if last != nil && slices.Contains(used, true) {
		all := uses[:0:0]
		for i, a := range uses {
			if used[i] {
				all = append(all, a)
			}
		}
		f(last, all...)
	}
	for _, m := range d.lanes.open {
		if !m.over && m.stream != nil && conflicts(m.uses, uses) {
			f(m.stream, common(uses, m.uses)...)
		}
	}
}

// common returns the bytes that two lists have in common, as b uses them. Both are in order of their addresses. To the
// tracker, Before's bytes are the operation's own. So no others may be among them.
func common(a, b []driver.Access) (all []driver.Access) {
	end := func(x driver.Access) driver.Ptr { return x.Ptr + driver.Ptr(x.Len) }
	for len(a) > 0 && len(b) > 0 {
		lo, hi := max(a[0].Ptr, b[0].Ptr), min(end(a[0]), end(b[0]))
		if lo < hi {
			all = append(all, driver.Access{Ptr: lo, Len: int(hi - lo), Mode: b[0].Mode})
		}
		if end(a[0]) < end(b[0]) {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return all
}

// sortUses brings uses in the order of their addresses.
func sortUses(uses []driver.Access) {
	slices.SortFunc(uses, func(a, b driver.Access) int { return cmp.Compare(a.Ptr, b.Ptr) })
}

// meeting returns the numbers of the uses in a that share bytes with one in b of a mode, 0 for any. Both are in
// order of their addresses.
func meeting(a, b []driver.Access, mode driver.Mode) iter.Seq[int] {
	return func(yield func(int) bool) {
		k := 0
		for i, x := range a {
			for k < len(b) && (mode != 0 && b[k].Mode != mode || b[k].Ptr+driver.Ptr(b[k].Len) <= x.Ptr) {
				k++
			}
			if k == len(b) || b[k].Ptr < x.Ptr+driver.Ptr(x.Len) && !yield(i) {
				return
			}
		}
	}
}

// conflicts reports whether two operations need an order.
func conflicts(a, b []driver.Access) bool {
	for _, mode := range []driver.Mode{driver.Read, driver.Write, driver.Shared} {
		for i := range meeting(a, b, mode) {
			if mode.Conflicts(a[i].Mode) {
				return true
			}
		}
	}
	return false
}
