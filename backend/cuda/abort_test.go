package cuda_test

import (
	"bytes"
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
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestAbortedInOrder kills a rank while the callers' streams have not come as far as
// the call, and lets these write the tensors before and after it. What the operation
// still does on the devices keeps its place between the two.
func TestAbortedInOrder(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		w := newWorld(t, setup{
			size: 3, timeout: patience, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s},
			options: cuda.Options{Chunk: 100, Slots: 1 + rng.IntN(3), Broadcast: []string{"", cuda.BroadcastHost}[seed%2]},
		})
		kind, layout, held := rng.IntN(4), 3*rng.IntN(2), rng.IntN(2) == 0
		dead := 2
		if kind == 1 {
			dead = 0 // the root
		}
		w.fabric.Kill("g/cuda/0", dead)
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			if r == dead {
				return nil
			}
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			open := func() {}
			if held {
				open = must.Get(x.gate(x.stream[1]))
			}
			defer open() // when the operation has ended without the stream
			// The caller's copies into the tensors come behind the gate.
			in := must.Get(x.pairOf(rng, tensor.Int32, 1, laid(layout, 20, 3), true))
			all, err := x.pairOf(rng, tensor.Int32, 1, laid(layout, 60, 3), true)
			if err != nil {
				return err
			}
			var v *work.Work
			switch kind {
			case 0:
				v, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{in.dev}, backend.AllReduceOptions{})
			case 1:
				v, err = x.b.Broadcast(x.ctx, []*tensor.Tensor{in.dev}, backend.BroadcastOptions{})
			case 2:
				v, err = x.b.AllGatherIntoTensor(x.ctx, all.dev, in.dev, backend.AllGatherOptions{})
			case 3:
				v, err = x.b.Recv(x.ctx, in.dev, dead, backend.P2POptions{})
			}
			if err != nil {
				return err
			}
			err = v.Wait(x.ctx)
			if again := v.Synchronize(x.stream[1]); !errors.Is(again, err) {
				return fmt.Errorf("Wait returns %v, Synchronize %v", err, again)
			}
			must.Do(x.stream[1].Memset(in.mem.Ptr(), 7, in.mem.Len()))
			return err
		})
		for r, err := range errs {
			if r != dead {
				require.ErrorIs(t, err, work.ErrPeerDied)
				e := must.As[*work.Error](t, err)
				require.Equal(t, dead, e.Peer)
			}
		}
		require.NoError(t, w.closed())
		require.NoError(t, w.m.Settle(w.ctx))
		for _, x := range w.ranks {
			x.free()
		}
		require.NoError(t, w.m.Close())
	})
}

