//go:build (linux && !android && (amd64 || arm64)) || (windows && amd64)

package nvidia

import (
	"fmt"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
)

func open() (driver.Driver, error) {
	a, err := library()
	if err != nil {
		return nil, err
	}
	if r := a.call1(fnInit, 0); r != libcuda.Success {
		return nil, driver.ResultError("Open", -1, "cuInit", int(r), a.ErrorName(r))
	}
	d, err := libcuda.New(a, nil)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// function is one of the driver's, an index into names and api.
type function int

const (
	fnInit function = iota
	fnGetErrorName
	fnDriverGetVersion
	fnDeviceGetCount
	fnDeviceGet
	fnDeviceGetName
	fnDeviceGetUUID
	fnDeviceTotalMem
	fnDeviceGetAttribute
	fnDeviceGetPCIBusID
	fnDeviceCanAccessPeer
	fnDeviceGetP2PAttribute
	fnDevicePrimaryCtxRetain
	fnDevicePrimaryCtxRelease
	fnCtxGetCurrent
	fnCtxSetCurrent
	fnCtxGetStreamPriorityRange
	fnCtxEnablePeerAccess
	fnCtxDisablePeerAccess
	fnMemGetInfo
	fnMemAlloc
	fnMemFree
	fnMemHostAlloc
	fnMemFreeHost
	fnMemHostRegister
	fnMemHostUnregister
	fnMemHostGetDevicePointer
	fnMemGetAddressRange
	fnPointerGetAttribute
	fnIPCGetMemHandle
	fnIPCOpenMemHandle
	fnIPCCloseMemHandle
	fnStreamCreateWithPriority
	fnStreamDestroy
	fnStreamQuery
	fnStreamGetCtx
	fnStreamWaitEvent
	fnStreamWaitValue32
	fnStreamWriteValue32
	fnMemcpyAsync
	fnMemsetD8Async
	fnLaunchKernel
	fnLaunchCooperativeKernel
	fnStreamBeginCapture
	fnStreamEndCapture
	fnStreamIsCapturing
	fnGraphInstantiate
	fnGraphLaunch
	fnGraphDestroy
	fnGraphExecDestroy
	fnEventCreate
	fnEventRecord
	fnEventQuery
	fnEventDestroy
	fnModuleLoadDataEx
	fnModuleUnload
	fnModuleGetFunction
	fnFuncGetAttribute
	fnFuncSetAttribute
	fnOccupancy
	fnFuncLoad
	fnFuncGetParamInfo
	functions
)

// names are the functions' names in the driver's library, the best first. Those
// after fnOccupancy are not in every driver.
var names = [functions]string{
	fnInit:                      "cuInit",
	fnGetErrorName:              "cuGetErrorName",
	fnDriverGetVersion:          "cuDriverGetVersion",
	fnDeviceGetCount:            "cuDeviceGetCount",
	fnDeviceGet:                 "cuDeviceGet",
	fnDeviceGetName:             "cuDeviceGetName",
	fnDeviceGetUUID:             "cuDeviceGetUuid_v2 cuDeviceGetUuid",
	fnDeviceTotalMem:            "cuDeviceTotalMem_v2",
	fnDeviceGetAttribute:        "cuDeviceGetAttribute",
	fnDeviceGetPCIBusID:         "cuDeviceGetPCIBusId",
	fnDeviceCanAccessPeer:       "cuDeviceCanAccessPeer",
	fnDeviceGetP2PAttribute:     "cuDeviceGetP2PAttribute",
	fnDevicePrimaryCtxRetain:    "cuDevicePrimaryCtxRetain",
	fnDevicePrimaryCtxRelease:   "cuDevicePrimaryCtxRelease_v2",
	fnCtxGetCurrent:             "cuCtxGetCurrent",
	fnCtxSetCurrent:             "cuCtxSetCurrent",
	fnCtxGetStreamPriorityRange: "cuCtxGetStreamPriorityRange",
	fnCtxEnablePeerAccess:       "cuCtxEnablePeerAccess",
	fnCtxDisablePeerAccess:      "cuCtxDisablePeerAccess",
	fnMemGetInfo:                "cuMemGetInfo_v2",
	fnMemAlloc:                  "cuMemAlloc_v2",
	fnMemFree:                   "cuMemFree_v2",
	fnMemHostAlloc:              "cuMemHostAlloc",
	fnMemFreeHost:               "cuMemFreeHost",
	fnMemHostRegister:           "cuMemHostRegister_v2",
	fnMemHostUnregister:         "cuMemHostUnregister",
	fnMemHostGetDevicePointer:   "cuMemHostGetDevicePointer_v2",
	fnMemGetAddressRange:        "cuMemGetAddressRange_v2",
	fnPointerGetAttribute:       "cuPointerGetAttribute",
	fnIPCGetMemHandle:           "cuIpcGetMemHandle",
	fnIPCOpenMemHandle:          "cuIpcOpenMemHandle_v2",
	fnIPCCloseMemHandle:         "cuIpcCloseMemHandle",
	fnStreamCreateWithPriority:  "cuStreamCreateWithPriority",
	fnStreamDestroy:             "cuStreamDestroy_v2",
	fnStreamQuery:               "cuStreamQuery",
	fnStreamGetCtx:              "cuStreamGetCtx",
	fnStreamWaitEvent:           "cuStreamWaitEvent",
	fnStreamWaitValue32:         "cuStreamWaitValue32_v2 cuStreamWaitValue32",
	fnStreamWriteValue32:        "cuStreamWriteValue32_v2 cuStreamWriteValue32",
	fnMemcpyAsync:               "cuMemcpyAsync",
	fnMemsetD8Async:             "cuMemsetD8Async",
	fnLaunchKernel:              "cuLaunchKernel",
	fnLaunchCooperativeKernel:   "cuLaunchCooperativeKernel",
	fnStreamBeginCapture:        "cuStreamBeginCapture_v2",
	fnStreamEndCapture:          "cuStreamEndCapture",
	fnStreamIsCapturing:         "cuStreamIsCapturing",
	fnGraphInstantiate:          "cuGraphInstantiateWithFlags",
	fnGraphLaunch:               "cuGraphLaunch",
	fnGraphDestroy:              "cuGraphDestroy",
	fnGraphExecDestroy:          "cuGraphExecDestroy",
	fnEventCreate:               "cuEventCreate",
	fnEventRecord:               "cuEventRecord",
	fnEventQuery:                "cuEventQuery",
	fnEventDestroy:              "cuEventDestroy_v2",
	fnModuleLoadDataEx:          "cuModuleLoadDataEx",
	fnModuleUnload:              "cuModuleUnload",
	fnModuleGetFunction:         "cuModuleGetFunction",
	fnFuncGetAttribute:          "cuFuncGetAttribute",
	fnFuncSetAttribute:          "cuFuncSetAttribute",
	fnOccupancy:                 "cuOccupancyMaxActiveBlocksPerMultiprocessor",
	fnFuncLoad:                  "cuFuncLoad",
	fnFuncGetParamInfo:          "cuFuncGetParamInfo",
}

// api is a libcuda.API.
type api struct {
	at       [functions]uintptr
	valuesV2 bool
	queues   int // of a device, 0: CUDA's own number
}

// library returns the driver's functions. Only success is remembered: a driver
// may come later.
func library() (*api, error) {
	loaded.Lock()
	defer loaded.Unlock()
	if loaded.api != nil {
		return loaded.api, nil
	}
	queues := connect()
	h, err := load()
	if err != nil {
		return nil, noDevice("the CUDA driver cannot be loaded: %w", err)
	}
	a, err := resolve(func(name string) (uintptr, error) { return symbol(h, name) })
	if err != nil {
		return nil, err
	}
	a.queues = queues
	loaded.api = a
	return a, nil
}

var loaded struct {
	sync.Mutex
	api *api
}

// resolve finds the functions.
func resolve(symbol func(name string) (uintptr, error)) (*api, error) {
	a := new(api)
	for i := range functions {
		var first error
		for name := range strings.SplitSeq(names[i], " ") {
			p, err := symbol(name)
			if err == nil {
				a.at[i] = p
				if i == fnStreamWaitValue32 {
					a.valuesV2 = strings.HasSuffix(name, "_v2")
				}
				break
			}
			if first == nil {
				first = fmt.Errorf("%s: %w", name, err)
			}
		}
		if a.at[i] == 0 && i <= fnOccupancy {
			return nil, noDevice("the CUDA driver is older than CUDA 11.8: %w", first)
		}
	}
	return a, nil
}
