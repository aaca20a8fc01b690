package gloo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// keepScratch is how much memory an engine keeps between operations. A DDP
// bucket is 25 MiB, so the usual training step allocates nothing; what is
// larger goes back to the collector.
const keepScratch = 64 << 20

// engine runs one operation at a time. A backend has as many as it runs
// collectives at a time, and uses them again and again.
type engine struct {
	backend *Backend
	mesh    transport.Mesh
	awaited *transport.Request // while this goroutine drives the mesh
	timer   *time.Timer
	reqs    []*transport.Request
	busy    []bool               // reqs[i] is posted
	recvs   []*transport.Request // to be posted
	sends   []*transport.Request
	scratch []byte // for plans
	packed  []byte // for tensors that are not contiguous, and for joined ones
	joined  []byte // for blocks that lie apart
	blocks  []byte // for such of operands
	lengths []int64
	posted  int // requests that are to be settled
	lists   [2][][]byte
	stop    func() error
	sparse  *sparseScratch // nil until there is a sparse tensor

	// Of the operation being run:
	ctx      context.Context
	op       *operation
	deadline time.Time // zero until somebody asks, see until
	armed    bool      // the timer is set
	early    bool      // to when the operation is announced, not to the deadline
	told     bool      // the rank that is waited for has been told of the operation
	tag      uint32
	slot     uint64
	peers    []int // the ranks that a plan is for, by their number in it; nil if all
}

func newEngine(b *Backend) *engine {
	t := time.NewTimer(time.Hour)
	t.Stop()
	e := &engine{backend: b, timer: t}
	e.stop = e.over
	return e
}

// begin readies the engine for an operation.
func (e *engine) begin(o *operation) {
	e.ctx, e.op = o.ctx, o
	if g := e.backend.local(); g != nil {
		g.Begin(uint32(o.call), o.print.History)
	}
	e.useTag(o.tag)
	e.deadline = time.Time{}
	e.told = false
}

// until returns when the operation's time is over. The time begins to run when the operation first
// has to wait: reading the clock takes a good part of a small one.
func (e *engine) until() time.Time {
	if e.deadline.IsZero() {
		e.deadline = time.Now().Add(e.op.timeout)
	}
	return e.deadline
}

// late delivers when the operation's time is over. The timer is set only when
// somebody has to wait.
func (e *engine) late() <-chan time.Time {
	if !e.armed || e.early {
		e.timer.Reset(time.Until(e.until()))
		e.armed, e.early = true, false
	}
	return e.timer.C
}

// announceAfter is for how long an operation waits for a rank before it tells that rank
// what it is. Ranks that disagree mostly find out by their first messages; but two
// that both wait, for they mean different roots, send none.
const announceAfter = 20 * time.Millisecond

// restless is late that delivers once before, when the operation is to be announced.
func (e *engine) restless() <-chan time.Time {
	if e.told {
		return e.late()
	}
	if !e.armed || !e.early {
		e.timer.Reset(min(announceAfter, time.Until(e.until())))
		e.armed, e.early = true, true
	}
	return e.timer.C
}

