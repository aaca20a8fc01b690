package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onDevices is a setup in which all-reduces are direct work.
func onDevices(size int) setup {
	s := directly(size)
	s.timeout, s.options.AllReduce = patience, cuda.DirectWork
	return s
}

// quietly is s for tests whose streams lack an order on purpose: then only the
// simulator reports it.
func (s setup) quietly() setup {
	s.sim.Quiet, s.sim.Kernels = true, simkernels.All()
	return s
}

var deviceTypes = []tensor.DType{
	tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16, tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64,
}

var deviceOps = []backend.ReduceOp{
	backend.Sum(), backend.Avg(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor(),
}

// TestF16Device does several all-reduces at a time, of any dtype, operator, size and
// layout, on any number of ranks and devices. The caller's copies into the tensors and
// out of them are in stream order. Every byte is compared with what CPU ranks get from
// the same elements (F-11, F-16, T11).
func TestF16Device(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := 2 + int(seed)%7
		o := onDevices(size)
		o.sim.Seed, o.sim.Semantics = seed, s
		w := newWorld(t, o)
		type program struct {
			d       tensor.DType
			op      backend.ReduceOp
			n, many int
		}
		var ps []program
		for range 5 {
			p := program{d: deviceTypes[rng.IntN(len(deviceTypes))], n: []int{0, 1, 2, 3, 5, 64, 97, 600}[rng.IntN(8)], many: 1 + rng.IntN(6)/4}
			for {
				p.op = deviceOps[rng.IntN(len(deviceOps))]
				if _, err := p.op.Reduction(p.d, size); err == nil {
					break
				}
			}
			ps = append(ps, p)
		}
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var works []*work.Work
			var all [][]*pair
			for i, p := range ps {
				var ts []*tensor.Tensor
				var list []*pair
				for k := range p.many {
					device := r // the first collective decides where the kernels are
					if i+k > 0 {
						device = rng.IntN(len(x.stream))
					}
					q := must.Get(x.pairOf(rng, p.d, device, laid(max(0, rng.IntN(6)-2), p.n, 2), true))
					list, ts = append(list, q), append(ts, q.dev)
				}
				v, err := x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: p.op})
				if err != nil {
					return fmt.Errorf("%d: %+v: %w", i, p, err)
				}
				works, all = append(works, v), append(all, list)
			}
			for i, list := range all {
				for _, s := range x.stream {
					must.Do(works[i].Synchronize(s))
				}
				for _, q := range list {
					must.Do(x.back(q))
				}
			}
			for i, list := range all {
				var ts []*tensor.Tensor
				for _, q := range list {
					ts = append(ts, q.cpu)
				}
				v := must.Get(x.cpu.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: ps[i].op}))
				if err := work.WaitAll(x.ctx, works[i], v); err != nil {
					return fmt.Errorf("%+v: %w", ps[i], err)
				}
				for _, q := range list {
					if err := x.check(q); err != nil {
						return fmt.Errorf("%d: %+v: %w", i, ps[i], err)
					}
				}
			}
			return nil
		})
		w.end()
	})
}

// vector is a tensor in device memory with numbers of the test's own.
type vector struct {
	t   *tensor.Tensor
	mem driver.Memory
	h   driver.HostMemory
}

func (x *rank) vector(d tensor.DType, device int, b []byte) (_ *vector, err error) {
	defer must.Catch(&err)
	v := must.Get(x.d.Device(device))
	y := &vector{}
	y.mem = must.Get(v.Alloc(len(b)))
	x.close = append(x.close, y.mem)
	y.h = must.Get(x.d.AllocHost(len(b)))
	x.close = append(x.close, y.h)
	y.t = must.Get(tensor.OnDevice(d, cuda.OnStream(y.mem, x.stream[device]), len(b)/d.Size()))
	driver.HostAccess(x.d, "filling", driver.Writes(y.h.Ptr(), len(b)))
	copy(y.h.Bytes(), b)
	return y, x.stream[device].Copy(y.mem.Ptr(), y.h.Ptr(), len(b))
}

// bytes waits for what the caller's stream has been given.
func (x *rank) bytes(y *vector, device int) (_ []byte, err error) {
	defer must.Catch(&err)
	s := x.stream[device]
	must.Do(s.Copy(y.h.Ptr(), y.mem.Ptr(), y.mem.Len()))
	e := must.Get(s.Record())
	defer e.Release()
	must.Do(e.Sync(x.ctx))
	driver.HostAccess(x.d, "comparing", driver.Reads(y.h.Ptr(), y.h.Len()))
	return bytes.Clone(y.h.Bytes()), nil
}

