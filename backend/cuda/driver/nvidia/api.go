//go:build (linux && !android && (amd64 || arm64)) || (windows && amd64)

package nvidia

import (
	"bytes"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
)

// frame has the arguments of one call and its outcome. It lies in Go's heap, which does
// not move as stacks do. It is used again, so a call allocates nothing.
type frame struct {
	args   [15]uintptr
	out    [2]uint64
	raw    [64]byte
	extra  [5]uintptr
	size   uintptr
	params []uintptr
	buf    [driver.MaxArgs]byte
}

var frames = sync.Pool{New: func() any { return new(frame) }}

func newFrame() *frame { return frames.Get().(*frame) }

func (f *frame) free() { frames.Put(f) }

// o returns the address of output i, cleared.
func (f *frame) o(i int) uintptr {
	f.out[i] = 0
	return uintptr(unsafe.Pointer(&f.out[i]))
}

// do calls a function with the first n of f's arguments.
func (a *api) do(fn function, f *frame, n int) libcuda.Result {
	r, _, _ := purego.SyscallN(a.at[fn], f.args[:n]...)
	runtime.KeepAlive(f)
	return libcuda.Result(int32(r))
}

func (a *api) call1(fn function, x uintptr) libcuda.Result { return a.call(fn, x, 0, 0, 0, 0, 1) }

func (a *api) call2(fn function, x, y uintptr) libcuda.Result { return a.call(fn, x, y, 0, 0, 0, 2) }

func (a *api) call3(fn function, x, y, z uintptr) libcuda.Result {
	return a.call(fn, x, y, z, 0, 0, 3)
}

// call calls a function with n arguments that are no addresses of Go's.
func (a *api) call(fn function, x, y, z, u, v uintptr, n int) libcuda.Result {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = x, y, z, u, v
	return a.do(fn, f, n)
}

// get calls a function that writes a value to its first argument.
func (a *api) get(fn function, y, z, u uintptr, n int) (uint64, libcuda.Result) {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1], f.args[2], f.args[3] = f.o(0), y, z, u
	r := a.do(fn, f, n)
	return f.out[0], r
}

// get2 is get for two values.
func (a *api) get2(fn function, z, u uintptr, n int) (first, second uint64, r libcuda.Result) {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1], f.args[2], f.args[3] = f.o(0), f.o(1), z, u
	r = a.do(fn, f, n)
	return f.out[0], f.out[1], r
}

// put calls a function that writes a value to its second argument.
func (a *api) put(fn function, x uintptr) (uint64, libcuda.Result) {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1] = x, f.o(0)
	r := a.do(fn, f, 2)
	return f.out[0], r
}

// integer returns a C int that was written to a cleared word.
func integer(v uint64) int { return int(int32(uint32(v))) }

func (a *api) Name() string { return "nvidia" }

func (a *api) Queues() int { return a.queues }

func (a *api) ErrorName(r libcuda.Result) string {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1] = uintptr(r), f.o(0)
	if a.do(fnGetErrorName, f, 2) != libcuda.Success || f.out[0] == 0 {
		return ""
	}
	text := *(**byte)(unsafe.Pointer(&f.out[0]))
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(text), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(text, n))
}

func (a *api) Version() (int, libcuda.Result) {
	v, r := a.get(fnDriverGetVersion, 0, 0, 0, 1)
	return integer(v), r
}

func (a *api) DeviceCount() (int, libcuda.Result) {
	v, r := a.get(fnDeviceGetCount, 0, 0, 0, 1)
	return integer(v), r
}

func (a *api) DeviceGet(i int) (libcuda.Ordinal, libcuda.Result) {
	v, r := a.get(fnDeviceGet, uintptr(i), 0, 0, 2)
	return libcuda.Ordinal(integer(v)), r
}

// text calls a function that writes a text to its first argument, of so many
// bytes as the second says.
func (a *api) text(fn function, v libcuda.Ordinal) (string, libcuda.Result) {
	f := newFrame()
	defer f.free()
	const room = 256
	clear(f.buf[:room])
	f.args[0], f.args[1], f.args[2] = uintptr(unsafe.Pointer(&f.buf)), room-1, uintptr(v)
	r := a.do(fn, f, 3)
	b, _, _ := bytes.Cut(f.buf[:room], []byte{0})
	return string(b), r
}

