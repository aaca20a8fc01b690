package libcuda

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// fake is a driver's library that remembers what exists and what was called. It
// moves no bytes; events have passed when they are asked.
type fake struct {
	mu      sync.Mutex
	devices int
	noParam bool // as before CUDA 12.4
	noPeer  bool
	apart   bool // devices have page-locked memory at addresses of their own

	at     int // the call that fails; 0: none
	with   Result
	sticky bool // and all calls after it

	calls    int
	names    []string
	failed   string // what failed
	current  Context
	next     uint64
	live     map[string]int    // how many of each there are
	sizes    map[uint64]uint64 // allocations
	where    map[uint64]int    // and their devices
	ipc      map[[64]byte]uint64
	peers    map[[2]Context]bool
	retained map[Context]int
	copies   []string
	host     map[uint64][]byte
	unready  bool // events have not passed
	queues   int
	during   func(name string)

	capturing map[StreamHandle]bool
	mode      uint32 // of the last capture
}

func newFake(devices int) *fake {
	return &fake{
		devices: devices, with: 2, next: 0x7000_0000, live: make(map[string]int), sizes: make(map[uint64]uint64),
		where: make(map[uint64]int), ipc: make(map[[64]byte]uint64), peers: make(map[[2]Context]bool), retained: make(map[Context]int), host: make(map[uint64][]byte),
		capturing: make(map[StreamHandle]bool),
	}
}

// call counts a call and says what it returns, with the mutex locked.
func (f *fake) call(name string) Result {
	if f.during != nil {
		f.during(name)
	}
	f.mu.Lock()
	f.calls++
	f.names = append(f.names, name)
	if f.at > 0 && (f.calls == f.at || f.sticky && f.calls > f.at) {
		if f.failed == "" {
			f.failed = name
		}
		return f.with
	}
	return Success
}

// add makes something, unless the call fails.
func (f *fake) add(name, what string, n uint64) (uint64, Result) {
	r := f.call(name)
	defer f.mu.Unlock()
	if r != Success {
		return 0, r
	}
	f.live[what]++
	p := f.next
	f.next += (n + 511) / 256 * 256
	return p, Success
}

// drop takes something away.
func (f *fake) drop(name, what string) Result {
	r := f.call(name)
	defer f.mu.Unlock()
	if r == Success {
		f.live[what]--
	}
	return r
}

func (f *fake) only(name string) Result {
	r := f.call(name)
	defer f.mu.Unlock()
	return r
}

// count returns how often a function was called.
func (f *fake) count(name string) (n int) {
	for _, c := range f.names {
		if c == name {
			n++
		}
	}
	return n
}

// left returns what was made and not given back.
func (f *fake) left() (list []string) {
	for what, n := range f.live {
		if n != 0 {
			list = append(list, fmt.Sprintf("%s: %d", what, n))
		}
	}
	for k, on := range f.peers {
		if on {
			list = append(list, fmt.Sprintf("peer access %v", k))
		}
	}
	slices.Sort(list)
	return list
}

func fakeContext(v Ordinal) Context { return Context(0xc000 + uintptr(v)) }

func (f *fake) Name() string { return "fake" }
func (f *fake) ErrorName(r Result) string {
	return map[Result]string{700: "CUDA_ERROR_ILLEGAL_ADDRESS"}[r]
}
func (f *fake) Queues() int                               { return f.queues }
func (f *fake) Version() (int, Result)                    { return 12040, f.only("Version") }
func (f *fake) DeviceCount() (int, Result)                { return f.devices, f.only("DeviceCount") }
func (f *fake) DeviceGet(i int) (Ordinal, Result)         { return Ordinal(i), f.only("DeviceGet") }
func (f *fake) DeviceName(Ordinal) (string, Result)       { return "fake", f.only("DeviceName") }
func (f *fake) DeviceTotalMem(Ordinal) (uint64, Result)   { return 1 << 30, f.only("DeviceTotalMem") }
func (f *fake) DevicePCIBusID(v Ordinal) (string, Result) { return "", f.only("DevicePCIBusID") }
func (f *fake) DeviceUUID(v Ordinal) ([16]byte, Result) {
	return [16]byte{byte(v + 1)}, f.only("DeviceUUID")
}
func (f *fake) CanAccessPeer(_, _ Ordinal) (bool, Result) { return !f.noPeer, f.only("CanAccessPeer") }
func (f *fake) PrimaryRetain(v Ordinal) (Context, Result) {
	_, r := f.add("PrimaryRetain", "context", 0)
	f.retain(v, 1)
	return fakeContext(v), r
}
func (f *fake) PrimaryRelease(v Ordinal) Result {
	f.retain(v, -1)
	return f.drop("PrimaryRelease", "context")
}

