package libcuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// Device is a driver.Device.
type Device struct {
	d     *Driver
	index int
	ord   Ordinal
	given Context // the program's own, 0 for the primary one
	lost  atomic.Pointer[error]
	words driver.Once
	ready atomic.Bool // ctx and info are set

	opening sync.Mutex  // held while open makes the device ready
	usable  atomic.Bool // open has: images that are kept are loaded, other devices reached

	mu    sync.Mutex // for open, close, EnablePeer and DisablePeer
	ctx   Context
	info  driver.Info
	peers []atomic.Bool // by device; read by operations, which must not wait for mu
	near  []atomic.Bool // likewise: those with which copies go directly
	users []int         // how often EnablePeer holds, by device

	maps   sync.Mutex // CUDA may wait for the device while it is held
	opened map[[72]byte]*mapping

	spare    sync.Mutex
	bounces  []bounce     // buffers that no stream has
	buffers  []driver.Ptr // all
	borrowed map[StreamHandle]*history

	events  pool
	streams atomic.Int32 // that were made and not closed

	loading sync.Mutex // held while kernels that stay are loaded
	stays   map[*kept]*Module
}

// open makes the device ready, once: it retains the context, loads the images that are
// kept, and gives devices access to each other. A caller that comes meanwhile waits. It
// could otherwise have streams wait for words, for which CUDA may wait in the rest of open.
func (v *Device) open(call string) error {
	if v.usable.Load() {
		return nil
	}
	v.opening.Lock()
	defer v.opening.Unlock()
	if v.usable.Load() {
		return nil
	}
	if err := v.retain(call); err != nil {
		return err
	}
	v.loadKept()
	v.meet(call)
	v.usable.Store(true)
	return nil
}

func (v *Device) retain(call string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ready.Load() {
		return nil
	}
	api := v.d.api
	unified, r := api.DeviceAttribute(attrUnifiedAddressing, v.ord)
	if r != Success {
		return v.fail(call, "cuDeviceGetAttribute", r)
	}
	if unified == 0 {
		return &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w: it has no unified addressing", driver.ErrNoDevice)}
	}
	info, err := v.describe(call)
	if err != nil {
		return err
	}
	ctx := v.given
	if ctx == 0 {
		if ctx, r = api.PrimaryRetain(v.ord); r != Success {
			return v.fail(call, "cuDevicePrimaryCtxRetain", r)
		}
	}
	v.ctx, v.info = ctx, info
	v.peers, v.near = make([]atomic.Bool, len(v.d.devices)), make([]atomic.Bool, len(v.d.devices))
	v.users = make([]int, len(v.d.devices))
	v.opened = make(map[[72]byte]*mapping)
	v.ready.Store(true)
	return nil
}

