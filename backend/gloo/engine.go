package gloo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/plan"
	"github.com/c10d-go/c10d/backend/gloo/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// keepScratch is how much memory an engine keeps between operations. A DDP
// bucket is 25 MiB, so the usual training step allocates nothing; what is
// larger goes back to the collector.
const keepScratch = 64 << 20

// diagnoseFor is how long a rank that ran out of time waits for the answers of
// the others before it says whose fault it was.
const diagnoseFor = 250 * time.Millisecond

// engine runs the steps of one operation at a time over a mesh. A worker owns
// one and uses it again and again.
type engine struct {
	backend *Backend
	mesh    transport.Mesh
	timer   *time.Timer
	reqs    []*transport.Request
	busy    []bool // reqs[i] is posted
	scratch []byte // for plans
	packed  []byte // for tensors that are not contiguous, and for joined ones

	// Of the operation being run:
	ctx  context.Context
	op   *operation
	tag  uint32
	slot uint64
}

func newEngine(b *Backend) *engine {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &engine{backend: b, timer: t}
}

// begin readies the engine for an operation; its time starts to run.
func (e *engine) begin(o *operation) {
	e.ctx, e.op = o.ctx, o
	e.useTag(o.tag)
	e.timer.Reset(o.timeout)
}

// useTag makes the following steps run under a tag; operations that use
// several tags call it again.
func (e *engine) useTag(tag uint32) {
	e.tag = tag
	e.mesh = e.backend.meshFor(tag)
	e.slot = slotOf(e.op.prefix, tag)
}

// end lets go of the operation.
func (e *engine) end() {
	e.timer.Stop()
	e.ctx, e.op, e.mesh = nil, nil, nil
	if cap(e.scratch) > keepScratch {
		e.scratch = nil
	}
	if cap(e.packed) > keepScratch {
		e.packed = nil
	}
}

// slotOf is Gloo's number of a collective's messages: prefix, tag, step (always 0).
func slotOf(prefix uint8, tag uint32) uint64 { return uint64(prefix)<<56 | uint64(tag)<<24 }

// grow returns n bytes of *b, which it replaces if it is too small.
func grow(b *[]byte, n int) []byte {
	if cap(*b) < n {
		// New returns bytes that are aligned for every element type.
		t, err := tensor.New(tensor.Uint8, n)
		if err != nil {
			panic(err) // n is the size of tensors that exist
		}
		*b = t.Bytes()
	}
	return (*b)[:n]
}

// run executes a plan. Out is changed in place; in may be nil. When it returns,
// with or without an error, nobody touches the buffers any more.
func (e *engine) run(p *plan.Plan, out, in []byte, combine func(dst, src []byte)) error {
	for len(e.reqs) < p.Requests {
		e.reqs = append(e.reqs, transport.NewRequest())
		e.busy = append(e.busy, false)
	}
	bufs := [...][]byte{plan.Out: out, plan.In: in, plan.Scratch: grow(&e.scratch, int(p.Scratch))}
	for i := range p.Steps {
		s := &p.Steps[i]
		switch s.Kind {
		case plan.Send, plan.Recv:
			r := e.reqs[s.Req]
			r.Peer, r.Slot, r.Buf = int(s.Peer), e.slot, bufs[s.Buf][s.Off:s.Off+s.Len]
			e.busy[s.Req] = true
			if s.Kind == plan.Send {
				e.mesh.Send(r)
			} else {
				e.mesh.Recv(r)
			}
		case plan.Wait:
			if err := e.wait(s.Req); err != nil {
				e.drain()
				return err
			}
		case plan.Reduce:
			combine(bufs[s.Buf][s.Off:s.Off+s.Len], bufs[s.Src][s.SrcOff:s.SrcOff+s.Len])
		case plan.Copy:
			copy(bufs[s.Buf][s.Off:s.Off+s.Len], bufs[s.Src][s.SrcOff:s.SrcOff+s.Len])
		}
	}
	return nil
}