// retain counts who has a primary context; -1: it is gone.
func (f *fake) retain(v Ordinal, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := fakeContext(v)
	if f.retained[c] = max(f.retained[c], 0) + n; f.retained[c] == 0 {
		f.retained[c] = -1
	}
}
func (f *fake) DeviceAttribute(a Attribute, _ Ordinal) (int, Result) {
	n := map[Attribute]int{attrMaxThreadsPerBlock: 1024, attrSharedOptin: 200 << 10}[a]
	return max(n, 1), f.only("DeviceAttribute")
}
func (f *fake) P2PAttribute(a Attribute, _, _ Ordinal) (int, Result) {
	return 1, f.only("P2PAttribute")
}

func (f *fake) Current() (Context, Result) {
	r := f.call("Current")
	defer f.mu.Unlock()
	return f.current, r
}

func (f *fake) SetCurrent(c Context) Result {
	r := f.call("SetCurrent")
	defer f.mu.Unlock()
	if r == Success {
		f.current = c
	}
	return r
}

func (f *fake) PriorityRange() (int, int, Result) { return 0, -5, f.only("PriorityRange") }

func (f *fake) EnablePeer(c Context) Result {
	r := f.call("EnablePeer")
	defer f.mu.Unlock()
	k := [2]Context{f.current, c}
	if r == Success && f.peers[k] {
		return errPeerEnabled
	}
	if r == Success {
		f.peers[k] = true
	}
	return r
}

func (f *fake) DisablePeer(c Context) Result {
	r := f.call("DisablePeer")
	defer f.mu.Unlock()
	k := [2]Context{f.current, c}
	if r == Success && f.retained[c] < 0 {
		return 709 // the context is no more
	}
	if r == Success && !f.peers[k] {
		return errPeerNot
	}
	if r == Success {
		delete(f.peers, k)
	}
	return r
}

func (f *fake) MemInfo() (uint64, uint64, Result) { return 1, 2, f.only("MemInfo") }

func (f *fake) MemAlloc(n int) (driver.Ptr, Result) {
	p, r := f.add("MemAlloc", "memory", uint64(n))
	if r == Success {
		f.mu.Lock()
		f.sizes[p], f.where[p] = uint64(n), int(f.current-0xc000)
		f.mu.Unlock()
	}
	return driver.Ptr(p), r
}
func (f *fake) MemFree(p driver.Ptr) Result { return f.drop("MemFree", "memory") }

func (f *fake) HostAlloc(n int) (driver.Ptr, Result) {
	if _, r := f.add("HostAlloc", "host", 0); r != Success {
		return 0, r
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = 0xee
	}
	p := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	f.mu.Lock()
	f.host[p] = b
	f.mu.Unlock()
	return driver.Ptr(p), Success
}
func (f *fake) HostFree(driver.Ptr) Result { return f.drop("HostFree", "host") }
func (f *fake) HostRegister(driver.Ptr, int) Result {
	_, r := f.add("HostRegister", "registration", 0)
	return r
}
func (f *fake) HostUnregister(driver.Ptr) Result { return f.drop("HostUnregister", "registration") }
func (f *fake) HostDevicePointer(p driver.Ptr) (driver.Ptr, Result) {
	if f.apart {
		p += 64
	}
	return p, f.only("HostDevicePointer")
}

// find returns the allocation that p is in.
func (f *fake) find(p driver.Ptr) (base uint64, ok bool) {
	for b, n := range f.sizes {
		if uint64(p) >= b && uint64(p) < b+n {
			return b, true
		}
	}
	return 0, false
}

func (f *fake) AddressRange(p driver.Ptr) (driver.Ptr, uint64, Result) {
	r := f.call("AddressRange")
	defer f.mu.Unlock()
	b, ok := f.find(p)
	if r == Success && !ok {
		r = ErrInvalidValue
	}
	return driver.Ptr(b), f.sizes[b], r
}

func (f *fake) PointerAttribute(a Attribute, p driver.Ptr) (uint64, Result) {
	r := f.call("PointerAttribute")
	defer f.mu.Unlock()
	b, ok := f.find(p)
	if r == Success && !ok {
		r = ErrInvalidValue
	}
	switch a {
	case pointerMemoryType:
		return memoryTypeDevice, r
	case pointerDeviceOrdinal:
		return uint64(f.where[b]), r
	}
	return b, r
}

func (f *fake) IPCGetMem(p driver.Ptr) (h [64]byte, r Result) {
	r = f.call("IPCGetMem")
	defer f.mu.Unlock()
	copy(h[:], p.String())
	return h, r
}

func (f *fake) IPCOpenMem(h *[64]byte) (driver.Ptr, Result) {
	p, r := f.add("IPCOpenMem", "mapping", 1000)
	if r == Success {
		f.mu.Lock()
		f.sizes[p] = 1000
		f.mu.Unlock()
	}
	return driver.Ptr(p), r
}
func (f *fake) IPCCloseMem(driver.Ptr) Result { return f.drop("IPCCloseMem", "mapping") }

