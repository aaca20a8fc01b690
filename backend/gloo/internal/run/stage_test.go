package run_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/netstage"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// patience bounds each wait. Only a broken stage makes a test wait that long.
const patience = run.Patience

// team is a group in which each rank is a cluster.
type team struct {
	fabric *mem.Fabric
	bs     []*gloo.Backend
	layout *cluster.Layout
}

// newTeam makes a team in memory. wrap may replace a rank's mesh.
func newTeam(t testing.TB, n int, wrap func(w *team, rank int, m transport.Mesh) transport.Mesh) *team {
	return newTeamBy(t, n, "", wrap)
}

// newTeamBy is newTeam with a name for Options.AllReduce.
func newTeamBy(t testing.TB, n int, allReduce string, wrap func(w *team, rank int, m transport.Mesh) transport.Mesh) *team {
	w := &team{fabric: mem.NewFabric()}
	for r := range n {
		o := over(w.fabric, r, n, 1, 0)
		o.Timeout = patience
		set := o.Specific.(gloo.Options)
		set.AllReduce = allReduce
		o.Specific = set
		b := must.Get(gloo.New(context.Background(), o))
		t.Cleanup(func() { b.Close() })
		if wrap != nil {
			b.WrapMesh(func(m transport.Mesh) transport.Mesh { return wrap(w, r, m) })
		}
		w.bs = append(w.bs, b)
	}
	w.layout = alone(n)
	return w
}

// alone is the layout of n clusters with one rank each.
func alone(n int) *cluster.Layout {
	numbers := make([]int, n)
	for r := range numbers {
		numbers[r] = r
	}
	return cluster.New(numbers, nil)
}

// settled checks that no rank has steps or messages left.
func (w *team) settled(t testing.TB) {
	t.Helper()
	for r, b := range w.bs {
		require.Zero(t, b.Unsettled(), "rank %d", r)
	}
}

// job is a network stage on all ranks of a team, with the stages inside run by the test.
type job struct {
	call    cluster.Call
	op      work.OpType
	combine func(dst, src []byte)
	bufs    [][3][]byte // by rank
	shuffle *rand.Rand  // of the order in which steps become ready; nil for the plan's
	ready   func(rank, step int)
	results [][]int // by rank: chunks
	calls   []*netstage.Call
}

func newJob(n int, call cluster.Call, combine func(dst, src []byte)) *job {
	op := map[plan.Op]work.OpType{
		plan.OpAllReduce: work.AllReduce, plan.OpReduce: work.Reduce, plan.OpBroadcast: work.Broadcast,
		plan.OpReduceScatter: work.ReduceScatter, plan.OpAllGather: work.AllGather, plan.OpBarrier: work.Barrier,
	}[call.Op]
	return &job{call: call, op: op, combine: combine, bufs: make([][3][]byte, n), results: make([][]int, n), calls: make([]*netstage.Call, n)}
}

// issue issues the stage on a rank. The returned function runs the stages inside and says what is
// ready, until the stage ends.
func (j *job) issue(w *team, ctx context.Context, r int) (walk func() error, err error) {
	call := j.call
	call.Rank = r
	p, err := w.layout.Plan(call)
	if err != nil {
		return nil, err
	}
	j.bufs[r][plan.Scratch] = make([]byte, p.Scratch)
	done := make(chan int, p.Chunks)
	memory := func(s *cluster.Step, in bool, k int) []byte {
		buf, off := s.Dst, s.Parts[k].Dst
		if in {
			buf, off = s.Src, s.Parts[k].Src
		}
		return j.bufs[r][buf][off : off+s.Parts[k].Len]
	}
	c, err := w.bs[r].Stage(ctx, netstage.Stage{
		Op: j.op, Plan: p, Combine: j.combine,
		Memory: func(i int) []byte { return memory(&p.Steps[i], false, 0) },
		Result: func(chunk int) {
			j.results[r] = append(j.results[r], chunk)
			done <- chunk
		},
	})
	if err != nil {
		return nil, err
	}
	j.calls[r] = c
	var rng *rand.Rand
	if j.shuffle != nil {
		rng = rand.New(rand.NewPCG(j.shuffle.Uint64(), 0))
	}
	return func() error {
		var begun []int
		flush := func() {
			if rng != nil {
				rng.Shuffle(len(begun), func(a, b int) { begun[a], begun[b] = begun[b], begun[a] })
			}
			for _, i := range begun {
				if j.ready != nil {
					j.ready(r, i)
				}
				c.Ready(i) // ErrLate after a failure
			}
			begun = begun[:0]
		}
		for i := range p.Steps {
			switch s := &p.Steps[i]; {
			case s.Finish:
				flush()
				select {
				case <-done:
				case <-c.Done():
					if c.Err() != nil {
						return c.Err()
					}
				}
			case s.Stage == cluster.Between:
				begun = append(begun, i)
			default: // of one rank
				for k := range s.Parts {
					copy(memory(s, false, k), memory(s, true, k))
				}
			}
		}
		flush()
		return c.Wait(context.Background())
	}, nil
}

