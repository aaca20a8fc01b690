package cuda_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var hostWays = []string{"", cuda.BroadcastFlat, cuda.BroadcastTree, cuda.BroadcastChain, cuda.BroadcastHost}

// several makes n tensors of a rank for one broadcast, on devices and with
// layouts that are the rank's own.
func (x *rank) several(rng *rand.Rand, d tensor.DType, n, rows int, flatOnly bool) ([]*pair, error) {
	ps := make([]*pair, n)
	for i := range ps {
		kind := max(0, rng.IntN(6)-2)
		if flatOnly {
			kind = rng.IntN(2)
		}
		p, err := x.pairOf(rng, d, rng.IntN(len(x.stream)), laid(kind, rows, 2), true)
		if err != nil {
			return nil, err
		}
		ps[i] = p
	}
	return ps, nil
}

func devs(ps []*pair) (ts []*tensor.Tensor) {
	for _, p := range ps {
		ts = append(ts, p.dev)
	}
	return ts
}

func cpus(ps []*pair) (ts []*tensor.Tensor) {
	for _, p := range ps {
		ts = append(ts, p.cpu)
	}
	return ts
}

// broadcasts runs broadcasts one after the other, all called before the first is
// waited for, and compares every byte with those of the CPU backend.
func (x *rank) broadcasts(all [][]*pair, os []backend.BroadcastOptions) error {
	var works []*work.Work
	for i, ps := range all {
		v, err := x.b.Broadcast(x.ctx, devs(ps), os[i])
		if err != nil {
			return err
		}
		works = append(works, v)
	}
	for i, ps := range all {
		for _, p := range ps {
			if err := works[i].Synchronize(x.stream[p.device]); err != nil {
				return err
			}
			if err := x.back(p); err != nil {
				return err
			}
		}
	}
	for i, ps := range all {
		v, err := x.cpu.Broadcast(x.ctx, cpus(ps), os[i])
		if err != nil {
			return err
		}
		if err := work.WaitAll(x.ctx, works[i], v); err != nil {
			return fmt.Errorf("%+v: %w", os[i], err)
		}
		for _, p := range ps {
			if err := x.check(p); err != nil {
				return fmt.Errorf("%+v: %w", os[i], err)
			}
		}
	}
	return nil
}

// clears counts the messages that say clear to send. Only broadcasts from rank
// to rank have them.
type clears struct {
	backend.Backend
	n *atomic.Int64
}

func (c clears) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if o.Tag>>31 == 1 && o.Tag&1 == 1 {
		c.n.Add(1)
	}
	return c.Backend.Send(ctx, t, dst, o)
}

var counted atomic.Int64

const countingName = "counting"

func init() {
	err := backend.Register(backend.Registration{
		Name: countingName, Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) {
			b, err := gloo.New(ctx, o)
			return clears{b, &counted}, err
		},
	})
	if err != nil {
		panic(err)
	}
}

// TestF06OneToAllHost broadcasts through the hosts, in each of the ways: from every rank
// of 1 to 9, and from each of 1 to 4 tensors there. Several broadcasts follow each other
// through the same few slots (F-06, F-21). A receiver says once for each chunk that it
// may come.
func TestF06OneToAllHost(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size, way := 1+int(seed)%9, hostWays[rng.IntN(len(hostWays))]
		w := newWorld(t, setup{
			size: size, sim: sim.Config{Devices: 1 + rng.IntN(3), Seed: seed, Semantics: s},
			options: cuda.Options{Chunk: 16 + rng.IntN(200), Slots: 1 + rng.IntN(3), Broadcast: way},
		})
		var os []backend.BroadcastOptions
		var rows []int
		n := 1 + rng.IntN(4)
		for root := range size {
			os = append(os, backend.BroadcastOptions{Root: root, RootTensor: rng.IntN(n)})
			rows = append(rows, rng.IntN(60))
		}
		rows[rng.IntN(size)] = 0
		dtypes := tensor.DTypes()
		d := dtypes[rng.IntN(len(dtypes))]
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var all [][]*pair
			for i := range os {
				ps, err := x.several(rng, d, n, rows[i], i%3 != 2)
				if err != nil {
					return err
				}
				all = append(all, ps)
			}
			return x.broadcasts(all, os)
		})
		w.end()
	})
}

