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
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var kernelOps = []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max()}

// locals is a simulated host with tensors of one process.
type locals struct {
	testing.TB
	ctx     context.Context
	m       *sim.Machine // nil on real devices
	d       driver.Driver
	l       *cuda.Local
	delays  []*delay        // one a tensor
	wants   func() error    // looks at what went to the host
	streams []driver.Stream // one a tensor
	bufs    []driver.Memory
	ts      []*tensor.Tensor
	before  []driver.HostMemory // what the tensors begin with
	after   []driver.HostMemory
	closers []interface{ Close() error }
}

func newLocals(tb testing.TB, c sim.Config, kernels bool, n int, d tensor.DType, count int, rng *rand.Rand) *locals {
	if kernels {
		c.Kernels = simkernels.All()
	}
	tb.Cleanup(cuda.Underway())
	dr, err := sim.Open(c)
	require.NoError(tb, err)
	x := localsOn(tb, dr, n, d, count, rng)
	x.m = dr.Machine()
	return x
}

// localsOn makes tensors on all devices in turn.
func localsOn(tb testing.TB, dr driver.Driver, n int, d tensor.DType, count int, rng *rand.Rand) *locals {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	tb.Cleanup(cancel)
	x := &locals{TB: tb, ctx: ctx, d: dr}
	var err error
	x.l, err = cuda.NewLocal(dr, cuda.LocalOptions{Timeout: patience})
	require.NoError(tb, err)
	es := d.Size()
	for i := range n {
		v, err := dr.Device(i % dr.Count())
		require.NoError(tb, err)
		s, err := v.NewStream(driver.StreamOptions{Name: fmt.Sprint("caller ", i)})
		require.NoError(tb, err)
		m, err := v.Alloc((count + 10) * es)
		require.NoError(tb, err)
		h, err := dr.AllocHost(max((count+10)*es, 1))
		require.NoError(tb, err)
		out, err := dr.AllocHost(max((count+10)*es, 1))
		require.NoError(tb, err)
		y, err := newDelay(dr, v)
		require.NoError(tb, err)
		x.closers, x.delays = append(x.closers, s, m, h, out, y), append(x.delays, y)
		driver.HostAccess(dr, "filling", driver.Writes(h.Ptr(), h.Len()))
		all, err := tensor.FromBytes(d, h.Bytes()[:(count+10)*es], count+10)
		require.NoError(tb, err)
		for k := range count + 10 {
			f := rng.NormFloat64() * math.Ldexp(1, rng.IntN(20))
			switch {
			case d == tensor.Bool:
				f = float64(rng.IntN(2))
			case !d.IsFloat():
				f = float64(rng.IntN(50))
			}
			require.NoError(tb, all.SetFloat64(f, k))
		}
		whole, err := tensor.OnDevice(d, cuda.OnStream(m, s), count+10)
		require.NoError(tb, err)
		t, err := whole.Slice(0, 7, 7+count) // the rest stays as it is (F-02)
		require.NoError(tb, err)
		x.streams, x.bufs, x.ts = append(x.streams, s), append(x.bufs, m), append(x.ts, t)
		x.before, x.after = append(x.before, h), append(x.after, out)
	}
	return x
}

// produce is what the callers' streams do before, consume what they do after.
func (x *locals) produce() error {
	for i, s := range x.streams {
		if err := x.delays[i].hold(s, 1_000_000); err != nil {
			return err
		}
		if err := s.Copy(x.bufs[i].Ptr(), x.before[i].Ptr(), x.bufs[i].Len()); err != nil {
			return err
		}
	}
	return nil
}