func (a *api) DeviceName(v libcuda.Ordinal) (string, libcuda.Result) {
	return a.text(fnDeviceGetName, v)
}

func (a *api) DevicePCIBusID(v libcuda.Ordinal) (string, libcuda.Result) {
	return a.text(fnDeviceGetPCIBusID, v)
}

func (a *api) DeviceUUID(v libcuda.Ordinal) (id [16]byte, r libcuda.Result) {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1] = uintptr(unsafe.Pointer(&f.raw)), uintptr(v)
	r = a.do(fnDeviceGetUUID, f, 2)
	copy(id[:], f.raw[:])
	return id, r
}

func (a *api) DeviceTotalMem(v libcuda.Ordinal) (uint64, libcuda.Result) {
	return a.get(fnDeviceTotalMem, uintptr(v), 0, 0, 2)
}

func (a *api) DeviceAttribute(at libcuda.Attribute, v libcuda.Ordinal) (int, libcuda.Result) {
	n, r := a.get(fnDeviceGetAttribute, uintptr(at), uintptr(v), 0, 3)
	return integer(n), r
}

func (a *api) CanAccessPeer(v, peer libcuda.Ordinal) (bool, libcuda.Result) {
	n, r := a.get(fnDeviceCanAccessPeer, uintptr(v), uintptr(peer), 0, 3)
	return integer(n) != 0, r
}

func (a *api) P2PAttribute(at libcuda.Attribute, v, peer libcuda.Ordinal) (int, libcuda.Result) {
	n, r := a.get(fnDeviceGetP2PAttribute, uintptr(at), uintptr(v), uintptr(peer), 4)
	return integer(n), r
}

func (a *api) PrimaryRetain(v libcuda.Ordinal) (libcuda.Context, libcuda.Result) {
	c, r := a.get(fnDevicePrimaryCtxRetain, uintptr(v), 0, 0, 2)
	return libcuda.Context(c), r
}

func (a *api) PrimaryRelease(v libcuda.Ordinal) libcuda.Result {
	return a.call1(fnDevicePrimaryCtxRelease, uintptr(v))
}

func (a *api) Current() (libcuda.Context, libcuda.Result) {
	c, r := a.get(fnCtxGetCurrent, 0, 0, 0, 1)
	return libcuda.Context(c), r
}

func (a *api) SetCurrent(c libcuda.Context) libcuda.Result {
	return a.call1(fnCtxSetCurrent, uintptr(c))
}

func (a *api) PriorityRange() (least, greatest int, r libcuda.Result) {
	l, g, r := a.get2(fnCtxGetStreamPriorityRange, 0, 0, 2)
	return integer(l), integer(g), r
}

func (a *api) EnablePeer(c libcuda.Context) libcuda.Result {
	return a.call2(fnCtxEnablePeerAccess, uintptr(c), 0)
}

func (a *api) DisablePeer(c libcuda.Context) libcuda.Result {
	return a.call1(fnCtxDisablePeerAccess, uintptr(c))
}

func (a *api) MemInfo() (free, total uint64, r libcuda.Result) {
	return a.get2(fnMemGetInfo, 0, 0, 2)
}

func (a *api) MemAlloc(n int) (driver.Ptr, libcuda.Result) {
	p, r := a.get(fnMemAlloc, uintptr(n), 0, 0, 2)
	return driver.Ptr(p), r
}

func (a *api) MemFree(p driver.Ptr) libcuda.Result { return a.call1(fnMemFree, uintptr(p)) }

// portableMapped is CU_MEMHOSTALLOC_PORTABLE and _DEVICEMAP, and the same for
// registered memory.
const portableMapped = 1 | 2

func (a *api) HostAlloc(n int) (driver.Ptr, libcuda.Result) {
	p, r := a.get(fnMemHostAlloc, uintptr(n), portableMapped, 0, 3)
	return driver.Ptr(p), r
}

