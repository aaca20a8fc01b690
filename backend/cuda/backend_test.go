package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestChunksHaveTheBitsOfTheWhole adds floats on the native wire, in chunks and
// not, in tensors whose sums depend on the order.
func TestChunksHaveTheBitsOfTheWhole(t *testing.T) {
	const n, size = 5000, 3
	sum := func(chunk int) []byte {
		w := newWorld(t, setup{size: size, native: true, timeout: patience, sim: sim.Config{NoDelays: true}, options: cuda.Options{Chunk: chunk, Slots: 3}})
		results := make([][]byte, size)
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(9, uint64(r)))
			h := must.Get(x.d.AllocHost(4 * n))
			x.close = append(x.close, h)
			all := must.Get(tensor.FromBytes(tensor.Float32, h.Bytes()[:4*n], n))
			v := must.Get(tensor.Data[float32](all))
			driver.HostAccess(x.d, "filling", driver.Writes(h.Ptr(), 4*n))
			for i := range v {
				v[i] = float32(math.Ldexp(rng.NormFloat64(), rng.IntN(30)))
			}
			dev := must.Get(x.d.Device(0))
			m := must.Get(dev.Alloc(4 * n))
			x.close = append(x.close, m)
			must.Do(x.stream[0].Copy(m.Ptr(), h.Ptr(), 4*n))
			d := must.Get(tensor.OnDevice(tensor.Float32, m, n))
			k := must.Get(x.run(d))
			must.Do(k.Synchronize(x.stream[0]))
			must.Do(x.stream[0].Copy(h.Ptr(), m.Ptr(), 4*n))
			e := must.Get(x.stream[0].Record())
			defer e.Release()
			must.Do(e.Sync(x.ctx))
			driver.HostAccess(x.d, "reading", driver.Reads(h.Ptr(), 4*n))
			results[r] = bytes.Clone(h.Bytes()[:4*n])
			return nil
		})
		w.end()
		for _, other := range results[1:] {
			require.Equal(t, results[0], other)
		}
		return results[0]
	}
	whole := sum(1 << 20)
	for _, chunk := range []int{64, 1000, 4096} {
		require.Equal(t, whole, sum(chunk), "chunks of %d bytes", chunk)
	}
}

// TestT09SteadyState holds that operations make neither streams nor memory once
// those before them have, and leave no event behind (T9, R11).
func TestT09SteadyState(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 2, NoDelays: true}, options: cuda.Options{Chunk: 256}})
	var before sim.Stats
	for round := range 2 {
		w.each(func(x *rank, r int) error {
			for range 12 {
				for i := range x.stream {
					b := must.Get(x.kept(r, i))
					must.Get(x.run(b))
					if r == 0 {
						v, err := x.b.Send(x.ctx, b, 1, backend.P2POptions{})
						must.Do(errors.Join(err, v.Wait(x.ctx)))
						continue
					}
					v, err := x.b.Recv(x.ctx, b, 0, backend.P2POptions{})
					must.Do(errors.Join(err, v.Wait(x.ctx)))
				}
			}
			return nil
		})
		s := w.m.Stats()
		if round == 1 {
			require.Equal(t, before.MadeHosts, s.MadeHosts)
			require.Equal(t, before.MadeStreams, s.MadeStreams)
			require.Equal(t, before.HostBytes, s.HostBytes)
			require.LessOrEqual(t, s.Events, before.Events+8)
		}
		before = s
	}
	for _, x := range w.ranks {
		x.tensors = nil
	}
	w.end()
}

// kept returns one tensor for each device, made on the first call.
func (x *rank) kept(r, device int) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	for len(x.tensors) <= device {
		v := must.Get(x.d.Device(len(x.tensors)))
		m := must.Get(v.Alloc(4000))
		x.close = append(x.close, m)
		must.Do(x.stream[len(x.tensors)].Memset(m.Ptr(), 0, 4000))
		d := must.Get(tensor.OnDevice(tensor.Float32, cuda.OnStream(m, x.stream[len(x.tensors)]), 1000))
		x.tensors = append(x.tensors, d)
	}
	return x.tensors[device], nil
}

