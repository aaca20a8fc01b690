package cuda_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// program is one collective, drawn from a seed that all ranks have in common.
type program struct {
	name  string
	dtype tensor.DType
	op    backend.ReduceOp
	root  int
	n     []int // sizes
	tag   uint32
}

var names = []string{
	"broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_v", "all_gather_into_tensor",
	"all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "gather_v", "scatter", "reduce_scatter",
	"reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single", "send", "barrier",
}

func draw(rng *rand.Rand, name string, size int) program {
	p := program{name: name, root: rng.IntN(size), tag: rng.Uint32N(3)}
	all := tensor.DTypes()
	p.dtype = all[rng.IntN(len(all))]
	for strings.Contains(name, "reduce") && !addsExactly(p.dtype, size) {
		p.dtype = all[rng.IntN(len(all))]
	}
	ops := []backend.ReduceOp{backend.Sum(), backend.Avg(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor(), backend.PreMulSum(2)}
	for {
		p.op = ops[rng.IntN(len(ops))]
		if _, err := p.op.Reduction(p.dtype, size); err == nil {
			break
		}
	}
	for range max(size, 3) {
		n := rng.IntN(40)
		if rng.IntN(8) == 0 {
			n = 0
		}
		p.n = append(p.n, n)
	}
	return p
}

// addsExactly reports whether sums of what pairOf makes, of two tensors a rank, are
// exact, and so do not depend on the order.
func addsExactly(d tensor.DType, ranks int) bool {
	switch most := 2 * 2 * ranks; d {
	case tensor.Float8E5M2:
		return most <= 8
	case tensor.Float8E4M3:
		return most <= 16
	}
	return true
}

// call runs p on one rank; t picks which of a pair's tensors take part.
type call struct {
	run func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error)
	all []*pair
}

