package direct_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
)

// Tests on simulated devices. Their kernels have the outcome of the real ones, not their
// protocol: see model_test.go.

// machine is a simulated host with a device for each rank.
func machine(t *testing.T, ranks int, seed uint64) *sim.Machine {
	t.Helper()
	m := must.Get(sim.New(sim.Config{Devices: ranks, Seed: seed, Kernels: simkernels.All()}))
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// drivers returns a driver for each rank: of a process of its own, or of one that all share.
func drivers(t *testing.T, m *sim.Machine, ranks int, apart bool) (all []driver.Driver) {
	t.Helper()
	for r := range ranks {
		if r > 0 && !apart {
			all = append(all, all[0])
			continue
		}
		d := must.Get(m.Process(fmt.Sprint("process ", r)))
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		all = append(all, d)
	}
	return all
}

// virtually is threads on virtual time. It is for kernels that wait for a few milliseconds: on a busy machine the other
// ranks may come later.
func virtually(t *testing.T, u setup, open func(t *testing.T) []driver.Driver, job func(m *member) error) {
	t.Helper()
	region.Passes = false // who waits for other processes keeps virtual time from passing
	defer func() { region.Passes = true }()
	synctest.Test(t, func(t *testing.T) { threads(t, u, open(t), job) })
}

func simulated(ranks int) setup {
	return setup{
		ranks: ranks, most: 3000, rounds: 12,
		window: window.Options{Channels: 3, Depth: 8},
		direct: direct.Straight(direct.Options{Limit: 20 * time.Second}, 1),
	}
}

// TestSimulated holds that calls ask kernels for the right thing, with any number of ranks, in
// one process or in several.
func TestSimulated(t *testing.T) {
	for _, ranks := range []int{2, 3, 4, 8} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d ranks, apart %v", ranks, apart), func(t *testing.T) {
				u := simulated(ranks)
				if ranks == 2 {
					u.most = 60_000 // several pieces
				}
				threads(t, u, drivers(t, machine(t, ranks, uint64(ranks)), ranks, apart), jobs["check"])
			})
		}
	}
}

// TestReadsSimulated is TestReads on simulated devices.
func TestReadsSimulated(t *testing.T) {
	u := simulated(2)
	u.most = 30_000
	for _, apart := range []bool{false, true} {
		threads(t, u, drivers(t, machine(t, 2, 5), 2, apart), jobs["reads"])
	}
}

// TestRootReads has a rank tell the root another address than that of its input. The root reads there.
func TestRootReads(t *testing.T) {
	u := simulated(2)
	const n = 4096 // floats
	threads(t, u, drivers(t, machine(t, 2, 1), 2, true), func(m *member) error {
		mem, host, into, err := m.registered(2 * 4 * n)
		if err != nil {
			return err
		}
		defer mem.Close()
		defer host.Close()
		direct.SetShape(m.c, direct.Shape{Blocks: 1, Threads: 32, Large: true})
		for i := range 2 * n {
			binary.LittleEndian.PutUint32(host.Bytes()[4*i:], math.Float32bits(float32((m.rank+1)*i)))
		}
		must.Do(m.s.Copy(mem.Ptr(), host.Ptr(), mem.Len()))
		// What is told is n numbers behind the input.
		into.At -= 4 * n
		root := 1
		err = m.c.Reduce(m.s, mem.Ptr(), mem.Ptr(), n, tensor.Float32, backend.Sum(), root, direct.Form{Into: into})
		if err = errors.Join(err, m.s.Copy(host.Ptr(), mem.Ptr(), mem.Len()), m.sync()); err != nil {
			return err
		}
		for i := range 2 * n {
			want := float32((m.rank + 1) * i)
			if m.rank == root && i < n {
				want += float32(i + n)
			}
			if got := math.Float32frombits(binary.LittleEndian.Uint32(host.Bytes()[4*i:])); got != want {
				return fmt.Errorf("rank %d: number %d is %v, want %v", m.rank, i, got, want)
			}
		}
		return nil
	})
}

