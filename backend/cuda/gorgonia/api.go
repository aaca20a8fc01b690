//go:build cuda && linux

package gorgonia

import (
	"errors"
	"reflect"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
)

// api is a libcuda.API: here is what cu has.
type api struct{}

// unknown is CUDA_ERROR_UNKNOWN.
const unknown libcuda.Result = 999

// code returns the CUresult in an error of cu's, whose type has no name outside.
func code(err error) libcuda.Result {
	if err == nil {
		return libcuda.Success
	}
	for ; err != nil; err = errors.Unwrap(err) {
		if v := reflect.ValueOf(err); v.Kind() == reflect.Int {
			return libcuda.Result(v.Int())
		}
	}
	return unknown
}

func stream(s libcuda.StreamHandle) cu.Stream { return wrap[cu.Stream](uintptr(s)) }

func event(e libcuda.EventHandle) cu.Event { return wrap[cu.Event](uintptr(e)) }

func function(f libcuda.FunctionHandle) cu.Function { return wrap[cu.Function](uintptr(f)) }

func module(m libcuda.ModuleHandle) cu.Module { return wrap[cu.Module](uintptr(m)) }

func context(c libcuda.Context) cu.CUContext { return wrap[cu.CUContext](uintptr(c)) }

func (api) Name() string { return "gorgonia" }

func (api) Version() (int, libcuda.Result) {
	v := cu.Version()
	if v < 0 {
		return 0, unknown
	}
	return v, libcuda.Success
}

func (api) DeviceCount() (int, libcuda.Result) {
	n, err := cu.NumDevices()
	return n, code(err)
}

func (api) DeviceGet(i int) (libcuda.Ordinal, libcuda.Result) {
	v, err := cu.GetDevice(i)
	return libcuda.Ordinal(v), code(err)
}

func (api) DeviceName(v libcuda.Ordinal) (string, libcuda.Result) {
	s, err := cu.Device(v).Name()
	return s, code(err)
}

func (api) DeviceUUID(v libcuda.Ordinal) ([16]byte, libcuda.Result) {
	id, err := cu.Device(v).UUID()
	return id, code(err)
}

func (api) DeviceTotalMem(v libcuda.Ordinal) (uint64, libcuda.Result) {
	n, err := cu.Device(v).TotalMem()
	return uint64(n), code(err)
}

func (api) DeviceAttribute(a libcuda.Attribute, v libcuda.Ordinal) (int, libcuda.Result) {
	n, err := cu.Device(v).Attribute(cu.DeviceAttribute(a))
	return n, code(err)
}

func (api) CanAccessPeer(v, peer libcuda.Ordinal) (bool, libcuda.Result) {
	can, err := cu.Device(v).CanAccessPeer(cu.Device(peer))
	return can != 0, code(err)
}

func (api) P2PAttribute(a libcuda.Attribute, v, peer libcuda.Ordinal) (int, libcuda.Result) {
	n, err := cu.Device(v).P2PAttribute(cu.P2PAttribute(a), cu.Device(peer))
	return n, code(err)
}

func (api) PrimaryRetain(v libcuda.Ordinal) (libcuda.Context, libcuda.Result) {
	c, err := cu.Device(v).RetainPrimaryCtx()
	return libcuda.Context(handle(c)), code(err)
}

func (api) PrimaryRelease(v libcuda.Ordinal) libcuda.Result {
	return code(cu.Device(v).ReleasePrimaryCtx())
}

func (api) SetCurrent(c libcuda.Context) libcuda.Result {
	return code(cu.SetCurrentContext(context(c)))
}

func (api) PriorityRange() (least, greatest int, r libcuda.Result) {
	least, greatest, err := cu.StreamPriorityRange()
	return least, greatest, code(err)
}

func (api) EnablePeer(c libcuda.Context) libcuda.Result {
	return code(context(c).EnablePeerAccess(0))
}

func (api) DisablePeer(c libcuda.Context) libcuda.Result {
	return code(context(c).DisablePeerAccess())
}

func (api) MemInfo() (free, total uint64, r libcuda.Result) {
	f, t, err := cu.MemInfo()
	return uint64(f), uint64(t), code(err)
}

func (api) MemAlloc(n int) (driver.Ptr, libcuda.Result) {
	p, err := cu.MemAlloc(int64(n))
	return driver.Ptr(p), code(err)
}

func (api) MemFree(p driver.Ptr) libcuda.Result { return code(cu.MemFree(cu.DevicePtr(p))) }

func (api) HostFree(p driver.Ptr) libcuda.Result { return code(cu.MemFreeHost(cPointer(p))) }

func (api) AddressRange(p driver.Ptr) (base driver.Ptr, n uint64, r libcuda.Result) {
	size, b, err := cu.DevicePtr(p).AddressRange()
	return driver.Ptr(b), uint64(size), code(err)
}

func (api) StreamCreate(flags uint32, priority int) (libcuda.StreamHandle, libcuda.Result) {
	s, err := cu.MakeStreamWithPriority(priority, cu.StreamFlags(flags))
	return libcuda.StreamHandle(handle(s)), code(err)
}

func (api) StreamDestroy(s libcuda.StreamHandle) libcuda.Result {
	c := stream(s)
	return code(c.Destroy())
}

func (api) StreamWaitEvent(s libcuda.StreamHandle, e libcuda.EventHandle) libcuda.Result {
	return code(stream(s).Wait(event(e), 0))
}

func (api) MemcpyAsync(s libcuda.StreamHandle, dst, src driver.Ptr, n int) libcuda.Result {
	return code(cu.MemcpyAsync(cu.DevicePtr(dst), cu.DevicePtr(src), int64(n), stream(s)))
}

func (api) MemsetAsync(s libcuda.StreamHandle, dst driver.Ptr, value byte, n int) libcuda.Result {
	return code(cu.MemsetD8Async(cu.DevicePtr(dst), value, int64(n), stream(s)))
}

func (api) EventCreate(flags uint32) (libcuda.EventHandle, libcuda.Result) {
	e, err := cu.MakeEvent(cu.EventFlags(flags))
	return libcuda.EventHandle(handle(e)), code(err)
}

func (api) EventRecord(e libcuda.EventHandle, s libcuda.StreamHandle) libcuda.Result {
	return code(event(e).Record(stream(s)))
}

func (api) EventDestroy(e libcuda.EventHandle) libcuda.Result {
	c := event(e)
	return code(cu.DestroyEvent(&c))
}

func (api) ModuleUnload(m libcuda.ModuleHandle) libcuda.Result { return code(module(m).Unload()) }

func (api) ModuleFunction(m libcuda.ModuleHandle, name string) (libcuda.FunctionHandle, libcuda.Result) {
	f, err := module(m).Function(name)
	return libcuda.FunctionHandle(handle(f)), code(err)
}

func (api) FunctionAttribute(a libcuda.Attribute, f libcuda.FunctionHandle) (int, libcuda.Result) {
	n, err := function(f).Attribute(cu.FunctionAttribute(a))
	return n, code(err)
}

func (api) Occupancy(f libcuda.FunctionHandle, threads, shared int) (int, libcuda.Result) {
	n, err := function(f).MaxActiveBlocksPerMultiProcessor(threads, int64(shared))
	return n, code(err)
}

var _ libcuda.API = api{}

// cu's types are one pointer each, which handle and wrap rely on.
var (
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.CUContext{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Stream{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Event{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Module{})]struct{}{}
	_ [unsafe.Sizeof(uintptr(0))]struct{} = [unsafe.Sizeof(cu.Function{})]struct{}{}
)