// TestDeviceBits adds floats of very different size: every rank gets the same
// bits, those of a sum in the order of the ranks, in every run (F-47).
func TestDeviceBits(t *testing.T) {
	for _, size := range []int{2, 3, 5} {
		const n = 1001
		rng := random(t, uint64(size))
		in := make([][]float32, size)
		for r := range in {
			for range n {
				in[r] = append(in[r], float32(rng.NormFloat64()*math.Ldexp(1, rng.IntN(40))))
			}
		}
		want := slices.Clone(in[0])
		for i := range want {
			for _, x := range in[1:] {
				want[i] += x[i]
			}
			want[i] /= float32(size)
		}
		for run := range 2 {
			o := onDevices(size)
			o.sim.Seed = uint64(run)
			w := newWorld(t, o)
			w.each(func(x *rank, r int) error {
				y := must.Get(x.vector(tensor.Float32, r, tensorBytes(in[r])))
				v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Avg()}))
				must.Do(v.Synchronize(x.stream[r]))
				got := must.Get(x.bytes(y, r))
				if !bytes.Equal(got, tensorBytes(want)) {
					return errors.New("other bits than those of the ranks' order")
				}
				return v.Wait(x.ctx)
			})
			w.end()
		}
	}
}

func tensorBytes(v []float32) []byte {
	t, err := tensor.Of(v, len(v))
	if err != nil {
		panic(err)
	}
	return bytes.Clone(t.Bytes())
}

// TestDeviceChosen takes direct work where it can be, and says why where it cannot.
func TestDeviceChosen(t *testing.T) {
	reduce := func(x *rank, r int, d tensor.DType, op backend.ReduceOp) (_ *work.Work, err error) {
		defer must.Catch(&err)
		y := must.Get(x.vector(d, r%len(x.stream), make([]byte, 40*d.Size())))
		return x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: op})
	}
	run := func(o setup, want, why string) {
		t.Helper()
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			return must.Get(reduce(x, r, tensor.Float32, backend.Sum())).Wait(x.ctx)
		})
		for _, x := range w.ranks {
			c := x.b.Explain().Choices[0]
			require.Equal(t, want, c.Algorithm, c.Why)
			require.Contains(t, c.Why, why)
		}
		w.end()
	}
	auto := onDevices(3)
	auto.options.AllReduce = ""
	run(auto, cuda.DirectWork, "the work of the highest priority")
	shared := auto
	shared.sim.Devices = 2
	run(shared, cuda.HostWork, "not direct: rank 0: direct: ranks 0 and 2 share a device")

	none := auto
	none.sim.Kernels = nil
	run(none, cuda.HostWork, "not direct: rank 0: driver sim has no kernel")

	apart := auto
	apart.sim.Topology.NoPeer = func(from, to int) bool { return from == 2 && to == 1 }
	run(apart, cuda.RingWork, "window: rank 2 on device 2: the memory of rank 1 on its device 1")

	few := auto
	few.sim.Memory = 1 << 19
	run(few, cuda.HostWork, "out of memory")

	i := atomic.Int32{}
	far := cuda.SetHostIdentity(func() [32]byte { return [32]byte{byte(i.Add(1))} })
	run(auto, cuda.ClustersWork, "is on another host than rank 0")
	far()

	// What has no kernel goes by the host, in the same group.
	w := newWorld(t, auto)
	require.Contains(t, w.ranks[0].b.Explain().Choices[0].Why, "found out by the first collective")
	before := w.m.Stats().MadeModules
	w.each(func(x *rank, r int) error {
		var err error
		for _, c := range []struct {
			d  tensor.DType
			op backend.ReduceOp
		}{{tensor.Float32, backend.PreMulSum(2)}, {tensor.Bool, backend.Sum()}, {tensor.Complex64, backend.Sum()}, {tensor.Int32, backend.Sum()}} {
			must.Do(x.wait(reduce(x, r, c.d, c.op)))
		}
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		_, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.BAnd()})
		if !errors.Is(err, backend.ErrInvalidArgument) {
			return fmt.Errorf("bits of floats: %w", err)
		}
		return must.Err(x.bytes(y, r))
	})
	require.Equal(t, before, w.m.Stats().MadeModules, "New has loaded the kernels")
	require.Equal(t, cuda.DirectWork, w.ranks[0].b.Explain().Choices[0].Algorithm)
	w.end()
}

// TestDeviceShared runs ranks of one process on one driver: they reach each
// other's memory by its address.
func TestDeviceShared(t *testing.T) {
	for _, devices := range []int{3, 4} {
		d := must.Get(sim.Open(sim.Config{Devices: devices, Kernels: simkernels.All()}))
		st := newStore(t)
		w := &world{TB: t, ctx: t.Context(), m: d.Machine(), ranks: make([]*rank, 3)}
		for r := range w.ranks {
			x := &rank{TB: t, ctx: t.Context(), w: w, d: d}
			require.NoError(t, x.makeStreams(fmt.Sprint("caller ", r)))
			w.ranks[r] = x
		}
		for range 2 { // one group after the other
			fabric := mem.NewFabric()
			w.each(func(x *rank, r int) error {
				b := must.Get(cuda.New(x.ctx, backend.Options{
					Store: st, Rank: r, Size: 3, Timeout: patience, Group: "g",
					Specific: cuda.Options{Driver: d, AllReduce: cuda.DirectWork, CPUOptions: join(fabric)},
				}))
				x.b = b
				y := must.Get(x.vector(tensor.Int32, r%devices, bytes.Repeat([]byte{byte(r + 1)}, 400)))
				for range 3 {
					v := must.Get(b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Max()}))
					must.Do(v.Synchronize(x.stream[r%devices]))
				}
				got := must.Get(x.bytes(y, r%devices))
				if !bytes.Equal(got, bytes.Repeat([]byte{3}, 400)) {
					return fmt.Errorf("got %x", got)
				}
				return b.Close()
			})
		}
		for _, x := range w.ranks {
			x.free()
		}
		require.NoError(t, d.Close())
	}
}

