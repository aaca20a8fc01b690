package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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

const elements = 100

// bucket is a tensor of float32 in which the caller's stream puts rank+1 before,
// and which it reads and overwrites afterwards.
type bucket struct {
	t   *tensor.Tensor
	mem driver.Memory
	out driver.HostMemory
}

func (x *rank) bucket(r int) (_ *bucket, err error) {
	defer must.Catch(&err)
	v, err := x.d.Device(r % len(x.stream))
	if err != nil {
		return nil, err
	}
	b := &bucket{}
	b.mem = must.Get(v.Alloc(4 * elements))
	x.close = append(x.close, b.mem)
	b.out = must.Get(x.d.AllocHost(4 * elements))
	x.close = append(x.close, b.out)
	b.t, err = tensor.OnDevice(tensor.Int32, cuda.OnStream(b.mem, x.caller(r)), elements)
	return b, err
}

func (x *rank) caller(r int) driver.Stream { return x.stream[r%len(x.stream)] }

// fill is the caller's work before, use that after.
func (x *rank) fill(r int, b *bucket) error {
	return x.caller(r).Memset(b.mem.Ptr(), byte(r+1), 4*elements)
}

func (x *rank) use(r int, b *bucket) (_ driver.Event, err error) {
	defer must.Catch(&err)
	s := x.caller(r)
	must.Do(s.Copy(b.out.Ptr(), b.mem.Ptr(), 4*elements))
	must.Do(s.Memset(b.mem.Ptr(), 0xee, 4*elements))
	return s.Record()
}

func (x *rank) verify(b *bucket, e driver.Event) error {
	err := e.Sync(x.ctx)
	e.Release()
	if err != nil {
		return err
	}
	sum := 0
	for r := range x.w.ranks {
		sum += r + 1
	}
	driver.HostAccess(x.d, "comparing", driver.Reads(b.out.Ptr(), b.out.Len()))
	if !bytes.Equal(b.out.Bytes(), bytes.Repeat([]byte{byte(sum)}, 4*elements)) {
		return fmt.Errorf("wrong bytes: %x, want each %x", b.out.Bytes()[:16], sum)
	}
	return nil
}

// TestT03T04Mutations leaves out each record and each wait that rank 0 makes for an
// all-reduce in chunks; somebody has to notice every one (T3, T4, T13).
func TestT03T04Mutations(t *testing.T) {
	run := func(w *world) error {
		return errors.Join(runEach(w, func(x *rank, r int, zero chan struct{}) error {
			b := must.Get(x.bucket(r))
			if r != 0 {
				<-zero // so that rank 0's cannot end before it is waited for
			} else {
				defer func() {
					select {
					case <-zero:
					default:
						close(zero)
					}
				}()
			}
			must.Do(x.fill(r, b))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
			must.Do(v.Synchronize(x.caller(r)))
			e := must.Get(x.use(r, b))
			if r == 0 {
				close(zero)
			}
			if err := v.Wait(x.ctx); err != nil {
				e.Release() // the stream may not go on before Close
				return err
			}
			return x.verify(b, e)
		})...)
	}
	for _, c := range []struct {
		slots int
		names []string
	}{
		{1, []string{"Record", "Wait", "WaitValue", "WriteValue"}},
		// A word that is not written comes late, with the next one.
		{2, []string{"Record", "Wait", "WaitValue"}},
	} {
		s := setup{size: 2, sim: sim.Config{Devices: 1}, options: cuda.Options{Chunk: 160, Slots: c.slots}} // 3 chunks
		tried := leaveOut(t, s, without, func(m sim.Call) bool {
			own := strings.HasPrefix(m.Stream, "caller") && m.Name == "Record"
			return strings.Contains(m.Stream, " 0") && slices.Contains(c.names, m.Name) && !own
		}, run)
		require.Len(t, tried, len(c.names))
	}
}

// without runs a program of a world without one call, and returns what anybody
// noticed.
func without(t *testing.T, s setup, m sim.Call, run func(*world) error) error {
	// Streams may wait for what was left out until Close gives up.
	defer cuda.SetCloseLimit(100 * time.Millisecond)()
	defer cuda.KeepRegions()()
	w := newWorld(t, s)
	w.m.Skip(func(o sim.Call) bool { return o.Stream == m.Stream && o.Name == m.Name && o.K == m.K })
	err := run(w)
	w.m.Skip(nil)
	err = errors.Join(err, w.closed())
	require.NoError(t, w.m.Settle(w.ctx), "%v", m)
	for _, x := range w.ranks {
		x.free()
	}
	return errors.Join(err, w.m.Close())
}

