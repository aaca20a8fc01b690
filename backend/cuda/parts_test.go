package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// deepest is how many commands a stream may have been given and not have done: CUDA has
// room for a thousand.
const deepest = 768

// late calls f for every rank, for the last one when the others have got as far as they
// can without it.
func (w *world) late(f func(x *rank, r int) error) {
	w.Helper()
	before := w.m.Stats().Operations
	w.each(func(x *rank, r int) error {
		if r == len(w.ranks)-1 && r > 0 {
			for end := time.Now().Add(20 * time.Millisecond); w.m.Stats().Operations == before && time.Now().Before(end); {
				time.Sleep(100 * time.Microsecond) // not all of them have something to enqueue
			}
			ctx, cancel := context.WithTimeout(x.ctx, 50*time.Millisecond) // a kernel that waits never rests
			defer cancel()
			var stuck *sim.Stuck
			if err := w.m.Quiesce(ctx); err != nil && !errors.As(err, &stuck) && ctx.Err() == nil {
				return err
			}
		}
		return f(x, r)
	})
	require.LessOrEqual(w, w.m.Stats().Deepest, deepest)
}

// TestManyRuns does every collective on tensors of many runs of bytes, with kernels that
// bring them in order, on the way through the host and on the devices, and without.
func TestManyRuns(t *testing.T) {
	for _, c := range []struct {
		name      string
		kernels   map[string]sim.Kernel
		allReduce string
		broadcast string
	}{
		{"host", simkernels.All(), cuda.HostWork, cuda.BroadcastChain},
		{"device", simkernels.All(), "", ""},
		{"no kernels", nil, "", ""},
	} {
		t.Run(c.name, virtually(func(t *testing.T) {
			w := newWorld(t, setup{
				size: 3, sim: sim.Config{Devices: 3, Seed: 4, NoDelays: true, Kernels: c.kernels},
				options: cuda.Options{Chunk: 3000, AllReduce: c.allReduce, Broadcast: c.broadcast},
			})
			dtypes := []tensor.DType{tensor.Float32, tensor.Bool, tensor.Complex128, tensor.Int64, tensor.Uint8}
			rng := random(t, 4)
			for i, name := range names {
				p := draw(rng, name, 3)
				p.op = backend.Max()
				if p.dtype = dtypes[i%len(dtypes)]; strings.Contains(name, "reduce") && p.dtype == tensor.Complex128 {
					p.op = backend.Sum()
				}
				for k := range p.n {
					p.n[k] = 130 + 3*k
				}
				w.late(func(x *rank, r int) error {
					x.layout = new(int)
					*x.layout = 3
					return x.collectives([]program{p}, rand.New(rand.NewPCG(uint64(i), uint64(r))), r)
				})
			}
			w.end()
		}))
	}
}

// scattered are layouts of many runs.
var scattered = []struct {
	name string
	d    tensor.DType
	shape
	tensors int
	runs    int // of each
}{
	{"a column", tensor.Float32, shape{[]int{4000, 1}, []int{2, 1}, 1, 8000}, 1, 4000},
	{"five columns", tensor.Int64, shape{[]int{1000}, []int{3}, 2, 3000}, 5, 1000},
	{"elements of 16 bytes", tensor.Complex128, shape{[]int{1000}, []int{2}, 0, 2000}, 2, 1000},
	{"nine dimensions", tensor.Float64, shape{[]int{4, 2, 2, 2, 2, 2, 2, 2, 2}, []int{4000, 1500, 700, 300, 130, 60, 25, 10, 3}, 1, 17_000}, 2, 1024},
	{"nine dimensions, many kernels", tensor.Uint8, shape{[]int{300, 2, 2, 2, 2, 2, 2, 2, 2}, []int{3000, 1500, 700, 300, 130, 60, 25, 10, 3}, 1, 902_000}, 1, 76_800},
	{"interleaved", tensor.Uint8, shape{[]int{40, 30}, []int{7, 300}, 0, 9100}, 1, 1200},
	{"backwards", tensor.Int32, shape{[]int{20, 35}, []int{200, -5}, 174, 4000}, 2, 700},
	{"bool", tensor.Bool, shape{[]int{40, 50}, []int{110, 2}, 3, 4500}, 1, 2000},
	{"no elements", tensor.Float32, shape{[]int{0, 3}, []int{5, 2}, 0, 10}, 2, 0},
}

