//go:build cuda && linux

package gorgonia

// #cgo LDFLAGS: -lcuda -ldl
// #define _GNU_SOURCE
// #include <cuda.h>
// #include <dlfcn.h>
// #include <stdlib.h>
// #include <string.h>
//
// // This runs when the program is loaded. Later is too late: CUDA reads the variable when the
// // first context is made, and cu initialises CUDA in its init. It does not change a value that
// // the environment has.
// static void __attribute__((constructor)) c10d_connect(void) {
// 	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
// }
//
// static const char *c10d_connections(void) { return getenv("CUDA_DEVICE_MAX_CONNECTIONS"); }
//
// typedef struct { CUresult r; CUcontext ctx; } c10d_context;
//
// static c10d_context c10d_current(void) {
// 	c10d_context c = {0};
// 	c.r = cuCtxGetCurrent(&c.ctx);
// 	return c;
// }
//
// static CUresult c10d_ipc_get_mem(void *raw, CUdeviceptr p) {
// 	CUipcMemHandle h;
// 	CUresult r = cuIpcGetMemHandle(&h, p);
// 	if (r == CUDA_SUCCESS) memcpy(raw, &h, sizeof h);
// 	return r;
// }
//
// static CUresult c10d_ipc_open_mem(CUdeviceptr *p, const void *raw) {
// 	CUipcMemHandle h;
// 	memcpy(&h, raw, sizeof h);
// 	return cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
// }
//
// // The parameters come packed. Cooperative launches take a list of pointers.
// static CUresult c10d_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz,
// 		unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void *params, size_t bytes, const size_t *offsets, int count, int cooperative) {
// 	if (cooperative) {
// 		void **list = malloc((count + 1) * sizeof *list);
// 		if (list == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
// 		for (int i = 0; i < count; i++) list[i] = (char *)params + offsets[i];
// 		CUresult r = cuLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, shared, s, list);
// 		free(list);
// 		return r;
// 	}
// 	void *extra[] = {
// 		CU_LAUNCH_PARAM_BUFFER_POINTER, params, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END,
// 	};
// 	return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, NULL, bytes ? extra : NULL);
// }
//
// static CUresult c10d_load(CUmodule *m, const void *image, char *log, unsigned room) {
// 	CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
// 	void *values[] = {log, (void *)(size_t)room};
// 	return cuModuleLoadDataEx(m, image, 2, options, values);
// }
//
// // What CUDA 12.4 added is taken from the driver, whatever header there is.
// static CUresult c10d_func_load(CUfunction f) {
// 	CUresult (*load)(CUfunction) = (CUresult (*)(CUfunction))dlsym(RTLD_DEFAULT, "cuFuncLoad");
// 	return load ? load(f) : CUDA_SUCCESS;
// }
//
// static CUresult c10d_func_param(CUfunction f, size_t i, size_t *offset, size_t *size) {
// 	CUresult (*info)(CUfunction, size_t, size_t *, size_t *) =
// 		(CUresult (*)(CUfunction, size_t, size_t *, size_t *))dlsym(RTLD_DEFAULT, "cuFuncGetParamInfo");
// 	return info ? info(f, i, offset, size) : CUDA_ERROR_NOT_SUPPORTED;
// }
import "C"

import (
	"bytes"
	"strconv"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
)

// CUDA's handles for those of libcuda.
func cStream(s libcuda.StreamHandle) C.CUstream { return *(*C.CUstream)(unsafe.Pointer(&s)) }

func cEvent(e libcuda.EventHandle) C.CUevent { return *(*C.CUevent)(unsafe.Pointer(&e)) }

func cFunction(f libcuda.FunctionHandle) C.CUfunction { return *(*C.CUfunction)(unsafe.Pointer(&f)) }

func cGraph(g libcuda.GraphHandle) C.CUgraph { return *(*C.CUgraph)(unsafe.Pointer(&g)) }

func cExec(e libcuda.ExecHandle) C.CUgraphExec { return *(*C.CUgraphExec)(unsafe.Pointer(&e)) }

