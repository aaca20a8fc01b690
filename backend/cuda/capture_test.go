package cuda_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// kinds of operations in a graph.
const (
	graphAllReduce = iota
	graphCoalesced
	graphAllGather
	graphAllGatherV
	graphReduceScatter
	graphBroadcast
	graphReduce
	graphGather
	graphScatter
	graphAllToAll
	graphMessage
	graphBarrier
	graphKinds
)

// graphOp is an operation of a graph with n elements for each rank, the same on all ranks. A message goes
// from each even rank to the next one.
type graphOp struct{ id, kind, n, root int }

// length is what a rank has in an uneven all_gather.
func (o graphOp) length(r int) int { return o.n + 3*r }

// sizes returns the elements of a rank's input and output. In place there is only the output.
func (o graphOp) sizes(r, size int) (in, out int) {
	switch o.kind {
	case graphAllReduce, graphCoalesced, graphBroadcast, graphReduce:
		return 0, o.n
	case graphAllGather:
		return o.n, o.n * size
	case graphAllGatherV:
		for p := range size {
			out += o.length(p)
		}
		return o.length(r), out
	case graphReduceScatter:
		return o.n * size, o.n
	case graphGather:
		if r == o.root {
			out = o.n * size
		}
		return o.n, out
	case graphScatter:
		if r == o.root {
			in = o.n * size
		}
		return in, o.n
	case graphAllToAll:
		return o.n * size, o.n * size
	case graphMessage:
		if r%2 == 0 && r+1 < size {
			return o.n, 0
		}
		return 0, o.n
	}
	return 0, 0
}

// input is element i of a rank's input in a round.
func (o graphOp) input(round, r, i int) int32 { return int32((round*31 + o.id*17 + r*7 + i) % 1000) }

// output is element i of a rank's output.
func (o graphOp) output(round, r, size, i int) int32 {
	sum := func(i int) (s int32) {
		for p := range size {
			s += o.input(round, p, i)
		}
		return s
	}
	switch o.kind {
	case graphAllReduce, graphCoalesced:
		return sum(i)
	case graphReduce:
		if r == o.root {
			return sum(i)
		}
	case graphAllGather, graphGather:
		return o.input(round, i/o.n, i%o.n)
	case graphAllGatherV:
		for p := range size {
			if i < o.length(p) {
				return o.input(round, p, i)
			}
			i -= o.length(p)
		}
	case graphReduceScatter:
		return sum(r*o.n + i)
	case graphBroadcast:
		return o.input(round, o.root, i)
	case graphScatter:
		return o.input(round, o.root, r*o.n+i)
	case graphAllToAll:
		return o.input(round, i/o.n, r*o.n+i%o.n)
	case graphMessage:
		if r%2 == 1 {
			return o.input(round, r-1, i)
		}
	}
	return o.input(round, r, i) // as it was
}

// graphOf is a rank's operations, with their memory one after the other.
type graphOf struct {
	x    *rank
	r    int
	ops  []graphOp
	at   []int // elements before each one's input
	mem  driver.Memory
	host driver.HostMemory
	all  *tensor.Tensor
}

func newGraph(x *rank, r int, ops []graphOp) (_ *graphOf, err error) {
	defer must.Catch(&err)
	g, n := &graphOf{x: x, r: r, ops: ops}, 0
	for _, o := range ops {
		g.at = append(g.at, n)
		in, out := o.sizes(r, len(x.w.ranks))
		n += in + out
	}
	g.at = append(g.at, n)
	v, err := x.d.Device(r)
	if err != nil {
		return nil, err
	}
	g.mem = must.Get(v.Alloc(4 * n))
	g.host = must.Get(x.d.AllocHost(4 * n))
	x.close = append(x.close, g.mem, g.host)
	g.all, err = tensor.OnDevice(tensor.Int32, g.mem, n)
	return g, err
}

