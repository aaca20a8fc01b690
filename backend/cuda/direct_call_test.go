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
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// directly is a setup of ranks with a device each.
func directly(size int) setup {
	return setup{size: size, sim: sim.Config{Devices: size, Kernels: simkernels.All()}}
}

// meetDirectly connects a rank with the others, by an all-reduce of a tensor on its own device.
func (x *rank) meetDirectly(r int) (err error) {
	defer must.Catch(&err)
	y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
	return x.wait(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
}

func (x *rank) does(op work.OpType) backend.Choice {
	all := x.b.Explain().Choices
	return all[slices.IndexFunc(all, func(c backend.Choice) bool { return c.Op == op.String() })]
}

// TestDirectCollectives is TestCollectives for ranks with a device each: what can be is direct work,
// among operations that are not.
func TestDirectCollectives(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		o := directly(2 + rng.IntN(3))
		if seed%8 == 7 {
			o = directly(8)
		}
		o.sim.Seed, o.sim.Semantics = seed, s
		o.options = cuda.Options{Chunk: 16 + rng.IntN(200), Scratch: 1 << rng.IntN(20)}
		w := newWorld(t, o)
		var ps []program
		for range 8 {
			name := names[rng.IntN(len(names))]
			if rng.IntN(2) == 0 {
				direct := []string{"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
					"all_gather_into_tensor_coalesced", "all_gather_v", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "send"}
				name = direct[rng.IntN(len(direct))]
			}
			ps = append(ps, draw(rng, name, o.size))
		}
		w.each(func(x *rank, r int) error {
			must.Do(x.meetDirectly(r))
			for _, op := range []work.OpType{
				work.AllReduce, work.AllReduceCoalesced, work.AllGather, work.ReduceScatterTensor, work.Broadcast, work.Reduce, work.Gather, work.Scatter,
				work.AllToAll, work.AllToAllSingle, work.Barrier, work.Send, work.Recv, work.RecvAnySource,
			} {
				if c := x.does(op); c.Algorithm != cuda.DirectWork {
					return fmt.Errorf("%v goes by %s: %s", op, c.Algorithm, c.Why)
				}
			}
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// TestInStreamOnce: every collective is a launch on the caller's stream, and no other command of any stream.
func TestInStreamOnce(t *testing.T) {
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	one := func(ts []*tensor.Tensor, root bool) []*tensor.Tensor {
		if root {
			return ts
		}
		return nil
	}
	type call func(ctx context.Context, x *rank, r int, in, out *tensor.Tensor, halves []*tensor.Tensor) (*work.Work, error)
	for name, do := range map[string]call{
		"broadcast": func(ctx context.Context, x *rank, _ int, in, _ *tensor.Tensor, _ []*tensor.Tensor) (*work.Work, error) {
			return x.b.Broadcast(ctx, []*tensor.Tensor{in}, backend.BroadcastOptions{Root: 1})
		},
		"reduce": func(ctx context.Context, x *rank, _ int, in, _ *tensor.Tensor, _ []*tensor.Tensor) (*work.Work, error) {
			return x.b.Reduce(ctx, in, backend.ReduceOptions{Root: 1})
		},
		"gather": func(ctx context.Context, x *rank, r int, _, out *tensor.Tensor, halves []*tensor.Tensor) (_ *work.Work, err error) {
			defer must.Catch(&err)
			return x.b.Gather(ctx, one(must.Get(halve(out)), r == 1), halves[0], backend.GatherOptions{Root: 1})
		},
		"scatter": func(ctx context.Context, x *rank, r int, _, _ *tensor.Tensor, halves []*tensor.Tensor) (*work.Work, error) {
			return x.b.Scatter(ctx, halves[0], one(halves, r == 0), backend.ScatterOptions{})
		},
		"all_to_all": func(ctx context.Context, x *rank, r int, in, out *tensor.Tensor, _ []*tensor.Tensor) (*work.Work, error) {
			splits := [][]int{{1, 3}, {3, 1}}[r]
			return x.b.AllToAllSingle(ctx, out, in, splits, splits, backend.AllToAllOptions{})
		},
		"barrier": func(ctx context.Context, x *rank, _ int, _, _ *tensor.Tensor, _ []*tensor.Tensor) (*work.Work, error) {
			return x.b.Barrier(ctx, backend.BarrierOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			var ins, outs [2]*vector
			w.each(func(x *rank, r int) (err error) {
				ins[r] = must.Get(x.vector(tensor.Float32, r, tensorBytes([]float32{1, 2, 3, 4})))
				outs[r], err = x.vector(tensor.Float32, r, tensorBytes([]float32{5, 6, 7, 8}))
				return err
			})
			var given []string
			w.m.Skip(func(c sim.Call) bool {
				if strings.HasPrefix(c.Stream, "rank 1/") {
					given = append(given, c.Stream+" "+c.Name)
				}
				return false
			})
			works := make([]*work.Work, 2)
			for r, x := range w.ranks {
				halves := must.Get(halve(ins[r].t))
				v := must.Get(do(cuda.InStream(x.ctx, x.stream[r]), x, r, ins[r].t, outs[r].t, halves))
				works[r] = v
			}
			require.Equal(t, []string{"rank 1/caller 1.1 Launch"}, given)
			w.m.Skip(nil)
			for r, x := range w.ranks {
				require.NoError(t, works[r].Wait(x.ctx))
			}
			w.each(func(x *rank, r int) error {
				_, err := x.bytes(ins[r], r) // its memory is no longer used
				_, err2 := x.bytes(outs[r], r)
				return errors.Join(err, err2)
			})
		})
	}
	w.end()
}

// TestBeside: kernels of calls that run beside others take 16 multiprocessors at most, and else more.
func TestBeside(t *testing.T) {
	var threads atomic.Uint32
	s := directly(2)
	s.sim.Memory = 80 << 30 // a window of all channels
	for name, k := range s.sim.Kernels {
		if strings.HasPrefix(name, "c10d_direct_") {
			s.sim.Kernels[name] = func(r *sim.Run) error {
				n := r.Grid.X * r.Block.X
				for old := threads.Load(); n > old && !threads.CompareAndSwap(old, n); old = threads.Load() {
				}
				return k(r)
			}
		}
	}
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	const n = 3 << 20 // floats
	var all, half [2]*vector
	w.each(func(x *rank, r int) (err error) {
		all[r] = must.Get(x.vector(tensor.Float32, r, make([]byte, 4*n)))
		half[r], err = x.vector(tensor.Float32, r, make([]byte, 2*n))
		return err
	})
	for name, do := range map[string]func(ctx context.Context, b *cuda.Backend, all, half *tensor.Tensor) (*work.Work, error){
		"all_reduce": func(ctx context.Context, b *cuda.Backend, all, _ *tensor.Tensor) (*work.Work, error) {
			return b.AllReduce(ctx, []*tensor.Tensor{all}, backend.AllReduceOptions{Op: backend.Avg()})
		},
		"broadcast": func(ctx context.Context, b *cuda.Backend, all, _ *tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, []*tensor.Tensor{all}, backend.BroadcastOptions{})
		},
		"all_gather": func(ctx context.Context, b *cuda.Backend, all, half *tensor.Tensor) (*work.Work, error) {
			return b.AllGatherIntoTensor(ctx, all, half, backend.AllGatherOptions{})
		},
		"reduce_scatter": func(ctx context.Context, b *cuda.Backend, all, half *tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, half, all, backend.ReduceScatterOptions{})
		},
		"all_to_all": func(ctx context.Context, b *cuda.Backend, all, half *tensor.Tensor) (_ *work.Work, err error) {
			defer must.Catch(&err)
			in := must.Get(all.Slice(0, 0, n/2))
			return b.AllToAllSingle(ctx, half, in, nil, nil, backend.AllToAllOptions{})
		},
	} {
		most := func(with func(context.Context, ...driver.Stream) context.Context) uint32 {
			threads.Store(0)
			w.each(func(x *rank, r int) error {
				return must.Get(do(with(x.ctx, x.stream[r]), x.b, all[r].t, half[r].t)).Wait(x.ctx)
			})
			return threads.Load()
		}
		require.Greater(t, most(cuda.WithStreams), uint32(16*512), name)
		few := most(cuda.Beside)
		require.Positive(t, few, name)
		require.LessOrEqual(t, few, uint32(16*512), name)
	}
	w.end()
}

// TestBesideDiffers: ranks of which one alone leaves room for other kernels are told.
func TestBesideDiffers(t *testing.T) {
	s := directly(2)
	s.timeout = patience
	w := newWorld(t, s.quietly())
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 4096)))
		with := []func(context.Context, ...driver.Stream) context.Context{cuda.Beside, cuda.WithStreams}[r]
		v, err := x.b.AllReduce(with(x.ctx, x.stream[r]), []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
		if err == nil {
			err = v.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
		if v, err = x.b.Barrier(x.ctx, backend.BarrierOptions{}); err == nil {
			err = v.Wait(x.ctx)
		}
		return err
	})
	for r, err := range errs {
		require.ErrorIs(t, err, work.ErrMismatch, "rank %d", r)
		require.ErrorContains(t, err, "beside other kernels", "rank %d", r)
	}
	w.drop(t)
}