// TestClearToSend counts: as many as there are receivers for each chunk (F-06).
func TestClearToSend(t *testing.T) {
	const chunk, bytes = 64, 400
	for _, way := range hostWays {
		for size := 1; size <= 6; size++ {
			w := newWorld(t, setup{
				size: size, sim: sim.Config{Devices: 2, Seed: uint64(size)}, native: true,
				options: cuda.Options{Chunk: chunk, Slots: 2, CPU: countingName, Broadcast: way},
			})
			counted.Store(0)
			w.each(func(x *rank, r int) error {
				ps, err := x.several(rand.New(rand.NewPCG(1, uint64(r))), tensor.Uint8, 3, bytes/2, true)
				if err != nil {
					return err
				}
				return x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{Root: size / 2, RootTensor: 1}})
			})
			want := (size - 1) * ((bytes + chunk - 1) / chunk)
			if way == cuda.BroadcastHost {
				want = 0
			}
			require.EqualValues(t, want, counted.Load(), "%d ranks, way %q", size, way)
			w.end()
		}
	}
}

// TestF08SlowReceiver lets a receiver come only when all others have what the
// root sent: none of them waits for it (F-08).
func TestF08SlowReceiver(t *testing.T) {
	const size = 5
	for slow := 1; slow < size; slow++ {
		w := newWorld(t, setup{
			size: size, sim: sim.Config{Devices: 2, Seed: uint64(slow)}, timeout: patience,
			options: cuda.Options{Broadcast: cuda.BroadcastFlat},
		})
		others := make(chan struct{}, size)
		w.each(func(x *rank, r int) error {
			ps, err := x.several(rand.New(rand.NewPCG(2, uint64(r))), tensor.Int32, 2, 10, true)
			if err != nil {
				return err
			}
			if r == slow {
				for range size - 2 {
					select {
					case <-others:
					case <-x.ctx.Done():
						return errors.New("the others wait for the slow one")
					}
				}
			}
			v, err := x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{})
			if err != nil {
				return err
			}
			if err := v.Wait(x.ctx); err != nil {
				return err
			}
			if r != 0 && r != slow {
				others <- struct{}{}
			}
			for _, p := range ps {
				if err := errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)); err != nil {
					return err
				}
			}
			k, err := x.cpu.Broadcast(x.ctx, cpus(ps), backend.BroadcastOptions{})
			if err != nil {
				return err
			}
			if err := k.Wait(x.ctx); err != nil {
				return err
			}
			return errors.Join(x.check(ps[0]), x.check(ps[1]))
		})
		w.end()
	}
}

// TestBroadcastMismatch gives ranks of different hosts tensors of other sizes: all end
// with an error, and none with other bytes than its own.
func TestBroadcastMismatch(t *testing.T) {
	var hosts atomic.Int32
	defer cuda.SetHostIdentity(func() [32]byte { return [32]byte{byte(hosts.Add(1))} })()
	for _, way := range []string{cuda.BroadcastFlat, cuda.BroadcastTree, cuda.BroadcastChain} {
		w := newWorld(t, setup{size: 3, timeout: patience, sim: sim.Config{Devices: 1, Quiet: true}, options: cuda.Options{Broadcast: way}})
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			ps, err := x.several(rand.New(rand.NewPCG(3, uint64(r))), tensor.Int32, 1, 10+r/2, true)
			if err != nil {
				return err
			}
			v, err := x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{})
			if err != nil {
				return err
			}
			return v.Wait(x.ctx)
		})
		require.ErrorIs(t, errs[2], work.ErrMismatch, way)
		require.ErrorContains(t, errs[2], "called broadcast of 20 elements of int32 with root 0", way)
		require.ErrorContains(t, errs[2], "rank 2 called broadcast of 22 elements of int32 with root 0", way)
		for r, err := range errs {
			var e *work.Error
			if err != nil {
				require.ErrorAs(t, err, &e)
				require.Equal(t, work.Info{Op: work.Broadcast, Group: "g", Rank: r}, e.Info)
			}
		}
		w.drop(t)
	}
}

