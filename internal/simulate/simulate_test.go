package simulate

import (
	"cmp"
	"container/heap"
	"context"
	"flag"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/plan"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var seed = flag.Uint64("seed", 0, "seed of random jobs; 0 takes one from the clock")

func newRand(t *testing.T) *rand.Rand {
	n := *seed
	if n == 0 {
		n = uint64(time.Now().UnixNano())
	}
	t.Logf("repeat with -seed %d", n)
	return rand.New(rand.NewPCG(n, 0))
}

var network = Network{
	Latency: 10 * time.Microsecond, Bandwidth: 1.25e9, Overhead: 500 * time.Nanosecond,
	LocalLatency: 300 * time.Nanosecond, LocalBandwidth: 8e9, Memory: 20e9,
	Reduce: 8e9, Copy: 10e9,
}

// grid returns the layout of hosts with perHost ranks each, the first ones on the
// first host and so on.
func grid(hosts, perHost int) *plan.Layout {
	at := make([]int, hosts*perHost)
	for r := range at {
		at[r] = r / perHost
	}
	return plan.NewLayout(at)
}

func lookup(t testing.TB, op plan.Op, name string) *plan.Algorithm {
	t.Helper()
	a, err := plan.Lookup(op, name)
	require.NoError(t, err)
	return a
}

// TestFormulas holds runs against the closed formulas, where those are exact.
func TestFormulas(t *testing.T) {
	found := 0
	for _, op := range plan.Ops() {
		for _, a := range plan.Algorithms(op) {
			for _, size := range []int{2, 4, 8, 32, 128} {
				for _, bytes := range []int64{int64(size) * 8, int64(size) << 13, 1 << 20} {
					c := plan.Call{Size: size, Bytes: bytes, Elem: 8}
					if op == plan.OpBroadcast && a.Chunks {
						c.Chunk = 1 << 14 // takes longer than its overhead
					}
					want, ok := Formula(a, c, network)
					if !ok {
						continue
					}
					found++
					got, err := Run(t.Context(), Job{Network: network}, a, c)
					require.NoError(t, err)
					require.InDelta(t, float64(want), float64(got.Time), 1e-6*float64(want)+2, "%v of %d bytes on %d ranks", a, bytes, size)
				}
			}
		}
	}
	require.Greater(t, found, 15*5*3-1)
}

// TestFormulasAtAnySize compares a group whose size is no power of two with the next larger power
// of two. Unless it is folded, it needs no more.
func TestFormulasAtAnySize(t *testing.T) {
	for _, c := range []struct {
		op   plan.Op
		name string
	}{{plan.OpAllReduce, "ring"}, {plan.OpAllGather, "ring"}, {plan.OpReduceScatter, "ring"}, {plan.OpBroadcast, "chain"}} {
		for _, size := range []int{3, 7, 100} {
			a, call := lookup(t, c.op, c.name), plan.Call{Size: size, Bytes: 8 * 2100, Elem: 8}
			want, ok := Formula(a, call, network)
			require.True(t, ok)
			got, err := Run(t.Context(), Job{Network: network}, a, call)
			require.NoError(t, err)
			require.InEpsilon(t, float64(want), float64(got.Time), 1e-6, "%v on %d ranks", a, size)
		}
	}
}

// TestThousands runs groups of thousands of ranks.
func TestThousands(t *testing.T) {
	thousands := []int{1024, 4096}
	if testing.Short() {
		thousands = thousands[:1]
	}
	for _, c := range []struct {
		op   plan.Op
		name string
	}{
		{plan.OpAllReduce, "halving-doubling"}, {plan.OpAllReduce, "recursive-doubling"}, {plan.OpAllReduce, "binomial"},
		{plan.OpReduceScatter, "halving"}, {plan.OpAllGather, "bruck"}, {plan.OpBroadcast, "scatter-doubling"}, {plan.OpBarrier, "dissemination"},
	} {
		a := lookup(t, c.op, c.name)
		for _, size := range thousands {
			call := plan.Call{Size: size, Bytes: int64(size) * 64, Elem: 8}
			want, ok := Formula(a, call, network)
			require.True(t, ok)
			got, err := Run(t.Context(), Job{Network: network}, a, call)
			require.NoError(t, err)
			require.InEpsilon(t, float64(want), float64(got.Time), 1e-6, "%v on %d ranks", a, size)
		}
	}
}

// TestTraffic compares what a run reports with the plans.
func TestTraffic(t *testing.T) {
	l := grid(4, 3)
	for _, a := range plan.Algorithms(plan.OpAllReduce) {
		c := plan.Call{Size: 12, Bytes: 8 * 120, Elem: 8, Chunk: 64, Layout: l}
		var want Result
		out, in := make([]int64, 8), make([]int64, 8)
		index := []int{0, 1, 0, 2, 3, 2, 4, 5, 4, 6, 7, 6} // two interfaces a host
		for r := range c.Size {
			c.Rank = r
			for _, s := range a.Plan(c).Steps {
				want.Steps++
				if s.Kind != plan.Send {
					continue
				}
				want.Messages++
				want.Sent += s.Len
				if l.Host(r) != l.Host(int(s.Peer)) {
					want.Remote += s.Len
					out[index[r]] += s.Len
					in[index[s.Peer]] += s.Len
				}
			}
		}
		n := network
		n.NICs = 2
		got, err := Run(t.Context(), Job{Network: n, Layout: l}, a, c)
		require.NoError(t, err)
		require.Equal(t, []int64{want.Steps, want.Messages, want.Sent, want.Remote}, []int64{got.Steps, got.Messages, got.Sent, got.Remote}, a.Name)
		for i, link := range got.Links {
			require.Equal(t, Link{Host: i / 2, NIC: i % 2, Out: out[i], In: in[i], Busy: link.Busy}, link, a.Name)
			require.InDelta(t, float64(max(out[i], in[i]))/n.Bandwidth, link.Busy.Seconds(), 2e-9, a.Name)
		}
		require.LessOrEqual(t, got.First, got.Time)
		require.GreaterOrEqual(t, max(got.Busiest().Out, got.Busiest().In), slices.Max(out))
	}
}

// TestSharing has the ranks of a host share what it has.
func TestSharing(t *testing.T) {
	const n = 1 << 20
	run := func(network Network, hosts, each int, name string) time.Duration {
		r, err := Run(t.Context(), Job{Network: network, Layout: grid(hosts, each)}, lookup(t, plan.OpAllToAll, name), plan.Call{Size: hosts * each, Bytes: n})
		require.NoError(t, err)
		return r.Time
	}
	wire := Network{Bandwidth: 1e9}
	one := float64(n) / 1e9
	// Two hosts of m ranks: m messages from each rank by one interface, or m.
	require.InEpsilon(t, 16*one, run(wire, 2, 4, "direct").Seconds(), 1e-6)
	wire.NICs = 2
	halved := run(wire, 2, 4, "direct").Seconds()
	wire.NICs = 4
	quartered := run(wire, 2, 4, "direct").Seconds()
	// Not all interfaces always have something to do.
	require.GreaterOrEqual(t, halved, 8*one)
	require.GreaterOrEqual(t, quartered, 4*one)
	require.Less(t, quartered, halved)
	require.Less(t, halved, 12*one)
	// One host: 12 messages through its memory, or each at its own rate.
	require.InEpsilon(t, 12*one, run(Network{Memory: 1e9}, 1, 4, "direct").Seconds(), 1e-6)
	require.InEpsilon(t, one, run(Network{LocalBandwidth: 1e9}, 1, 4, "direct").Seconds(), 1e-6)
	// Who receives from all at once gets one after another.
	r, err := Run(t.Context(), Job{Network: Network{Bandwidth: 1e9}}, lookup(t, plan.OpGather, "direct"), plan.Call{Size: 9, Bytes: n, Root: 4})
	require.NoError(t, err)
	require.InEpsilon(t, 8*one, r.Time.Seconds(), 1e-6)
}

// TestHierarchyPays has ranks share an interface: what goes between hosts only
// once is faster.
func TestHierarchyPays(t *testing.T) {
	j := Job{Network: network, Layout: grid(8, 8)}
	for _, c := range []struct {
		op          plan.Op
		bytes       int64
		plain, pays string
	}{
		{plan.OpAllReduce, 8 << 20, "two-step", "hierarchical-two-step"},
		{plan.OpAllGather, 1 << 17, "direct", "hierarchical"},
		{plan.OpReduceScatter, 1 << 17, "direct", "hierarchical"},
		{plan.OpBroadcast, 8 << 20, "flat", "hierarchical-binomial"},
	} {
		call := plan.Call{Size: 64, Bytes: c.bytes, Elem: 4}
		plain, err := Run(t.Context(), j, lookup(t, c.op, c.plain), call)
		require.NoError(t, err)
		pays, err := Run(t.Context(), j, lookup(t, c.op, c.pays), call)
		require.NoError(t, err)
		require.Less(t, 3*pays.Time, plain.Time, "%v", c.op)
		require.Less(t, pays.Remote, plain.Remote/7)
	}
}

func TestStragglers(t *testing.T) {
	a, c := lookup(t, plan.OpAllReduce, "halving-doubling"), plan.Call{Size: 33, Bytes: 1 << 16, Elem: 4}
	run := func(s Stragglers) *Result {
		r, err := Run(t.Context(), Job{Network: network, Stragglers: s}, a, c)
		require.NoError(t, err)
		return r
	}
	even := run(Stragglers{Seed: 9})
	late := run(Stragglers{Count: 1, Late: time.Second})
	require.Greater(t, late.Time, time.Second)
	require.Less(t, late.Time, time.Second+even.Time+1)
	slow := run(Stragglers{Count: 33, Slow: 2})
	require.Greater(t, slow.Time, even.Time)
	require.Less(t, slow.Time, 2*even.Time)
	jitter := Stragglers{Seed: 7, Jitter: time.Millisecond}
	first := run(jitter)
	require.Greater(t, first.Time, even.Time)
	require.Equal(t, first, run(jitter))
	jitter.Seed++
	require.NotEqual(t, first.Time, run(jitter).Time)
	require.Equal(t, even.Time, run(Stragglers{Count: 5, Slow: 0.5}).Time, "nobody is fast")
}

// TestEager has long messages wait for their receives.
func TestEager(t *testing.T) {
	n := Network{Latency: time.Millisecond, Bandwidth: 1e9}
	steps := script(
		[]plan.Step{send(1, 0, 1000), wait(0)},
		[]plan.Step{busy(5e6), recv(0, 0, 1000), wait(0)},
	)
	for _, c := range []struct {
		eager int64
		want  time.Duration
	}{
		{0, 5 * time.Millisecond}, // it is there when the receiver wants it
		{1000, 5 * time.Millisecond},
		{999, 7*time.Millisecond + time.Microsecond}, // there, back, there
	} {
		n.Eager, n.Reduce = c.eager, 1e9
		r, err := RunSteps(t.Context(), Job{Network: n}, 2, steps)
		require.NoError(t, err)
		require.Equal(t, c.want, r.Time, "eager to %d", c.eager)
	}
	// All plans must do without room at the receiver.
	for _, op := range plan.Ops() {
		for _, a := range plan.Algorithms(op) {
			n := network
			n.Eager = 1
			_, err := Run(t.Context(), Job{Network: n, Layout: grid(7, 3)}, a, plan.Call{Size: 21, Bytes: 2100, Elem: 4, Chunk: 32})
			require.NoError(t, err, a)
		}
	}
}

func send(peer, req int32, n int64) plan.Step {
	return plan.Step{Kind: plan.Send, Peer: peer, Req: req, Len: n}
}
func recv(peer, req int32, n int64) plan.Step {
	return plan.Step{Kind: plan.Recv, Peer: peer, Req: req, Len: n}
}
func wait(req int32) plan.Step { return plan.Step{Kind: plan.Wait, Req: req} }
func busy(n int64) plan.Step   { return plan.Step{Kind: plan.Reduce, Len: n} }

// script has the ranks run the steps given, one at a time.
func script(steps ...[]plan.Step) func(rank int) iter.Seq[[]plan.Step] {
	return func(rank int) iter.Seq[[]plan.Step] {
		return func(yield func([]plan.Step) bool) {
			for i := range steps[rank] {
				if !yield(steps[rank][i : i+1]) {
					return
				}
			}
		}
	}
}

// TestErrors runs plans that do not fit together.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		steps [][]plan.Step
		eager int64
		want  string
	}{
		"all receive first": {
			[][]plan.Step{
				{recv(1, 0, 4), wait(0), send(2, 0, 4), wait(0)},
				{busy(1), recv(2, 0, 4), wait(0), send(0, 0, 4), wait(0)},
				{recv(0, 0, 4), wait(0), send(1, 0, 4), wait(0)},
			},
			0,
			"simulate: deadlock: 3 of 3 ranks are stuck: rank 0 waits in step 1 for step 0, to receive 4 bytes from rank 1; " +
				"rank 1 waits in step 2 for step 1, to receive 4 bytes from rank 2; rank 2 waits in step 1 for step 0, to receive 4 bytes from rank 0",
		},
		"all send first, without room": {
			[][]plan.Step{
				{send(1, 0, 4), wait(0), recv(1, 0, 4), wait(0)},
				{send(0, 0, 4), wait(0), recv(0, 0, 4), wait(0)},
			},
			3,
			"rank 1 waits in step 1 for step 0, to send 4 bytes to rank 0",
		},
		"nobody sends":        {[][]plan.Step{{recv(1, 0, 4), wait(0)}, {}}, 0, "1 of 2 ranks are stuck: rank 0 waits in step 1"},
		"nobody waits either": {[][]plan.Step{{recv(1, 0, 4)}, {}}, 0, "simulate: rank 0, step 0: nobody sends the 4 bytes that it receives from rank 1"},
		"nobody receives":     {[][]plan.Step{{send(1, 0, 4), wait(0)}, {}}, 0, "simulate: rank 0, step 0: nobody receives its 4 bytes to rank 1"},
		"lengths":             {[][]plan.Step{{send(1, 0, 4), wait(0)}, {busy(1e6), recv(0, 0, 5), wait(0)}}, 0, "simulate: rank 1, step 1 (recv   #0 from 0 out[0:5]): rank 0 sends 4 bytes (step 0)"},
		"lengths, receive first": {
			[][]plan.Step{{recv(1, 0, 5), wait(0)}, {busy(1e6), send(0, 0, 4), wait(0)}}, 0,
			"simulate: rank 1, step 1 (send   #0 to 0 out[0:4]): rank 0 expects 5 bytes (step 0)",
		},
		"request taken":    {[][]plan.Step{{send(1, 0, 4), send(1, 0, 4)}, {}}, 0, "the request is not free"},
		"request negative": {[][]plan.Step{{send(1, -1, 4)}, {}}, 0, "no such peer, request or length"},
		"wait for nothing": {[][]plan.Step{{wait(3)}, {}}, 0, "simulate: rank 0, step 0 (wait   #3): no such request is outstanding"},
		"self":             {[][]plan.Step{{send(0, 0, 4)}, {}}, 0, "no such peer"},
		"stranger":         {[][]plan.Step{{recv(2, 0, 4)}, {}}, 0, "no such peer"},
		"kind":             {[][]plan.Step{{{Kind: 77}}, {}}, 0, "no such kind of step"},
	} {
		t.Run(name, func(t *testing.T) {
			n := network
			n.Eager = c.eager
			_, err := RunSteps(t.Context(), Job{Network: n}, len(c.steps), script(c.steps...))
			require.ErrorContains(t, err, c.want)
		})
	}
	many := make([][]plan.Step, 20)
	for i := range many {
		many[i] = []plan.Step{recv(int32(i+1)%20, 0, 0), wait(0)}
	}
	_, err := RunSteps(t.Context(), Job{}, 20, script(many...))
	require.ErrorIs(t, err, ErrDeadlock)
	require.ErrorContains(t, err, "; and 12 more")
}

