package directway

import (
	"cmp"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// do gives the stream the commands of one collective.
func (c *Call) do(p *Part) error {
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
		if p.Joined {
			return c.joined(p)
		}
		at, err := c.bring(p.In[:1])
		if err != nil {
			return err
		}
		for i := range p.In[1:] {
			other, err := c.bring(p.In[i+1 : i+2])
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
		if err = c.fan(at, p.Out[1:]); err != nil {
			return err
		}
		return c.putBack(p.Out[:1], at)
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
	at, _, there := c.d.inOrder(first)
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
	out, _, whole := c.d.inOrder(p.Out)
	if !whole {
		if out, err = c.scratch(c.d.Dev, length(p.Out)); err != nil {
			return err
		}
	}
	if err := c.collective(launch(out, in)); err != nil || whole {
		return err
	}
	return c.putBack(p.Out, out)
}

func length(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.ByteLen()
	}
	return n
}

// bring returns where the elements of tensors are in order on the group's device. That is their
// own place, or the one they have been copied to.
func (c *Call) bring(ts []*tensor.Tensor) (driver.Ptr, error) {
	if at, _, ok := c.d.inOrder(ts); ok {
		return at, nil
	}
	at, err := c.scratch(c.d.Dev, length(ts))
	if err != nil {
		return 0, err
	}
	if done, err := c.list(ts, at, false); done || err != nil {
		return at, err
	}
	to := at
	for _, t := range ts {
		if err := c.move(t, to, true); err != nil {
			return 0, err
		}
		to += driver.Ptr(t.ByteLen())
	}
	return at, nil
}

// putBack is the way back from bring.
func (c *Call) putBack(ts []*tensor.Tensor, at driver.Ptr) error {
	if from, _, ok := c.d.inOrder(ts); ok && from == at {
		return nil
	}
	if done, err := c.list(ts, at, true); done || err != nil {
		return err
	}
	for _, t := range ts {
		if err := c.move(t, at, false); err != nil {
			return err
		}
		at += driver.Ptr(t.ByteLen())
	}
	return nil
}

// inOrder returns where the elements of tensors are, one tensor after the other, on the group's
// device; false if they are not.
func (d *Group) inOrder(ts []*tensor.Tensor) (at driver.Ptr, bytes int, ok bool) {
	for _, t := range ts {
		n := t.ByteLen()
		if n == 0 {
			continue
		}
		if t.Device().Index != d.Dev || !t.IsContiguous() || bytes > 0 && place.Start(t) != at+driver.Ptr(bytes) {
			return 0, 0, false
		}
		if bytes == 0 {
			at = place.Start(t)
		}
		bytes += n
	}
	return at, bytes, true
}

// move brings the elements of a tensor to a place on the group's device, or from there.
func (c *Call) move(t *tensor.Tensor, at driver.Ptr, bring bool) error {
	n := t.ByteLen()
	if n == 0 {
		return nil
	}
	dev, flat, s := t.Device().Index, t.IsContiguous(), c.stream
	if dev == c.d.Dev {
		switch {
		case !flat:
			return c.pack(s, t, at, bring)
		case bring:
			return c.copy(s, at, place.Start(t), n)
		}
		return c.copy(s, place.Start(t), at, n)
	}
	// By the tensor's device: what other devices fetch waits in one queue, see package driver.
	other, err := c.otherStream(dev)
	if err != nil {
		return err
	}
	own := place.Start(t)
	if !flat {
		if own, err = c.scratch(dev, n); err != nil {
			return err
		}
	}
	if bring {
		if err = follow(other, s); err == nil && !flat {
			err = c.pack(other, t, own, true)
		}
		if err == nil {
			err = c.copy(other, at, own, n)
		}
		if err = cmp.Or(err, follow(s, other)); err == nil {
			err = cmp.Or(c.pace(), c.pace()) // the streams' events and waits
		}
		return err
	}
	if err = c.copy(s, own, at, n); err != nil || flat {
		return err
	}
	if err = follow(other, s); err == nil {
		err = c.pack(other, t, own, false)
	}
	return cmp.Or(err, follow(s, other))
}

// scratch returns memory on a device until the operation has ended.
func (c *Call) scratch(dev, n int) (driver.Ptr, error) {
	if c.captured && dev != c.d.Dev {
		return 0, errCaptureDevice
	}
	if c.inTurn && dev == c.d.Dev && n <= mostTurns {
		return c.turn(n)
	}
	m, err := c.d.B.Scratch.Get(dev, n)
	if err != nil {
		return 0, err
	}
	c.held = append(c.held, m)
	return m.Ptr(), nil
}

// turns is memory on the group's device that collectives take turns to use, because they follow each other
// there. Calls that are made before others have ended would each take memory of their own otherwise, and
// making it is slow. Guarded by the engine's Calls.
type turns struct {
	m    driver.Memory
	used int // by the call that is being enqueued
}

// mostTurns is up to how many bytes at a time come from there.
const mostTurns = 32 << 20

// turn returns n bytes of it.
func (c *Call) turn(n int) (driver.Ptr, error) {
	t := &c.d.turns
	at := (t.used + 255) &^ 255
	if t.m == nil || at+n > t.m.Len() {
		m, err := c.d.B.Scratch.Get(c.d.Dev, at+n)
		if err != nil {
			return 0, err
		}
		if t.m != nil {
			c.held = append(c.held, t.m) // earlier calls use it, and have ended when this one has
		}
		t.m, at = m, 0
	}
	t.used = at + n
	return t.m.Ptr() + driver.Ptr(at), nil
}

// otherStream returns the group's stream of another device.
func (c *Call) otherStream(dev int) (driver.Stream, error) {
	d := c.d
	if c.captured {
		return nil, errCaptureDevice
	}
	if s, ok := d.others[dev]; ok {
		return s, nil
	}
	v, err := d.B.Driver.Device(dev)
	if err != nil {
		return nil, err
	}
	s, err := v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d direct.%d", d.B.Rank, dev)})
	if err != nil {
		return nil, err
	}
	if d.others == nil {
		d.others = make(map[int]driver.Stream)
	}
	d.others[dev] = s
	return s, nil
}

// pack brings the elements of a tensor in order, or puts them back, on its device.
func (c *Call) pack(s driver.Stream, t *tensor.Tensor, at driver.Ptr, bring bool) error {
	k := c.d.B.Packer(t.Device().Index)
	if k.Err != nil {
		return k.Err
	}
	one := sole{c: c}
	k.Move(&one, s, place.Of(t), at, bring)
	return one.err
}

// combine combines another tensor of this rank into the first one.
func (c *Call) combine(p *Part, into, from driver.Ptr) error {
	l, err := c.d.B.Packer(c.d.Dev).Combine(p.Op, p.In[0].DType(), into, from, p.N)
	if err != nil {
		return err
	}
	return cmp.Or(c.stream.Launch(l), c.pace())
}

// collective counts the launches of a collective.
func (c *Call) collective(err error) error {
	if err = cmp.Or(err, c.pace()); err == nil {
		c.launched = c.d.comm.Number()
	}
	return err
}

func (c *Call) copy(s driver.Stream, dst, src driver.Ptr, n int) error {
	return cmp.Or(s.Copy(dst, src, n), c.pace())
}

// A stream has room for some 1000 commands, see package driver. All operations that have not ended
// may have mostFlying of them. An operation that needs more waits for its own every paceCommands.
const (
	mostFlying   = 256
	paceCommands = 64
)

// pace counts a command. After many it waits for earlier ones.
func (c *Call) pace() error {
	c.launched = 0
	if c.given++; c.given%paceCommands != 0 || c.captured {
		return nil
	}
	e, err := c.stream.Record()
	if err != nil {
		return err
	}
	c.paces = append(c.paces, e)
	n := len(c.paces) - mostFlying/paceCommands
	if n < 0 {
		return nil
	}
	return c.d.B.Poll(c.ctx, c.timeout, func() (bool, error) {
		c.d.mu.Lock()
		err := c.err
		c.d.mu.Unlock()
		if err != nil {
			return false, err
		}
		return c.paces[n].Done()
	})
}

// follow has one stream wait for what the other one has been given.
func follow(s, first driver.Stream) error {
	e, err := first.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return s.Wait(e)
}
