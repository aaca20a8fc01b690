package sim

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// firstAddress is where the address space begins. Addresses are not used again,
// so a use after free is found as such.
const firstAddress driver.Ptr = 0x7f00_0000_0000

// page is what allocations are apart, and aligned to.
const page = 4096

// backing is memory that exists: an allocation of a device or of the host.
// Processes map it.
type backing struct {
	id     uint64
	owner  [16]byte // of the process that made it; zero where it is not shown to others
	device int      // -1: the host's
	bytes  []byte
	host   bool
	freed  atomic.Pointer[op] // who freed it
	closed atomic.Int64       // mappings of other processes that are closed
	close  func(unmap bool)   // removes a file, and unmaps it; nil for Go memory
	refs   int                // registrations; guarded by Machine.mu
	shown  clock              // what its process had seen when it exported it; guarded by Machine.mu
	left   clock              // what other processes had seen when they closed their mappings; guarded by Machine.mu

	words atomic.Pointer[[]atomic.Pointer[wordPage]]
}

// mapping is memory in a process's address space.
type mapping struct {
	base     driver.Ptr
	len      int
	b        *backing
	offset   int // of the mapping within the backing
	device   int // the device it was allocated on or opened for; -1: the host
	opened   bool
	borrowed bool
	made     *op
}

func (mp mapping) String() string {
	switch {
	case mp.opened:
		return fmt.Sprintf("mapping of %d bytes on device %d", mp.len, mp.device)
	case mp.device < 0:
		return fmt.Sprintf("page-locked memory of %d bytes", mp.len)
	}
	return fmt.Sprintf("memory of %d bytes on device %d", mp.len, mp.device)
}

// span is a range of memory that an operation uses.
type span struct {
	b        *backing
	off, len int
	mode     driver.Mode
	ptr      driver.Ptr
	device   int // of the mapping
}

func (s span) bytes() []byte { return s.b.bytes[s.off : s.off+s.len : s.off+s.len] }

// find returns the mapping that has n bytes at p; the caller holds d.mu.
func (d *Driver) find(p driver.Ptr, n int) (mapping, error) {
	i, found := slices.BinarySearchFunc(d.table, p, func(mp mapping, p driver.Ptr) int {
		switch {
		case mp.base < p:
			return -1
		case mp.base > p:
			return 1
		}
		return 0
	})
	if !found {
		i--
	}
	if i < 0 || p-d.table[i].base >= driver.Ptr(d.table[i].len) {
		return mapping{}, fmt.Errorf("%w: no memory at %v", driver.ErrInvalid, p)
	}
	mp := d.table[i]
	if left := mp.len - int(p-mp.base); n > left {
		return mapping{}, fmt.Errorf("%w: %d bytes at %v, %d beyond the end of the %v", driver.ErrInvalid, n, p, n-left, mp)
	}
	return mp, nil
}

// resolve finds the memory that accesses are to. Kernels of a device must be
// able to reach it; -1 stands for a copy engine or the host, which reach
// everything. The caller holds d.mu.
func (d *Driver) resolve(call string, kernelOn int, access []driver.Access) ([]span, error) {
	spans := make([]span, 0, len(access))
	for _, a := range access {
		if a.Len == 0 {
			continue
		}
		mp, err := d.find(a.Ptr, a.Len)
		if err != nil {
			return nil, &driver.Error{Call: call, Device: kernelOn, Err: err}
		}
		if mp.device >= 0 && kernelOn >= 0 && kernelOn != mp.device && d.devices[kernelOn].peers[mp.device] == 0 {
			return nil, &driver.Error{Call: call, Device: kernelOn, Err: fmt.Errorf(
				"%w: a kernel that %v of device %d needs EnablePeer(%d)", driver.ErrPeerAccess, a, mp.device, mp.device)}
		}
		spans = append(spans, span{mp.b, mp.offset + int(a.Ptr-mp.base), a.Len, a.Mode, a.Ptr, mp.device})
	}
	return spans, nil
}

// insert adds a mapping at a new address.
func (d *Driver) insert(mp mapping) mapping {
	d.m.mu.Lock()
	mp.base = d.m.nextAddr
	d.m.nextAddr += driver.Ptr((mp.len+page-1)/page*page + page)
	d.m.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	i, _ := slices.BinarySearchFunc(d.table, mp.base, func(x mapping, p driver.Ptr) int {
		if x.base < p {
			return -1
		}
		return 1
	})
	d.table = slices.Insert(d.table, i, mp)
	return mp
}