// TestLaterCalls holds that any call after a rank has died or has aborted the group names
// that rank.
func TestLaterCalls(t *testing.T) {
	for name, s := range map[string]setup{
		"host":   {size: 3, timeout: patience, sim: sim.Config{Devices: 1, Quiet: true}},
		"device": onDevices(3).quietly(),
	} {
		for _, how := range []string{"dies", "aborts"} {
			t.Run(name+" "+how, func(t *testing.T) {
				const culprit = 1
				w := newWorld(t, s)
				w.each(func(x *rank, r int) error {
					return must.Err(x.run(must.Get(x.bucket(r)).t))
				})
				if how == "dies" {
					w.fabric.Kill("g/cuda/0", culprit)
				} else {
					w.ranks[culprit].b.Abort(errors.New("no more"))
				}
				for r, x := range w.ranks {
					if r == culprit && how == "dies" {
						continue
					}
					b := must.Get(x.bucket(r))
					all := must.Get(x.bucket(r))
					out := must.Get(tensor.OnDevice(tensor.Uint8, all.mem, 400))
					in := must.Get(tensor.OnDevice(tensor.Uint8, b.mem, 400))
					part := must.Get(in.AsStrided([]int{100}, []int{1}, 0))
					whole, err := out.AsStrided([]int{300}, []int{1}, 0)
					require.NoError(t, err)
					for name, do := range map[string]func() (*work.Work, error){
						"all_reduce": func() (*work.Work, error) {
							return x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
						},
						"broadcast": func() (*work.Work, error) {
							return x.b.Broadcast(x.ctx, []*tensor.Tensor{b.t}, backend.BroadcastOptions{})
						},
						"all_gather": func() (*work.Work, error) {
							return x.b.AllGatherIntoTensor(x.ctx, whole, part, backend.AllGatherOptions{})
						},
						"barrier": func() (*work.Work, error) { return x.b.Barrier(x.ctx, backend.BarrierOptions{}) },
						"monitored": func() (*work.Work, error) {
							return nil, x.b.MonitoredBarrier(x.ctx, backend.MonitoredBarrierOptions{})
						},
						"send": func() (*work.Work, error) {
							return x.b.Send(x.ctx, b.t, (r+1)%3, backend.P2POptions{})
						},
						"recv": func() (*work.Work, error) {
							return x.b.Recv(x.ctx, b.t, (r+1)%3, backend.P2POptions{})
						},
					} {
						for range 2 {
							v, err := do()
							if err == nil {
								err = v.Wait(x.ctx)
							}
							e := must.As[*work.Error](t, err, name)
							require.Equal(t, culprit, e.Peer, "%s on rank %d: %v", name, r, err)
							require.Equal(t, r, e.Rank)
						}
					}
				}
				w.drop(t)
			})
		}
	}
}

// lateMesh is a mesh on which a fault takes its time: neither the other ranks nor this
// one's CPU backend know of it before. As from another process comes only the text of an
// error.
type lateMesh struct {
	transport.Mesh
	delay time.Duration
	told  sync.WaitGroup

	mu   sync.Mutex
	over bool // it has a fault, or is being closed
}

func (m *lateMesh) Abort(f *transport.Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return
	}
	m.over = true
	g := *f
	g.Err = errors.New(f.Err.Error())
	m.told.Go(func() {
		time.Sleep(m.delay)
		m.Mesh.Abort(&g)
	})
}

func (m *lateMesh) Close() error {
	m.mu.Lock()
	m.over = true
	m.mu.Unlock()
	m.told.Wait()
	return m.Mesh.Close()
}

// lateFabric makes a rank's lateMesh.
type lateFabric struct {
	*mem.Fabric
	delay time.Duration
}

func (f lateFabric) Join(name string, rank, size int) (transport.Mesh, error) {
	m, err := f.Fabric.Join(name, rank, size)
	return &lateMesh{Mesh: m, delay: f.delay}, err
}

// released is a program whose ranks issue several operations that stay on the devices
// before they wait for any, while one rank fails.
type released struct {
	size, culprit int
	elements      int // of each operation; the stream gets 1000 in parts
	seed          uint64
	fail          func(w *world, cancel func()) // makes the culprit fail, once all is set up
	injected      error                         // what the culprit's error is, nil for any
}

