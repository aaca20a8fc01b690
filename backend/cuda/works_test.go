package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// gate holds a stream until it is opened.
func (x *rank) gate(s driver.Stream) (open func(), err error) {
	h, err := x.d.AllocHost(4)
	if err != nil {
		return nil, err
	}
	x.close = append(x.close, h)
	h.Store32(0, 0)
	return func() { h.Store32(0, 1) }, s.WaitValue(h.Ptr(), 1, driver.Equal)
}

// TestT08Ends ends an operation by time, by its context and by its caller. It does so
// while the operation waits for the caller's stream, for another rank, and for the
// stream that still uses its output. The Work ends at once with an error that names it,
// and so do the others' Works. Its memory stays until the streams have gone on (T8).
func TestT08Ends(t *testing.T) {
	for _, stage := range []string{"before", "host", "after"} {
		for _, cause := range []string{"time", "context", "abort"} {
			t.Run(stage+" "+cause, func(t *testing.T) {
				s := setup{size: 2, timeout: patience, sim: sim.Config{Devices: 2, Seed: 8, Quiet: true}, options: cuda.Options{Chunk: 100, Slots: 2}}
				w := newWorld(t, s)
				if cause == "time" {
					w.ranks[0].b.SetTimeout(150 * time.Millisecond)
				}
				reason := errors.New("no more of this")
				open := make([]func(), 2)
				errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
					var err error
					if stage == "host" && r == 1 {
						return nil
					}
					rng := rand.New(rand.NewPCG(8, uint64(r)))
					in := must.Get(x.pairOf(rng, tensor.Int32, 0, flat(50), true))
					out := must.Get(x.pairOf(rng, tensor.Int32, 1, flat(100), true))
					if held := map[string]int{"before": 0, "after": 1}; r == 0 && stage != "host" {
						open[r] = must.Get(x.gate(x.stream[held[stage]]))
					}
					ctx, cancel := context.WithCancel(x.ctx)
					defer cancel()
					v := must.Get(x.b.AllGatherIntoTensor(ctx, out.dev, in.dev, backend.AllGatherOptions{}))
					if r == 0 {
						switch cause {
						case "context":
							cancel()
						case "abort":
							v.Abort(reason)
						}
					}
					err = v.Wait(x.ctx)
					if !v.IsCompleted() {
						return fmt.Errorf("Wait has returned %v, and the Work has not ended", err)
					}
					return err
				})
				// What it held is not free before the streams have gone on.
				held := w.m.Stats().Hosts
				want := map[string]error{"time": work.ErrTimeout, "context": work.ErrCanceled, "abort": work.ErrAborted}[cause]
				require.ErrorIs(t, errs[0], want)
				for r, err := range errs {
					if stage == "host" && r == 1 {
						continue
					}
					if stage == "after" && r == 1 && err == nil {
						continue // it has what it needs
					}
					e := must.As[*work.Error](t, err, "rank %d", r)
					require.Equal(t, work.Info{Op: work.AllGatherIntoTensor, Group: "g", Rank: r}, e.Info)
					require.ErrorContains(t, err, "seq 0")
				}
				require.Equal(t, held, w.m.Stats().Hosts)
				for _, f := range open {
					if f != nil {
						f()
					}
				}
				w.drop(t)
			})
		}
	}
}

// TestT11CallersStream writes a tensor on a stream, reduces it, and writes it again on that
// stream. The first value is reduced, the second one stays (T11).
func TestT11CallersStream(t *testing.T) {
	eachSeed(t, 4, func(t *testing.T, seed uint64, s sim.Semantics) {
		w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s}, options: cuda.Options{Chunk: 150, Slots: 2}})
		w.each(func(x *rank, r int) error {
			b := must.Get(x.bucket(r))
			must.Do(x.fill(r, b))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
			must.Do(v.Synchronize(x.caller(r)))
			e, err := x.use(r, b) // copies it out, and writes again
			if err != nil {
				return err
			}
			must.Do(x.verify(b, e))
			must.Do(v.Wait(x.ctx))
			must.Do(x.caller(r).Copy(b.out.Ptr(), b.mem.Ptr(), 4*elements))
			e = must.Get(x.caller(r).Record())
			defer e.Release()
			must.Do(e.Sync(x.ctx))
			driver.HostAccess(x.d, "comparing", driver.Reads(b.out.Ptr(), b.out.Len()))
			if !bytes.Equal(b.out.Bytes(), bytes.Repeat([]byte{0xee}, 4*elements)) {
				return errors.New("the caller's second write is gone")
			}
			return nil
		})
		w.end()
	})
}

