package gpu_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/ddp/gpu"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// mortal is the Fabric of one process, which can die.
type mortal struct {
	*mem.Fabric
	mu     sync.Mutex
	joined map[string]int // networks, and its rank in each
}

func (f *mortal) Join(name string, rank, size int) (transport.Mesh, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, err := f.Fabric.Join(name, rank, size)
	if err == nil {
		f.joined[name] = rank
	}
	return m, err
}

func (f *mortal) die() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, rank := range f.joined {
		f.Kill(name, rank)
	}
}

// member is a process in TestEpochs, with tensors that stay.
type member struct {
	rank
	fabric       *mortal
	at           int // its device
	small, large *tensor.Tensor
}

// sum all-reduces both tensors, and checks the sums.
func (x *member) sum() (err error) {
	defer must.Catch(&err)
	for _, t := range []*tensor.Tensor{x.small, x.large} {
		p := must.Get(gpu.Ptr(t))
		h := must.Get(x.driver.AllocHost(t.ByteLen()))
		defer h.Close()
		own := must.Get(tensor.Of(make([]float32, t.Len()), t.Len()))
		own.Fill(float64(1 + x.g.Rank()))
		driver.HostAccess(x.driver, "set", driver.Writes(h.Ptr(), h.Len()))
		copy(h.Bytes(), own.Bytes())
		must.Do(x.stream.Copy(p, h.Ptr(), h.Len()))
		w, err := x.g.AllReduce(cuda.WithStreams(x, x.stream), t, pg.Sum())
		if err == nil {
			err = w.Wait(x)
		}
		if err == nil {
			err = x.stream.Copy(h.Ptr(), p, h.Len())
		}
		if e := x.settle(); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
		driver.HostAccess(x.driver, "get", driver.Reads(h.Ptr(), h.Len()))
		copy(own.Bytes(), h.Bytes())
		want := float64(x.g.Size() * (x.g.Size() + 1) / 2)
		for _, i := range []int{0, t.Len() / 2, t.Len() - 1} {
			if v, err := own.Float64At(i); err != nil || v != want {
				return fmt.Errorf("element %d of %d is %v, want %v: %w", i, t.Len(), v, want, err)
			}
		}
	}
	return nil
}

// settle waits until the stream has done everything.
func (x *member) settle() (err error) {
	defer must.Catch(&err)
	e := must.Get(x.stream.Record())
	defer e.Release()
	return e.Sync(x)
}

// lost keeps what the simulator says of memory that was left, or used after its end. Processes tell each
// other on the host that they have let go of memory, which it does not see as an order.
func lost(err error) error {
	var leak *sim.Leak
	var life *sim.Lifetime
	var order *sim.Race
	if errors.As(err, &leak) || errors.As(err, &life) || !errors.As(err, &order) {
		return err
	}
	return nil
}

// TestEpochs: in each round a process dies in an operation on devices, and another one takes its place.
// Sums on devices are right in every epoch, so each has windows of its own. Old epochs leave no streams,
// memory, mappings or peer accesses.
func TestEpochs(t *testing.T) {
	for _, way := range []string{cuda.DirectWork, cuda.HostWork} {
		t.Run(way, func(t *testing.T) { epochs(t, way) })
	}
}

