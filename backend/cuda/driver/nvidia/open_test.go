//go:build (linux && !android && (amd64 || arm64)) || (windows && amd64)

package nvidia

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
)

// TestResolve finds functions in libraries of several ages.
func TestResolve(t *testing.T) {
	missing := func(without ...string) func(string) (uintptr, error) {
		return func(name string) (uintptr, error) {
			if slices.Contains(without, name) {
				return 0, errors.New("undefined symbol")
			}
			return uintptr(len(name)), nil
		}
	}
	a, err := resolve(missing())
	require.NoError(t, err)
	require.True(t, a.StreamValuesV2())
	for i, p := range a.at {
		require.NotZero(t, p, names[i])
		require.NotEmpty(t, names[i])
	}
	a, err = resolve(missing("cuFuncLoad", "cuFuncGetParamInfo", "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2", "cuDeviceGetUuid_v2"))
	require.NoError(t, err, "older drivers")
	require.False(t, a.StreamValuesV2())
	require.Equal(t, uintptr(len("cuStreamWaitValue32")), a.at[fnStreamWaitValue32])
	require.Equal(t, uintptr(len("cuDeviceGetUuid")), a.at[fnDeviceGetUUID])
	require.Equal(t, libcuda.Success, a.FunctionLoad(1), "nothing to call")
	_, _, r := a.FunctionParam(1, 0)
	require.Equal(t, libcuda.ErrNotSupported, r)
	for i := range fnFuncLoad {
		_, err := resolve(missing(strings.Fields(names[i])...))
		require.ErrorIs(t, err, driver.ErrNoDevice)
		require.ErrorContains(t, err, strings.Fields(names[i])[0]+": undefined symbol")
		require.ErrorContains(t, err, "older than CUDA 11.8")
	}
}

// TestHandleArguments holds where the C conventions have a structure of 64 bytes.
func TestHandleArguments(t *testing.T) {
	var h [64]byte
	for i := range h {
		h[i] = byte(i + 1)
	}
	f := newFrame()
	defer f.free()
	for i := range f.args {
		f.args[i] = ^uintptr(0)
	}
	n := f.handle(&h, 5)
	require.Equal(t, uintptr(unsafe.Pointer(&f.out[0])), f.args[0])
	if runtime.GOARCH == "amd64" && runtime.GOOS == "linux" {
		require.Equal(t, 14, n)
		require.Equal(t, []uintptr{5, 0, 0, 0, 0}, f.args[1:6], "six registers in all")
		require.Equal(t, h[:], unsafe.Slice((*byte)(unsafe.Pointer(&f.args[6])), 64), "and the stack")
		return
	}
	require.Equal(t, 3, n)
	require.Equal(t, uintptr(unsafe.Pointer(&f.raw)), f.args[1])
	require.Equal(t, h, f.raw)
	require.Equal(t, uintptr(5), f.args[2])
}
