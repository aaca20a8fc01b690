package group

import (
	"slices"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/pool"
)

// Made is device memory that an operation has made for its caller. Close gives it back to the group, which keeps it for
// later operations: that waits for no device. Once the group is closed, Close frees the memory.
type Made struct {
	driver.Memory
	n      int
	group  *pool.Pool[driver.Memory]
	closed atomic.Bool
}

// Len returns the number of bytes.
func (m *Made) Len() int { return m.n }

// Closed reports whether the memory has been closed.
func (m *Made) Closed() bool { return m.closed.Load() }

// Close gives the memory back. It may be called more than once.
func (m *Made) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	return m.group.Put(m.Device().Index, m.Memory)
}

// Near is device memory that has what an operation reads from its tensors, instead of staging memory. Call gets no
// tensors then. It orders what it does itself.
type Near struct {
	Dev   int
	Bytes int
	At    []int      // where the bytes of each leg go
	Ptr   driver.Ptr // once the operation has the memory
}

// Make returns new memory on a device of the operation's with the bytes of b, which Call has. They are copied through
// staging memory, on a stream that waits for nobody. If the operation fails, the memory is the group's again.
func (o *Operation) Make(dev int, b []byte) (*Made, error) {
	m, err := o.New(dev, len(b))
	if err != nil {
		return nil, err
	}
	return m, o.Put(dev, m.Ptr(), b)
}

// New is Make, and copies nothing.
func (o *Operation) New(dev, n int) (*Made, error) {
	m, err := o.B.Scratch.Get(dev, n)
	if err != nil {
		return nil, err
	}
	o.made = append(o.made, m)
	return &Made{Memory: m, n: n, group: o.B.Scratch}, nil
}

// Gives says that the caller has what Make has returned.
func (o *Operation) Gives() { o.made = nil }

// Put copies b to memory of a device.
func (o *Operation) Put(dev int, to driver.Ptr, b []byte) error { return o.through(dev, to, b, true) }

// Fetch copies memory of a device to b.
func (o *Operation) Fetch(dev int, b []byte, from driver.Ptr) error {
	return o.through(dev, from, b, false)
}

// through copies by way of staging memory.
func (o *Operation) through(dev int, at driver.Ptr, b []byte, up bool) error {
	via, room := o.staging.Ptr()+driver.Ptr(o.makeAt), o.staging.Bytes()[o.makeAt:o.word]
	for len(b) > 0 {
		part := b[:min(len(b), len(room))]
		to, from := via, at
		driver.HostAccess(o.B.Driver, "copying", driver.Writes(via, len(room)))
		if up {
			copy(room, part)
			to, from = at, via
		}
		if err := o.Do(dev, func(c *AtOnce, s driver.Stream) { c.Copy(s, to, from, len(part)) }); err != nil {
			return err
		}
		if !up {
			driver.HostAccess(o.B.Driver, "copying", driver.Reads(via, len(room)))
			copy(part, room)
		}
		b, at = b[len(part):], at+driver.Ptr(len(part))
	}
	return nil
}

// On returns a device's stream for what the host has done at once. It waits for nobody.
func (o *Operation) On(dev int) driver.Stream {
	return o.makes[slices.IndexFunc(o.makes, func(s driver.Stream) bool { return s.Device().Index == dev })]
}

// Do has that stream do what f gives it, and waits for the end.
func (o *Operation) Do(dev int, f func(c *AtOnce, s driver.Stream)) error {
	c := &AtOnce{o: o}
	f(c, o.On(dev))
	return c.wait()
}
