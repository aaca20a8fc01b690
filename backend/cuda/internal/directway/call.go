package directway

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Call is one operation that is direct work: a collective, or a message on a lane. The Work is part of it.
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
	q        *queue // that it is in
	lane     *lane  // of a message
	number   uint32 // of the collective, or of the message in its lane
	outer    bool   // it is a message that counts as an operation of the engine
	Parts    []Part
	uses     []driver.Access // of the callers' memory
	held     []driver.Memory
	stream   driver.Stream
	within   bool // it is one of the caller's
	streams  *driver.CallStreams
	staged   driver.Ptr     // of a message: where its bytes are in page-locked memory, if it has no tensor
	bytes    int            // there
	launched uint32         // the number of its kernel, if that is its last command; else 0
	given    int            // commands
	paces    []driver.Event // after each so many commands
	trees    []*edges.Pending
	lost     bool // nobody can tell when the streams are done with it
	captured bool // it becomes part of a graph
	inTurn   bool // it follows all earlier ones on the device
	told     bool // other ranks' kernels know where its memory is

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
	spoiled time.Time // since when it is known that another rank has sent what is of no use
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

// NewCall returns an operation whose Work has these tensors. The caller adds its parts.
func (d *Group) NewCall(result ...*tensor.Tensor) *Call {
	c := &Call{d: d, q: &d.line}
	c.Parts, c.uses = c.one[:0], c.two[:0]
	c.SetResult(append(c.sole[:0], result...)...)
	return c
}

// Issue starts a collective, or makes it part of a graph: then the Work has ended. An error of a capture leaves the group as
// it was. The capture may have a part of the call then, and must be given up.
func (d *Group) Issue(ctx context.Context, op work.OpType, timeout time.Duration, c *Call, print board.Call) (*work.Work, error) {
	b := d.B
	c.captured = driver.CallCaptured(ctx)
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, timeout)
	if err != nil {
		return nil, err
	}
	c.init(ctx, info, time.Now().Add(timeout), timeout)
	if c.captured {
		if err := d.record(c); err != nil {
			return nil, err
		}
	}
	c.number, print.Op = d.Next(), op
	err = b.Enter(ctx, info, print)
	b.Issued(c.Work())
	if c.captured {
		c.Complete(err)
	} else {
		c.post(err)
	}
	return c.Work(), nil
}

// init prepares an operation that was admitted.
func (c *Call) init(ctx context.Context, info work.Info, deadline time.Time, timeout time.Duration) {
	c.Init(&c.d.B.Issuer, info.Op, info.Seq)
	c.ctx, c.streams, c.deadline, c.timeout = ctx, driver.CallStreamsOf(ctx), deadline, timeout
	c.RunBy(c)
}

// post gives the stream of an operation its commands, unless there is an error already. The caller holds the engine's
// Calls.
func (c *Call) post(err error) {
	c.Start()
	c.d.begin(c)
	if err == nil {
		err = c.d.B.Scratch.Tidy() // no Get of this operation may
	}
	pool.Begin()
	if err == nil {
		err = c.enqueue()
	}
	c.d.enqueued(c, err)
}

// record gives the captured stream the commands of a call, and keeps the memory that they use.
func (d *Group) record(c *Call) error {
	if c.stream = c.streams.In; c.stream.Device().Index != d.Dev {
		return c.named(errCaptureDevice)
	}
	c.Start()
	pool.Begin() // nothing is freed meanwhile
	defer pool.Underway.Add(-1)
	err := c.doParts()
	d.graphs.held, c.held = append(d.graphs.held, c.held...), nil
	d.watchGraphs()
	if err != nil {
		return c.named(err)
	}
	return nil
}

// enqueue gives the stream all commands.
func (c *Call) enqueue() (err error) {
	d, s := c.d, c.streams
	own := d.stream
	if c.lane != nil {
		own, err = d.streamOf(c.lane)
	} else {
		err = c.room()
	}
	if err != nil {
		return err
	}
	if c.staged == 0 && d.memory != nil {
		d.memory.Look()
	}
	c.collect()
	if c.stream = own; s != nil && s.In != nil && s.In.Device().Index == d.Dev {
		c.stream, c.within = s.In, true
	}
	if s != nil && s.Beside {
		for i := range c.Parts {
			f := &c.Parts[i].Form
			f.Blocks = min(cmp.Or(f.Blocks, besideBlocks), besideBlocks)
		}
	}
	if tail := d.tail; c.lane == nil && tail != nil && (c.stream == d.stream || tail == d.line.last && tail.stream != c.stream) {
		d.tail = nil
		if err := tail.record(); err != nil {
			return err
		}
	}
	if last := c.q.last; last != nil && last.stream != c.stream {
		if err := d.after(c.stream, last); err != nil {
			return err
		}
	}
	if err := c.afterCallers(); err != nil {
		return err
	}
	if err := d.B.After(c.stream, c.uses...); err != nil {
		return err
	}
	if err := c.afterOthers(); err != nil {
		return err
	}
	if c.lane == nil {
		c.inTurn, d.turns.used = true, 0
	}
	if err := c.doParts(); err != nil {
		return err
	}
	if s != nil && s.In != nil && s.In != c.stream {
		return follow(s.In, c.stream)
	}
	return nil
}

// room waits until a collective may be enqueued.
func (c *Call) room() error {
	d := c.d
	d.mu.Lock()
	full, alone := c.q.full(), len(c.q.calls) == 1
	d.mu.Unlock()
	// Who calls while other operations are under way does not wait for each.
	d.comm.Quiet(!alone)
	if !full {
		return nil
	}
	return d.B.Poll(c.ctx, c.timeout, func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.sweep(c.q)
		return !c.q.full(), c.err
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
func (c *Call) afterCallers() error {
	if s := c.streams; s != nil {
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
				m, ok := t.Memory().(driver.Streamer)
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
	d.sweepAll()
	if len(d.busy) == 0 {
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
	for _, c := range d.line.calls {
		for i := range meeting(uses, c.uses, 0) {
			used[i] = true
		}
	}
	var last driver.Stream
	if n := len(d.line.calls); n > 0 {
		last = d.line.calls[n-1].stream
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
	for m := range d.messages() {
		if m.stream != nil && conflicts(m.uses, uses) {
			f(m.stream, common(uses, m.uses)...)
		}
	}
}