// run runs the job on all ranks, which have all issued it before the first step is ready.
func (j *job) run(t testing.TB, w *team) []error {
	t.Helper()
	errs, walks := make([]error, len(w.bs)), make([]func() error, len(w.bs))
	for r := range w.bs {
		walks[r] = must.Get(j.issue(w, context.Background(), r))
	}
	onAll(t, w.bs, func(r int, _ *gloo.Backend) { errs[r] = walks[r]() })
	return errs
}

// done runs the job, which must succeed.
func (j *job) done(t testing.TB, w *team) {
	t.Helper()
	for r, err := range j.run(t, w) {
		require.NoError(t, err, "rank %d", r)
	}
	w.settled(t)
}

// numbered draws n elements for which sums and products are exact.
func numbered(rng *rand.Rand, d tensor.DType, n int) []byte {
	b := make([]byte, n*d.Size())
	for i := range n {
		switch d {
		case tensor.Float32:
			binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits([]float32{-1, 0.5, 1, 2}[rng.IntN(4)]))
		case tensor.Int32:
			binary.LittleEndian.PutUint32(b[4*i:], rng.Uint32())
		default:
			b[i] = byte(rng.Uint32())
		}
	}
	return b
}

// reduction is a random collective that reduces, with its operands by rank.
type reduction struct {
	*job
	red      backend.Reduction
	operands [][]byte
}

func (w *team) reduction(t testing.TB, rng *rand.Rand, kind plan.Op, op backend.ReduceOp, d tensor.DType, elements, chunk int) *reduction {
	n := len(w.bs)
	red := must.Get(op.Reduction(d, n))
	call := cluster.Call{Op: kind, Bytes: int64(elements * d.Size()), Elem: int64(red.Grain), Chunk: int64(chunk * d.Size())}
	if kind == plan.OpReduce {
		call.Root = rng.IntN(n)
	}
	x := &reduction{job: newJob(n, call, red.Combine), red: red}
	all := elements
	if kind == plan.OpReduceScatter {
		all *= n
	}
	for r := range n {
		v := numbered(rng, d, all)
		x.operands = append(x.operands, v)
		mine := bytes.Clone(v)
		if red.Before != nil {
			red.Before(mine)
		}
		x.bufs[r][plan.Out] = mine
		if kind == plan.OpReduceScatter {
			x.bufs[r] = [3][]byte{plan.In: mine, plan.Out: make([]byte, elements*d.Size())}
		}
	}
	return x
}

// check runs the reduction and compares every byte.
func (x *reduction) check(t testing.TB, w *team) {
	t.Helper()
	x.done(t, w)
	x.compare(t)
}

func (x *reduction) compare(t testing.TB) {
	t.Helper()
	want := bytes.Clone(x.operands[0])
	for r, v := range x.operands {
		v = bytes.Clone(v)
		if x.red.Before != nil {
			x.red.Before(v)
		}
		if r == 0 {
			want = v
		} else {
			x.red.Combine(want, v)
		}
	}
	if x.red.After != nil {
		x.red.After(want)
	}
	for r := range x.bufs {
		got, want := x.bufs[r][plan.Out], want
		if x.call.Op == plan.OpReduceScatter {
			want = want[r*len(got) : (r+1)*len(got)]
		}
		if x.call.Op == plan.OpReduce && r != x.call.Root {
			continue
		}
		if x.red.After != nil {
			x.red.After(got)
		}
		require.True(t, bytes.Equal(want, got), "%v of %d bytes on rank %d", x.call.Op, x.call.Bytes, r)
	}
}

