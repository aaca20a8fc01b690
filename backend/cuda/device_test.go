package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
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
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
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
					q, err := x.pairOf(rng, p.d, device, laid(max(0, rng.IntN(6)-2), p.n, 2), true)
					if err != nil {
						return err
					}
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
					if err := works[i].Synchronize(s); err != nil {
						return err
					}
				}
				for _, q := range list {
					if err := x.back(q); err != nil {
						return err
					}
				}
			}
			for i, list := range all {
				var ts []*tensor.Tensor
				for _, q := range list {
					ts = append(ts, q.cpu)
				}
				v, err := x.cpu.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: ps[i].op})
				if err != nil {
					return err
				}
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

func (x *rank) vector(d tensor.DType, device int, b []byte) (*vector, error) {
	v, err := x.d.Device(device)
	if err != nil {
		return nil, err
	}
	y := &vector{}
	if y.mem, err = v.Alloc(len(b)); err != nil {
		return nil, err
	}
	x.close = append(x.close, y.mem)
	if y.h, err = x.d.AllocHost(len(b)); err != nil {
		return nil, err
	}
	x.close = append(x.close, y.h)
	if y.t, err = tensor.OnDevice(d, cuda.OnStream(y.mem, x.stream[device]), len(b)/d.Size()); err != nil {
		return nil, err
	}
	driver.HostAccess(x.d, "filling", driver.Writes(y.h.Ptr(), len(b)))
	copy(y.h.Bytes(), b)
	return y, x.stream[device].Copy(y.mem.Ptr(), y.h.Ptr(), len(b))
}

// bytes waits for what the caller's stream has been given.
func (x *rank) bytes(y *vector, device int) ([]byte, error) {
	s := x.stream[device]
	if err := s.Copy(y.h.Ptr(), y.mem.Ptr(), y.mem.Len()); err != nil {
		return nil, err
	}
	e, err := s.Record()
	if err != nil {
		return nil, err
	}
	defer e.Release()
	if err := e.Sync(x.ctx); err != nil {
		return nil, err
	}
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
				y, err := x.vector(tensor.Float32, r, tensorBytes(in[r]))
				if err != nil {
					return err
				}
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Avg()})
				if err != nil {
					return err
				}
				if err := v.Synchronize(x.stream[r]); err != nil {
					return err
				}
				got, err := x.bytes(y, r)
				if err != nil {
					return err
				}
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
	reduce := func(x *rank, r int, d tensor.DType, op backend.ReduceOp) (*work.Work, error) {
		y, err := x.vector(d, r%len(x.stream), make([]byte, 40*d.Size()))
		if err != nil {
			return nil, err
		}
		return x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: op})
	}
	run := func(o setup, want, why string) {
		t.Helper()
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			v, err := reduce(x, r, tensor.Float32, backend.Sum())
			if err != nil {
				return err
			}
			return v.Wait(x.ctx)
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
	run(apart, cuda.HostWork, "window: rank 2 on device 2: the memory of rank 1 on its device 1")

	few := auto
	few.sim.Memory = 1 << 19
	run(few, cuda.HostWork, "out of memory")

	i := atomic.Int32{}
	far := cuda.SetHostIdentity(func() [32]byte { return [32]byte{byte(i.Add(1))} })
	run(auto, cuda.ClustersWork, "is on another host than rank 0")
	far()

	// What has no kernel goes by the host, in the same group.
	auto.options.DTypes = []tensor.DType{tensor.Float32, tensor.Int32}
	w := newWorld(t, auto)
	require.Contains(t, w.ranks[0].b.Explain().Choices[0].Why, "found out by the first collective")
	before := w.m.Stats().MadeModules
	w.each(func(x *rank, r int) error {
		for _, c := range []struct {
			d  tensor.DType
			op backend.ReduceOp
		}{{tensor.Float32, backend.PreMulSum(2)}, {tensor.Bool, backend.Sum()}, {tensor.Complex64, backend.Sum()}, {tensor.Int32, backend.Sum()}} {
			v, err := reduce(x, r, c.d, c.op)
			if err == nil {
				err = v.Wait(x.ctx)
			}
			if err != nil {
				return err
			}
		}
		y, err := x.vector(tensor.Float32, r, make([]byte, 8))
		if err != nil {
			return err
		}
		_, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.BAnd()})
		if !errors.Is(err, backend.ErrInvalidArgument) {
			return fmt.Errorf("bits of floats: %w", err)
		}
		_, err = x.bytes(y, r)
		return err
	})
	require.Equal(t, before, w.m.Stats().MadeModules, "New has loaded the kernels")
	require.Equal(t, cuda.DirectWork, w.ranks[0].b.Explain().Choices[0].Algorithm)
	w.end()
}