// TestStraight holds that sums, broadcasts and reduces write straight to registered memory. They write only to what is
// given.
func TestStraight(t *testing.T) {
	straight := func(ranks int, apart bool) {
		u := simulated(ranks)
		const n = 4096 // floats
		if !apart {
			u.direct = direct.RootReduces(u.direct, 4*n-1) // the root combines nothing
		}
		threads(t, u, drivers(t, machine(t, ranks, 1), ranks, apart), func(m *member) error {
			mem, host, into, err := m.registered(3 * 4 * n)
			if err != nil {
				return err
			}
			defer mem.Close()
			defer host.Close()
			direct.SetShape(m.c, direct.Shape{Blocks: 1, Threads: 32, Large: true})
			for round := range 12 {
				for i := range 3 * n {
					binary.LittleEndian.PutUint32(host.Bytes()[4*i:], math.Float32bits(float32((m.rank+1)*(i%100+round))))
				}
				at, form := mem.Ptr()+4*n, direct.Form{Blocks: 1, Into: into, TwoShot: m.ranks > 2}
				if (m.rank == 1 || m.ranks == 2) && round/3 == 2 {
					form.Into = direct.Into{} // all go through the rings
				}
				err := m.s.Copy(mem.Ptr(), host.Ptr(), mem.Len())
				op, total := backend.Sum(), float32(m.ranks*(m.ranks+1)/2)
				if round%4 == 0 {
					op, total = backend.Avg(), total/float32(m.ranks)
				}
				mine := total // what this rank has at the end
				switch round % 3 {
				case 0:
					if !m.c.Spreads(n, tensor.Float32, op, form) {
						return fmt.Errorf("the %v does not spread", op)
					}
					if m.c.Spreads(n, tensor.Int32, backend.Sum(), form) {
						return errors.New("int32 spreads, for which there is no kernel")
					}
					err = errors.Join(err, m.c.AllReduce(m.s, at, at, n, tensor.Float32, op, form))
				case 1:
					if !m.c.BroadcastSpreads(4*n, form) {
						return errors.New("the broadcast does not spread")
					}
					mine = 2
					err = errors.Join(err, m.c.Broadcast(m.s, at, 4*n, 1, form))
				default:
					if m.c.ReduceSpreads(n, tensor.Float32, op, 1, form) != ((m.rank == 1) == (m.ranks > 2)) {
						return errors.New("a reduce needs memory of ranks other than the root, or with two ranks of the root")
					}
					if m.rank != 1 {
						mine = float32(m.rank + 1)
					}
					err = errors.Join(err, m.c.Reduce(m.s, at, at, n, tensor.Float32, op, 1, form))
				}
				if err = errors.Join(err, m.s.Copy(host.Ptr(), mem.Ptr(), mem.Len()), m.sync()); err != nil {
					return err
				}
				for i := range 3 * n {
					x := float32(m.rank + 1)
					if i >= n && i < 2*n {
						x = mine
					}
					got, want := math.Float32frombits(binary.LittleEndian.Uint32(host.Bytes()[4*i:])), x*float32(i%100+round)
					if got != want {
						return fmt.Errorf("rank %d, round %d: number %d is %v, want %v", m.rank, round, i, got, want)
					}
				}
			}
			return nil
		})
	}
	for _, ranks := range []int{2, 3, 4} {
		straight(ranks, false)
		straight(ranks, true)
	}
}

// registered returns memory of n bytes that the ranks map, and as much of the host.
func (m *member) registered(n int) (mem driver.Memory, host driver.HostMemory, into direct.Into, err error) {
	if mem, err = m.v.Alloc(n); err != nil {
		return nil, nil, into, err
	}
	if host, err = m.d.AllocHost(n); err == nil {
		into, err = m.into(mem)
	}
	return mem, host, into, err
}

// TestReadsFreedSimulated is TestReadsFreed on simulated devices.
func TestReadsFreedSimulated(t *testing.T) {
	u := simulated(2)
	u.most = 30_000
	threads(t, u, drivers(t, machine(t, 2, 1), 2, false), readsFreed)
}

// TestStraightFailed: nobody writes to a rank that has failed, even if it has told where to.
func TestStraightFailed(t *testing.T) {
	u := simulated(2)
	threads(t, u, drivers(t, machine(t, 2, 1), 2, false), func(m *member) error {
		const n = 4096
		mem, host, into, err := m.registered(n)
		if err != nil {
			return err
		}
		defer mem.Close()
		defer host.Close()
		must.Do(errors.Join(m.s.Memset(mem.Ptr(), byte(1+m.rank), n), m.sync(), m.meet()))
		// Rank 0 has failed when rank 1 comes to the call.
		for r := range m.ranks {
			if m.rank == r {
				must.Do(m.c.Broadcast(m.s, mem.Ptr(), n, 1, direct.Form{Into: into}))
				if r == 0 {
					m.w.Abort()
				}
				var f *window.Failure
				if err := m.sync(); !errors.As(err, &f) || f.Rank != r || f.Peer != 1-r || !f.Aborted {
					return fmt.Errorf("rank %d: %w", r, err)
				}
			}
			must.Do(m.meet())
		}
		must.Do(m.w.Reset(m.ctx, m.tell))
		must.Do(errors.Join(m.s.Copy(host.Ptr(), mem.Ptr(), n), m.sync()))
		for i, b := range host.Bytes() {
			if b != byte(1+m.rank) {
				return fmt.Errorf("byte %d of rank %d was written", i, m.rank)
			}
		}
		return nil
	})
}

