package cuda_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestF07OneToAllDevice is TestF06OneToAllHost without the hosts: no byte is
// staged there (F-07).
func TestF07OneToAllDevice(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := 1 + int(seed)%9
		w := newWorld(t, setup{
			size: size, sim: sim.Config{Devices: 1 + rng.IntN(3), Seed: seed, Semantics: s, Kernels: simkernels.All()},
			options: cuda.Options{DeviceChunk: 16 + rng.IntN(100), Broadcast: []string{"", cuda.BroadcastDevice}[seed%2]},
		})
		var mu sync.Mutex
		staged := 0
		w.m.Skip(func(c sim.Call) bool {
			mu.Lock()
			defer mu.Unlock()
			if strings.Contains(c.Stream, " down") && c.Name == "WriteValue" { // that tells the host
				staged++
			}
			return false
		})
		var os []backend.BroadcastOptions
		var rows []int
		n := 1 + rng.IntN(4)
		for root := range size {
			os = append(os, backend.BroadcastOptions{Root: root, RootTensor: rng.IntN(n)})
			rows = append(rows, rng.IntN(80))
		}
		rows[rng.IntN(size)] = 0
		dtypes := tensor.DTypes()
		d := dtypes[rng.IntN(len(dtypes))]
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var all [][]*pair
			for i := range os {
				ps, err := x.several(rng, d, n, rows[i], size > 1 && i%3 != 2)
				if err != nil {
					return err
				}
				all = append(all, ps)
			}
			return x.broadcasts(all, os)
		})
		w.m.Skip(nil)
		if size > 1 {
			require.Zero(t, staged)
		}
		w.end()
	})
}

// TestBroadcastManyPieces broadcasts in thousands of pieces, from a root that others let
// wait: no stream has many commands at a time, and the bytes are right.
func TestBroadcastManyPieces(t *testing.T) {
	for _, size := range []int{2, 3} {
		w := newWorld(t, setup{
			size: size, timeout: patience, sim: sim.Config{Devices: 2, Seed: uint64(size), Kernels: simkernels.All()},
			options: cuda.Options{DeviceChunk: 16, Broadcast: cuda.BroadcastDevice},
		})
		w.each(func(x *rank, r int) error { return x.ring(r) })
		called := make(chan struct{})
		w.each(func(x *rank, r int) error {
			ps, err := x.several(rand.New(rand.NewPCG(1, uint64(r))), tensor.Uint8, 2, 10_000, true)
			if err != nil {
				return err
			}
			if r == 0 {
				close(called)
			} else {
				<-called
			}
			return x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{RootTensor: 1}})
		})
		s := w.m.Stats()
		require.Greater(t, s.Operations, 3*size*2*10_000/16)
		require.LessOrEqual(t, s.Deepest, 512)
		w.end()
	}
}

