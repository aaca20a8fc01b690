package directway

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/tensor"
)

// form returns how a collective is done whose output is at an address.
func (c *Call) form(p *Part, at driver.Ptr) direct.Form {
	f := p.Form
	f.Into = c.into(p.Out, at, registered.Everyone)
	return f
}

// into returns where in registered memory the output of a call is, if it is tensors that begin at an address.
// By is the rank that is to write it.
func (c *Call) into(out []*tensor.Tensor, at driver.Ptr, by int) direct.Into {
	r := c.d.memory
	if r == nil || length(out) < direct.StraightBytes || place.Start(out[0]) != at {
		return direct.Into{}
	}
	m := place.Memory(out[0])
	for _, t := range out[1:] {
		if place.Memory(t) != m {
			return direct.Into{}
		}
	}
	return r.Use(m, by, c.captured)
}

// mapOthers maps what the other ranks have registered. The caller holds the engine's Calls.
func (d *Group) mapOthers() {
	if d.memory != nil {
		d.memory.Look()
	}
}