// TestReplays replays a captured all_reduce, with eager ones of other sizes between.
func TestReplays(t *testing.T) {
	rounds := testsize.Of(50, 100, 1000)
	for _, ranks := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			t.Parallel()
			u := simulated(ranks)
			apart := ranks > 2
			threads(t, u, drivers(t, machine(t, ranks, 5), ranks, apart), func(m *member) error { return replay(m, 300, rounds) })
		})
	}
}

// TestFailure has a rank that waits for one that does not come, and one that is aborted.
func TestFailure(t *testing.T) {
	for _, aborts := range []bool{false, true} {
		u := simulated(2)
		if !aborts {
			u.direct.Limit = 10 * time.Millisecond
		}
		virtually(t, u, func(t *testing.T) []driver.Driver { return drivers(t, machine(t, 2, 1), 2, false) }, func(m *member) error {
			mem := must.Get(m.v.Alloc(1 << 10))
			defer mem.Close()
			must.Do(errors.Join(m.s.Memset(mem.Ptr(), 1, 1<<10), m.sync(), m.meet()))
			sum := func() error {
				return m.c.AllReduce(m.s, mem.Ptr(), mem.Ptr(), 4, tensor.Int64, backend.Sum(), direct.Form{})
			}
			if m.rank != 1 {
				must.Do(sum())
				if aborts {
					m.w.Abort()
				}
				err := m.sync()
				var f *window.Failure
				if !errors.As(err, &f) || f.Rank != m.rank || f.Peer != 1 || f.Aborted != aborts {
					return fmt.Errorf("a wait for rank 1: %w", err)
				}
				if err := sum(); !errors.As(err, &f) {
					return fmt.Errorf("a call after a failure: %w", err)
				}
			}
			must.Do(m.w.Reset(m.ctx, m.tell))
			return errors.Join(sum(), m.sync(), m.meet())
		})
	}
}

// TestUnlike has a rank that sends another length than its peer expects.
func TestUnlike(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		u := simulated(ranks)
		u.direct.Limit = 5 * time.Second
		threads(t, u, drivers(t, machine(t, ranks, 1), ranks, false), func(m *member) error {
			var err error
			mem := must.Get(m.v.Alloc(1 << 10))
			defer mem.Close()
			must.Do(errors.Join(m.s.Memset(mem.Ptr(), 1, 1<<10), m.sync(), m.meet()))
			send, take := make([]direct.Span, ranks), make([]direct.Span, ranks)
			switch m.rank {
			case 0:
				send[1].N = 8
			case 1:
				take[0].N = 16
			}
			must.Do(m.c.AllToAllV(m.s, mem.Ptr(), mem.Ptr()+512, take, send, direct.Form{}))
			err = m.sync()
			var f *window.Failure
			if m.rank == 1 && (!errors.As(err, &f) || !f.Unlike || f.Peer != 0 || !contains(err, "expects another length than is sent by rank 0")) {
				return fmt.Errorf("another length: %w", err)
			}
			must.Do(m.w.Reset(m.ctx, m.tell))
			return errors.Join(m.c.Barrier(m.s), m.sync(), m.meet())
		})
	}
}

// TestBarrier has a barrier to which one rank does not come.
func TestBarrier(t *testing.T) {
	for _, ranks := range []int{2, 4, 8} {
		u := simulated(ranks)
		u.direct.Limit = 20 * time.Millisecond
		virtually(t, u, func(t *testing.T) []driver.Driver { return drivers(t, machine(t, ranks, 1), ranks, false) }, func(m *member) error {
			if last := ranks - 1; m.rank != last {
				err := errors.Join(m.c.Barrier(m.s), m.sync())
				if f := (*window.Failure)(nil); !errors.As(err, &f) || f.Peer != last {
					return fmt.Errorf("a barrier without rank %d: %w", last, err)
				}
			}
			return m.w.Reset(m.ctx, m.tell)
		})
	}
}

