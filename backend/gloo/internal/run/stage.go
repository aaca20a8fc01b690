package run

import (
	"context"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/netstage"
)

// stageCall is a network stage under way.
type stageCall struct {
	stage   netstage.Stage
	meeting *callback.Registry[*progress]
	ready   []callback.Key[*progress] // by step
}

// Stage implements netstage.Backend.
func (b *Group) Stage(ctx context.Context, s netstage.Stage) (*netstage.Call, error) {
	if err := b.checkStage(&s); err != nil {
		return nil, err
	}
	c := &stageCall{stage: s, meeting: callback.NewRegistry[*progress](), ready: make([]callback.Key[*progress], len(s.Plan.Steps))}
	call := &s.Plan.Call
	print := fingerprint{op: s.Op, root: -1, sized: true, elements: int(call.Bytes)}
	if call.Op.Rooted() {
		print.root = call.Root
	}
	w, err := b.issue(ctx, s.Op, s.Timeout, prefixAllReduce, 1, 0, &operation{run: c.run, print: print.call()})
	if err != nil {
		return nil, err
	}
	b.queued.Signal() // nobody may wait for it before it ends
	return &netstage.Call{Work: w, Ready: c.arrive}, nil
}

// checkStage returns why the plan of s is not one of this rank in this group.
func (b *Group) checkStage(s *netstage.Stage) error {
	p := s.Plan
	if p.Call.Rank != b.rank {
		return bad(s.Op, "the plan is that of rank %d", p.Call.Rank)
	}
	if p.IDs > slotSteps {
		return bad(s.Op, "the plan has %d steps between clusters, want at most %d", p.IDs, slotSteps)
	}
	for i := range p.Steps {
		st := &p.Steps[i]
		if crosses(st) && (!slices.Contains(st.Ranks, b.rank) || slices.Max(st.Ranks) >= b.size) {
			return bad(s.Op, "step %d is for ranks %v, in a group of %d", i, st.Ranks, b.size)
		}
	}
	return nil
}

// crosses reports whether a step is one between clusters.
func crosses(s *cluster.Step) bool { return s.Stage == cluster.Between && !s.Finish }

// arrive is the Ready of a netstage.Call.
func (c *stageCall) arrive(i int) error {
	if i < 0 || i >= len(c.ready) || !crosses(&c.stage.Plan.Steps[i]) {
		return fmt.Errorf("gloo: step %d is ready, which is no step between clusters", i)
	}
	if err := c.meeting.Arrive(&c.ready[i]); err != nil {
		return fmt.Errorf("gloo: step %d is ready: %w", i, err)
	}
	return nil
}

func (c *stageCall) run(e *engine) error {
	defer c.meeting.Close()
	if e.session.Shared != nil {
		e.mesh = e.session.Direct
	}
	e.cluster = clusterCall{
		plan: c.stage.Plan, combine: c.stage.Combine, meeting: c.meeting,
		ready: c.ready, memory: c.stage.Memory, result: c.stage.Result,
	}
	return e.runStages(nil)
}