var stagedOperators = []struct {
	op backend.ReduceOp
	d  tensor.DType
}{
	{backend.Sum(), tensor.Float32}, {backend.Avg(), tensor.Float32}, {backend.Min(), tensor.Float32}, {backend.Max(), tensor.Int32},
	{backend.Product(), tensor.Float32}, {backend.Sum(), tensor.Int32}, {backend.BAnd(), tensor.Int32}, {backend.BOr(), tensor.Uint8}, {backend.BXor(), tensor.Uint8},
	{backend.PreMulSum(4), tensor.Float32},
	{adding, tensor.Int32},
}

// adding is the sum as a function of the program.
var adding = backend.Custom("add", func(d tensor.DType, dst, src []byte) {
	must.Get(backend.Sum().Reduction(d, 1)).Combine(dst, src)
})

func drawn(t testing.TB) *rand.Rand {
	return must.Rand(t)
}

// TestF36AllReduce: reductions over the registry are right to the bit on all ranks, for every number
// of ranks, operator and number of chunks.
func TestF36AllReduce(t *testing.T) {
	rng := drawn(t)
	for n := 1; n <= 17; n++ {
		w := newTeam(t, n, nil)
		for i, o := range stagedOperators {
			kind := []plan.Op{plan.OpAllReduce, plan.OpReduceScatter, plan.OpReduce}[(i+n)%3]
			w.reduction(t, rng, kind, o.op, o.d, rng.IntN(400), 50+rng.IntN(100)).check(t, w)
		}
	}
}

// TestF36OverWires has network stages over the native wire, with clusters of one rank and of two, and
// over Gloo's. Ranks that share memory send nothing over their connections.
func TestF36OverWires(t *testing.T) {
	onLinux(t)
	rng := drawn(t)
	for _, o := range [][]gloo.Options{
		{{Host: "a"}, {Host: "b"}}, {{Host: "a"}, {Host: "b"}, {Host: "c"}}, {{Host: "a"}, {Host: "a"}, {Host: "b"}},
		{{Wire: gloo.WireGloo}, {Wire: gloo.WireGloo}, {Wire: gloo.WireGloo}},
		{{Wire: gloo.WireNative}, {Wire: gloo.WireNative}, {Wire: gloo.WireNative}},
	} {
		bs := grouped(t, o...)
		memory := bs[0].Explain().Links[0].Transport == "shm" && len(bs[0].Explain().Clusters) == 0
		sent := func() (n uint64) {
			for i := 0; memory && i < len(bs); i++ {
				for _, k := range bs[i].Sent() {
					n += k
				}
			}
			return n
		}
		before := sent()
		w := &team{bs: bs, layout: alone(len(bs))}
		for i := range 6 {
			kind := []plan.Op{plan.OpAllReduce, plan.OpReduceScatter, plan.OpReduce}[i%3]
			w.reduction(t, rng, kind, backend.Sum(), tensor.Float32, rng.IntN(400_000), 50_000).check(t, w)
			onAll(t, bs, func(_ int, b *gloo.Backend) { require.NoError(t, barrier(b)) }) // between other collectives
		}
		require.Less(t, sent()-before, uint64(10_000))
	}
}

// counting counts what a rank sends.
type counting struct {
	transport.Mesh
	messages, bytes atomic.Int64
}

func (c *counting) Send(r *transport.Request) {
	c.messages.Add(1)
	c.bytes.Add(int64(len(r.Buf)))
	c.Mesh.Send(r)
}

// counted makes a team whose ranks count.
func counted(t testing.TB, n int) (*team, []*counting) { return countedBy(t, n, "") }

func countedBy(t testing.TB, n int, allReduce string) (*team, []*counting) {
	all := make([]*counting, n)
	return newTeamBy(t, n, allReduce, func(_ *team, rank int, m transport.Mesh) transport.Mesh {
		all[rank] = &counting{Mesh: m}
		return all[rank]
	}), all
}