// forgetPeers takes all access to other devices back. There is nothing to take back from a device
// that is lost.
func (v *Device) forgetPeers() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var errs []error
	for _, access := range [][]atomic.Bool{v.peers, v.near} {
		for peer := range access {
			if access[peer].Swap(false) {
				if err := v.release("Close", v.d.devices[peer]); !errors.Is(err, driver.ErrDeviceLost) {
					errs = append(errs, err)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// close gives the context back.
func (v *Device) close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.usable.Store(false)
	if !v.ready.Swap(false) {
		return nil
	}
	var errs []error
	if v.lost.Load() == nil {
		errs = append(errs, v.events.drain(v), v.freeBounces(), v.unloadKept())
	}
	if v.given == 0 {
		if r := v.d.api.PrimaryRelease(v.ord); r != Success && v.lost.Load() == nil {
			errs = append(errs, v.fail("Close", "cuDevicePrimaryCtxRelease", r))
		}
	}
	return errors.Join(errs...)
}

func (v *Device) describe(call string) (driver.Info, error) {
	api := v.d.api
	var err error
	attr := func(a Attribute) int {
		n, r := api.DeviceAttribute(a, v.ord)
		if r != Success && err == nil {
			err = v.fail(call, "cuDeviceGetAttribute", r)
		}
		return n
	}
	i := driver.Info{
		Major: attr(attrMajor), Minor: attr(attrMinor),
		Multiprocessors: attr(attrMultiprocessors), CopyEngines: attr(attrCopyEngines),
		ThreadsPerBlock: attr(attrMaxThreadsPerBlock), SharedMemory: attr(attrSharedOptin), L2: attr(attrL2),
		StreamValues: api.StreamValuesV2() || attr(attrStreamMemOps) != 0,
		Cooperative:  attr(attrCooperative) != 0,
		NUMA:         -1,
	}
	var r Result
	if i.Name, r = api.DeviceName(v.ord); r != Success {
		return i, v.fail(call, "cuDeviceGetName", r)
	}
	if i.UUID, r = api.DeviceUUID(v.ord); r != Success {
		return i, v.fail(call, "cuDeviceGetUuid", r)
	}
	if i.Memory, r = api.DeviceTotalMem(v.ord); r != Success {
		return i, v.fail(call, "cuDeviceTotalMem", r)
	}
	if i.Driver, r = api.Version(); r != Success {
		return i, v.fail(call, "cuDriverGetVersion", r)
	}
	if i.PCI, r = api.DevicePCIBusID(v.ord); r == Success {
		i.PCI = strings.ToLower(i.PCI)
		i.NUMA = numaNode(i.PCI)
	}
	return i, err
}

// numaNode returns the node of a PCI device, -1 if the system does not say.
func numaNode(pci string) int {
	b, err := os.ReadFile("/sys/bus/pci/devices/" + pci + "/numa_node")
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return -1
	}
	return n
}

// fail returns the error for a function that returned r, and remembers one that
// ends the device.
func (v *Device) fail(call, function string, r Result) error {
	return v.failed(call, function, r, "")
}

func (v *Device) failed(call, function string, r Result, why string) error {
	if r == Success {
		return nil
	}
	err := driver.ResultError(call, v.index, function, int(r), v.d.api.ErrorName(r))
	if errors.Is(err, driver.ErrDeviceLost) {
		v.lost.CompareAndSwap(nil, &err)
	}
	if e, ok := err.(*driver.Error); ok && why != "" {
		e.Err = fmt.Errorf("%w: %s", e.Err, why)
	}
	return err
}

// alive returns why the device cannot be used.
func (v *Device) alive(call string) error {
	if v.d.closed.Load() {
		return closedError(call, v.index, "driver")
	}
	if p := v.lost.Load(); p != nil {
		var first *driver.Error
		if !errors.As(*p, &first) {
			return *p
		}
		return &driver.Error{Call: call, Device: v.index, Func: first.Func, Code: first.Code, Name: first.Name, Err: first.Err}
	}
	return nil
}

// begin is alive and enter; the caller calls leave unless there was an error.
func (v *Device) begin(call string) (Context, error) {
	if err := v.alive(call); err != nil {
		return 0, err
	}
	before, r := v.enter()
	if r != Success {
		return 0, v.fail(call, "cuCtxSetCurrent", r)
	}
	return before, nil
}

// ID returns the device as tensors name it.
func (v *Device) ID() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: v.index} }

// Info returns the device's properties.
func (v *Device) Info() driver.Info { return v.info }

// Queues implements driver.Queuer. Where nobody has asked for a number, copies have
// four.
func (v *Device) Queues() (streams, queues int) {
	return int(v.streams.Load()), cmp.Or(v.d.api.Queues(), 4)
}

// Context returns the device's context.
func (v *Device) Context() Context { return v.ctx }

// SeesWords has the answer of this device, for the process.
func (v *Device) SeesWords() *driver.Once { return &v.words }