// TestBroadcastTags holds that users' messages and broadcasts have tags of their
// own.
func TestBroadcastTags(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1}})
	w.each(func(x *rank, r int) error {
		v, err := x.d.Device(0)
		if err != nil {
			return err
		}
		m, err := v.Alloc(4)
		if err != nil {
			return err
		}
		x.close = append(x.close, m)
		b, err := tensor.OnDevice(tensor.Float32, m, 1)
		if err != nil {
			return err
		}
		for _, f := range []func(backend.P2POptions) (*work.Work, error){
			func(o backend.P2POptions) (*work.Work, error) { return x.b.Send(x.ctx, b, 1-r, o) },
			func(o backend.P2POptions) (*work.Work, error) { return x.b.Recv(x.ctx, b, 1-r, o) },
			func(o backend.P2POptions) (*work.Work, error) { return x.b.RecvAnySource(x.ctx, b, o) },
		} {
			_, err := f(backend.P2POptions{Tag: 1 << 31})
			require.ErrorIs(t, err, backend.ErrInvalidArgument)
			require.ErrorContains(t, err, "invalid tag 2147483648")
		}
		return nil
	})
	w.end()
	_, err := cuda.New(w.ctx, backend.Options{Size: 1, Specific: cuda.Options{Broadcast: "pigeon"}})
	require.ErrorContains(t, err, `Options.Broadcast is "pigeon"`)
}

// TestBroadcastExplained holds that Explain tells the way and why.
func TestBroadcastExplained(t *testing.T) {
	explained := func(size int, way string) (all []backend.Choice) {
		w := newWorld(t, setup{size: size, sim: sim.Config{Devices: 1}, options: cuda.Options{Chunk: 1000, Broadcast: way}})
		for _, c := range w.ranks[0].b.Explain().Choices {
			if c.Op == "broadcast" {
				all = append(all, c)
			}
		}
		w.end()
		return all
	}
	all := explained(1, "")
	require.Len(t, all, 1)
	require.Equal(t, "local", all[0].Algorithm)
	all = explained(2, "")
	require.Len(t, all, 1)
	require.Equal(t, cuda.BroadcastFlat, all[0].Algorithm)
	require.Contains(t, all[0].Why, "clear to send")
	all = explained(5, "")
	require.Len(t, all, 2)
	require.Equal(t, cuda.BroadcastTree, all[0].Algorithm)
	require.EqualValues(t, 1000, all[0].UpTo)
	require.Contains(t, all[0].Why, "for 5 ranks")
	require.Equal(t, cuda.BroadcastChain, all[1].Algorithm)
	require.EqualValues(t, -1, all[1].UpTo)
	all = explained(2, cuda.BroadcastHost)
	require.Len(t, all, 1)
	require.Equal(t, cuda.BroadcastHost, all[0].Algorithm)
	require.Contains(t, all[0].Why, "asks for it")
}

// oneToAll is a broadcast of two tensors a rank with what the callers' streams do
// before and after.
func oneToAll(w *world, bytes int) error {
	return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
		rng := rand.New(rand.NewPCG(7, uint64(r)))
		var ps []*pair
		for i := range 2 {
			p, err := x.pairOf(rng, tensor.Uint8, i%len(x.stream), flat(bytes), true)
			if err != nil {
				return err
			}
			ps = append(ps, p)
		}
		o := backend.BroadcastOptions{RootTensor: 1}
		v, err := x.b.Broadcast(x.ctx, devs(ps), o)
		if err != nil {
			return err
		}
		if err := v.Synchronize(x.stream[0]); err != nil {
			return errors.Join(err, v.Wait(x.ctx))
		}
		for _, p := range ps {
			// One stream uses both, and so needs all that Synchronize ordered it after.
			p.device = 0
			if err := x.back(p); err != nil {
				return errors.Join(err, v.Wait(x.ctx))
			}
		}
		k, err := x.cpu.Broadcast(x.ctx, cpus(ps), o)
		if err == nil {
			err = k.Wait(x.ctx)
		}
		return x.checks(errors.Join(err, v.Wait(x.ctx)), ps...)
	})...)
}

