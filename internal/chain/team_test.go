package chain

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/rendezvous"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds each wait. Only a broken stage makes a test wait that long.
const patience = 20 * time.Second

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func seeded(t testing.TB) *rand.Rand {
	n := uint64(time.Now().UnixNano())
	if s := os.Getenv("C10D_SEED"); s != "" {
		var err error
		n, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("C10D_SEED=%d", n)
	return rand.New(rand.NewPCG(n, 0))
}

// team is a stage on every rank of a mesh.
type team struct {
	fabric  *mem.Fabric
	meshes  []transport.Mesh
	stages  []*Stage
	members []int
	slot    uint64 // of the next collective
}

// newTeam makes a team in memory. wrap may replace a rank's mesh.
func newTeam(t testing.TB, n int, wrap func(w *team, rank int, m transport.Mesh) transport.Mesh) *team {
	w := &team{fabric: mem.NewFabric()}
	for r := range n {
		m, err := w.fabric.Join("g", r, n)
		require.NoError(t, err)
		if wrap != nil {
			m = wrap(w, r, m)
		}
		w.add(t, m)
	}
	return w
}

// newTCPTeam makes a team over loopback.
func newTCPTeam(t testing.TB, n int) *team {
	es, addrs := make([]*tcp.Endpoint, n), make([]string, n)
	for r := range es {
		e, err := tcp.Listen(tcp.Options{Host: "127.0.0.1"})
		require.NoError(t, err)
		es[r], addrs[r] = e, e.Addr()
	}
	ms, errs := make([]*tcp.Mesh, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range es {
		wg.Go(func() { ms[r], errs[r] = es[r].Join(bounded(t), r, addrs) })
	}
	wg.Wait()
	w := &team{}
	for r, m := range ms {
		require.NoError(t, errs[r])
		w.add(t, m)
	}
	return w
}

// newGlooTeam makes a team whose meshes speak Gloo's protocol.
func newGlooTeam(t testing.TB, n int) *team {
	st := store.NewHash()
	ms, errs := make([]transport.Mesh, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			ms[r], errs[r] = rendezvous.Connect(bounded(t), rendezvous.Config{
				Store: st, Rank: r, Size: n, Address: netip.MustParseAddr("127.0.0.1"), Timeout: patience, HostName: "host",
			})
		})
	}
	wg.Wait()
	w := &team{}
	for r, m := range ms {
		require.NoError(t, errs[r])
		w.add(t, m)
	}
	return w
}

func (w *team) add(t testing.TB, m transport.Mesh) {
	t.Cleanup(func() { m.Close() })
	w.members = append(w.members, m.Rank())
	w.meshes = append(w.meshes, m)
	w.stages = append(w.stages, New(m))
}

// each runs f for every member at the same time.
func (w *team) each(f func(place int)) {
	var wg sync.WaitGroup
	for i := range w.stages {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// empty checks that nothing is left in a registry.
func (w *team) empty(t testing.TB) {
	t.Helper()
	for _, s := range w.stages {
		arrivals, callbacks := s.reg.waiting()
		require.Zero(t, arrivals+callbacks+s.reg.posted)
		require.False(t, s.Finished())
	}
}

// job is one collective of a team, with all members' memory.
type job struct {
	Collective
	mems    [][][]byte // by member and chunk; by member, chunk and member for blocks: chunk*n+m
	order   [][]int    // by member: the order in which chunks become ready; nil for ascending
	results [][]int    // by member: the chunks in the order of their results
	freed   []int      // by member: how many chunks have been released
}

func (w *team) job(c Collective) *job {
	w.slot += MaxSlots
	c.Members, c.Slot = w.members, w.slot
	n := len(w.members)
	return &job{Collective: c, mems: make([][][]byte, n), order: make([][]int, n), results: make([][]int, n), freed: make([]int, n)}
}

// begin begins j on one member, and says that chunks are ready one by one from another
// goroutine, each once fill has filled it. wait waits for that goroutine.
func (j *job) begin(s *Stage, place int, fill func(chunk int)) (wait func(), err error) {
	n := len(j.Members)
	c := j.Collective
	mem := j.mems[place]
	c.Chunk = func(k int) []byte { return mem[k] }
	c.Block = func(k, m int) []byte { return mem[k*n+m] }
	c.Result = func(k int) { j.results[place] = append(j.results[place], k) }
	c.Released = func(int) { j.freed[place]++ }
	call, err := s.Begin(&c)
	if err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		order := j.order[place]
		for i := range c.Chunks {
			k := i
			if order != nil {
				k = order[i]
			}
			fill(k)
			call.Ready(k) // ErrLate after a failure
		}
	})
	return wg.Wait, nil
}

// run runs j on all members. fill(p, k) fills chunk k of member p before it is ready.
func (w *team) run(t testing.TB, j *job, fill func(place, k int)) []error {
	t.Helper()
	errs := make([]error, len(w.stages))
	ctx := bounded(t)
	w.each(func(p int) {
		filled, err := j.begin(w.stages[p], p, func(k int) { fill(p, k) })
		if errs[p] = err; err == nil {
			errs[p] = w.stages[p].Wait(ctx)
			filled()
		}
	})
	return errs
}

// done checks that every chunk's result was announced once, and its memory released.
func (j *job) done(t testing.TB, errs []error) {
	t.Helper()
	for p, err := range errs {
		require.NoError(t, err, "member %d", p)
		require.Equal(t, j.Chunks, j.freed[p])
		all := slices.Sorted(slices.Values(j.results[p]))
		require.Len(t, all, j.Chunks)
		for k, have := range all {
			require.Equal(t, k, have)
		}
	}
}
