package directway

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// form returns how a collective is done whose output is at an address.
func (c *Call) form(p *Part, at driver.Ptr) direct.Form {
	f := p.Form
	f.Into = c.into(p.Out, at, registered.Everyone)
	return f
}

// into returns where in registered memory tensors of a call are, if they begin at an address. They are an output that
// peers write, or an input that they read. By is the peer, or all of them.
func (c *Call) into(ts []*tensor.Tensor, at driver.Ptr, by int) direct.Into {
	r := c.d.memory
	if r == nil || place.Bytes(ts) < direct.StraightBytes || place.Start(ts[0]) != at {
		return direct.Into{}
	}
	m := place.Memory(ts[0])
	if m == nil {
		return direct.Into{}
	}
	for _, t := range ts[1:] {
		if place.Memory(t) != m {
			return direct.Into{}
		}
	}
	into := r.Use(m, by, c.captured)
	c.told = c.told || into.Region != 0
	return into
}

// Registered returns how much memory of this rank the kernels of all other ranks have mapped: regions of at
// most so many, and bytes. It reports false if there can be none.
func (d *Group) Registered() (regions, most int, bytes int64, ok bool) {
	d.connecting.Lock()
	defer d.connecting.Unlock()
	if d.memory == nil || d.Open.Load() == nil {
		return 0, 0, 0, false
	}
	regions, bytes = d.memory.Mapped()
	return regions, window.MostRegions, bytes, true
}
