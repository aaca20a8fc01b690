package group

import (
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// enqueueClaim claims a message's memory, after what the caller's streams and other
// operations do with it.
func (o *Operation) enqueueClaim(places []*place.Place) (err error) {
	batch := o.B.Tracker.Batch()
	o.prologue(batch, places)
	access := driver.Writes
	if o.Legs[0].Src != nil {
		access = driver.Reads
	}
	all := o.accesses[:0]
	for _, p := range places {
		p.Uses(func(x place.Span) { all = append(all, access(p.Base+driver.Ptr(x.Off), x.N)) })
	}
	o.claimed = batch.Claim(o.claim, all...)
	o.accesses = all
	o.pending, err = o.give(batch)
	return err
}

// runMessage copies a tensor to the host and sends it, or receives one there and copies it to the
// device.
func (o *Operation) runMessage() error {
	shadows := make([]*tensor.Tensor, 1)
	if err := o.shadow(shadows, 0, func(*Leg, int, int) []byte { return o.staging.Bytes() }); err != nil {
		return err
	}
	if o.Legs[0].Src == nil {
		driver.HostAccess(o.B.Driver, "receiving", driver.Writes(o.staging.Ptr(), o.staging.Len()))
		if err := o.Call(o, shadows); err != nil {
			return err
		}
		if err := o.unpackRaw(); err != nil {
			return err
		}
	}
	if err := o.pending.Begin(Asks(o.AskDriver), o.claimed); err != nil {
		return err
	}
	c := &AtOnce{o: o}
	if o.Legs[0].Src != nil {
		o.pack(c)
		o.allDown(c)
	} else {
		o.allUp(c)
		o.unpack(c)
	}
	if err := c.wait(); err != nil {
		return err
	}
	o.pending.End(o.claimed)
	if o.Legs[0].Src == nil {
		return nil
	}
	driver.HostAccess(o.B.Driver, "sending", driver.Writes(o.staging.Ptr(), o.staging.Len()))
	if err := o.packRaw(); err != nil {
		return err
	}
	return o.Call(o, shadows)
}

// AtOnce gives the commands of a message, or of Do, to a stream at once, at most mostCommands at a time.
// Messages of other goroutines use the stream too. None of its commands waits for a rank.
type AtOnce struct {
	o    *Operation
	s    driver.Stream // the only one of a message
	n    int           // commands since the last word
	word uint32        // the last
	err  error
}

func (c *AtOnce) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	c.add(s, func() error { return s.Copy(dst, src, n) })
}

func (c *AtOnce) Launch(s driver.Stream, l *driver.Launch) {
	c.add(s, func() error { return s.Launch(l) })
}

func (c *AtOnce) Memset(s driver.Stream, dst driver.Ptr, value byte, n int) {
	c.add(s, func() error { return s.Memset(dst, value, n) })
}

func (c *AtOnce) add(s driver.Stream, f func() error) {
	if c.n == mostCommands {
		c.err = c.wait()
	}
	if c.err == nil {
		c.s, c.err = s, f()
		c.n++
	}
}

// Wait waits until the stream has done what it was given. An operation that has to end
// waits a little longer, because the copies still use the tensor.
func (c *AtOnce) wait() error {
	if c.n == 0 {
		return c.err
	}
	o := c.o
	if c.word++; c.word == 1 {
		o.staging.Store32(o.word, 0)
	}
	o.flying = true
	if err := c.s.WriteValue(o.staging.Ptr()+driver.Ptr(o.word), c.word); err != nil {
		return err
	}
	c.n = 0
	if err := driver.AwaitWord(o.ending(), o.staging, o.word, c.word, driver.AtLeast); err != nil {
		return fmt.Errorf("copying between device and host: %w", err)
	}
	o.flying = false
	return c.err
}

// ending is the context of AskDriver, Grace later.
func (o *Operation) ending() Asks {
	var since time.Time // of the end
	return func() error {
		err := o.AskDriver()
		if err != nil && since.IsZero() {
			since = time.Now()
		}
		if err == nil || time.Since(since) < Grace {
			return nil
		}
		return err
	}
}
