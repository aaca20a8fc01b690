package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// clustered is a setup of clusters of so many ranks, each with a device, on one host.
func clustered(sizes ...int) setup {
	var of []string
	for c, n := range sizes {
		of = append(of, slices.Repeat([]string{fmt.Sprint(c)}, n)...)
	}
	s := directly(len(of))
	s.vary = func(o *cuda.Options, r int) {
		inner := o.CPUOptions.(gloo.Options)
		inner.Cluster = of[r]
		o.CPUOptions = inner
	}
	return s
}

// drawClusters returns the sizes of 2 to 4 clusters, of 6 ranks at most.
func drawClusters(rng *rand.Rand) (sizes []int) {
	left := 6
	for c := 2 + rng.IntN(3); c > 0; c-- {
		n := 1 + rng.IntN(min(3, left-c+1))
		sizes, left = append(sizes, n), left-n
	}
	return sizes
}

// between are the collectives that go through the clusters.
var between = []string{
	"all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_v", "all_gather_into_tensor", "all_gather_coalesced",
	"all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
}

// TestF26Clusters has collectives of random clusters, in chunks, against what they are defined to do. What
// goes through the clusters is among operations that do not.
func TestF26Clusters(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		sizes := drawClusters(rng)
		o := clustered(sizes...)
		o.sim.Seed, o.sim.Semantics = seed, s
		o.options = cuda.Options{Chunk: 16 + rng.IntN(200), Scratch: 1 << rng.IntN(20)}
		if seed%4 == 3 {
			o.sim.Kernels = nil // the hosts do the steps inside
		}
		w := newWorld(t, o)
		var ps []program
		for i := range 8 {
			name := names[rng.IntN(len(names))]
			if i%4 != 0 {
				name = between[rng.IntN(len(between))]
			}
			ps = append(ps, draw(rng, name, o.size))
		}
		w.each(func(x *rank, r int) error {
			must.Do(x.meetDirectly(r))
			for _, op := range []work.OpType{
				work.AllReduce, work.AllReduceCoalesced, work.Reduce, work.Broadcast, work.AllGather, work.AllGatherCoalesced, work.ReduceScatter,
				work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced,
			} {
				if c := x.does(op); c.Algorithm != cuda.ClustersWork {
					return fmt.Errorf("%v goes by %s: %s", op, c.Algorithm, c.Why)
				}
			}
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// TestF26CallerGoesOn: the call and Synchronize return before the other ranks have called, however many chunks there
// are. The caller's goroutine only enqueues.
func TestF26CallerGoesOn(t *testing.T) {
	for _, sizes := range [][]int{{2, 2}, {1, 1}, {3, 1}} {
		o := clustered(sizes...)
		o.options = cuda.Options{Chunk: 400} // of 6000 bytes
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
		var called sync.WaitGroup
		called.Add(o.size - 1)
		w.each(func(x *rank, r int) error {
			last := r == o.size-1
			y, err := x.vector(tensor.Float32, r, tensorBytes(slices.Repeat([]float32{float32(r)}, 1500)))
			if err != nil {
				if !last {
					called.Done()
				}
				return err
			}
			if last {
				called.Wait() // for the others' calls to return
			}
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
			if err == nil {
				err = v.Synchronize(x.stream[r])
			}
			if !last {
				if err == nil && v.IsCompleted() {
					err = errors.New("the operation has ended without the last rank")
				}
				called.Done()
			}
			if err == nil {
				err = v.Wait(x.ctx)
			}
			if err != nil {
				return err
			}
			b := must.Get(x.bytes(y, r))
			return same(b, tensorBytes(slices.Repeat([]float32{float32(o.size * (o.size - 1) / 2)}, 1500)))
		})
		w.end()
	}
}

// TestF26ManyTensors: a coalesced all-reduce has one buffer for its tensors, or goes flat if they are too many. Clusters
// with kernels and without take part.
func TestF26ManyTensors(t *testing.T) {
	for _, tensors := range []int{8, 9, 32, 60} {
		o := clustered(2, 1)
		o.options = cuda.Options{Chunk: 100}
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			must.Do(x.meetDirectly(r))
			var ys []*vector
			var ts []*tensor.Tensor
			for i := range tensors {
				y, err := x.vector(tensor.Float32, r, tensorBytes([]float32{float32(r + 1), float32(i), float32(i * r)}))
				if err != nil {
					return err
				}
				ys, ts = append(ys, y), append(ts, y.t)
			}
			must.Do(x.wait(x.b.AllReduceCoalesced(x.ctx, ts, backend.AllReduceOptions{})))
			for i, y := range ys {
				b, err := x.bytes(y, r)
				if err == nil {
					err = same(b, tensorBytes([]float32{6, float32(3 * i), float32(3 * i)}))
				}
				if err != nil {
					return fmt.Errorf("tensor %d of %d: %w", i, tensors, err)
				}
			}
			return nil
		})
		w.end()
	}
}

// spans runs one all-reduce of n bytes on clusters, and returns the simulator's timeline of it.
func spans(t *testing.T, s setup, n int) []sim.Step {
	return timeline(t, s, n, (*rank).meetDirectly, func(x *rank, _ int, t *tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduce(x.ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{})
	})
}

// timeline lets the ranks meet, each makes a tensor of n bytes, and then call. It returns the simulator's timeline
// of the call.
func timeline(t *testing.T, s setup, n int, meet func(x *rank, r int) error, call func(x *rank, r int, t *tensor.Tensor) (*work.Work, error)) []sim.Step {
	t.Helper()
	s.sim.Timeline = true
	w := newWorld(t, s)
	ys := make([]*vector, s.size)
	w.each(func(x *rank, r int) (err error) {
		if err = meet(x, r); err == nil {
			ys[r], err = x.vector(tensor.Float32, r, make([]byte, n))
		}
		return err
	})
	require.NoError(t, w.m.Quiesce(w.ctx))
	before := must.Get(w.m.Timeline())
	w.each(func(x *rank, r int) error {
		return must.Get(call(x, r, ys[r].t)).Wait(x.ctx)
	})
	require.NoError(t, w.m.Quiesce(w.ctx))
	after := must.Get(w.m.Timeline())
	w.end()
	// Steps are in the order of their time: those of before are among those of after.
	seen := map[sim.Step]int{}
	for _, x := range before {
		seen[x]++
	}
	return slices.DeleteFunc(after, func(x sim.Step) bool {
		seen[x]--
		return seen[x] >= 0
	})
}

// TestF26Overlap: on the virtual clock, where each kernel, each copy and the network's part of a chunk take the same
// time, the stages of an all-reduce overlap. It takes at most 0.7 of what its steps take one after the other, as they
// would with a host that waits for each stage (T15).
//
// To the clock the goroutines of a process are one host. If the network of a chunk ends after the host has
// seen a later chunk come, that looks like an order. So one of some runs has to show all of that.
func TestF26Overlap(t *testing.T) {
	const n, chunks, stage = 96 << 10, 12, 10 * time.Microsecond
	for _, sizes := range [][]int{{2, 2}, {2, 2, 2}, {1, 1}} {
		s := clustered(sizes...)
		s.options = cuda.Options{Chunk: n / chunks}
		const fast = 1e15
		s.sim.Topology = sim.Topology{
			Memory: fast, HostBandwidth: fast, LinkBandwidth: fast, LaunchLatency: stage, HostLatency: stage,
			// The host uses a chunk twice: when the network has it, and when it gives it back.
			CPUBandwidth: 2 * n / chunks / float64(sizes[0]) / stage.Seconds(),
		}
		shown := false
		for run := 0; run < 40 && !shown; run++ {
			var all, first, last time.Duration
			steps := map[string][]sim.Step{}
			for _, x := range spans(t, s, n) {
				if !strings.HasPrefix(x.Stream, "rank 0/rank 0") && x.Stream != "host of rank 0" || x.End == x.Start {
					continue
				}
				if all == 0 {
					first = x.Start
				}
				first, last = min(first, x.Start), max(last, x.End)
				all += x.End - x.Start
				steps[x.Stream] = append(steps[x.Stream], x)
			}
			// beside is how long steps of two kinds run at the same time.
			beside := func(xs, ys []sim.Step) (both time.Duration) {
				for _, x := range xs {
					for _, y := range ys {
						both += max(min(x.End, y.End)-max(x.Start, y.Start), 0)
					}
				}
				return both
			}
			kernels, network := steps["rank 0/rank 0 direct"], steps["host of rank 0"]
			copies := slices.Concat(steps["rank 0/rank 0 down.0"], steps["rank 0/rank 0 up.0"])
			require.Len(t, copies, 2*chunks, "%v", sizes)
			require.Len(t, network, 2*chunks, "%v", sizes)
			both := []time.Duration{beside(network, copies)}
			if sizes[0] > 1 {
				require.Len(t, kernels, 2*chunks, "%v", sizes)
				both = append(both, beside(network, kernels), beside(kernels, copies))
			}
			part := float64(last-first) / float64(all)
			t.Logf("%v: %v, one after the other %v (%.2f), network beside copies and kernels, kernels beside copies: %v", sizes, last-first, all, part, both)
			shown = part <= 0.7 && !slices.Contains(both, 0)
		}
		require.True(t, shown, "%v: no run shows it", sizes)
	}
}

// TestF26NetworkBytes: in an all-reduce of two clusters of eight devices, a network card carries each way 2(C-1)/C of
// the data once: as much as for one device. The transport counts.
func TestF26NetworkBytes(t *testing.T) {
	const n = 64 << 10
	o := clustered(8, 8)
	o.options = cuda.Options{Chunk: n / 2}
	o.sim.NoDelays = true
	var sent [2]atomic.Int64 // by the cards of the two hosts
	o.sent = func(_ string, from, to, bytes int) {
		if from/8 != to/8 {
			sent[from/8].Add(int64(bytes))
		}
	}
	w := newWorld(t, o)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	sent[0].Store(0)
	sent[1].Store(0)
	w.each(func(x *rank, r int) error {
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, n)))
		return must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})).Wait(x.ctx)
	})
	for host := range sent {
		require.InDelta(t, n, sent[host].Load(), 0.05*n)
	}
	w.end()
}