func (x *locals) consume() (wait func() error, err error) {
	var events []driver.Event
	for i, s := range x.streams {
		n := x.bufs[i].Len()
		if err := s.Copy(x.after[i].Ptr(), x.bufs[i].Ptr(), n); err != nil {
			return nil, err
		}
		if err := s.Memset(x.bufs[i].Ptr(), 0xee, n); err != nil {
			return nil, err
		}
		e, err := s.Record()
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return func() error {
		var errs []error
		for _, e := range events {
			errs = append(errs, e.Sync(x.ctx))
			e.Release()
		}
		for _, h := range x.after {
			driver.HostAccess(x.d, "comparing", driver.Reads(h.Ptr(), h.Len()))
		}
		return errors.Join(errs...)
	}, nil
}

// part returns the bytes of tensor i in its storage's copy.
func (x *locals) part(h driver.HostMemory, i int) []byte {
	es := x.ts[i].DType().Size()
	return h.Bytes()[7*es:][:x.ts[i].ByteLen()]
}

// differs says where tensors, or what is around them, are not as wanted; nil
// stands for what a tensor began with.
func (x *locals) differs(want func(i int) []byte) error {
	for i := range x.ts {
		w := bytes.Clone(x.before[i].Bytes()[:x.bufs[i].Len()])
		if p := want(i); p != nil {
			copy(w[7*x.ts[i].DType().Size():], p)
		}
		d := x.ts[i].DType()
		if err := same(quietNaNs(d, x.after[i].Bytes()[:len(w)]), quietNaNs(d, w)); err != nil {
			return fmt.Errorf("tensor %d of %d: %w", i, len(x.ts), err)
		}
	}
	return nil
}

// quietNaNs returns a copy of b in which all NaNs are alike: those of a device have other payloads than
// those of a CPU.
func quietNaNs(d tensor.DType, b []byte) []byte {
	b = bytes.Clone(b)
	if !d.IsFloat() {
		return b
	}
	n := len(b) / d.Size()
	t, err := tensor.FromBytes(d, b[:n*d.Size()], n)
	if err != nil {
		panic(err)
	}
	for k := range n {
		if v, err := t.Float64At(k); err != nil {
			panic(err)
		} else if math.IsNaN(v) {
			if err := t.SetFloat64(math.NaN(), k); err != nil {
				panic(err)
			}
		}
	}
	return b
}

// combined returns the pairwise result.
func (x *locals) combined(op backend.ReduceOp) []byte {
	red, err := op.Reduction(x.ts[0].DType(), len(x.ts))
	require.NoError(x, err)
	var parts [][]byte
	for i := range x.ts {
		p := bytes.Clone(x.part(x.before[i], i))
		if red.Before != nil {
			red.Before(p)
		}
		parts = append(parts, p)
	}
	for len(parts) > 1 {
		var next [][]byte
		for i := 0; i < len(parts); i += 2 {
			if i+1 < len(parts) {
				red.Combine(parts[i], parts[i+1])
			}
			next = append(next, parts[i])
		}
		parts = next
	}
	if red.After != nil {
		red.After(parts[0])
	}
	return parts[0]
}

func (x *locals) end() error { return errors.Join(x.free(), x.d.Close()) }

// free is end for who goes on with the driver.
func (x *locals) free() error {
	err := x.l.Close()
	for _, c := range x.closers {
		err = errors.Join(err, c.Close())
	}
	return err
}

// call runs an operation and says what each tensor has to be afterwards.
func (x *locals) call(kind string, root int, op backend.ReduceOp) (v *work.Work, want func(i int) []byte, err error) {
	want = func(int) []byte { return x.part(x.before[root], root) }
	switch kind {
	case "broadcast":
		v, err = x.l.Broadcast(x.ctx, x.ts, root)
	case "from":
		src, e := tensor.New(x.ts[0].DType(), x.ts[0].Len())
		if e != nil {
			return nil, nil, e
		}
		biggest := x.combined(backend.Max())
		if e := src.Unpack(biggest); e != nil {
			return nil, nil, e
		}
		v, err = x.l.BroadcastFrom(x.ctx, src, x.ts, root)
		clear(src.Bytes())
		want = func(int) []byte { return biggest }
	case "reduce":
		v, err = x.l.Reduce(x.ctx, x.ts, root, op)
		want = func(i int) []byte {
			if i != root {
				return nil
			}
			return x.combined(op)
		}
	case "to":
		dst, e := tensor.New(x.ts[0].DType(), x.ts[0].Len())
		if e != nil {
			return nil, nil, e
		}
		if v, err = x.l.ReduceTo(x.ctx, dst, x.ts, op); err == nil {
			x.wants = func() error { return same(quietNaNs(dst.DType(), dst.Bytes()), quietNaNs(dst.DType(), x.combined(op))) }
		}
		want = func(int) []byte { return nil }
	case "all-reduce":
		v, err = x.l.AllReduce(x.ctx, x.ts, op)
		want = func(int) []byte { return x.combined(op) }
	}
	return v, want, err
}

// localProgram is an operation with what callers' streams do before and after. It
// returns what it noticed itself.
func localProgram(kind string, root int, op backend.ReduceOp) func(x *locals) error {
	return func(x *locals) error {
		if err := x.produce(); err != nil {
			return err
		}
		v, want, err := x.call(kind, root, op)
		if err != nil {
			return err
		}
		wait, err := x.consume()
		if err != nil {
			return errors.Join(err, v.Wait(x.ctx))
		}
		err = errors.Join(wait(), v.Wait(x.ctx))
		if err != nil {
			return err
		}
		if kind == "to" {
			return errors.Join(x.wants(), x.differs(want))
		}
		return x.differs(want)
	}
}

// TestLocal does every operation on 1 to 17 tensors with any root, on devices
// that they share and not (F-01 to F-05, T2, T5).
func TestLocal(t *testing.T) {
	counts := []int{0, 1, 255}
	dtypes := []tensor.DType{tensor.Float32, tensor.Int64, tensor.BFloat16, tensor.Uint8}
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		for _, kind := range []string{"broadcast", "from", "reduce", "all-reduce"} {
			n := 1 + int(seed*4+uint64(rng.IntN(4)))%17
			d := dtypes[rng.IntN(len(dtypes))]
			ops := append(kernelOps[:len(kernelOps):len(kernelOps)], backend.PreMulSum(2))
			if d.IsFloat() {
				ops = append(ops, backend.Avg())
			} else {
				ops[len(ops)-1] = backend.BXor()
			}
			root, op, with := rng.IntN(n), ops[rng.IntN(len(ops))], rng.IntN(2) == 0
			x := newLocals(t, sim.Config{Devices: 1 + rng.IntN(n), Seed: seed, Semantics: s}, with, n, d, counts[rng.IntN(len(counts))], rng)
			copies, launches := 0, 0
			x.m.Skip(func(c sim.Call) bool {
				if strings.HasPrefix(c.Stream, "local") && c.Name == "Copy" {
					copies++
				}
				if c.Name == "Launch" {
					launches++
				}
				return false
			})
			require.NoError(t, localProgram(kind, root, op)(x), "%s of %d, root %d, %v, kernels %v", kind, n, root, op, with)
			if kind == "broadcast" && x.ts[0].Len() > 0 {
				require.Equal(t, n-1, copies)
			}
			red, err := op.Reduction(d, n)
			require.NoError(t, err)
			with = with && kernels.Step(op.Kind(), d) != "" && red.Before == nil && red.After == nil
			if with && strings.HasSuffix(kind, "reduce") && x.ts[0].Len() > 0 {
				require.Equal(t, n-1, launches)
			} else {
				require.Zero(t, launches)
			}
			require.NoError(t, x.end(), "%s of %d, root %d", kind, n, root)
		}
	})
}