func TestJobs(t *testing.T) {
	ring := lookup(t, plan.OpAllReduce, "ring")
	for want, j := range map[string]Job{
		"a latency of -1, want":                      {Network: Network{Latency: -1}},
		"a bandwidth of -1, want":                    {Network: Network{Bandwidth: -1}},
		"a bandwidth of 0.5 bytes a second":          {Network: Network{Reduce: 0.5}},
		"3 stragglers among 2 ranks":                 {Stragglers: Stragglers{Count: 3}},
		"a number of stragglers of -1, want 0":       {Stragglers: Stragglers{Count: -1}},
		"simulate: a layout of 3 ranks for 2":        {Layout: grid(3, 1)},
		"simulate: a jitter of -1e+09, want 0 or mo": {Stragglers: Stragglers{Jitter: -time.Second}},
	} {
		_, err := Run(t.Context(), j, ring, plan.Call{Size: 2, Bytes: 8})
		require.ErrorContains(t, err, want)
	}
	for _, size := range []int{-1, 0, maxRanks + 1} {
		_, err := Run(t.Context(), Job{}, ring, plan.Call{Size: size, Bytes: 8})
		require.ErrorContains(t, err, "ranks, want 1 to 65536")
	}
	_, err := Run(t.Context(), Job{}, lookup(t, plan.OpAllGather, "hierarchical"), plan.Call{Size: 2})
	require.ErrorContains(t, err, "which ranks share a host")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Run(ctx, Job{}, ring, plan.Call{Size: 2, Bytes: 8})
	require.ErrorIs(t, err, context.Canceled)
}