func (a *api) HostFree(p driver.Ptr) libcuda.Result { return a.call1(fnMemFreeHost, uintptr(p)) }

func (a *api) HostRegister(p driver.Ptr, n int) libcuda.Result {
	return a.call3(fnMemHostRegister, uintptr(p), uintptr(n), portableMapped)
}

func (a *api) HostUnregister(p driver.Ptr) libcuda.Result {
	return a.call1(fnMemHostUnregister, uintptr(p))
}

func (a *api) HostDevicePointer(p driver.Ptr) (driver.Ptr, libcuda.Result) {
	q, r := a.get(fnMemHostGetDevicePointer, uintptr(p), 0, 0, 3)
	return driver.Ptr(q), r
}

func (a *api) AddressRange(p driver.Ptr) (base driver.Ptr, n uint64, r libcuda.Result) {
	b, n, r := a.get2(fnMemGetAddressRange, uintptr(p), 0, 3)
	return driver.Ptr(b), n, r
}

func (a *api) PointerAttribute(at libcuda.Attribute, p driver.Ptr) (uint64, libcuda.Result) {
	return a.get(fnPointerGetAttribute, uintptr(at), uintptr(p), 0, 3)
}

// byValue tells how a structure of 64 bytes is passed: on the stack by the C
// convention of amd64, as a pointer to a copy by those of arm64 and Windows.
const byValue = runtime.GOARCH == "amd64" && runtime.GOOS != "windows"

// handle puts a handle of another process among the arguments, where it is the
// second, and flags after it if there are any; it returns their number.
func (f *frame) handle(h *[64]byte, flags ...uintptr) int {
	f.args[0] = f.o(0)
	if byValue {
		clear(f.args[1:6])
		copy(f.args[1:6], flags)
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&f.args[6])), len(h)), h[:])
		return 6 + 64/8
	}
	f.raw = *h
	f.args[1] = uintptr(unsafe.Pointer(&f.raw))
	return 2 + copy(f.args[2:], flags)
}

func (a *api) IPCGetMem(p driver.Ptr) ([64]byte, libcuda.Result) {
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1] = uintptr(unsafe.Pointer(&f.raw)), uintptr(p)
	r := a.do(fnIPCGetMemHandle, f, 2)
	return f.raw, r
}

func (a *api) IPCOpenMem(h *[64]byte) (driver.Ptr, libcuda.Result) {
	f := newFrame()
	defer f.free()
	const lazyEnablePeerAccess = 1
	r := a.do(fnIPCOpenMemHandle, f, f.handle(h, lazyEnablePeerAccess))
	return driver.Ptr(f.out[0]), r
}

func (a *api) IPCCloseMem(p driver.Ptr) libcuda.Result {
	return a.call1(fnIPCCloseMemHandle, uintptr(p))
}

func (a *api) StreamCreate(flags uint32, priority int) (libcuda.StreamHandle, libcuda.Result) {
	s, r := a.get(fnStreamCreateWithPriority, uintptr(flags), uintptr(priority), 0, 3)
	return libcuda.StreamHandle(s), r
}

func (a *api) StreamDestroy(s libcuda.StreamHandle) libcuda.Result {
	return a.call1(fnStreamDestroy, uintptr(s))
}

func (a *api) StreamQuery(s libcuda.StreamHandle) libcuda.Result {
	return a.call1(fnStreamQuery, uintptr(s))
}

func (a *api) StreamContext(s libcuda.StreamHandle) (libcuda.Context, libcuda.Result) {
	c, r := a.put(fnStreamGetCtx, uintptr(s))
	return libcuda.Context(c), r
}

func (a *api) StreamWaitEvent(s libcuda.StreamHandle, e libcuda.EventHandle) libcuda.Result {
	return a.call3(fnStreamWaitEvent, uintptr(s), uintptr(e), 0)
}

func (a *api) StreamValuesV2() bool { return a.valuesV2 }

func (a *api) StreamWaitValue(s libcuda.StreamHandle, p driver.Ptr, v, flags uint32) libcuda.Result {
	return a.call(fnStreamWaitValue32, uintptr(s), uintptr(p), uintptr(v), uintptr(flags), 0, 4)
}