// TestLocalRoots broadcasts and reduces with every root of every number of
// tensors, which need not be a power of two.
func TestLocalRoots(t *testing.T) {
	for n := 1; n <= 9; n++ {
		for root := range n {
			for _, kind := range []string{"broadcast", "reduce"} {
				x := newLocals(t, sim.Config{Devices: n, Seed: uint64(n*root + 1)}, true, n, tensor.Int32, 10, random(t, 1))
				require.NoError(t, localProgram(kind, root, backend.Sum())(x), "%s of %d, root %d", kind, n, root)
				require.NoError(t, x.end(), "%s of %d, root %d", kind, n, root)
			}
		}
	}
}

// TestT03T04Local leaves out each record and wait of the operations; somebody
// has to notice every one (T3, T4).
func TestT03T04Local(t *testing.T) {
	for _, c := range []struct {
		kind    string
		n, root int
		kernels bool
		names   []string
	}{
		{"broadcast", 2, 1, true, []string{"Record", "Wait"}},
		{"broadcast", 5, 2, true, []string{"Record", "Wait"}},
		{"reduce", 4, 3, true, []string{"Record", "Wait"}},
		{"all-reduce", 3, 0, true, []string{"Record", "Wait"}},
		{"all-reduce", 2, 0, false, []string{"Record", "Wait", "WaitValue"}},
	} {
		cfg := sim.Config{Devices: c.n, Seed: 1, Quiet: true}
		run := func(seed uint64, skip func(sim.Call) bool) error {
			cfg.Seed = seed
			x := newLocals(t, cfg, c.kernels, c.n, tensor.Int32, 50, random(t, 2))
			x.m.Skip(skip)
			err := localProgram(c.kind, c.root, backend.Sum())(x)
			return errors.Join(err, x.end())
		}
		var calls []sim.Call
		require.NoError(t, run(1, func(c sim.Call) bool {
			calls = append(calls, c)
			return false
		}))
		tried := map[string]int{}
		for _, m := range calls {
			// The last record of a caller's stream is the test's own.
			if !slices.Contains(c.names, m.Name) || m.Name == "Record" && strings.HasPrefix(m.Stream, "caller") && m.K > 0 {
				continue
			}
			tried[m.Name]++
			var err error
			for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
				err = run(seed, func(o sim.Call) bool { return o.Stream == m.Stream && o.Name == m.Name && o.K == m.K })
			}
			require.Error(t, err, "%s of %d: nobody noticed that %v, number %d of them there, was left out", c.kind, c.n, m, m.K)
		}
		for _, name := range c.names {
			require.NotZero(t, tried[name], "%s: %s", c.kind, name)
		}
		t.Logf("%s of %d, kernels %v: left out, each of them missed: %v", c.kind, c.n, c.kernels, tried)
	}
}