// prepare makes a rank's tensors for p. Layouts and devices are the rank's own.
func (x *rank) prepare(ctx context.Context, p program, r int, rng *rand.Rand, on bool) (call, error) {
	size := len(x.w.ranks)
	var c call
	var failed error
	newPair := func(dims ...int) *pair {
		kind := max(0, rng.IntN(6)-2)
		if x.layout != nil {
			kind = *x.layout
		}
		q, err := x.pairOf(rng, p.dtype, rng.IntN(len(x.stream)), laid(kind, dims...), on)
		if err != nil && failed == nil {
			failed = err
		}
		c.all = append(c.all, q)
		return q
	}
	list := func(dims func(i int) []int) []*pair {
		l := make([]*pair, size)
		for i := range l {
			l[i] = newPair(dims(i)...)
		}
		return l
	}
	pick := func(t func(*pair) *tensor.Tensor, ps []*pair) []*tensor.Tensor {
		out := make([]*tensor.Tensor, len(ps))
		for i, q := range ps {
			out[i] = t(q)
		}
		return out
	}
	n := p.n
	same := func(int) []int { return []int{n[0], 2} }
	own := func(i int) []int { return []int{n[i], 2} }
	switch p.name {
	case "broadcast":
		ts := []*pair{newPair(n[0], 2), newPair(n[0], 2)}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, pick(t, ts), backend.BroadcastOptions{Root: p.root, RootTensor: n[1] % 2})
		}
	case "all_reduce":
		ts := []*pair{newPair(n[0], 2)}
		if n[1]%2 == 1 {
			ts = append(ts, newPair(n[0], 2))
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllReduce(ctx, pick(t, ts), backend.AllReduceOptions{Op: p.op})
		}
	case "all_reduce_coalesced":
		ts := []*pair{newPair(n[0]), newPair(n[1], 2), newPair(n[2])}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllReduceCoalesced(ctx, pick(t, ts), backend.AllReduceOptions{Op: p.op})
		}
	case "reduce":
		q := newPair(n[0], 2)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.Reduce(ctx, t(q), backend.ReduceOptions{Op: p.op, Root: p.root})
		}
	case "all_gather":
		out, in := list(same), newPair(n[0], 2)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllGather(ctx, pick(t, out), t(in), backend.AllGatherOptions{})
		}
	case "all_gather_v":
		out, in := list(own), newPair(n[r], 2)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllGatherV(ctx, pick(t, out), t(in), backend.AllGatherOptions{})
		}
	case "all_gather_into_tensor":
		out, in := newPair(n[0]*size, 2), newPair(n[0], 2)
		if n[1]%2 == 0 {
			out = newPair(size, n[0], 2)
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllGatherIntoTensor(ctx, t(out), t(in), backend.AllGatherOptions{})
		}
	case "all_gather_coalesced":
		in := []*pair{newPair(n[0]), newPair(n[1], 2)}
		out := make([][]*pair, size)
		for i := range out {
			out[i] = []*pair{newPair(n[0]), newPair(n[1], 2)}
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			var lists [][]*tensor.Tensor
			for _, l := range out {
				lists = append(lists, pick(t, l))
			}
			return b.AllGatherCoalesced(ctx, lists, pick(t, in), backend.AllGatherOptions{})
		}
	case "all_gather_into_tensor_coalesced":
		in := []*pair{newPair(n[0]), newPair(n[1], 2)}
		out := []*pair{newPair(n[0] * size), newPair(n[1]*size, 2)}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllGatherIntoTensorCoalesced(ctx, pick(t, out), pick(t, in), backend.AllGatherOptions{})
		}
	case "gather", "gather_v":
		dims := same
		if p.name == "gather_v" {
			dims = own
		}
		in := newPair(dims(r)...)
		var out []*pair
		if r == p.root {
			out = list(dims)
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			f := b.Gather
			if p.name == "gather_v" {
				f = b.GatherV
			}
			return f(ctx, pick(t, out), t(in), backend.GatherOptions{Root: p.root})
		}
	case "scatter":
		out := newPair(n[0], 2)
		var in []*pair
		if r == p.root {
			in = list(same)
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.Scatter(ctx, t(out), pick(t, in), backend.ScatterOptions{Root: p.root})
		}
	case "reduce_scatter":
		in, out := list(own), newPair(n[r], 2)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatter(ctx, t(out), pick(t, in), backend.ReduceScatterOptions{Op: p.op})
		}
	case "reduce_scatter_tensor":
		in, out := newPair(n[0]*size, 2), newPair(n[0], 2)
		if n[1]%2 == 0 {
			in = newPair(size, n[0], 2)
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, t(out), t(in), backend.ReduceScatterOptions{Op: p.op})
		}
	case "reduce_scatter_tensor_coalesced":
		in := []*pair{newPair(n[0] * size), newPair(n[1]*size, 2)}
		out := []*pair{newPair(n[0]), newPair(n[1], 2)}
		if n[2]%2 == 0 {
			in[1] = newPair(size, n[1], 2)
		}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatterTensorCoalesced(ctx, pick(t, out), pick(t, in), backend.ReduceScatterOptions{Op: p.op})
		}
	case "all_to_all":
		// What i sends to j has n[i]+n[j] rows.
		dims := func(i int) []int { return []int{n[r] + n[i], 2} }
		in, out := list(dims), list(dims)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllToAll(ctx, pick(t, out), pick(t, in), backend.AllToAllOptions{})
		}
	case "all_to_all_single":
		sum := 0
		splits := make([]int, size)
		for i := range splits {
			splits[i] = n[r] + n[i]
			sum += splits[i]
		}
		if n[0]%2 == 0 {
			splits, sum = nil, n[1]*size
		}
		in, out := newPair(sum, 2), newPair(sum, 2)
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.AllToAllSingle(ctx, t(out), t(in), splits, splits, backend.AllToAllOptions{})
		}
	case "send":
		from, to := p.root, (p.root+1)%size
		q := newPair(n[0], 2)
		o := backend.P2POptions{Tag: p.tag}
		c.run = func(b backend.Backend, t func(*pair) *tensor.Tensor) (*work.Work, error) {
			switch {
			case from == to:
			case r == from:
				return b.Send(ctx, t(q), to, o)
			case r == to && n[1]%2 == 0:
				return b.RecvAnySource(ctx, t(q), o)
			case r == to:
				return b.Recv(ctx, t(q), from, o)
			}
			return nil, nil
		}
	case "barrier":
		c.run = func(b backend.Backend, _ func(*pair) *tensor.Tensor) (*work.Work, error) {
			return b.Barrier(ctx, backend.BarrierOptions{})
		}
	}
	return c, failed
}