// TestScattered all-reduces, broadcasts and sends tensors of many runs, on several devices:
// what lies between the elements stays, and the kernels are few.
func TestScattered(t *testing.T) {
	for _, way := range []string{cuda.HostWork, cuda.DirectWork, "no kernels"} {
		for _, c := range scattered {
			if way == "no kernels" && c.runs > 10_000 || c.runs > testsize.Of(10_000, 10_000, 1_000_000) {
				continue // by copies of a byte
			}
			t.Run(way+" "+c.name, virtually(func(t *testing.T) {
				s := setup{
					size: 2, timeout: 5 * patience, sim: sim.Config{Devices: 2, Seed: 7, NoDelays: true, Kernels: simkernels.All()},
					options: cuda.Options{Chunk: 4000, AllReduce: way, Broadcast: cuda.BroadcastDirect},
				}
				switch way {
				case cuda.HostWork:
					s.options.Broadcast = cuda.BroadcastFlat
				case "no kernels":
					s.sim.Kernels, s.options.AllReduce, s.options.Broadcast = nil, "", ""
				}
				w := newWorld(t, s)
				if way == cuda.DirectWork {
					w.each(func(x *rank, r int) error { return x.connect(r) })
				}
				op := backend.Max()
				if c.d == tensor.Complex128 {
					op = backend.Sum()
				}
				kinds := []func(b backend.Backend, x *rank, r int, ts []*tensor.Tensor) (*work.Work, error){
					func(b backend.Backend, x *rank, _ int, ts []*tensor.Tensor) (*work.Work, error) {
						return b.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: op})
					},
					func(b backend.Backend, x *rank, _ int, ts []*tensor.Tensor) (*work.Work, error) {
						return b.Broadcast(x.ctx, ts, backend.BroadcastOptions{Root: 1, RootTensor: len(ts) - 1})
					},
					func(b backend.Backend, x *rank, r int, ts []*tensor.Tensor) (*work.Work, error) {
						if r == 0 {
							return b.Recv(x.ctx, ts[0], 1, backend.P2POptions{})
						}
						return b.Send(x.ctx, ts[0], 0, backend.P2POptions{})
					},
				}
				if (c.d == tensor.Complex128 || c.d == tensor.Bool) && way == cuda.DirectWork {
					kinds = kinds[1:]
				}
				for k, f := range kinds {
					before := w.m.Stats().Operations
					w.late(func(x *rank, r int) error {
						var ps []*pair
						for i := range c.tensors {
							p, err := x.pairOf(rand.New(rand.NewPCG(uint64(k), uint64(r))), c.d, (r+i)%2, c.shape, true)
							if err != nil {
								return err
							}
							ps = append(ps, p)
						}
						v := must.Get(f(x.b, x, r, devs(ps)))
						for _, p := range ps {
							must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
						}
						h, err := f(x.cpu, x, r, cpus(ps))
						if err == nil {
							err = work.WaitAll(x.ctx, v, h)
						}
						return x.checks(err, ps...)
					})
					if len(c.dims) <= 8 && way != "no kernels" && c.runs > 2000 {
						require.Less(t, w.m.Stats().Operations-before, c.runs/2, "kernels, not copies")
					}
				}
				w.end()
			}))
		}
	}
}