// closed closes the groups of all ranks, which may wait for each other.
func (w *world) closed() error {
	return errors.Join(runEach(w, func(x *rank, _ int, _ chan struct{}) error {
		return errors.Join(x.b.Close(), x.cpu.Close())
	})...)
}

// runEach calls f for every rank at the same time; the channel is theirs.
func runEach(w *world, f func(x *rank, r int, c chan struct{}) error) []error {
	errs := make([]error, len(w.ranks))
	c := make(chan struct{})
	var wg sync.WaitGroup
	for r, x := range w.ranks {
		wg.Go(func() {
			defer must.Catch(&errs[r])
			errs[r] = f(x, r, c)
		})
	}
	wg.Wait()
	return errs
}

// TestT07FailedCalls lets each call to the driver that an all-reduce makes fail in
// turn: every rank gets an error or a result, nothing is left, and no stream waits
// for ever (T7).
func TestT07FailedCalls(t *testing.T) {
	for layout, least := range map[string]int{"contiguous": 21, "with holes": 21, "one kernel": 5} {
		t.Run(layout, func(t *testing.T) {
			if layout == "one kernel" {
				aProcessEach(t)
			}
			buckets := make([]*bucket, 2)
			fresh := func(t *testing.T, k int) *world {
				s := setup{
					size: 2, timeout: patience, sim: sim.Config{Devices: 2, Seed: uint64(k), Semantics: sim.Semantics(k % 2), Quiet: true},
					options: cuda.Options{Chunk: 160, Slots: 2},
				}
				if layout == "one kernel" {
					s.sim.Kernels, s.options = simkernels.All(), cuda.Options{AllReduce: cuda.HostWork}
				}
				w := newWorld(t, s)
				w.each(func(x *rank, r int) error {
					if layout == "one kernel" {
						must.Do(x.meetDirectly(r))
					}
					buckets[r] = must.Get(x.bucket(r))
					if layout == "with holes" {
						buckets[r].t = must.Get(buckets[r].t.AsStrided([]int{3, 4}, []int{20, 3}, 1))
					}
					return x.fill(r, buckets[r])
				})
				return w
			}
			failInTurn(t, 1, least, "all_reduce", fresh, nil, func(x *rank, r int) error {
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r].t}, backend.AllReduceOptions{})
				if err == nil {
					if err := v.Synchronize(x.caller(r)); err != nil {
						return errors.Join(err, v.Wait(x.ctx))
					}
				}
				return x.ended(v, err)
			}, func(w *world, failed sim.Call, errs []error) {
				err := errors.Join(errs...)
				if failed.Name == "RegisterHost" {
					require.NoError(t, err, "the host can copy")
				} else {
					require.ErrorIs(t, err, errInjected, "%v", failed)
				}
				// A Close may report the fault of an early release, but leaves nothing.
				for _, x := range w.ranks {
					require.NoError(t, x.b.Close(), failed)
					require.NoError(t, x.cpu.Close())
				}
				require.NoError(t, w.m.Settle(w.ctx), failed)
				for _, x := range w.ranks {
					x.free()
				}
				err = w.m.Close()
				var leak *sim.Leak
				require.False(t, errors.As(err, &leak), "%v: %v", failed, err)
				for _, f := range w.m.Findings() {
					// What was enqueued keeps its order, except in the memory that the ranks share.
					// The streams of the rank that failed no longer wait for the others' hosts,
					// and these may still be combining. They learn from the rank's word in that memory
					// that what they combine is of no use; see TestOverwritten.
					var unused *sim.Unused
					var race *sim.Race
					common := errors.As(f, &race) && strings.Contains(race.First+race.Second, "combining (host") && strings.HasPrefix(race.Memory, "page-locked")
					require.True(t, common || errors.As(f, &unused), "%v: %v", failed, f)
				}
			})
		})
	}
}

