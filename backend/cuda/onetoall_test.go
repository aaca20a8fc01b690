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

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var hostWays = []string{"", cuda.BroadcastFlat, cuda.BroadcastTree, cuda.BroadcastChain, cuda.BroadcastHost}

// several makes n tensors of a rank for one broadcast, on devices and with
// layouts that are the rank's own.
func (x *rank) several(rng *rand.Rand, d tensor.DType, n, rows int, flatOnly bool) (_ []*pair, err error) {
	defer must.Catch(&err)
	ps := make([]*pair, n)
	for i := range ps {
		kind := max(0, rng.IntN(6)-2)
		if flatOnly {
			kind = rng.IntN(2)
		}
		p := must.Get(x.pairOf(rng, d, rng.IntN(len(x.stream)), laid(kind, rows, 2), true))
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
func (x *rank) broadcasts(all [][]*pair, os []backend.BroadcastOptions) (err error) {
	defer must.Catch(&err)
	var works []*work.Work
	for i, ps := range all {
		v := must.Get(x.b.Broadcast(x.ctx, devs(ps), os[i]))
		works = append(works, v)
	}
	for i, ps := range all {
		for _, p := range ps {
			must.Do(works[i].Synchronize(x.stream[p.device]))
			must.Do(x.back(p))
		}
	}
	for i, ps := range all {
		v := must.Get(x.cpu.Broadcast(x.ctx, cpus(ps), os[i]))
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
				ps := must.Get(x.several(rng, d, n, rows[i], i%3 != 2))
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
				ps := must.Get(x.several(rand.New(rand.NewPCG(1, uint64(r))), tensor.Uint8, 3, bytes/2, true))
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
			ps := must.Get(x.several(rand.New(rand.NewPCG(2, uint64(r))), tensor.Int32, 2, 10, true))
			if r == slow {
				for range size - 2 {
					select {
					case <-others:
					case <-x.ctx.Done():
						return errors.New("the others wait for the slow one")
					}
				}
			}
			v := must.Get(x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{}))
			must.Do(v.Wait(x.ctx))
			if r != 0 && r != slow {
				others <- struct{}{}
			}
			for _, p := range ps {
				must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
			}
			k := must.Get(x.cpu.Broadcast(x.ctx, cpus(ps), backend.BroadcastOptions{}))
			must.Do(k.Wait(x.ctx))
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
			ps := must.Get(x.several(rand.New(rand.NewPCG(3, uint64(r))), tensor.Int32, 1, 10+r/2, true))
			return must.Get(x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{})).Wait(x.ctx)
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
		v := must.Get(x.d.Device(0))
		m := must.Get(v.Alloc(4))
		x.close = append(x.close, m)
		b := must.Get(tensor.OnDevice(tensor.Float32, m, 1))
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
			p := must.Get(x.pairOf(rng, tensor.Uint8, i%len(x.stream), flat(bytes), true))
			ps = append(ps, p)
		}
		o := backend.BroadcastOptions{RootTensor: 1}
		v := must.Get(x.b.Broadcast(x.ctx, devs(ps), o))
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
			size: c.size, sim: sim.Config{Devices: 2},
			options: cuda.Options{Chunk: 100, Slots: c.slots, Broadcast: c.way}, // 3 chunks
		}
		tried := leaveOut(t, s, without, func(m sim.Call) bool {
			// The last record of a caller's stream is the test's own.
			return slices.Contains(c.names, m.Name) && (m.Name != "Record" || !strings.Contains(m.Stream, "caller") || m.K == 0)
		}, func(w *world) error { return oneToAll(w, c.bytes) })
		require.Len(t, tried, len(c.names), "%+v", c)
	}
}

// TestT07OneToAll lets each call to the driver that a broadcast makes fail in
// turn: every rank gets an error or a result, nothing is left, and no stream waits
// for ever (T7).
func TestT07OneToAll(t *testing.T) {
	for _, way := range []string{cuda.BroadcastFlat, cuda.BroadcastChain, cuda.BroadcastDirect} {
		all := make([][]*tensor.Tensor, 3)
		fresh := func(t *testing.T, k int) *world {
			s := setup{
				size: 3, timeout: patience, sim: sim.Config{Devices: 3, Seed: uint64(k), Semantics: sim.Semantics(k % 2), Quiet: true},
				options: cuda.Options{Chunk: 100, Slots: 2, Broadcast: way},
			}
			if way == cuda.BroadcastDirect {
				s.sim.Kernels = simkernels.All()
			}
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error {
				if way == cuda.BroadcastDirect {
					must.Do(x.connect(r))
				}
				all[r] = devs(must.Get(x.several(rand.New(rand.NewPCG(9, uint64(r))), tensor.Uint8, 2, 120, true)))
				return nil
			})
			return w
		}
		failInTurn(t, 1, 21, "broadcast", fresh, nil, func(x *rank, r int) error {
			return x.ended(x.b.Broadcast(x.ctx, all[r], backend.BroadcastOptions{}))
		}, func(w *world, failed sim.Call, errs []error) {
			require.ErrorIs(t, errors.Join(errs...), errInjected, "%s: %v", way, failed)
			w.drop(t)
		})
	}
}

// connect connects the ranks of a group, by a broadcast.
func (x *rank) connect(r int) (err error) {
	defer must.Catch(&err)
	v := must.Get(x.d.Device(r % x.d.Count()))
	m := must.Get(v.Alloc(4))
	x.close = append(x.close, m)
	d := must.Get(tensor.OnDevice(tensor.Uint8, m, 4))
	return must.Get(x.b.Broadcast(x.ctx, []*tensor.Tensor{d}, backend.BroadcastOptions{})).Wait(x.ctx)
}

// TestOneToAllSteadyState holds that broadcasts make neither streams nor memory
// once those before them have (R11).
func TestOneToAllSteadyState(t *testing.T) { onVirtualTime(t, testOneToAllSteadyState) }

func testOneToAllSteadyState(t *testing.T) {
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
					a := must.Get(x.kept(r, r))
					b := must.Get(x.kept(r, (r+1)%3))
					v, err := x.b.Broadcast(ctx, []*tensor.Tensor{a, b}, backend.BroadcastOptions{Root: i % 3, RootTensor: i % 2})
					if err != nil {
						return err
					}
					must.Do(v.Wait(x.ctx))
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