// views returns so many parts of a pair of tensors, of some elements each.
func (p *pair) views(n, each int) (vs []*pair, err error) {
	for i := range n {
		v := &pair{}
		if v.dev, err = p.dev.Slice(0, i*each, (i+1)*each); err != nil {
			return nil, err
		}
		if v.cpu, err = p.cpu.Slice(0, i*each, (i+1)*each); err != nil {
			return nil, err
		}
		vs = append(vs, v)
	}
	return vs, nil
}

// lists are calls with any number of tensors: those that are written, and those that are
// only read, are parts of two.
var lists = map[string]func(x *rank, b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error){
	"all_reduce": func(x *rank, b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
		return b.AllReduce(x.ctx, out, backend.AllReduceOptions{})
	},
	"broadcast": func(x *rank, b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
		return b.Broadcast(x.ctx, out, backend.BroadcastOptions{RootTensor: 3})
	},
	"all_reduce_coalesced": func(x *rank, b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
		return b.AllReduceCoalesced(x.ctx, out, backend.AllReduceOptions{})
	},
	"all_gather_coalesced": func(x *rank, b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
		n := len(out) / 2
		return b.AllGatherCoalesced(x.ctx, [][]*tensor.Tensor{out[:n], out[n : 2*n]}, in[:n], backend.AllGatherOptions{})
	},
	"all_gather_into_tensor_coalesced": func(x *rank, b backend.Backend, out, in []*tensor.Tensor) (_ *work.Work, err error) {
		defer must.Catch(&err)
		return b.AllGatherIntoTensorCoalesced(x.ctx, out, must.Get(halves(in)), backend.AllGatherOptions{})
	},
	"reduce_scatter_tensor_coalesced": func(x *rank, b backend.Backend, out, in []*tensor.Tensor) (_ *work.Work, err error) {
		defer must.Catch(&err)
		return b.ReduceScatterTensorCoalesced(x.ctx, must.Get(halves(out)), in, backend.ReduceScatterOptions{})
	},
}

func halves(ts []*tensor.Tensor) (all []*tensor.Tensor, err error) {
	for _, t := range ts {
		h, err := t.Slice(0, 0, t.Dim(0)/2)
		if err != nil {
			return nil, err
		}
		all = append(all, h)
	}
	return all, nil
}

// TestManyTensors calls what takes lists with a thousand tensors on two devices, on all
// ways: no stream has many commands at a time, and a call is one operation.
func TestManyTensors(t *testing.T) {
	for _, c := range []struct {
		way     string
		kernels map[string]sim.Kernel
	}{{cuda.HostWork, nil}, {cuda.DirectWork, simkernels.All()}} {
		for name, f := range lists {
			t.Run(c.way+" "+name, virtually(func(t *testing.T) {
				w := newWorld(t, setup{
					size: 2, timeout: patience, sim: sim.Config{Devices: 2, Seed: 1, NoDelays: true, Kernels: c.kernels},
					options: cuda.Options{Chunk: 4000, AllReduce: c.way, Broadcast: c.way},
				})
				if c.way == cuda.DirectWork {
					w.each(func(x *rank, r int) error { return x.connect(r) })
				}
				seq := w.ranks[0].b.Seq()
				w.late(func(x *rank, r int) error {
					const n, each = 500, 6
					rng := rand.New(rand.NewPCG(1, uint64(r)))
					var whole, out, in []*pair
					for _, list := range []*[]*pair{&out, &in} {
						for device := range 2 {
							p := must.Get(x.pairOf(rng, tensor.Int32, device, flat(n*each), true))
							vs := must.Get(p.views(n, each))
							whole, *list = append(whole, p), append(*list, vs...)
						}
					}
					rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
					v := must.Get(f(x, x.b, devs(out), devs(in)))
					for _, p := range whole {
						must.Do(errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
					}
					h, err := f(x, x.cpu, cpus(out), cpus(in))
					if err == nil {
						err = work.WaitAll(x.ctx, v, h)
					}
					return x.checks(err, whole...)
				})
				require.Equal(t, seq+1, w.ranks[0].b.Seq())
				w.end()
			}))
		}
	}
}

// longWays are operations that go in parts, or have devices bring elements in order.
var longWays = []struct {
	name    string
	kernels bool
	op      string
	run     func(x *rank, ts []*tensor.Tensor) (*work.Work, error)
	shape
	tensors int
}{
	{"all_reduce of a column", true, "all_reduce", func(x *rank, ts []*tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{})
	}, shape{[]int{300}, []int{2}, 0, 600}, 2},
	{"all_reduce of a column, no kernels", false, "all_reduce", func(x *rank, ts []*tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{})
	}, shape{[]int{300}, []int{2}, 0, 600}, 1},
	{"broadcast of a column, no kernels", false, "broadcast", func(x *rank, ts []*tensor.Tensor) (*work.Work, error) {
		return x.b.Broadcast(x.ctx, ts, backend.BroadcastOptions{})
	}, shape{[]int{300}, []int{2}, 0, 600}, 1},
	{"all_reduce_coalesced", false, "all_reduce_coalesced", func(x *rank, ts []*tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduceCoalesced(x.ctx, ts, backend.AllReduceOptions{})
	}, flat(4), 70},
}

