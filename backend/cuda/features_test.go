package cuda_test

import (
	"bytes"
	"context"
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
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestF01LocalBroadcast gives 1 to 17 devices of a process the data of one of them, or of
// the host. That takes n-1 copies, from any root, of no bytes and of some, and nobody
// blocks (F-01, T2). With many seeds some are of 4 MiB and three bytes.
func TestF01LocalBroadcast(t *testing.T) {
	large := 64<<10 + 3
	if *seeds >= 200 {
		large = 4<<20 + 3
	}
	for n := 1; n <= 17; n++ {
		for i, size := range []int{0, 1, 255, large} {
			for _, kind := range []string{"broadcast", "from"} {
				if size == large && (n != 3 || kind == "from") {
					continue
				}
				root := (n*7 + i) % n
				c := sim.Config{Devices: n, Seed: uint64(n), Semantics: sim.Semantics(i % 2), NoDelays: size == large}
				x := newLocals(t, c, false, n, tensor.Uint8, size, rand.New(rand.NewPCG(1, uint64(n))))
				copies := 0
				x.m.Skip(func(c sim.Call) bool {
					if strings.Contains(c.Stream, "local") && c.Name == "Copy" {
						copies++
					}
					return false
				})
				require.NoError(t, localProgram(kind, root, backend.Sum())(x), "%s of %d, %d bytes, root %d", kind, n, size, root)
				want := n - 1
				if kind == "from" {
					want = n
				}
				if size == 0 {
					want = 0
				}
				require.Equal(t, want, copies, "%s of %d, %d bytes", kind, n, size)
				require.NoError(t, x.end())
			}
		}
	}
}

// TestF02Range broadcasts elements 7 to 107 of tensors of 1000: what is around
// them stays as it is (F-02).
func TestF02Range(t *testing.T) {
	for n := 2; n <= 5; n++ {
		x := newLocals(t, sim.Config{Devices: n, Seed: 2}, false, n, tensor.Int32, 990, random(t, 2))
		for i, whole := range x.ts {
			require.Equal(t, 7, whole.Offset())
			part, err := whole.Slice(0, 0, 100)
			require.NoError(t, err)
			x.ts[i] = part
		}
		require.NoError(t, localProgram("broadcast", n-1, backend.Sum())(x))
		require.NoError(t, x.end())
	}
}

// TestF03StreamOrder broadcasts tensors whose producer's stream is held up, to tensors
// that other streams read. All calls return at once, before anything has been done. The
// readers see the new data (F-03, T5, T11).
func TestF03StreamOrder(t *testing.T) {
	for n := 2; n <= 5; n++ {
		for root := range n {
			x := newLocals(t, sim.Config{Devices: n, Seed: uint64(n)}, false, n, tensor.Int64, 30, random(t, 3))
			gate, err := x.d.AllocHost(4)
			require.NoError(t, err)
			gate.Store32(0, 0)
			require.NoError(t, x.streams[root].WaitValue(gate.Ptr(), 1, driver.Equal))
			require.NoError(t, x.produce())
			v, err := x.l.Broadcast(x.ctx, x.ts, root)
			require.NoError(t, err)
			wait, err := x.consume()
			require.NoError(t, err)
			var stuck *sim.Stuck
			require.ErrorAs(t, x.m.Quiesce(x.ctx), &stuck, "everybody waits for the producer")
			require.False(t, v.IsCompleted())
			gate.Store32(0, 1)
			require.NoError(t, errors.Join(wait(), v.Wait(x.ctx)))
			require.NoError(t, x.differs(func(int) []byte { return x.part(x.before[root], root) }))
			require.NoError(t, gate.Close())
			require.NoError(t, x.end())
		}
	}
}

// TestF04LocalReduce reduces to a device and to the host, with kernels and without. It
// does every dtype and operator. The result depends on the tensors alone: not on the
// root, the seed or the place (F-04, R14).
func TestF04LocalReduce(t *testing.T) {
	dtypes := []tensor.DType{
		tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64, tensor.Uint64,
		tensor.Float16, tensor.Float32, tensor.Float64, tensor.BFloat16,
	}
	for _, d := range dtypes {
		for _, op := range []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max()} {
			for n := 1; n <= 5; n++ {
				var first []byte
				for k, kernels := range []bool{false, true} {
					root := (n + k) % n
					c := sim.Config{Devices: max(1, n-k), Seed: uint64(k), Semantics: sim.Semantics(k)}
					x := newLocals(t, c, kernels, n, d, 40, rand.New(rand.NewPCG(4, uint64(n))))
					require.NoError(t, x.produce())
					host, err := tensor.New(d, 40)
					require.NoError(t, err)
					got, err := x.l.ReduceTo(x.ctx, host, x.ts, op)
					require.NoError(t, err)
					v, want, err := x.call("reduce", root, op)
					require.NoError(t, err)
					wait, err := x.consume()
					require.NoError(t, err)
					require.NoError(t, errors.Join(wait(), v.Wait(x.ctx), got.Wait(x.ctx)))
					require.NoError(t, x.differs(want), "%v of %d %v, root %d, kernels %v", op, n, d, root, kernels)
					require.Equal(t, x.combined(op), host.Bytes(), "%v of %d %v, to the host", op, n, d)
					result, err := got.Result()
					require.NoError(t, err)
					require.Equal(t, []*tensor.Tensor{host}, result)
					if first == nil {
						first = host.Bytes()
					}
					require.Equal(t, first, host.Bytes(), "%v of %d %v", op, n, d)
					require.NoError(t, x.end())
				}
			}
		}
	}

	x := newLocals(t, sim.Config{Devices: 2}, false, 2, tensor.Float32, 10, random(t, 4))
	short, err := tensor.New(tensor.Float32, 9)
	require.NoError(t, err)
	one, err := tensor.New(tensor.Float32, 1)
	require.NoError(t, err)
	same, err := one.AsStrided([]int{10}, []int{0}, 0)
	require.NoError(t, err)
	for name, dst := range map[string]*tensor.Tensor{"nil": nil, "size": short, "device": x.ts[0], "overlap": same} {
		_, err := x.l.ReduceTo(x.ctx, dst, x.ts, backend.Sum())
		require.ErrorIs(t, err, backend.ErrInvalidArgument, name)
	}
	long, err := tensor.New(tensor.Float32, 10)
	require.NoError(t, err)
	_, err = x.l.ReduceTo(x.ctx, long, x.ts, backend.BXor())
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	_, err = x.l.ReduceTo(x.ctx, long, nil, backend.Sum())
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	require.NoError(t, x.end())
}