// reference is a second, plain implementation of the model for one rank a host:
// every event in one queue, nothing ahead of time.
type reference struct {
	network Network
	ranks   []refRank
	queue   refQueue
	boxes   map[[2]int][]ps // arrivals by sender and receiver
	order   int
}

type refRank struct {
	steps   []plan.Step
	next    int
	clock   ps
	out, in ps
	sends   map[int32]ps  // when requests that send end
	recvs   map[int32]int // which message of their sender requests receive
	peers   map[int32]int // and whose
	posted  map[int]int   // receives posted, by sender
	asleep  bool
}

type refEvent struct {
	at    ps
	rank  int
	order int
	do    func(at ps)
}

type refQueue []refEvent

func (q refQueue) Len() int { return len(q) }
func (q refQueue) Less(i, j int) bool {
	a, b := q[i], q[j]
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.rank, b.rank), cmp.Compare(a.order, b.order)) < 0
}
func (q refQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *refQueue) Push(x any)   { *q = append(*q, x.(refEvent)) }
func (q *refQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func (f *reference) at(t ps, rank int, do func(at ps)) {
	f.order++
	heap.Push(&f.queue, refEvent{t, rank, f.order, do})
}

func (f *reference) step(id int, now ps) {
	r := &f.ranks[id]
	if r.next == len(r.steps) {
		return
	}
	s := r.steps[r.next]
	again := func(t ps) {
		r.next++
		r.clock = t
		f.at(t, id, func(at ps) { f.step(id, at) })
	}
	switch overhead := picoseconds(f.network.Overhead); s.Kind {
	case plan.Send:
		t := now + overhead
		start := max(t, r.out)
		busy := costOf(f.network.Bandwidth).of(s.Len)
		r.out = start + busy
		r.sends[s.Req] = r.out
		to := int(s.Peer)
		f.at(start+picoseconds(f.network.Latency), id, func(at ps) {
			f.ranks[to].in = max(at, f.ranks[to].in) + busy
			pair := [2]int{id, to}
			f.boxes[pair] = append(f.boxes[pair], f.ranks[to].in)
			if f.ranks[to].asleep {
				f.ranks[to].asleep = false
				f.step(to, f.ranks[to].clock)
			}
		})
		again(t)
	case plan.Recv:
		r.recvs[s.Req], r.peers[s.Req] = r.posted[int(s.Peer)], int(s.Peer)
		r.posted[int(s.Peer)]++
		again(now)
	case plan.Wait:
		if end, ok := r.sends[s.Req]; ok {
			delete(r.sends, s.Req)
			again(max(now, end))
			return
		}
		box := f.boxes[[2]int{r.peers[s.Req], id}]
		if k := r.recvs[s.Req]; k < len(box) {
			again(max(now, box[k]) + overhead)
		} else {
			r.asleep = true
		}
	case plan.Reduce:
		again(now + costOf(f.network.Reduce).of(s.Len))
	case plan.Copy:
		again(now + costOf(f.network.Copy).of(s.Len))
	}
}

// TestReference holds runs of every algorithm against the plain implementation.
func TestReference(t *testing.T) {
	rng := newRand(t)
	for _, op := range plan.Ops() {
		for _, a := range plan.Algorithms(op) {
			for range 5 {
				size := 1 + rng.IntN(20)
				c := plan.Call{Size: size, Root: rng.IntN(size), Bytes: 4 * rng.Int64N(5000), Elem: 4, Chunk: 1 << rng.IntN(14), Layout: grid(size, 1)}
				n := Network{
					Latency: time.Duration(rng.IntN(20000)), Bandwidth: 1e8 + 1e9*rng.Float64(), Overhead: time.Duration(rng.IntN(2000)),
					Reduce: 1e9 * (1 + rng.Float64()), Copy: 5e9,
				}
				f := reference{network: n, ranks: make([]refRank, size), boxes: make(map[[2]int][]ps)}
				for id := range f.ranks {
					c.Rank = id
					f.ranks[id] = refRank{
						steps: a.Plan(c).Steps, sends: make(map[int32]ps), recvs: make(map[int32]int),
						peers: make(map[int32]int), posted: make(map[int]int),
					}
					f.at(0, id, func(at ps) { f.step(id, at) })
				}
				for f.queue.Len() > 0 {
					e := heap.Pop(&f.queue).(refEvent)
					e.do(e.at)
				}
				var last ps
				for _, r := range f.ranks {
					require.Equal(t, len(r.steps), r.next)
					last = max(last, r.clock)
				}
				got, err := Run(t.Context(), Job{Network: n}, a, c)
				require.NoError(t, err)
				require.Equal(t, duration(last), got.Time, "%v: %+v on %+v", a, c, n)
			}
		}
	}
}

// BenchmarkRing has the largest ring all-reduce last: 34 million messages.
func BenchmarkRing(b *testing.B) {
	for _, size := range []int{64, 512, 4096} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			a, messages := lookup(b, plan.OpAllReduce, "ring"), int64(0)
			for b.Loop() {
				r, err := Run(b.Context(), Job{Network: network}, a, plan.Call{Size: size, Bytes: int64(size) << 10, Elem: 4})
				require.NoError(b, err)
				messages = r.Messages
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(messages), "ns/message")
		})
	}
}