// inner changes the options of the CPU backend, after s.vary.
func (s *setup) inner(change func(*gloo.Options)) {
	vary := s.vary
	s.vary = func(o *cuda.Options, r int) {
		vary(o, r)
		h := o.CPUOptions.(gloo.Options)
		change(&h)
		o.CPUOptions = h
	}
}

// TestF26ClustersOptions: sums in rank order keep the flat way, and Explain says each rank's part.
func TestF26ClustersOptions(t *testing.T) {
	s := clustered(2, 1)
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	e := w.ranks[1].b.Explain()
	require.Equal(t, []backend.Cluster{{Ranks: []int{0, 1}, Shares: []float64{0.5, 0.5}}, {Ranks: []int{2}, Shares: []float64{1}}}, e.Clusters)
	require.Contains(t, e.Choices[0].Why, "this rank is in cluster 0 of 2, and carries 0.5 of its traffic; inside the cluster: by kernels")
	require.Contains(t, w.ranks[2].b.Explain().Choices[0].Why, "this rank is in cluster 1 of 2, and carries 1 of its traffic")
	w.end()

	s = clustered(2, 1)
	s.inner(func(h *gloo.Options) { h.Sums = gloo.SumsInRankOrder })
	w = newWorld(t, s)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	c := w.ranks[0].b.Explain().Choices[0]
	require.Equal(t, cuda.HostWork, c.Algorithm)
	require.Contains(t, c.Why, `not clusters: rank 0: gloo.Options.Sums is "rank-order"`)
	w.end()
}

