package driver

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

var (
	// ErrNoDevice is matched where there is no driver, or no device behind it.
	ErrNoDevice = errors.New("no usable device")

	// ErrInvalid is matched when an argument was wrong. Nothing has happened.
	ErrInvalid = errors.New("invalid argument")

	// ErrOutOfMemory is matched when device or host memory ran out.
	ErrOutOfMemory = errors.New("out of memory")

	// ErrClosed is matched when something was used after its Close.
	ErrClosed = errors.New("closed")

	// ErrNotFound is matched when a module has no such function.
	ErrNotFound = errors.New("not found")

	// ErrPeerAccess is matched when devices cannot reach each other, or a kernel
	// used another device's memory without EnablePeer.
	ErrPeerAccess = errors.New("no peer access")

	// ErrOwnHandle is matched when a process opens a handle of its own. The
	// memory is there already: use its address, with EnablePeer if needed.
	ErrOwnHandle = errors.New("the handle is this process's own")

	// ErrImage is matched when a module cannot be used on the device.
	ErrImage = errors.New("unusable kernel image")

	// ErrCapture is matched when something cannot be captured, or a capture cannot be
	// begun or ended.
	ErrCapture = errors.New("capture refused")

	// ErrDeviceLost is matched when this process can no longer use the device. A
	// kernel has touched memory that it may not touch, memory has an error that cannot
	// be corrected, or the device is gone. Every later call on the device returns it too.
	ErrDeviceLost = errors.New("device lost")
)