// TestF36Messages: a rank sends 2N-2 messages for each chunk, and 2(N-1)/N of its bytes. Two exchange
// a chunk at once.
func TestF36Messages(t *testing.T) {
	rng := drawn(t)
	for _, n := range []int{2, 3, 5, 8} {
		w, counts := counted(t, n)
		const chunks, count = 6, 30 << 10 // a multiple of every n
		w.reduction(t, rng, plan.OpAllReduce, backend.Sum(), tensor.Int32, chunks*count, count).check(t, w)
		messages := 2*n - 2
		if n == 2 {
			messages = 1
		}
		for _, c := range counts {
			require.EqualValues(t, chunks*messages, c.messages.Load())
			require.EqualValues(t, chunks*4*count*2*(n-1)/n, c.bytes.Load())
		}
	}
}

// TestF37FewElements: fewer elements than ranks, none at all included. Without elements there are no
// messages.
func TestF37FewElements(t *testing.T) {
	rng := drawn(t)
	for n := 1; n <= 9; n++ {
		w, counts := counted(t, n)
		for _, kind := range []plan.Op{plan.OpAllReduce, plan.OpReduceScatter} {
			w.reduction(t, rng, kind, backend.Avg(), tensor.Float32, 0, 1).check(t, w)
			require.Zero(t, counts[0].messages.Load())
		}
		for elements := range n + 1 {
			for _, kind := range []plan.Op{plan.OpAllReduce, plan.OpReduceScatter} {
				w.reduction(t, rng, kind, backend.Sum(), tensor.Int32, elements, 2).check(t, w)
			}
			for _, c := range counts {
				c.messages.Store(0)
			}
			w.reduction(t, rng, plan.OpAllReduce, backend.Sum(), tensor.Int32, 0, 0).check(t, w)
			require.Zero(t, counts[0].messages.Load())
		}
	}
}

// TestF38EarlyAndReordered: steps become ready in another order on every rank. Messages of different
// steps arrive in any order. Collectives follow each other at once. The results are the same.
func TestF38EarlyAndReordered(t *testing.T) {
	rng := drawn(t)
	for _, n := range []int{2, 3, 6} {
		w := newTeam(t, n, func(_ *team, rank int, m transport.Mesh) transport.Mesh {
			return newShuffling(t, m, rng.Uint64())
		})
		for i := range 10 {
			x := w.reduction(t, rng, []plan.Op{plan.OpAllReduce, plan.OpReduceScatter}[i%2], backend.Sum(), tensor.Float32, rng.IntN(20_000), 1000)
			x.shuffle = rand.New(rand.NewPCG(rng.Uint64(), 0))
			x.check(t, w)
		}
	}
}

// shuffling sends messages in another order than they are posted. Those of one slot to one rank keep
// theirs, because they match in that order.
type shuffling struct {
	transport.Mesh
	mu    sync.Mutex
	cond  sync.Cond
	held  []*transport.Request
	ended bool
}

func newShuffling(t testing.TB, m transport.Mesh, seed uint64) *shuffling {
	s := &shuffling{Mesh: m}
	s.cond.L = &s.mu
	rng := rand.New(rand.NewPCG(seed, 0))
	var wg sync.WaitGroup
	wg.Go(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for {
			for len(s.held) == 0 && !s.ended {
				s.cond.Wait()
			}
			if len(s.held) == 0 {
				return
			}
			any := s.held[rng.IntN(len(s.held))]
			i := slices.IndexFunc(s.held, func(r *transport.Request) bool { return r.Peer == any.Peer && r.Slot == any.Slot })
			r := s.held[i]
			s.held = slices.Delete(s.held, i, i+1)
			s.mu.Unlock()
			s.Mesh.Send(r)
			s.mu.Lock()
		}
	})
	t.Cleanup(func() {
		s.mu.Lock()
		s.ended = true
		s.cond.Signal()
		s.mu.Unlock()
		wg.Wait()
	})
	return s
}

func (s *shuffling) Send(r *transport.Request) {
	s.mu.Lock()
	s.held = append(s.held, r)
	s.cond.Signal()
	s.mu.Unlock()
}