// TestMessages lets messages and collectives pass each other: neither a receive
// nor a send holds up what was called after it, and messages of one tag arrive
// in order (F-17).
func TestMessages(t *testing.T) {
	eachSeed(t, 5, func(t *testing.T, seed uint64, s sim.Semantics) {
		const messages = 8
		w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1, Seed: seed, Semantics: s}, options: cuda.Options{Chunk: 64, Slots: 1}})
		w.each(func(x *rank, r int) error {
			var works []*work.Work
			issue := func(v *work.Work, err error) error {
				works = append(works, v)
				return err
			}
			v := must.Get(x.d.Device(0))
			ctx := cuda.WithStreams(x.ctx, x.stream[0])
			parts := make([]*tensor.Tensor, messages)
			m := must.Get(v.Alloc(16 * messages))
			x.close = append(x.close, m)
			whole := must.Get(tensor.OnDevice(tensor.Uint8, m, messages, 16))
			for i := range parts {
				parts[i] = must.Get(whole.Select(0, i))
				must.Do(x.stream[0].Memset(m.Ptr()+driver.Ptr(16*i), byte(100*r+i), 16))
			}
			bucket := must.Get(x.kept(r, 0))
			reduce := func() error {
				return issue(x.b.AllReduce(ctx, []*tensor.Tensor{bucket}, backend.AllReduceOptions{}))
			}
			send := func() error {
				for i := range messages {
					if err := issue(x.b.Send(ctx, parts[i], 1, backend.P2POptions{Tag: uint32(i % 2)})); err != nil {
						return err
					}
				}
				return nil
			}
			recv := func() error {
				for i := range messages {
					f := func() (*work.Work, error) { return x.b.Recv(ctx, parts[i], 0, backend.P2POptions{Tag: 0}) }
					if i%2 == 1 {
						f = func() (*work.Work, error) { return x.b.RecvAnySource(ctx, parts[i], backend.P2POptions{Tag: 1}) }
					}
					if err := issue(f()); err != nil {
						return err
					}
				}
				return nil
			}
			// Rank 1 receives before the all-reduce, rank 0 sends after it has ended; and
			// the other way round.
			steps := []func() error{recv, reduce}
			if r == 0 {
				steps = []func() error{reduce, func() error { return works[0].Wait(x.ctx) }, send}
			}
			for _, f := range steps {
				must.Do(f())
			}
			must.Do(work.WaitAll(x.ctx, works...))
			if r == 0 {
				return nil
			}
			for _, v := range works[:messages] {
				if from, err := v.SourceRank(); err != nil || from != 0 {
					return fmt.Errorf("from rank %d: %w", from, err)
				}
			}
			h := must.Get(x.d.AllocHost(16 * messages))
			x.close = append(x.close, h)
			must.Do(x.stream[0].Copy(h.Ptr(), m.Ptr(), 16*messages))
			e := must.Get(x.stream[0].Record())
			defer e.Release()
			must.Do(e.Sync(x.ctx))
			driver.HostAccess(x.d, "reading", driver.Reads(h.Ptr(), 16*messages))
			for i := range messages {
				if h.Bytes()[16*i] != byte(i) {
					return fmt.Errorf("message %d has byte %d", i, h.Bytes()[16*i])
				}
			}
			return nil
		})
		w.end()
	})
}

// TestBarriers meets after a caller's slow stream, and names who does not come.
func TestBarriers(t *testing.T) {
	w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 1}})
	w.each(func(x *rank, r int) error {
		b := must.Get(x.bucket(r))
		must.Do(x.fill(r, b))
		v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
		k := must.Get(x.b.Barrier(x.ctx, backend.BarrierOptions{}))
		// A barrier has no tensors; a stream after it is one after its end.
		must.Do(k.Synchronize(x.caller(r)))
		if !v.IsCompleted() {
			return errors.New("the barrier ended before an earlier operation")
		}
		return x.b.MonitoredBarrier(x.ctx, backend.MonitoredBarrierOptions{})
	})
	require.EqualValues(t, 3, w.ranks[0].b.Seq())
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		if r == 2 {
			return nil
		}
		x.b.SetTimeout(200e6)
		return x.b.MonitoredBarrier(x.ctx, backend.MonitoredBarrierOptions{})
	})
	require.ErrorContains(t, errs[0], "2")
	require.Error(t, errs[1])
	w.drop(t)
}

// other is what the all-reduce work of that name, somebody else's, has done.
var (
	otherCalls  int
	errUnusable = errors.New("the test has not begun")
)

// registerOther makes the work known; a table has no way to take it back.
var registerOther = sync.OnceFunc(func() {
	cuda.RegisterTestWork("other", 5, cuda.TestWork{
		Usable: func() error { return errUnusable },
		Run: func(ctx context.Context, cpu backend.Backend) error {
			otherCalls++
			mine := must.Get(tensor.Of([]byte{byte(cpu.Rank()), 1}, 2))
			all := must.Get(tensor.New(tensor.Uint8, 2*cpu.Size()))
			if err := must.Get(cpu.AllGatherIntoTensor(ctx, all, mine, backend.AllGatherOptions{})).Wait(ctx); err != nil {
				return err
			}
			if !bytes.Equal(all.Bytes(), []byte{0, 1}) {
				return fmt.Errorf("%v", all.Bytes())
			}
			return nil
		},
		Order: func(work.Stream) error { return errors.New("other's own") },
	})
})

