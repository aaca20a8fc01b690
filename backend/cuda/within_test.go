package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Several tensors of one process, on its devices: the collectives of a group of one rank. TestF07Tree has those of more
// ranks.

// oneRank is a group of one rank on some devices, with kernels or without.
func oneRank(devices int, kernels bool, seed uint64) setup {
	s := setup{size: 1, timeout: patience, sim: sim.Config{Devices: devices, Seed: seed, Semantics: sim.Semantics(seed % 2)}}
	if kernels {
		s.sim.Kernels = simkernels.All()
	}
	return s
}

// onEach makes a tensor on each device, and in the memory of the host instead of device number host.
func (x *rank) onEach(rng *rand.Rand, d tensor.DType, host int, s shape) (ps []*pair, err error) {
	defer func() { x.mixes = nil }()
	for i := range x.stream {
		x.mixes = func(*rand.Rand) bool { return i == host }
		p, err := x.pairOf(rng, d, i, s, true)
		if err != nil {
			return nil, err
		}
		ps = append(ps, p)
	}
	return ps, nil
}

// TestF01LocalBroadcast gives 1 to 17 devices of a process the data of one of them, or of the host. That takes n-1
// copies, from any root, of no bytes and of some, and none goes through the host (F-01, T2). In make nightly some are
// of 4 MiB and three bytes.
func TestF01LocalBroadcast(t *testing.T) {
	large := testsize.Of(64<<10, 64<<10, 4<<20) + 3
	for n := 1; n <= 17; n++ {
		for i, size := range []int{0, 1, 255, large} {
			for _, kind := range []string{"device", "host"} {
				if size == large && (n != 3 || kind == "host") {
					continue
				}
				root, host := (n*7+i)%n, -1
				if kind == "host" {
					host = root
				}
				s := oneRank(n, false, uint64(n+i))
				s.sim.NoDelays = size == large
				w := newWorld(t, s)
				x := w.ranks[0]
				copies, staged := 0, 0
				w.m.Skip(func(c sim.Call) bool {
					if strings.Contains(c.Stream, " up.") && c.Name == "Copy" {
						copies++
					}
					if strings.Contains(c.Stream, " down.") {
						staged++
					}
					return false
				})
				ps := must.Get(x.onEach(rand.New(rand.NewPCG(1, uint64(n))), tensor.Uint8, host, laid(1, size)))
				require.NoError(t, x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{RootTensor: root}}), "%d, %d bytes, root %d, %s", n, size, root, kind)
				want := max(n-1, 1) // one tensor: a byte, for who orders a stream after the Work
				if size == 0 {
					want = 0
				}
				require.Equal(t, want, copies, "%d, %d bytes, %s", n, size, kind)
				require.Zero(t, staged)
				w.end()
			}
		}
	}
}

// TestF02Range broadcasts elements 7 to 107 of tensors of 1000: what is around them stays as it is (F-02).
func TestF02Range(t *testing.T) {
	for n := 2; n <= 5; n++ {
		w := newWorld(t, oneRank(n, n%2 == 0, uint64(n)))
		x := w.ranks[0]
		ps, err := x.onEach(random(t, 2), tensor.Int32, -1, shape{dims: []int{100}, strides: []int{1}, offset: 7, len: 1000})
		require.NoError(t, err)
		require.NoError(t, x.broadcasts([][]*pair{ps}, []backend.BroadcastOptions{{RootTensor: n - 1}}))
		w.end()
	}
}

// TestF03StreamOrder broadcasts and all-reduces tensors whose producer's stream is held up. All calls return at once,
// before anything has been done. Readers on streams that are ordered after the Work see the new data (F-03, T5, T11).
func TestF03StreamOrder(t *testing.T) {
	for n := 2; n <= 5; n++ {
		for root := range n {
			w := newWorld(t, oneRank(n, true, uint64(n)))
			x := w.ranks[0]
			opened := must.Get(x.gate(x.stream[root]))
			ps := must.Get(x.onEach(random(t, 3), tensor.Int64, -1, flat(30)))
			call := func(b backend.Backend, ts []*tensor.Tensor) (*work.Work, error) {
				if root%2 == 0 {
					return b.Broadcast(x.ctx, ts, backend.BroadcastOptions{RootTensor: root})
				}
				return b.AllReduce(x.ctx, ts, backend.AllReduceOptions{})
			}
			v := must.Get(call(x.b, devs(ps)))
			for _, p := range ps {
				require.NoError(t, errors.Join(v.Synchronize(x.stream[p.device]), x.back(p)))
			}
			must.As[*sim.Stuck](t, w.m.Quiesce(x.ctx), "everybody waits for the producer")
			require.False(t, v.IsCompleted())
			opened()
			require.NoError(t, x.checks(work.WaitAll(x.ctx, v, must.Get(call(x.cpu, cpus(ps)))), ps...))
			w.end()
		}
	}
}

// TestF04LocalReduce combines the tensors of 1 to 5 devices, and of some and the host, with kernels and without. It does
// every dtype and operator. The bits are those of the operands in their order, whatever combines them (F-04, R14).
func TestF04LocalReduce(t *testing.T) { onVirtualTime(t, testF04LocalReduce) }