// TestMixedReplays replays a graph of 20 operations of all kinds, with eager ones between.
func TestMixedReplays(t *testing.T) {
	for _, ranks := range []int{2, 4, 8} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			t.Parallel()
			u := simulated(ranks)
			threads(t, u, drivers(t, machine(t, ranks, 9), ranks, ranks > 2), func(m *member) error { return replayMixed(m, 20, 30) })
		})
	}
}

// TestNew holds what New refuses.
func TestNew(t *testing.T) {
	m := machine(t, 2, 1)
	u := simulated(2)
	threads(t, u, drivers(t, m, 2, true), func(m *member) error {
		var errs []error
		refused := func(o direct.Options, why string) {
			_, err := direct.New(m.w, o)
			if err == nil || !contains(err, why) {
				errs = append(errs, fmt.Errorf("%+v: %w, want %q", o, err, why))
			}
		}
		refused(direct.Options{Blocks: -1}, "Options.Blocks -1")
		for _, c := range []struct {
			err error
			why string
		}{
			{m.c.AllReduce(m.s, 1, 1, 1, tensor.Bool, backend.Sum(), direct.Form{}), "no kernel for sum of bool"},
			{m.c.AllReduce(m.s, 1, 1, 1, tensor.Float32, backend.BOr(), direct.Form{}), "bor"},
			{m.c.AllReduce(m.s, 0, 1, 1, tensor.Float32, backend.Sum(), direct.Form{}), "all_reduce of 1 elements"},
			{m.c.AllGather(m.s, 1, 1, -1, direct.Form{}), "all_gather of -1"},
		} {
			if c.err == nil || !contains(c.err, c.why) {
				errs = append(errs, fmt.Errorf("%w, want %q", c.err, c.why))
			}
		}
		// Nothing to do is no launch, also with no memory.
		errs = append(errs, m.c.AllReduce(m.s, 0, 0, 0, tensor.Float32, backend.Sum(), direct.Form{}), m.c.Gather(m.s, 0, 0, 0, 0, direct.Form{}))
		return errors.Join(errs...)
	})
	one := must.Get(sim.New(sim.Config{Devices: 1, Kernels: simkernels.All()}))
	defer func() { require.NoError(t, one.Close()) }()
	ds := drivers(t, one, 2, true)
	exchange := exchanges(2)
	errs := make(chan error, 2)
	for r := range 2 {
		go func() { errs <- with(t.Context(), u, ds[r], 0, r, exchange(r), func(*member) error { return nil }) }()
	}
	for range 2 {
		require.ErrorContains(t, <-errs, "ranks 0 and 1 share a device")
	}
}

// TestAllocations holds that a call allocates nothing.
func TestAllocations(t *testing.T) {
	u := simulated(2)
	threads(t, u, drivers(t, machine(t, 2, 1), 2, true), func(m *member) error {
		if m.rank != 0 {
			return m.meet()
		}
		s, spans := &counting{Stream: m.s}, make([]direct.Span, 2)
		n := testing.AllocsPerRun(100, func() {
			err := m.c.AllReduce(s, 1<<20, 1<<20, 100, tensor.Float32, backend.Avg(), direct.Form{})
			if err == nil {
				err = m.c.ReduceScatter(s, 1<<20, 1<<21, 100, tensor.Float32, backend.Sum(), direct.Form{})
			}
			if err == nil {
				err = m.c.AllGather(s, 1<<20, 1<<21, 100, direct.Form{})
			}
			if err == nil {
				err = m.c.AllToAllV(s, 1<<20, 1<<21, spans, spans, direct.Form{})
			}
			if err == nil {
				err = m.c.Broadcast(s, 1<<20, 100, 0, direct.Form{})
			}
			if err != nil {
				panic(err)
			}
		})
		if n > 0 || s.launches != 505 {
			return fmt.Errorf("%v allocations, %d launches", n, s.launches)
		}
		return m.meet()
	})
}

// counting is a stream that only counts launches.
type counting struct {
	driver.Stream
	launches int
}

func (s *counting) Launch(*driver.Launch) error {
	s.launches++
	return nil
}

func contains(err error, text string) bool { return strings.Contains(err.Error(), text) }