// TestT12Future never waits on a stream, but for the Work's future: then the data
// are there for streams that nobody has told anything (T12).
func TestT12Future(t *testing.T) {
	eachSeed(t, 4, func(t *testing.T, seed uint64, s sim.Semantics) {
		w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s}, options: cuda.Options{Chunk: 64, Slots: 2}})
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(12, uint64(r)))
			one := must.Get(x.pairOf(rng, tensor.Int64, 0, flat(30), true))
			two := must.Get(x.several(rng, tensor.Int64, 3, 15, true))
			reduced := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{one.dev}, backend.AllReduceOptions{}))
			sent := must.Get(x.b.Broadcast(x.ctx, devs(two), backend.BroadcastOptions{Root: 2, RootTensor: 1}))
			y := &rank{TB: t, ctx: x.ctx, w: w, d: x.d}
			must.Do(y.makeStreams(fmt.Sprint("fresh ", r)))
			defer y.free()
			looked := make(chan error, 2)
			reduced.Then(func(v *work.Work) error {
				looked <- errors.Join(v.Err(), y.back(one))
				return nil
			})
			must.Do(<-looked)
			<-sent.Done()
			for _, p := range two {
				must.Do(errors.Join(sent.Err(), y.back(p)))
			}
			k := must.Get(x.cpu.AllReduce(x.ctx, []*tensor.Tensor{one.cpu}, backend.AllReduceOptions{}))
			v := must.Get(x.cpu.Broadcast(x.ctx, cpus(two), backend.BroadcastOptions{Root: 2, RootTensor: 1}))
			must.Do(work.WaitAll(x.ctx, k, v))
			for _, p := range append(two, one) {
				must.Do(y.check(p))
			}
			return nil
		})
		w.end()
	})
}

// TestT13RecordsAreWaitedFor counts the records of every collective, in every way.
// Somebody waits for each of them or asks it. A record that the test adds for nobody is
// noticed (T13, R2).
func TestT13RecordsAreWaitedFor(t *testing.T) {
	for _, way := range hostWays {
		w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 2, Seed: 13}, options: cuda.Options{Chunk: 100, Slots: 2, Broadcast: way}})
		var mu sync.Mutex
		records := 0
		w.m.Skip(func(c sim.Call) bool {
			mu.Lock()
			defer mu.Unlock()
			if c.Name == "Record" && strings.HasPrefix(c.Stream, "rank") {
				records++
			}
			return false
		})
		rng := rand.New(rand.NewPCG(13, 13))
		which := names
		if way != "" {
			which = names[:1]
		}
		for _, name := range which {
			p := draw(rng, name, 3)
			before := records
			w.each(func(x *rank, r int) error {
				rng := rand.New(rand.NewPCG(13, uint64(r)))
				c := must.Get(x.prepare(x.ctx, p, r, rng, true))
				v := must.Get(c.run(x.b, func(q *pair) *tensor.Tensor { return q.dev }))
				// Nil for who takes no part; its tensors have been filled all the same.
				if v != nil {
					for _, s := range x.stream {
						must.Do(v.Synchronize(s))
					}
					must.Do(v.Wait(x.ctx))
				}
				for _, q := range c.all {
					must.Do(x.back(q))
				}
				v = must.Get(c.run(x.cpu, func(q *pair) *tensor.Tensor { return q.cpu }))
				if v != nil {
					must.Do(v.Wait(x.ctx))
				}
				for _, q := range c.all {
					if err := x.check(q); err != nil {
						return fmt.Errorf("%+v: %w", p, err)
					}
				}
				return nil
			})
			if name != "barrier" {
				require.Greater(t, records, before, "%s", name)
			}
		}
		w.m.Skip(nil)
		w.end()
	}

	w := newWorld(t, setup{size: 1, sim: sim.Config{Devices: 1}})
	x := w.ranks[0]
	e := must.Get(x.stream[0].Record())
	e.Release()
	require.NoError(t, errors.Join(x.b.Close(), x.cpu.Close()))
	x.free()
	must.As[*sim.Unused](t, w.m.Close())
}