// MemInfo returns how much of the device's memory is free.
func (v *Device) MemInfo() (free, total uint64, err error) {
	const call = "MemInfo"
	before, err := v.begin(call)
	if err != nil {
		return 0, 0, err
	}
	defer v.leave(before)
	free, total, r := v.d.api.MemInfo()
	return free, total, v.fail(call, "cuMemGetInfo", r)
}

// peer returns another device by its number.
func (v *Device) peer(call string, i int) (*Device, error) {
	if err := v.alive(call); err != nil {
		return nil, err
	}
	if i < 0 || i >= len(v.d.devices) || i == v.index {
		return nil, invalid(call, v.index, "no peer %d among %d devices", i, len(v.d.devices))
	}
	return v.d.devices[i], nil
}

// EnablePeer lets kernels of this device use the memory of another.
func (v *Device) EnablePeer(peer int) error {
	const call = "EnablePeer"
	p, err := v.peer(call, peer)
	if err != nil {
		return err
	}
	if err := p.open(call); err != nil {
		return err
	}
	v.mu.Lock()
	v.users[peer]++
	v.mu.Unlock()
	if err = v.enable(call, p, v.peers); err != nil {
		v.mu.Lock()
		v.users[peer]--
		v.mu.Unlock()
	}
	return err
}

// meet gives this device and those that have a context already access to each other's memory,
// where they can have it. Without it CUDA takes copies between two devices through the host.
// Copies of one stream may wait there for another's. And it has to be given early: later, when
// streams wait for words, CUDA may wait for these.
func (v *Device) meet(call string) {
	for _, p := range v.d.devices {
		if p == v || !p.ready.Load() {
			continue
		}
		// Copies do without what cannot be had.
		if v.enable(call, p, v.near) == nil {
			_ = p.enable(call, v, p.near)
		}
	}
}

// enable gives kernels and copies of this device access to the memory of another,
// and notes it.
func (v *Device) enable(call string, p *Device, access []atomic.Bool) error {
	can, r := v.d.api.CanAccessPeer(v.ord, p.ord)
	if r != Success {
		return v.fail(call, "cuDeviceCanAccessPeer", r)
	}
	if !can {
		return &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w to device %d", driver.ErrPeerAccess, p.index)}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if access[p.index].Load() {
		return nil
	}
	peers.Lock()
	defer peers.Unlock()
	key := [2]Context{v.ctx, p.ctx}
	if peers.uses[key] == 0 {
		before, err := v.begin(call)
		if err != nil {
			return err
		}
		r := v.d.api.EnablePeer(p.ctx)
		v.leave(before)
		switch r {
		case Success:
		case errPeerEnabled:
			// Another library's: it stays when this one is done.
			peers.uses[key]++
		default:
			return v.fail(call, "cuCtxEnablePeerAccess", r)
		}
	}
	peers.uses[key]++
	access[p.index].Store(true)
	return nil
}

// DisablePeer takes one EnablePeer back. The access ends with the last user in the process.
func (v *Device) DisablePeer(peer int) error {
	const call = "DisablePeer"
	p, err := v.peer(call, peer)
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.users[peer] = max(v.users[peer]-1, 0)
	if v.users[peer] > 0 || !v.peers[peer].Swap(false) {
		return nil
	}
	return v.release(call, p)
}

// release counts a use of a peer down; the caller holds v.mu.
func (v *Device) release(call string, p *Device) error {
	peers.Lock()
	defer peers.Unlock()
	key := [2]Context{v.ctx, p.ctx}
	if peers.uses[key]--; peers.uses[key] > 0 {
		return nil
	}
	delete(peers.uses, key)
	if v.lost.Load() != nil {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	if r = v.d.api.DisablePeer(p.ctx); r == errPeerNot {
		r = Success
	}
	return v.fail(call, "cuCtxDisablePeerAccess", r)
}

// reaches reports whether kernels and words of this device may use memory of
// device i.
func (v *Device) reaches(i int) bool {
	return i == v.index || i < 0 || v.peers[i].Load()
}

var _ driver.Device = (*Device)(nil)
