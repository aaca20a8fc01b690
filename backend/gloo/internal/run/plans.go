package run

import (
	"sync"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

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
	named       bool // for Options.AllReduce

	// Of a step between clusters:
	among, place int  // among so many ranks, for the one at a place
	long         bool // by cluster.Way
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

// planFor returns the plan for a call, with the algorithm that choose picks. It keeps plans of calls
// without counts.
func (p *planner) planFor(k planKey, c plan.Call, choose chooser) *plan.Plan {
	bytes := c.Bytes // what the table goes by: the mean of a rank's bytes
	if c.Counts != nil {
		bytes = totalOf(c.Counts) / int64(len(c.Counts))
	}
	build := func() *plan.Plan {
		way := choose(k.op, bytes)
		c.Chunk = way.Chunk
		return way.Algorithm.Plan(c)
	}
	if c.Counts != nil {
		return build()
	}
	k.root, k.bytes, k.elem = c.Root, bytes, c.Elem
	return p.get(k, build)
}

// chooser returns the algorithm for an operation on so many bytes, the same on every rank.
type chooser func(op plan.Op, bytes int64) choice.Choice
