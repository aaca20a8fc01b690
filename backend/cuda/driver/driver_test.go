package driver_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var _ work.Stream = driver.Stream(nil)

func TestArgs(t *testing.T) {
	var none *driver.Args
	require.Zero(t, none.Len())
	require.Empty(t, none.Bytes())

	var a driver.Args
	a.Ptr(1).Uint32(2).Ptr(3).Float32(4).Int32(-5).Struct(make([]byte, 20), 16).Uint32(6).Struct([]byte{7}, 0).Float64(8)
	want := []int{0, 8, 16, 24, 28, 32, 52, 56, 64}
	require.Equal(t, len(want), a.Len())
	for i, at := range want {
		require.Equal(t, at, a.Offset(i), "parameter %d", i)
	}
	require.Len(t, a.Bytes(), 72)
	require.Equal(t, make([]byte, 4), a.Bytes()[12:16], "padding")

	fill := func() { a.Reset().Ptr(1).Uint32(2).Int64(3) }
	fill()
	require.Zero(t, testing.AllocsPerRun(100, fill))
	require.Equal(t, 3, a.Len())
	require.Len(t, a.Bytes(), 24)
}

func TestHandle(t *testing.T) {
	h := driver.MemoryHandle{Raw: [64]byte{1, 63: 2}, Owner: [16]byte{3}, UUID: [16]byte{15: 4}, ID: 5, Offset: 6, Len: 7}
	b := must.Get(h.MarshalBinary())
	require.Len(t, b, driver.MemoryHandleSize)
	var back driver.MemoryHandle
	require.NoError(t, back.UnmarshalBinary(b))
	require.Equal(t, h, back)

	for name, change := range map[string]func(b []byte) []byte{
		"empty":       func([]byte) []byte { return nil },
		"short":       func(b []byte) []byte { return b[:len(b)-1] },
		"long":        func(b []byte) []byte { return append(b, 0) },
		"no bytes":    func(b []byte) []byte { clear(b[112:]); return b },
		"huge":        func(b []byte) []byte { b[119] = 0xff; return b },
		"huge offset": func(b []byte) []byte { b[111] = 0x80; return b },
	} {
		b, _ := h.MarshalBinary()
		old := back
		require.ErrorIs(t, back.UnmarshalBinary(change(b)), driver.ErrInvalid, name)
		require.Equal(t, old, back, "a refused handle changes nothing")
	}
}

func FuzzHandle(f *testing.F) {
	b, _ := driver.MemoryHandle{Len: 1}.MarshalBinary()
	f.Add(b)
	f.Add([]byte(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h driver.MemoryHandle
		if h.UnmarshalBinary(b) != nil {
			return
		}
		require.Equal(t, b, must.Get(h.MarshalBinary()))
	})
}

func TestErrors(t *testing.T) {
	require.NoError(t, driver.ResultError("Alloc", 0, "cuMemAlloc_v2", 0, ""))
	err := driver.ResultError("Alloc", 3, "cuMemAlloc_v2", 2, "")
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	require.EqualError(t, err, "driver: Alloc on device 3: out of memory (cuMemAlloc_v2 returned 2, CUDA_ERROR_OUT_OF_MEMORY)")
	for code, want := range map[int]error{
		1: driver.ErrInvalid, 100: driver.ErrNoDevice, 217: driver.ErrPeerAccess, 218: driver.ErrImage, 500: driver.ErrNotFound,
		700: driver.ErrDeviceLost, 719: driver.ErrDeviceLost, 801: errors.ErrUnsupported,
	} {
		require.ErrorIs(t, driver.ResultError("Copy", 0, "f", code, ""), want, "%d", code)
	}
	err = driver.ResultError("Copy", -1, "cuMemcpyAsync", 31337, "CUDA_ERROR_NEW")
	require.EqualError(t, err, "driver: Copy: the driver refused (cuMemcpyAsync returned 31337, CUDA_ERROR_NEW)")
	e := must.As[*driver.Error](t, fmt.Errorf("wrapped: %w", err))
	require.Equal(t, 31337, e.Code)
}

