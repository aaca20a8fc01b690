package cuda

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/work"
)

// DirectWork is the name of the work with one kernel on each rank. The kernels write into each
// other's memory and wait for each other (decision 24). It is for 2 to 8 ranks on one host, each
// with a device of its own that reaches the others'. Its priority is 200.
const DirectWork = "direct"

const directPriority = 200

// RingWork is the name of the work with one kernel on each rank, which writes into the memory of the next rank in a
// ring. It is for 2 to 16 ranks on one host, each with a device of its own. A device has to reach the next one only
// (decision 57). It all-reduces, gathers and reduce-scatters. Where all devices reach each other, up to
// 8 ranks take it only if the table of ways or Options.AllReduce asks for it. Its priority is 150. It was not measured
// on GPUs.
const RingWork = "ring"

const ringPriority = 150

// kernelWay is DirectWork, or RingWork.
type kernelWay struct{ around bool }

// connects returns why no such kernels do the call, as far as this needs no device: then the ranks need not connect.
func (k kernelWay) connects(c *call) error {
	reach := c.b.direct.CanMesh
	switch {
	case c.op == work.Barrier:
		return nil
	case k.around:
		reach = c.b.direct.Can
	}
	return cmp.Or(reach(), c.cannot())
}

// Meet connects the ranks, once.
func (k kernelWay) Meet(c *call) error {
	if c.op == work.Barrier || k.connects(c) != nil {
		return nil // Can has the reason
	}
	return c.b.direct.Ready(c.ctx, c.op, c.device(), c.print)
}

// Can implements way.
func (k kernelWay) Can(c *call) error {
	d := c.b.direct
	if err := k.connects(c); err != nil {
		return err
	}
	if !k.around {
		if err := d.Mesh(); err != nil {
			return err
		}
	}
	if c.op == work.Barrier {
		if c.b.g.Hosted() {
			return errHosted
		}
		return nil
	}
	if err := d.Has(); err != nil {
		return err
	}
	if w := c.chosen(); !w.Kernels() || k.around != (w.Name == ways.Ring) {
		return errSlower
	}
	return nil
}

var (
	errSlower = errors.New("the table of ways has a faster one for this size")
	errHosted = errors.New("a collective has gone through the hosts since the last barrier")
)

// cannot returns why no kernel combines the elements of a call, nil if one does or nothing is combined.
func (c *call) cannot() error {
	d := c.print.DType
	if c.print.With == 0 {
		return nil
	}
	if err := direct.Supports(c.reduce, d); err != nil {
		return err
	}
	if c.op == work.AllReduce && len(c.out) > 1 {
		if name, _ := kernels.Combine(c.reduce.Kind(), d); name == "" {
			return fmt.Errorf("no kernel for %v of %v", c.reduce, d)
		}
	}
	return nil
}

// chosen returns the way that the table has for the call: of those that kernels can do, or of the others. What every
// rank has decides: the table, the link and the call.
func (c *call) chosen() *ways.Range {
	if c.way == nil {
		all := c.b.far()
		if cmp.Or(c.b.direct.Can(), c.cannot()) == nil && c.b.direct.Has() == nil {
			all = c.b.near()
		}
		c.way = all.Of(c.row().plan, c.bytes)
	}
	return c.way
}

// OnDevice implements way.
func (kernelWay) OnDevice(*call) bool { return true }

// Issue implements way.
func (kernelWay) Issue(c *call) (*work.Work, error) {
	b, row, n := c.b, c.row(), max(c.parts, 1)
	k := b.direct.NewCall(c.results()...)
	for i := range n {
		p := row.part(c, i)
		switch {
		case c.op == work.Barrier:
		case n == 1:
			p.Form = form(c.chosen().Way)
		default:
			p.Form = b.formOf(row.plan, size(&p))
		}
		k.Parts = append(k.Parts, p)
	}
	if n > 1 {
		k.Parts = b.join(row.plan, k.Parts)
	}
	return b.direct.Issue(c.ctx, c.op, c.timeout, k, c.print)
}

// How implements way.
func (k kernelWay) How(c *call) string {
	switch {
	case c.op == work.Barrier:
		return "one kernel of each rank meets the others; the hosts meet after a collective that went through them"
	case k.around:
		return fmt.Sprintf("%s, in a ring of the ranks %v; %s", directway.WhyRing, c.b.direct.Order(), said(c.chosen()))
	}
	return directway.Why + "; " + said(c.chosen())
}

// said returns a way and why it is taken.
func said(r *ways.Range) string { return fmt.Sprintf("%v: %s", r.Way, r.Why) }

// joinUpTo is up to how many bytes of a rank's block a part of a coalesced call goes with others in one
// launch. To bring them in order and back reads and writes device memory once more each, at about ten times
// the speed of the links: 0.3 us for 256 KiB. A launch takes 2.6 us or more.
const joinUpTo = 256 << 10

// size returns the bytes of a rank's block of a part.
func size(p *directway.Part) int {
	if len(p.Out) == 0 {
		return 0
	}
	return p.N * p.Out[0].DType().Size()
}

// join has the small parts of a coalesced call be one. All ranks have parts of the same sizes, and so
// join the same. No bit changes: elements are combined as before, rank by rank.
func (b *Backend) join(op plan.Op, parts []directway.Part) []directway.Part {
	var large, small []directway.Part
	for _, p := range parts {
		if size(&p) > joinUpTo {
			large = append(large, p)
		} else {
			small = append(small, p)
		}
	}
	if len(small) < 2 {
		return parts
	}
	one := directway.Part{Op: small[0].Op, Joined: op == plan.OpAllReduce}
	for _, p := range small {
		one.N += p.N
		if op == plan.OpAllGather {
			one.In = append(one.In, p.In[0])
		} else {
			one.Out = append(one.Out, p.Out[0])
		}
	}
	// The tensors of a rank are together, and the ranks in order.
	for r := range b.g.Size {
		for _, p := range small {
			switch op {
			case plan.OpAllGather:
				one.Out = append(one.Out, p.Out[r])
			case plan.OpReduceScatter:
				one.In = append(one.In, p.In[r])
			}
		}
	}
	if op == plan.OpAllReduce {
		one.In = one.Out
	}
	one.Form = b.formOf(op, size(&one))
	return append(large, one)
}