func (a *api) StreamWriteValue(s libcuda.StreamHandle, p driver.Ptr, v uint32) libcuda.Result {
	return a.call(fnStreamWriteValue32, uintptr(s), uintptr(p), uintptr(v), 0, 0, 4)
}

func (a *api) MemcpyAsync(s libcuda.StreamHandle, dst, src driver.Ptr, n int) libcuda.Result {
	return a.call(fnMemcpyAsync, uintptr(dst), uintptr(src), uintptr(n), uintptr(s), 0, 4)
}

func (a *api) MemsetAsync(s libcuda.StreamHandle, dst driver.Ptr, value byte, n int) libcuda.Result {
	return a.call(fnMemsetD8Async, uintptr(dst), uintptr(value), uintptr(n), uintptr(s), 0, 4)
}

// What cuLaunchKernel's last argument is a list of.
const (
	launchEnd           = 0
	launchBufferPointer = 1
	launchBufferSize    = 2
)

// Launch passes the parameters packed. Only cooperative launches have no way for
// that and get a list of pointers.
func (a *api) Launch(s libcuda.StreamHandle, k libcuda.FunctionHandle, l *driver.Launch) libcuda.Result {
	f := newFrame()
	defer f.free()
	grid, block := l.Grid.Full(), l.Block.Full()
	f.args = [15]uintptr{
		uintptr(k), uintptr(grid.X), uintptr(grid.Y), uintptr(grid.Z),
		uintptr(block.X), uintptr(block.Y), uintptr(block.Z), uintptr(l.Shared), uintptr(s),
	}
	n := copy(f.buf[:], l.Args.Bytes())
	base := uintptr(unsafe.Pointer(&f.buf))
	if l.Cooperative {
		f.params = f.params[:0]
		for i := range l.Args.Len() {
			f.params = append(f.params, base+uintptr(l.Args.Offset(i)))
		}
		if len(f.params) > 0 {
			f.args[9] = uintptr(unsafe.Pointer(unsafe.SliceData(f.params)))
		}
		return a.do(fnLaunchCooperativeKernel, f, 10)
	}
	if n > 0 {
		f.size = uintptr(n)
		f.extra = [5]uintptr{launchBufferPointer, base, launchBufferSize, uintptr(unsafe.Pointer(&f.size)), launchEnd}
		f.args[10] = uintptr(unsafe.Pointer(&f.extra))
	}
	return a.do(fnLaunchKernel, f, 11)
}

func (a *api) StreamBeginCapture(s libcuda.StreamHandle, mode uint32) libcuda.Result {
	return a.call2(fnStreamBeginCapture, uintptr(s), uintptr(mode))
}

func (a *api) StreamEndCapture(s libcuda.StreamHandle) (libcuda.GraphHandle, libcuda.Result) {
	g, r := a.put(fnStreamEndCapture, uintptr(s))
	return libcuda.GraphHandle(g), r
}

func (a *api) StreamCapturing(s libcuda.StreamHandle) (bool, libcuda.Result) {
	v, r := a.put(fnStreamIsCapturing, uintptr(s))
	return integer(v) != 0, r
}

func (a *api) GraphInstantiate(g libcuda.GraphHandle) (libcuda.ExecHandle, libcuda.Result) {
	e, r := a.get(fnGraphInstantiate, uintptr(g), 0, 0, 3)
	return libcuda.ExecHandle(e), r
}

func (a *api) GraphLaunch(e libcuda.ExecHandle, s libcuda.StreamHandle) libcuda.Result {
	return a.call2(fnGraphLaunch, uintptr(e), uintptr(s))
}

func (a *api) GraphDestroy(g libcuda.GraphHandle) libcuda.Result {
	return a.call1(fnGraphDestroy, uintptr(g))
}

func (a *api) GraphExecDestroy(e libcuda.ExecHandle) libcuda.Result {
	return a.call1(fnGraphExecDestroy, uintptr(e))
}