func TestConflicts(t *testing.T) {
	r, w, s := driver.Reads(100, 10), driver.Writes(105, 10), driver.Shares(100, 10)
	for _, c := range []struct {
		a, b driver.Access
		want bool
	}{
		{r, r, false}, {s, s, false}, {w, w, true}, {r, w, true}, {w, s, true}, {r, s, true},
		{driver.Reads(100, 5), w, false}, {driver.Writes(115, 1), w, false}, {driver.Writes(114, 1), w, true}, {driver.Writes(105, 0), w, false},
	} {
		require.Equal(t, c.want, c.a.Conflicts(c.b), "%v, %v", c.a, c.b)
		require.Equal(t, c.want, c.b.Conflicts(c.a), "%v, %v", c.b, c.a)
	}
	require.Equal(t, "writes [0x69, +10)", w.String())
}

func TestConditions(t *testing.T) {
	for _, c := range []struct {
		cond driver.Condition
		w, v uint32
		want bool
	}{
		{driver.AtLeast, 5, 5, true}, {driver.AtLeast, 4, 5, false}, {driver.AtLeast, 0, math.MaxUint32, true},
		{driver.AtLeast, math.MaxUint32, 0, false}, {driver.Equal, 5, 5, true}, {driver.Equal, 6, 5, false},
		{driver.Condition(7), 0, 0, false},
	} {
		require.Equal(t, c.want, c.cond.Holds(c.w, c.v), "%d %v %d", c.w, c.cond, c.v)
	}
	require.False(t, driver.Condition(3).Valid())
}

func TestDim(t *testing.T) {
	require.Equal(t, 6, driver.Dim{X: 2, Z: 3}.Len())
	require.Equal(t, "2x1x3", driver.Dim{X: 2, Z: 3}.String())
}

// memory is page-locked memory of nobody.
type memory struct {
	driver.HostMemory
	b     []byte
	loads int
	at    int // the load from which the word is 1
}

func (m *memory) Load32(offset int) uint32 {
	if m.loads++; m.loads == m.at {
		driver.StoreWord(m.b, offset, 1)
	}
	return driver.LoadWord(m.b, offset)
}

func TestAwaitWord(t *testing.T) {
	for _, at := range []int{1, 40, 1000, 2100} {
		m := &memory{b: make([]byte, 8), at: at}
		require.NoError(t, driver.AwaitWord(t.Context(), m, 4, 1, driver.Equal))
		require.Equal(t, at, m.loads)
	}
	cause := errors.New("the reason")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	m := &memory{b: make([]byte, 8), at: 1}
	require.NoError(t, driver.AwaitWord(ctx, m, 0, 1, driver.AtLeast), "what is there wins")
	err := driver.AwaitWord(ctx, &memory{b: make([]byte, 8)}, 0, 1, driver.AtLeast)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, "the word at offset 0 is 0, waited for >= 1")
	require.Panics(t, func() { driver.LoadWord(make([]byte, 8), 2) })
	require.Panics(t, func() { driver.StoreWord(make([]byte, 8), 8, 1) })
}

// function is a kernel of nobody.
type function struct{ driver.Function }

func (function) Name() string          { return "f" }
func (function) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: 1} }

func TestCheckLaunch(t *testing.T) {
	good := driver.Launch{Function: function{}, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 32, Y: 32}}
	require.NoError(t, driver.CheckLaunch(1, &good))
	require.ErrorContains(t, driver.CheckLaunch(0, &good), "f was loaded for device 1")
	bad := good
	bad.Access = []driver.Access{{Ptr: 1, Len: 1, Mode: driver.Read | driver.Write}}
	require.ErrorIs(t, driver.CheckLaunch(1, &bad), driver.ErrInvalid)
	require.NoError(t, driver.CheckCopy(0, 0, 0, 0))
	require.NoError(t, driver.CheckCopy(0, 10, 20, 10))
	require.ErrorIs(t, driver.CheckCopy(0, 10, 19, 10), driver.ErrInvalid)
	require.ErrorIs(t, driver.CheckWord("WaitValue", 0, 6, driver.Equal), driver.ErrInvalid)
}