// TestF04Mutations leaves out each record and wait of a reduction to the host (T3).
func TestF04Mutations(t *testing.T) {
	tried, unmissed, err := sim.LeaveOut(sim.Config{Devices: 3, Seed: 4}, func(m *sim.Machine) error {
		d, err := m.Process("")
		if err != nil {
			return err
		}
		l, err := cuda.NewLocal(d, cuda.LocalOptions{Timeout: patience})
		if err != nil {
			return err
		}
		ctx := context.Background()
		// The streams begin when everything is called: what the host has seen end
		// would need no order.
		gate, err := d.AllocHost(4)
		if err != nil {
			return err
		}
		gate.Store32(0, 0)
		var ts []*tensor.Tensor
		var streams []driver.Stream
		var mems []driver.Memory
		for i := range 3 {
			v, err := d.Device(i)
			if err != nil {
				return err
			}
			s, err := v.NewStream(driver.StreamOptions{Name: fmt.Sprint("caller ", i)})
			if err != nil {
				return err
			}
			mem, err := v.Alloc(64)
			if err != nil {
				return err
			}
			if err := errors.Join(s.WaitValue(gate.Ptr(), 1, driver.Equal), s.Memset(mem.Ptr(), byte(i+1), 64)); err != nil {
				return err
			}
			x, err := tensor.OnDevice(tensor.Uint8, cuda.OnStream(mem, s), 64)
			if err != nil {
				return err
			}
			ts, streams, mems = append(ts, x), append(streams, s), append(mems, mem)
		}
		out, err := tensor.New(tensor.Uint8, 64)
		if err != nil {
			return err
		}
		v, err := l.ReduceTo(ctx, out, ts, backend.Sum())
		if err != nil {
			return err
		}
		var failed error
		for i, s := range streams { // the tensors are the callers' again
			failed = errors.Join(failed, s.Memset(mems[i].Ptr(), 0xee, 64))
		}
		gate.Store32(0, 1)
		// What does not come is not waited for.
		var stuck *sim.Stuck
		if err := m.Quiesce(ctx); errors.As(err, &stuck) {
			failed = errors.Join(failed, err)
			v.Abort(err)
		}
		ended, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		failed = errors.Join(failed, v.Wait(ended))
		if !bytes.Equal(out.Bytes(), bytes.Repeat([]byte{6}, 64)) {
			failed = errors.Join(failed, errors.New("wrong sum"))
		}
		for _, s := range streams {
			e, err := s.Record()
			if err == nil {
				err = e.Sync(ctx)
				e.Release()
			}
			failed = errors.Join(failed, err)
		}
		failed = errors.Join(failed, l.Close())
		for i := range streams {
			failed = errors.Join(failed, streams[i].Close(), mems[i].Close())
		}
		return errors.Join(failed, gate.Close(), d.Close())
	}, "Record", "Wait")
	require.NoError(t, err)
	require.NotEmpty(t, tried)
	require.Empty(t, unmissed, "of %v", tried)
}