// TestF38BoundHolds: while a rank is not ready, the others have the steps under way that their plans let
// begin, and no more. What they have sent early is used later.
func TestF38BoundHolds(t *testing.T) {
	const n, chunks, count = 3, 40, 3000
	w, counts := counted(t, n)
	x := w.reduction(t, drawn(t), plan.OpAllReduce, backend.Sum(), tensor.Int32, chunks*count, count)
	gate := make(chan struct{})
	x.ready = func(rank, step int) {
		if rank == 2 {
			<-gate
		}
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		walk := must.Get(x.issue(w, context.Background(), r))
		wg.Go(func() { errs[r] = walk() })
	}
	// The plan lets three chunks begin. Of each, ranks 0 and 1 send their own block. Then rank 0 waits for
	// its message to rank 2, and rank 1 for one from rank 2.
	sent := func() [n]int64 {
		return [n]int64{counts[0].messages.Load(), counts[1].messages.Load(), counts[2].messages.Load()}
	}
	for ctx := bounded(t); sent() != [n]int64{3, 3, 0}; runtime.Gosched() {
		require.NoError(t, ctx.Err(), "%v", sent())
	}
	for r := range n {
		require.Empty(t, x.calls[r].Err())
		require.False(t, x.calls[r].IsCompleted())
	}
	require.Equal(t, [n]int64{3, 3, 0}, sent())
	close(gate)
	run.Finish(t, "all ranks", &wg)
	require.NoError(t, errors.Join(errs...))
	x.compare(t)
	for r := range n {
		require.Len(t, x.results[r], chunks)
	}
	w.settled(t)
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// dying is a rank that dies instead of sending its message number at.
type dying struct {
	transport.Mesh
	sent atomic.Int64
	at   int64
	die  func()
}

func (d *dying) Send(r *transport.Request) {
	if d.sent.Add(1) == d.at {
		d.die()
	}
	d.Mesh.Send(r)
}

// TestF39Death: a rank dies at each of its messages. All other ranks that need it end with an error
// that names it, and the step between clusters. Nothing is left over.
func TestF39Death(t *testing.T) {
	const n, chunks, victim = 4, 3, 2
	for _, kind := range []plan.Op{plan.OpAllReduce, plan.OpReduceScatter, plan.OpAllGather, plan.OpBroadcast} {
		for at := int64(1); ; at++ {
			var d *dying
			w := newTeam(t, n, func(w *team, rank int, m transport.Mesh) transport.Mesh {
				if rank != victim {
					return m
				}
				d = &dying{Mesh: m, at: at, die: func() { w.fabric.Kill("/0", victim) }}
				return d
			})
			j := newJob(n, cluster.Call{Op: kind, Bytes: chunks * 400, Elem: 4, Chunk: 400}, func(dst, src []byte) {})
			for r := range n {
				j.bufs[r][plan.Out], j.bufs[r][plan.In] = make([]byte, n*chunks*400), make([]byte, n*chunks*400)
			}
			errs := j.run(t, w)
			if d.sent.Load() < at {
				require.Greater(t, at, int64(2), "%v", kind)
				require.NoError(t, errors.Join(errs...))
				break
			}
			failed := 0
			for r, err := range errs {
				if err == nil {
					continue
				}
				failed++
				e := must.As[*work.Error](t, err, "%v: rank %d", kind, r)
				require.Equal(t, r, e.Rank)
				require.Regexp(t, `on rank \d: step \d+ of \d+ \(between clusters, chunk \d+\): `, err.Error())
				if r != victim {
					require.Equal(t, victim, e.Peer)
					require.ErrorIs(t, err, work.ErrPeerDied)
				}
			}
			require.GreaterOrEqual(t, failed, 2, "%v: rank 2 and the next cannot end", kind)
			w.settled(t)
			require.ErrorContains(t, must.Err(j.issue(w, context.Background(), 0)), "rank 2 died")
		}
	}
}

// TestF39OneRankFails: one rank has a plan for another size, a function that panics, memory of another
// size, or a program that gives up. The stage ends on all ranks.
func TestF39OneRankFails(t *testing.T) {
	const n = 3
	begin := func(t *testing.T) (*team, *job) {
		j := newJob(n, cluster.Call{Op: plan.OpAllReduce, Bytes: 2000, Elem: 4, Chunk: 400}, func(dst, src []byte) {})
		for r := range n {
			j.bufs[r][plan.Out] = make([]byte, 2000)
		}
		return newTeam(t, n, nil), j
	}
	check := func(t *testing.T, w *team, errs []error, say string) {
		t.Helper()
		for r, err := range errs {
			require.ErrorContains(t, err, say, "rank %d", r)
		}
		w.settled(t)
	}
	t.Run("size", func(t *testing.T) {
		w, j := begin(t)
		errs := make([]error, n)
		onAll(t, w.bs, func(r int, _ *gloo.Backend) {
			mine := *j
			if r == 1 {
				mine.call.Bytes, mine.call.Chunk = 1600, 320
			}
			walk, err := mine.issue(w, context.Background(), r)
			if errs[r] = err; err == nil {
				errs[r] = walk()
			}
		})
		for _, err := range errs {
			require.ErrorIs(t, err, work.ErrMismatch)
		}
		check(t, w, errs, "disagree on operation, size or dtype")
	})
	t.Run("abort", func(t *testing.T) {
		w, j := begin(t)
		j.ready = func(r, step int) {
			if r == 1 && step == 2 {
				j.calls[1].Abort(errors.New("the device is lost"))
			}
		}
		errs := j.run(t, w)
		for _, err := range errs {
			require.ErrorIs(t, err, work.ErrAborted)
		}
		check(t, w, errs, "the device is lost")
	})
	t.Run("context", func(t *testing.T) {
		w, j := begin(t)
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		j.ready = func(r, step int) {
			if r == 1 && step == 2 {
				cancel(errors.New("enough of it"))
				<-j.calls[1].Done()
			}
		}
		errs := make([]error, n)
		onAll(t, w.bs, func(r int, _ *gloo.Backend) {
			of := context.Background()
			if r == 1 {
				of = ctx
			}
			walk, err := j.issue(w, of, r)
			if errs[r] = err; err == nil {
				errs[r] = walk()
			}
		})
		check(t, w, errs, "enough of it")
	})
	t.Run("panic", func(t *testing.T) {
		w, j := begin(t)
		var once atomic.Bool
		j.combine = func(dst, src []byte) {
			if once.CompareAndSwap(false, true) {
				panic("no sum")
			}
		}
		errs := j.run(t, w)
		for _, err := range errs {
			require.ErrorIs(t, err, work.ErrPanicked)
		}
		check(t, w, errs, "no sum")
	})
	t.Run("memory", func(t *testing.T) {
		w, j := begin(t)
		errs := make([]error, n)
		onAll(t, w.bs, func(r int, b *gloo.Backend) {
			if r != 1 {
				walk, err := j.issue(w, context.Background(), r)
				if errs[r] = err; err == nil {
					errs[r] = walk()
				}
				return
			}
			call := j.call
			call.Rank = r
			p := must.Get(w.layout.Plan(call))
			c, err := b.Stage(context.Background(), netstage.Stage{
				Op: j.op, Plan: p, Combine: j.combine, Memory: func(int) []byte { return make([]byte, 404) },
			})
			require.NoError(t, err)
			for i := range p.Steps {
				c.Ready(i)
			}
			errs[r] = c.Wait(context.Background())
		})
		check(t, w, errs, "its memory has 404 bytes, want 400")
	})
}

// TestF40NoMember: plans that are not for this rank or group are errors, and the group goes on.
func TestF40NoMember(t *testing.T) {
	w := newTeam(t, 3, nil)
	memory := func(int) []byte { return make([]byte, 400) }
	for say, c := range map[string]struct {
		layout *cluster.Layout
		rank   int
	}{
		"the plan is that of rank 1": {w.layout, 1}, "for ranks [0 1 2 3], in a group of 3": {alone(4), 0},
	} {
		p := must.Get(c.layout.Plan(cluster.Call{Op: plan.OpAllReduce, Rank: c.rank, Bytes: 400, Elem: 4}))
		s := netstage.Stage{Op: work.AllReduce, Plan: p, Memory: memory, Combine: func(dst, src []byte) {}}
		require.ErrorContains(t, must.Err(w.bs[0].Stage(context.Background(), s)), say)
		require.Zero(t, w.bs[0].Seq())
	}
	j := newJob(3, cluster.Call{Op: plan.OpAllReduce, Bytes: 400, Elem: 4}, func(dst, src []byte) {})
	for r := range 3 {
		j.bufs[r][plan.Out] = make([]byte, 400)
	}
	walk := must.Get(j.issue(w, context.Background(), 0))
	c := j.calls[0]
	for _, i := range []int{-1, 1, 2} { // step 1 is the end of the chunk
		require.ErrorContains(t, c.Ready(i), fmt.Sprintf("step %d is ready, which is no step between clusters", i))
	}
	require.NoError(t, c.Ready(0))
	require.ErrorIs(t, c.Ready(0), callback.ErrDuplicate)
	c.Abort(errors.New("enough"))
	require.ErrorContains(t, walk(), "enough")
	w.settled(t)
}

// TestF41Broadcast: from every rank, for every number of them. Each sends the data once at most.
func TestF41Broadcast(t *testing.T) {
	rng := drawn(t)
	const length = 7 * 1000
	for n := 1; n <= 9; n++ {
		w, counts := counted(t, n)
		for root := range n {
			j := newJob(n, cluster.Call{Op: plan.OpBroadcast, Root: root, Bytes: length, Chunk: 1000}, nil)
			want := numbered(rng, tensor.Uint8, length)
			for r := range n {
				j.bufs[r][plan.Out] = make([]byte, length)
			}
			copy(j.bufs[root][plan.Out], want)
			j.done(t, w)
			total := int64(0)
			for r := range n {
				require.Equal(t, want, j.bufs[r][plan.Out])
				sent := counts[r].bytes.Swap(0)
				require.LessOrEqual(t, sent, int64(length))
				total += sent
			}
			require.EqualValues(t, (n-1)*length, total)
		}
	}
}

// TestF41Pipelined: a chunk comes to the last rank before the next one is ready at the first.
func TestF41Pipelined(t *testing.T) {
	const n, chunks, length = 4, 10, 1000
	w := newTeam(t, n, nil)
	plans := make([]*cluster.Plan, n)
	for r := range plans {
		var err error
		plans[r], err = w.layout.Plan(cluster.Call{Op: plan.OpBroadcast, Rank: r, Bytes: chunks * length, Chunk: length})
		require.NoError(t, err)
		require.Equal(t, chunks, plans[r].Chunks)
	}
	came := make(chan int, chunks)
	onAll(t, w.bs, func(r int, b *gloo.Backend) {
		s := netstage.Stage{Op: work.Broadcast, Plan: plans[r], Memory: func(int) []byte { return make([]byte, length) }}
		if r == n-1 {
			s.Result = func(chunk int) { came <- chunk }
		}
		c := must.Get(b.Stage(context.Background(), s))
		for i, step := range plans[r].Steps {
			if step.Finish {
				continue
			}
			require.NoError(t, c.Ready(i))
			if r == 0 {
				require.Equal(t, step.Chunk, <-came)
			}
		}
		require.NoError(t, c.Wait(context.Background()))
	})
	w.settled(t)
}

// TestF43Blocks: blocks of any length, none among them, land in their places on every rank.
// TestF42AllGatherOnAnyAxis and TestF43AllGatherOfAnyShape in package pg have the tensors.
func TestF43Blocks(t *testing.T) {
	rng := drawn(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, nil)
		counts, want := make([]int64, n), []byte{}
		blocks := make([][]byte, n)
		for r := range n {
			blocks[r] = numbered(rng, tensor.Uint8, rng.IntN(4)*rng.IntN(500))
			counts[r], want = int64(len(blocks[r])), append(want, blocks[r]...)
		}
		j := newJob(n, cluster.Call{Op: plan.OpAllGather, Counts: counts, Chunk: 200}, nil)
		for r := range n {
			j.bufs[r][plan.In], j.bufs[r][plan.Out] = blocks[r], make([]byte, len(want))
		}
		j.done(t, w)
		for r := range n {
			require.Equal(t, want, j.bufs[r][plan.Out])
		}
	}
}

