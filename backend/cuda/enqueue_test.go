package cuda_test

import (
	"errors"
	"fmt"
	"slices"
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
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var highest = backend.AllReduceOptions{Op: backend.Max()}

// TestCallsEnqueueLittle makes calls, each behind the one before, while no device moves. Each call, with Synchronize,
// gives the streams at most a few commands, however large its tensor is. A call of several chunks returns although the
// group's own streams take no command.
func TestCallsEnqueueLittle(t *testing.T) {
	const calls, most = 20, 30
	copies := hostOnly()
	copies.sim.Kernels = nil
	for _, c := range []struct {
		name  string
		setup setup
		shape shape
		full  bool // the group's own streams take no command
	}{
		{"clusters, half a chunk", clustered(2, 2), flat(50), false},
		{"clusters, 8 chunks", clustered(2, 2), flat(800), true},
		{"clusters, 20 chunks", clustered(2, 2), flat(3200), true},
		{"clusters, 20 larger chunks", clustered(2, 2), flat(12800), true},
		{"clusters of one", clustered(1, 1), flat(800), true},
		{"through the host in parts", copies, laid(3, 2000), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := c.setup
			s.sim.NoDelays = true
			s.options.Chunk = 400
			var full, release atomic.Pointer[chan struct{}]
			s.sim.Blocking = func(c sim.Call) bool {
				if f := full.Load(); f != nil && !strings.Contains(c.Stream, "caller") {
					<-*f
				}
				return false
			}
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
			var counts [8]atomic.Int64 // of each rank's streams
			w.m.Inject(func(c sim.Call) error {
				if c.Stream != "" {
					var r int
					if _, err := fmt.Sscanf(c.Stream, "rank %d/", &r); err != nil {
						return err
					}
					counts[r].Add(1)
				}
				return nil
			})
			if c.full {
				f := make(chan struct{})
				full.Store(&f)
				release.Store(&f)
			}
			var made sync.WaitGroup
			made.Add(s.size)
			go func() {
				made.Wait()
				if f := release.Load(); f != nil {
					full.Store(nil)
					close(*f)
				}
			}()
			w.each(func(x *rank, r int) (err error) {
				var p *pair
				var open func()
				var works []*work.Work
				done := sync.OnceFunc(made.Done)
				defer done()
				p = must.Get(x.pairOf(random(t, uint64(r)), tensor.Int32, r, c.shape, true))
				open = must.Get(x.gate(x.caller(r)))
				defer open()
				returned := make(chan error, 1)
				go func() {
					for i := range calls {
						before := counts[r].Load()
						v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, highest)
						if err == nil {
							err = v.Synchronize(x.caller(r))
						}
						if n := counts[r].Load() - before; err == nil && n > most {
							err = fmt.Errorf("call %d has given the streams %d commands", i, n)
						}
						if err != nil {
							returned <- err
							return
						}
						works = append(works, v)
					}
					returned <- nil
				}()
				select {
				case err = <-returned:
				case <-time.After(20 * time.Second):
					done()
					open()
					return errors.Join(errors.New("a call waits for the device"), <-returned)
				}
				if err == nil && slices.ContainsFunc(works, (*work.Work).IsCompleted) {
					err = errors.New("a call has ended though the device does not move")
				}
				if err != nil {
					return err
				}
				done()
				open()
				if err := x.back(p); err != nil { // what comes after the last call on the caller's stream
					return err
				}
				v, err := x.cpu.AllReduce(x.ctx, []*tensor.Tensor{p.cpu}, highest)
				return x.checks(errors.Join(err, work.WaitAll(x.ctx, append(works, v)...)), p)
			})
			w.m.Inject(nil)
			require.LessOrEqual(t, w.m.Stats().Deepest, deepest)
			w.end()
		})
	}
}

// TestFeederKeepsOrder makes random calls on parts of one tensor while there is no room. They go through the host or
// clusters, and by kernels. Their outcome is that of the calls one after the other.
func TestFeederKeepsOrder(t *testing.T) {
	defer cuda.SetMostQueued(0)()
	const n = 200
	eachSeed(t, 4, func(t *testing.T, seed uint64, sem sim.Semantics) {
		s := directly(2)
		if seed%2 == 1 {
			s = clustered(2, 1)
		}
		s.sim.Seed, s.sim.Semantics, s.options.Chunk = seed, sem, 60
		last := s.size - 1
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			var err error
			must.Do(x.meetDirectly(r))
			// No kernels add elements of this type.
			p := must.Get(x.pairOf(random(t, 100*seed+uint64(r)), tensor.Int16, r, flat(n), true))
			rng := random(t, seed)
			var works []*work.Work
			for range 30 {
				lo := rng.IntN(n)
				hi := lo + 1 + rng.IntN(n-lo)
				kind, tag, root, within := rng.IntN(4), rng.Uint32N(2), rng.IntN(s.size), rng.IntN(3) == 0
				for _, on := range []struct {
					b backend.Backend
					t *tensor.Tensor
				}{{x.b, p.dev}, {x.cpu, p.cpu}} {
					part := must.Get(on.t.Slice(0, lo, hi))
					ctx := x.ctx
					if within && on.t == p.dev {
						ctx = cuda.InStream(ctx, x.stream[r])
					}
					var v *work.Work
					switch {
					case kind == 0:
						v, err = on.b.Broadcast(ctx, []*tensor.Tensor{part}, backend.BroadcastOptions{Root: root})
					case kind == 1 && r == 0:
						v, err = on.b.Send(ctx, part, last, backend.P2POptions{Tag: tag})
					case kind == 1 && r == last:
						v, err = on.b.Recv(ctx, part, 0, backend.P2POptions{Tag: tag})
					case kind != 1:
						v, err = on.b.AllReduce(ctx, []*tensor.Tensor{part}, highest)
					default:
						continue
					}
					if err == nil && on.t == p.cpu {
						err = v.Wait(ctx)
					} else {
						works = append(works, v)
					}
					if err != nil {
						return err
					}
				}
			}
			for _, v := range works {
				must.Do(v.Synchronize(x.stream[r]))
			}
			must.Do(x.back(p))
			return x.checks(work.WaitAll(x.ctx, works...), p)
		})
		w.end()
	})
}