// announce tells a rank that this one waits for what the operation is, the first time
// that restless delivers in a wait. It returns false at the deadline.
func (e *engine) announce(peer int) bool {
	if e.told || !time.Now().Before(e.until()) {
		return false
	}
	e.told = true
	e.armed = false
	if m, ok := e.mesh.(*tcp.Mesh); ok && e.backend.native {
		m.Announce(peer, e.tag)
	}
	return true
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
	if e.armed {
		e.timer.Stop()
		e.armed, e.early = false, false
	}
	e.ctx, e.op, e.mesh, e.awaited = nil, nil, nil, nil
	for _, l := range e.lists {
		clear(l)
	}
	if cap(e.scratch) > keepScratch {
		e.scratch = nil
	}
	if cap(e.packed) > keepScratch {
		e.packed = nil
	}
	if cap(e.joined) > keepScratch {
		e.joined = nil
	}
	if cap(e.blocks) > keepScratch {
		e.blocks = nil
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
			if e.peers != nil {
				r.Peer = e.peers[s.Peer]
			}
			e.busy[s.Req] = true
			if s.Kind == plan.Send {
				e.sends = append(e.sends, r)
			} else {
				e.recvs = append(e.recvs, r)
			}
			if next := i + 1; next == len(p.Steps) || p.Steps[next].Kind > plan.Recv {
				e.postAll()
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

// postAll hands the requests that are ready to the mesh.
func (e *engine) postAll() {
	if m, ok := e.mesh.(poster); ok {
		m.Post(e.recvs, e.sends)
	} else {
		for _, r := range e.recvs {
			e.mesh.Recv(r)
		}
		for _, r := range e.sends {
			e.mesh.Send(r)
		}
	}
	e.recvs, e.sends = e.recvs[:0], e.sends[:0]
}

// poster is a mesh that takes several requests at once.
type poster interface {
	// Post is Recv for recvs and then Send for sends.
	Post(recvs, sends []*transport.Request)
}

// wait ends request i, or the whole group when the operation's time or context ends.
func (e *engine) wait(i int32) error {
	r := e.reqs[i]
	e.awaited = r
	if h, ok := e.mesh.(helper); ok && !e.Finished() {
		h.Help(e)
	}
	select {
	case <-r.Done():
	default:
		e.sleep(r)
	}
	e.busy[i] = false
	if err := r.Err(); err != nil {
		return e.backend.failed(e.mesh, e.op, r, err)
	}
	return nil
}

// sleep ends r, which has not ended yet.
func (e *engine) sleep(r *transport.Request) {
	e.told = false
	for {
		select {
		case <-r.Done():
			return
		case <-e.ctx.Done():
			e.backend.giveUp(e.mesh, e.op, r.Peer, canceled(e.ctx))
		case <-e.restless():
			if e.announce(r.Peer) {
				continue
			}
			e.backend.giveUp(e.mesh, e.op, r.Peer, tooLate(e.op))
		}
		<-r.Done()
		return
	}
}

// helper is a mesh that works faster in the goroutine that waits for it.
type helper interface {
	// Help returns when w has finished, or soon.
	Help(w tcp.Waiter)
	// See is for those who wait without Help.
	See()
}

// Finished implements tcp.Waiter.
func (e *engine) Finished() bool { return len(e.awaited.Done()) > 0 }

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
	if errors.Is(err, context.DeadlineExceeded) {
		if cause := context.Cause(ctx); cause != err {
			return fmt.Errorf("%w: %w: %w", work.ErrTimeout, err, cause)
		}
		return fmt.Errorf("%w: %w", work.ErrTimeout, err)
	}
	return &cancellation{err: err, cause: context.Cause(ctx)}
}

// cancellation is the end of a context that was cancelled.
type cancellation struct{ err, cause error }

func (c *cancellation) Error() string {
	if c.cause != c.err {
		return fmt.Sprintf("%v: %v: %v", work.ErrCanceled, c.err, c.cause)
	}
	return fmt.Sprintf("%v: %v", work.ErrCanceled, c.err)
}

func (c *cancellation) Unwrap() []error { return []error{work.ErrCanceled, c.err, c.cause} }

// Words is what other ranks are told: the cause that the program gave, if any.
func (c *cancellation) Words() string {
	if c.cause != c.err {
		return c.cause.Error()
	}
	return ""
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
	m.Abort(&transport.Fault{Kind: kindOf(cause), Rank: culprit, Reporter: b.rank, Op: uint8(o.Info().Op), Seq: o.Info().Seq, Err: cause})
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
	health := diagnose(m, watchLag)
	if m.Fault() != nil {
		return // somebody else was faster
	}
	// Who does not answer comes before who is behind, for that one may be
	// waiting for the other; and who is behind and idle before who is behind
	// inside an earlier operation.
	for _, h := range health {
		if isSilent(h) && h.Rank != b.rank {
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
	b.told.Store(true)
	b.fail(m, o, err, rank)
	return b.tell(&work.Error{Info: o.Info(), Peer: rank, Err: err})
}

// tell tells Options.Failed of the failure of the group.
func (b *Backend) tell(err *work.Error) error {
	if b.onFailure != nil {
		b.onFailure(err)
	}
	return err
}

func (b *Backend) requestError(info work.Info, peer int, err error) error {
	var size *transport.SizeError
	var f *transport.Fault
	switch {
	case errors.As(err, &size):
		b.told.Store(true)
		return b.tell(&work.Error{Info: info, Peer: size.Peer, Err: fmt.Errorf("%w: %w", work.ErrMismatch, err)})
	case errors.As(err, &f):
		return b.faultError(info, f)
	case errors.Is(err, transport.ErrClosed):
		err, peer = work.ErrClosed, -1
	}
	return &work.Error{Info: info, Peer: peer, Err: err}
}

// faultError is what an operation says when the group has failed with f.
func (b *Backend) faultError(info work.Info, f *transport.Fault) error {
	var left *departure
	if f.Rank == b.rank && errors.As(f.Err, &left) {
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	if f.Kind == transport.FaultMismatch {
		b.told.Store(true)
	}
	where := ""
	if f.Op != noOp && (f.Op != uint8(info.Op) || f.Seq != info.Seq) {
		where = fmt.Sprintf(" (in %v seq %d)", work.OpType(f.Op), f.Seq)
	}
	return b.tell(&work.Error{Info: info, Peer: f.Rank, Err: &fault{what: f.Error() + where, kind: sentinels[f.Kind], f: f}})
}

// sentinels are work's errors for the kinds of faults.
var sentinels = map[transport.FaultKind]error{
	transport.FaultPeerDied: work.ErrPeerDied, transport.FaultPeerLeft: work.ErrPeerLeft,
	transport.FaultTimeout: work.ErrTimeout, transport.FaultCanceled: work.ErrCanceled,
	transport.FaultAborted: work.ErrAborted, transport.FaultMismatch: work.ErrMismatch,
	transport.FaultProtocol: work.ErrMismatch, transport.FaultPanicked: work.ErrPanicked,
}

// kindOf returns the kind of a fault whose cause is err.
func kindOf(err error) transport.FaultKind {
	var was *transport.Fault
	if errors.As(err, &was) {
		return was.Kind
	}
	for _, k := range []transport.FaultKind{
		transport.FaultPanicked, transport.FaultPeerDied, transport.FaultPeerLeft,
		transport.FaultTimeout, transport.FaultCanceled, transport.FaultMismatch,
	} {
		if errors.Is(err, sentinels[k]) {
			return k
		}
	}
	return transport.FaultAborted
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
	op          plan.Op
	root        int
	bytes, elem int64
	hosts       bool // among one rank a host
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