// remove takes a mapping out of the address space; false if it was not there.
func (d *Driver) remove(mp mapping, what *op) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.table, func(x mapping) bool { return x.base == mp.base })
	if i < 0 {
		return false
	}
	d.table = slices.Delete(d.table, i, i+1)
	switch {
	case mp.opened:
		d.stats.Mappings--
		what.only = d
	case mp.device < 0:
		d.stats.Hosts--
		d.stats.HostBytes -= int64(mp.len)
		what.only = d
	default:
		d.stats.Memories--
		d.stats.DeviceBytes -= int64(mp.len)
		mp.b.freed.Store(what)
	}
	// Nothing may be using the memory: to the checker that is a write of all of it.
	d.access(what, []span{{mp.b, mp.offset, mp.len, driver.Write, mp.base, mp.device}})
	return true
}

// unmap frees the memory of a mapping that is gone. A file's bytes may be kept for operations
// that still use them. The caller may not hold m.mu.
func (d *Driver) unmap(mp mapping, keep bool) {
	m := d.m
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case mp.opened:
		if mp.b.close != nil {
			mp.b.close(!keep)
		}
	case mp.device < 0:
		if mp.b.refs--; mp.b.refs == 0 && len(mp.b.bytes) > 0 {
			delete(m.hostMem, unsafe.SliceData(mp.b.bytes))
		}
	default:
		m.used[mp.device] -= uint64(mp.len)
		delete(m.exports, exportKey{mp.b.owner, mp.b.id})
		if mp.b.close != nil {
			mp.b.close(!keep)
		}
	}
}

// aligned returns n zero bytes, aligned to 256.
func aligned(n int) []byte {
	b := make([]byte, n+255)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & 255)
	return b[skip : skip+n : skip+n]
}

// mark writes what nobody should rely on into fresh or freed memory. Of large
// memory only the ends, which takes no room for the rest.
func (m *Machine) mark(b []byte, with byte) {
	const most = 64 << 10
	if len(b) > 2*most {
		m.fill(b[:most], with)
		b = b[len(b)-most:]
	}
	m.fill(b, with)
}

// Alloc returns memory on the device. Its contents come from the seed.
func (v *Device) Alloc(n int) (driver.Memory, error) {
	const call = "Alloc"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, invalid(call, v.index, "%d bytes", n)
	}
	o := &op{kind: opAlloc, name: "Alloc"}
	o.where()
	if n == 0 {
		return &Memory{d: v.d, mp: mapping{device: v.index, made: o}}, nil
	}
	m := v.d.m
	m.mu.Lock()
	if free := m.cfg.Memory - m.used[v.index]; uint64(n) > free {
		m.mu.Unlock()
		return nil, &driver.Error{Call: call, Device: v.index, Func: "sim", Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY",
			Err: fmt.Errorf("%w: %d bytes wanted, %d of %d free", driver.ErrOutOfMemory, n, free, m.cfg.Memory)}
	}
	m.used[v.index] += uint64(n)
	m.nextID++
	b := &backing{id: m.nextID, owner: v.d.owner, device: v.index}
	m.mu.Unlock()
	if m.cfg.Dir == "" {
		b.bytes = aligned(n)
	} else {
		bytes, unmap, err := createShared(m.cfg.Dir, sharedName(b.owner, b.id), n)
		if err != nil {
			m.mu.Lock()
			m.used[v.index] -= uint64(n)
			m.mu.Unlock()
			return nil, &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w: %w", driver.ErrOutOfMemory, err)}
		}
		b.bytes, b.close = bytes, unmap
	}
	r := rand.New(rand.NewPCG(m.cfg.Seed, b.id))
	m.mark(b.bytes, byte(r.Uint32())|1)
	mp := v.d.insert(mapping{len: n, b: b, device: v.index, made: o})
	v.d.count(func(s *Stats) { s.Memories++; s.MadeMemories++; s.DeviceBytes += int64(n) })
	return &Memory{d: v.d, mp: mp}, nil
}

func (d *Driver) count(f func(*Stats)) {
	d.mu.Lock()
	f(&d.stats)
	d.mu.Unlock()
}

