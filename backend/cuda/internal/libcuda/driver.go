package libcuda

import (
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Driver is a driver.Driver on an API.
type Driver struct {
	api     API
	devices []*Device
	closed  atomic.Bool
	memory  table

	captures atomic.Int32 // under way; without one no call asks whether a stream of the Driver's own is captured
	foreign  atomic.Bool  // somebody else has captured a borrowed stream, and others may be part of such captures

	mu   sync.Mutex
	live map[closer]string // what was made and not closed
	kept []*kept
}

// closer is something that the Driver made: a pointer.
type closer interface{ Close() error }

// owner is this process among those that exchange handles.
var owner = sync.OnceValue(func() (id [16]byte) {
	// It does not return an error.
	rand.Read(id[:])
	return id
})

// New returns a Driver for the devices that api finds. Contexts has the program's own contexts,
// by the device's number. A device without one has its primary context, which all libraries of a
// process share.
func New(api API, contexts map[int]Context) (*Driver, error) {
	const call = "Open"
	n, r := api.DeviceCount()
	if r != Success {
		return nil, driver.ResultError(call, -1, "cuDeviceGetCount", int(r), api.ErrorName(r))
	}
	if n == 0 {
		return nil, &driver.Error{Call: call, Device: -1, Err: fmt.Errorf("%w: the driver sees no device", driver.ErrNoDevice)}
	}
	d := &Driver{api: api, live: make(map[closer]string)}
	for i := range n {
		ord, r := api.DeviceGet(i)
		if r != Success {
			return nil, driver.ResultError(call, i, "cuDeviceGet", int(r), api.ErrorName(r))
		}
		d.devices = append(d.devices, &Device{d: d, index: i, ord: ord, given: contexts[i]})
	}
	for i := range contexts {
		if i < 0 || i >= n {
			return nil, invalid(call, -1, "a context for device %d among %d", i, n)
		}
	}
	return d, nil
}

func invalid(call string, device int, format string, args ...any) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrInvalid}, args...)...)}
}

func closedError(call string, device int, what string) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: the %s", driver.ErrClosed, what)}
}

// Name tells implementations apart.
func (d *Driver) Name() string { return d.api.Name() }

// Count returns the number of devices.
func (d *Driver) Count() int { return len(d.devices) }

// Device returns device i; the first call retains its context.
func (d *Driver) Device(i int) (driver.Device, error) {
	v, err := d.device("Device", i)
	if err != nil {
		return nil, err
	}
	return v, nil
}

func (d *Driver) device(call string, i int) (*Device, error) {
	if d.closed.Load() {
		return nil, closedError(call, -1, "driver")
	}
	if i < 0 || i >= len(d.devices) {
		return nil, invalid(call, -1, "no device %d among %d", i, len(d.devices))
	}
	v := d.devices[i]
	if err := v.open(call); err != nil {
		return nil, err
	}
	return v, nil
}

// hostDevice returns a device for calls that need a context but concern no device. It takes one
// that is in use already: another context would cost hundreds of megabytes of a device's memory.
func (d *Driver) hostDevice(call string) (*Device, error) {
	if d.closed.Load() {
		return nil, closedError(call, -1, "driver")
	}
	for _, v := range d.devices {
		if v.ready.Load() && v.lost.Load() == nil {
			return v, nil
		}
	}
	return d.device(call, 0)
}

// Link tells how devices reach each other.
func (d *Driver) Link(from, to int) (driver.Link, error) {
	const call = "Link"
	n := len(d.devices)
	if from < 0 || from >= n || to < 0 || to >= n {
		return driver.Link{}, invalid(call, -1, "no devices %d and %d among %d", from, to, n)
	}
	if d.closed.Load() {
		return driver.Link{}, closedError(call, -1, "driver")
	}
	if from == to {
		return driver.Link{Peer: true, Atomics: true}, nil
	}
	a, b := d.devices[from], d.devices[to]
	peer, r := d.api.CanAccessPeer(a.ord, b.ord)
	if r != Success {
		return driver.Link{}, a.fail(call, "cuDeviceCanAccessPeer", r)
	}
	rank, r := d.api.P2PAttribute(p2pPerformanceRank, a.ord, b.ord)
	if r != Success {
		return driver.Link{}, a.fail(call, "cuDeviceGetP2PAttribute", r)
	}
	atomics, r := d.api.P2PAttribute(p2pNativeAtomics, a.ord, b.ord)
	if r != Success {
		return driver.Link{}, a.fail(call, "cuDeviceGetP2PAttribute", r)
	}
	return driver.Link{Peer: peer, Atomics: atomics != 0, Rank: rank}, nil
}

// made remembers c until forget.
func (d *Driver) made(c closer, what string) {
	d.mu.Lock()
	d.live[c] = what
	d.mu.Unlock()
}

func (d *Driver) forget(c closer) {
	d.mu.Lock()
	delete(d.live, c)
	d.mu.Unlock()
}

// Close closes all that was left open, and returns an error that lists it. Then it gives the
// contexts back.
func (d *Driver) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	d.mu.Lock()
	live := d.live
	d.live = make(map[closer]string)
	d.mu.Unlock()
	count := make(map[string]int)
	var errs []error
	for c, what := range live {
		count[what]++
		errs = append(errs, c.Close())
	}
	for _, v := range d.devices {
		errs = append(errs, v.forgetPeers()) // while all have their contexts
	}
	for _, v := range d.devices {
		if n := v.events.out.Load(); n != 0 && v.lost.Load() == nil {
			count["event"] += int(n)
		}
		errs = append(errs, v.close())
	}
	if len(count) > 0 {
		var list []string
		for what, n := range count {
			list = append(list, fmt.Sprintf("%s: %d", what, n))
		}
		slices.Sort(list)
		errs = append(errs, &driver.Error{Call: "Close", Device: -1, Err: fmt.Errorf("not closed before: %v", list)})
	}
	return errors.Join(errs...)
}

// enter makes the device's context current on this thread and returns what was
// before; leave takes both back. Nothing between the two may block.
func (v *Device) enter() (Context, Result) {
	runtime.LockOSThread()
	before, r := v.d.api.Current()
	if r == Success && before != v.ctx {
		r = v.d.api.SetCurrent(v.ctx)
	}
	if r != Success {
		runtime.UnlockOSThread()
	}
	return before, r
}

// leave does not bother to take a context away from a thread that had none.
func (v *Device) leave(before Context) {
	if before != v.ctx && before != 0 {
		v.d.api.SetCurrent(before)
	}
	runtime.UnlockOSThread()
}

// peers counts who enabled access from one context to another, for a context is
// shared by all Drivers of the process.
var peers = struct {
	sync.Mutex
	uses map[[2]Context]int
}{uses: make(map[[2]Context]int)}

var (
	_ driver.Driver = (*Driver)(nil)
	_ driver.Keeper = (*Driver)(nil)
)

// Enter makes the device's context current on the thread of the calling goroutine, until leave.
func (v *Device) Enter() (leave func(), err error) {
	before, r := v.enter()
	if r != Success {
		return nil, v.fail("Enter", "cuCtxSetCurrent", r)
	}
	return func() { v.leave(before) }, nil
}

var _ driver.Enterer = (*Device)(nil)