// call makes a call of operation k.
func (g *graphOf) call(ctx context.Context, k int) (*work.Work, error) {
	o, b, size := g.ops[k], g.x.b, len(g.x.w.ranks)
	var failed error
	cut := func(at, n int) *tensor.Tensor {
		t, err := g.all.Slice(0, at, at+n)
		failed = errors.Join(failed, err)
		return t
	}
	nIn, nOut := o.sizes(g.r, size)
	in, out := cut(g.at[k], nIn), cut(g.at[k]+nIn, nOut)
	if failed != nil {
		return nil, failed
	}
	list := func(at int, length func(r int) int) (all []*tensor.Tensor) {
		for p := range size {
			all = append(all, cut(at, length(p)))
			at += length(p)
		}
		return all
	}
	same := func(int) int { return o.n }
	switch o.kind {
	case graphAllReduce:
		return b.AllReduce(ctx, []*tensor.Tensor{out}, backend.AllReduceOptions{Op: backend.Sum()})
	case graphCoalesced:
		var ts []*tensor.Tensor
		for i := range o.n {
			if i%2 == 0 { // in an order of its own, so that they are packed
				ts = append(ts, cut(g.at[k]+o.n-1-i, 1))
			}
		}
		for i := range o.n {
			if i%2 == 1 {
				ts = append(ts, cut(g.at[k]+o.n-1-i, 1))
			}
		}
		return b.AllReduceCoalesced(ctx, ts, backend.AllReduceOptions{Op: backend.Sum()})
	case graphAllGather:
		return b.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{})
	case graphAllGatherV:
		return b.AllGatherV(ctx, list(g.at[k]+nIn, o.length), in, backend.AllGatherOptions{})
	case graphReduceScatter:
		return b.ReduceScatterTensor(ctx, out, in, backend.ReduceScatterOptions{Op: backend.Sum()})
	case graphBroadcast:
		return b.Broadcast(ctx, []*tensor.Tensor{out}, backend.BroadcastOptions{Root: o.root})
	case graphReduce:
		return b.Reduce(ctx, out, backend.ReduceOptions{Op: backend.Sum(), Root: o.root})
	case graphGather:
		var outs []*tensor.Tensor
		if g.r == o.root {
			outs = list(g.at[k]+nIn, same)
		}
		return b.Gather(ctx, outs, in, backend.GatherOptions{Root: o.root})
	case graphScatter:
		var ins []*tensor.Tensor
		if g.r == o.root {
			ins = list(g.at[k], same)
		}
		return b.Scatter(ctx, out, ins, backend.ScatterOptions{Root: o.root})
	case graphAllToAll:
		return b.AllToAllSingle(ctx, out, in, nil, nil, backend.AllToAllOptions{})
	case graphMessage:
		switch {
		case g.r%2 == 1:
			return b.Recv(ctx, out, g.r-1, backend.P2POptions{})
		case g.r+1 < size:
			return b.Send(ctx, in, g.r+1, backend.P2POptions{})
		}
		return nil, nil
	}
	return b.Barrier(ctx, backend.BarrierOptions{})
}

// fill gives the device the inputs of a round.
func (g *graphOf) fill(round int) error {
	driver.HostAccess(g.x.d, "filling", driver.Writes(g.host.Ptr(), g.host.Len()))
	for k, o := range g.ops {
		for i := range g.at[k+1] - g.at[k] {
			binary.NativeEndian.PutUint32(g.host.Bytes()[4*(g.at[k]+i):], uint32(o.input(round, g.r, i)))
		}
	}
	return g.x.stream[g.r].Copy(g.mem.Ptr(), g.host.Ptr(), g.host.Len())
}

// check compares the outputs of a round.
func (g *graphOf) check(round int) (err error) {
	defer must.Catch(&err)
	s := g.x.stream[g.r]
	must.Do(s.Copy(g.host.Ptr(), g.mem.Ptr(), g.host.Len()))
	e := must.Get(s.Record())
	defer e.Release()
	must.Do(e.Sync(g.x.ctx))
	driver.HostAccess(g.x.d, "comparing", driver.Reads(g.host.Ptr(), g.host.Len()))
	size := len(g.x.w.ranks)
	for k, o := range g.ops {
		in, out := o.sizes(g.r, size)
		for i := range out {
			if o.kind == graphReduce && g.r != o.root {
				break
			}
			got := int32(binary.NativeEndian.Uint32(g.host.Bytes()[4*(g.at[k]+in+i):]))
			if want := o.output(round, g.r, size, i); got != want {
				return fmt.Errorf("round %d: element %d of %+v is %d, want %d", round, i, o, got, want)
			}
		}
	}
	return nil
}

