package sim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// Driver is one process of a Machine. It is a driver.Driver, and an Observer too.
//
// The vector clocks see the process's goroutines as one: what one of them has
// waited for, all have. Go's race detector watches over them.
type Driver struct {
	m       *Machine
	name    string
	owner   [16]byte
	host    *agent
	devices []Device
	alone   bool
	abort   chan struct{} // closed: waits end, operations do not run
	group   sync.WaitGroup
	closed  bool // guarded by m.mu

	mu         sync.Mutex
	clock      clock  // what the host has seen
	tick       uint32 // the host's current step
	published  bool   // somebody has seen the current step, so the next access begins another
	table      []mapping
	streams    map[*stream]bool
	byHandle   map[uintptr]*stream
	nextHandle uintptr
	retired    clock // of streams that were closed and have ended
	openEvents map[*Event]bool
	graphs     map[*Graph]bool
	stats      Stats
	done       bool
}

// Machine returns the machine that the process runs on.
func (d *Driver) Machine() *Machine { return d.m }

// Name is "sim".
func (d *Driver) Name() string { return "sim" }

// Count returns the number of devices.
func (d *Driver) Count() int { return len(d.devices) }

func invalid(call string, device int, format string, args ...any) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrInvalid}, args...)...)}
}

// HasKernel reports whether modules can have a kernel of that name. A real driver
// takes any.
func (d *Driver) HasKernel(name string) bool {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	return d.m.kernels[name] != nil
}

// Device returns device i.
func (d *Driver) Device(i int) (driver.Device, error) {
	if i < 0 || i >= len(d.devices) {
		return nil, invalid("Device", -1, "no device %d among %d", i, len(d.devices))
	}
	if _, err := d.enter("Device", i, nil); err != nil {
		return nil, err
	}
	return &d.devices[i], nil
}

// Link tells how devices reach each other.
func (d *Driver) Link(from, to int) (driver.Link, error) {
	if n := len(d.devices); from < 0 || from >= n || to < 0 || to >= n {
		return driver.Link{}, invalid("Link", -1, "no devices %d and %d among %d", from, to, n)
	}
	t := d.m.topo
	l := driver.Link{Peer: t.peer(from, to), Atomics: t.peer(from, to)}
	if t.Rank != nil {
		l.Rank = t.Rank(from, to)
	}
	return l, nil
}

// seen joins c into what the host has seen.
func (d *Driver) seen(c clock) {
	d.mu.Lock()
	d.clock = d.clock.join(c)
	d.mu.Unlock()
}

// publish returns the host's clock for an operation, a word or another process;
// the caller holds d.mu.
func (d *Driver) publish() clock {
	d.clock = d.clock.with(d.host.id, d.tick)
	d.published = true
	return d.clock
}

// access logs what the host does; the caller holds d.mu.
func (d *Driver) access(what *op, spans []span) {
	if d.published {
		d.tick++
		d.published = false
	}
	d.host.add(&entry{op: what, tick: d.tick, clock: d.clock, spans: spans})
}

// HostAccess tells that the host is about to use page-locked memory: the checker
// finds streams' operations that are not ordered against it.
func (d *Driver) HostAccess(what string, access ...driver.Access) {
	o := &op{kind: opHost, name: what}
	o.where()
	d.mu.Lock()
	defer d.mu.Unlock()
	spans, err := d.resolve(what, -1, access)
	if err != nil {
		d.m.findings.add(&Lifetime{What: err.Error(), Where: o.caller()})
		return
	}
	o.spans = spans // the timeline's cost
	d.access(o, spans)
}

// meeting is one time that the hosts of a group meet.
type meeting struct {
	group string
	n     int
}

// HostMeets orders what a host does after a meeting after what the others did before.
func (d *Driver) HostMeets(group string, n int) (met func()) {
	d.mu.Lock()
	own := d.publish()
	d.mu.Unlock()
	k := meeting{group, n}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	d.m.meetings[k] = d.m.meetings[k].join(own)
	delete(d.m.meetings, meeting{group, n - 2}) // all have come to the next one since
	return func() {
		d.m.mu.Lock()
		all := d.m.meetings[k]
		d.m.mu.Unlock()
		d.seen(all)
	}
}

// streamClocks returns what the process's idle streams have done.
func (d *Driver) streamClocks() clock {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.retired
	for s := range d.streams {
		// The stream has done all that it was given, so its clock stands still.
		if s.done.Load() == s.enq.Load() {
			c = c.join(s.clock.with(s.ag.id, s.tick))
		}
	}
	return c
}