func epochs(t *testing.T, way string) {
	const size, rounds = 3, 4
	m, err := sim.New(sim.Config{Devices: size, Seed: uint64(time.Now().UnixNano()), Kernels: simkernels.All()})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	st, fabric, processes := store.NewHash(), mem.NewFabric(), 0
	defer st.Close()
	begin := func(device int) (_ *member, err error) {
		defer must.Catch(&err)
		x := &member{rank: rank{Context: ctx}, at: device, fabric: &mortal{Fabric: fabric, joined: make(map[string]int)}}
		x.driver = must.Get(m.Process(fmt.Sprint("process ", processes)))
		processes++
		x.closers = append(x.closers, x.driver)
		x.device = must.Get(x.driver.Device(device))
		x.stream = must.Get(x.device.NewStream(driver.StreamOptions{Name: "trainer"}))
		x.closers = append(x.closers, x.stream)
		if x.small, err = x.tensor(tensor.Float32, 3); err == nil {
			x.large, err = x.tensor(tensor.Float32, 70_001)
		}
		return x, err
	}
	options := func(x *member) pg.Options {
		join := gloo.Options{Fabric: x.fabric}
		return pg.Options{
			Backend: "cpu:gloo,cuda:cuda", Timeout: patience,
			BackendOptions: pg.BackendOptions{join, cuda.Options{Driver: x.driver, AllReduce: way, CPUOptions: join}},
		}
	}
	each := func(ranks []*member, f func(r int, x *member) error) {
		t.Helper()
		var all errgroup.Group
		for r, x := range ranks {
			all.Go(func() error {
				if err := f(r, x); err != nil {
					return fmt.Errorf("rank %d: %w", r, err)
				}
				return nil
			})
		}
		require.NoError(t, all.Wait())
	}
	held := func() sim.Stats {
		s := m.Stats()
		return sim.Stats{
			Memories: s.Memories, Hosts: s.Hosts, Streams: s.Streams, Events: s.Events, Graphs: s.Graphs, Modules: s.Modules, Mappings: s.Mappings,
			Peers: s.Peers, DeviceBytes: s.DeviceBytes, HostBytes: s.HostBytes,
		}
	}
	live := make([]*member, size)
	for r := range live {
		live[r] = must.Get(begin(r))
	}
	each(live, func(r int, x *member) (err error) {
		x.g, err = pg.New(x, st, r, size, options(x))
		return err
	})
	each(live, func(_ int, x *member) error { return x.sum() })
	before := held()
	t.Logf("%+v", before)
	require.NotZero(t, before.Streams)
	if way == cuda.DirectWork {
		// The first group of a process also has the memory in which it tried whether kernels see words of the host. From
		// the first round on, one rank of each group is new.
		before.Hosts -= size - 1
		before.HostBytes -= (size - 1) * 4096
	}
	for round := range rounds {
		victim := round % size
		dead := live[victim]
		rest := append(append([]*member{}, live[:victim]...), live[victim+1:]...)
		var entered sync.WaitGroup
		entered.Add(len(rest))
		each(append([]*member{dead}, rest...), func(_ int, x *member) error {
			if x == dead {
				var dies sync.WaitGroup
				dies.Go(x.fabric.die)
				if round%2 == 1 { // else it does not call the operation
					_ = x.sum()
				}
				dies.Wait()
				entered.Wait() // the others keep its memory until then, and Close waits for a second
				return lost(x.end())
			}
			enters := sync.OnceFunc(entered.Done)
			defer enters()
			var err error
			for err == nil {
				err = x.sum()
			}
			var e *pg.EpochError
			if !errors.As(err, &e) || e.Epoch != 2*round {
				return fmt.Errorf("the error of epoch %d is expected: %w", 2*round, err)
			}
			v, err := x.g.Reconfigure(x)
			enters()
			if err != nil || len(v.IDs) != size-1 {
				return fmt.Errorf("members %v: %w", v.IDs, err)
			}
			return x.sum()
		})
		next, err := begin(dead.at)
		require.NoError(t, err)
		live = append(rest, next)
		each(live, func(_ int, x *member) error {
			if x == next {
				if x.g, err = pg.Join(x, st, options(x)); err != nil {
					return err
				}
			} else if _, err := x.g.Reconfigure(x, pg.ReconfigureOptions{Min: size}); err != nil {
				return err
			}
			return x.sum()
		})
		require.Eventually(t, func() bool { return held() == before }, patience, 10*time.Millisecond, "round %d, before it: %+v", round, before)
	}
	each(live, func(_ int, x *member) error { return lost(x.end()) })
	require.NoError(t, lost(m.Close()))
}