// Error says how a call failed: the call, the device, and the driver's own error. errors.Is finds
// this package's sentinels in it.
type Error struct {
	Call   string // the method of this package: "Alloc", "Copy", ...
	Device int    // the device, -1 if none
	Func   string // the driver's function, if one failed: "cuMemAlloc_v2"
	Code   int    // what it returned, 0 if none failed
	Name   string // the name of that: "CUDA_ERROR_OUT_OF_MEMORY"
	Err    error  // a sentinel, or an error that wraps one
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("driver: " + e.Call)
	if e.Device >= 0 {
		b.WriteString(" on device " + strconv.Itoa(e.Device))
	}
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	if e.Func != "" {
		b.WriteString(" (" + e.Func + " returned " + strconv.Itoa(e.Code))
		if e.Name != "" {
			b.WriteString(", " + e.Name)
		}
		b.WriteString(")")
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ResultError returns the error for a function of CUDA's driver that returned
// code, nil for 0. Name is what cuGetErrorName says, "" if it was not asked:
// the names of the codes that matter here are known.
func ResultError(call string, device int, function string, code int, name string) error {
	if code == 0 {
		return nil
	}
	r, known := results[code]
	if !known {
		r.err = errDriver
	}
	if name == "" {
		name = r.name
	}
	return &Error{Call: call, Device: device, Func: function, Code: code, Name: name, Err: r.err}
}

// ResultNotReady is what CUDA's queries return before the work has ended. It is
// no error.
const ResultNotReady = 600

type result struct {
	name string
	err  error
}

var errDriver = errors.New("the driver refused")

func capture(why string) error { return fmt.Errorf("%w: %s", ErrCapture, why) }

// results is CUresult as far as calls of this package can return it.
var results = map[int]result{
	1:   {"CUDA_ERROR_INVALID_VALUE", ErrInvalid},
	2:   {"CUDA_ERROR_OUT_OF_MEMORY", ErrOutOfMemory},
	3:   {"CUDA_ERROR_NOT_INITIALIZED", ErrNoDevice},
	4:   {"CUDA_ERROR_DEINITIALIZED", ErrClosed},
	34:  {"CUDA_ERROR_STUB_LIBRARY", ErrNoDevice},
	46:  {"CUDA_ERROR_DEVICE_UNAVAILABLE", ErrNoDevice},
	100: {"CUDA_ERROR_NO_DEVICE", ErrNoDevice},
	101: {"CUDA_ERROR_INVALID_DEVICE", ErrInvalid},
	200: {"CUDA_ERROR_INVALID_IMAGE", ErrImage},
	201: {"CUDA_ERROR_INVALID_CONTEXT", ErrInvalid},
	208: {"CUDA_ERROR_ALREADY_MAPPED", ErrInvalid},
	209: {"CUDA_ERROR_NO_BINARY_FOR_GPU", ErrImage},
	214: {"CUDA_ERROR_ECC_UNCORRECTABLE", ErrDeviceLost},
	217: {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", ErrPeerAccess},
	218: {"CUDA_ERROR_INVALID_PTX", ErrImage},
	220: {"CUDA_ERROR_NVLINK_UNCORRECTABLE", ErrDeviceLost},
	221: {"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", ErrImage},
	222: {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", ErrImage},
	226: {"CUDA_ERROR_CONTAINED", ErrDeviceLost},
	300: {"CUDA_ERROR_INVALID_SOURCE", ErrImage},
	304: {"CUDA_ERROR_OPERATING_SYSTEM", errDriver},
	400: {"CUDA_ERROR_INVALID_HANDLE", ErrInvalid},
	401: {"CUDA_ERROR_ILLEGAL_STATE", ErrInvalid},
	500: {"CUDA_ERROR_NOT_FOUND", ErrNotFound},
	600: {"CUDA_ERROR_NOT_READY", errDriver},
	700: {"CUDA_ERROR_ILLEGAL_ADDRESS", ErrDeviceLost},
	701: {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", ErrInvalid},
	702: {"CUDA_ERROR_LAUNCH_TIMEOUT", ErrDeviceLost},
	704: {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", ErrInvalid},
	705: {"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", ErrPeerAccess},
	709: {"CUDA_ERROR_CONTEXT_IS_DESTROYED", ErrClosed},
	710: {"CUDA_ERROR_ASSERT", ErrDeviceLost},
	711: {"CUDA_ERROR_TOO_MANY_PEERS", ErrPeerAccess},
	712: {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", ErrInvalid},
	713: {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", ErrInvalid},
	714: {"CUDA_ERROR_HARDWARE_STACK_ERROR", ErrDeviceLost},
	715: {"CUDA_ERROR_ILLEGAL_INSTRUCTION", ErrDeviceLost},
	716: {"CUDA_ERROR_MISALIGNED_ADDRESS", ErrDeviceLost},
	717: {"CUDA_ERROR_INVALID_ADDRESS_SPACE", ErrDeviceLost},
	718: {"CUDA_ERROR_INVALID_PC", ErrDeviceLost},
	719: {"CUDA_ERROR_LAUNCH_FAILED", ErrDeviceLost},
	720: {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", ErrInvalid},
	800: {"CUDA_ERROR_NOT_PERMITTED", errDriver},
	801: {"CUDA_ERROR_NOT_SUPPORTED", errors.ErrUnsupported},
	802: {"CUDA_ERROR_SYSTEM_NOT_READY", ErrNoDevice},
	803: {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ErrNoDevice},
	804: {"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", ErrNoDevice},
	900: {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", capture("CUDA cannot capture this call")},
	901: {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", capture("an earlier call ended the capture")},
	902: {"CUDA_ERROR_STREAM_CAPTURE_MERGE", capture("the event is of another capture")},
	903: {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", capture("the capture was not begun on this stream")},
	904: {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", capture("the stream does not wait for the end of what another captured stream was given")},
	905: {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", capture("the event was recorded outside of the capture")},
	906: {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", capture("the call uses the default stream")},
	907: {"CUDA_ERROR_CAPTURED_EVENT", capture("the event was recorded in a capture")},
	908: {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", capture("the capture was begun on another thread")},
	999: {"CUDA_ERROR_UNKNOWN", ErrDeviceLost},
}