// wait ends request i, or the whole group when the operation's time or context ends.
func (e *engine) wait(i int32) error {
	r := e.reqs[i]
	select {
	case <-r.Done():
	default:
		select {
		case <-r.Done():
		case <-e.ctx.Done():
			e.backend.giveUp(e.mesh, e.op, r.Peer, canceled(e.ctx))
			<-r.Done()
		case <-e.timer.C:
			e.backend.giveUp(e.mesh, e.op, r.Peer, tooLate(e.op))
			<-r.Done()
		}
	}
	e.busy[i] = false
	if err := r.Err(); err != nil {
		return e.backend.failed(e.mesh, e.op, r, err)
	}
	return nil
}

// drain waits for what is still posted. The mesh has failed by now, so nothing is pending for long.
func (e *engine) drain() {
	for i, posted := range e.busy {
		if posted {
			<-e.reqs[i].Done()
			e.busy[i] = false
		}
	}
}

// canceled says why a context ended. A context that ended by its deadline is
// a timeout, whatever cause it was given.
func canceled(ctx context.Context) error {
	err := ctx.Err()
	kind := work.ErrCanceled
	if errors.Is(err, context.DeadlineExceeded) {
		kind = work.ErrTimeout
	}
	if cause := context.Cause(ctx); cause != err {
		return fmt.Errorf("%w: %w: %w", kind, err, cause)
	}
	return fmt.Errorf("%w: %w", kind, err)
}

func tooLate(o *operation) error { return fmt.Errorf("%w after %v", work.ErrTimeout, o.timeout) }

// giveUp ends the group because o ran out of time or was cancelled while it
// waited for peer, -1 if for no one rank.
func (b *Backend) giveUp(m transport.Mesh, o *operation, peer int, cause error) {
	if errors.Is(cause, work.ErrTimeout) {
		b.timeOut(m, o, peer, cause)
	} else {
		b.fail(m, o, cause, b.rank)
	}
}

// fail ends the group on all ranks because of something that happened here.
func (b *Backend) fail(m transport.Mesh, o *operation, cause error, culprit int) {
	f := &transport.Fault{Rank: culprit, Reporter: b.rank, Op: uint8(o.Info().Op), Seq: o.Info().Seq, Err: cause}
	switch {
	case errors.Is(cause, work.ErrTimeout):
		f.Kind = transport.FaultTimeout
	case errors.Is(cause, work.ErrCanceled):
		f.Kind = transport.FaultCanceled
	case errors.Is(cause, work.ErrMismatch):
		f.Kind = transport.FaultMismatch
	default:
		f.Kind = transport.FaultAborted
	}
	m.Abort(f)
}

// timeOut is giveUp for want of time: it finds out who was missing.
func (b *Backend) timeOut(m transport.Mesh, o *operation, peer int, cause error) {
	culprit := -1
	var missing []string
	blame := func(rank int, format string, args ...any) {
		if culprit < 0 {
			culprit = rank
		}
		missing = append(missing, fmt.Sprintf("rank %d ", rank)+fmt.Sprintf(format, args...))
	}
	health := m.Diagnose(diagnoseFor)
	if m.Fault() != nil {
		return // somebody else was faster
	}
	// Who does not answer comes before who is behind, for that one may be
	// waiting for the other; and who is behind and idle before who is behind
	// inside an earlier operation.
	for _, h := range health {
		if h.Native && !h.Answered && !h.Departed && h.Rank != b.rank {
			blame(h.Rank, "does not answer (stopped or unreachable)")
		}
	}
	for _, busy := range []bool{false, true} {
		for _, h := range health {
			if o.collective && h.Answered && h.Rank != b.rank && h.Issued <= o.call && busy == (h.Completed < h.Issued) {
				blame(h.Rank, "has not called it: it has issued %d collectives, this is number %d", h.Issued, o.call+1)
			}
		}
	}
	// A rank that left has mostly done its part before: who needs it hears so
	// at once and does not run out of time.
	for _, h := range health {
		if h.Departed && culprit < 0 && o.collective {
			blame(h.Rank, "has left the group")
		}
	}
	if culprit < 0 && peer >= 0 && peer != b.rank {
		blame(peer, "did not send or receive what was expected")
	}
	why := strings.Join(missing, "; ")
	switch {
	case why != "":
	case o.collective:
		why = "no rank is missing: the operation was too slow"
	default:
		why = fmt.Sprintf("no rank sent on tag %d", o.tag)
	}
	b.fail(m, o, fmt.Errorf("%w; %s", cause, why), culprit)
}

