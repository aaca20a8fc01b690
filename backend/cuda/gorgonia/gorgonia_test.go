//go:build cuda && linux

package gorgonia

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	stdcontext "context"

	"github.com/stretchr/testify/require"
	"gorgonia.org/cu"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
	"github.com/c10d-go/c10d/tensor"
)

func open() (driver.Driver, error) { return Open(Options{}) }

// TestMain keeps one driver open beside those of the tests, so that the devices'
// contexts are made once.
func TestMain(m *testing.M) {
	drivertest.Child(open)
	d, err := open()
	if err != nil {
		panic(err)
	}
	for i := range d.Count() {
		if _, err := d.Device(i); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if err := d.Close(); err != nil {
		panic(err)
	}
	os.Exit(code)
}

func TestDriver(t *testing.T) {
	drivertest.Run(t, drivertest.Config{
		Open: func(t *testing.T) driver.Driver {
			d, err := open()
			require.NoError(t, err)
			return d
		},
		Child:  func(*testing.T, driver.Driver) []string { return nil },
		Rounds: 3,
	})
}

// TestQueues holds that CUDA was asked for as many queues as it has before cu initialised it.
func TestQueues(t *testing.T) {
	d, err := open()
	require.NoError(t, err)
	v, err := d.Device(0)
	require.NoError(t, err)
	want := 32
	if s, ok := os.LookupEnv("CUDA_DEVICE_MAX_CONNECTIONS"); ok {
		want, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	_, queues := v.(driver.Queuer).Queues()
	require.Equal(t, want, queues)
	require.NoError(t, d.Close())
}

// TestOwnContext is the suite in a context that the program has made.
func TestOwnContext(t *testing.T) {
	ctx := ownContext(t)
	drivertest.Run(t, drivertest.Config{
		Open: func(t *testing.T) driver.Driver {
			d, err := Open(Options{Contexts: map[int]cu.CUContext{0: ctx}})
			require.NoError(t, err)
			return d
		},
		Child:  func(*testing.T, driver.Driver) []string { return nil },
		Rounds: 1,
	})
}

// ownContext makes a context that is current on no thread.
func ownContext(t *testing.T) cu.CUContext {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := cu.CurrentContext()
	require.NoError(t, err)
	v, err := cu.GetDevice(0)
	require.NoError(t, err)
	ctx, err := v.MakeContext(cu.SchedAuto)
	require.NoError(t, err)
	require.NoError(t, cu.SetCurrentContext(before))
	t.Cleanup(func() { require.NoError(t, ctx.Destroy()) })
	return ctx
}

// TestProgram is a program with a context, a stream and memory of cu's on a
// thread of its own, part of whose work is done through the driver.
func TestProgram(t *testing.T) {
	ctx := ownContext(t)
	require.NoError(t, ctx.Lock())
	defer runtime.UnlockOSThread()
	s, err := cu.MakeStream(cu.NonBlocking)
	require.NoError(t, err)
	const n = 1000
	p, err := cu.MemAlloc(4 * n)
	require.NoError(t, err)

	d, err := Open(Options{Contexts: map[int]cu.CUContext{0: ctx}})
	require.NoError(t, err)
	v, err := d.Device(0)
	require.NoError(t, err)
	got, err := CUContext(v)
	require.NoError(t, err)
	require.Equal(t, ctx, got)
	st, err := Stream(v, s)
	require.NoError(t, err)
	require.Equal(t, s, CUStream(st))
	x, err := Tensor(v, p, tensor.Float32, 10, 100)
	require.NoError(t, err)
	require.Equal(t, v.ID(), x.Device())
	require.Equal(t, []int{10, 100}, x.Shape())
	m := x.Memory().(driver.Memory)
	require.Equal(t, p, CUDevicePtr(m.Ptr()))

	require.NoError(t, cu.MemsetD8Async(p, 1, 4*n, s)) // cu's own
	image, err := v.Load([]byte(drivertest.PTX))
	require.NoError(t, err)
	add, err := image.Function(drivertest.Add)
	require.NoError(t, err)
	require.NoError(t, st.Launch(&driver.Launch{
		Function: add, Grid: driver.Dim{X: 4}, Block: driver.Dim{X: 128},
		Args: new(driver.Args).Ptr(m.Ptr()).Ptr(m.Ptr()).Uint32(n),
	}))
	h, err := d.AllocHost(4 * n)
	require.NoError(t, err)
	require.NoError(t, st.Copy(h.Ptr(), m.Ptr(), 4*n))
	e, err := st.Record()
	require.NoError(t, err)
	wait, cancel := stdcontext.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, e.Sync(wait))
	e.Release()
	require.Equal(t, slices.Repeat([]byte{2}, 4*n), h.Bytes())

	now, err := cu.CurrentContext()
	require.NoError(t, err)
	require.Equal(t, ctx, now, "the program's context stays on its thread")
	_, err = Tensor(v, p, tensor.Float32, -1)
	require.ErrorIs(t, err, driver.ErrInvalid)
	_, err = Tensor(v, p, tensor.Float32, 1<<40, 1<<40)
	require.ErrorIs(t, err, driver.ErrInvalid)
	_, err = Tensor(v, p, tensor.Float32, 1<<38)
	require.ErrorIs(t, err, driver.ErrInvalid)
	empty, err := Tensor(v, p, tensor.Float32, 0, 3)
	require.NoError(t, err)
	require.NoError(t, Return(empty))

	require.NoError(t, h.Close())
	require.NoError(t, image.Close())
	require.NoError(t, Return(x))
	require.NoError(t, st.Close())
	require.NoError(t, d.Close())
	require.NoError(t, cu.MemFree(p), "it was only borrowed")
	require.NoError(t, s.Destroy())
	require.NoError(t, cu.SetCurrentContext(cu.CUContext{}))
}

// TestLaunchParameters launches no function, with parameters from a structure that has Go pointers too.
func TestLaunchParameters(t *testing.T) {
	of := &struct {
		pointer *int
		params  [8]byte
	}{pointer: new(int)}
	for _, a := range []*driver.Args{nil, new(driver.Args).StructIn(of.params[:]), new(driver.Args).Uint64(1)} {
		for _, cooperative := range []bool{false, true} {
			require.NotEqual(t, libcuda.Success, api{}.Launch(0, 0, &driver.Launch{Args: a, Cooperative: cooperative}))
		}
	}
}

// TestOtherContext has streams of another context refused.
func TestOtherContext(t *testing.T) {
	ctx := ownContext(t)
	d, err := open()
	require.NoError(t, err)
	defer d.Close()
	v, err := d.Device(0)
	require.NoError(t, err)
	require.NoError(t, ctx.Lock())
	defer runtime.UnlockOSThread()
	s, err := cu.MakeStream(cu.NonBlocking)
	require.NoError(t, err)
	_, err = Stream(v, s)
	require.ErrorIs(t, err, driver.ErrInvalid)
	require.NoError(t, s.Destroy())
	require.NoError(t, cu.SetCurrentContext(cu.CUContext{}))
	_, err = Open(Options{Contexts: map[int]cu.CUContext{0: {}}})
	require.ErrorIs(t, err, driver.ErrInvalid)
	_, err = Open(Options{Contexts: map[int]cu.CUContext{1000: ctx}})
	require.ErrorIs(t, err, driver.ErrInvalid)
}