// TestT03T04OneToAll leaves out each record and each wait of a broadcast in chunks, of
// the root, of a rank that sends on, and of the last one. Each one that is missing is
// noticed (T3, T4).
func TestT03T04OneToAll(t *testing.T) {
	for _, c := range []struct {
		way   string
		size  int
		slots int
		bytes int
		names []string
	}{
		{cuda.BroadcastChain, 3, 1, 250, []string{"Record", "Wait", "WaitValue", "WriteValue"}},
		// A word that is not written comes late, with the next one.
		{cuda.BroadcastChain, 3, 2, 250, []string{"Record", "Wait", "WaitValue"}},
		{cuda.BroadcastFlat, 2, 1, 250, []string{"Record", "Wait", "WaitValue", "WriteValue"}},
		{cuda.BroadcastFlat, 1, 1, 250, []string{"Record", "Wait"}},
	} {
		s := setup{
			size: c.size, timeout: patience, sim: sim.Config{Devices: 2, Seed: 3},
			options: cuda.Options{Chunk: 100, Slots: c.slots, Broadcast: c.way}, // 3 chunks
		}
		run := func(w *world) error { return oneToAll(w, c.bytes) }
		var calls []sim.Call
		w := newWorld(t, s)
		w.m.Skip(func(c sim.Call) bool {
			calls = append(calls, c)
			return false
		})
		require.NoError(t, run(w))
		w.m.Skip(nil)
		w.end()
		tried := map[string]int{}
		s.sim.Quiet, s.timeout = true, 300*time.Millisecond
		for _, m := range calls {
			// The last record of a caller's stream is the test's own.
			if !slices.Contains(c.names, m.Name) || m.Name == "Record" && strings.Contains(m.Stream, "caller") && m.K > 0 {
				continue
			}
			tried[m.Name]++
			var err error
			for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
				s.sim.Seed = seed
				err = without(t, s, m, run)
			}
			require.Error(t, err, "%s, %d slots: nobody noticed that %v, number %d of them there, was left out", c.way, c.slots, m, m.K)
		}
		t.Logf("%s of %d, %d slots: left out, each of them missed: %v", c.way, c.size, c.slots, tried)
		for _, name := range c.names {
			require.NotZero(t, tried[name], "%s: %s", c.way, name)
		}
	}
}

// TestT07OneToAll lets each call to the driver that a broadcast makes fail in
// turn: every rank gets an error or a result, nothing is left, and no stream waits
// for ever (T7).
func TestT07OneToAll(t *testing.T) {
	injected := errors.New("injected")
	for _, way := range []string{cuda.BroadcastFlat, cuda.BroadcastChain, cuda.BroadcastDirect} {
		for k := 0; ; k++ {
			s := setup{
				size: 3, timeout: patience, sim: sim.Config{Devices: 3, Seed: uint64(k), Semantics: sim.Semantics(k % 2), Quiet: true},
				options: cuda.Options{Chunk: 100, Slots: 2, Broadcast: way},
			}
			seq := uint64(0)
			if way == cuda.BroadcastDirect {
				s.sim.Kernels, seq = simkernels.All(), 1
			}
			w := newWorld(t, s)
			if way == cuda.BroadcastDirect {
				w.each(func(x *rank, r int) error { return x.connect(r) })
			}
			all := make([][]*tensor.Tensor, 3)
			for r, x := range w.ranks {
				ps, err := x.several(rand.New(rand.NewPCG(9, uint64(r))), tensor.Uint8, 2, 120, true)
				require.NoError(t, err)
				all[r] = devs(ps)
			}
			n, failed := 0, ""
			w.m.Inject(func(c sim.Call) error {
				if strings.Contains(c.Stream, "caller") {
					return nil
				}
				n++
				if n-1 != k {
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
				require.Greater(t, k, 20)
				t.Logf("%s: %d calls failed in turn", way, k)
				break
			}
			require.ErrorIs(t, errors.Join(errs...), injected, "%v", failed)
			for r, err := range errs {
				if err != nil {
					var e *work.Error
					require.ErrorAs(t, err, &e, "%v: rank %d", failed, r)
					require.Equal(t, work.Info{Op: work.Broadcast, Seq: seq, Group: "g", Rank: r}, e.Info, "%v", failed)
				}
			}
			w.drop(t)
		}
	}
}

// TestOneToAllFaults ends broadcasts that cannot end well on every rank, with an
// error that names operation, number and rank.
func TestOneToAllFaults(t *testing.T) {
	for _, way := range []string{cuda.BroadcastFlat, cuda.BroadcastTree, cuda.BroadcastChain, cuda.BroadcastDirect} {
		for _, fault := range []string{"a rank does not come", "a rank dies", "a Work is aborted", "the context ends"} {
			for missing := range 3 {
				s := setup{size: 3, timeout: patience, sim: sim.Config{Devices: 3, Quiet: true}, options: cuda.Options{Chunk: 100, Slots: 2, Broadcast: way}}
				seq := uint64(0)
				if way == cuda.BroadcastDirect {
					s.sim.Kernels = simkernels.All()
				}
				w := newWorld(t, s)
				if way == cuda.BroadcastDirect {
					// The ranks meet before one of them is gone.
					w.each(func(x *rank, r int) error { return x.connect(r) })
					seq = 1
				}
				if fault == "a rank does not come" {
					for _, x := range w.ranks {
						x.b.SetTimeout(150 * time.Millisecond)
					}
				}
				if fault == "a rank dies" {
					w.fabric.Kill("g/cuda/0", missing)
				}
				cause := errors.New("no more")
				errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
					if r == missing {
						return nil
					}
					ps, err := x.several(rand.New(rand.NewPCG(11, uint64(r))), tensor.Uint8, 2, 200, true)
					if err != nil {
						return err
					}
					ctx, cancel := context.WithCancel(x.ctx)
					defer cancel()
					v, err := x.b.Broadcast(ctx, devs(ps), backend.BroadcastOptions{})
					if err != nil {
						return err
					}
					if r == (missing+1)%3 {
						switch fault {
						case "a Work is aborted":
							v.Abort(cause)
						case "the context ends":
							cancel()
						}
					}
					return v.Wait(x.ctx)
				})
				failures := 0
				for r, err := range errs {
					if err == nil {
						continue // it did not need the rank that is missing
					}
					failures++
					var e *work.Error
					require.ErrorAs(t, err, &e, "%s, %s: rank %d", way, fault, r)
					require.Equal(t, work.Info{Op: work.Broadcast, Seq: seq, Group: "g", Rank: r}, e.Info, "%s, %s", way, fault)
					if fault == "a rank dies" {
						require.ErrorIs(t, err, work.ErrPeerDied)
						require.Equal(t, missing, e.Peer)
					}
				}
				if way != cuda.BroadcastDirect || missing != 2 && fault != "a rank does not come" {
					require.NotZero(t, failures, "%s, %s, missing %d", way, fault, missing)
				}
				w.drop(t)
			}
		}
	}
}

