package directway

import (
	"cmp"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
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

// elsewhere has streams of other devices do what fill gives them. It comes after what the call's stream has been given, and
// before what that is given later. Uses is what they use of the call's memory.
func (c *Call) elsewhere(uses []driver.Access, fill func(to group.Commander) error) error {
	b := c.d.B
	if c.captured {
		return errCaptureDevice
	}
	// These streams are the operations' that were called before: they get theirs first.
	if err := b.Poll(c.ctx, c.timeout, func() (bool, error) { return b.Fed(), nil }); err != nil {
		return err
	}
	batch := b.Tracker.Batch()
	batch.Before(c.stream, uses...)
	if err := fill(batch); err != nil {
		return err
	}
	batch.After(c.stream, uses...)
	commands := batch.Len()
	p, err := batch.Run()
	if p != nil {
		c.batches = append(c.batches, p)
		if err != nil {
			return cmp.Or(p.Order(c.stream), err)
		}
	}
	for range commands {
		err = cmp.Or(err, c.pace())
	}
	return err
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
		x.err = cmp.Or(s.Copy(dst, src, n), x.c.pace())
	}
}

func (x *sole) Launch(s driver.Stream, l *driver.Launch) {
	if x.err == nil {
		x.err = cmp.Or(s.Launch(l), x.c.pace())
	}
}
