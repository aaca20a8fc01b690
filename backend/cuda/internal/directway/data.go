package directway

import (
	"cmp"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// doParts gives the stream the commands of all parts.
func (c *Call) doParts() error {
	for i := range c.Parts {
		if err := c.do(&c.Parts[i]); err != nil {
			return err
		}
	}
	return nil
}

// do gives the stream the commands of one collective, or of a message.
func (c *Call) do(p *Part) error {
	if c.lane != nil {
		return c.transferMessage(p)
	}
	d, op := c.d, c.Info().Op
	switch op {
	case work.Barrier:
		return c.collective(d.comm.Barrier(c.stream))
	case work.Broadcast:
		return c.spread(p)
	case work.Reduce:
		return c.reduce(p)
	case work.Gather:
		return c.gather(p)
	case work.Scatter:
		n := p.Out[0].ByteLen()
		return c.exchange(p, func(out, in driver.Ptr) error { return d.comm.Scatter(c.stream, out, in, n, p.Root, c.form(p, out)) })
	case work.AllToAll, work.AllToAllSingle:
		send, take := c.spans(p.In), c.spans(p.Out)
		return c.transfer(p, func(out, in driver.Ptr) error { return d.comm.AllToAllV(c.stream, out, in, take, send, c.form(p, out)) })
	}
	dtype, es := p.Out[0].DType(), p.Out[0].DType().Size()
	switch op {
	case work.AllReduce, work.AllReduceCoalesced:
		if p.N == 0 {
			return nil
		}
		one := 1 // what the ranks combine: the first tensor, or all as if they were one
		if p.Joined {
			one = len(p.In)
		}
		at, err := c.bring(p.In[:one])
		if err != nil {
			return err
		}
		for i := one; i < len(p.In); i++ {
			other, err := c.bring(p.In[i : i+1])
			if err != nil {
				return err
			}
			if err = c.combine(p, at, other); err != nil {
				return err
			}
		}
		form := p.Form
		if d.comm.Spreads(p.N, dtype, p.Op, form) {
			form = c.form(p, at)
		}
		if err = c.collective(d.comm.AllReduce(c.stream, at, at, p.N, dtype, p.Op, form)); err != nil {
			return err
		}
		if err = c.fan(at, p.Out[one:]); err != nil {
			return err
		}
		return c.putBack(p.Out[:one], at)
	case work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced:
		if p.Uneven {
			return c.gatherUneven(p)
		}
		return c.exchange(p, func(out, in driver.Ptr) error { return d.comm.AllGather(c.stream, out, in, p.N*es, p.Form) })
	default:
		if p.Uneven {
			return c.scatterUneven(p)
		}
		return c.exchange(p, func(out, in driver.Ptr) error {
			return d.comm.ReduceScatter(c.stream, out, in, p.N, dtype, p.Op, p.Form)
		})
	}
}

// spread does a broadcast. The first tensor of the rank gets the data, or memory of the group's device if that
// tensor is elsewhere or has holes. The others get it from there.
func (c *Call) spread(p *Part) (err error) {
	first, others := p.In, p.Out
	if len(first) == 0 {
		first, others = p.Out[:1], p.Out[1:]
	}
	bytes := first[0].ByteLen()
	if bytes == 0 {
		return nil
	}
	at, _, there := place.InOrder(first, c.d.Dev)
	switch {
	case there:
	case len(p.In) > 0:
		at, err = c.bring(p.In)
	default:
		at, err = c.scratch(c.d.Dev, bytes)
		others = p.Out
	}
	if err != nil {
		return err
	}
	form := p.Form
	if c.d.comm.BroadcastSpreads(bytes, form) {
		form = c.form(p, at)
	}
	if err := c.collective(c.d.comm.Broadcast(c.stream, at, bytes, p.Root, form)); err != nil {
		return err
	}
	return c.fan(at, others)
}

// reduce does a reduce, within the root's tensor.
func (c *Call) reduce(p *Part) error {
	t := p.In[0]
	if t.ByteLen() == 0 {
		return nil
	}
	at, err := c.bring(p.In)
	if err != nil {
		return err
	}
	form := p.Form
	if c.d.comm.ReduceSpreads(p.N, t.DType(), p.Op, p.Root, form) {
		form.Into = c.into(p.In, at, registered.Everyone)
	}
	if err := c.collective(c.d.comm.Reduce(c.stream, at, at, p.N, t.DType(), p.Op, p.Root, form)); err != nil || len(p.Out) == 0 {
		return err
	}
	return c.putBack(p.Out, at)
}

// gather does a gather.
func (c *Call) gather(p *Part) error {
	n := p.In[0].ByteLen()
	if !p.Uneven {
		return c.exchange(p, func(out, in driver.Ptr) error { return c.d.comm.Gather(c.stream, out, in, n, p.Root, c.form(p, out)) })
	}
	take := c.spans(p.Out)
	return c.transfer(p, func(out, in driver.Ptr) error {
		return c.d.comm.GatherV(c.stream, out, in, n, take, p.Root, c.form(p, out))
	})
}

// spans returns where the bytes of tensors are that are in order.
func (c *Call) spans(ts []*tensor.Tensor) []direct.Span {
	var all []direct.Span
	at := 0
	for _, t := range ts {
		all = append(all, direct.Span{Off: at, N: t.ByteLen()})
		at += t.ByteLen()
	}
	return all
}

// exchange does a collective whose input and output differ in length. The shorter one may be this rank's
// part of the longer one, see backend.CheckMemory.
func (c *Call) exchange(p *Part, launch func(out, in driver.Ptr) error) error {
	if p.N == 0 {
		return nil
	}
	return c.transfer(p, launch)
}

// transfer is exchange for calls that all ranks make, whatever this rank's lengths are.
func (c *Call) transfer(p *Part, launch func(out, in driver.Ptr) error) error {
	in, err := c.bring(p.In)
	if err != nil {
		return err
	}
	return c.write(p.Out, func(out driver.Ptr) error { return c.collective(launch(out, in)) })
}

// write gives launch where an output is to be: in the tensors, if they are in order, else where it is put back from.
func (c *Call) write(ts []*tensor.Tensor, launch func(at driver.Ptr) error) error {
	at, _, whole := place.InOrder(ts, c.d.Dev)
	if !whole {
		var err error
		if at, err = c.scratch(c.d.Dev, place.Bytes(ts)); err != nil {
			return err
		}
	}
	if err := launch(at); err != nil || whole {
		return err
	}
	return c.putBack(ts, at)
}

// gatherUneven does an all_gather of inputs of unequal sizes, which all ranks know.
func (c *Call) gatherUneven(p *Part) error {
	take := c.spans(p.Out)
	if place.Longest(p.Out) == 0 {
		return nil
	}
	return c.transfer(p, func(out, in driver.Ptr) error { return c.d.comm.AllGatherV(c.stream, out, in, take, p.Form) })
}

// scatterUneven does a reduce_scatter of parts of unequal sizes. To the kernel all parts are as long as
// the longest. They are where they are if only the last one is shorter and they lie one after the other.
// Otherwise they are copied apart.
func (c *Call) scatterUneven(p *Part) error {
	d, dtype := c.d, p.Out[0].DType()
	part := place.Longest(p.In)
	if part == 0 {
		return nil
	}
	src, bytes, there := place.InOrder(p.In, d.Dev)
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
	es, n := dtype.Size(), place.Bytes(p.Out)
	return c.write(p.Out, func(out driver.Ptr) error {
		if n == 0 {
			out = src // nothing is written
		}
		return c.collective(d.comm.ReduceScatterV(c.stream, out, src, part/es, n/es, bytes/es, dtype, p.Op, p.Form))
	})
}

// transferMessage sends the tensor of a message, or receives it.
func (c *Call) transferMessage(p *Part) error {
	if c.staged != 0 {
		return c.launchMessage(c.staged, c.bytes, direct.Into{})
	}
	if c.lane.dir == out {
		at, err := c.bring(p.In)
		if err != nil {
			return err
		}
		return c.launchMessage(at, place.Bytes(p.In), direct.Into{})
	}
	return c.write(p.Out, func(at driver.Ptr) error {
		return c.launchMessage(at, place.Bytes(p.Out), c.into(p.Out, at, c.lane.peer))
	})
}

// launchMessage launches the kernel, which reads or writes n bytes. Into is for those that it writes.
func (c *Call) launchMessage(at driver.Ptr, n int, into direct.Into) error {
	x, d := c.lane, c.d
	if x.dir == in {
		return cmp.Or(x.l.Recv(c.stream, at, n, into), c.pace())
	}
	if err := cmp.Or(x.l.Send(c.stream, at, n), c.pace()); err != nil || c.captured {
		return err
	}
	word(d.pageOf(x.peer), d.Rank(), wordSent).Store(c.number + 1)
	return nil
}
