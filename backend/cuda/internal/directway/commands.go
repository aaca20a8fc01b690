package directway

import (
	"cmp"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

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

// sole gives the call's stream copies and kernels, which come one after the other.
type sole struct {
	c   *Call
	err error // of the first that failed; later ones are not given
}

func (x *sole) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	if x.err == nil {
		x.err = x.c.copy(s, dst, src, n)
	}
}

func (x *sole) Launch(s driver.Stream, l *driver.Launch) {
	if x.err == nil {
		x.err = cmp.Or(s.Launch(l), x.c.pace())
	}
}