// TestBroadcastPartsFail lets calls to the driver fail in the parts of a broadcast, or a
// rank die while others wait for room: every rank gets an error or a result, and no
// stream waits for ever.
func TestBroadcastPartsFail(t *testing.T) {
	injected := errors.New("injected")
	for k := 0; ; k += 97 {
		w := newWorld(t, setup{
			size: 3, timeout: patience, sim: sim.Config{Devices: 2, Seed: uint64(k), Quiet: true, Kernels: unseen()},
			options: cuda.Options{DeviceChunk: 16, Broadcast: cuda.BroadcastDevice},
		})
		w.each(func(x *rank, r int) error { return x.ring(r) })
		all := make([][]*tensor.Tensor, 3)
		for r, x := range w.ranks {
			ps, err := x.several(rand.New(rand.NewPCG(9, uint64(r))), tensor.Uint8, 2, 700, true)
			require.NoError(t, err)
			all[r] = devs(ps)
		}
		n, failed := 0, ""
		w.m.Inject(func(c sim.Call) error {
			if strings.Contains(c.Stream, "caller") {
				return nil
			}
			if n++; n-1 != k {
				return nil
			}
			failed = c.String()
			return injected
		})
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			v, err := x.b.Broadcast(x.ctx, all[r], backend.BroadcastOptions{})
			if err != nil {
				x.b.Abort(err) // the others have been called
				return err
			}
			return v.Wait(x.ctx)
		})
		w.m.Inject(nil)
		if failed == "" {
			require.NoError(t, errors.Join(errs...))
			w.end()
			require.Greater(t, k, 500)
			break
		}
		require.ErrorIs(t, errors.Join(errs...), injected, "%v", failed)
		for r, err := range errs {
			if err != nil {
				var e *work.Error
				require.ErrorAs(t, err, &e, "%v: rank %d", failed, r)
				require.Equal(t, work.Info{Op: work.Broadcast, Seq: 1, Group: "g", Rank: r}, e.Info, "%v", failed)
			}
		}
		w.drop(t)
	}
	for _, kill := range []bool{true, false} {
		w := newWorld(t, setup{
			size: 3, timeout: patience, sim: sim.Config{Devices: 2, Quiet: true, Kernels: unseen()},
			options: cuda.Options{DeviceChunk: 16, Broadcast: cuda.BroadcastDevice},
		})
		w.each(func(x *rank, r int) error { return x.ring(r) })
		if !kill {
			for _, x := range w.ranks {
				x.b.SetTimeout(200 * time.Millisecond)
			}
		}
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			ps, err := x.several(rand.New(rand.NewPCG(11, uint64(r))), tensor.Uint8, 1, 10_000, true)
			if err != nil || r == 2 && !kill {
				return err
			}
			if r == 2 {
				w.fabric.Kill("g/cuda/0", r)
				return nil
			}
			v, err := x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{})
			if err != nil {
				return err
			}
			return v.Wait(x.ctx)
		})
		var e *work.Error
		require.ErrorAs(t, errs[0], &e)
		require.Equal(t, work.Info{Op: work.Broadcast, Seq: 1, Group: "g", Rank: 0}, e.Info)
		want := work.ErrTimeout
		if kill {
			want = work.ErrPeerDied
			require.Equal(t, 2, e.Peer)
		}
		require.ErrorIs(t, errs[0], want)
		require.ErrorIs(t, errs[1], want)
		w.drop(t)
	}
}

// TestBroadcastOnDevicesExplained holds that Explain tells why broadcasts stay on the
// devices or not, and that the way can be asked for.
func TestBroadcastOnDevicesExplained(t *testing.T) {
	choices := func(w *world) (all []backend.Choice) {
		for _, c := range w.ranks[0].b.Explain().Choices {
			if c.Op == "broadcast" {
				all = append(all, c)
			}
		}
		return all
	}
	s := setup{size: 2, sim: sim.Config{Devices: 2, Kernels: simkernels.All()}}
	w := newWorld(t, s)
	require.Contains(t, choices(w)[0].Why, "not device: whether the devices reach each other is found out by the first collective that can stay on them")
	w.each(func(x *rank, r int) error { return x.ring(r) })
	all := choices(w)
	require.Len(t, all, 1)
	require.Equal(t, cuda.BroadcastDevice, all[0].Algorithm)
	require.Contains(t, all[0].Why, "when that has room")
	w.end()

	s.sim.Kernels, s.options.Broadcast = nil, cuda.BroadcastDevice
	w = newWorld(t, s)
	all = choices(w)
	require.Len(t, all, 1)
	require.Equal(t, "none", all[0].Algorithm)
	require.Contains(t, all[0].Why, "asks for work on the devices: rank 0: driver sim has no kernel")
	for r, x := range w.ranks {
		err := x.ring(r)
		require.ErrorIs(t, err, backend.ErrInvalidArgument)
		require.ErrorContains(t, err, "has no kernel")
	}
	w.end()
}

// unseen are the kernels with one that copies unseen by Go's race detector, for
// broadcasts that lack an order on purpose; the simulator reports that.
func unseen() map[string]sim.Kernel {
	all := simkernels.All()
	all["c10d_copy"] = copyUnseen
	return all
}

//go:norace
func copyUnseen(k *sim.Run) error {
	from := k.Read(k.Ptr(2), k.Int(3))
	for i := range 2 {
		if p := k.Ptr(i); p != 0 {
			to := k.Write(p, len(from))
			for j := range to {
				to[j] = from[j]
			}
		}
	}
	return nil
}
