package run

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// note tells a test of a step.
func (e *engine) note(s *cluster.Step, begins bool) {
	if f := e.session.trace; f != nil {
		f(s, begins, e.cluster.meeting.Posted)
	}
}

// runStages runs the steps of a plan, those inside the cluster by inside. With nil, others run them.
//
// Steps between clusters only begin. Their messages end in the goroutines of the mesh, which note
// that in a registry. There they meet the plans that wait for them, and whoever runs the operation
// goes on with these when it waits for a chunk.
func (e *engine) runStages(inside func(s *cluster.Step) error) (err error) {
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
		case inside != nil:
			err = inside(s)
		}
		if e.note(s, false); err != nil {
			e.endBetween(err)
			return atStep(err, x.plan, at)
		}
		if s.Finish && x.result != nil {
			x.result(s.Chunk)
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
	if x.ready != nil {
		k := &x.ready[i]
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
			if x.memory == nil {
				buf = x.bufs[s.Dst][p.Dst : p.Dst+p.Len]
			} else if buf = x.memory(g.at); int64(len(buf)) != p.Len {
				return &work.Error{Info: e.op.Info(), Peer: e.session.rank, Err: fmt.Errorf("its memory has %d bytes, want %d", len(buf), p.Len)}
			}
			if s.Seal != 0 && s.Ranks[s.Root] == e.session.rank {
				binary.LittleEndian.PutUint64(sealOf(buf), s.Seal)
			}
		}
		// Messages match by slot, and steps that are under way together need slots of their own.
		slot := e.slot | uint64(s.ID+1)&slotSteps
		if g.of != s { // a program repeats few shapes, and plans are kept
			g.of, g.messages = s, e.planBetween(s)
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
		if s.Seal != 0 && s.Ranks[s.Root] != e.session.rank && binary.LittleEndian.Uint64(sealOf(g.bufs[plan.Out])) != s.Seal {
			return g.at, e.session.mismatch(e.mesh, e.op.Info(), s.Ranks[s.Root], errors.New("the lengths of its blocks are not those that were expected"))
		}
	}
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
		e.session.fail(e.mesh, e.op.Info(), err, e.session.rank)
	}
	if e.cluster.ready != nil {
		e.cluster.meeting.Close() // drain does not drop what would become ready later
	}
	e.drain()
}

// planBetween returns the messages of a step between clusters.
func (e *engine) planBetween(step *cluster.Step) *plan.Plan {
	s, x := e.session, &e.cluster
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
		} else if len(step.Ranks) > 2 && !k.long && s.Table != nil {
			n := len(step.Ranks)
			way = s.Table.Choose(choice.Query{Op: step.Op, Bytes: k.bytes, Wire: "tcp", Ranks: n, Hosts: n}).Algorithm.Name
		}
		return step.Messages(s.rank, k.elem, way)
	})
}

// sealOf returns the last bytes of a message.
func sealOf(buf []byte) []byte { return buf[len(buf)-8:] }