// TestF05LocalAllReduce all-reduces on 1 to 9 devices (F-05).
func TestF05LocalAllReduce(t *testing.T) {
	for n := 1; n <= 9; n++ {
		for k, d := range []tensor.DType{tensor.Float32, tensor.Int64, tensor.BFloat16} {
			for _, count := range []int{0, 1, 255} {
				x := newLocals(t, sim.Config{Devices: n, Seed: uint64(n), Semantics: sim.Semantics(n % 2)}, k%2 == 0, n, d, count, random(t, 5))
				require.NoError(t, localProgram("all-reduce", 0, backend.Sum())(x), "%d of %v", n, d)
				require.NoError(t, x.end())
			}
		}
	}
}

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
	f := func(n int64) {
		// What can go on goes on before the host does.
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
	_, err := w.ranks[0].kept(0, 0)
	require.NoError(t, err)
	_, err = w.ranks[0].run(w.ranks[0].tensors[0])
	require.NoError(t, err)
	require.Equal(t, slots, first, "of %d chunks are on the host when the first is reduced", chunks)
	require.Equal(t, chunks-1, up, "of %d chunks are back when the last is reduced", chunks)
	w.ranks[0].tensors = nil
	w.end()
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
				opened, err := x.gate(x.stream[0])
				if err != nil {
					return err
				}
				defer opened()
				ps, err := x.several(rand.New(rand.NewPCG(uint64(k), uint64(r))), d, 1+k%3, 20, k%2 == 0)
				if err != nil {
					return err
				}
				v, err := x.b.AllReduce(x.ctx, devs(ps), backend.AllReduceOptions{Op: op})
				if err != nil {
					return err
				}
				held := false
				for _, p := range ps {
					held = held || p.device == 0
					if err := errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)); err != nil {
						return err
					}
				}
				if held && v.IsCompleted() {
					return errors.New("the Work has ended, and the tensors have not been written")
				}
				opened()
				c, err := x.cpu.AllReduce(x.ctx, cpus(ps), backend.AllReduceOptions{Op: op})
				if err != nil {
					return err
				}
				if err := work.WaitAll(x.ctx, v, c); err != nil {
					return err
				}
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
	pairs := 1000
	if testing.Short() {
		pairs = 100
	}
	for _, c := range []sim.Config{{Devices: 2, NoDelays: true, NoCheck: true}, {Devices: 2, Seed: 17}} {
		if !c.NoDelays {
			pairs = min(pairs, 60)
		}
		w := newWorld(t, setup{size: 2, timeout: 5 * patience, sim: c, options: cuda.Options{Chunk: 8, Slots: 2}})
		w.each(func(x *rank, r int) error {
			n := 4 * pairs
			var mems []driver.Memory
			var outs []driver.HostMemory
			for i := range 2 {
				v, err := x.d.Device(i)
				if err != nil {
					return err
				}
				m, err := v.Alloc(4 * n)
				if err != nil {
					return err
				}
				x.close = append(x.close, m)
				h, err := x.d.AllocHost(4 * n)
				if err != nil {
					return err
				}
				x.close = append(x.close, h)
				driver.HostAccess(x.d, "filling", driver.Writes(h.Ptr(), 4*n))
				all, err := tensor.FromBytes(tensor.Int32, h.Bytes()[:4*n], n)
				if err != nil {
					return err
				}
				values, err := tensor.Data[int32](all)
				if err != nil {
					return err
				}
				for k := range values {
					values[k] = int32((1 + r) * (10*k + i))
				}
				if err := x.stream[i].Copy(m.Ptr(), h.Ptr(), 4*n); err != nil {
					return err
				}
				mems, outs = append(mems, m), append(outs, h)
			}
			var works []*work.Work
			for k := range pairs {
				for i := range 2 {
					whole, err := tensor.OnDevice(tensor.Int32, cuda.OnStream(mems[i], x.stream[i]), n)
					if err != nil {
						return err
					}
					part, err := whole.Slice(0, 4*k, 4*k+4)
					if err != nil {
						return err
					}
					v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{part}, backend.AllReduceOptions{})
					if err != nil {
						return err
					}
					works = append(works, v)
				}
			}
			if err := work.WaitAll(x.ctx, works...); err != nil {
				return err
			}
			for i := range 2 {
				for _, v := range works[i:] {
					if err := v.Synchronize(x.stream[i]); err != nil {
						return err
					}
				}
				if err := x.stream[i].Copy(outs[i].Ptr(), mems[i].Ptr(), 4*n); err != nil {
					return err
				}
				e, err := x.stream[i].Record()
				if err != nil {
					return err
				}
				err = e.Sync(x.ctx)
				e.Release()
				if err != nil {
					return err
				}
				driver.HostAccess(x.d, "comparing", driver.Reads(outs[i].Ptr(), 4*n))
				all, err := tensor.FromBytes(tensor.Int32, outs[i].Bytes()[:4*n], n)
				if err != nil {
					return err
				}
				values, err := tensor.Data[int32](all)
				if err != nil {
					return err
				}
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
				p, err := x.pairOf(rng, tensor.Float32, r%2, laid(kind, 7, 5), true)
				if err != nil {
					return err
				}
				if want := fmt.Sprint(laid(kind, 7, 5).strides); fmt.Sprint(p.dev.Strides()) != want {
					return fmt.Errorf("strides %v, want %v", p.dev.Strides(), want)
				}
				call := func(b backend.Backend, d *tensor.Tensor) (*work.Work, error) {
					if broadcast {
						return b.Broadcast(x.ctx, []*tensor.Tensor{d}, backend.BroadcastOptions{Root: 1})
					}
					return b.AllReduce(x.ctx, []*tensor.Tensor{d}, backend.AllReduceOptions{})
				}
				v, err := call(x.b, p.dev)
				if err != nil {
					return err
				}
				if err := errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)); err != nil {
					return err
				}
				k, err := call(x.cpu, p.cpu)
				if err != nil {
					return err
				}
				if err := work.WaitAll(x.ctx, v, k); err != nil {
					return err
				}
				if err := x.check(p); err != nil {
					return err
				}
			}
			return nil
		})
		w.end()
	}
}