// TestCapture replays a graph of 20 operations of all kinds, with eager calls between. All calls are part of
// one stream. A call in the capture has ended when it returns.
func TestCapture(t *testing.T) {
	rounds := testsize.Of(20, 20, 60)
	eachSeed(t, 2, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		o := directly([]int{2, 4}[seed/2%2])
		o.sim.Seed, o.sim.Semantics = seed, s
		w := newWorld(t, o)
		replays(w, rng, rounds, 40)
		w.end()
	})
}

// TestGPUCapture is TestCapture on two GPUs.
func TestGPUCapture(t *testing.T) {
	d := openGPU(t)
	if d.Count() < 2 {
		t.Skip("needs two GPUs")
	}
	w := sharing{group: "capture", size: 2, room: 1 << 20}.world(t, d)
	replays(w, random(t, 1), 10_000, 2000)
	w.end()
	require.NoError(t, d.Close())
}

// replays has the ranks replay a graph of 20 operations of up to most elements for each rank, so many times.
func replays(w *world, rng *rand.Rand, rounds, most int) {
	size := len(w.ranks)
	var ops []graphOp
	for k := range 20 {
		op := graphOp{id: k, kind: k % graphKinds, n: 1 + rng.IntN(most), root: rng.IntN(size)}
		if k >= graphKinds {
			op.kind = rng.IntN(graphKinds)
		}
		switch op.kind {
		case graphReduce:
			op.root = 0
		case graphCoalesced:
			op.n = min(op.n, 100) // tensors
		}
		ops = append(ops, op)
	}
	rng.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
	eager := make([]int, rounds)
	for i := range eager {
		eager[i] = rng.IntN(3*len(ops)) - 2*len(ops)
	}
	w.each(func(x *rank, r int) error {
		must.Do(x.meetDirectly(r))
		g := must.Get(newGraph(x, r, ops))
		ctx := cuda.InStream(x.ctx, x.stream[r])
		// What it uses of scratch memory is there before the capture.
		must.Do(g.fill(0))
		for k := range ops {
			if v, err := g.call(ctx, k); err != nil {
				return err
			} else if v != nil {
				must.Do(v.Wait(x.ctx))
			}
		}
		must.Do(g.check(0))
		graph := must.Get(driver.Capture(x.stream[r], func() (err error) {
			defer must.Catch(&err)
			for k := range ops {
				v := must.Get(g.call(ctx, k))
				if v != nil && !v.IsSuccess() {
					return fmt.Errorf("%+v has not ended: %w", ops[k], v.Err())
				}
			}
			return nil
		}))
		defer graph.Close()
		for round, k := range eager {
			must.Do(g.fill(round))
			if k >= 0 && ops[k].kind != graphAllReduce && ops[k].kind != graphCoalesced && ops[k].kind != graphReduce {
				// The same call, whose output the graph overwrites.
				must.Get(g.call(ctx, k))
			}
			must.Do(errors.Join(graph.Launch(x.stream[r]), g.check(round)))
		}
		return nil
	})
}

// TestReplayHost: for a replay the host calls the driver once, and the group makes nothing.
func TestReplayHost(t *testing.T) {
	s := directly(2)
	w := newWorld(t, s)
	var calls atomic.Int64
	ops := []graphOp{{id: 1, kind: graphAllReduce, n: 9}, {id: 2, kind: graphMessage, n: 30}, {id: 3, kind: graphCoalesced, n: 20}, {id: 4, kind: graphBarrier}}
	graphs, all := make([]driver.Graph, 2), make([]*graphOf, 2)
	w.each(func(x *rank, r int) (err error) {
		must.Do(x.meetDirectly(r))
		all[r] = must.Get(newGraph(x, r, ops))
		ctx := cuda.InStream(x.ctx, x.stream[r])
		graphs[r], err = driver.Capture(x.stream[r], func() (err error) {
			for k := range ops {
				_, failed := all[r].call(ctx, k)
				err = errors.Join(err, failed)
			}
			return err
		})
		return errors.Join(err, all[r].fill(0))
	})
	w.m.Skip(func(sim.Call) bool {
		calls.Add(1)
		return false
	})
	made := w.m.Stats()
	w.each(func(x *rank, r int) error { return graphs[r].Launch(x.stream[r]) })
	require.EqualValues(t, 2, calls.Load())
	w.each(func(_ *rank, r int) error { return all[r].check(0) })
	now := w.m.Stats()
	require.Equal(t, made.MadeStreams, now.MadeStreams)
	require.Equal(t, made.MadeModules, now.MadeModules)
	w.each(func(_ *rank, r int) error { return graphs[r].Close() })
	w.end()
}