// failed turns the error of a request into the operation's. A request that
// fails always means that the mesh does.
func (b *Backend) failed(m transport.Mesh, o *operation, r *transport.Request, err error) error {
	if m.Fault() == nil && !errors.Is(err, transport.ErrClosed) {
		b.fail(m, o, err, r.Peer)
	}
	var size *transport.SizeError
	if f := m.Fault(); f != nil && !errors.As(err, &size) {
		return b.faultError(o.Info(), f)
	}
	return b.requestError(o.Info(), r.Peer, err)
}

// mismatch ends the group because what rank sent for o does not fit.
func (b *Backend) mismatch(m transport.Mesh, o *operation, rank int, err error) error {
	err = fmt.Errorf("%w: %w", work.ErrMismatch, err)
	b.fail(m, o, err, rank)
	return &work.Error{Info: o.Info(), Peer: rank, Err: err}
}

func (b *Backend) requestError(info work.Info, peer int, err error) error {
	var size *transport.SizeError
	var f *transport.Fault
	switch {
	case errors.As(err, &size):
		err, peer = fmt.Errorf("%w: %w", work.ErrMismatch, err), size.Peer
	case errors.As(err, &f):
		return b.faultError(info, f)
	case errors.Is(err, transport.ErrClosed):
		err, peer = work.ErrClosed, -1
	}
	return &work.Error{Info: info, Peer: peer, Err: err}
}

// faultError is what an operation says when the group has failed with f.
func (b *Backend) faultError(info work.Info, f *transport.Fault) error {
	kind := map[transport.FaultKind]error{
		transport.FaultPeerDied: work.ErrPeerDied, transport.FaultPeerLeft: work.ErrPeerLeft,
		transport.FaultTimeout: work.ErrTimeout, transport.FaultCanceled: work.ErrCanceled,
		transport.FaultAborted: work.ErrAborted, transport.FaultMismatch: work.ErrMismatch,
		transport.FaultProtocol: work.ErrMismatch,
	}[f.Kind]
	where := ""
	if f.Op != noOp && (f.Op != uint8(info.Op) || f.Seq != info.Seq) {
		where = fmt.Sprintf(" (in %v seq %d)", work.OpType(f.Op), f.Seq)
	}
	return &work.Error{Info: info, Peer: f.Rank, Err: &fault{what: f.Error() + where, kind: kind, f: f}}
}

// noOp stands for no operation in a transport.Fault.
const noOp = 0xff

// fault is the cause of an operation's error when its group failed: errors.Is
// finds work's sentinel, errors.As the transport's fault.
type fault struct {
	what string
	kind error
	f    *transport.Fault
}

func (e *fault) Error() string   { return e.what }
func (e *fault) Unwrap() []error { return []error{e.kind, e.f} }

// planner caches plans: they depend on little, and a trainer repeats few shapes.
type planner struct {
	mu    sync.Mutex
	plans map[planKey]*plan.Plan
	steps int // in all plans
}

type planKey struct {
	op          work.OpType
	root        int
	bytes, elem int64
}

// maxPlans and maxSteps bound the cache; past them, it starts over. A step has
// 48 bytes, so the cache keeps to about 50 MiB where every size is a new one.
const (
	maxPlans = 4096
	maxSteps = 1 << 20
)

func (p *planner) get(k planKey, make func() *plan.Plan) *plan.Plan {
	p.mu.Lock()
	defer p.mu.Unlock()
	if have := p.plans[k]; have != nil {
		return have
	}
	made := make()
	if p.plans == nil || len(p.plans) >= maxPlans || p.steps+len(made.Steps) > maxSteps {
		p.plans, p.steps = map[planKey]*plan.Plan{}, 0
	}
	p.plans[k] = made
	p.steps += len(made.Steps)
	return made
}

// reduction is backend.Reduction with nil functions left out of the way.
func before(r backend.Reduction, b []byte) {
	if r.Before != nil {
		r.Before(b)
	}
}

func after(r backend.Reduction, b []byte) {
	if r.After != nil {
		r.After(b)
	}
}