// TestT14ManyGroups gives 8 groups of the same ranks to 4 goroutines a rank. Each
// goroutine makes every fourth call of each group, whose calls so come in one
// order; across groups they come as they like (T14).
func TestT14ManyGroups(t *testing.T) {
	const groups, callers, calls, size = 8, 4, 12, 2
	w := newWorld(t, setup{size: size, sim: sim.Config{Devices: 2, Seed: 14}})
	st := store.NewHash()
	defer st.Close()
	w.each(func(whole *rank, r int) error {
		type group struct {
			*rank
			b         *cuda.Backend
			reference backend.Backend
			ps        []*pair
			works     []*work.Work
		}
		var gs []*group
		for g := range groups {
			x := &rank{TB: t, ctx: w.ctx, w: w, d: whole.d}
			must.Do(x.makeStreams(fmt.Sprintf("group %d rank %d", g, r)))
			defer x.free()
			bo := backend.Options{
				Store: store.Prefix(fmt.Sprint(g), st), Rank: r, Size: size, Group: fmt.Sprint("group ", g), Timeout: patience,
				Specific: cuda.Options{Driver: x.d, Chunk: 64, CPUOptions: join(w.fabric)},
			}
			b := must.Get(cuda.New(x.ctx, bo))
			reference := must.Get(x.reference(bo))
			k := &group{rank: x, b: b, reference: reference}
			rng := rand.New(rand.NewPCG(uint64(g), uint64(r)))
			for range calls {
				p := must.Get(x.pairOf(rng, tensor.Int64, rng.IntN(2), flat(1+g*5), true))
				k.ps = append(k.ps, p)
			}
			gs = append(gs, k)
		}
		call := func(x *group, on backend.Backend, i int, p *tensor.Tensor) (*work.Work, error) {
			if i%3 == 1 {
				return on.Broadcast(x.ctx, []*tensor.Tensor{p}, backend.BroadcastOptions{Root: i % size})
			}
			return on.AllReduce(x.ctx, []*tensor.Tensor{p}, backend.AllReduceOptions{})
		}
		var mu sync.Mutex
		turn := sync.NewCond(&mu)
		left, failed := groups*calls, error(nil)
		var wg sync.WaitGroup
		for c := range callers {
			rng := rand.New(rand.NewPCG(uint64(c), uint64(r)))
			wg.Go(func() {
				mu.Lock()
				defer mu.Unlock()
				for left > 0 && failed == nil {
					called := false
					for _, g := range rng.Perm(groups) {
						x := gs[g]
						i := len(x.works)
						if i == calls || i%callers != c {
							continue
						}
						v, err := call(x, x.b, i, x.ps[i].dev)
						if err != nil {
							failed = err
						}
						x.works = append(x.works, v)
						left--
						called = true
						turn.Broadcast()
						break
					}
					if !called && left > 0 && failed == nil {
						turn.Wait()
					}
				}
			})
		}
		wg.Wait()
		if failed != nil {
			return failed
		}
		for _, x := range gs {
			for i, p := range x.ps {
				must.Do(x.works[i].Synchronize(x.stream[p.device]))
				must.Do(x.back(p))
			}
		}
		for _, x := range gs {
			for i, p := range x.ps {
				v := must.Get(call(x, x.reference, i, p.cpu))
				must.Do(work.WaitAll(x.ctx, x.works[i], v))
				must.Do(x.check(p))
			}
			must.Do(errors.Join(x.b.Close(), x.reference.Close()))
		}
		return nil
	})
	w.end()
}

// TestT03T04Collectives leaves out each record and each wait that all ranks make for
// a collective; somebody has to notice every one (T3, T4). Which collectives and
// which layouts depends on the size of the tests: all of them in make nightly.
func TestT03T04Collectives(t *testing.T) {
	which := names[:len(names)-1] // a barrier has no tensors
	every := testsize.Of(len(which), 25, 1)
	for i, name := range which {
		if i%every != 0 {
			continue
		}
		for _, layout := range []int{0, 3} {
			if layout != 0 && every > 1 && i%(2*every) != 0 {
				continue
			}
			rng := rand.New(rand.NewPCG(34, uint64(i)))
			p := draw(rng, name, 2)
			p.dtype, p.n = tensor.Int32, []int{30, 21, 10}
			p.op = backend.Sum()
			s := setup{size: 2, sim: sim.Config{Devices: 2}, options: cuda.Options{Chunk: 100, Slots: 1 + i%2}}
			kinds := []string{"Record", "Wait", "WaitValue"}
			if s.options.Slots == 1 || layout != 0 {
				// Otherwise a word that is not written comes late, with the next one.
				kinds = append(kinds, "WriteValue")
			}
			run := func(w *world) error {
				return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
					x.layout = &layout
					rng := rand.New(rand.NewPCG(35, uint64(r)))
					c := must.Get(x.prepare(x.ctx, p, r, rng, true))
					v, err := c.run(x.b, func(q *pair) *tensor.Tensor { return q.dev })
					if err != nil || v == nil {
						return err
					}
					if err := v.Synchronize(x.stream[0]); err != nil {
						return errors.Join(err, v.Wait(x.ctx))
					}
					for _, q := range c.all {
						// One stream uses all of them, and so needs all that Synchronize ordered it after.
						q.device = 0
						if err := x.back(q); err != nil {
							return errors.Join(err, v.Wait(x.ctx))
						}
					}
					k, err := c.run(x.cpu, func(q *pair) *tensor.Tensor { return q.cpu })
					if err == nil {
						err = k.Wait(x.ctx)
					}
					return x.checks(errors.Join(err, v.Wait(x.ctx)), c.all...)
				})...)
			}
			tried := leaveOut(t, s, without, func(m sim.Call) bool {
				// The last records of a caller's stream are the test's own.
				own := m.Name == "Record" && strings.Contains(m.Stream, "caller") && m.K > 0
				return slices.Contains(kinds, m.Name) && !own
			}, run)
			require.NotZero(t, tried["Record"], "%s, layout %d", name, layout)
		}
	}
}