// cPointer returns an address that is not Go's.
func cPointer(p driver.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

// Queues reads the C library's environment, which is CUDA's. Go's is a copy of what it was
// before c10d_connect.
func (api) Queues() int {
	n, _ := strconv.Atoi(C.GoString(C.c10d_connections()))
	const most = 32
	return min(max(n, 0), most)
}

func (api) ErrorName(r libcuda.Result) string {
	var text *C.char
	if C.cuGetErrorName(C.CUresult(r), &text) != 0 || text == nil {
		return ""
	}
	return C.GoString(text)
}

func (api) DevicePCIBusID(v libcuda.Ordinal) (string, libcuda.Result) {
	var b [64]byte
	r := C.cuDeviceGetPCIBusId((*C.char)(unsafe.Pointer(&b)), C.int(len(b)-1), C.CUdevice(v))
	text, _, _ := bytes.Cut(b[:], []byte{0})
	return string(text), libcuda.Result(r)
}

// Current is not cu's, which allocates.
func (api) Current() (libcuda.Context, libcuda.Result) {
	c := C.c10d_current()
	return libcuda.Context(uintptr(unsafe.Pointer(c.ctx))), libcuda.Result(c.r)
}

// portableMapped is for memory that every context reaches.
const (
	portableMapped   = C.CU_MEMHOSTALLOC_PORTABLE | C.CU_MEMHOSTALLOC_DEVICEMAP
	registerPortable = C.CU_MEMHOSTREGISTER_PORTABLE | C.CU_MEMHOSTREGISTER_DEVICEMAP
)

func (api) HostAlloc(n int) (driver.Ptr, libcuda.Result) {
	var p unsafe.Pointer
	r := C.cuMemHostAlloc(&p, C.size_t(n), portableMapped)
	return driver.Ptr(uintptr(p)), libcuda.Result(r)
}

func (api) HostRegister(p driver.Ptr, n int) libcuda.Result {
	return libcuda.Result(C.cuMemHostRegister(cPointer(p), C.size_t(n), registerPortable))
}

func (api) HostUnregister(p driver.Ptr) libcuda.Result {
	return libcuda.Result(C.cuMemHostUnregister(cPointer(p)))
}

func (api) HostDevicePointer(p driver.Ptr) (driver.Ptr, libcuda.Result) {
	var q C.CUdeviceptr
	r := C.cuMemHostGetDevicePointer(&q, cPointer(p), 0)
	return driver.Ptr(q), libcuda.Result(r)
}

// PointerAttribute is not cu's, which passes CUDA no place to write to.
func (api) PointerAttribute(a libcuda.Attribute, p driver.Ptr) (uint64, libcuda.Result) {
	var v uint64
	r := C.cuPointerGetAttribute(unsafe.Pointer(&v), C.CUpointer_attribute(a), C.CUdeviceptr(p))
	return v, libcuda.Result(r)
}

func (api) IPCGetMem(p driver.Ptr) (h [64]byte, r libcuda.Result) {
	r = libcuda.Result(C.c10d_ipc_get_mem(unsafe.Pointer(&h), C.CUdeviceptr(p)))
	return h, r
}

func (api) IPCOpenMem(h *[64]byte) (driver.Ptr, libcuda.Result) {
	var p C.CUdeviceptr
	r := C.c10d_ipc_open_mem(&p, unsafe.Pointer(h))
	return driver.Ptr(p), libcuda.Result(r)
}

func (api) IPCCloseMem(p driver.Ptr) libcuda.Result {
	return libcuda.Result(C.cuIpcCloseMemHandle(C.CUdeviceptr(p)))
}

func (api) StreamContext(s libcuda.StreamHandle) (libcuda.Context, libcuda.Result) {
	var c C.CUcontext
	r := C.cuStreamGetCtx(cStream(s), &c)
	return libcuda.Context(uintptr(unsafe.Pointer(c))), libcuda.Result(r)
}

// StreamQuery and EventQuery are not cu's, which allocate an error for "not
// ready".
func (api) StreamQuery(s libcuda.StreamHandle) libcuda.Result {
	return libcuda.Result(C.cuStreamQuery(cStream(s)))
}

func (api) EventQuery(e libcuda.EventHandle) libcuda.Result {
	return libcuda.Result(C.cuEventQuery(cEvent(e)))
}

// StreamValuesV2 is true: the header of 11.8 has them, and so has its driver.
func (api) StreamValuesV2() bool { return true }

func (api) StreamWaitValue(s libcuda.StreamHandle, p driver.Ptr, v, flags uint32) libcuda.Result {
	return libcuda.Result(C.cuStreamWaitValue32_v2(cStream(s), C.CUdeviceptr(p), C.cuuint32_t(v), C.uint(flags)))
}

func (api) StreamWriteValue(s libcuda.StreamHandle, p driver.Ptr, v uint32) libcuda.Result {
	return libcuda.Result(C.cuStreamWriteValue32_v2(cStream(s), C.CUdeviceptr(p), C.cuuint32_t(v), 0))
}

func (api) StreamBeginCapture(s libcuda.StreamHandle, mode uint32) libcuda.Result {
	return libcuda.Result(C.cuStreamBeginCapture(cStream(s), C.CUstreamCaptureMode(mode)))
}

func (api) StreamEndCapture(s libcuda.StreamHandle) (libcuda.GraphHandle, libcuda.Result) {
	var g C.CUgraph
	r := C.cuStreamEndCapture(cStream(s), &g)
	return libcuda.GraphHandle(uintptr(unsafe.Pointer(g))), libcuda.Result(r)
}

func (api) StreamCapturing(s libcuda.StreamHandle) (bool, libcuda.Result) {
	var status C.CUstreamCaptureStatus
	r := C.cuStreamIsCapturing(cStream(s), &status)
	return status != C.CU_STREAM_CAPTURE_STATUS_NONE, libcuda.Result(r)
}

func (api) GraphInstantiate(g libcuda.GraphHandle) (libcuda.ExecHandle, libcuda.Result) {
	var e C.CUgraphExec
	r := C.cuGraphInstantiateWithFlags(&e, cGraph(g), 0)
	return libcuda.ExecHandle(uintptr(unsafe.Pointer(e))), libcuda.Result(r)
}

func (api) GraphLaunch(e libcuda.ExecHandle, s libcuda.StreamHandle) libcuda.Result {
	return libcuda.Result(C.cuGraphLaunch(cExec(e), cStream(s)))
}

func (api) GraphDestroy(g libcuda.GraphHandle) libcuda.Result {
	return libcuda.Result(C.cuGraphDestroy(cGraph(g)))
}

func (api) GraphExecDestroy(e libcuda.ExecHandle) libcuda.Result {
	return libcuda.Result(C.cuGraphExecDestroy(cExec(e)))
}

// Launch is not cu's, which reads 8 bytes for every parameter, and has no
// cooperative launches.
func (api) Launch(s libcuda.StreamHandle, f libcuda.FunctionHandle, l *driver.Launch) libcuda.Result {
	g, b := l.Grid.Full(), l.Block.Full()
	params := l.Args.Bytes()
	n := C.size_t(len(params))
	if n == 0 {
		params = []byte{0}
	}
	cooperative := C.int(0)
	var offsets []C.size_t
	if l.Cooperative {
		cooperative = 1
		for i := range l.Args.Len() {
			offsets = append(offsets, C.size_t(l.Args.Offset(i)))
		}
	}
	// The parameters may lie in a structure that has Go pointers too. In this form cgo looks at the slice alone.
	return libcuda.Result(C.c10d_launch(cFunction(f), C.uint(g.X), C.uint(g.Y), C.uint(g.Z),
		C.uint(b.X), C.uint(b.Y), C.uint(b.Z), C.uint(l.Shared), cStream(s),
		unsafe.Pointer(&params[0]), n, unsafe.SliceData(offsets), C.int(len(offsets)), cooperative))
}

func (api) ModuleLoad(image []byte) (libcuda.ModuleHandle, string, libcuda.Result) {
	const room = 2048
	log := make([]byte, room)
	var m C.CUmodule
	r := C.c10d_load(&m, unsafe.Pointer(unsafe.SliceData(image)), (*C.char)(unsafe.Pointer(unsafe.SliceData(log))), room-1)
	text, _, _ := bytes.Cut(log, []byte{0})
	return libcuda.ModuleHandle(uintptr(unsafe.Pointer(m))), string(text), libcuda.Result(r)
}

func (api) SetFunctionAttribute(a libcuda.Attribute, f libcuda.FunctionHandle, v int) libcuda.Result {
	return libcuda.Result(C.cuFuncSetAttribute(cFunction(f), C.CUfunction_attribute(a), C.int(v)))
}

func (api) FunctionLoad(f libcuda.FunctionHandle) libcuda.Result {
	return libcuda.Result(C.c10d_func_load(cFunction(f)))
}

func (api) FunctionParam(f libcuda.FunctionHandle, i int) (offset, size int, r libcuda.Result) {
	var at, n C.size_t
	r = libcuda.Result(C.c10d_func_param(cFunction(f), C.size_t(i), &at, &n))
	return int(at), int(n), r
}