// run returns how many operations have ended well, and how many not.
func (p released) run(t *testing.T) (good, bad int) {
	// The simulator does not see that words of another mapping order streams.
	apart := p.seed%4 > 1
	if apart {
		defer cuda.OtherProcesses()()
	}
	fabric := mem.NewFabric()
	s := onDevices(p.size).quietly()
	s.sim.Seed, s.sim.Semantics = p.seed, sim.Semantics(p.seed%2)
	s.vary = func(o *cuda.Options, r int) {
		rng := rand.New(rand.NewPCG(p.seed, uint64(r)))
		o.CPUOptions = gloo.Options{Fabric: lateFabric{fabric, time.Duration(rng.Int64N(int64(60 * time.Millisecond)))}}
	}
	w := newWorld(t, s)
	const ops = 5
	kinds := [ops]work.OpType{work.AllReduce, work.Barrier, work.AllReduce, work.Broadcast, work.AllReduce}
	root := (p.culprit + 1) % p.size
	var want [ops][]byte
	vs := make([][ops]*vector, p.size)
	device := func(r, i int) int {
		if r == p.culprit && i == 2 {
			return (r + 1) % p.size // not where the kernels are: it takes memory for a copy
		}
		return r
	}
	rng := random(t, p.seed)
	for i := range ops {
		want[i] = make([]byte, 4*p.elements)
		for r, x := range w.ranks {
			b := make([]byte, 4*p.elements)
			for j := range b {
				b[j] = byte(rng.IntN(50)) // so that no sum carries
				if kinds[i] == work.AllReduce {
					want[i][j] += b[j]
				} else if r == root {
					want[i][j] = b[j]
				}
			}
			vs[r][i] = must.Get(x.vector(tensor.Int32, device(r, i), b))
		}
	}
	w.each(func(x *rank, r int) error {
		return must.Err(x.warm(r))
	})
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	p.fail(w, cancel)
	errs := make([][ops]error, p.size)
	closed := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		ctx := ctx
		if r != p.culprit {
			ctx = x.ctx
		}
		var works [ops]*work.Work
		for i := range ops {
			ts := []*tensor.Tensor{vs[r][i].t}
			switch kinds[i] {
			case work.AllReduce:
				works[i], errs[r][i] = x.b.AllReduce(ctx, ts, backend.AllReduceOptions{})
			case work.Barrier:
				works[i], errs[r][i] = x.b.Barrier(ctx, backend.BarrierOptions{})
			case work.Broadcast:
				works[i], errs[r][i] = x.b.Broadcast(ctx, ts, backend.BroadcastOptions{Root: root})
			}
			if errs[r][i] != nil {
				if r == p.culprit {
					x.b.Abort(errs[r][i]) // the others have been called
				}
				break
			}
		}
		for i, v := range works {
			if v == nil {
				continue
			}
			if errs[r][i] = v.Wait(x.ctx); errs[r][i] != nil || kinds[i] == work.Barrier {
				continue
			}
			got := must.Get(x.bytes(vs[r][i], device(r, i)))
			if !bytes.Equal(got, want[i]) {
				return fmt.Errorf("rank %d: operation %d has ended well with\n%x, want\n%x", r, i, got, want[i])
			}
		}
		if r == p.culprit {
			w.m.Inject(nil)
		}
		return x.b.Close() // while the others' streams still go on
	})
	require.NoError(t, errors.Join(closed...))
	// A rank with little time may not have waited long enough for another, which it blames.
	blamed := p.culprit
	for _, err := range errs[p.culprit] {
		var e *work.Error
		if errors.Is(err, work.ErrTimeout) && errors.As(err, &e) && e.Peer >= 0 {
			blamed = e.Peer
			break
		}
	}
	for r := range errs {
		for i, err := range errs[r] {
			if err == nil {
				good++
				continue
			}
			bad++
			e := must.As[*work.Error](t, err)
			require.Equal(t, kinds[i], e.Op)
			require.Equal(t, r, e.Rank)
			require.LessOrEqual(t, e.Seq, uint64(1+i))
			require.Contains(t, err.Error(), fmt.Sprint("seq ", e.Seq))
			if r != p.culprit {
				require.Contains(t, []int{p.culprit, blamed}, e.Peer, "rank %d, operation %d: %v", r, i, err)
			} else if p.injected != nil {
				require.ErrorIs(t, err, p.injected)
			}
		}
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
		var unused *sim.Unused
		var race *sim.Race
		require.True(t, errors.As(f, &race) && (apart || bad > 0) || errors.As(f, &unused) && bad > 0, "%v", f)
	}
	return good, bad
}

