package cuda_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// smalls makes a world of ranks with a device each, and counts what is launched.
func smalls(t *testing.T, seed uint64, s sim.Semantics, size int, o cuda.Options) (*world, *atomic.Int32) {
	o.AllReduce = cuda.HostWork
	w := newWorld(t, setup{
		size: size, timeout: patience, options: o,
		sim: sim.Config{Devices: size, Seed: seed, Semantics: s, Kernels: simkernels.All()},
	})
	return w, w.launches()
}

// launches counts what is launched.
func (w *world) launches() *atomic.Int32 {
	launched := new(atomic.Int32)
	w.m.Skip(func(c sim.Call) bool {
		if c.Name == "Launch" {
			launched.Add(1)
		}
		return false
	})
	return launched
}

// TestSmall has all-reduces that one kernel does the device's part of among others, all
// of them on their way at a time.
func TestSmall(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		chunk := 64 + 16*rng.IntN(64)
		w, launched := smalls(t, seed, s, 2+rng.IntN(2), cuda.Options{Chunk: chunk, Slots: 1 + rng.IntN(3)})
		var sizes []int
		for range 16 {
			n := 1 + rng.IntN(chunk/4)
			if len(sizes) == 0 || rng.IntN(3) == 0 {
				n += chunk
			}
			sizes = append(sizes, n)
		}
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var all []*pair
			var works []*work.Work
			for i, n := range sizes {
				q, err := x.pairOf(rng, tensor.Float32, r, laid(0, n), true)
				if err != nil {
					return err
				}
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{q.dev}, backend.AllReduceOptions{})
				if err == nil && i == 0 {
					// Then all have shown their devices.
					err = v.Wait(x.ctx)
				}
				if err != nil {
					return err
				}
				if err = errors.Join(err, v.Synchronize(x.stream[r]), x.back(q)); err != nil {
					return err
				}
				all, works = append(all, q), append(works, v)
			}
			for i, q := range all {
				v, err := x.cpu.AllReduce(x.ctx, []*tensor.Tensor{q.cpu}, backend.AllReduceOptions{})
				if err := errors.Join(err, work.WaitAll(x.ctx, works[i], v), x.check(q)); err != nil {
					return err
				}
			}
			return nil
		})
		small := 0
		for _, n := range sizes[1:] {
			if 4*n <= chunk {
				small++
			}
		}
		require.EqualValues(t, small*len(w.ranks), launched.Load())
		w.end()
	})
}

// twice does two small all-reduces: in the first one the ranks show their devices.
func (x *rank) twice(r int) error {
	q, err := x.pairOf(rand.New(rand.NewPCG(1, uint64(r))), tensor.Float32, r, laid(0, 10), true)
	if err != nil {
		return err
	}
	for range 2 {
		v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{q.dev}, backend.AllReduceOptions{})
		if err == nil {
			err = v.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// TestSmallStops lets a rank fail whose peer's kernel waits: the kernel ends, and the
// error says who.
func TestSmallStops(t *testing.T) {
	for _, how := range []string{"aborted", "timed out"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld(t, setup{
				size: 2, timeout: patience, options: cuda.Options{AllReduce: cuda.HostWork},
				sim:  sim.Config{Devices: 2, Seed: 3, Kernels: simkernels.All()},
				vary: func(o *cuda.Options, _ int) { o.Driver = crowded{o.Driver, 40} },
			})
			launched := w.launches()
			w.each((*rank).twice)
			before := launched.Load()
			require.Positive(t, before)
			called := make(chan struct{})
			errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
				if r == 1 {
					<-called
					for launched.Load() == before {
						time.Sleep(time.Millisecond)
					}
					if how == "aborted" {
						x.b.Abort(errors.New("enough"))
					}
					return nil
				}
				b, err := x.bucket(r)
				if err != nil {
					return err
				}
				o := backend.AllReduceOptions{}
				if how == "timed out" {
					o.Timeout = 200 * time.Millisecond
				}
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, o)
				if err != nil {
					return err
				}
				close(called)
				return v.Wait(x.ctx)
			})
			require.NoError(t, errs[1])
			var e *work.Error
			require.ErrorAs(t, errs[0], &e)
			require.Equal(t, 1, e.Peer, "%v", errs[0])
			if how == "timed out" {
				require.ErrorIs(t, errs[0], work.ErrTimeout)
				require.Equal(t, 1, strings.Count(errs[0].Error(), "; the 40 streams of device 0 share 32 queues"), "%v", errs[0])
			}
			w.drop(t)
		})
	}
}

// TestSmallKernelIsThere has the kernel loaded when the group is made, also where devices
// do not reach each other: later streams may wait for words, and loading for them.
func TestSmallKernelIsThere(t *testing.T) {
	w := newWorld(t, setup{
		size: 2, options: cuda.Options{AllReduce: cuda.HostWork},
		sim: sim.Config{Devices: 2, Kernels: simkernels.All(), Topology: sim.Topology{NoPeer: func(int, int) bool { return true }}},
	})
	before := w.m.Stats()
	launched := w.launches()
	w.each((*rank).twice)
	require.Positive(t, launched.Load())
	require.Equal(t, before.MadeModules, w.m.Stats().MadeModules)
	require.Positive(t, before.MadeModules)
	w.end()
}

// TestSmallWithout holds that Explain says why no kernel does small operations.
func TestSmallWithout(t *testing.T) {
	for why, change := range map[string]func(s *setup){
		"the 2 ranks share 1 devices": func(s *setup) { s.sim.Devices = 1 },
		kernels.Exchange:              func(s *setup) { delete(s.sim.Kernels, kernels.Exchange) },
	} {
		s := setup{
			size: 2, timeout: patience, options: cuda.Options{AllReduce: cuda.HostWork},
			sim: sim.Config{Devices: 2, Kernels: simkernels.All()},
		}
		change(&s)
		w := newWorld(t, s)
		require.NotContains(t, w.how(0), "kernel")
		w.each(func(x *rank, r int) error { return x.twice(r % s.sim.Devices) })
		require.Contains(t, w.how(0), "not one kernel: ")
		require.Contains(t, w.how(0), why)
		w.end()
	}
}

// TestBoardWithout holds that Explain says why calls are not compared.
func TestBoardWithout(t *testing.T) {
	if lonely {
		t.Skip("other systems are not asked for anything")
	}
	defer cuda.OtherProcesses()()
	for call, want := range map[string][]string{
		"memfd_create": {"this rank has no page for others to read: refused", "cannot be read: there is none"},
		"open":         {"cannot be read: refused"},
	} {
		var once atomic.Bool
		restore := cuda.SetBefore(func(c string, _ int) error {
			if c == call && !once.Swap(true) {
				return errors.New("refused")
			}
			return nil
		})
		w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 1}})
		restore()
		said := w.ranks[0].b.Explain().Why + w.ranks[1].b.Explain().Why
		require.Contains(t, said, "calls of ranks on this host are not all compared when they are made: ")
		for _, text := range want {
			require.Contains(t, said, text)
		}
		w.end()
	}
}