// TestT07Local lets each call to the driver fail in turn: there is one error,
// nothing is left, and the next operation works (T7).
func TestT07Local(t *testing.T) {
	injected := errors.New("injected")
	for _, c := range []struct {
		kind    string
		kernels bool
	}{{"broadcast", false}, {"from", false}, {"reduce", true}, {"all-reduce", true}, {"all-reduce", false}} {
		for k := 0; ; k++ {
			x := newLocals(t, sim.Config{Devices: 3, Seed: uint64(k), Quiet: true}, c.kernels, 3, tensor.Int32, 20, random(t, 3))
			require.NoError(t, x.produce())
			n, failed := 0, ""
			x.m.Inject(func(c sim.Call) error {
				if strings.HasPrefix(c.Stream, "caller") {
					return nil
				}
				n++
				if n-1 != k {
					return nil
				}
				failed = c.String()
				return injected
			})
			v, _, err := x.call(c.kind, 2, backend.Sum())
			if err == nil {
				err = v.Wait(x.ctx)
			}
			x.m.Inject(nil)
			if failed == "" {
				require.NoError(t, err)
				require.NoError(t, x.end())
				require.Greater(t, k, 10)
				break
			}
			if err == nil {
				// No kernels: the host combines.
				require.Regexp(t, "Device|Load|Function", failed)
				require.True(t, c.kernels)
			} else {
				require.ErrorIs(t, err, injected, failed)
				var e *work.Error
				require.ErrorAs(t, err, &e, failed)
			}
			require.NoError(t, x.m.Settle(x.ctx), failed)
			require.NoError(t, localProgram(c.kind, 2, backend.Sum())(x), "after %s", failed)
			err = x.end()
			var leak *sim.Leak
			require.False(t, errors.As(err, &leak), "%s: %v", failed, err)
			for _, f := range x.m.Findings() {
				var unused *sim.Unused
				var race *sim.Race
				require.True(t, errors.As(f, &unused) || errors.As(f, &race), "%s: %v", failed, f)
			}
		}
	}
}

// TestLocalAfterFailure has an operation fail half-way, and the next one use what the first was writing.
func TestLocalAfterFailure(t *testing.T) {
	injected := errors.New("injected")
	for seed := range uint64(10) {
		x := newLocals(t, sim.Config{Devices: 4, Seed: seed}, false, 4, tensor.Int32, 20, random(t, seed))
		n := 0
		x.m.Inject(func(c sim.Call) error {
			if c.Name != "Copy" || strings.HasPrefix(c.Stream, "caller") {
				return nil
			}
			if n++; n == 2 { // from 0 to 2, from 0 to 1, from 2 to 3
				return injected
			}
			return nil
		})
		v, err := x.l.Broadcast(x.ctx, x.ts, 0)
		require.NoError(t, err)
		x.m.Inject(nil)
		u, err := x.l.Broadcast(x.ctx, x.ts[2:], 0)
		require.NoError(t, err)
		require.ErrorIs(t, v.Wait(x.ctx), injected)
		require.NoError(t, u.Wait(x.ctx))
		require.NoError(t, x.m.Settle(x.ctx))
		_ = x.end()
		for _, f := range x.m.Findings() {
			var race *sim.Race
			require.False(t, errors.As(f, &race), "%v", f)
		}
	}
}