// TestRefused holds that wrong calls are refused at once: no byte changes, no
// number is used, and the group goes on.
func TestRefused(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1}})
	ctx := w.ctx
	w.each(func(x *rank, r int) error {
		v := must.Get(x.d.Device(0))
		dev := func(d tensor.DType, dims ...int) *tensor.Tensor {
			n := d.Size()
			for _, k := range dims {
				n *= k
			}
			m := must.Get(v.Alloc(n))
			x.close = append(x.close, m)
			return must.Get(tensor.OnDevice(d, m, dims...))
		}
		l := func(ts ...*tensor.Tensor) []*tensor.Tensor { return ts }
		f, i := dev(tensor.Float32, 4), dev(tensor.Int32, 4)
		f2, f3 := dev(tensor.Float32, 8), dev(tensor.Float32, 3)
		cpu := must.Get(tensor.New(tensor.Float32, 4))
		cpuTwice := must.Get(cpu.AsStrided([]int{4}, []int{0}, 0))
		twice := must.Get(f.AsStrided([]int{4}, []int{0}, 0))
		far := must.Get(tensor.OnDevice(tensor.Float32, elsewhere{7}, 4))
		alien, err := tensor.OnDevice(tensor.Float32, elsewhere{0}, 4)
		require.NoError(t, err)
		b := x.b
		for name, c := range map[string]func() (*work.Work, error){
			"no tensors":          func() (*work.Work, error) { return b.AllReduce(ctx, nil, backend.AllReduceOptions{}) },
			"nil":                 func() (*work.Work, error) { return b.AllReduce(ctx, l(nil), backend.AllReduceOptions{}) },
			"CPU tensor, overlap": func() (*work.Work, error) { return b.Reduce(ctx, cpuTwice, backend.ReduceOptions{}) },
			"CPU tensor, dtype":   func() (*work.Work, error) { return b.AllGather(ctx, l(cpu, i), cpu, backend.AllGatherOptions{}) },
			"dtypes":              func() (*work.Work, error) { return b.AllReduce(ctx, l(f, i), backend.AllReduceOptions{}) },
			"shapes":              func() (*work.Work, error) { return b.AllReduce(ctx, l(f, f2), backend.AllReduceOptions{}) },
			"overlap":             func() (*work.Work, error) { return b.AllReduce(ctx, l(twice), backend.AllReduceOptions{}) },
			"no device":           func() (*work.Work, error) { return b.AllReduce(ctx, l(far), backend.AllReduceOptions{}) },
			"other memory":        func() (*work.Work, error) { return b.AllReduce(ctx, l(alien), backend.AllReduceOptions{}) },
			"operator": func() (*work.Work, error) {
				return b.AllReduce(ctx, l(f), backend.AllReduceOptions{Op: backend.BAnd()})
			},
			"integer mean": func() (*work.Work, error) { return b.AllReduce(ctx, l(i), backend.AllReduceOptions{Op: backend.Avg()}) },
			"coalesced":    func() (*work.Work, error) { return b.AllReduceCoalesced(ctx, l(f, i), backend.AllReduceOptions{}) },
			"coalesced op": func() (*work.Work, error) {
				return b.AllReduceCoalesced(ctx, l(f), backend.AllReduceOptions{Op: backend.BXor()})
			},
			"root":          func() (*work.Work, error) { return b.Broadcast(ctx, l(f), backend.BroadcastOptions{Root: 2}) },
			"root tensor":   func() (*work.Work, error) { return b.Broadcast(ctx, l(f), backend.BroadcastOptions{RootTensor: 1}) },
			"reduce root":   func() (*work.Work, error) { return b.Reduce(ctx, f, backend.ReduceOptions{Root: -1}) },
			"outputs":       func() (*work.Work, error) { return b.AllGather(ctx, l(f), f, backend.AllGatherOptions{}) },
			"output size":   func() (*work.Work, error) { return b.AllGather(ctx, l(f, f2), f, backend.AllGatherOptions{}) },
			"own output":    func() (*work.Work, error) { return b.AllGatherV(ctx, l(f2, f2), f, backend.AllGatherOptions{}) },
			"into":          func() (*work.Work, error) { return b.AllGatherIntoTensor(ctx, f3, f, backend.AllGatherOptions{}) },
			"lists":         func() (*work.Work, error) { return b.AllGatherCoalesced(ctx, nil, l(f), backend.AllGatherOptions{}) },
			"gather":        func() (*work.Work, error) { return b.Gather(ctx, l(f), f, backend.GatherOptions{Root: r}) },
			"gather, other": func() (*work.Work, error) { return b.Gather(ctx, l(f, f), f, backend.GatherOptions{Root: 1 - r}) },
			"scatter":       func() (*work.Work, error) { return b.Scatter(ctx, f, l(f2, f2), backend.ScatterOptions{Root: r}) },
			"parts":         func() (*work.Work, error) { return b.ReduceScatterTensor(ctx, f, f3, backend.ReduceScatterOptions{}) },
			"inputs":        func() (*work.Work, error) { return b.ReduceScatter(ctx, f, l(f2, f2), backend.ReduceScatterOptions{}) },
			"all to all":    func() (*work.Work, error) { return b.AllToAll(ctx, l(f, f), l(f2, f2), backend.AllToAllOptions{}) },
			"splits": func() (*work.Work, error) {
				return b.AllToAllSingle(ctx, f, f, []int{1, 2}, nil, backend.AllToAllOptions{})
			},
			"unequal":     func() (*work.Work, error) { return b.AllToAllSingle(ctx, f3, f3, nil, nil, backend.AllToAllOptions{}) },
			"to itself":   func() (*work.Work, error) { return b.Send(ctx, f, r, backend.P2POptions{}) },
			"from nobody": func() (*work.Work, error) { return b.Recv(ctx, f, 2, backend.P2POptions{}) },
			"no tensor":   func() (*work.Work, error) { return b.RecvAnySource(ctx, nil, backend.P2POptions{}) },
		} {
			_, err := c()
			require.ErrorIs(t, err, backend.ErrInvalidArgument, name)
			require.True(t, strings.HasPrefix(err.Error(), "cuda: "), "%s: %v", name, err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, must.Err(b.AllReduce(ended, l(f), backend.AllReduceOptions{})), work.ErrCanceled)
		require.Zero(t, b.Seq())
		require.NoError(t, x.caller(0).Memset(f.Memory().(driver.Memory).Ptr(), 0, 16))
		return must.Err(x.run(f))
	})
	w.end()
	require.ErrorIs(t, must.Err(w.ranks[0].b.Barrier(ctx, backend.BarrierOptions{})), work.ErrClosed)
}