// warm all-reduces a bucket of rank r once, so that the ranks are connected.
func (x *rank) warm(r int) (_ *bucket, err error) {
	defer must.Catch(&err)
	b := must.Get(x.bucket(r))
	must.Do(x.fill(r, b))
	return b, must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})).Wait(x.ctx)
}

// withoutCall is without for ranks that close together, as those of a ring do.
func withoutCall(t *testing.T, s setup, m sim.Call, run func(*world) error) error {
	s.limit = patience / 3
	w := newWorld(t, s)
	w.m.Skip(func(o sim.Call) bool { return o.Stream == m.Stream && o.Name == m.Name && o.K == m.K })
	err := run(w)
	err = errors.Join(err, errors.Join(runEach(w, func(x *rank, _ int, _ chan struct{}) error { return x.b.Close() })...))
	w.m.Skip(nil)
	for _, x := range w.ranks {
		require.NoError(t, x.cpu.Close())
	}
	// An event that passes too early can leave a kernel waiting for all of w's time.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, w.m.Settle(ctx), "%v", m)
	for _, x := range w.ranks {
		x.free()
	}
	return errors.Join(err, w.m.Close())
}

// TestDeviceFailedCalls lets each call to the driver fail in turn, those of the
// connection and those of an all-reduce. Every rank gets an error or a result. Nothing is
// left, and no stream waits for ever (T7).
func TestDeviceFailedCalls(t *testing.T) {
	for _, tc := range []struct {
		first bool
		way   string
		calls int // at least so many are made
	}{{true, "", 21}, {false, cuda.DirectWork, 4}} {
		t.Run(fmt.Sprintf("first %v %s", tc.first, tc.way), func(t *testing.T) {
			others, step := 0, 1
			if tc.first {
				step = testsize.Of(11, 5, 1)
			}
			buckets := make([]*bucket, 2)
			fresh := func(t *testing.T, k int) *world {
				s := onDevices(2)
				s.options.AllReduce = tc.way
				s = s.quietly()
				s.sim.Seed, s.sim.Semantics = uint64(k), sim.Semantics(k%2)
				w := newWorld(t, s)
				w.each(func(x *rank, r int) error {
					get := x.warm
					if tc.first {
						get = x.bucket
					}
					buckets[r] = must.Get(get(r))
					return x.fill(r, buckets[r])
				})
				return w
			}
			failInTurn(t, step, tc.calls, "all_reduce", fresh, nil, func(x *rank, r int) error {
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, backend.AllReduceOptions{})
				if err == nil {
					if err := v.Synchronize(x.caller(r)); err != nil {
						return errors.Join(err, v.Wait(x.ctx))
					}
				}
				return x.ended(v, err)
			}, func(w *world, failed sim.Call, errs []error) {
				if err := errors.Join(errs...); err != nil {
					require.ErrorIs(t, err, errInjected, failed)
				} else {
					for _, x := range w.ranks { // without a function that another way needs this one goes on
						way := x.b.Explain().Choices[0].Algorithm
						require.Equal(t, w.ranks[0].b.Explain().Choices[0].Algorithm, way, failed)
						require.True(t, way == cuda.HostWork || failed.Name == "Function", "%v after %v", way, failed)
					}
					others++
				}
				w.closeInOrder(t, failed)
			})
			require.Equal(t, tc.first, others > 0)
		})
	}
}

// TestDeviceSteady makes nothing once the ranks are connected (T9).
func TestDeviceSteady(t *testing.T) {
	o := onDevices(2)
	w := newWorld(t, o)
	buckets := make([]*bucket, 2)
	w.each(func(x *rank, r int) (err error) {
		buckets[r], err = x.warm(r)
		return err
	})
	before := w.m.Stats()
	w.each(func(x *rank, r int) error {
		for range 100 {
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, backend.AllReduceOptions{Op: backend.BXor()})
			if err != nil {
				return err
			}
			must.Do(v.Wait(x.ctx))
		}
		return nil
	})
	after := w.m.Stats()
	require.Equal(t, before.MadeStreams, after.MadeStreams)
	require.Equal(t, before.MadeMemories, after.MadeMemories)
	require.Equal(t, before.MadeHosts, after.MadeHosts)
	require.Equal(t, before.MadeModules, after.MadeModules)
	w.end()
}

// newStore returns a store of the process.
func newStore(t *testing.T) store.Store {
	st := store.NewHash()
	t.Cleanup(func() { st.Close() })
	return st
}