// Borrow returns a Memory for memory that is there already.
func (v *Device) Borrow(p driver.Ptr, n int) (driver.Memory, error) {
	const call = "Borrow"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	if n < 0 || n == 0 && p != 0 {
		return nil, invalid(call, v.index, "%d bytes at %v", n, p)
	}
	if n == 0 {
		return &Memory{d: v.d, mp: mapping{device: v.index, borrowed: true}}, nil
	}
	v.d.mu.Lock()
	defer v.d.mu.Unlock()
	mp, err := v.d.find(p, n)
	if err != nil {
		return nil, &driver.Error{Call: call, Device: v.index, Err: err}
	}
	if mp.device != v.index {
		return nil, invalid(call, v.index, "%v is in %v", p, mp)
	}
	mp.offset += int(p - mp.base)
	mp.base, mp.len, mp.borrowed = p, n, true
	return &Memory{d: v.d, mp: mp}, nil
}

// OpenMemory maps what another process exported.
func (v *Device) OpenMemory(h driver.MemoryHandle) (driver.Memory, error) {
	const call = "OpenMemory"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	if h.Owner == v.d.owner {
		return nil, &driver.Error{Call: call, Device: v.index, Err: driver.ErrOwnHandle}
	}
	var owner [16]byte
	copy(owner[:], h.Raw[:])
	id := binary.LittleEndian.Uint64(h.Raw[16:])
	device := int(int32(binary.LittleEndian.Uint32(h.Raw[24:])))
	if owner != h.Owner || id != h.ID || device < 0 || device >= len(v.d.devices) {
		return nil, invalid(call, v.index, "the handle is not one of this machine")
	}
	if !v.d.m.topo.peer(v.index, device) {
		return nil, &driver.Error{Call: call, Device: v.index, Err: fmt.Errorf("%w to device %d", driver.ErrPeerAccess, device)}
	}
	o := &op{kind: opAlloc, name: "OpenMemory"}
	o.where()
	m := v.d.m
	m.mu.Lock()
	b := m.exports[exportKey{owner, id}]
	var shown clock
	if b != nil {
		shown = b.shown
	}
	m.mu.Unlock()
	// Whoever has the handle has got it from the other process.
	v.d.seen(shown)
	if b == nil && m.cfg.Dir != "" {
		bytes, unmap, err := openShared(m.cfg.Dir, sharedName(owner, id))
		if err != nil {
			return nil, invalid(call, v.index, "no such memory: %v", err)
		}
		b = &backing{id: id, owner: owner, device: device, bytes: bytes, close: unmap}
	}
	if b == nil {
		return nil, invalid(call, v.index, "no such memory; it may have been closed by its owner")
	}
	if h.Len == 0 || h.Offset > uint64(len(b.bytes)) || h.Len > uint64(len(b.bytes))-h.Offset {
		if b.owner != v.d.owner && b.close != nil && m.cfg.Dir != "" {
			b.close(true)
		}
		return nil, invalid(call, v.index, "a handle for [%d, +%d) of memory of %d bytes", h.Offset, h.Len, len(b.bytes))
	}
	mp := v.d.insert(mapping{len: int(h.Len), b: b, offset: int(h.Offset), device: v.index, opened: true, made: o})
	v.d.count(func(s *Stats) { s.Mappings++ })
	return &Memory{d: v.d, mp: mp}, nil
}

// Memory is device memory.
type Memory struct {
	d  *Driver
	mp mapping
}

// Device returns the device that the memory is on, or was opened for.
func (b *Memory) Device() tensor.Device {
	return tensor.Device{Type: tensor.CUDA, Index: b.mp.device}
}

// Len returns the number of bytes.
func (b *Memory) Len() int { return b.mp.len }

// Ptr returns the address.
func (b *Memory) Ptr() driver.Ptr { return b.mp.base }

// Address returns the address for package tensor.
func (b *Memory) Address() uint64 { return uint64(b.mp.base) }

// Closed reports whether the memory has been freed.
func (b *Memory) Closed() bool { return b.mp.b != nil && b.mp.b.freed.Load() != nil }

