package libcuda

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// Memory is device memory.
type Memory struct {
	v      *Device
	p      driver.Ptr
	n      int
	kind   kind
	pieces []driver.Ptr // spans of borrowed memory that is nobody's here
	from   *mapping     // what was opened
	closed atomic.Bool
}

type kind uint8

const (
	allocated kind = iota
	borrowed
	opened
)

// mapping is another process's allocation, opened on a device.
type mapping struct {
	base driver.Ptr
	size uint64
	uses int
}

// Alloc returns memory on the device.
func (v *Device) Alloc(n int) (driver.Memory, error) {
	const call = "Alloc"
	if n < 0 {
		return nil, invalid(call, v.index, "%d bytes", n)
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	if n == 0 {
		return &Memory{v: v}, nil
	}
	p, r := v.d.api.MemAlloc(n)
	if r != Success {
		return nil, v.failed(call, "cuMemAlloc", r, fmt.Sprintf("%d bytes", n))
	}
	m := &Memory{v: v, p: p, n: n}
	v.d.memory.insert(span{base: p, end: p + driver.Ptr(n), device: v.index})
	v.d.made(m, "memory")
	return m, nil
}

// Borrow returns a Memory for memory of somebody else.
func (v *Device) Borrow(p driver.Ptr, n int) (driver.Memory, error) {
	const call = "Borrow"
	if n < 0 || n == 0 && p != 0 || n > 0 && p == 0 || p+driver.Ptr(n) < p {
		return nil, invalid(call, v.index, "%d bytes at %v", n, p)
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	m := &Memory{v: v, p: p, n: n, kind: borrowed}
	if n == 0 {
		return m, nil
	}
	if s, ok := v.d.memory.overlaps(p, 1); ok && !s.foreign {
		if s, err = v.d.memory.find(p, n); err != nil {
			return nil, &driver.Error{Call: call, Device: v.index, Err: err}
		}
		if s.device != v.index {
			return nil, invalid(call, v.index, "%v is in %v", p, s)
		}
		return m, nil
	}
	var pieces []span
	for at := p; at < p+driver.Ptr(n); {
		api := v.d.api
		kind, r := api.PointerAttribute(pointerMemoryType, at)
		if r != Success {
			return nil, v.failed(call, "cuPointerGetAttribute", r, fmt.Sprintf("nothing at %v", at))
		}
		on, r := api.PointerAttribute(pointerDeviceOrdinal, at)
		if r != Success {
			return nil, v.failed(call, "cuPointerGetAttribute", r, fmt.Sprintf("nothing at %v", at))
		}
		if kind != memoryTypeDevice || Ordinal(on) != v.ord {
			return nil, invalid(call, v.index, "%v is not memory of this device", at)
		}
		base, size, r := api.AddressRange(at)
		if r != Success {
			return nil, v.fail(call, "cuMemGetAddressRange", r)
		}
		s := span{base: base, end: base + driver.Ptr(size), device: v.index, foreign: true}
		if s.end <= at {
			return nil, invalid(call, v.index, "%v is not in %v", at, s)
		}
		pieces = append(pieces, s)
		at = s.end
	}
	for _, s := range pieces {
		v.d.memory.insert(s)
		m.pieces = append(m.pieces, s.base)
	}
	return m, nil
}

// Device returns the device that the memory is on, or was opened for.
func (m *Memory) Device() tensor.Device { return m.v.ID() }

// Len returns the number of bytes.
func (m *Memory) Len() int { return m.n }

// Closed reports whether Close has been called.
func (m *Memory) Closed() bool { return m.closed.Load() }

// Ptr returns the address.
func (m *Memory) Ptr() driver.Ptr { return m.p }

// Address returns the address for package tensor.
func (m *Memory) Address() uint64 { return uint64(m.p) }

// Export returns a handle for other processes.
func (m *Memory) Export() (h driver.MemoryHandle, err error) {
	const call = "Export"
	v := m.v
	if m.n == 0 || m.kind == opened {
		return h, invalid(call, v.index, "only memory that this process allocated has a handle")
	}
	if m.closed.Load() {
		return h, closedError(call, v.index, "memory")
	}
	before, err := v.begin(call)
	if err != nil {
		return h, err
	}
	defer v.leave(before)
	base, size, r := v.d.api.AddressRange(m.p)
	if r != Success {
		return h, v.fail(call, "cuMemGetAddressRange", r)
	}
	offset := uint64(m.p - base)
	if uint64(m.n) > size-offset {
		return h, invalid(call, v.index, "%d bytes at %v lie in several allocations", m.n, m.p)
	}
	id, r := v.d.api.PointerAttribute(pointerBufferID, m.p)
	if r != Success {
		return h, v.fail(call, "cuPointerGetAttribute", r)
	}
	raw, r := v.d.api.IPCGetMem(base)
	if r != Success {
		return h, v.fail(call, "cuIpcGetMemHandle", r)
	}
	return driver.MemoryHandle{Raw: raw, Owner: owner(), UUID: v.info.UUID, ID: id, Offset: offset, Len: uint64(m.n)}, nil
}

// OpenMemory maps what another process exported.
func (v *Device) OpenMemory(h driver.MemoryHandle) (driver.Memory, error) {
	const call = "OpenMemory"
	if h.Owner == owner() {
		return nil, &driver.Error{Call: call, Device: v.index, Err: driver.ErrOwnHandle}
	}
	if h.Len == 0 || h.Offset+h.Len < h.Offset || h.Offset+h.Len > 1<<62 {
		return nil, invalid(call, v.index, "a handle for %d bytes at offset %d", h.Len, h.Offset)
	}
	if err := v.alive(call); err != nil {
		return nil, err
	}
	for _, w := range v.d.devices {
		uuid, r := v.d.api.DeviceUUID(w.ord)
		if r != Success {
			return nil, v.fail(call, "cuDeviceGetUuid", r)
		}
		if uuid != h.UUID || w == v {
			continue
		}
		can, r := v.d.api.CanAccessPeer(v.ord, w.ord)
		if r != Success {
			return nil, v.fail(call, "cuDeviceCanAccessPeer", r)
		}
		if !can {
			return nil, &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w to device %d", driver.ErrPeerAccess, w.index)}
		}
	}
	v.maps.Lock()
	defer v.maps.Unlock()
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	// Memory that was freed and allocated again may have the old handle.
	var key [72]byte
	copy(key[:], h.Raw[:])
	binary.NativeEndian.PutUint64(key[64:], h.ID)
	from := v.opened[key]
	if from == nil {
		from = new(mapping)
		var r Result
		if from.base, r = v.d.api.IPCOpenMem(&h.Raw); r != Success {
			return nil, v.fail(call, "cuIpcOpenMemHandle", r)
		}
		if _, from.size, r = v.d.api.AddressRange(from.base); r != Success {
			v.d.api.IPCCloseMem(from.base)
			return nil, v.fail(call, "cuMemGetAddressRange", r)
		}
	}
	if h.Offset > from.size || h.Len > from.size-h.Offset {
		if from.uses == 0 {
			v.d.api.IPCCloseMem(from.base)
		}
		return nil, invalid(call, v.index, "a handle for %d bytes at offset %d of memory of %d bytes", h.Len, h.Offset, from.size)
	}
	if from.uses == 0 {
		v.opened[key] = from
		v.d.memory.insert(span{base: from.base, end: from.base + driver.Ptr(from.size), device: v.index})
	}
	from.uses++
	m := &Memory{v: v, p: from.base + driver.Ptr(h.Offset), n: int(h.Len), kind: opened, from: from}
	v.d.made(m, "mapping")
	return m, nil
}

// Close frees the memory, or ends the mapping. CUDA may wait in it for whatever
// the device is doing.
func (m *Memory) Close() error {
	if m.n == 0 || m.closed.Swap(true) {
		return nil
	}
	const call = "Close"
	v := m.v
	switch m.kind {
	case borrowed:
		for _, p := range m.pieces {
			v.d.memory.remove(p, true)
		}
		return nil
	case opened:
		v.d.forget(m)
		v.maps.Lock()
		defer v.maps.Unlock()
		if m.from.uses--; m.from.uses > 0 {
			return nil
		}
		for key, from := range v.opened {
			if from == m.from {
				delete(v.opened, key)
			}
		}
		v.d.memory.remove(m.from.base, false)
	default:
		v.d.forget(m)
		v.d.memory.remove(m.p, false)
	}
	if v.lost.Load() != nil {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	if m.kind == opened {
		return v.fail(call, "cuIpcCloseMemHandle", v.d.api.IPCCloseMem(m.from.base))
	}
	return v.fail(call, "cuMemFree", v.d.api.MemFree(m.p))
}

// HostMemory is page-locked memory.
type HostMemory struct {
	v          *Device // whose context the calls are made in
	p          driver.Ptr
	b          []byte
	registered bool
	closed     atomic.Bool
}

// AllocHost returns page-locked memory.
func (d *Driver) AllocHost(n int) (driver.HostMemory, error) {
	const call = "AllocHost"
	if n < 0 {
		return nil, invalid(call, -1, "%d bytes", n)
	}
	v, err := d.hostDevice(call)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return &HostMemory{v: v}, nil
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	p, r := d.api.HostAlloc(n)
	if r != Success {
		return nil, v.failed(call, "cuMemHostAlloc", r, fmt.Sprintf("%d bytes", n))
	}
	if err := v.sameAddress(call, p); err != nil {
		d.api.HostFree(p)
		return nil, err
	}
	h := &HostMemory{v: v, p: p, b: bytesAt(p, n)}
	clear(h.b)
	d.memory.insert(span{base: p, end: p + driver.Ptr(n), device: -1})
	d.made(h, "page-locked memory")
	return h, nil
}

// RegisterHost makes memory of the process page-locked.
func (d *Driver) RegisterHost(b []byte) (driver.HostMemory, error) {
	const call = "RegisterHost"
	if len(b) == 0 {
		return nil, invalid(call, -1, "no bytes")
	}
	p := driver.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	if p%4 != 0 {
		return nil, invalid(call, -1, "memory at %v: want a multiple of 4", p)
	}
	if s, ok := d.memory.overlaps(p, len(b)); ok {
		return nil, invalid(call, -1, "%d bytes at %v: %v is page-locked already", len(b), p, s)
	}
	v, err := d.hostDevice(call)
	if err != nil {
		return nil, err
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	if r := register(d.api, p, len(b)); r != Success {
		return nil, v.failed(call, "cuMemHostRegister", r, fmt.Sprintf("%d bytes", len(b)))
	}
	if err := v.sameAddress(call, p); err != nil {
		unregister(d.api, p)
		return nil, err
	}
	h := &HostMemory{v: v, p: p, b: b[:len(b):len(b)], registered: true}
	d.memory.insert(span{base: p, end: p + driver.Ptr(len(b)), device: -1})
	d.made(h, "registered memory")
	return h, nil
}

// registrations are the ranges that this process's Drivers have registered. CUDA knows one
// registration of a range, whichever Driver made it.
var registrations = struct {
	sync.Mutex
	by map[driver.Ptr]*registration
}{by: make(map[driver.Ptr]*registration)}

type registration struct{ bytes, uses int }

// register registers a range, or shares another Driver's registration of it.
func register(api API, p driver.Ptr, n int) Result {
	registrations.Lock()
	defer registrations.Unlock()
	if r := registrations.by[p]; r != nil && r.bytes == n {
		r.uses++
		return Success
	}
	r := api.HostRegister(p, n)
	if r == Success {
		registrations.by[p] = &registration{bytes: n, uses: 1}
	}
	return r
}

// unregister ends one use of a registration, the last one with it.
func unregister(api API, p driver.Ptr) Result {
	registrations.Lock()
	defer registrations.Unlock()
	if r := registrations.by[p]; r.uses > 1 {
		r.uses--
		return Success
	}
	delete(registrations.by, p)
	return api.HostUnregister(p)
}

// sameAddress returns an error unless devices reach page-locked memory at the
// process's own address, as they do on Linux.
func (v *Device) sameAddress(call string, p driver.Ptr) error {
	q, r := v.d.api.HostDevicePointer(p)
	if r != Success {
		return v.fail(call, "cuMemHostGetDevicePointer", r)
	}
	if q != p {
		return invalid(call, v.index, "the device has page-locked memory %v at another address, %v", p, q)
	}
	return nil
}

// bytesAt returns the n bytes at p, which are not Go's.
func bytesAt(p driver.Ptr, n int) []byte {
	u := uintptr(p)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&u)), n)
}

// Ptr returns the address for devices.
func (h *HostMemory) Ptr() driver.Ptr { return h.p }

// Len returns the number of bytes.
func (h *HostMemory) Len() int { return len(h.b) }

// Bytes returns the memory.
func (h *HostMemory) Bytes() []byte { return h.b }

// Load32 reads a word.
func (h *HostMemory) Load32(offset int) uint32 { return driver.LoadWord(h.b, offset) }

// Store32 writes a word.
func (h *HostMemory) Store32(offset int, v uint32) { driver.StoreWord(h.b, offset, v) }

// Close frees the memory, or ends the registration. CUDA may wait in it for
// whatever the devices are doing.
func (h *HostMemory) Close() error {
	if len(h.b) == 0 || h.closed.Swap(true) {
		return nil
	}
	const call = "Close"
	v := h.v
	v.d.forget(h)
	v.d.memory.remove(h.p, false)
	if v.lost.Load() != nil {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	if h.registered {
		return v.fail(call, "cuMemHostUnregister", unregister(v.d.api, h.p))
	}
	return v.fail(call, "cuMemFreeHost", v.d.api.HostFree(h.p))
}

var (
	_ driver.Memory     = (*Memory)(nil)
	_ driver.HostMemory = (*HostMemory)(nil)
)
