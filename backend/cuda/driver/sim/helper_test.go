package sim_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// patience bounds what must happen.
const patience = 60 * time.Second

// host is a process of a simulated host, with what was made in it.
type host struct {
	testing.TB
	ctx     context.Context
	m       *sim.Machine
	d       *sim.Driver
	closers []interface{ Close() error }
}

// open returns the only process of a machine.
func open(tb testing.TB, c sim.Config) *host {
	tb.Helper()
	if c.Kernels == nil {
		c.Kernels = kernels()
	}
	return newHost(tb, must.Get(sim.Open(c)))
}

func newHost(tb testing.TB, d *sim.Driver) *host {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	tb.Cleanup(cancel)
	return &host{TB: tb, ctx: ctx, m: d.Machine(), d: d}
}

func (h *host) device(i int) driver.Device {
	h.Helper()
	return must.Get(h.d.Device(i))
}

func (h *host) stream(device int, name string) driver.Stream {
	h.Helper()
	s := must.Get(h.device(device).NewStream(driver.StreamOptions{Name: name}))
	h.closers = append(h.closers, s)
	return s
}

func (h *host) alloc(device, n int) driver.Memory {
	h.Helper()
	m := must.Get(h.device(device).Alloc(n))
	h.closers = append(h.closers, m)
	return m
}

func (h *host) pinned(n int) driver.HostMemory {
	h.Helper()
	m := must.Get(h.d.AllocHost(n))
	h.closers = append(h.closers, m)
	return m
}

func (h *host) kernel(device int, name string) driver.Function {
	h.Helper()
	mod := must.Get(h.device(device).Load(sim.Image(name)))
	h.closers = append(h.closers, mod)
	return must.Get(mod.Function(name))
}

// launch runs a kernel on memory; its arguments are the addresses.
func (h *host) launch(s driver.Stream, f driver.Function, access ...driver.Access) {
	h.Helper()
	var args driver.Args
	for _, a := range access {
		args.Ptr(a.Ptr).Int64(int64(a.Len))
	}
	require.NoError(h, s.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: &args, Access: access}))
}

// order makes later work of s come after what other has been given.
func (h *host) order(s, other driver.Stream) {
	h.Helper()
	e := must.Get(other.Record())
	require.NoError(h, s.Wait(e))
	e.Release()
}

// wait blocks until what s was given has ended.
func (h *host) wait(s driver.Stream) {
	h.Helper()
	e := must.Get(s.Record())
	require.NoError(h, e.Sync(h.ctx))
	e.Release()
}

// close closes what was made and returns what was wrong.
func (h *host) close() error {
	h.Helper()
	for _, c := range h.closers {
		require.NoError(h, c.Close())
	}
	return h.d.Close()
}

// settle waits for everything, and closes.
func (h *host) settle() error {
	h.Helper()
	require.NoError(h, h.m.Settle(h.ctx))
	return h.close()
}

func races(err error) int {
	n := 0
	var walk func(error)
	walk = func(err error) {
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range joined.Unwrap() {
				walk(e)
			}
			return
		}
		var r *sim.Race
		if errors.As(err, &r) {
			n++
		}
	}
	walk(err)
	return n
}

// kernels are drivertest's, in Go, and some more.
func kernels() map[string]sim.Kernel {
	return map[string]sim.Kernel{
		drivertest.Fill: func(k *sim.Run) error {
			dst := sim.Slice[uint32](k.Write(k.Ptr(0), 4*int(k.Uint32(2))))
			for i := range dst {
				dst[i] = k.Uint32(1)
			}
			return nil
		},
		drivertest.Add: func(k *sim.Run) error {
			n := 4 * int(k.Uint32(2))
			dst, src := sim.Slice[uint32](k.Write(k.Ptr(0), n)), sim.Slice[uint32](k.Read(k.Ptr(1), n))
			for i := range dst {
				dst[i] += src[i]
			}
			return nil
		},
		drivertest.Delay: func(k *sim.Run) error {
			time.Sleep(time.Duration(k.Uint64(0) / 2))
			return nil
		},
		drivertest.Await: func(k *sim.Run) error {
			k.Await(k.Ptr(0), k.Uint32(1), driver.AtLeast)
			return nil
		},
		drivertest.Params: func(k *sim.Run) error {
			out := sim.Slice[uint32](k.Write(k.Ptr(0), 44))
			out[0] = k.Uint32(1)
			copy(out[1:9], sim.Slice[uint32](k.Arg(2)[:32]))
			out[9], out[10] = k.Uint32(3), k.Uint32(4)
			return nil
		},
		"sum": sum, "touch": touch, "tell": tell, "hear": hear, "hasty": hasty,
		"fail":  func(k *sim.Run) error { return errors.New("the kernel said no") },
		"panic": func(k *sim.Run) error { panic("ouch") },
		// beyond(p, n) writes a byte more than it declares.
		"beyond": func(k *sim.Run) error {
			k.Write(k.Ptr(0), k.Int(1)+1)[0] = 1
			return nil
		},
		// readonly(p, n) writes what it declares to read.
		"readonly": func(k *sim.Run) error {
			k.Write(k.Ptr(0), k.Int(1))[0] = 1
			return nil
		},
	}
}

// someSeeds returns how many seeds a test with many cases runs with.
func someSeeds() uint64 {
	return testsize.Of[uint64](3, 8, 40)
}

// The kernels of programs that lack an order on purpose; see Config.Quiet.

// sum(dst, n, src, n) adds byte by byte.
//
//go:norace
func sum(k *sim.Run) error {
	dst, src := k.Write(k.Ptr(0), k.Int(1)), k.Read(k.Ptr(2), k.Int(3))
	for i := range dst {
		dst[i] += src[i]
	}
	return nil
}

// touch(p, n) writes.
//
//go:norace
func touch(k *sim.Run) error {
	b := k.Write(k.Ptr(0), k.Int(1))
	for i := range b {
		b[i] = 1
	}
	return nil
}

// tell(word, 4, p, n) writes and sets the word.
//
//go:norace
func tell(k *sim.Run) error {
	b := k.Write(k.Ptr(2), k.Int(3))
	for i := range b {
		b[i] = 1
	}
	k.Store(k.Ptr(0), 1)
	return nil
}

// hear(word, 4, from, n, to, n) copies when the word is set.
//
//go:norace
func hear(k *sim.Run) error {
	if k.Await(k.Ptr(0), 1, driver.AtLeast) {
		to, from := k.Write(k.Ptr(4), k.Int(5)), k.Read(k.Ptr(2), k.Int(3))
		for i := range to {
			to[i] = from[i]
		}
	}
	return nil
}

// hasty copies before that.
//
//go:norace
func hasty(k *sim.Run) error {
	to, from := k.Write(k.Ptr(4), k.Int(5)), k.Read(k.Ptr(2), k.Int(3))
	for i := range to {
		to[i] = from[i]
	}
	k.Await(k.Ptr(0), 1, driver.AtLeast)
	return nil
}