// TestF44Vanished: a rank leaves, or falls silent, or does not become ready. Its group's liveness ends
// the first wait, the timeout the others. The errors name the rank.
func TestF44Vanished(t *testing.T) {
	begin := func(t *testing.T, b *gloo.Backend, timeout time.Duration, ready bool) *netstage.Call {
		p := must.Get(alone(b.Size()).Plan(cluster.Call{Op: plan.OpAllReduce, Rank: b.Rank(), Bytes: 80, Elem: 4}))
		c, err := b.Stage(context.Background(), netstage.Stage{
			Op: work.AllReduce, Plan: p, Memory: func(int) []byte { return make([]byte, 80) }, Combine: func(dst, src []byte) {}, Timeout: timeout,
		})
		require.NoError(t, err)
		if ready {
			require.NoError(t, c.Ready(0))
		}
		return c
	}
	t.Run("leaves", func(t *testing.T) {
		w := newTeam(t, 3, nil)
		c := begin(t, w.bs[0], 0, true)
		require.NoError(t, w.bs[2].Close())
		err := c.Wait(bounded(t))
		require.ErrorIs(t, err, work.ErrPeerLeft)
		require.ErrorContains(t, err, "step 1 of 2 (between clusters, chunk 0): rank 2 left the group")
		require.ErrorIs(t, c.Ready(0), callback.ErrDuplicate)
		w.settled(t)
	})
	t.Run("silent", func(t *testing.T) {
		run.VirtualTime(t, func(t *testing.T) {
			w := newTeam(t, 3, nil)
			defer closeAll(w)
			w.fabric.Freeze("/0", 2)
			c := begin(t, w.bs[0], time.Minute, true)
			err := c.Wait(context.Background())
			require.ErrorIs(t, err, work.ErrTimeout)
			require.ErrorContains(t, err, "step 1 of 2 (between clusters, chunk 0): rank 2 did not take part in time")
			w.settled(t)
		})
	})
	t.Run("not ready", func(t *testing.T) {
		run.VirtualTime(t, func(t *testing.T) {
			w := newTeam(t, 2, nil)
			defer closeAll(w)
			other := begin(t, w.bs[1], time.Hour, true)
			err := begin(t, w.bs[0], time.Minute, false).Wait(context.Background())
			require.ErrorIs(t, err, work.ErrTimeout)
			require.ErrorContains(t, err, "step 1 of 2 (between clusters, chunk 0): rank 0 did not take part in time: ")
			require.ErrorContains(t, err, "its data were not ready on rank 0")
			require.ErrorContains(t, other.Wait(context.Background()), "rank 0 did not take part in time")
			w.settled(t)
		})
	})
	t.Run("nothing posted", func(t *testing.T) { // the group's end reaches a stage without messages
		w := newTeam(t, 2, nil)
		c := begin(t, w.bs[0], 0, false)
		w.bs[1].Abort(errors.New("enough"))
		require.ErrorContains(t, c.Wait(bounded(t)), "rank 1 aborted the group")
		require.ErrorIs(t, c.Ready(0), callback.ErrLate)
		w.settled(t)
	})
	t.Run("dead before it is ready", func(t *testing.T) {
		w := newTeam(t, 2, nil)
		c := begin(t, w.bs[0], 0, false)
		w.fabric.Kill("/0", 1)
		require.ErrorContains(t, w.bs[0].Err(), "rank 1 died", "for the backend above")
		require.NoError(t, c.Ready(0))
		require.ErrorContains(t, c.Wait(bounded(t)), "rank 1 died")
		w.settled(t)
	})
}