// Close closes the process. It waits until all that was enqueued has ended. Its error lists what
// is still open, and the operations that were stuck. Closing the Driver of Open closes the
// machine and returns its findings as well.
func (d *Driver) Close() error {
	if d.alone {
		return d.m.Close()
	}
	d.mu.Lock()
	done := d.done
	d.mu.Unlock()
	if done {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	return errors.Join(d.m.settle(ctx, d), d.finish(ctx))
}

// finish ends the process's streams and returns what is still alive.
func (d *Driver) finish(ctx context.Context) error {
	d.mu.Lock()
	if d.done {
		d.mu.Unlock()
		return nil
	}
	d.done = true
	d.mu.Unlock()
	errs := d.leaks()

	d.m.mu.Lock()
	d.closed = true
	d.m.mu.Unlock()
	close(d.abort)
	d.mu.Lock()
	for s := range d.streams {
		s.push(&op{kind: opEnd})
	}
	d.mu.Unlock()
	ended := make(chan struct{})
	go func() { d.group.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-ctx.Done():
		return errors.Join(append(errs, errors.New("sim: a kernel still runs; it should end when Run.Aborted is true"))...)
	}
	d.mu.Lock()
	left := d.table
	d.table = nil
	d.mu.Unlock()
	for _, mp := range left {
		d.unmap(mp, false)
	}
	return errors.Join(errs...)
}

// leaks returns what is alive.
func (d *Driver) leaks() []error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	leak := func(what string, o *op) {
		errs = append(errs, &Leak{Process: d.name, What: what, Where: o.caller()})
	}
	for _, mp := range d.table {
		leak(mp.String(), mp.made)
	}
	for g := range d.graphs {
		leak(fmt.Sprintf("graph of %d operations", len(g.ops)), g.made)
	}
	for s := range d.streams {
		if !s.closed && s.handle != 0 {
			leak("stream "+s.ag.name, s.made)
		}
	}
	for e := range d.openEvents {
		leak("event of "+e.from(), e.made)
	}
	for i := range d.devices {
		dev := &d.devices[i]
		for p, uses := range dev.peers {
			if uses > 0 {
				leak(fmt.Sprintf("peer access of device %d to device %d", i, p), dev.enabled[p])
			}
		}
		for mod := range dev.modules {
			leak(fmt.Sprintf("module on device %d", i), mod.made)
		}
	}
	return errs
}

// Device is one GPU as a process sees it.
type Device struct {
	d     *Driver
	index int
	lost  atomic.Pointer[error]
	gone  chan struct{} // closed with lost

	// Guarded by d.mu.
	peers   []int // how often EnablePeer holds
	enabled map[int]*op
	modules map[*Module]bool
	kept    map[*text]bool
	queues  []chan struct{} // of Config.Queues: closed when the last operation has ended
	made    int             // streams

	words driver.Once
}

// SeesWords has the answer of this device.
func (v *Device) SeesWords() *driver.Once { return &v.words }

// ID returns the device as tensors name it: cuda.
func (v *Device) ID() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: v.index} }

// Info returns made-up properties.
func (v *Device) Info() driver.Info {
	i := driver.Info{
		Name: "simulated GPU", PCI: fmt.Sprintf("0000:%02x:00.0", v.index+1), Major: 9, Minor: 0,
		Multiprocessors: multiprocessors, CopyEngines: 3, Memory: v.d.m.cfg.Memory,
		ThreadsPerBlock: 1024, SharedMemory: mostShared, L2: 50 << 20, NUMA: -1,
		StreamValues: true, Cooperative: true, Driver: 12040,
	}
	copy(i.UUID[:], fmt.Sprintf("sim-gpu-%08d", v.index))
	return i
}

const (
	multiprocessors = 132
	mostShared      = 227 << 10
)

// MemInfo returns how much of the device's memory is free.
func (v *Device) MemInfo() (free, total uint64, err error) {
	if err := v.enter("MemInfo"); err != nil {
		return 0, 0, err
	}
	m := v.d.m
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cfg.Memory - m.used[v.index], m.cfg.Memory, nil
}

// enter begins a call on the device.
func (v *Device) enter(call string) error {
	if _, err := v.d.enter(call, v.index, nil); err != nil {
		return err
	}
	return v.broken(call)
}

// broken returns the error of a lost device.
func (v *Device) broken(call string) error {
	if cause := v.lost.Load(); cause != nil {
		return &driver.Error{Call: call, Device: v.index, Err: *cause}
	}
	return nil
}

func (v *Device) lose(cause error) {
	err := driver.ErrDeviceLost
	if cause != nil {
		err = fmt.Errorf("%w: %w", driver.ErrDeviceLost, cause)
	}
	if v.lost.CompareAndSwap(nil, &err) {
		close(v.gone)
	}
}

// EnablePeer lets kernels of this device use the memory of another.
func (v *Device) EnablePeer(peer int) error {
	const call = "EnablePeer"
	if err := v.enter(call); err != nil {
		return err
	}
	if peer < 0 || peer >= len(v.d.devices) || peer == v.index {
		return invalid(call, v.index, "no peer %d", peer)
	}
	if !v.d.m.topo.peer(v.index, peer) {
		return &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w to device %d", driver.ErrPeerAccess, peer)}
	}
	o := &op{}
	o.where()
	v.d.mu.Lock()
	defer v.d.mu.Unlock()
	if v.peers[peer]++; v.peers[peer] == 1 {
		v.d.stats.Peers++
		if v.enabled == nil {
			v.enabled = make(map[int]*op)
		}
		v.enabled[peer] = o
	}
	return nil
}

// DisablePeer takes one EnablePeer back.
func (v *Device) DisablePeer(peer int) error {
	if err := v.enter("DisablePeer"); err != nil {
		return err
	}
	if peer < 0 || peer >= len(v.d.devices) || peer == v.index {
		return invalid("DisablePeer", v.index, "no peer %d", peer)
	}
	v.d.mu.Lock()
	defer v.d.mu.Unlock()
	if v.peers[peer] > 0 {
		if v.peers[peer]--; v.peers[peer] == 0 {
			v.d.stats.Peers--
		}
	}
	return nil
}

// Slice returns device memory's bytes as elements, for kernels and tests. The
// length of b must be a multiple of the element's size.
func Slice[T tensor.Element](b []byte) []T {
	var zero T
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

var (
	_ driver.Driver   = (*Driver)(nil)
	_ driver.Observer = (*Driver)(nil)
	_ driver.Keeper   = (*Driver)(nil)
	_ driver.Device   = (*Device)(nil)
)