// elsewhere is memory that no driver knows.
type elsewhere struct{ device int }

func (e elsewhere) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: e.device} }
func (elsewhere) Len() int                { return 16 }

// run all-reduces a tensor that the caller's first stream uses, and waits.
func (x *rank) run(ts ...*tensor.Tensor) (*work.Work, error) {
	v, err := x.b.AllReduce(cuda.WithStreams(x.ctx, x.stream...), ts, backend.AllReduceOptions{})
	if err != nil {
		return v, err
	}
	return v, v.Wait(x.ctx)
}

// failure runs one all-reduce that cannot end well and returns each rank's error.
// Ranks for which start is false are not called.
func (w *world) failure(t *testing.T, start func(r int) bool, cause func(x *rank, r int, v *work.Work)) []error {
	return runEach(w, func(x *rank, r int, _ chan struct{}) error {
		var err error
		if !start(r) {
			return nil
		}
		b := must.Get(x.bucket(r))
		must.Do(x.fill(r, b))
		v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
		cause(x, r, v)
		err = v.Wait(x.ctx)
		if err != nil {
			require.Equal(t, err, v.Err())
			_, again := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
			require.Error(t, again, "the group is of no more use")
			var first, later *work.Error
			if errors.As(err, &first) && errors.As(again, &later) {
				require.Equal(t, first.Peer, later.Peer, "%v", again)
			}
		}
		return err
	})
}

// drop closes everything after a failure. Nothing may be left.
func (w *world) drop(t *testing.T, more ...interface{ Close() error }) {
	require.NoError(t, w.closed())
	require.NoError(t, w.m.Settle(w.ctx))
	for _, c := range more {
		require.NoError(t, c.Close())
	}
	for _, x := range w.ranks {
		x.free()
	}
	var leak *sim.Leak
	var life *sim.Lifetime
	err := w.m.Close()
	require.False(t, errors.As(err, &leak) || errors.As(err, &life), "%v", err)
}

func named(t *testing.T, err error, rank int, seq uint64) {
	t.Helper()
	e := must.As[*work.Error](t, err)
	require.Equal(t, work.Info{Op: work.AllReduce, Seq: seq, Group: "g", Rank: rank}, e.Info)
	for _, s := range []string{"all_reduce", fmt.Sprint("seq ", seq), fmt.Sprint("rank ", rank)} {
		require.ErrorContains(t, err, s)
	}
}

// crowded is a driver whose devices have so many streams and 32 queues.
type crowded struct {
	driver.Driver
	streams int
}

type crowdedDevice struct {
	driver.Device
	streams int
}