// TestDeviceShared runs ranks of one process on one driver: they reach each
// other's memory by its address.
func TestDeviceShared(t *testing.T) {
	for _, devices := range []int{3, 4} {
		d, err := sim.Open(sim.Config{Devices: devices, Kernels: simkernels.All()})
		require.NoError(t, err)
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
				b, err := cuda.New(x.ctx, backend.Options{
					Store: st, Rank: r, Size: 3, Timeout: patience, Group: "g",
					Specific: cuda.Options{Driver: d, AllReduce: cuda.DirectWork, CPUOptions: join(fabric)},
				})
				if err != nil {
					return err
				}
				x.b = b
				y, err := x.vector(tensor.Int32, r%devices, bytes.Repeat([]byte{byte(r + 1)}, 400))
				if err != nil {
					return err
				}
				for range 3 {
					v, err := b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Max()})
					if err != nil {
						return err
					}
					if err := v.Synchronize(x.stream[r%devices]); err != nil {
						return err
					}
				}
				got, err := x.bytes(y, r%devices)
				if err != nil {
					return err
				}
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
func (x *rank) warm(r int) (*bucket, error) {
	b, err := x.bucket(r)
	if err != nil {
		return nil, err
	}
	if err := x.fill(r, b); err != nil {
		return nil, err
	}
	v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
	if err != nil {
		return nil, err
	}
	return b, v.Wait(x.ctx)
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
	injected := errors.New("injected")
	for _, tc := range []struct {
		first bool
		way   string
		calls int // at least so many are made
	}{{true, "", 20}, {false, cuda.DirectWork, 3}} {
		first := tc.first
		t.Run(fmt.Sprintf("first %v %s", first, tc.way), func(t *testing.T) {
			others, step := 0, 1
			if testing.Short() && first {
				step = 5
			}
			for k := 0; ; k += step {
				s := onDevices(2)
				s.options.AllReduce, s.options.DTypes = tc.way, []tensor.DType{tensor.Int32}
				s = s.quietly()
				s.sim.Seed, s.sim.Semantics = uint64(k), sim.Semantics(k%2)
				w := newWorld(t, s)
				buckets := make([]*bucket, 2)
				w.each(func(x *rank, r int) (err error) {
					if first {
						buckets[r], err = x.bucket(r)
					} else {
						buckets[r], err = x.warm(r)
					}
					if err == nil {
						err = x.fill(r, buckets[r])
					}
					return err
				})
				n, failed := atomic.Int64{}, atomic.Pointer[string]{}
				w.m.Inject(func(c sim.Call) error {
					if strings.Contains(c.Stream, "caller") || n.Add(1)-1 != int64(k) {
						return nil
					}
					text := c.String()
					failed.Store(&text)
					return injected
				})
				errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
					v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, backend.AllReduceOptions{})
					if err != nil {
						x.b.Abort(err)
						return err
					}
					if err := v.Synchronize(x.caller(r)); err != nil {
						return errors.Join(err, v.Wait(x.ctx))
					}
					return v.Wait(x.ctx)
				})
				w.m.Inject(nil)
				err := errors.Join(errs...)
				if failed.Load() == nil {
					require.NoError(t, err)
					w.end()
					require.Greater(t, k, tc.calls)
					t.Logf("%d calls failed in turn, %d of them made other work do it", k/step, others)
					require.Equal(t, first, others > 0)
					return
				}
				what := *failed.Load()
				if err == nil {
					for _, x := range w.ranks {
						require.Equal(t, cuda.HostWork, x.b.Explain().Choices[0].Algorithm, what)
					}
					others++
				} else {
					require.ErrorIs(t, err, injected, what)
				}
				for r, err := range errs {
					if err == nil {
						continue
					}
					var e *work.Error
					require.ErrorAs(t, err, &e, "%v: rank %d", what, r)
					require.Equal(t, work.AllReduce, e.Info.Op, what)
					require.Equal(t, r, e.Info.Rank, what)
				}
				for _, err := range runEach(w, func(x *rank, _ int, _ chan struct{}) error { return x.b.Close() }) {
					require.NoError(t, err, what)
				}
				for _, x := range w.ranks {
					require.NoError(t, x.cpu.Close())
				}
				require.NoError(t, w.m.Settle(w.ctx), what)
				for _, x := range w.ranks {
					x.free()
				}
				w.m.Close()
				for _, f := range w.m.Findings() {
					var unused *sim.Unused
					var race *sim.Race
					require.True(t, errors.As(f, &unused) || errors.As(f, &race), "%v: %v", what, f)
				}
			}
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
			if err := v.Wait(x.ctx); err != nil {
				return err
			}
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

// TestDeviceConcurrent issues operations of several groups at a time: each result
// is of its own input (F-17, T14).
func TestDeviceConcurrent(t *testing.T) {
	eachSeed(t, 10, func(t *testing.T, seed uint64, sem sim.Semantics) {
		const groups = 3
		o := onDevices(3)
		o.sim.Seed, o.sim.Semantics = seed, sem
		w := newWorld(t, o)
		st := newStore(t)
		w.each(func(x *rank, r int) error {
			var bs []*cuda.Backend
			for g := range groups {
				oo := o.options
				oo.Driver, oo.CPUOptions = x.d, join(w.fabric)
				b, err := cuda.New(x.ctx, backend.Options{Store: st, Rank: r, Size: 3, Timeout: patience, Group: fmt.Sprint("h", g), Specific: oo})
				if err != nil {
					return err
				}
				bs = append(bs, b)
			}
			type issued struct {
				y    *vector
				v    *work.Work
				want byte
			}
			var all []issued
			for i := range 10 {
				for g, b := range bs {
					y, err := x.vector(tensor.Uint8, r, bytes.Repeat([]byte{byte(10*i + g + r)}, 100+i))
					if err != nil {
						return err
					}
					v, err := b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Max()})
					if err != nil {
						return err
					}
					all = append(all, issued{y, v, byte(10*i + g + 2)})
				}
			}
			for _, k := range all {
				if err := k.v.Wait(x.ctx); err != nil {
					return err
				}
				got, err := x.bytes(k.y, r)
				if err != nil {
					return err
				}
				if !bytes.Equal(got, bytes.Repeat([]byte{k.want}, len(got))) {
					return fmt.Errorf("got %x, want all %x", got, k.want)
				}
			}
			for _, b := range bs {
				if err := b.Close(); err != nil {
					return err
				}
			}
			return nil
		})
		w.end()
	})
}

// newStore returns a store of the process.
func newStore(t *testing.T) store.Store {
	st := store.NewHash()
	t.Cleanup(func() { st.Close() })
	return st
}