func (f *fake) StreamCreate(uint32, int) (StreamHandle, Result) {
	p, r := f.add("StreamCreate", "stream", 0)
	return StreamHandle(p), r
}
func (f *fake) StreamDestroy(StreamHandle) Result { return f.drop("StreamDestroy", "stream") }
func (f *fake) StreamQuery(StreamHandle) Result   { return f.only("StreamQuery") }
func (f *fake) StreamContext(s StreamHandle) (Context, Result) {
	r := f.only("StreamContext")
	if s == 0xbad {
		return 1, r
	}
	return f.current, r
}
func (f *fake) StreamWaitEvent(StreamHandle, EventHandle) Result { return f.only("StreamWaitEvent") }
func (f *fake) StreamValuesV2() bool                             { return true }
func (f *fake) StreamWaitValue(StreamHandle, driver.Ptr, uint32, uint32) Result {
	return f.only("StreamWaitValue")
}
func (f *fake) StreamWriteValue(StreamHandle, driver.Ptr, uint32) Result {
	return f.only("StreamWriteValue")
}

func (f *fake) MemcpyAsync(_ StreamHandle, dst, src driver.Ptr, n int) Result {
	r := f.call("MemcpyAsync")
	defer f.mu.Unlock()
	f.copies = append(f.copies, fmt.Sprintf("%v %v %d", dst, src, n))
	return r
}
func (f *fake) MemsetAsync(StreamHandle, driver.Ptr, byte, int) Result { return f.only("MemsetAsync") }
func (f *fake) Launch(StreamHandle, FunctionHandle, *driver.Launch) Result {
	return f.only("Launch")
}

func (f *fake) StreamBeginCapture(s StreamHandle, mode uint32) Result {
	r := f.call("StreamBeginCapture")
	defer f.mu.Unlock()
	if r == Success {
		f.capturing[s], f.mode = true, mode
	}
	return r
}
func (f *fake) StreamEndCapture(s StreamHandle) (GraphHandle, Result) {
	p, r := f.add("StreamEndCapture", "graph", 0)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.capturing, s)
	return GraphHandle(p), r
}
func (f *fake) StreamCapturing(s StreamHandle) (bool, Result) {
	r := f.call("StreamCapturing")
	defer f.mu.Unlock()
	return f.capturing[s], r
}
func (f *fake) GraphInstantiate(GraphHandle) (ExecHandle, Result) {
	p, r := f.add("GraphInstantiate", "executable graph", 0)
	return ExecHandle(p), r
}
func (f *fake) GraphLaunch(ExecHandle, StreamHandle) Result { return f.only("GraphLaunch") }
func (f *fake) GraphDestroy(GraphHandle) Result             { return f.drop("GraphDestroy", "graph") }
func (f *fake) GraphExecDestroy(ExecHandle) Result {
	return f.drop("GraphExecDestroy", "executable graph")
}

func (f *fake) EventCreate(uint32) (EventHandle, Result) {
	p, r := f.add("EventCreate", "event", 0)
	return EventHandle(p), r
}
func (f *fake) EventDestroy(EventHandle) Result              { return f.drop("EventDestroy", "event") }
func (f *fake) EventRecord(EventHandle, StreamHandle) Result { return f.only("EventRecord") }
func (f *fake) EventQuery(EventHandle) Result {
	r := f.only("EventQuery")
	f.mu.Lock()
	defer f.mu.Unlock()
	if r == Success && f.unready {
		return errNotReady
	}
	return r
}
func (f *fake) ModuleLoad([]byte) (ModuleHandle, string, Result) {
	p, r := f.add("ModuleLoad", "module", 0)
	return ModuleHandle(p), "line 7 is odd\n", r
}
func (f *fake) ModuleUnload(ModuleHandle) Result { return f.drop("ModuleUnload", "module") }
func (f *fake) ModuleFunction(ModuleHandle, string) (FunctionHandle, Result) {
	return 1, f.only("ModuleFunction")
}
func (f *fake) FunctionAttribute(Attribute, FunctionHandle) (int, Result) {
	return 256, f.only("FunctionAttribute")
}
func (f *fake) SetFunctionAttribute(Attribute, FunctionHandle, int) Result {
	return f.only("SetFunctionAttribute")
}
func (f *fake) FunctionLoad(FunctionHandle) Result { return f.only("FunctionLoad") }

// FunctionParam describes (u64, u32, [12]byte aligned to 4).
func (f *fake) FunctionParam(_ FunctionHandle, i int) (int, int, Result) {
	if f.noParam {
		return 0, 0, ErrNotSupported
	}
	if r := f.only("FunctionParam"); r != Success {
		return 0, 0, r
	}
	switch i {
	case 0:
		return 0, 8, Success
	case 1:
		return 8, 4, Success
	case 2:
		return 12, 12, Success
	}
	return 0, 0, ErrInvalidValue
}
func (f *fake) Occupancy(FunctionHandle, int, int) (int, Result) { return 3, f.only("Occupancy") }

var _ API = (*fake)(nil)