// Export returns a handle for other processes.
func (b *Memory) Export() (driver.MemoryHandle, error) {
	const call = "Export"
	if _, err := b.d.enter(call, b.mp.device, nil); err != nil {
		return driver.MemoryHandle{}, err
	}
	if b.mp.len == 0 || b.mp.opened {
		return driver.MemoryHandle{}, invalid(call, b.mp.device, "only memory that this process allocated has a handle")
	}
	if b.mp.b.freed.Load() != nil {
		return driver.MemoryHandle{}, &driver.Error{Call: call, Device: b.mp.device, Err: driver.ErrClosed}
	}
	k := exportKey{b.mp.b.owner, b.mp.b.id}
	m := b.d.m
	b.d.mu.Lock()
	shown := b.d.publish()
	b.d.mu.Unlock()
	m.mu.Lock()
	b.mp.b.shown = b.mp.b.shown.join(shown)
	m.exports[k] = b.mp.b
	m.mu.Unlock()
	h := driver.MemoryHandle{Owner: k.owner, UUID: b.d.devices[b.mp.device].Info().UUID, ID: k.id, Offset: uint64(b.mp.offset), Len: uint64(b.mp.len)}
	copy(h.Raw[:], k.owner[:])
	binary.LittleEndian.PutUint64(h.Raw[16:], k.id)
	binary.LittleEndian.PutUint32(h.Raw[24:], uint32(b.mp.device))
	return h, nil
}

// Close frees the memory. The checker reports it when operations that use the
// memory need not have ended.
func (b *Memory) Close() error {
	if b.mp.len == 0 || b.mp.borrowed {
		return nil
	}
	o := &op{kind: opFree, name: "Memory.Close"}
	if b.mp.opened {
		o.name = "Memory.Close of a mapping"
	}
	o.where()
	m := b.d.m
	if !b.mp.opened {
		// Who frees memory has heard from those that had it mapped.
		m.mu.Lock()
		left := b.mp.b.left
		m.mu.Unlock()
		b.d.seen(left)
	}
	if !b.d.remove(b.mp, o) {
		return nil
	}
	if b.mp.opened {
		b.d.mu.Lock()
		now := b.d.publish()
		b.d.mu.Unlock()
		m.mu.Lock()
		b.mp.b.left = b.mp.b.left.join(now)
		m.mu.Unlock()
	}
	b.d.release(b.mp)
	return nil
}

// release marks and gives back memory that remove took out.
func (d *Driver) release(mp mapping) {
	if d.m.cfg.Dir == "" {
		if mp.opened {
			mp.b.closed.Add(1)
		} else {
			// Processes may learn from each other's files that mappings are closed. Go's race detector
			// does not see that. This load shows it the order: what went through a mapping that is
			// closed comes before.
			mp.b.closed.Load()
			d.m.mark(mp.b.bytes, freedMark)
		}
		d.unmap(mp, false)
		return
	}
	// An operation that still runs would fault: then the file stays mapped.
	d.mu.Lock()
	busy := false
	for s := range d.streams {
		busy = busy || s.done.Load() != s.enq.Load()
	}
	d.mu.Unlock()
	d.unmap(mp, busy)
}

// freedMark is what freed memory holds.
const freedMark = 0xdb

// AllocHost returns page-locked memory, zeroed.
func (d *Driver) AllocHost(n int) (driver.HostMemory, error) {
	const call = "AllocHost"
	if _, err := d.enter(call, -1, nil); err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, invalid(call, -1, "%d bytes", n)
	}
	o := &op{kind: opAlloc, name: call}
	o.where()
	if n == 0 {
		return &HostMemory{d: d, mp: mapping{device: -1}}, nil
	}
	return d.addHost(aligned(n), o), nil
}

