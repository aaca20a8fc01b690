package driver

import (
	"context"
	"strconv"

	"github.com/c10d-go/c10d/tensor"
)

// Stream is a queue of operations on one device. They run one after the other;
// operations of different streams run at the same time unless a Wait or a
// WaitValue orders them. Calls enqueue and return: they do not wait for the
// device, as long as the stream has room, in CUDA for some 1000 operations. A
// Stream may be used from many goroutines; operations run in the order of the calls.
// It is a work.Stream.
//
// A call that returns an error has enqueued nothing.
type Stream interface {
	// Device returns the device of the stream.
	Device() tensor.Device

	// Handle returns the driver's own handle for the stream, 0 where there is none.
	Handle() uintptr

	// Copy copies n bytes between any two places: this device's memory, another
	// device's, page-locked memory. The ranges must not overlap.
	Copy(dst, src Ptr, n int) error

	// Memset sets n bytes of device or page-locked memory.
	Memset(dst Ptr, value byte, n int) error

	// Launch runs a kernel of this stream's device.
	Launch(l *Launch) error

	// Record returns an event that passes when everything that was enqueued
	// before has ended. It is a new one every time.
	Record() (Event, error)

	// Wait holds what is enqueued later until e has passed, on whichever stream
	// and device of the Driver it was recorded.
	Wait(e Event) error

	// WaitValue holds what is enqueued later until the word at p fulfils c. The word is in
	// page-locked memory or in this device's; p is a multiple of 4. Commands after the wait see
	// all that was written before the value that ended it.
	WaitValue(p Ptr, v uint32, c Condition) error

	// WriteValue writes the word at p, a multiple of 4, in page-locked memory or
	// in memory that the device reaches. It is seen after everything that was
	// enqueued before has ended and its writes are visible.
	WriteValue(p Ptr, v uint32) error

	// Err returns the error that broke the stream's device, nil while it works. An
	// operation that failed on the device shows here and in every event and call
	// after it.
	Err() error

	// Close gives the stream back. It does not wait: what was enqueued still
	// runs. It may be called more than once.
	Close() error
}

// StreamOptions is how a stream is made.
type StreamOptions struct {
	// High gives the stream the device's highest priority, so that a short
	// operation does not queue behind a long kernel's blocks.
	High bool

	// Name shows in the simulator's reports; others ignore it.
	Name string
}

// Event is one point in one stream, used once. Who recorded it releases it
// when it will be neither waited on nor asked any more; it need not have passed.
// After Release the Event must not be used: it may already be another one.
type Event interface {
	// Done reports, without blocking, whether the event has passed. The error is
	// what broke the device before it could.
	Done() (bool, error)

	// Sync blocks until the event has passed, the device is broken, or ctx ends.
	// One goroutine a device should do that, not one for each operation: it may
	// hold a thread.
	Sync(ctx context.Context) error

	// Release gives the event back. The driver uses it again when it has passed
	// and the waits on it have been carried out. Exactly one call is allowed.
	Release()
}

// Condition is how WaitValue compares the word w with its value v.
type Condition uint8

const (
	// AtLeast: w is v or was counted beyond it: int32(w - v) >= 0, so that
	// counters may wrap around.
	AtLeast Condition = iota
	// Equal: w == v.
	Equal
)

// Holds reports whether the word w fulfils the condition for v.
func (c Condition) Holds(w, v uint32) bool {
	switch c {
	case AtLeast:
		return int32(w-v) >= 0
	case Equal:
		return w == v
	}
	return false
}

// Valid reports whether c is one of the constants.
func (c Condition) Valid() bool { return c <= Equal }

func (c Condition) String() string {
	switch c {
	case AtLeast:
		return ">="
	case Equal:
		return "=="
	}
	return "condition(" + strconv.Itoa(int(c)) + ")"
}

// Queuer is a Device whose streams have so many queues of the hardware. If there are more
// streams, some share a queue: one that waits for a word holds the others up. See
// "Queues" in the package's comment.
type Queuer interface {
	// Queues returns how many streams of this Driver the device has, without borrowed
	// ones, and how many queues.
	Queues() (streams, queues int)
}

// Observer is a Driver that wants to know what the host does. The simulator is one: it then finds
// operations that are not ordered against the host's own accesses to page-locked memory.
type Observer interface {
	// HostAccess tells that the host is about to use page-locked memory. The host stops
	// before its next call to the Driver that enqueues or stores.
	HostAccess(what string, access ...Access)

	// HostMeets tells that the host is about to meet those of other processes, for the n-th time in a group, and
	// returns what to call when all have come.
	HostMeets(group string, n int) (met func())
}

// HostAccess tells d, if it wants to know, that the host is about to use
// page-locked memory. See Observer.
func HostAccess(d Driver, what string, access ...Access) {
	if o, ok := d.(Observer); ok {
		o.HostAccess(what, access...)
	}
}

// HostMeets tells d, if it wants to know, that the host is about to meet others. See Observer.
func HostMeets(d Driver, group string, n int) (met func()) {
	if o, ok := d.(Observer); ok {
		return o.HostMeets(group, n)
	}
	return func() {}
}
