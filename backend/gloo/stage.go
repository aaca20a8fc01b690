package gloo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// NetworkStage is a collective of a group whose ranks form clusters, and whose stages inside the
// clusters run elsewhere, for example on devices. The backend runs the steps between the clusters.
type NetworkStage struct {
	// Op is the operation that errors name. All ranks have the same.
	Op work.OpType

	// Plan is this rank's plan. All ranks have plans for one call and one cluster.Layout of the
	// group. Of its steps, the backend runs those with the stage cluster.Between.
	Plan *cluster.Plan

	// Memory returns the memory of step i of the plan, as many bytes as its part has. The memory
	// is the backend's from StageCall.Ready(i) until Result of the step's chunk, or until the Work
	// has ended. Memory is called once for each step, after Ready.
	Memory func(i int) []byte

	// Combine computes dst = dst op src, of operations that reduce.
	Combine func(dst, src []byte)

	// Result, if not nil, is called when the results of a chunk are in the memory of its steps.
	// Chunks come in the order in which the plan finishes them. After an error Result is not
	// called any more.
	//
	// Memory, Combine and Result run in a goroutine of the backend, one at a time. The other
	// chunks of the operation wait for them.
	Result func(chunk int)

	// Timeout is as in backend.AllReduceOptions. It begins when the operation first has to wait.
	Timeout time.Duration
}

// StageCall is a NetworkStage under way. Its Work ends when all chunks have their results. After a
// failure of the caller's own, Work.Abort ends the group. Memory may be freed when the Work has
// ended.
type StageCall struct {
	*work.Work
	stage   NetworkStage
	meeting *callback.Registry[*progress]
	ready   []callback.Key[*progress] // by step
}

// Stage issues a network stage. All ranks of the group issue it in the order of their collectives,
// also those that have no step between clusters. It has a sequence number and a slot of its own, and
// does not wait. An error means that it was not issued.
//
// A group with clusters or shared memory runs one collective at a time. A later one begins when this
// one has ended.
func (b *Backend) Stage(ctx context.Context, s NetworkStage) (*StageCall, error) {
	if err := b.checkStage(&s); err != nil {
		return nil, err
	}
	c := &StageCall{stage: s, meeting: callback.NewRegistry[*progress](), ready: make([]callback.Key[*progress], len(s.Plan.Steps))}
	call := &s.Plan.Call
	print := fingerprint{op: s.Op, root: -1, sized: true, elements: int(call.Bytes)}
	if call.Op.Rooted() {
		print.root = call.Root
	}
	var err error
	if c.Work, err = b.issue(ctx, s.Op, s.Timeout, prefixAllReduce, 1, 0, &operation{run: c.run, print: print.call()}); err != nil {
		return nil, err
	}
	b.queued.Signal() // nobody may wait for it before it ends
	return c, nil
}

// checkStage returns why the backend cannot run s, nil if it can.
func (b *Backend) checkStage(s *NetworkStage) error {
	p := s.Plan
	switch {
	case p == nil:
		return bad(s.Op, "a network stage needs a plan")
	case p.Call.Rank != b.rank:
		return bad(s.Op, "the plan is that of rank %d", p.Call.Rank)
	case p.IDs > slotSteps:
		return bad(s.Op, "the plan has %d steps between clusters, want at most %d", p.IDs, slotSteps)
	}
	for i := range p.Steps {
		st := &p.Steps[i]
		if st.Chunk < 0 || st.Chunk >= p.Chunks {
			return bad(s.Op, "step %d is of chunk %d of %d", i, st.Chunk, p.Chunks)
		}
		if !crosses(st) {
			continue
		}
		switch {
		case !slices.Contains(st.Ranks, b.rank):
			return bad(s.Op, "step %d is for ranks %v", i, st.Ranks)
		case slices.ContainsFunc(st.Ranks, func(r int) bool { return r < 0 || r >= b.size }):
			return bad(s.Op, "step %d is for ranks %v of a group of %d", i, st.Ranks, b.size)
		case st.ID < 0 || st.ID >= p.IDs:
			return bad(s.Op, "step %d has number %d of %d", i, st.ID, p.IDs)
		case len(st.Parts) > 0 && s.Memory == nil:
			return bad(s.Op, "a network stage needs Memory")
		case st.Op.Reduces() && s.Combine == nil:
			return bad(s.Op, "a network stage that reduces needs Combine")
		}
	}
	return nil
}

