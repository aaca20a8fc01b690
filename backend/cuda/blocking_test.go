package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

type blockingWay struct {
	name   string
	setup  func() setup
	layout shape
	more   func(c sim.Call) bool // calls that block too; nil for launches only
}

// begin is f for ranks that share memory as the way needs it.
func (w *blockingWay) begin(f func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) {
		if strings.Contains(w.name, "one kernel") {
			aProcessEach(t)
		}
		onVirtualTime(t, f)
	}
}

// blockingWays are groups whose operations have a host's part, on a driver whose launches block as with
// CUDA_LAUNCH_BLOCKING=1.
var blockingWays = []blockingWay{
	{name: "clusters", setup: func() setup { return clustered(2, 2) }, layout: flat(300)},
	{name: "through the host", setup: hostOnly, layout: laid(3, 400)},
	{name: "through the host in parts", setup: hostOnly, layout: laid(3, 2000), more: func(sim.Call) bool { return true }},
	{name: "memory that ranks share", setup: hostOnly, layout: flat(40_000), more: func(sim.Call) bool { return true }},
	{name: "memory that ranks share, one kernel", setup: hostOnly, layout: flat(5000), more: func(sim.Call) bool { return true }},
	{name: "clusters in chunks", setup: func() setup {
		s := clustered(2, 2)
		s.options.Chunk = 400
		return s
	}, layout: flat(300)},
}

func hostOnly() setup {
	s := directly(2)
	s.sim.Topology.NoPeer = func(from, to int) bool { return true }
	return s
}

func blocking(i int) (setup, shape) {
	way := blockingWays[i]
	s := way.setup()
	s.sim.NoDelays = true
	s.sim.Blocking = func(c sim.Call) bool { return c.Name == "Launch" || way.more != nil && way.more(c) }
	return s, way.layout
}

// TestBlockingLaunches has collectives whose enqueuing blocks until the host has done its part. They end
// well.
func TestBlockingLaunches(t *testing.T) {
	for i, way := range blockingWays {
		t.Run(way.name, way.begin(func(t *testing.T) {
			for run := range testsize.Of(1, 2, 10) {
				s, layout := blocking(i)
				s.sim.Seed = uint64(run)
				w := newWorld(t, s)
				rng := func(r int) *rand.Rand { return random(t, uint64(run*10+r)) }
				w.each(func(x *rank, r int) error {
					for range 2 {
						p := must.Get(x.pairOf(rng(r), tensor.Float32, r, layout, true))
						must.Do(x.allReduced(p))
					}
					return nil
				})
				w.end()
			}
		}))
	}
}

// allReduced is an all-reduce of a pair on the device and in CPU memory, which must agree.
func (x *rank) allReduced(p *pair) error {
	v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{})
	if err == nil {
		err = v.Wait(x.ctx)
	}
	if err != nil {
		return err
	}
	if v, err = x.cpu.AllReduce(x.ctx, []*tensor.Tensor{p.cpu}, backend.AllReduceOptions{}); err == nil {
		err = v.Wait(x.ctx)
	}
	if err == nil {
		err = x.back(p)
	}
	if err != nil {
		return err
	}
	return x.check(p)
}

// TestBlockingEnds has a collective that a rank does not call, on a driver whose launches block. Those that
// call it get an error when its time is over, counted from the call, or when somebody aborts or closes the
// group.
func TestBlockingEnds(t *testing.T) {
	const timeout, slack = time.Second, 10 * time.Second
	for i, way := range blockingWays {
		for _, by := range []string{"timeout", "Abort", "Close"} {
			t.Run(way.name+" "+by, way.begin(func(t *testing.T) {
				for range testsize.Of(1, 1, 10) {
					s, layout := blocking(i)
					s.timeout = patience
					if by == "timeout" {
						s.timeout = timeout
					}
					var called atomic.Bool
					blocked, once, blocks := make(chan struct{}), sync.Once{}, s.sim.Blocking
					s.sim.Blocking = func(c sim.Call) bool {
						b := blocks(c)
						if b && called.Load() && !strings.Contains(c.Stream, "caller") {
							once.Do(func() { close(blocked) })
						}
						return b
					}
					w := newWorld(t, s)
					last := s.size - 1
					w.each(func(x *rank, r int) error {
						p := must.Get(x.pairOf(random(t, uint64(r)), tensor.Float32, r, layout, true))
						if r == last {
							e, err := x.stream[r].Record()
							if err == nil {
								err = e.Sync(x.ctx)
								e.Release()
							}
							return err
						}
						if by != "timeout" {
							called.Store(true)
							go func() {
								select {
								case <-blocked:
								case <-x.ctx.Done():
								}
								if by == "Abort" {
									x.b.Abort(work.ErrAborted)
								} else {
									x.b.Close()
								}
							}()
						}
						start := time.Now()
						v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{})
						if err == nil {
							err = v.Wait(context.Background())
						}
						took := time.Since(start)
						e, recorded := x.stream[r].Record()
						if recorded == nil {
							recorded = e.Sync(x.ctx)
							e.Release()
						}
						switch {
						case err == nil:
							return errors.New("it has ended well")
						case by == "timeout" && (!errors.Is(err, work.ErrTimeout) || !strings.Contains(err.Error(), fmt.Sprintf("rank %d has not called it", last))):
							return err
						case by == "timeout" && took > timeout+slack:
							return fmt.Errorf("it took %v: %w", took, err)
						}
						return recorded
					})
					w.end()
				}
			}))
		}
	}
}

