package group

import (
	"slices"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
)

// Made is device memory that an operation has made for its caller. Close gives it back to the group, which keeps it for
// later operations: that waits for no device.
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

// Make returns new memory on a device of the operation's with the bytes of b, which Call has. They are copied through
// staging memory, on a stream that waits for nobody. If the operation fails, the memory is the group's again.
func (o *Operation) Make(dev int, b []byte) (*Made, error) {
	m, err := o.B.Scratch.Get(dev, len(b))
	if err != nil {
		return nil, err
	}
	o.held = append(o.held, m)
	s := o.makes[slices.IndexFunc(o.makes, func(s driver.Stream) bool { return s.Device().Index == dev })]
	from, room := o.staging.Ptr()+driver.Ptr(o.makeAt), o.staging.Bytes()[o.makeAt:o.word]
	c := &atOnce{o: o}
	for at := 0; at < len(b); {
		driver.HostAccess(o.B.Driver, "making memory", driver.Writes(from, len(room)))
		n := copy(room, b[at:])
		c.Copy(s, m.Ptr()+driver.Ptr(at), from, n)
		if err := c.wait(); err != nil {
			return nil, err
		}
		at += n
	}
	return &Made{Memory: m, n: len(b), group: o.B.Scratch}, nil
}

// Gives says that the caller has what Make has returned.
func (o *Operation) Gives() { o.held = nil }