// crosses reports whether a step is one between clusters.
func crosses(s *cluster.Step) bool { return s.Stage == cluster.Between && !s.Finish }

// Ready says that step i of the plan may begin: this rank's operand is in its memory, and the memory
// is the backend's. Every step between clusters needs one call, from any goroutine, in any order.
//
// A step begins when it is ready and the chunks that end before it in the plan have their results.
// Ready must not depend on a later result. It does not wait. An error that wraps callback.ErrLate
// says that the operation has ended.
func (c *StageCall) Ready(i int) error {
	if i < 0 || i >= len(c.ready) || !crosses(&c.stage.Plan.Steps[i]) {
		return fmt.Errorf("gloo: step %d is ready, which is no step between clusters", i)
	}
	if err := c.meeting.Arrive(&c.ready[i]); err != nil {
		return fmt.Errorf("gloo: step %d is ready: %w", i, err)
	}
	return nil
}

func (c *StageCall) run(e *engine) error {
	defer c.meeting.Close()
	e.cluster = clusterCall{plan: c.stage.Plan, combine: c.stage.Combine, meeting: c.meeting, call: c}
	return e.runStages(nil)
}

// clusterCall is a collective while its plan runs.
type clusterCall struct {
	plan    *cluster.Plan
	bufs    [3][]byte
	combine func(dst, src []byte)
	join    func(dst []byte, operands [][]byte) // may be nil
	meeting *callback.Registry[*progress]
	call    *StageCall // says what is ready; nil if the engine runs the steps inside
}

// runStages runs the steps of a plan. With nil, others run those inside.
//
// Steps between clusters only begin. Their messages end in the goroutines of the mesh, which note
// that in a registry. There they meet the plans that wait for them, and whoever runs the operation
// goes on with these when it waits for a chunk.
func (e *engine) runStages(c *clusters) (err error) {
	x := &e.cluster
	defer func() { *x = clusterCall{} }()
	for i := range x.plan.Steps {
		s, at := &x.plan.Steps[i], i
		e.note(s, true)
		switch {
		case s.Finish:
			at, err = e.finish(s.Chunk, i)
		case s.Stage == cluster.Between:
			err = e.open(s, i)
		case c != nil:
			err = c.inside(e, x, s)
		}
		if e.note(s, false); err != nil {
			e.endBetween(err)
			return atStep(err, x.plan, at)
		}
		if s.Finish && x.call != nil && x.call.stage.Result != nil {
			x.call.stage.Result(s.Chunk)
		}
	}
	return nil
}

// atStep adds the stage and the step to the error of an operation.
func atStep(err error, p *cluster.Plan, i int) error {
	var of *work.Error
	if !errors.As(err, &of) {
		return err
	}
	at, s := *of, &p.Steps[i]
	if p.Call.Around {
		at.Err = fmt.Errorf("block %d of %d: %w", s.Chunk+1, p.Chunks, of.Err)
		return &at
	}
	at.Err = fmt.Errorf("step %d of %d (%v, chunk %d): %w", i+1, len(p.Steps), s.Stage, s.Chunk, of.Err)
	return &at
}

// open begins a step between clusters, now or when it is ready.
func (e *engine) open(s *cluster.Step, i int) error {
	x := &e.cluster
	var g *progress
	if n := len(e.free); n > 0 {
		g, e.free = e.free[n-1], e.free[:n-1]
	} else {
		g = new(progress)
		e.between = append(e.between, g)
	}
	for len(e.chunks) <= s.Chunk {
		e.chunks = append(e.chunks, nil)
	}
	g.step, g.at, g.plan, g.meeting = s, i, nil, x.meeting
	g.then, e.chunks[s.Chunk] = e.chunks[s.Chunk], g
	if x.call != nil {
		k := &x.call.ready[i]
		if k.Value = g; !x.meeting.Expect(k) {
			return nil
		}
	}
	return e.goOn(g)
}

// goOn runs a step between clusters as far as it goes.
func (e *engine) goOn(g *progress) error {
	x, s := &e.cluster, g.step
	if g.plan == nil {
		var buf []byte
		if len(s.Parts) > 0 {
			p := &s.Parts[0]
			if x.call == nil {
				buf = x.bufs[s.Dst][p.Dst : p.Dst+p.Len]
			} else if buf = x.call.stage.Memory(g.at); int64(len(buf)) != p.Len {
				return &work.Error{Info: e.op.Info(), Peer: e.session.rank, Err: fmt.Errorf("its memory has %d bytes, want %d", len(buf), p.Len)}
			}
			if s.Seal != 0 && s.Ranks[s.Root] == e.session.rank {
				putSeal(buf, s.Seal)
			}
		}
		// Messages match by slot, and steps that are under way together need slots of their own.
		slot := e.slot | uint64(s.ID+1)&slotSteps
		if g.of != s { // a program repeats few shapes, and plans are kept
			g.of, g.messages = s, e.session.planBetween(x, s)
		}
		g.begin(g.messages, slot, s.Ranks, buf, nil)
	}
	return e.advance(g, x.combine)
}