func (a *api) EventCreate(flags uint32) (libcuda.EventHandle, libcuda.Result) {
	e, r := a.get(fnEventCreate, uintptr(flags), 0, 0, 2)
	return libcuda.EventHandle(e), r
}

func (a *api) EventRecord(e libcuda.EventHandle, s libcuda.StreamHandle) libcuda.Result {
	return a.call2(fnEventRecord, uintptr(e), uintptr(s))
}

func (a *api) EventQuery(e libcuda.EventHandle) libcuda.Result {
	return a.call1(fnEventQuery, uintptr(e))
}

func (a *api) EventDestroy(e libcuda.EventHandle) libcuda.Result {
	return a.call1(fnEventDestroy, uintptr(e))
}

// CUjit_option.
const (
	jitErrorLog     = 5
	jitErrorLogSize = 6
)

func (a *api) ModuleLoad(image []byte) (libcuda.ModuleHandle, string, libcuda.Result) {
	f := newFrame()
	defer f.free()
	const room = 2048
	log := f.buf[:room]
	clear(log)
	type lists struct {
		options [2]uint32
		values  [2]uintptr
	}
	l := &lists{
		options: [2]uint32{jitErrorLog, jitErrorLogSize},
		values:  [2]uintptr{uintptr(unsafe.Pointer(&f.buf)), room - 1},
	}
	var pin runtime.Pinner
	pin.Pin(l)
	pin.Pin(unsafe.SliceData(image))
	defer pin.Unpin()
	f.args[0], f.args[1], f.args[2] = f.o(0), uintptr(unsafe.Pointer(unsafe.SliceData(image))), 2
	f.args[3], f.args[4] = uintptr(unsafe.Pointer(&l.options)), uintptr(unsafe.Pointer(&l.values))
	r := a.do(fnModuleLoadDataEx, f, 5)
	b, _, _ := bytes.Cut(log, []byte{0})
	return libcuda.ModuleHandle(f.out[0]), string(b), r
}

func (a *api) ModuleUnload(m libcuda.ModuleHandle) libcuda.Result {
	return a.call1(fnModuleUnload, uintptr(m))
}

func (a *api) ModuleFunction(m libcuda.ModuleHandle, name string) (libcuda.FunctionHandle, libcuda.Result) {
	text := append([]byte(name), 0)
	var pin runtime.Pinner
	pin.Pin(unsafe.SliceData(text))
	defer pin.Unpin()
	h, r := a.get(fnModuleGetFunction, uintptr(m), uintptr(unsafe.Pointer(unsafe.SliceData(text))), 0, 3)
	return libcuda.FunctionHandle(h), r
}

func (a *api) FunctionAttribute(at libcuda.Attribute, k libcuda.FunctionHandle) (int, libcuda.Result) {
	v, r := a.get(fnFuncGetAttribute, uintptr(at), uintptr(k), 0, 3)
	return integer(v), r
}

func (a *api) SetFunctionAttribute(at libcuda.Attribute, k libcuda.FunctionHandle, v int) libcuda.Result {
	return a.call3(fnFuncSetAttribute, uintptr(k), uintptr(at), uintptr(v))
}

func (a *api) FunctionLoad(k libcuda.FunctionHandle) libcuda.Result {
	if a.at[fnFuncLoad] == 0 {
		return libcuda.Success
	}
	return a.call1(fnFuncLoad, uintptr(k))
}

func (a *api) FunctionParam(k libcuda.FunctionHandle, i int) (offset, size int, r libcuda.Result) {
	if a.at[fnFuncGetParamInfo] == 0 {
		return 0, 0, libcuda.ErrNotSupported
	}
	f := newFrame()
	defer f.free()
	f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(k), uintptr(i), f.o(0), f.o(1)
	r = a.do(fnFuncGetParamInfo, f, 4)
	return int(f.out[0]), int(f.out[1]), r
}

func (a *api) Occupancy(k libcuda.FunctionHandle, threads, shared int) (int, libcuda.Result) {
	v, r := a.get(fnOccupancy, uintptr(k), uintptr(threads), uintptr(shared), 4)
	return integer(v), r
}

var _ libcuda.API = (*api)(nil)