// halve returns the halves of a tensor of 4 elements.
func halve(t *tensor.Tensor) ([]*tensor.Tensor, error) {
	a, err := t.Slice(0, 0, 2)
	b, err2 := t.Slice(0, 2, 4)
	return []*tensor.Tensor{a, b}, errors.Join(err, err2)
}

// TestDirectEnds: a Work of direct work ends though nobody waits for it, and says so when asked.
func TestDirectEnds(t *testing.T) {
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	w.each(func(x *rank, r int) error {
		for range 3 {
			y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
			select {
			case <-v.Done():
			case <-x.ctx.Done():
				return errors.New("nobody ends the Work")
			}
			v = must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
			for !v.IsCompleted() {
				time.Sleep(time.Microsecond)
			}
			if !v.IsSuccess() {
				return v.Err()
			}
		}
		return nil
	})
	w.end()
}

// TestDirectBesideMessages: a rank waits in an all-reduce. The other rank comes there only after a
// message, which the first one sends meanwhile. A message of the all-reduce's memory waits.
func TestDirectBesideMessages(t *testing.T) {
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	w.each(func(x *rank, r int) error {
		a := must.Get(x.vector(tensor.Float32, r, tensorBytes([]float32{1, 2})))
		b := must.Get(x.vector(tensor.Float32, r, tensorBytes([]float32{float32(r)})))
		reduce := func() (*work.Work, error) {
			return x.b.AllReduce(x.ctx, []*tensor.Tensor{a.t}, backend.AllReduceOptions{})
		}
		if r == 0 {
			v := must.Get(reduce())
			u := must.Get(x.b.Send(x.ctx, b.t, 1, backend.P2POptions{}))
			return work.WaitAll(x.ctx, v, u, must.Get(x.b.Send(x.ctx, a.t, 1, backend.P2POptions{Tag: 1})))
		}
		u, err := x.b.Recv(x.ctx, b.t, 0, backend.P2POptions{})
		if err == nil {
			err = u.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
		v := must.Get(reduce())
		c := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		if u, err = x.b.Recv(x.ctx, c.t, 0, backend.P2POptions{Tag: 1}); err == nil {
			err = work.WaitAll(x.ctx, u, v)
		}
		if err != nil {
			return err
		}
		got, err := x.bytes(c, r)
		return cmp.Or(err, same(got, tensorBytes([]float32{2, 4})))
	})
	w.end()
}

// TestBlameWaitsAlone has a kernel that cannot report why it gave up, because it has not begun. While the group
// waits for the report, other goroutines wait for nothing.
func TestBlameWaitsAlone(t *testing.T) {
	defer cuda.SetReportLimit(25 * time.Second)()
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	x := w.ranks[0]
	word := must.Get(x.d.AllocHost(4))
	x.close = append(x.close, word)
	y := must.Get(x.vector(tensor.Float32, 0, make([]byte, 8)))
	require.NoError(t, x.stream[0].WaitValue(word.Ptr(), 1, driver.AtLeast))
	x.b.SetTimeout(20 * time.Millisecond)
	v := must.Get(x.b.AllReduce(cuda.InStream(x.ctx, x.stream[0]), []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
	ended := make(chan error)
	go func() { ended <- v.Wait(x.ctx) }()
	time.Sleep(100 * time.Millisecond) // the group waits for the report now
	must.End(t, "a call", func() {
		for range 100 {
			v.IsCompleted()
			x.b.Send(x.ctx, y.t, 1, backend.P2POptions{})
			time.Sleep(time.Millisecond)
		}
	})
	word.Store32(0, 1)
	require.ErrorIs(t, <-ended, work.ErrTimeout)
	w.drop(t)
}