func testF04LocalReduce(t *testing.T) {
	const count = 40
	for _, d := range tensor.DTypes() {
		for _, op := range append(deviceOps[:len(deviceOps):len(deviceOps)], backend.PreMulSum(2), greatest) {
			if _, err := op.Reduction(d, 1); err != nil {
				continue
			}
			n := 1 + (int(d)+len(op.String()))%5
			rng := rand.New(rand.NewPCG(4, uint64(n)))
			all := make([][]byte, n)
			for i := range all {
				v := must.Get(tensor.New(d, count))
				for k := range count {
					f := rng.NormFloat64()
					switch {
					case d == tensor.Bool:
						f = float64(rng.IntN(2))
					case d.IsInteger():
						f = float64(rng.IntN(50))
					}
					require.NoError(t, v.SetFloat64(f, k))
				}
				all[i] = v.Bytes()
			}
			want := inOrder(t, op, d, all)
			for k, kernels := range []bool{false, true} {
				w := newWorld(t, oneRank(n, kernels, uint64(k)))
				x := w.ranks[0]
				launches := 0
				w.m.Skip(func(c sim.Call) bool {
					if c.Name == "Launch" {
						launches++
					}
					return false
				})
				var ts []*tensor.Tensor
				var on []*vector
				for i, b := range all {
					if i == n-1 && n > 2 {
						host := must.Get(tensor.FromBytes(d, bytes.Clone(b), count))
						ts = append(ts, host)
						continue
					}
					y := must.Get(x.vector(d, i, b))
					ts, on = append(ts, y.t), append(on, y)
				}
				v := must.Get(x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: op}))
				require.NoError(t, v.Wait(x.ctx))
				for i, u := range ts {
					got := u.Bytes()
					if i < len(on) {
						require.NoError(t, v.Synchronize(x.stream[i]))
						got = must.Get(x.bytes(on[i], i))
					}
					require.Equal(t, want, got, "%v of %d %v, kernels %v, tensor %d", op, n, d, kernels, i)
				}
				byKernels := kernels && slices.Contains(deviceTypes, d) && slices.ContainsFunc(deviceOps, func(o backend.ReduceOp) bool { return o.Kind() == op.Kind() })
				if byKernels && op.Kind() != backend.Avg().Kind() {
					require.Equal(t, n-1, launches, "%v of %v", op, d)
				}
				w.end()
			}
		}
	}
}

// inOrder returns what operands become that are combined in their order.
func inOrder(t *testing.T, op backend.ReduceOp, d tensor.DType, all [][]byte) []byte {
	red := must.Get(op.Reduction(d, 1))
	var sum []byte
	for i, b := range all {
		b = bytes.Clone(b)
		if red.Before != nil {
			red.Before(b)
		}
		if i == 0 {
			sum = b
		} else {
			red.Combine(sum, b)
		}
	}
	if red.After != nil {
		red.After(sum)
	}
	return sum
}

// TestF05LocalAllReduce all-reduces on 1 to 9 devices, with and without kernels (F-05).
func TestF05LocalAllReduce(t *testing.T) { onVirtualTime(t, testF05LocalAllReduce) }

func testF05LocalAllReduce(t *testing.T) {
	for n := 1; n <= 9; n++ {
		w := newWorld(t, oneRank(n, n%2 == 0, uint64(n)))
		x := w.ranks[0]
		for _, d := range []tensor.DType{tensor.Float32, tensor.Int64, tensor.BFloat16} {
			for kind, count := range []int{0, 1, 255, 30} { // the last ones have holes
				ps := must.Get(x.onEach(random(t, 5), d, -1, laid(kind, count)))
				require.NoError(t, x.sums(ps, backend.Sum()), "%d of %v", n, d)
			}
		}
		w.end()
	}
}

// withinOnce does a broadcast or an all-reduce of a tensor on each device.
func withinOnce(w *world, broadcast bool) error {
	x := w.ranks[0]
	ps, err := x.onEach(rand.New(rand.NewPCG(6, 6)), tensor.Int32, -1, flat(50))
	if err != nil {
		return err
	}
	var v, k *work.Work
	if broadcast {
		v, err = x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{RootTensor: 1})
	} else {
		v, err = x.b.AllReduce(x.ctx, devs(ps), backend.AllReduceOptions{})
	}
	if err != nil {
		return err
	}
	for _, p := range ps {
		err = errors.Join(err, v.Synchronize(x.stream[p.device]), x.back(p))
	}
	if err != nil {
		for _, p := range ps {
			if p.seen != nil {
				p.seen.Release()
			}
		}
		return errors.Join(err, v.Wait(x.ctx))
	}
	if broadcast {
		k, err = x.cpu.Broadcast(x.ctx, cpus(ps), backend.BroadcastOptions{RootTensor: 1})
	} else {
		k, err = x.cpu.AllReduce(x.ctx, cpus(ps), backend.AllReduceOptions{})
	}
	if err == nil {
		err = k.Wait(x.ctx)
	}
	return x.checks(errors.Join(err, v.Wait(x.ctx)), ps...)
}