// connect connects the ranks of a group, by a broadcast.
func (x *rank) connect(r int) error {
	v, err := x.d.Device(r % x.d.Count())
	if err != nil {
		return err
	}
	m, err := v.Alloc(4)
	if err != nil {
		return err
	}
	x.close = append(x.close, m)
	d, err := tensor.OnDevice(tensor.Uint8, m, 4)
	if err != nil {
		return err
	}
	k, err := x.b.Broadcast(x.ctx, []*tensor.Tensor{d}, backend.BroadcastOptions{})
	if err != nil {
		return err
	}
	return k.Wait(x.ctx)
}

// TestOneToAllSteadyState holds that broadcasts make neither streams nor memory
// once those before them have (R11).
func TestOneToAllSteadyState(t *testing.T) {
	for _, way := range append(hostWays, cuda.BroadcastDirect) {
		w := newWorld(t, setup{
			size: 3, sim: sim.Config{Devices: 3, NoDelays: true, Kernels: simkernels.All()},
			options: cuda.Options{Chunk: 256, Broadcast: cmp.Or(way, cuda.BroadcastChain)},
		})
		var before sim.Stats
		for round := range 2 {
			w.each(func(x *rank, r int) error {
				ctx := cuda.WithStreams(x.ctx, x.stream...)
				for i := range 12 {
					a, err := x.kept(r, r)
					if err != nil {
						return err
					}
					b, err := x.kept(r, (r+1)%3)
					if err != nil {
						return err
					}
					v, err := x.b.Broadcast(ctx, []*tensor.Tensor{a, b}, backend.BroadcastOptions{Root: i % 3, RootTensor: i % 2})
					if err != nil {
						return err
					}
					if err := v.Wait(x.ctx); err != nil {
						return err
					}
				}
				return nil
			})
			s := w.m.Stats()
			if round == 1 {
				require.Equal(t, before.MadeHosts, s.MadeHosts)
				require.Equal(t, before.MadeStreams, s.MadeStreams)
				require.Equal(t, before.MadeMemories, s.MadeMemories)
				require.LessOrEqual(t, s.Events, before.Events+8)
			}
			before = s
		}
		for _, x := range w.ranks {
			x.tensors = nil
		}
		w.end()
	}
}