func closeAll(w *team) {
	for _, b := range w.bs {
		b.Close()
	}
	synctest.Wait()
}

// TestF45NobodyWaits: a stage runs when its steps are ready, without a goroutine that waits for it.
// Package work has the futures: TestF45Chains.
func TestF45NobodyWaits(t *testing.T) {
	w := newTeam(t, 3, nil)
	x := w.reduction(t, drawn(t), plan.OpAllReduce, backend.Sum(), tensor.Int32, 1000, 100)
	var ended sync.WaitGroup
	for r := range w.bs {
		walk := must.Get(x.issue(w, context.Background(), r))
		_ = walk
		for i := range 20 {
			x.calls[r].Ready(i)
		}
		ended.Go(func() { <-x.calls[r].Done() })
	}
	run.Finish(t, "all ranks", &ended)
	x.compare(t)
	w.settled(t)
}

// TestStagesAtOnce: two stages of a group that runs several operations at a time do not wait for each
// other.
func TestStagesAtOnce(t *testing.T) {
	w := newTeam(t, 3, nil)
	rng := drawn(t)
	first := w.reduction(t, rng, plan.OpAllReduce, backend.Sum(), tensor.Int32, 1000, 100)
	second := w.reduction(t, rng, plan.OpAllReduce, backend.Sum(), tensor.Int32, 1000, 100)
	onAll(t, w.bs, func(r int, _ *gloo.Backend) {
		walk := must.Get(first.issue(w, context.Background(), r))
		require.NoError(t, must.Get(second.issue(w, context.Background(), r))())
		require.NoError(t, walk())
	})
	first.compare(t)
	second.compare(t)
	w.settled(t)
}