// TestT03T04Within leaves out each record and each wait of such calls. Each one that is missing is noticed (T3, T4).
func TestT03T04Within(t *testing.T) {
	for _, c := range []struct {
		broadcast bool
		n         int
	}{{true, 2}, {true, 5}, {false, 3}} {
		tried := leaveOut(t, oneRank(c.n, true, 1), withoutCall, func(m sim.Call) bool {
			caller := strings.Contains(m.Stream, "caller")
			switch m.Name {
			case "Record": // the last one of a caller's stream is the test's own
				return !caller || m.K == 0
			case "Wait": // a stream that is ordered after the Work waits for all that it does, for other streams' tensors too
				return !caller || c.n <= 2
			}
			return false
		}, func(w *world) error { return withinOnce(w, c.broadcast) })
		require.Len(t, tried, 2, "%+v", c)
	}
}

// TestT07Within lets each call to the driver fail in turn: there is an error, or the host combines, nothing is left,
// and no stream waits for ever (T7).
func TestT07Within(t *testing.T) {
	for _, broadcast := range []bool{true, false} {
		began := false
		fresh := func(t *testing.T, k int) *world {
			s := oneRank(3, true, uint64(k))
			s.sim.Quiet = true
			began = false
			return newWorld(t, s)
		}
		counts := func(c sim.Call) bool { // the first ones are the test's own
			own := c.Name == "Alloc" || c.Name == "AllocHost" && !began
			began = began || !own
			return !own
		}
		failInTurn(t, 1, 11, "", fresh, counts, func(x *rank, _ int) error {
			return withinOnce(x.w, broadcast)
		}, func(w *world, failed sim.Call, errs []error) {
			if errs[0] == nil {
				require.Contains(t, []string{"Device", "Load", "Function"}, failed.Name, "no kernels: the host combines")
				w.end()
				return
			}
			require.ErrorIs(t, errs[0], errInjected, failed)
			w.drop(t)
		})
	}
}

// TestWithinEnds has wrong calls, and one whose context ends while a stream holds it up (T8).
func TestWithinEnds(t *testing.T) {
	s := oneRank(3, true, 1)
	s.sim.Quiet = true
	w := newWorld(t, s)
	x := w.ranks[0]
	ps, err := x.onEach(random(t, 4), tensor.Int32, -1, flat(20))
	require.NoError(t, err)
	_, err = x.b.Broadcast(x.ctx, devs(ps), backend.BroadcastOptions{RootTensor: 3})
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	_, err = x.b.AllReduce(x.ctx, devs(append(ps, ps[0])), backend.AllReduceOptions{})
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	opened := must.Get(x.gate(x.stream[1]))
	ctx, cancel := context.WithCancel(x.ctx)
	v := must.Get(x.b.AllReduce(ctx, devs(ps), backend.AllReduceOptions{}))
	cancel()
	err = v.Wait(x.ctx)
	require.ErrorIs(t, err, work.ErrCanceled)
	require.ErrorContains(t, err, "seq 0")
	opened()
	w.drop(t)
}

// everyWithin does every operation on five tensors of every dtype, with every operator and each root in turn.
func everyWithin(t *testing.T, d driver.Driver, counts ...int) {
	const tensors = 5
	w := sharing{size: 1, group: "within", room: 32 << 20, cycles: 1_000_000}.world(t, d)
	x := w.ranks[0]
	done := 0
	for _, dt := range tensor.DTypes() {
		for _, n := range counts {
			make5 := func() (ps []*pair) {
				for i := range tensors {
					p, err := x.pairOf(rand.New(rand.NewPCG(uint64(n), uint64(i))), dt, i%len(x.stream), laid(i%2, n), true)
					require.NoError(t, err)
					ps = append(ps, p)
				}
				return ps
			}
			o := backend.BroadcastOptions{RootTensor: done % tensors}
			require.NoError(t, x.broadcasts([][]*pair{make5()}, []backend.BroadcastOptions{o}))
			for _, op := range append(deviceOps[:len(deviceOps):len(deviceOps)], backend.PreMulSum(2), greatest) {
				if _, err := op.Reduction(dt, 1); err != nil || !addsExactly(dt, tensors) {
					continue
				}
				done++
				require.NoError(t, x.arena.clear(x))
				require.NoError(t, x.sums(make5(), op), "%v of %d x %v", op, n, dt)
			}
			require.NoError(t, x.arena.clear(x))
		}
	}
	w.end()
	t.Logf("%d reductions", done)
}

// TestGPUWithin uses all devices of the process.
func TestGPUWithin(t *testing.T) {
	d := openGPU(t)
	everyWithin(t, d, 1, 1023, 100_003)
	require.NoError(t, d.Close())
}

// TestSimulatedWithin is TestGPUWithin on simulated devices, with kernels and without.
func TestSimulatedWithin(t *testing.T) {
	for seed, kernels := range []map[string]sim.Kernel{nil, simkernels.All()} {
		d := must.Get(sim.Open(sim.Config{Devices: 3, Seed: uint64(seed), Kernels: kernels}))
		everyWithin(t, d, 255)
		closeSim(t, d)
	}
}
