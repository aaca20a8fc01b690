package cuda_test

import (
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
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// gated calls f once, before its first all-reduce.
type gated struct {
	backend.Backend
	calls *atomic.Int64
	f     func(n int64)
}

func (g gated) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	g.f(g.calls.Add(1))
	return g.Backend.AllReduce(ctx, ts, o)
}

var onAllReduce atomic.Pointer[func(n int64)]

const gatedName = "gated"

func init() {
	err := backend.Register(backend.Registration{
		Name: gatedName, Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) {
			b, err := gloo.New(ctx, o)
			return gated{b, new(atomic.Int64), func(n int64) { (*onAllReduce.Load())(n) }}, err
		},
	})
	if err != nil {
		panic(err)
	}
}

// TestF13Pipelined holds that stages overlap. The ranks exchange the first part of the
// tensors before the last parts have left the devices. The first part comes back before
// the last ones are exchanged (F-13).
func TestF13Pipelined(t *testing.T) {
	const chunks, slots = 8, 2
	w := newWorld(t, setup{
		size: 1, sim: sim.Config{Devices: 1, Seed: 13, Timeline: true}, native: true,
		options: cuda.Options{Chunk: 4000 / chunks, Slots: slots, CPU: gatedName, AllReduce: cuda.HostWork},
	})
	ended := func(what string) (n int) {
		steps, err := w.m.Timeline()
		if err != nil {
			t.Error(err)
		}
		for _, s := range steps {
			if strings.HasPrefix(s.Operation, "Copy") && strings.Contains(s.Stream, what) {
				n++
			}
		}
		return n
	}
	var first, up int
	called := make(chan struct{})
	f := func(n int64) {
		// What can go on goes on before the host does. The call may still give the streams their commands.
		<-called
		var stuck *sim.Stuck
		if err := w.m.Quiesce(w.ctx); err != nil && !errors.As(err, &stuck) {
			t.Error(err)
		}
		switch n {
		case 1:
			first = ended("rank 0 down")
		case chunks:
			up = ended("rank 0 up")
		}
	}
	onAllReduce.Store(&f)
	x := w.ranks[0]
	must.Get(x.kept(0, 0))
	v := must.Get(x.b.AllReduce(cuda.WithStreams(x.ctx, x.stream...), x.tensors[:1], backend.AllReduceOptions{}))
	close(called)
	require.NoError(t, v.Wait(x.ctx))
	require.Equal(t, slots, first, "of %d chunks are on the host when the first is reduced", chunks)
	require.Equal(t, chunks-1, up, "of %d chunks are back when the last is reduced", chunks)
	x.tensors = nil
	w.end()
}

// TestF10ToF14ThroughHosts all-reduces device tensors by each algorithm of the CPU backend:
// ring, halving-doubling, bcube, the ring over the callback registry and the others (F-10 to F-14, F-36).
func TestF10ToF14ThroughHosts(t *testing.T) {
	for i, name := range gloo.AllReduceAlgorithms() {
		w := newWorld(t, setup{
			size: 2 + i%4, sim: sim.Config{Devices: 2, Seed: uint64(i)}, options: cuda.Options{Chunk: 100, Slots: 2},
			vary: func(o *cuda.Options, _ int) {
				inner := o.CPUOptions.(gloo.Options)
				inner.AllReduce = name
				o.CPUOptions = inner
			},
		})
		w.each(func(x *rank, r int) error {
			for k, n := range []int{0, 1, 3, 60} {
				for _, many := range []int{1, 2} {
					ps := must.Get(x.several(rand.New(rand.NewPCG(uint64(k), uint64(r))), tensor.Int32, many, n, false))
					if err := x.sums(ps, backend.Sum()); err != nil {
						return fmt.Errorf("%s, %d elements: %w", name, 2*n, err)
					}
				}
			}
			all := x.b.Explain().Choices
			if !slices.ContainsFunc(all, func(c backend.Choice) bool { return c.Op == "gloo all_reduce" && c.Algorithm == name }) {
				return fmt.Errorf("%s is not explained: %v", name, all)
			}
			return nil
		})
		w.end()
	}
}

// TestF15HostWork reduces 1 to 3 tensors through the host, with every operator, as
// the CPU backend does, the mean of each tensor included. The call returns while
// the caller's stream has yet to write them (F-15).
func TestF15HostWork(t *testing.T) {
	dtypes := []tensor.DType{tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Int64}
	ops := []backend.ReduceOp{backend.Sum(), backend.Avg(), backend.Min(), backend.Max(), backend.Product(), backend.BAnd(), backend.BOr(), backend.BXor()}
	for i, d := range dtypes {
		w := newWorld(t, setup{
			size: 2 + i%3, sim: sim.Config{Devices: 2, Seed: uint64(i)},
			options: cuda.Options{Chunk: 100, Slots: 2, AllReduce: cuda.HostWork},
		})
		for k, op := range ops {
			if _, err := op.Reduction(d, len(w.ranks)); err != nil {
				continue
			}
			w.each(func(x *rank, r int) error {
				opened := must.Get(x.gate(x.stream[0]))
				defer opened()
				ps := must.Get(x.several(rand.New(rand.NewPCG(uint64(k), uint64(r))), d, 1+k%3, 20, k%2 == 0))
				v := must.Get(x.b.AllReduce(x.ctx, devs(ps), backend.AllReduceOptions{Op: op}))
				held := false
				for _, p := range ps {
					held = held || p.device == 0
					must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
				}
				if held && v.IsCompleted() {
					return errors.New("the Work has ended, and the tensors have not been written")
				}
				opened()
				c := must.Get(x.cpu.AllReduce(x.ctx, cpus(ps), backend.AllReduceOptions{Op: op}))
				must.Do(work.WaitAll(x.ctx, v, c))
				for _, p := range ps {
					if err := x.check(p); err != nil {
						return fmt.Errorf("%v of %v: %w", op, d, err)
					}
				}
				e, err := x.stream[0].Record() // which may have had no tensor
				if err != nil {
					return err
				}
				defer e.Release()
				return e.Sync(x.ctx)
			})
		}
		w.end()
	}
}