// TestLaunchThatDoesNotReturn has a rank whose launch returns long after the timeout. The error of all ranks says so, in time.
func TestLaunchThatDoesNotReturn(t *testing.T) {
	t.Setenv("CUDA_LAUNCH_BLOCKING", "1")
	for i, way := range blockingWays[:2] {
		t.Run(way.name, virtually(func(t *testing.T) {
			s, layout := blocking(i)
			var hold atomic.Bool
			release := make(chan struct{})
			s.sim.Blocking = func(c sim.Call) bool {
				if hold.Load() && (c.Name == "Launch" || way.name != "clusters") && strings.HasPrefix(c.Stream, "rank 1/rank 1 ") {
					<-release
				}
				return false
			}
			w := newWorld(t, s)
			var ready, ended sync.WaitGroup
			ready.Add(s.size)
			ended.Add(s.size - 1)
			w.each(func(x *rank, r int) error {
				p, err := x.pairOf(random(t, uint64(r)), tensor.Float32, r, layout, true)
				if err == nil {
					err = x.meetDirectly(r)
				}
				if err == nil {
					e, _ := x.stream[r].Record()
					err = e.Sync(x.ctx)
					e.Release()
				}
				ready.Done()
				if err != nil {
					return err
				}
				ready.Wait()
				hold.Store(true)
				if r == 1 {
					x.b.SetTimeout(time.Second) // it is the first to notice
					go func() {
						ended.Wait()
						close(release)
					}()
				} else {
					defer ended.Done()
				}
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{})
				if err == nil {
					err = v.Wait(x.ctx)
				}
				if err == nil && r > 1 {
					return nil // the other cluster may have all that it needs
				}
				if !errors.Is(err, work.ErrTimeout) || !strings.Contains(err.Error(), "CUDA_LAUNCH_BLOCKING is 1") {
					return fmt.Errorf("it says %w", err)
				}
				return nil
			})
			for _, err := range runEach(w, func(x *rank, _ int, _ chan struct{}) error { return x.b.Close() }) {
				require.NoError(t, err)
			}
			for _, x := range w.ranks {
				require.NoError(t, x.cpu.Close())
			}
			require.NoError(t, w.m.Settle(w.ctx))
			for _, x := range w.ranks {
				x.free()
			}
			w.m.Close()
			for _, f := range w.m.Findings() {
				var race *sim.Race // the simulator does not see by which words the hosts of ranks wait for each other
				require.ErrorAs(t, f, &race)
			}
		}))
	}
}

// TestCloseDuringACall closes a rank while a call of the driver does not return, whatever the group does.
func TestCloseDuringACall(t *testing.T) {
	defer cuda.SetCloseLimit(100 * time.Millisecond)()
	for _, way := range []string{"host", "kernels", "feeder"} {
		t.Run(way, virtually(func(t *testing.T) {
			s := directly(2)
			switch way {
			case "host":
				s = hostOnly()
			case "feeder":
				s = clustered(1, 1)
				s.options.Chunk = 4 // there are two
			}
			var hold atomic.Bool
			held, release := make(chan struct{}), make(chan struct{})
			s.sim.Blocking = func(c sim.Call) bool {
				if strings.HasPrefix(c.Stream, "rank 1/rank 1 ") && hold.CompareAndSwap(true, false) {
					close(held)
					<-release
				}
				return false
			}
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
			hold.Store(true)
			x := w.ranks[1]
			y, err := x.vector(tensor.Float32, 1, make([]byte, 8))
			require.NoError(t, err)
			returned := make(chan error)
			go func() {
				v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
				if err == nil {
					err = v.Wait(x.ctx)
				}
				returned <- err
			}()
			<-held
			must.End(t, "Close", func() { require.ErrorContains(t, x.b.Close(), "a call has not returned from the driver") })
			close(release)
			require.Error(t, <-returned)
			require.NoError(t, w.ranks[0].b.Close())
			for _, x := range w.ranks {
				require.NoError(t, x.cpu.Close())
			}
			require.NoError(t, w.m.Settle(w.ctx))
			for _, x := range w.ranks {
				x.free()
			}
			w.m.Close()
		}))
	}
}