// slotSteps are the bits of a slot that steps of one operation may use.
const slotSteps = 1<<24 - 1

// finish waits for the results of a chunk. With an error it returns the step that failed, or i.
func (e *engine) finish(chunk, i int) (at int, err error) {
	x := &e.cluster
	for {
		for g, ok := x.meeting.Next(); ok; g, ok = x.meeting.Next() {
			if err := e.goOn(g); err != nil {
				return g.at, err
			}
		}
		if chunk >= len(e.chunks) || e.chunks[chunk] == nil {
			return i, nil
		}
		g := e.chunks[chunk]
		if !g.ended() {
			if err := e.await(g); err != nil {
				return g.at, err
			}
			continue
		}
		s := g.step
		e.release(chunk)
		if s.Seal != 0 && s.Ranks[s.Root] != e.session.rank && !sealFits(g.bufs[plan.Out], s.Seal) {
			return g.at, e.session.mismatch(e.mesh, &e.op.called, s.Ranks[s.Root], errors.New("the lengths of its blocks are not those that were expected"))
		}
	}
}

// release takes the first step off the list of a chunk.
func (e *engine) release(chunk int) {
	g := e.chunks[chunk]
	e.chunks[chunk] = g.then
	g.step, g.then = nil, nil
	e.free = append(e.free, g)
}

// await waits until some step between clusters can go on. g is one of them.
func (e *engine) await(g *progress) error {
	meeting := e.cluster.meeting
	e.awaited = nil
	if h, ok := e.mesh.(transport.Poller); ok {
		if h.PollUntil(e); meeting.Due() {
			return nil
		}
	}
	if g.plan != nil {
		e.sleep(meeting.Awake(), nil, g.reqs[g.plan.Steps[g.next].Req].Peer)
		return nil
	}
	// The step is not ready. If no message is under way, none ends when the mesh fails.
	if meeting.Posted() > 0 {
		e.sleep(meeting.Awake(), nil, ownRank)
		return nil
	}
	e.sleep(meeting.Awake(), e.mesh.Failed(), ownRank)
	if f := e.mesh.Fault(); f != nil && !meeting.Due() {
		return e.session.faultError(e.op.Info(), f)
	}
	return nil
}

// endBetween ends the steps that are under way. The operation has failed.
func (e *engine) endBetween(err error) {
	if len(e.free) < len(e.between) && e.mesh.Fault() == nil {
		e.session.fail(e.mesh, &e.op.called, err, e.session.rank)
	}
	if e.cluster.call != nil {
		e.cluster.meeting.Close() // drain does not drop what would become ready later
	}
	e.drain()
}

// planBetween returns the messages of a step between clusters.
func (s *session) planBetween(x *clusterCall, step *cluster.Step) *plan.Plan {
	k := planKey{op: step.Op, root: step.Root, elem: x.plan.Call.Elem, among: len(step.Ranks)}
	if len(step.Parts) > 0 {
		k.bytes = step.Parts[0].Len
	}
	k.place = slices.Index(step.Ranks, s.rank)
	k.named = x.plan.Call.Around
	k.long = x.plan.Chunks > 1 && !k.named
	return s.planner.get(k, func() *plan.Plan {
		way := ""
		if k.named {
			way = cluster.Around
		} else if len(step.Ranks) > 2 && !k.long && s.table != nil {
			n := len(step.Ranks)
			way = s.table.Choose(choice.Query{Op: step.Op, Bytes: k.bytes, Wire: "tcp", Ranks: n, Hosts: n}).Algorithm.Name
		}
		return step.Messages(s.rank, k.elem, way)
	})
}

// putSeal sets the last bytes of a message.
func putSeal(buf []byte, seal uint64) { binary.LittleEndian.PutUint64(buf[len(buf)-8:], seal) }

func sealFits(buf []byte, seal uint64) bool {
	return binary.LittleEndian.Uint64(buf[len(buf)-8:]) == seal
}