func (d crowded) Device(i int) (driver.Device, error) {
	v, err := d.Driver.Device(i)
	return crowdedDevice{v, d.streams}, err
}

func (d crowded) HostAccess(what string, access ...driver.Access) {
	driver.HostAccess(d.Driver, what, access...)
}

func (v crowdedDevice) Queues() (streams, queues int) { return v.streams, 32 }

// TestF20Faults is TestF20Endings for what only the host can see.
func TestF20Faults(t *testing.T) {
	all := func(int) bool { return true }
	some := func(r int) bool { return r != 2 }
	nothing := func(*rank, int, *work.Work) {}
	s := setup{size: 3, timeout: patience, sim: sim.Config{Devices: 2, Quiet: true}, options: cuda.Options{Chunk: 160, Slots: 2}}

	t.Run("a rank does not come, and there are many streams", func(t *testing.T) {
		for streams, told := range map[int]int{33: 1, 32: 0} {
			s := s
			s.timeout = 200 * time.Millisecond
			s.options.AllReduce = cuda.HostWork
			s.vary = func(o *cuda.Options, _ int) { o.Driver = crowded{o.Driver, streams} }
			w := newWorld(t, s)
			timeouts := 0
			for r, err := range w.failure(t, some, nothing)[:2] {
				named(t, err, r, 0)
				if errors.Is(err, work.ErrTimeout) {
					timeouts++
					require.Equal(t, told, strings.Count(err.Error(), "; the 33 streams of device "), "%v", err)
				}
			}
			require.NotZero(t, timeouts)
			w.drop(t)
		}
	})
	t.Run("a call is not started", func(t *testing.T) {
		w := newWorld(t, s)
		cause := errors.New("user pressed stop")
		ended, cancel := context.WithCancelCause(w.ctx)
		cancel(cause)
		errs := w.failure(t, func(r int) bool {
			if r != 2 {
				return true
			}
			x := w.ranks[r]
			x.b.Revoke() // nothing to give up
			b, err := x.bucket(r)
			require.NoError(t, err)
			_, err = x.b.AllReduce(ended, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
			require.ErrorIs(t, err, work.ErrCanceled)
			require.NoError(t, x.b.Err())
			x.b.Revoke()
			require.ErrorIs(t, x.b.Err(), cause)
			return false
		}, nothing)
		for r, err := range errs[:2] {
			named(t, err, r, 0)
			require.ErrorIs(t, err, work.ErrCanceled)
			require.ErrorContains(t, err, "rank 2")
			require.ErrorContains(t, err, cause.Error())
		}
		w.drop(t)
	})
	t.Run("the caller's stream does not go on", func(t *testing.T) {
		s := s
		s.timeout = 200 * time.Millisecond
		w := newWorld(t, s)
		x := w.ranks[0]
		gate := must.Get(x.d.AllocHost(4))
		gate.Store32(0, 0)
		require.NoError(t, x.caller(0).WaitValue(gate.Ptr(), 1, driver.Equal))
		for r, err := range w.failure(t, all, nothing) {
			named(t, err, r, 0)
		}
		// What the operation holds is still reserved: its copies are to come.
		gate.Store32(0, 1)
		w.drop(t, gate)
	})
}

// TestAFailedReceiveSpoilsASum: a receive through the host is cancelled, and its rank all-reduces the tensor. The rank's
// device goes on, so the other rank's kernel gets what was in the memory before. That rank gets an error, though no message
// of the hosts tells it.
func TestAFailedReceiveSpoilsASum(t *testing.T) {
	defer cuda.SetReportLimit(patience / 1000)()
	w := newWorld(t, directly(2).quietly())
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	posted := make(chan struct{})
	w.each(func(x *rank, r int) error {
		y := must.Get(x.vector(tensor.Int32, r, bytes.Repeat([]byte{byte(r)}, 400)))
		ctx, cancel := context.WithCancel(x.ctx)
		defer cancel()
		if r == 1 {
			sum := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
			close(posted)
			return says(sum.Wait(x.ctx), "rank 0 has failed in it, and its device went on")
		}
		received := must.Get(x.b.Recv(ctx, y.t, 1, backend.P2POptions{Tag: 1}))
		sum := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
		<-posted
		x.w.fabric.Freeze("g/cuda", 0)
		cancel()
		if err := received.Wait(x.ctx); !errors.Is(err, work.ErrCanceled) {
			return err
		}
		return says(sum.Wait(x.ctx), "operation cancelled")
	})
	w.end()
}