// TestF19Choice takes the best work that is usable, the one that is asked for, and
// says so (F-19).
func TestF19Choice(t *testing.T) {
	registerOther()
	otherCalls = 0
	defer func() { errUnusable = errors.New("the test has ended") }()
	choice := func(w *world) backend.Choice {
		e := w.ranks[0].b.Explain()
		require.Equal(t, "cuda", e.Backend)
		require.Contains(t, e.String(), "all_to_all")
		require.Equal(t, "all_reduce", e.Choices[0].Op)
		return e.Choices[0]
	}
	one := setup{size: 1, sim: sim.Config{Devices: 1}}

	errUnusable = errors.New("no peers")
	w := newWorld(t, one)
	c := choice(w)
	require.Equal(t, cuda.HostWork, c.Algorithm)
	require.Contains(t, c.Why, "not other: no peers")
	b := must.Get(w.ranks[0].bucket(0))
	require.NoError(t, w.ranks[0].fill(0, b))
	must.Get(w.ranks[0].run(b.t))
	require.Zero(t, otherCalls)

	errUnusable = nil
	require.Equal(t, "other", choice(w).Algorithm)
	v, err := w.ranks[0].run(b.t)
	require.NoError(t, err)
	require.ErrorContains(t, v.Synchronize(w.ranks[0].stream[0]), "other's own")
	require.Equal(t, 1, otherCalls)
	w.end()

	forced := one
	forced.options.AllReduce = cuda.HostWork
	w = newWorld(t, forced)
	c = choice(w)
	require.Equal(t, cuda.HostWork, c.Algorithm)
	require.Contains(t, c.Why, "asks for it")
	b = must.Get(w.ranks[0].bucket(0))
	require.NoError(t, w.ranks[0].fill(0, b))
	must.Get(w.ranks[0].run(b.t))
	require.Equal(t, 1, otherCalls)
	w.end()

	forced.options.AllReduce = "other"
	errUnusable = errors.New("no peers")
	w = newWorld(t, forced)
	require.Equal(t, "none", choice(w).Algorithm)
	b = must.Get(w.ranks[0].bucket(0))
	require.ErrorContains(t, must.Err(w.ranks[0].run(b.t)), "no peers")
	w.end()
}

// TestOptions refuses what cannot be.
func TestOptions(t *testing.T) {
	reg, ok := backend.Lookup(cuda.Name)
	require.True(t, ok)
	for name, specific := range map[string]backend.SpecificOptions{
		"want cuda.Options": gloo.Options{}, "Chunk": cuda.Options{Chunk: -1}, "Slots": cuda.Options{Slots: -1}, "Pinned": cuda.Options{Pinned: -1}, "Scratch": cuda.Options{Scratch: -1},
		"no all-reduce work": cuda.Options{AllReduce: "magic"}, "not registered": cuda.Options{CPU: "mpi"}, "does not serve": cuda.Options{CPU: "cuda"},
		`for backend "gloo", and Options.CPU is "mpi"`: cuda.Options{CPU: "mpi", CPUOptions: gloo.Options{}},
	} {
		_, err := reg.New(t.Context(), backend.Options{Size: 1, Specific: specific})
		require.ErrorContains(t, err, name)
		require.True(t, strings.HasPrefix(err.Error(), "cuda: "), "%v", err)
	}
	// Ranks that would cut differently do not begin.
	m, err := sim.New(sim.Config{})
	require.NoError(t, err)
	w := &world{TB: t, ctx: t.Context(), ranks: make([]*rank, 2)}
	st := store.NewHash()
	defer st.Close()
	for _, err := range runEach(w, func(_ *rank, r int, _ chan struct{}) error {
		d, err := m.Process(fmt.Sprint(r))
		require.NoError(t, err)
		_, err = reg.New(t.Context(), backend.Options{
			Store: st, Rank: r, Size: 2, Timeout: patience, Specific: cuda.Options{Driver: d, Chunk: 100 + r},
		})
		return err
	}) {
		require.ErrorContains(t, err, "Options.Chunk")
	}
	require.NoError(t, m.Close())
}

// TestNoDevice runs where there is no GPU: the group can be made, and says why
// tensors cannot be served.
func TestNoDevice(t *testing.T) {
	_, missing := cuda.Default()
	if missing == nil {
		t.Skip("this machine has GPUs")
	}
	require.ErrorIs(t, missing, driver.ErrNoDevice)
	b := must.Get(cuda.New(t.Context(), backend.Options{Size: 1, Timeout: patience}))
	require.NoError(t, must.Get(b.Barrier(t.Context(), backend.BarrierOptions{})).Wait(t.Context()))
	far, err := tensor.OnDevice(tensor.Float32, elsewhere{0}, 4)
	require.NoError(t, err)
	_, err = b.AllReduce(t.Context(), []*tensor.Tensor{far}, backend.AllReduceOptions{})
	require.ErrorIs(t, err, backend.ErrInvalidArgument)
	require.ErrorContains(t, err, missing.Error())
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
}

// TestNewAlone: a rank whose group cannot be made gets an error, and has freed everything.
func TestNewAlone(t *testing.T) {
	d, err := sim.Open(sim.Config{Devices: 1})
	require.NoError(t, err)
	st := store.NewHash()
	defer st.Close()
	_, err = cuda.New(t.Context(), backend.Options{Store: st, Rank: 0, Size: 2, Timeout: time.Second, Group: "g", Specific: cuda.Options{Driver: d}})
	require.ErrorContains(t, err, "rank 1")
	require.NoError(t, d.Close())
}
