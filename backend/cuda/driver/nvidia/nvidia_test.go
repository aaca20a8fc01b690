package nvidia

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/internal/must"
)

// TestMain keeps one driver open beside those of the tests: a device's context
// takes a third of a second to make, and goes with the last driver that has it.
func TestMain(m *testing.M) {
	drivertest.Child(Open)
	d, err := Open()
	if err == nil {
		for i := range d.Count() {
			if _, err := d.Device(i); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
	}
	code := m.Run()
	if d != nil {
		if err := d.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// openTest skips the test where there is no GPU.
func openTest(t *testing.T) driver.Driver {
	t.Helper()
	d, err := Open()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	return d
}

func TestDriver(t *testing.T) {
	openTest(t).Close()
	drivertest.Run(t, drivertest.Config{
		Open:      openTest,
		Child:     func(*testing.T, driver.Driver) []string { return nil },
		MaxAllocs: maxAllocs,
		Rounds:    3,
	})
}

// TestTwoDevices is the suite with other processes that have another device
// first: what they open lies on the peer of theirs.
func TestTwoDevices(t *testing.T) {
	d := openTest(t)
	n := d.Count()
	require.NoError(t, d.Close())
	if n < 2 {
		t.Skip("one device only")
	}
	drivertest.Run(t, drivertest.Config{
		Open: openTest,
		Child: func(t *testing.T, d driver.Driver) []string {
			return []string{"CUDA_VISIBLE_DEVICES=" + uuid(t, d, 1) + "," + uuid(t, d, 0)}
		},
		MaxAllocs: -1,
	})
}

func uuid(t *testing.T, d driver.Driver, i int) string {
	v := must.Get(d.Device(i))
	b := v.Info().UUID
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// setup is what a test needs on one device.
type setup struct {
	d driver.Driver
	v driver.Device
	s driver.Stream
}

// closing closes c at the end of the test.
func closing(t testing.TB, c interface{ Close() error }) {
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

func newSetup(t testing.TB) setup {
	t.Helper()
	d, err := Open()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	closing(t, d)
	v := must.Get(d.Device(0))
	s := must.Get(v.NewStream())
	closing(t, s)
	return setup{d, v, s}
}

func (x setup) finish(t testing.TB) {
	t.Helper()
	e := must.Get(x.s.Record())
	defer e.Release()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, e.Sync(ctx))
}

func (x setup) function(t testing.TB, name string) driver.Function {
	t.Helper()
	m := must.Get(x.v.Load([]byte(drivertest.PTX)))
	closing(t, m)
	return must.Get(m.Function(name))
}

func (x setup) host(t testing.TB, n int) driver.HostMemory {
	t.Helper()
	h := must.Get(x.d.AllocHost(n))
	closing(t, h)
	return h
}

// TestForeignMemory borrows what a driver did not allocate, as other libraries'
// memory is.
func TestForeignMemory(t *testing.T) {
	x, other := newSetup(t), newSetup(t)
	m := must.Get(other.v.Alloc(1000))
	closing(t, m)
	h := x.host(t, 1000)
	require.ErrorIs(t, x.s.Copy(h.Ptr(), m.Ptr(), 1000), driver.ErrInvalid, "memory of another driver")
	require.ErrorIs(t, x.s.Memset(m.Ptr(), 1, 1000), driver.ErrInvalid)
	b := must.Get(x.v.Borrow(m.Ptr()+8, 500))
	c, err := x.v.Borrow(m.Ptr()+100, 100)
	require.NoError(t, err)
	require.ErrorIs(t, must.Err(x.v.Borrow(m.Ptr(), 1<<30)), driver.ErrInvalid)
	_, err = x.v.Borrow(h.Ptr(), 10)
	require.ErrorIs(t, err, driver.ErrInvalid, "page-locked memory is no device's")
	require.NoError(t, c.Close())
	require.NoError(t, x.s.Memset(b.Ptr(), 7, 500))
	require.NoError(t, x.s.Copy(h.Ptr(), b.Ptr(), 500))
	x.finish(t)
	require.Equal(t, byte(7), h.Bytes()[499])
	require.NoError(t, b.Close())
	require.ErrorIs(t, x.s.Memset(m.Ptr()+8, 1, 1), driver.ErrInvalid, "nobody lends it any more")
	e := must.Get(other.s.Record())
	require.ErrorIs(t, x.s.Wait(e), driver.ErrInvalid, "another driver's event")
	e.Release()
}

// TestDefaultStream borrows the stream that programs have without making one.
func TestDefaultStream(t *testing.T) {
	x := newSetup(t)
	s := must.Get(x.v.BorrowStream(0))
	m := must.Get(x.v.Alloc(100))
	closing(t, m)
	h := x.host(t, 100)
	require.NoError(t, s.Memset(m.Ptr(), 3, 100))
	require.NoError(t, s.Copy(h.Ptr(), m.Ptr(), 100))
	e, err := s.Record()
	require.NoError(t, err)
	require.NoError(t, x.s.Wait(e))
	e.Release()
	x.finish(t)
	require.Equal(t, byte(3), h.Bytes()[99])
	require.NoError(t, s.Close())
	require.ErrorIs(t, must.Err(x.v.BorrowStream(2)), driver.ErrInvalid)
}

// TestHostCopy copies within the host behind a word that is written later.
func TestHostCopy(t *testing.T) {
	x := newSetup(t)
	const n = 5<<20 + 7
	word, a, b := x.host(t, 4), x.host(t, n), x.host(t, n)
	for round := range uint32(3) {
		require.NoError(t, x.s.WaitValue(word.Ptr(), round+1, driver.AtLeast))
		require.NoError(t, x.s.Copy(b.Ptr(), a.Ptr(), n)) // must not wait for the word
		for i := range a.Bytes() {
			a.Bytes()[i] = byte(uint32(i)*7 + round)
		}
		word.Store32(0, round+1)
		x.finish(t)
		require.True(t, bytes.Equal(a.Bytes(), b.Bytes()), "round %d", round)
		// The next stream takes the buffer of the one before.
		require.NoError(t, x.s.Close())
		s := must.Get(x.v.NewStream())
		closing(t, s)
		x.s = s
	}
}

func TestParameters(t *testing.T) {
	x := newSetup(t)
	m := must.Get(x.v.Alloc(400))
	closing(t, m)
	f := x.function(t, drivertest.Fill)
	launch := func(cooperative bool, args *driver.Args) error {
		return x.s.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 2}, Block: driver.Dim{X: 64}, Cooperative: cooperative, Args: args})
	}
	for _, cooperative := range []bool{false, true} {
		require.NoError(t, launch(cooperative, new(driver.Args).Ptr(m.Ptr()).Uint32(5).Uint32(100)))
		if x.v.Info().Driver >= 12040 {
			for _, bad := range []*driver.Args{
				nil, new(driver.Args).Ptr(m.Ptr()).Uint32(5), new(driver.Args).Ptr(m.Ptr()).Uint64(5).Uint32(100),
				new(driver.Args).Ptr(m.Ptr()).Uint32(5).Uint32(100).Uint32(1),
			} {
				require.ErrorIs(t, launch(cooperative, bad), driver.ErrInvalid)
			}
		}
	}
	require.ErrorIs(t, x.s.Launch(&driver.Launch{
		Function: f, Grid: driver.Dim{X: 1 << 20}, Block: driver.Dim{X: 1024}, Cooperative: true,
		Args: new(driver.Args).Ptr(m.Ptr()).Uint32(5).Uint32(100),
	}), driver.ErrInvalid, "more blocks than can run at the same time")
	x.finish(t)
}

// TestLost lets a kernel write where nothing is, in a process of its own.
func TestLost(t *testing.T) {
	const variable = "C10D_NVIDIA_LOST"
	if os.Getenv(variable) == "" {
		openTest(t).Close()
		self := must.Get(os.Executable())
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, self, "-test.run=^TestLost$", "-test.v")
		cmd.Env = append(os.Environ(), variable+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		t.Logf("%s", out)
		return
	}
	d := must.Get(Open())
	v := must.Get(d.Device(0))
	s := must.Get(v.NewStream())
	m := must.Get(v.Load([]byte(drivertest.PTX)))
	f := must.Get(m.Function(drivertest.Fill))
	mem := must.Get(v.Alloc(10))
	require.NoError(t, s.Err())
	require.NoError(t, s.Launch(&driver.Launch{
		Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Ptr(0x10).Uint32(1).Uint32(1),
	}))
	e, err := s.Record()
	if err == nil {
		err = e.Sync(t.Context())
	}
	t.Log(err)
	require.ErrorIs(t, err, driver.ErrDeviceLost)
	require.ErrorContains(t, err, "CUDA_ERROR_ILLEGAL_ADDRESS")
	require.ErrorIs(t, s.Err(), driver.ErrDeviceLost)
	require.ErrorIs(t, s.Memset(mem.Ptr(), 1, 10), driver.ErrDeviceLost)
	_, err = v.Alloc(10)
	require.ErrorIs(t, err, driver.ErrDeviceLost)
	require.ErrorContains(t, err, "driver: Alloc on device 0")
	e.Release()
	require.NoError(t, mem.Close())
	require.NoError(t, s.Close())
	require.NoError(t, m.Close())
	require.NoError(t, d.Close())
}

// TestLeaks has Close say what was left.
func TestLeaks(t *testing.T) {
	d := openTest(t)
	v := must.Get(d.Device(0))
	must.Get(v.Alloc(10))
	s, err := v.NewStream()
	require.NoError(t, err)
	must.Get(s.Record())
	require.ErrorContains(t, d.Close(), "not closed before: [event: 1 memory: 1 stream: 1]")
	require.ErrorIs(t, s.Memset(16, 0, 1), driver.ErrInvalid)
	require.ErrorIs(t, must.Err(s.Record()), driver.ErrClosed)
}

func TestNoDriver(t *testing.T) {
	d, err := Open()
	if err == nil {
		require.NoError(t, d.Close())
		t.Skip("there is one")
	}
	require.ErrorIs(t, err, driver.ErrNoDevice)
	require.ErrorContains(t, err, "driver: Open: no usable device")
	require.Nil(t, d)
}
