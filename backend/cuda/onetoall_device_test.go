package cuda_test

import (
	"errors"
	"fmt"
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
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestF07OneToAllDevice is TestF06OneToAllHost without the hosts: no byte is
// staged there (F-07).
func TestF07OneToAllDevice(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := 2 + int(seed)%7
		w := newWorld(t, setup{
			size: size, sim: sim.Config{Devices: size + rng.IntN(2), Seed: seed, Semantics: s, Kernels: simkernels.All()},
			options: cuda.Options{Broadcast: []string{"", cuda.BroadcastDirect}[seed%2]},
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
			must.Do(x.connect(r))
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var all [][]*pair
			for i := range os {
				ps := must.Get(x.several(rng, d, n, rows[i], i%3 != 2))
				all = append(all, ps)
			}
			return x.broadcasts(all, os)
		})
		w.m.Skip(nil)
		require.Zero(t, staged)
		w.end()
	})
}

// TestF07Tree broadcasts and all-reduces six tensors of each rank, on six devices. On every rank they get the data
// down a tree: three copies by the device that has it first, and one each by two of the others. A tree of tensors on one
// device, and one of more tensors than a tree has, are right too (F-01, F-07).
func TestF07Tree(t *testing.T) { onVirtualTime(t, testF07Tree) }

func testF07Tree(t *testing.T) {
	const ranks, tensors = 2, 6
	for seed := range uint64(4) {
		w := newWorld(t, setup{size: ranks, sim: sim.Config{Devices: tensors, Seed: seed, Semantics: sim.Semantics(seed % 2), Kernels: simkernels.All()}})
		w.each(func(x *rank, r int) error { return x.connect(r) })
		var mu sync.Mutex
		copies := make(map[string]int)
		w.m.Skip(func(c sim.Call) bool {
			mu.Lock()
			defer mu.Unlock()
			if c.Name == "Copy" && strings.Contains(c.Stream, " up.") {
				copies[c.Stream]++
			}
			return false
		})
		// around makes tensors on all devices in turn. The first one is on the device that has the rank's kernels.
		around := func(x *rank, r, n int, device func(i int) int) (ps []*pair, err error) {
			for i := range n {
				p, err := x.pairOf(rand.New(rand.NewPCG(seed, uint64(r*n+i))), tensor.Int32, device(i), laid(i%2, 9, 2), true)
				if err != nil {
					return nil, err
				}
				ps = append(ps, p)
			}
			return ps, nil
		}
		for _, reduces := range []bool{false, true} {
			clear(copies)
			w.each(func(x *rank, r int) error {
				ps := must.Get(around(x, r, tensors, func(i int) int { return (r + i) % tensors }))
				if reduces {
					return x.sums(ps, backend.Sum())
				}
				return x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{Root: 1}})
			})
			want := make(map[string]int)
			for r := range ranks {
				for i, n := range map[int]int{0: 3, 2: 1, 4: 1} {
					want[fmt.Sprintf("rank %[1]d/rank %[1]d up.%[2]d", r, (r+i)%tensors)] = n
				}
			}
			require.Equal(t, want, copies, "reduces %v", reduces)
		}
		w.m.Skip(nil)
		w.each(func(x *rank, r int) error {
			for _, device := range []func(int) int{func(int) int { return r }, func(i int) int { return i % tensors }} {
				ps := must.Get(around(x, r, 70, device))
				must.Do(x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{Root: 1, RootTensor: 3}}))
			}
			return nil
		})
		w.end()
	}
}

// sums all-reduces the tensors of pairs in one call, and compares every byte with those of the CPU backend.
func (x *rank) sums(ps []*pair, op backend.ReduceOp) (err error) {
	defer must.Catch(&err)
	v := must.Get(x.b.AllReduce(x.ctx, devs(ps), backend.AllReduceOptions{Op: op}))
	for _, p := range ps {
		must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
	}
	k := must.Get(x.cpu.AllReduce(x.ctx, cpus(ps), backend.AllReduceOptions{Op: op}))
	return x.checks(work.WaitAll(x.ctx, v, k), ps...)
}

// TestBroadcastOnDevicesFails lets a rank die, or not come: every rank gets an error or a result, and no stream waits for
// ever. TestT07OneToAll lets the calls to the driver fail.
func TestBroadcastOnDevicesFails(t *testing.T) {
	for _, kill := range []bool{true, false} {
		w := newWorld(t, setup{
			size: 3, timeout: patience, sim: sim.Config{Devices: 3, Quiet: true, Kernels: simkernels.All()},
			options: cuda.Options{Broadcast: cuda.BroadcastDirect},
		})
		w.each(func(x *rank, r int) error { return x.connect(r) })
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
			return must.Get(x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{})).Wait(x.ctx)
		})
		e := must.As[*work.Error](t, errs[0])
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
	require.Contains(t, choices(w)[0].Why, "not direct: whether the devices reach each other is found out by the first collective that can stay on them")
	w.each(func(x *rank, r int) error { return x.connect(r) })
	all := choices(w)
	require.Len(t, all, 1)
	require.Equal(t, cuda.BroadcastDirect, all[0].Algorithm)
	require.Contains(t, all[0].Why, "one kernel of each rank")
	w.end()

	s.sim.Kernels, s.options.Broadcast = nil, cuda.BroadcastDirect
	w = newWorld(t, s)
	all = choices(w)
	require.Len(t, all, 1)
	require.Equal(t, "none", all[0].Algorithm)
	require.Contains(t, all[0].Why, "asks for it: rank 0: driver sim has no kernel")
	for r, x := range w.ranks {
		err := x.connect(r)
		require.ErrorIs(t, err, backend.ErrInvalidArgument)
		require.ErrorContains(t, err, "has no kernel")
	}
	w.end()
}