// prepareLong makes the tensors of such an operation.
func (w *world) prepareLong(t *testing.T, s shape, n int) [][]*tensor.Tensor {
	all := make([][]*tensor.Tensor, len(w.ranks))
	for r, x := range w.ranks {
		for i := range n {
			p := must.Get(x.pairOf(rand.New(rand.NewPCG(9, uint64(r))), tensor.Int32, i%len(x.stream), s, true))
			all[r] = append(all[r], p.dev)
		}
	}
	return all
}

// TestLongFails lets calls to the driver fail in operations that go in parts, or that
// bring elements in order. Every rank gets a result, or an error with the operation's
// name. Nothing is left, and no stream waits for ever.
func TestLongFails(t *testing.T) {
	for i, c := range longWays {
		t.Run(c.name, func(t *testing.T) {
			if !c.kernels {
				failEach(t, i, "", 13)
				return
			}
			failEach(t, i, "", 3)
			for _, name := range []string{"Load", "Function", "Alloc", "AllocHost", "Launch"} {
				failEach(t, i, name, 1)
			}
		})
	}
}

// failEach lets every so manieth call of a name fail, or of all, in one of longWays.
func failEach(t *testing.T, way int, name string, step int) {
	c := longWays[way]
	var all [][]*tensor.Tensor
	fresh := func(t *testing.T, k int) *world {
		s := setup{
			size: 2, timeout: patience, sim: sim.Config{Devices: 2, Seed: uint64(k), Quiet: true, NoDelays: true},
			options: cuda.Options{Chunk: 400, Slots: 2, AllReduce: cuda.HostWork},
		}
		if c.kernels {
			s.sim.Kernels = simkernels.All()
		}
		w := newWorld(t, s)
		all = w.prepareLong(t, c.shape, c.tensors)
		return w
	}
	named := func(m sim.Call) bool { return name == "" || m.Name == name }
	failInTurn(t, step, 1, c.op, fresh, named, func(x *rank, r int) error {
		return x.ended(c.run(x, all[r]))
	}, func(w *world, failed sim.Call, errs []error) {
		// Who has no kernels copies run by run, who cannot page-lock copies itself.
		if !slices.Contains([]string{"Load", "Function", "RegisterHost", "Device"}, failed.Name) {
			require.ErrorIs(t, errors.Join(errs...), errInjected, "%v", failed)
		}
		w.drop(t)
	})
}