// collectives makes the calls of ps, all at a time, on device tensors and then on CPU
// tensors. The caller's copies into the tensors and out of them are in stream order.
// Every byte of the storages is compared.
func (x *rank) collectives(ps []program, rng *rand.Rand, r int) (err error) {
	defer must.Catch(&err)
	var calls []call
	var works []*work.Work
	in := make([]driver.Stream, len(ps)) // what calls are part of
	for i, p := range ps {
		mode, ctx := rng.IntN(3), x.ctx
		switch mode {
		case 1:
			ctx = cuda.WithStreams(ctx, x.stream...)
		case 2:
			in[i] = x.stream[rng.IntN(len(x.stream))]
			ctx = cuda.InStream(ctx, in[i])
		}
		c := must.Get(x.prepare(ctx, p, r, rng, mode == 0))
		if mode == 2 {
			for _, s := range x.stream {
				must.Do(follow(in[i], s))
			}
		}
		v, err := c.run(x.b, func(q *pair) *tensor.Tensor { return q.dev })
		if err != nil {
			return fmt.Errorf("%+v: %w", p, err)
		}
		calls, works = append(calls, c), append(works, v)
	}
	for i, c := range calls {
		for _, s := range x.stream {
			if works[i] == nil || s == in[i] {
				continue
			}
			must.Do(works[i].Synchronize(s))
		}
		for _, q := range c.all {
			must.Do(x.back(q))
		}
	}
	for i, c := range calls {
		v := must.Get(c.run(x.cpu, func(q *pair) *tensor.Tensor { return q.cpu }))
		if err := work.WaitAll(x.ctx, works[i], v); err != nil {
			return fmt.Errorf("%+v: %w", ps[i], err)
		}
		for _, q := range c.all {
			if err := x.check(q); err != nil {
				return fmt.Errorf("%+v: %w", ps[i], err)
			}
		}
	}
	return nil
}

// follow has a stream come after what another one has been given.
func follow(s, first driver.Stream) (err error) {
	defer must.Catch(&err)
	e := must.Get(first.Record())
	defer e.Release()
	return s.Wait(e)
}

// TestCollectives does every collective on device tensors and on CPU tensors, several at
// a time, with any dtype, operator, size, strides and device. The caller's copies into
// the tensors and out of them are in stream order. Every byte of the storages is compared
// (F-15, F-21, T11).
func TestCollectives(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := 1 + rng.IntN(5)
		if seed%8 == 7 {
			size = 6 + rng.IntN(4)
		}
		w := newWorld(t, setup{
			size: size, sim: sim.Config{Devices: 1 + rng.IntN(2), Seed: seed, Semantics: s},
			options: cuda.Options{Chunk: 16 + rng.IntN(200), Slots: 1 + rng.IntN(3), Pinned: 1 << rng.IntN(20)},
		})
		var ps []program
		for i := range 6 {
			ps = append(ps, draw(rng, names[(int(seed)*6+i)%len(names)], size))
		}
		w.each(func(x *rank, r int) error {
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// TestRegistered finds the backend as a group does.
func TestRegistered(t *testing.T) {
	m := must.Get(backend.ParseDevices("cpu:gloo,cuda:cuda"))
	require.Equal(t, "cuda", m[1].Backend)
	m = must.Get(backend.ParseDevices(""))
	require.Contains(t, m, backend.DeviceBackend{Device: tensor.CUDA, Backend: "cuda"})
}
