package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/ncclsim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen.
const patience = 60 * time.Second

// world is the ranks of a group, each with a device of one simulated machine.
type world struct {
	testing.TB
	ctx    context.Context
	m      *sim.Machine
	lib    *ncclsim.Library
	store  store.Store
	fabric *mem.Fabric // of the control groups
	ranks  []*rank
}

// rank is one rank: a process with a driver, and what its caller has.
type rank struct {
	*world
	r      int
	d      *sim.Driver
	dev    driver.Device
	b      *nccl.Backend
	ref    backend.Backend // the same ranks with tensors in CPU memory
	stream driver.Stream   // the caller's
	close  []interface{ Close() error }
}

// alone is a backend.Meeting: all ranks are of this library.
type alone struct{}

func (alone) Lacks(func() []int)   {}
func (alone) Silent(l []int) []int { return nil }

type setup struct {
	size    int
	torch   bool // PyTorch's ranks may take part
	options nccl.Options
	api     func(libnccl.API) libnccl.API // in front of the library; may be nil
	timeout time.Duration
	sim     sim.Config
	store   store.Store
	trace   func(device int, call string)
	log     *slog.Logger
	wait    time.Duration // before the first line about a wait; 0 means that of users
}

func newWorld(t testing.TB, s setup) *world {
	s.sim.Devices = s.size
	m := must.Get(sim.New(s.sim))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	w := &world{TB: t, ctx: ctx, m: m, lib: must.Get(ncclsim.New(m)), store: s.store}
	w.lib.Trace = s.trace
	if w.store == nil {
		w.store = store.NewHash()
		t.Cleanup(func() { w.store.Close() })
	}
	for r := range s.size {
		x := &rank{world: w, r: r, d: must.Get(m.Process(fmt.Sprint("rank ", r)))}
		x.dev = must.Get(x.d.Device(r))
		x.stream = must.Get(x.dev.NewStream(driver.StreamOptions{Name: "caller"}))
		x.close = append(x.close, x.stream)
		w.ranks = append(w.ranks, x)
	}
	fabrics := [2]*mem.Fabric{mem.NewFabric(), mem.NewFabric()}
	w.fabric = fabrics[0]
	w.each(func(x *rank) (err error) {
		defer must.Catch(&err)
		api := w.lib.API(0)
		if s.api != nil {
			api = s.api(api)
		}
		o := s.options.With(api)
		o.Driver, o.Device, o.Control = x.d, x.dev.ID(), gloo.Options{Fabric: fabrics[0]}
		bo := backend.Options{Store: w.store, Rank: x.r, Size: s.size, Group: "g", Specific: o, Timeout: s.timeout, Logger: s.log}
		if !s.torch {
			bo.Meeting = alone{}
		}
		ctx := w.ctx
		if s.wait > 0 {
			ctx = waiting.WithFirst(ctx, s.wait)
		}
		x.b = must.Get(nccl.New(ctx, bo))
		x.ref = must.Get(gloo.New(w.ctx, backend.Options{Rank: x.r, Size: s.size, Group: "reference", Specific: gloo.Options{Fabric: fabrics[1]}}))
		return nil
	})
	return w
}

// each calls f for every rank at the same time.
func (w *world) each(f func(x *rank) error) {
	w.Helper()
	errs := make([]error, len(w.ranks))
	var wg sync.WaitGroup
	for r, x := range w.ranks {
		wg.Go(func() {
			defer must.Catch(&errs[r])
			errs[r] = f(x)
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err != nil {
			errs[r] = fmt.Errorf("rank %d: %w", r, err)
		}
	}
	require.NoError(w, errors.Join(errs...))
}

// end closes everything. The machine and the library must have found nothing wrong.
func (w *world) end() {
	w.Helper()
	w.each(func(x *rank) error { return errors.Join(x.b.Close(), x.ref.Close()) })
	for _, x := range w.ranks {
		e := must.Get(x.stream.Record())
		require.NoError(w, e.Sync(w.ctx))
		e.Release()
		for _, c := range slices.Backward(x.close) {
			require.NoError(w, c.Close())
		}
	}
	w.lib.Close()
	require.Eventually(w, func() bool { return w.lib.Open() == 0 }, patience, time.Millisecond, "communicators left open")
	require.Empty(w, w.lib.Violations())
	require.NoError(w, w.m.Close())
}

// context has the caller's stream.
func (x *rank) context() context.Context {
	return driver.WithCallStreams(x.ctx, &driver.CallStreams{Before: []driver.Stream{x.stream}})
}

// within has the call be part of the caller's stream.
func (x *rank) within() context.Context {
	return driver.WithCallStreams(x.ctx, &driver.CallStreams{Before: []driver.Stream{x.stream}, In: x.stream})
}

// alloc returns a tensor on the rank's device.
func (x *rank) alloc(d tensor.DType, shape ...int) *tensor.Tensor {
	n := d.Size()
	for _, k := range shape {
		n *= k
	}
	m := must.Get(x.dev.Alloc(n))
	x.close = append(x.close, m)
	return must.Get(tensor.OnDevice(d, m, shape...))
}

// put copies a tensor of the host to the device by the caller's stream, and does not wait.
func (x *rank) put(to, from *tensor.Tensor) {
	if from.Len() == 0 {
		return
	}
	h := must.Get(x.d.AllocHost(from.ByteLen()))
	x.close = append(x.close, h)
	x.d.HostAccess("put", driver.Writes(h.Ptr(), h.Len()))
	must.Do(from.Pack(h.Bytes()))
	must.Do(x.stream.Copy(at(to), h.Ptr(), from.ByteLen()))
}

// get returns what a tensor has after what the caller's stream was given.
func (x *rank) get(t *tensor.Tensor) *tensor.Tensor {
	out := must.Get(tensor.New(t.DType(), t.Shape()...))
	if t.Len() == 0 {
		return out
	}
	h := must.Get(x.d.AllocHost(t.ByteLen()))
	x.close = append(x.close, h)
	must.Do(x.stream.Copy(h.Ptr(), at(t), t.ByteLen()))
	e := must.Get(x.stream.Record())
	must.Do(e.Sync(x.ctx))
	e.Release()
	x.d.HostAccess("get", driver.Reads(h.Ptr(), h.Len()))
	must.Do(out.Unpack(h.Bytes()))
	return out
}

func at(t *tensor.Tensor) driver.Ptr {
	return t.Memory().(driver.Memory).Ptr() + driver.Ptr(t.Offset()*t.DType().Size())
}

// floats returns a tensor of the host.
func floats(v ...float32) *tensor.Tensor { return must.Get(tensor.Of(v, len(v))) }

// on returns a tensor on the device with the elements of one of the host.
func (x *rank) on(from *tensor.Tensor) *tensor.Tensor {
	t := x.alloc(from.DType(), from.Shape()...)
	x.put(t, from)
	return t
}

// wait orders the caller's stream after what a call has returned.
func (x *rank) wait(w *work.Work, err error) {
	must.Do(err)
	must.Do(w.Synchronize(x.stream))
	must.Do(w.Wait(x.ctx))
}

// calls notes what a library is asked for, by device.
type calls struct {
	mu   sync.Mutex
	made map[int][]string
}

func (c *calls) trace(device int, call string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made == nil {
		c.made = map[int][]string{}
	}
	c.made[device] = append(c.made[device], call)
}

// take returns a device's calls since the last take, in one line.
func (c *calls) take(device int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := strings.Join(c.made[device], "; ")
	delete(c.made, device)
	return s
}