// TestF17Concurrent issues pairs of all-reduces from two streams, in one order on all
// ranks, all under way together. Every result is that of its own tensor (F-17).
func TestF17Concurrent(t *testing.T) {
	pairs := testsize.Of(100, 100, 1000)
	for _, c := range []sim.Config{{Devices: 2, NoDelays: true, NoCheck: true}, {Devices: 2, Seed: 17}} {
		if !c.NoDelays {
			pairs = min(pairs, 60)
		}
		w := newWorld(t, setup{size: 2, timeout: 5 * patience, sim: c, options: cuda.Options{Chunk: 8, Slots: 2}})
		w.each(func(x *rank, r int) error {
			var err error
			n := 4 * pairs
			var mems []driver.Memory
			var outs []driver.HostMemory
			for i := range 2 {
				v := must.Get(x.d.Device(i))
				m := must.Get(v.Alloc(4 * n))
				x.close = append(x.close, m)
				h := must.Get(x.d.AllocHost(4 * n))
				x.close = append(x.close, h)
				driver.HostAccess(x.d, "filling", driver.Writes(h.Ptr(), 4*n))
				all := must.Get(tensor.FromBytes(tensor.Int32, h.Bytes()[:4*n], n))
				values := must.Get(tensor.Data[int32](all))
				for k := range values {
					values[k] = int32((1 + r) * (10*k + i))
				}
				must.Do(x.stream[i].Copy(m.Ptr(), h.Ptr(), 4*n))
				mems, outs = append(mems, m), append(outs, h)
			}
			var works []*work.Work
			for k := range pairs {
				for i := range 2 {
					whole := must.Get(tensor.OnDevice(tensor.Int32, cuda.OnStream(mems[i], x.stream[i]), n))
					part := must.Get(whole.Slice(0, 4*k, 4*k+4))
					v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{part}, backend.AllReduceOptions{}))
					works = append(works, v)
				}
			}
			must.Do(work.WaitAll(x.ctx, works...))
			for i := range 2 {
				for _, v := range works[i:] {
					must.Do(v.Synchronize(x.stream[i]))
				}
				must.Do(x.stream[i].Copy(outs[i].Ptr(), mems[i].Ptr(), 4*n))
				e := must.Get(x.stream[i].Record())
				err = e.Sync(x.ctx)
				e.Release()
				if err != nil {
					return err
				}
				driver.HostAccess(x.d, "comparing", driver.Reads(outs[i].Ptr(), 4*n))
				all := must.Get(tensor.FromBytes(tensor.Int32, outs[i].Bytes()[:4*n], n))
				values := must.Get(tensor.Data[int32](all))
				for k, got := range values {
					if want := int32(3 * (10*k + i)); got != want {
						return fmt.Errorf("element %d of tensor %d is %d, want %d", k, i, got, want)
					}
				}
			}
			return nil
		})
		w.end()
	}
}

// TestF21Strided all-reduces and broadcasts transposed matrices and matrices with
// holes: the result lies where the elements were, and nothing else changes
// (F-21).
func TestF21Strided(t *testing.T) {
	for kind := 1; kind <= 3; kind++ {
		w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 2, Seed: uint64(kind)}, options: cuda.Options{Chunk: 64}})
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(21, uint64(r)))
			for _, broadcast := range []bool{false, true} {
				p := must.Get(x.pairOf(rng, tensor.Float32, r%2, laid(kind, 7, 5), true))
				if want := fmt.Sprint(laid(kind, 7, 5).strides); fmt.Sprint(p.dev.Strides()) != want {
					return fmt.Errorf("strides %v, want %v", p.dev.Strides(), want)
				}
				call := func(b backend.Backend, d *tensor.Tensor) (*work.Work, error) {
					if broadcast {
						return b.Broadcast(x.ctx, []*tensor.Tensor{d}, backend.BroadcastOptions{Root: 1})
					}
					return b.AllReduce(x.ctx, []*tensor.Tensor{d}, backend.AllReduceOptions{})
				}
				v := must.Get(call(x.b, p.dev))
				must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
				k := must.Get(call(x.cpu, p.cpu))
				must.Do(work.WaitAll(x.ctx, v, k))
				must.Do(x.check(p))
			}
			return nil
		})
		w.end()
	}
}