// RegisterHost makes memory of the process page-locked. Processes of one Machine
// that register the same bytes share them.
func (d *Driver) RegisterHost(b []byte) (driver.HostMemory, error) {
	const call = "RegisterHost"
	if _, err := d.enter(call, -1, nil); err != nil {
		return nil, err
	}
	if len(b) == 0 {
		return nil, invalid(call, -1, "no bytes")
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	if at%4 != 0 {
		return nil, invalid(call, -1, "memory at %#x: want a multiple of 4", at)
	}
	o := &op{kind: opAlloc, name: call}
	o.where()
	d.mu.Lock()
	for _, mp := range d.table {
		if mp.device >= 0 {
			continue
		}
		if have := uintptr(unsafe.Pointer(unsafe.SliceData(mp.b.bytes))); at < have+uintptr(mp.len) && have < at+uintptr(len(b)) {
			d.mu.Unlock()
			return nil, &driver.Error{Call: call, Device: -1, Func: "sim", Code: 712, Name: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
				Err: fmt.Errorf("%w: the range is page-locked already, from %s", driver.ErrInvalid, mp.made.caller())}
		}
	}
	d.mu.Unlock()
	return d.addHost(b, o), nil
}

func (d *Driver) addHost(b []byte, o *op) *HostMemory {
	m := d.m
	m.mu.Lock()
	first := unsafe.SliceData(b)
	back := m.hostMem[first]
	if back == nil || len(back.bytes) != len(b) || back.freed.Load() != nil {
		m.nextID++
		back = &backing{id: m.nextID, device: -1, bytes: b[:len(b):len(b)], host: true}
		m.hostMem[first] = back
	}
	back.refs++
	m.mu.Unlock()
	mp := d.insert(mapping{len: len(b), b: back, device: -1, made: o})
	d.count(func(s *Stats) { s.Hosts++; s.MadeHosts++; s.HostBytes += int64(len(b)) })
	return &HostMemory{d: d, mp: mp}
}

// HostMemory is page-locked memory.
type HostMemory struct {
	d  *Driver
	mp mapping
}

// Ptr returns the address for devices.
func (h *HostMemory) Ptr() driver.Ptr { return h.mp.base }

// Len returns the number of bytes.
func (h *HostMemory) Len() int { return h.mp.len }

// Bytes returns the memory.
func (h *HostMemory) Bytes() []byte {
	if h.mp.len == 0 {
		return nil
	}
	return h.mp.b.bytes
}

// Load32 reads a word.
func (h *HostMemory) Load32(offset int) uint32 {
	v, c := h.mp.b.load(offset)
	if c == nil && h.d.m.cfg.Dir != "" {
		c = h.d.m.everything()
	}
	if c != nil {
		h.d.seen(c)
	}
	return v
}

// Store32 writes a word.
func (h *HostMemory) Store32(offset int, v uint32) {
	h.d.mu.Lock()
	c := h.d.publish()
	h.d.mu.Unlock()
	h.mp.b.store(offset, v, c)
}

// Close frees the memory, or ends the registration.
func (h *HostMemory) Close() error {
	if h.mp.len == 0 {
		return nil
	}
	o := &op{kind: opFree, name: "HostMemory.Close"}
	o.where()
	if h.d.remove(h.mp, o) {
		h.d.unmap(h.mp, false)
	}
	return nil
}

// wordPage is the clocks of the words in 4 KiB of memory.
type wordPage [page / 4]atomic.Pointer[wordState]

// wordState is one value that a word had, with what had happened before it was
// written.
type wordState struct {
	value uint32
	clock clock
	prev  atomic.Pointer[wordState]
}

// history is how many earlier values of a word are remembered.
const history = 16

// slot returns where the state of the word at off is kept.
func (b *backing) slot(off int) *atomic.Pointer[wordState] {
	pages := b.words.Load()
	if pages == nil {
		n := make([]atomic.Pointer[wordPage], (len(b.bytes)+page-1)/page)
		b.words.CompareAndSwap(nil, &n)
		pages = b.words.Load()
	}
	p := &(*pages)[off/page]
	if p.Load() == nil {
		p.CompareAndSwap(nil, new(wordPage))
	}
	return &p.Load()[off%page/4]
}

// load reads a word and returns what had happened before it was written. It returns nil if that
// is not known: nobody has written the word, or not an operation.
func (b *backing) load(off int) (uint32, clock) {
	v := driver.LoadWord(b.bytes, off)
	for s, n := b.slot(off).Load(), 0; s != nil && n < history; s, n = s.prev.Load(), n+1 {
		if s.value == v {
			return v, s.clock
		}
	}
	return v, nil
}

// store writes a word. The clock is there before the value can be seen.
func (b *backing) store(off int, v uint32, c clock) {
	n := &wordState{value: v, clock: c}
	slot := b.slot(off)
	for {
		old := slot.Load()
		n.prev.Store(old)
		if slot.CompareAndSwap(old, n) {
			break
		}
	}
	for s, i := n, 0; s != nil; s, i = s.prev.Load(), i+1 {
		if i == history {
			s.prev.Store(nil)
			break
		}
	}
	driver.StoreWord(b.bytes, off, v)
}

// everything returns what all agents of this process have done so far. It is
// what a word that another process wrote is taken to stand for.
func (m *Machine) everything() clock {
	all := *m.agents.Load()
	c := make(clock, len(all))
	for i, a := range all {
		if a.stream != nil {
			c[i] = a.stream.ticks.Load()
		}
	}
	return c
}

var (
	_ driver.Memory     = (*Memory)(nil)
	_ driver.HostMemory = (*HostMemory)(nil)
)
