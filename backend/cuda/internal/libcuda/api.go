package libcuda

import "github.com/c10d-go/c10d/backend/cuda/driver"

// Result is a CUresult.
type Result int32

// Handles of the driver. Zero is none.
type (
	Context        uintptr
	StreamHandle   uintptr
	EventHandle    uintptr
	ModuleHandle   uintptr
	FunctionHandle uintptr
	GraphHandle    uintptr
	ExecHandle     uintptr // a CUgraphExec
)

// Ordinal is a CUdevice.
type Ordinal int32

// API calls the functions of CUDA's driver. Where a method says nothing else it
// is the function of nearly that name, with its result. Functions that need one
// are called on a thread where the context is current.
type API interface {
	// Name is what Driver.Name returns.
	Name() string

	// ErrorName is cuGetErrorName, "" if it does not know r.
	ErrorName(r Result) string

	// Queues returns how many queues of the hardware a device has for streams, as far as
	// the process has asked for a number; otherwise 0.
	Queues() int

	Version() (int, Result)
	DeviceCount() (int, Result)
	DeviceGet(i int) (Ordinal, Result)
	DeviceName(v Ordinal) (string, Result)
	DeviceUUID(v Ordinal) ([16]byte, Result)
	DeviceTotalMem(v Ordinal) (uint64, Result)
	DeviceAttribute(a Attribute, v Ordinal) (int, Result)
	DevicePCIBusID(v Ordinal) (string, Result)
	CanAccessPeer(v, peer Ordinal) (bool, Result)
	P2PAttribute(a Attribute, v, peer Ordinal) (int, Result)

	PrimaryRetain(v Ordinal) (Context, Result)
	PrimaryRelease(v Ordinal) Result
	Current() (Context, Result)
	SetCurrent(c Context) Result
	PriorityRange() (least, greatest int, r Result)
	EnablePeer(c Context) Result
	DisablePeer(c Context) Result

	MemInfo() (free, total uint64, r Result)
	MemAlloc(n int) (driver.Ptr, Result)
	MemFree(p driver.Ptr) Result
	// HostAlloc and HostRegister make memory that is page-locked for all contexts.
	HostAlloc(n int) (driver.Ptr, Result)
	HostFree(p driver.Ptr) Result
	HostRegister(p driver.Ptr, n int) Result
	HostUnregister(p driver.Ptr) Result
	HostDevicePointer(p driver.Ptr) (driver.Ptr, Result)
	AddressRange(p driver.Ptr) (base driver.Ptr, n uint64, r Result)
	PointerAttribute(a Attribute, p driver.Ptr) (uint64, Result)
	IPCGetMem(p driver.Ptr) ([64]byte, Result)
	IPCOpenMem(h *[64]byte) (driver.Ptr, Result)
	IPCCloseMem(p driver.Ptr) Result

	StreamCreate(flags uint32, priority int) (StreamHandle, Result)
	StreamDestroy(s StreamHandle) Result
	StreamQuery(s StreamHandle) Result
	StreamContext(s StreamHandle) (Context, Result)
	StreamWaitEvent(s StreamHandle, e EventHandle) Result
	StreamWaitValue(s StreamHandle, p driver.Ptr, v, flags uint32) Result
	StreamWriteValue(s StreamHandle, p driver.Ptr, v uint32) Result
	// StreamValuesV2 reports whether the two are of the second kind, which every
	// device has; the first is an attribute of the device.
	StreamValuesV2() bool
	MemcpyAsync(s StreamHandle, dst, src driver.Ptr, n int) Result
	MemsetAsync(s StreamHandle, dst driver.Ptr, value byte, n int) Result
	// Launch is cuLaunchKernel or cuLaunchCooperativeKernel. It copies the
	// parameters.
	Launch(s StreamHandle, f FunctionHandle, l *driver.Launch) Result

	StreamBeginCapture(s StreamHandle, mode uint32) Result
	StreamEndCapture(s StreamHandle) (GraphHandle, Result)
	// StreamCapturing is cuStreamIsCapturing: false is CU_STREAM_CAPTURE_STATUS_NONE.
	StreamCapturing(s StreamHandle) (bool, Result)
	// GraphInstantiate is cuGraphInstantiateWithFlags without flags.
	GraphInstantiate(g GraphHandle) (ExecHandle, Result)
	GraphLaunch(e ExecHandle, s StreamHandle) Result
	GraphDestroy(g GraphHandle) Result
	GraphExecDestroy(e ExecHandle) Result

	EventCreate(flags uint32) (EventHandle, Result)
	EventRecord(e EventHandle, s StreamHandle) Result
	EventQuery(e EventHandle) Result
	EventDestroy(e EventHandle) Result

	// ModuleLoad is cuModuleLoadDataEx. A PTX text ends with a zero byte. Log is
	// what the compiler complained about.
	ModuleLoad(image []byte) (m ModuleHandle, log string, r Result)
	ModuleUnload(m ModuleHandle) Result
	ModuleFunction(m ModuleHandle, name string) (FunctionHandle, Result)
	FunctionAttribute(a Attribute, f FunctionHandle) (int, Result)
	SetFunctionAttribute(a Attribute, f FunctionHandle, v int) Result
	// FunctionLoad brings the kernel to the device. It does nothing where the
	// driver has no cuFuncLoad; reading an attribute does it there.
	FunctionLoad(f FunctionHandle) Result
	// FunctionParam returns where parameter i lies, ErrNotSupported where the
	// driver has no cuFuncGetParamInfo, and ErrInvalidValue after the last.
	FunctionParam(f FunctionHandle, i int) (offset, size int, r Result)
	Occupancy(f FunctionHandle, threads, shared int) (int, Result)
}

// Attribute is a CUdevice_attribute, CUdevice_P2PAttribute,
// CUpointer_attribute or CUfunction_attribute.
type Attribute int32

// CUdevice_attribute.
const (
	attrMaxThreadsPerBlock Attribute = 1
	attrMultiprocessors    Attribute = 16
	attrL2                 Attribute = 38
	attrCopyEngines        Attribute = 40
	attrUnifiedAddressing  Attribute = 41
	attrMajor              Attribute = 75
	attrMinor              Attribute = 76
	attrStreamMemOps       Attribute = 92
	attrCooperative        Attribute = 95
	attrSharedOptin        Attribute = 97
)

// CUdevice_P2PAttribute.
const (
	p2pPerformanceRank Attribute = 1
	p2pNativeAtomics   Attribute = 3
)

// CUpointer_attribute.
const (
	pointerMemoryType    Attribute = 2
	pointerBufferID      Attribute = 7
	pointerDeviceOrdinal Attribute = 9
)

// memoryTypeDevice is CU_MEMORYTYPE_DEVICE.
const memoryTypeDevice = 2

// CUfunction_attribute.
const (
	functionMaxThreads Attribute = 0
	functionMaxDynamic Attribute = 8
)

const (
	streamNonBlocking  = 1
	eventDisableTiming = 2
	captureRelaxed     = 2
)

// Results that are told apart here.
const (
	Success         Result = 0
	ErrInvalidValue Result = 1
	errNotReady     Result = driver.ResultNotReady
	errPeerEnabled  Result = 704
	errPeerNot      Result = 705
	ErrNotSupported Result = 801
)