// TestF26ClustersBits: sums of floats of very different size have the same bits on all ranks and in all
// runs (F-47).
func TestF26ClustersBits(t *testing.T) {
	const n = 1001
	rng := random(t, 1)
	sizes := []int{2, 3, 1}
	in := make([][]float32, 6)
	for r := range in {
		for range n {
			in[r] = append(in[r], float32(rng.NormFloat64()*math.Ldexp(1, rng.IntN(40))))
		}
	}
	var want []byte
	for run := range 3 {
		o := clustered(sizes...)
		o.sim.Seed = uint64(run)
		o.options = cuda.Options{Chunk: 600}
		w := newWorld(t, o)
		outs := make([][]byte, len(in))
		w.each(func(x *rank, r int) error {
			y := must.Get(x.vector(tensor.Float32, r, tensorBytes(in[r])))
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Avg()})
			if err == nil {
				err = v.Wait(x.ctx)
			}
			if err == nil {
				outs[r], err = x.bytes(y, r)
			}
			return err
		})
		w.end()
		if want == nil {
			want = outs[0]
		}
		for r, out := range outs {
			require.NoError(t, same(out, want), "rank %d, run %d", r, run)
		}
	}
}

// TestMixedTensors: ranks pass CPU tensors where others pass device tensors. The collective works, in one
// cluster and in several, with ranks without a device too.
func TestMixedTensors(t *testing.T) {
	const n = 30
	numbers := func(r int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(100*r + i)
		}
		return v
	}
	type place func(x *rank, r int, v []float32) (*tensor.Tensor, func() ([]byte, error), error)
	device := func(x *rank, r int, v []float32) (*tensor.Tensor, func() ([]byte, error), error) {
		y, err := x.vector(tensor.Float32, r%len(x.stream), tensorBytes(v))
		if err != nil {
			return nil, nil, err
		}
		return y.t, func() ([]byte, error) { return x.bytes(y, r%len(x.stream)) }, nil
	}
	host := func(_ *rank, _ int, v []float32) (*tensor.Tensor, func() ([]byte, error), error) {
		u, err := tensor.Of(slices.Clone(v), len(v))
		return u, func() ([]byte, error) { return u.Bytes(), nil }, err
	}
	run := func(t *testing.T, s setup, on func(r int) place) {
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			at := on(r)
			for round := range 2 {
				sum, got, err := at(x, r, numbers(r))
				if err != nil {
					return err
				}
				v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{sum}, backend.AllReduceOptions{}))
				root := round % s.size
				one, gotOne, err := at(x, r, numbers(r))
				if err != nil {
					return err
				}
				u := must.Get(x.b.Broadcast(x.ctx, []*tensor.Tensor{one}, backend.BroadcastOptions{Root: root}))
				in, _, err := at(x, r, numbers(r))
				if err != nil {
					return err
				}
				var outs []*tensor.Tensor
				var gots []func() ([]byte, error)
				for range s.size {
					out, g, err := at(x, r, make([]float32, n))
					if err != nil {
						return err
					}
					outs, gots = append(outs, out), append(gots, g)
				}
				k := must.Get(x.b.AllGather(x.ctx, outs, in, backend.AllGatherOptions{}))
				must.Do(work.WaitAll(x.ctx, v, u, k))
				want := numbers(0)
				for p := 1; p < s.size; p++ {
					for i, f := range numbers(p) {
						want[i] += f
					}
				}
				check := func(what string, get func() ([]byte, error), want []float32) error {
					b, err := get()
					if err == nil {
						err = same(b, tensorBytes(want))
					}
					if err != nil {
						return fmt.Errorf("%s: %w", what, err)
					}
					return nil
				}
				errs := []error{check("all_reduce", got, want), check("broadcast", gotOne, numbers(root))}
				for p := range gots {
					errs = append(errs, check(fmt.Sprint("all_gather of ", p), gots[p], numbers(p)))
				}
				must.Do(errors.Join(errs...))
			}
			return nil
		})
		w.end()
	}
	some := func(cpu ...int) func(r int) place {
		return func(r int) place {
			if slices.Contains(cpu, r) {
				return host
			}
			return device
		}
	}
	through := setup{size: 3, sim: sim.Config{Devices: 3}}
	t.Run("kernels", virtually(func(t *testing.T) { run(t, directly(3), some(1)) }))
	t.Run("kernels, first call on the CPU", virtually(func(t *testing.T) { run(t, directly(2), some(0)) }))
	t.Run("the host", virtually(func(t *testing.T) { run(t, through, some(0, 2)) }))
	t.Run("all on the CPU", virtually(func(t *testing.T) { run(t, through, some(0, 1, 2)) }))
	t.Run("clusters", virtually(func(t *testing.T) { run(t, clustered(2, 2, 1), some(0, 3, 4)) }))
	t.Run("clusters, 1 and 1", virtually(func(t *testing.T) { run(t, clustered(1, 1), some(1)) }))
	t.Run("clusters without kernels", virtually(func(t *testing.T) {
		s := clustered(2, 2)
		s.sim.Kernels = nil
		run(t, s, some(0, 3))
	}))
	t.Run("clusters, all_reduce by another work", virtually(func(t *testing.T) {
		s := clustered(2, 1)
		s.options.AllReduce = cuda.HostWork
		run(t, s, some(2))
	}))
	t.Run("clusters, some of ranks without a device", virtually(func(t *testing.T) {
		run(t, withoutDevices(directly(4), 1, 3), some(0, 1, 3))
	}))
	t.Run("no rank has a device", virtually(func(t *testing.T) {
		run(t, withoutDevices(setup{size: 2}, 0, 1), some(0, 1))
	}))
	t.Run("clusters, broadcast by table", virtually(func(t *testing.T) {
		s := clustered(2, 1)
		s.options.Table = tableOf(t, "broadcast hosts 3 2 1000 flat 1\n")
		run(t, s, some(2))
	}))
}