// TestReleasedStreams lets one rank fail while several operations on devices are under way. Its
// stream goes on with anything, and its neighbours' streams with that, before their hosts have
// heard of it. Still, ranks that report success have the right bits. The others' errors name that
// rank. Nobody uses memory that has been given back.
func TestReleasedStreams(t *testing.T) {
	for size := 2; size <= 5; size++ {
		t.Run(fmt.Sprintf("%d ranks, a call fails", size), func(t *testing.T) {
			step := testsize.Of[uint64](20, 40, 1)
			good, bad := 0, 0
			for k, hit := uint64(size), true; hit; k += step {
				p := released{size: size, culprit: int(k) % size, elements: 40, seed: k, injected: errors.New("injected")}
				own := fmt.Sprintf("rank %d/rank", p.culprit)
				var n, failed atomic.Int64
				p.fail = func(w *world, _ func()) {
					w.m.Inject(func(c sim.Call) error {
						if !strings.HasPrefix(c.Stream, own) && c.Name != "Alloc" || n.Add(1)-1 != int64(k) {
							return nil
						}
						failed.Add(1)
						return p.injected
					})
				}
				g, b := p.run(t)
				good, bad, hit = good+g, bad+b, failed.Load() > 0
				require.Equal(t, hit, b > 0)
			}
			t.Logf("%d operations ended well, %d did not", good, bad)
			require.NotZero(t, good)
			require.NotZero(t, bad)
		})
	}
	for name, fail := range map[string]func(p released, w *world, cancel func()){
		"aborts":          func(p released, w *world, _ func()) { w.ranks[p.culprit].b.Abort(errors.New("no more")) },
		"gives up":        func(_ released, _ *world, cancel func()) { cancel() },
		"has little time": nil,
	} {
		t.Run("a rank "+name, func(t *testing.T) {
			eachSeed(t, 4, func(t *testing.T, seed uint64, _ sim.Semantics) {
				rng := random(t, seed)
				p := released{size: 2 + rng.IntN(4), elements: []int{40, 1000}[seed/4%2], seed: seed}
				p.culprit = rng.IntN(p.size)
				after := time.Duration(rng.Int64N(int64(4 * time.Millisecond)))
				p.fail = func(w *world, cancel func()) {
					if fail == nil {
						w.ranks[p.culprit].b.SetTimeout(after)
						return
					}
					over := make(chan struct{})
					w.Cleanup(func() { <-over })
					time.AfterFunc(after, func() {
						defer close(over)
						fail(p, w, cancel)
					})
				}
				p.run(t)
			})
		})
	}
}

// mourner is a CPU backend that knows of a death which the other ranks have not noticed.
type mourner struct {
	backend.Backend
	rank int
}

func (m mourner) Err() error {
	if f := mourned.Load(); f != nil && m.rank == 1 {
		return *f
	}
	return m.Backend.(interface{ Err() error }).Err()
}

var mourned atomic.Pointer[error]

const mournerName = "mourner"

func init() {
	err := backend.Register(backend.Registration{
		Name: mournerName, Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) {
			b, err := gloo.New(ctx, o)
			return mourner{b, o.Rank}, err
		},
	})
	if err != nil {
		panic(err)
	}
}

// TestRefusedTells has rank 0 wait for rank 1, which alone knows that rank 2 has died. Its call is refused, and rank 0
// hears of the death.
func TestRefusedTells(t *testing.T) {
	w := newWorld(t, setup{size: 3, native: true, timeout: patience, sim: sim.Config{Devices: 1, Quiet: true}, options: cuda.Options{CPU: mournerName}})
	receives := make(chan struct{})
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		b := must.Get(x.bucket(r))
		switch r {
		case 0:
			v, err := x.b.Recv(x.ctx, b.t, 1, backend.P2POptions{})
			close(receives)
			return x.wait(v, err)
		case 1:
			<-receives
			died := error(&work.Error{Peer: 2, Err: work.ErrPeerDied})
			mourned.Store(&died)
			defer mourned.Store(nil)
			return must.Err(x.b.Send(x.ctx, b.t, 0, backend.P2POptions{}))
		}
		return nil
	})
	for r, err := range errs[:2] {
		require.ErrorIs(t, err, work.ErrPeerDied, "rank %d", r)
		require.Equal(t, 2, must.As[*work.Error](t, err).Peer, "rank %d", r)
	}
	w.drop(t)
}