// TestLocalDoesNotBlock calls while a caller's stream cannot go on, and lets an
// operation run out of time.
func TestLocalDoesNotBlock(t *testing.T) {
	for _, kind := range []string{"broadcast", "all-reduce"} {
		x := newLocals(t, sim.Config{Devices: 3}, false, 3, tensor.Int32, 20, random(t, 4))
		gate, err := x.d.AllocHost(4)
		require.NoError(t, err)
		gate.Store32(0, 0)
		require.NoError(t, x.streams[1].WaitValue(gate.Ptr(), 1, driver.Equal))
		require.NoError(t, x.produce())
		var v *work.Work
		if kind == "broadcast" {
			v, err = x.l.Broadcast(x.ctx, x.ts, 1)
		} else {
			v, err = x.l.AllReduce(x.ctx, x.ts, backend.Sum())
		}
		require.NoError(t, err)
		wait, err := x.consume()
		require.NoError(t, err)
		require.False(t, v.IsCompleted())
		gate.Store32(0, 1)
		require.NoError(t, wait())
		require.NoError(t, v.Wait(x.ctx))
		if kind == "broadcast" {
			require.NoError(t, x.differs(func(int) []byte { return x.part(x.before[1], 1) }))
		}

		// The context ends first: the Work does too, and what it holds stays until
		// the streams have gone on.
		gate.Store32(0, 0)
		require.NoError(t, x.streams[1].WaitValue(gate.Ptr(), 1, driver.Equal))
		ctx, cancel := context.WithTimeout(x.ctx, 20*time.Millisecond)
		if kind == "broadcast" {
			v, err = x.l.Broadcast(ctx, x.ts, 1)
		} else {
			v, err = x.l.AllReduce(ctx, x.ts, backend.Sum())
		}
		require.NoError(t, err)
		err = v.Wait(x.ctx)
		cancel()
		require.ErrorIs(t, err, work.ErrTimeout)
		require.ErrorContains(t, err, "seq 1")
		gate.Store32(0, 1)
		require.NoError(t, x.l.Close())
		require.NoError(t, gate.Close())
		require.NoError(t, x.end())
		_, err = x.l.Broadcast(x.ctx, x.ts, 0)
		require.Error(t, err)
	}
}

// TestLocalRefused holds that wrong calls do nothing.
func TestLocalRefused(t *testing.T) {
	x := newLocals(t, sim.Config{Devices: 2}, true, 2, tensor.Float32, 10, random(t, 5))
	cpu, err := tensor.New(tensor.Float32, 10)
	require.NoError(t, err)
	short, err := x.ts[1].Slice(0, 0, 9)
	require.NoError(t, err)
	gaps, err := x.ts[1].AsStrided([]int{5}, []int{2}, 0)
	require.NoError(t, err)
	overlap, err := x.ts[0].AsStrided([]int{10}, []int{1}, 2)
	require.NoError(t, err)
	l := func(ts ...*tensor.Tensor) []*tensor.Tensor { return ts }
	for name, ts := range map[string][]*tensor.Tensor{
		"none": nil, "nil": l(nil), "CPU": l(cpu), "sizes": l(x.ts[0], short), "gaps": l(gaps), "shared": l(x.ts[0], overlap),
	} {
		_, err := x.l.AllReduce(x.ctx, ts, backend.Sum())
		require.ErrorIs(t, err, backend.ErrInvalidArgument, name)
		_, err = x.l.Broadcast(x.ctx, ts, 0)
		require.ErrorIs(t, err, backend.ErrInvalidArgument, name)
	}
	_, err = x.l.Reduce(x.ctx, x.ts, 2, backend.Sum())
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	_, err = x.l.Reduce(x.ctx, x.ts, 0, backend.BAnd())
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	_, err = x.l.BroadcastFrom(x.ctx, x.ts[0], x.ts, 0)
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	_, err = x.l.BroadcastFrom(x.ctx, nil, x.ts, 0)
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	ctx, cancel := context.WithCancel(x.ctx)
	cancel()
	_, err = x.l.Broadcast(ctx, x.ts, 0)
	require.ErrorIs(t, err, work.ErrCanceled)
	require.NoError(t, localProgram("all-reduce", 0, backend.Sum())(x))
	require.NoError(t, x.end())
	_, err = cuda.NewLocal(x.d, cuda.LocalOptions{Scratch: -1})
	require.ErrorContains(t, err, "Scratch")
	_, err = cuda.NewLocal(x.d, cuda.LocalOptions{Pinned: -1})
	require.ErrorContains(t, err, "Pinned")
}