// drawSetup returns a setup of one cluster with size ranks, of several clusters, or without kernels.
func drawSetup(rng *rand.Rand, seed uint64, s sim.Semantics, size int) setup {
	o := directly(size)
	switch seed % 4 {
	case 1:
		o = clustered(drawClusters(rng)...)
	case 2:
		o.sim.Kernels = nil
	}
	o.sim.Seed, o.sim.Semantics = seed, s
	return o
}

// third returns each rank with the probability 1/3.
func third(rng *rand.Rand, size int) (ranks []int) {
	for r := range size {
		if rng.IntN(3) == 0 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// TestMixedCollectives: every collective and message takes CPU tensors beside device tensors, on ranks with and without
// a device, in one cluster and in several.
func TestMixedCollectives(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		o := drawSetup(rng, seed, s, 2+rng.IntN(3))
		o.options.Chunk = 16 + rng.IntN(200)
		var lack []int
		if seed%4 != 2 {
			lack = third(rng, o.size)
		}
		if seed%8 == 7 {
			o.options.AllReduce, o.options.Broadcast = cuda.HostWork, cuda.BroadcastTree
		}
		o = withoutDevices(o, lack...)
		w := newWorld(t, o)
		var ps []program
		for i := range 6 {
			ps = append(ps, draw(rng, names[(int(seed)*6+i)%len(names)], o.size))
		}
		w.each(func(x *rank, r int) error {
			some := (int(seed) + r) % 3 // of the ranks with devices, some have tensors of both kinds
			x.mixes = func(rng *rand.Rand) bool {
				return slices.Contains(lack, r) || some == 1 || some == 2 && rng.IntN(2) == 0
			}
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// withoutDevices is s with ranks that have no device.
func withoutDevices(s setup, ranks ...int) setup {
	vary := s.vary
	s.vary = func(o *cuda.Options, r int) {
		if vary != nil {
			vary(o, r)
		}
		if slices.Contains(ranks, r) {
			o.Driver, o.NoDevice = nil, true
		}
	}
	return s
}

// preferred is a registered work that comes before ClustersWork. It is usable while usable is set.
var preferred struct {
	usable atomic.Bool
	runs   atomic.Int64
}

// registerPreferred makes the work known; a table has no way to take it back.
var registerPreferred = sync.OnceFunc(func() {
	cuda.RegisterTestWork("preferred", 160, cuda.TestWork{
		Usable: func() error {
			if !preferred.usable.Load() {
				return errors.New("the test has ended")
			}
			return nil
		},
		Run: func(ctx context.Context, cpu backend.Backend) error {
			preferred.runs.Add(1)
			v, err := cpu.Barrier(ctx, backend.BarrierOptions{})
			if err == nil {
				err = v.Wait(ctx)
			}
			return err
		},
	})
})

// TestMixedRegisteredWork: ranks with CPU tensors take the same work as the others.
func TestMixedRegisteredWork(t *testing.T) {
	registerPreferred()
	preferred.usable.Store(true)
	defer preferred.usable.Store(false)
	reduce := func(x *rank, r int, cpu bool) (err error) {
		defer must.Catch(&err)
		u, err := tensor.New(tensor.Uint8, 4)
		if err != nil {
			return err
		}
		filled := func() error { return nil }
		if !cpu {
			y, err := x.vector(tensor.Uint8, r, make([]byte, 4))
			if err != nil {
				return err
			}
			u = y.t
			filled = func() error { _, err := x.bytes(y, r); return err }
		}
		v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{u}, backend.AllReduceOptions{}))
		return errors.Join(v.Wait(x.ctx), filled())
	}
	s := clustered(2, 1)
	s.sim.Kernels = nil // the clusters would do it on the hosts
	w := newWorld(t, s)
	before := preferred.runs.Load()
	w.each(func(x *rank, r int) error { return reduce(x, r, r != 1) })
	require.EqualValues(t, before+3, preferred.runs.Load())
	w.end()
}

// TestF29ClustersSteady makes nothing once the ranks have met (T9).
func TestF29ClustersSteady(t *testing.T) {
	s := clustered(2, 1)
	s.options = cuda.Options{Chunk: 80}
	w := newWorld(t, s)
	buckets := make([]*bucket, s.size)
	reduce := func(x *rank, r, times int) error {
		for range times {
			o := backend.AllReduceOptions{Op: backend.BXor()}
			must.Do(x.wait(x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, o)))
		}
		return nil
	}
	w.each(func(x *rank, r int) (err error) {
		buckets[r] = must.Get(x.warm(r))
		return reduce(x, r, 10)
	})
	before := w.m.Stats()
	w.each(func(x *rank, r int) error { return reduce(x, r, 50) })
	after := w.m.Stats()
	require.Equal(t, before.MadeStreams, after.MadeStreams)
	require.Equal(t, before.MadeMemories, after.MadeMemories)
	require.Equal(t, before.MadeHosts, after.MadeHosts)
	require.Equal(t, before.MadeModules, after.MadeModules)
	w.end()
}

// TestF29ClustersFailedCalls lets calls to the driver fail in turn, those of an all-reduce of clusters: every
// rank gets an error or a result, nothing is left, and no stream waits for ever (T7).
func TestF29ClustersFailedCalls(t *testing.T) {
	t.Run("once the ranks have met", func(t *testing.T) { clustersFailedCalls(t, true) })
	t.Run("while they meet", func(t *testing.T) { clustersFailedCalls(t, false) })
}

// TestAFailedRankSpoilsTheResult lets a rank fail when its kernels are enqueued. Its streams go on without what comes over the
// network, and its kernels send on what is there instead. The other rank of the cluster gets an error, or a result that is
// right.
func TestAFailedRankSpoilsTheResult(t *testing.T) {
	for range testsize.Of(10, 40, 400) {
		clustersFailedCallsOf(t, true, 1, 1, func(c sim.Call) bool { return c.Name == "Record" && c.Stream == "rank 0/rank 0 direct" })
	}
}

func clustersFailedCalls(t *testing.T, met bool) {
	clustersFailedCallsOf(t, met, testsize.Of(23, 23, 3), 21, nil)
}

func clustersFailedCallsOf(t *testing.T, met bool, every, least int, counts func(c sim.Call) bool) {
	buckets := make([]*bucket, 3)
	fresh := func(t *testing.T, k int) *world {
		s := clustered(2, 1).quietly()
		s.options = cuda.Options{Chunk: 140} // 3 chunks
		s.sim.Seed, s.sim.Semantics = uint64(k), sim.Semantics(k%2)
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			get := x.bucket
			if met {
				get = x.warm
			}
			buckets[r] = must.Get(get(r))
			return x.fill(r, buckets[r])
		})
		return w
	}
	failInTurn(t, every, least, "all_reduce", fresh, counts, func(x *rank, r int) error {
		return x.ended(x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, backend.AllReduceOptions{}))
	}, func(w *world, failed sim.Call, errs []error) {
		err := errors.Join(errs...)
		if err == nil && !met {
			w.end() // this cluster goes on without kernels
			return
		}
		require.ErrorIs(t, err, errInjected, failed)
		for r, err := range errs {
			if err == nil { // it had all that it needs
				e := must.Get(w.ranks[r].use(r, buckets[r]))
				require.NoError(t, w.ranks[r].verify(buckets[r], e), "%v: rank %d", failed, r)
			}
		}
		w.closeInOrder(t, failed)
	})
}
