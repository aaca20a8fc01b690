package edges_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// mutationSeeds is how many runs without a call may be in order by luck.
const mutationSeeds = 400

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen.
const patience = 60 * time.Second

// mix is a kernel: dst[i] = 3*dst[i] + src[i]. Some tests leave orders out.
//
//go:norace
func mix(k *sim.Run) error {
	n := k.Int(2)
	dst, src := k.Write(k.Ptr(0), n), k.Read(k.Ptr(1), n)
	for i := range dst {
		dst[i] = 3*dst[i] + src[i]
	}
	return nil
}

// rig is a simulated host with devices, streams and a tracker.
type rig struct {
	testing.TB
	ctx     context.Context
	m       *sim.Machine
	d       *sim.Driver
	t       *edges.Tracker
	devices []driver.Device
	mix     []driver.Function
	closers []interface{ Close() error }
	lenient bool // what cannot be made ends the program with a panic, see safely
}

func newRig(tb testing.TB, devices int, seed uint64) *rig {
	return newRigOf(tb, sim.Config{Devices: devices, Seed: seed})
}

func newRigOf(tb testing.TB, c sim.Config) *rig {
	c.Kernels = map[string]sim.Kernel{"mix": mix}
	d := must.Get(sim.Open(c))
	devices := c.Devices
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	tb.Cleanup(cancel)
	r := &rig{TB: tb, ctx: ctx, m: d.Machine(), d: d, t: edges.New(d)}
	for i := range devices {
		v := must.Get(d.Device(i))
		r.devices = append(r.devices, v)
		for j := range devices {
			if i != j {
				require.NoError(tb, v.EnablePeer(j))
			}
		}
		mod := must.Get(v.Load(sim.Image("mix")))
		r.closers = append(r.closers, mod)
		f := must.Get(mod.Function("mix"))
		r.mix = append(r.mix, f)
	}
	return r
}

// must ends the test, or the program, if err is not nil.
func (r *rig) must(err error) {
	if err != nil && r.lenient {
		panic(failure{err})
	}
	require.NoError(r, err)
}

type failure struct{ err error }

// safely returns the error of a program that must has ended.
func safely(f func() error) (err error) {
	defer func() {
		switch x := recover().(type) {
		case nil:
		case failure:
			err = x.err
		default:
			panic(x)
		}
	}()
	return f()
}

func (r *rig) stream(device int, name string) driver.Stream {
	s, err := r.devices[device].NewStream(driver.StreamOptions{Name: name})
	r.must(err)
	r.closers = append(r.closers, s)
	return s
}

func (r *rig) alloc(device, n int) driver.Ptr {
	m, err := r.devices[device].Alloc(n)
	r.must(err)
	r.closers = append(r.closers, m)
	return m.Ptr()
}

func (r *rig) host(n int) driver.HostMemory {
	h, err := r.d.AllocHost(n)
	r.must(err)
	r.closers = append(r.closers, h)
	return h
}

// close ends everything and returns what was wrong.
func (r *rig) close() error {
	for _, c := range r.closers {
		require.NoError(r, c.Close())
	}
	require.NoError(r, r.t.Close())
	for i, v := range r.devices {
		for j := range r.devices {
			if i != j {
				require.NoError(r, v.DisablePeer(j))
			}
		}
	}
	return r.d.Close()
}

// run runs a batch and waits for it.
func (r *rig) run(b *edges.Batch) {
	r.Helper()
	p := must.Get(b.Run())
	require.NoError(r, p.Sync(r.ctx))
	p.Release()
}

// enqueue runs a batch; if that fails, what was enqueued has ended when it returns.
func (r *rig) enqueue(b *edges.Batch) (*edges.Pending, error) {
	p, err := b.Run()
	if err == nil || p == nil {
		return p, err
	}
	r.m.Inject(nil)
	if e := p.Sync(r.ctx); e != nil {
		require.ErrorIs(r, err, e)
	}
	// What is left of the turns has ended by then, or does not hold up any stream.
	require.NoError(r, r.m.Quiesce(r.ctx), "after %v", err)
	p.Release()
	return nil, err
}

// settle is Settle while turns of aborted batches are yet to end, for which streams wait.
func (r *rig) settle() error {
	for {
		err := r.m.Settle(r.ctx)
		var stuck *sim.Stuck
		if !errors.As(err, &stuck) || r.ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// bytes returns what is at p.
func (r *rig) bytes(s driver.Stream, p driver.Ptr, n int) []byte {
	r.Helper()
	h := must.Get(r.d.AllocHost(n))
	b := r.t.Batch()
	b.Copy(s, h.Ptr(), p, n)
	r.run(b)
	out := append([]byte(nil), h.Bytes()...)
	require.NoError(r, h.Close())
	return out
}

// random returns a source of randomness, and says its seed if the test fails.
func random(tb testing.TB, seed uint64) *rand.Rand {
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Log("seed", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

// eachSeed runs f with the seeds, with fewer if it takes that much longer.
func eachSeed(t *testing.T, longer int, f func(t *testing.T, seed uint64)) {
	n := max(testsize.Of(5, 8, 40)/longer, 2)
	for seed := range uint64(n) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { f(t, seed) })
	}
}