// TestCaptureRefusals holds what cannot be captured: the error says why, and the group goes on.
func TestCaptureRefusals(t *testing.T) {
	o := directly(2)
	o.timeout = patience
	w := newWorld(t, o)
	w.each(func(x *rank, r int) error {
		var err error
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		far := must.Get(x.vector(tensor.Float32, 1-r, make([]byte, 8)))
		odd := must.Get(x.vector(tensor.Bool, r, make([]byte, 8)))
		host := must.Get(tensor.New(tensor.Float32, 2))
		s := x.stream[r]
		ctx := cuda.InStream(x.ctx, s)
		refused := func(what, why string, f func() (*work.Work, error)) error {
			_, err := driver.Capture(s, func() error {
				return must.Err(f())
			})
			if !errors.Is(err, driver.ErrCapture) {
				return fmt.Errorf("%s in a capture: %w, want %w", what, err, driver.ErrCapture)
			}
			return says(err, why)
		}
		sum := func(t *tensor.Tensor) func() (*work.Work, error) {
			return func() (*work.Work, error) {
				return x.b.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{})
			}
		}
		must.Do(refused("a call that connects", "through the host", sum(y.t)))
		must.Do(x.meetDirectly(r))
		for _, c := range []struct {
			what, why string
			f         func() (*work.Work, error)
		}{
			{"a dtype without kernels", "through the host", sum(odd.t)},
			{"another device", "another device", sum(far.t)},
			{"CPU memory", "in CPU memory", sum(host)},
			{"a tag", "through the host", func() (*work.Work, error) {
				return x.b.Send(ctx, y.t, 1-r, backend.P2POptions{Tag: 1})
			}},
			{"any rank", "through the host", func() (*work.Work, error) {
				return x.b.RecvAnySource(ctx, y.t, backend.P2POptions{})
			}},
		} {
			must.Do(refused(c.what, c.why, c.f))
		}
		err = x.meetDirectly(r)
		for _, s := range x.stream { // the tensors have been filled
			e, failed := s.Record()
			if failed == nil {
				failed = e.Sync(x.ctx)
				e.Release()
			}
			err = errors.Join(err, failed)
		}
		return err
	})
	w.end()
}

func says(err error, text string) error {
	if err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("%w, want %q", err, text)
	}
	return nil
}

// TestReplayLost has rank 0 replay a graph that rank 1 does not replay: it ends when the group fails or rank
// 1 leaves.
func TestReplayLost(t *testing.T) {
	for name, end := range map[string]func(x *rank) error{
		"abort": func(x *rank) error { x.b.Abort(errors.New("no more")); return nil },
		"close": func(x *rank) error { return x.b.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			defer cuda.SetCloseLimit(patience / 2)()
			s := directly(2)
			w := newWorld(t, s)
			launched := make(chan struct{})
			w.each(func(x *rank, r int) error {
				var err error
				must.Do(x.meetDirectly(r))
				g := must.Get(newGraph(x, r, []graphOp{{kind: graphAllReduce, n: 5}}))
				graph := must.Get(driver.Capture(x.stream[r], func() error {
					return must.Err(g.call(cuda.InStream(x.ctx, x.stream[r]), 0))
				}))
				defer graph.Close()
				if r == 1 {
					<-launched
					return end(x)
				}
				err = errors.Join(g.fill(0), graph.Launch(x.stream[r]))
				close(launched)
				if err != nil {
					return err
				}
				e := must.Get(x.stream[r].Record())
				defer e.Release()
				must.Do(e.Sync(x.ctx))
				if name == "close" {
					return x.b.Close() // rank 1 waits for that
				}
				return nil
			})
			w.drop(t)
		})
	}
}
