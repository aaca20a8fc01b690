package run

import (
	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
)

// keepScratch is how much memory an engine keeps between operations. A DDP
// bucket is 25 MiB, so the usual training step allocates nothing; what is
// larger goes back to the collector.
const keepScratch = 64 << 20

// progress is how far a plan is, and what it needs meanwhile.
type progress struct {
	plan    *plan.Plan
	next    int // step
	bufs    [3][]byte
	slot    uint64
	peers   []int                // the ranks that the plan is for, by their number in it; nil if all
	reqs    []*transport.Request // by number
	busy    []bool               // reqs[i] is posted
	scratch []byte

	// Of a step between clusters:
	step     *cluster.Step                 // nil if there is none
	at       int                           // the step's place in its plan
	then     *progress                     // of another step of the chunk
	meeting  *callback.Registry[*progress] // nil: the engine waits for each request
	posts    []*posting                    // reqs are theirs
	of       *cluster.Step                 // the last step, and its plan
	messages *plan.Plan
}

// posting is a request whose end makes its plan go on.
type posting struct {
	transport.Request
	meeting *callback.Registry[*progress]
	key     callback.Key[*progress]
}

// Ended implements transport.Owner.
func (m *posting) Ended(*transport.Request) { m.meeting.Arrive(&m.key) }

// begin readies g for a plan.
func (g *progress) begin(p *plan.Plan, slot uint64, peers []int, out, in []byte) {
	for len(g.reqs) < p.Requests {
		r := transport.NewRequest()
		if g.meeting != nil {
			m := &posting{key: callback.Key[*progress]{Value: g}}
			m.Owner, r = m, &m.Request
			g.posts = append(g.posts, m)
		}
		g.reqs, g.busy = append(g.reqs, r), append(g.busy, false)
	}
	g.plan, g.next, g.slot, g.peers = p, 0, slot, peers
	g.bufs = [...][]byte{plan.Out: out, plan.In: in, plan.Scratch: grow(&g.scratch, int(p.Scratch))}
}

// ended reports whether the plan has been carried out.
func (g *progress) ended() bool { return g.plan != nil && g.next == len(g.plan.Steps) }

// end lets go of what a plan needed.
func (g *progress) end() {
	g.bufs, g.peers = [3][]byte{}, nil
	if cap(g.scratch) > keepScratch {
		g.scratch = nil
	}
}

// clusterCall is a collective while its plan runs.
type clusterCall struct {
	plan    *cluster.Plan
	bufs    [3][]byte
	combine func(dst, src []byte)
	join    func(dst []byte, operands [][]byte) // may be nil
	meeting *callback.Registry[*progress]

	// Of a network stage, else nil:
	ready  []callback.Key[*progress] // by step: it may begin
	memory func(i int) []byte        // of step i
	result func(chunk int)           // called with each result; may be nil
}
