package directway

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// gatherUneven does an all_gather of inputs of unequal sizes, which all ranks know.
func (c *Call) gatherUneven(p *Part) error {
	take := c.spans(p.Out)
	if longest(p.Out) == 0 {
		return nil
	}
	return c.transfer(p, func(out, in driver.Ptr) error { return c.d.comm.AllGatherV(c.stream, out, in, take, p.Form) })
}

// scatterUneven does a reduce_scatter of parts of unequal sizes. To the kernel all parts are as long as
// the longest. They are where they are if only the last one is shorter and they lie one after the other.
// Otherwise they are copied apart.
func (c *Call) scatterUneven(p *Part) error {
	d, dtype := c.d, p.Out[0].DType()
	part := longest(p.In)
	if part == 0 {
		return nil
	}
	src, bytes, there := d.inOrder(p.In)
	for _, t := range p.In[:len(p.In)-1] {
		there = there && t.ByteLen() == part
	}
	if !there {
		var err error
		if src, err = c.scratch(d.Dev, part*len(p.In)); err != nil {
			return err
		}
		for r, t := range p.In {
			if err := c.move(t, src+driver.Ptr(r*part), true); err != nil {
				return err
			}
		}
		bytes = part * len(p.In)
	}
	out, n, whole := d.inOrder(p.Out)
	if !whole {
		n = length(p.Out)
		var err error
		if out, err = c.scratch(d.Dev, n); err != nil {
			return err
		}
	}
	es := dtype.Size()
	if n == 0 {
		out = src // nothing is written
	}
	err := c.collective(d.comm.ReduceScatterV(c.stream, out, src, part/es, n/es, bytes/es, dtype, p.Op, p.Form))
	if err != nil || whole {
		return err
	}
	return c.putBack(p.Out, out)
}

// longest returns the bytes of the longest tensor.
func longest(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n = max(n, t.ByteLen())
	}
	return n
}
