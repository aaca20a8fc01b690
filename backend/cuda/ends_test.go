package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// endingWay is a collective in a group of which one rank is absent.
type endingWay struct {
	name   string
	setup  setup
	absent int
	meets  bool // the ranks connect before
	issue  func(ctx context.Context, x *rank, r int) (*work.Work, error)
	some   bool   // ranks may not need the absent one
	leaves bool   // they notice that it closes the group
	late   string // what an error says when its time is over
	native bool   // over sockets
}

// endingWays are all ways of collectives.
func endingWays() (all []endingWay) {
	reduce := func(ctx context.Context, x *rank, r int) (*work.Work, error) {
		y := must.Get(x.vector(tensor.Float32, r%len(x.stream), make([]byte, 400)))
		return x.b.AllReduce(ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
	}
	sparse := func(ctx context.Context, x *rank, r int) (*work.Work, error) {
		y := must.Get(x.sparseOf(tensor.Float32, true, []int64{0, 3}, 4))
		return x.b.AllReduce(ctx, []*tensor.Tensor{y}, backend.AllReduceOptions{})
	}
	three := setup{size: 3, sim: sim.Config{Devices: 2}, options: cuda.Options{Chunk: 160, Slots: 2}}
	apart := directly(3)
	apart.options.AllReduce = cuda.HostWork
	all = append(all,
		endingWay{name: "host", setup: three, absent: 2, issue: reduce, late: "rank 2 has not called it"},
		endingWay{name: "host, one kernel", setup: apart, absent: 2, issue: reduce, late: "rank 2 has not called it"},
		endingWay{name: "host, one kernel, later", setup: apart, absent: 2, meets: true, issue: reduce, late: "rank 2 has not called it"},
		endingWay{name: "direct", setup: directly(3), absent: 2, meets: true, issue: reduce, leaves: true, late: "the device of rank 2 has not done its part"},
		endingWay{name: "direct, in a stream", setup: directly(3), absent: 2, meets: true, leaves: true,
			issue: func(ctx context.Context, x *rank, r int) (*work.Work, error) {
				return reduce(cuda.InStream(ctx, x.stream[r]), x, r)
			}},
		endingWay{name: "ring", setup: ringCases[0].setup(), absent: 2, meets: true, issue: reduce, leaves: true},
		endingWay{name: "sparse", setup: setup{size: 3, sim: sim.Config{Devices: 3}}, absent: 2, issue: sparse},
		endingWay{name: "sparse, direct", setup: directly(3), absent: 2, meets: true, issue: sparse},
		endingWay{name: "cliques", setup: cliqueCases[1].setup(), absent: 3, meets: true, issue: reduce},
	)
	for _, sizes := range [][]int{{2, 2}, {1, 3}, {3, 1}} {
		s := clustered(sizes...)
		s.options.Chunk = 80
		all = append(all, endingWay{name: fmt.Sprint("clusters ", sizes), setup: s, absent: 3, meets: true, issue: reduce, late: "step "})
	}
	for _, way := range []string{cuda.BroadcastFlat, cuda.BroadcastTree, cuda.BroadcastChain, cuda.BroadcastDirect} {
		for absent := range 3 {
			s := directly(3)
			s.options = cuda.Options{Chunk: 100, Slots: 2, Broadcast: way}
			all = append(all, endingWay{
				name: fmt.Sprint("broadcast, ", way, ", without rank ", absent), setup: s, absent: absent, meets: way == cuda.BroadcastDirect, some: true,
				issue: func(ctx context.Context, x *rank, r int) (*work.Work, error) {
					ps := must.Get(x.several(random(x.TB, uint64(r)), tensor.Uint8, 2, 200, true))
					return x.b.Broadcast(ctx, devs(ps), backend.BroadcastOptions{})
				},
			})
		}
	}
	return all
}

// ending is how a collective ends that a rank does not call.
type ending struct {
	name  string
	is    error
	blame bool // it names the absent rank
	keeps bool // memory stays

	// cause is what the rank after the absent one does that waits; nil if nothing.
	cause func(w *world, c *endingWay, v *work.Work, cancel func())
}

var endings = []ending{
	{name: "a rank does not come", is: work.ErrTimeout, blame: true},
	{name: "a rank dies", is: work.ErrPeerDied, blame: true, cause: func(w *world, c *endingWay, _ *work.Work, _ func()) {
		w.fabric.Kill("g/cuda/0", c.absent)
	}},
	{name: "a Work is aborted", is: work.ErrAborted, cause: func(_ *world, _ *endingWay, v *work.Work, _ func()) {
		v.Abort(errors.New("no more"))
	}},
	{name: "the context ends", is: work.ErrCanceled, cause: func(_ *world, _ *endingWay, _ *work.Work, cancel func()) { cancel() }},
	{name: "a device is lost", is: driver.ErrDeviceLost, keeps: true, cause: func(w *world, c *endingWay, _ *work.Work, _ func()) {
		w.m.Lose(c.next(), errors.New("fell off the bus"))
	}},
	{name: "another rank closes", is: work.ErrPeerLeft, blame: true, keeps: true, cause: func(w *world, c *endingWay, _ *work.Work, _ func()) {
		w.ranks[c.absent].b.Close()
	}},
}

// next is the rank after the absent one.
func (c *endingWay) next() int { return (c.absent + 1) % c.setup.size }

// TestF20Endings has collectives end in each way that a rank does not call (F-20, T8). The errors of all ranks name the
// operation, and some of them the cause. The group is of no more use then. Nothing is left.
func TestF20Endings(t *testing.T) {
	for _, c := range endingWays() {
		for _, e := range endings {
			if e.is == driver.ErrDeviceLost && c.some || e.is == work.ErrPeerLeft && !c.leaves {
				continue
			}
			t.Run(c.name+"/"+e.name, func(t *testing.T) {
				c.native = c.name == "cliques" && e.is != work.ErrPeerDied && runtime.GOOS == "linux"
				if strings.Contains(c.name, "one kernel") {
					aProcessEach(t)
				}
				if c.native || cuda.ProcessEach() {
					c.end(t, e, time.Second)
					return
				}
				// The more virtual time passes, the more polls there are.
				onVirtualTime(t, func(t *testing.T) { c.end(t, e, 100*time.Millisecond) })
			})
		}
	}
}

// end has the collective end. Who closes first waits for the others to let go of its memory: limit bounds that, and the
// call if no rank comes.
func (c *endingWay) end(t *testing.T, e ending, limit time.Duration) {
	defer cuda.SetCloseLimit(limit)()
	s := c.setup
	s.timeout, s.sim.Quiet = patience, true
	s.native = c.native
	w := newWorld(t, s)
	if c.meets {
		w.each(func(x *rank, r int) error {
			if c.some {
				return x.connect(r)
			}
			return x.meetDirectly(r)
		})
	}
	if e.is == work.ErrTimeout {
		for _, x := range w.ranks {
			x.b.SetTimeout(limit)
		}
	}
	seq := w.ranks[0].b.Seq()
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		if r == c.absent {
			return nil
		}
		ctx, cancel := context.WithCancel(x.ctx)
		defer cancel()
		v, err := c.issue(ctx, x, r)
		if err != nil {
			x.b.Abort(err) // others have been called
			return err
		}
		if e.cause != nil && r == c.next() {
			e.cause(w, c, v, cancel)
		}
		err = v.Wait(x.ctx)
		if err != v.Err() {
			return fmt.Errorf("Wait has returned %w, Err %w", err, v.Err())
		}
		if err != nil {
			require.Error(t, must.Err(x.b.Barrier(x.ctx, backend.BarrierOptions{})), "the group is of no more use")
		}
		return err
	})
	failed, matched, blamed, late, op := 0, 0, 0, false, work.AllReduce
	if c.some {
		op = work.Broadcast
	}
	for r, err := range errs {
		if err == nil {
			require.True(t, c.some || r == c.absent, "rank %d", r)
			continue
		}
		failed++
		is := must.As[*work.Error](t, err)
		require.Equal(t, work.Info{Op: op, Seq: seq, Group: "g", Rank: r}, is.Info)
		if errors.Is(err, e.is) {
			matched++
		}
		late = late || strings.Contains(err.Error(), c.late)
		if is.Peer == c.absent {
			blamed++
		}
	}
	switch {
	case e.is == work.ErrTimeout && !c.some:
		require.NotZero(t, blamed, "%v", errs)
	case e.blame && e.is != work.ErrTimeout:
		require.Equal(t, failed, blamed, "%v", errs)
	}
	if !c.some {
		require.NotZero(t, matched, "%v", errs)
		require.True(t, late || e.is != work.ErrTimeout, "%v", errs)
	}
	if !c.some || !c.meets || c.absent != 2 && e.is != work.ErrTimeout {
		require.NotZero(t, failed)
	}
	if !e.keeps {
		w.drop(t)
		return
	}
	runEach(w, func(x *rank, _ int, _ chan struct{}) error { return errors.Join(x.b.Close(), x.cpu.Close()) })
	require.NoError(t, w.m.Settle(w.ctx))
	for _, x := range w.ranks {
		x.free()
	}
	w.m.Close()
}