// TestLongEnds ends operations that go in parts while they are enqueued: by a rank that
// dies or does not come, and by the call's context.
func TestLongEnds(t *testing.T) {
	for _, c := range longWays {
		if c.kernels {
			continue
		}
		for how, want := range map[string]error{"dies": work.ErrPeerDied, "does not come": work.ErrTimeout, "context": work.ErrCanceled, "abort": work.ErrAborted} {
			t.Run(c.name+" "+how, virtually(func(t *testing.T) {
				w := newWorld(t, setup{
					size: 2, timeout: patience, sim: sim.Config{Devices: 2, Quiet: true},
					options: cuda.Options{Chunk: 400, Slots: 2, Broadcast: cuda.BroadcastFlat},
				})
				all := w.prepareLong(t, c.shape, c.tensors)
				ctx, cancel := context.WithCancel(w.ctx)
				defer cancel()
				x := w.ranks[0]
				x.ctx = ctx
				if how == "does not come" {
					x.b.SetTimeout(100 * time.Millisecond)
				}
				before := w.m.Stats().Operations
				called := make(chan error)
				go func() {
					v, err := c.run(x, all[0])
					if err == nil {
						err = v.Wait(w.ctx)
					}
					called <- err
				}()
				for w.m.Stats().Operations < before+200 {
					time.Sleep(100 * time.Microsecond)
				}
				reason := errors.New("no more of this")
				switch how {
				case "dies":
					w.fabric.Kill("g/cuda/0", 1)
				case "context":
					cancel()
				case "abort":
					x.b.Abort(reason)
				}
				err := <-called
				require.ErrorIs(t, err, want)
				e := must.As[*work.Error](t, err)
				require.Equal(t, c.op, e.Op.String())
				require.LessOrEqual(t, w.m.Stats().Deepest, deepest)
				_, err = x.b.Barrier(w.ctx, backend.BarrierOptions{})
				require.Error(t, err, "the group is of no more use")
				w.drop(t)
			}))
		}
	}
}

// TestLongMessage receives a tensor run by run, whose sender first waits for a collective.
// The receive holds that up neither at the call nor on a stream.
func TestLongMessage(t *testing.T) { onVirtualTime(t, testLongMessage) }

func testLongMessage(t *testing.T) {
	w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 1}})
	w.each(func(x *rank, r int) error {
		p, err := x.pairOf(rand.New(rand.NewPCG(1, uint64(r))), tensor.Int32, 0, shape{[]int{1000}, []int{2}, 0, 2000}, true)
		if err != nil {
			return err
		}
		var received *work.Work
		if r == 0 {
			received = must.Get(x.b.Recv(x.ctx, p.dev, 1, backend.P2POptions{}))
		}
		b := must.Get(x.bucket(r))
		must.Do(x.fill(r, b))
		v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
		if err == nil {
			err = v.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
		if r == 0 {
			return received.Wait(x.ctx)
		}
		if v, err = x.b.Send(x.ctx, p.dev, 0, backend.P2POptions{}); err == nil {
			err = v.Wait(x.ctx)
		}
		if err != nil {
			return fmt.Errorf("sending: %w", err)
		}
		return nil
	})
	require.LessOrEqual(t, w.m.Stats().Deepest, deepest)
	w.end()
}

// TestColumnsApart receives one column of a matrix and sends another. The other rank sends when
// it has received. So the kernels that bring columns in order must not wait for each other.
func TestColumnsApart(t *testing.T) {
	w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 1, Kernels: simkernels.All()}})
	w.each(func(x *rank, r int) error {
		p := must.Get(x.pairOf(rand.New(rand.NewPCG(1, uint64(r))), tensor.Int32, 0, flat(1000, 2), true))
		var columns [2]*tensor.Tensor
		for i := range columns {
			columns[i] = must.Get(p.dev.Slice(1, i, i+1))
		}
		received, err := x.b.Recv(x.ctx, columns[0], 1-r, backend.P2POptions{})
		if err == nil && r == 1 {
			err = received.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
		return work.WaitAll(x.ctx, must.Get(x.b.Send(x.ctx, columns[1], 1-r, backend.P2POptions{})), received)
	})
	require.Less(t, w.m.Stats().Operations, 100, "kernels, not copies")
	w.end()
}
