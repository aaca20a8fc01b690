package chain

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 2 * time.Minute

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

// team is a node on every rank, with a group of all of them.
type team struct {
	fabric *mem.Fabric
	meshes []transport.Mesh
	nodes  []*Node
	groups []*Group
}

func newTeam(t testing.TB, n int, o Options) *team {
	w := &team{fabric: mem.NewFabric()}
	for r := range n {
		m, err := w.fabric.Join("chain", r, n)
		require.NoError(t, err)
		w.meshes = append(w.meshes, m)
	}
	w.start(t, o)
	return w
}

func (w *team) start(t testing.TB, o Options) {
	all := make([]int, len(w.meshes))
	for r := range all {
		all[r] = r
	}
	for _, m := range w.meshes {
		node := NewNode(m, o)
		g, err := node.Group("all", all)
		require.NoError(t, err)
		w.nodes, w.groups = append(w.nodes, node), append(w.groups, g)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var wg sync.WaitGroup
		for i, n := range w.nodes {
			wg.Go(func() {
				n.Close(ctx)
				w.meshes[i].Close()
			})
		}
		wg.Wait()
	})
}

func (w *team) empty(t testing.TB) {
	t.Helper()
	for _, n := range w.nodes {
		v, b, c := n.registry.Waiting()
		require.Zero(t, v+int(b)+c)
	}
}

func wait(t testing.TB, cs ...*Chain) {
	t.Helper()
	for i, c := range cs {
		require.NoError(t, c.Wait(bounded(t)), "member %d", i)
	}
}

func i32(xs ...int32) []byte {
	b := make([]byte, 0, 4*len(xs))
	for _, x := range xs {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}

func i32s(b []byte) []int32 {
	xs := make([]int32, len(b)/4)
	for i := range xs {
		xs[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return xs
}

func each(op func(a, b int32) int32) func(dst, src []byte) {
	return func(dst, src []byte) {
		if len(dst) != len(src) {
			panic("lengths differ")
		}
		x, y := i32s(dst), i32s(src)
		for i := range x {
			x[i] = op(x[i], y[i])
		}
		copy(dst, i32(x...))
	}
}

var operators = map[string]func(a, b int32) int32{
	"sum": func(a, b int32) int32 { return a + b },
	"min": func(a, b int32) int32 { return min(a, b) },
	"max": func(a, b int32) int32 { return max(a, b) },
}

// allReduce runs one all-reduce of random numbers, negative ones too, and
// checks every byte of every member.
func (w *team) allReduce(t testing.TB, rng *rand.Rand, op string, count int, inPlace, mean bool) {
	t.Helper()
	n := len(w.groups)
	want := make([]int32, count)
	ins, outs := make([][]byte, n), make([][]byte, n)
	var before [][]byte
	for r := range n {
		xs := make([]int32, count)
		for i := range xs {
			xs[i] = rng.Int32N(2000) - 1000
			if r == 0 {
				want[i] = xs[i]
			} else {
				want[i] = operators[op](want[i], xs[i])
			}
		}
		ins[r] = i32(xs...)
		before = append(before, slices.Clone(ins[r]))
		if outs[r] = ins[r]; !inPlace {
			outs[r] = make([]byte, len(ins[r]))
		}
	}
	var finish func([]byte)
	if mean {
		finish = func(b []byte) {
			xs := i32s(b)
			for i := range xs {
				xs[i] /= int32(n)
			}
			copy(b, i32(xs...))
		}
		for i := range want {
			want[i] /= int32(n)
		}
	}
	cs := make([]*Chain, n)
	for r, g := range w.groups {
		cs[r] = g.AllReduce(bounded(t), outs[r], ins[r], 4, each(operators[op]), finish)
	}
	wait(t, cs...)
	for r := range n {
		require.Equal(t, want, i32s(outs[r]), "member %d", r)
		if !inPlace {
			require.Equal(t, before[r], ins[r], "the input of member %d has changed", r)
		}
	}
}

// F-36: the ring is right for every number of members, not for powers of two only,
// and each member sends 2N-2 messages.
func TestF36AllReduce(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 17; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := newTeam(t, n, Options{})
			for op := range operators {
				w.allReduce(t, rng, op, 1+rng.IntN(200), true, false)
				w.allReduce(t, rng, op, 1+rng.IntN(200), false, false)
			}
			w.allReduce(t, rng, "sum", 50, false, true) // mean of numbers with signs
			w.empty(t)
		})
	}
}

func TestF36Messages(t *testing.T) {
	for _, n := range []int{2, 3, 5, 8} {
		w := &team{}
		f := mem.NewFabric()
		counters := make([]*counting, n)
		for r := range n {
			m, err := f.Join("chain", r, n)
			require.NoError(t, err)
			counters[r] = &counting{Mesh: m}
			w.meshes = append(w.meshes, counters[r])
		}
		w.start(t, Options{})
		w.allReduce(t, seeded(t), "sum", 100, true, false)
		for _, c := range counters {
			require.EqualValues(t, 2*n-2, c.bodies.Load())
		}
	}
}

type counting struct {
	transport.Mesh
	bodies atomic.Int64
}

func (c *counting) Send(r *transport.Request) {
	if r.Slot == 1 {
		c.bodies.Add(1)
	}
	c.Mesh.Send(r)
}

// F-37: fewer elements than members, none at all included.
func TestF37FewElements(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, Options{})
		for count := range n + 1 {
			w.allReduce(t, rng, "sum", count, count%2 == 0, false)
		}
		w.empty(t)
	}
}

// F-38: members begin in any order and far ahead of each other; what comes early
// waits within limits, and the results are the same.
func TestF38EarlyAndReordered(t *testing.T) {
	rng := seeded(t)
	for _, n := range []int{2, 3, 6} {
		w := newTeam(t, n, Options{Limits: callback.Limits{Values: 1000}})
		const rounds = 20
		bufs := make([][][]byte, n)
		cs := make([][]*Chain, n)
		var wg sync.WaitGroup
		for r := range n {
			delay := rng.IntN(3)
			wg.Go(func() {
				for d := range r * delay {
					<-w.nodes[(r+d)%n].ctxTick()
				}
				for i := range rounds {
					b := i32(int32(r+1), int32(i), int32(-r), 7)
					bufs[r] = append(bufs[r], b)
					cs[r] = append(cs[r], w.groups[r].AllReduce(bounded(t), b, b, 4, each(operators["sum"]), nil))
				}
			})
		}
		wg.Wait()
		for r := range n {
			wait(t, cs[r]...)
			for i, b := range bufs[r] {
				require.Equal(t, []int32{int32(n * (n + 1) / 2), int32(n * i), int32(-n * (n - 1) / 2), int32(7 * n)}, i32s(b))
			}
		}
		w.empty(t)
	}
}

// ctxTick is a little while that depends on the scheduler and on no clock.
func (n *Node) ctxTick() <-chan struct{} {
	c := make(chan struct{})
	n.run(func() { close(c) })
	return c
}

// F-38: with room for one early value only, a rank that begins last still gets
// everything, and holds no more than that.
func TestF38BoundHolds(t *testing.T) {
	w := newTeam(t, 2, Options{Limits: callback.Limits{Values: 1}})
	const chunks = 8
	out, in := make([]byte, chunks*broadcastChunk), make([]byte, chunks*broadcastChunk)
	for i := range out {
		out[i] = byte(i * 7 >> 3)
	}
	a := w.groups[0].Broadcast(bounded(t), out, 0)
	for values := 0; values == 0; {
		values, _, _ = w.nodes[1].registry.Waiting()
		<-w.nodes[1].ctxTick()
	}
	values, bytes, _ := w.nodes[1].registry.Waiting()
	require.Equal(t, 1, values)
	require.EqualValues(t, broadcastChunk, bytes)
	b := w.groups[1].Broadcast(bounded(t), in, 0)
	wait(t, a, b)
	require.Equal(t, out, in)
}

// dying is a rank that dies instead of sending its message number at.
type dying struct {
	transport.Mesh
	sent atomic.Int64
	at   int
	die  func()
}

func (d *dying) Send(r *transport.Request) {
	if r.Slot == 1 && d.sent.Add(1) == int64(d.at) {
		d.die()
	}
	d.Mesh.Send(r)
}

// F-39: a member dies at step k, for all k: every other chain ends with an error
// that names it, or was done, and nothing is left in a registry.
func TestF39Death(t *testing.T) {
	const n = 4
	for step := 1; step <= 2*n-2; step++ {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			w := &team{fabric: mem.NewFabric()}
			for r := range n {
				m, err := w.fabric.Join("chain", r, n)
				require.NoError(t, err)
				if r == 2 {
					m = &dying{Mesh: m, at: step, die: func() { w.fabric.Kill("chain", 2) }}
				}
				w.meshes = append(w.meshes, m)
			}
			w.start(t, Options{})
			var cs []*Chain
			for _, g := range w.groups {
				b := make([]byte, 400)
				cs = append(cs, g.AllReduce(bounded(t), b, b, 4, each(operators["sum"]), nil))
			}
			for r, c := range cs {
				if err := c.Wait(bounded(t)); err != nil && r != 2 {
					var f *transport.Fault
					require.ErrorAs(t, err, &f, "member %d", r)
					require.Equal(t, 2, f.Rank)
					require.Equal(t, transport.FaultPeerDied, f.Kind)
				}
			}
			require.Error(t, cs[3].Err(), "it cannot end without what rank 2 was to send")
			w.empty(t)
			c := w.groups[0].AllReduce(bounded(t), nil, nil, 4, nil, nil)
			require.ErrorContains(t, c.Wait(bounded(t)), "rank 2")
		})
	}
}

// F-39: an error of one member ends the collective on all of them, naming it, and only
// the collective.
func TestF39ErrorIsTold(t *testing.T) {
	w := newTeam(t, 5, Options{})
	var cs []*Chain
	for r, g := range w.groups {
		b := make([]byte, 40)
		if r == 3 {
			b = make([]byte, 60)
		}
		cs = append(cs, g.AllReduce(bounded(t), b, b, 4, each(operators["sum"]), nil))
	}
	named := 0
	for _, c := range cs {
		err := c.Wait(bounded(t))
		require.Error(t, err)
		require.ErrorContains(t, err, "disagree")
		if errors.Is(err, ErrMismatch) {
			named++
		}
	}
	require.Positive(t, named)
	w.allReduce(t, seeded(t), "sum", 100, true, false)
	w.empty(t)
}

// A context ends one member's part: all members' chains end.
func TestContextEndsTheCollective(t *testing.T) {
	w := newTeam(t, 3, Options{})
	ctx, cancel := context.WithCancelCause(context.Background())
	var cs []*Chain
	for r, g := range w.groups[:2] {
		c := bounded(t)
		if r == 1 {
			c = ctx
		}
		b := make([]byte, 40)
		cs = append(cs, g.AllReduce(c, b, b, 4, each(operators["sum"]), nil))
	}
	cancel(errors.New("enough"))
	require.ErrorContains(t, cs[1].Wait(bounded(t)), "enough")
	require.ErrorContains(t, cs[0].Wait(bounded(t)), "chain: rank 1 failed: chain: group \"all\" seq 0 on rank 1: enough")
	b := make([]byte, 40)
	late := w.groups[2].AllReduce(bounded(t), b, b, 4, each(operators["sum"]), nil)
	require.ErrorContains(t, late.Wait(bounded(t)), "rank 1 failed")
	w.allReduce(t, seeded(t), "max", 10, true, false)
	w.empty(t)
}

// F-40: a rank that is no member, a group that is not there or not any more, and
// arguments that cannot be: errors, and no panic.
func TestF40NoMember(t *testing.T) {
	w := newTeam(t, 3, Options{})
	_, err := w.nodes[0].Group("others", []int{1, 2})
	require.ErrorIs(t, err, ErrNotMember)
	for _, members := range [][]int{nil, {0, 0}, {0, 3}, {-1, 0}} {
		_, err := w.nodes[0].Group("bad", members)
		require.Error(t, err)
	}
	_, err = w.nodes[0].Group("all", []int{0})
	require.ErrorContains(t, err, "exists already")
	ctx := bounded(t)
	g, err := w.nodes[0].Group("mine", []int{0})
	require.NoError(t, err)
	for name, c := range map[string]*Chain{
		"root":       g.Broadcast(ctx, nil, 1),
		"elements":   g.AllReduce(ctx, make([]byte, 5), make([]byte, 5), 4, nil, nil),
		"no element": g.AllReduce(ctx, nil, nil, 0, nil, nil),
		"lengths":    g.AllReduce(ctx, make([]byte, 8), make([]byte, 4), 4, nil, nil),
		"axis":       g.AllGather(ctx, Array{[]int{1}, make([]byte, 4)}, Array{[]int{1}, make([]byte, 4)}, 1, 4),
		"shape":      g.AllGather(ctx, Array{[]int{2}, make([]byte, 8)}, Array{[]int{1}, make([]byte, 4)}, 0, 4),
		"bytes":      g.AllGather(ctx, Array{[]int{2}, make([]byte, 4)}, Array{[]int{1}, make([]byte, 4)}, 0, 4),
		"negative":   g.AllGather(ctx, Array{[]int{-2}, nil}, Array{[]int{-2}, nil}, 0, 4),
		"member":     g.Send(1, 0, nil),
	} {
		require.Error(t, c.Wait(ctx), name)
	}
	require.Error(t, g.Recv(-1, 0, nil))
	g.Close()
	require.ErrorContains(t, g.AllReduce(ctx, nil, nil, 4, nil, nil).Wait(ctx), "closed")
	require.ErrorContains(t, g.Recv(0, 0, func([]byte, error) {}), "closed")
}

// F-41: from every member, for every number of them, empty buffers and many chunks.
func TestF41Broadcast(t *testing.T) {
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, Options{})
		for root := range n {
			for _, size := range []int{0, 1, 1000, 2*broadcastChunk + 17} {
				var cs []*Chain
				bufs := make([][]byte, n)
				for r, g := range w.groups {
					bufs[r] = make([]byte, size)
					if r == root {
						for i := range bufs[r] {
							bufs[r][i] = byte(i*3 + root)
						}
					}
					cs = append(cs, g.Broadcast(bounded(t), bufs[r], root))
				}
				wait(t, cs...)
				for r := range n {
					require.Equal(t, bufs[root], bufs[r])
				}
			}
		}
		w.empty(t)
	}
}

// gather is the plain reference: arrays one after the other along an axis.
func gather(parts []Array, axis int) Array {
	shape := slices.Clone(parts[0].Shape)
	shape[axis] = 0
	for _, p := range parts {
		shape[axis] += p.Shape[axis]
	}
	out := Array{Shape: shape}
	outer := 1
	for _, d := range shape[:axis] {
		outer *= d
	}
	for o := range outer {
		for _, p := range parts {
			run := len(p.Data) / max(outer, 1)
			out.Data = append(out.Data, p.Data[o*run:(o+1)*run]...)
		}
	}
	return out
}

func filled(rng *rand.Rand, elem int, shape ...int) Array {
	n := elem
	for _, d := range shape {
		n *= d
	}
	a := Array{Shape: shape, Data: make([]byte, n)}
	for i := range a.Data {
		a.Data[i] = byte(rng.Uint32())
	}
	return a
}

// F-42: equal shapes, along every axis.
func TestF42AllGather(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, Options{})
		for axis := range 3 {
			parts := make([]Array, n)
			for r := range parts {
				parts[r] = filled(rng, 4, 2, 3, 2)
			}
			want := gather(parts, axis)
			var cs []*Chain
			outs := make([]Array, n)
			for r, g := range w.groups {
				outs[r] = Array{Shape: want.Shape, Data: make([]byte, len(want.Data))}
				cs = append(cs, g.AllGather(bounded(t), outs[r], parts[r], axis, 4))
			}
			wait(t, cs...)
			for r := range n {
				require.Equal(t, want, outs[r])
			}
		}
		w.empty(t)
	}
}

// F-43: shapes that differ along the axis, empty ones too; other differences are
// errors on every member.
func TestF43AllGatherAny(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, Options{})
		for axis := range 2 {
			parts := make([]Array, n)
			for r := range parts {
				shape := []int{2, 3}
				shape[axis] = rng.IntN(4)
				parts[r] = filled(rng, 8, shape...)
			}
			want := gather(parts, axis)
			var cs []*Chain
			outs := make([]*Array, n)
			for r, g := range w.groups {
				var c *Chain
				outs[r], c = g.AllGatherAny(bounded(t), parts[r], axis, 8)
				cs = append(cs, c)
			}
			wait(t, cs...)
			for r := range n {
				require.Equal(t, want.Shape, outs[r].Shape)
				require.Equal(t, string(want.Data), string(outs[r].Data))
			}
		}
		w.empty(t)
		if n == 1 {
			continue
		}
		for _, odd := range [][]int{{2, 4}, {2}, {2, 3, 1}} {
			var cs []*Chain
			for r, g := range w.groups {
				a := filled(rng, 1, 2, 3)
				if r == n-1 {
					a = filled(rng, 1, odd...)
				}
				_, c := g.AllGatherAny(bounded(t), a, 0, 1)
				cs = append(cs, c)
			}
			for _, c := range cs {
				require.ErrorContains(t, c.Wait(bounded(t)), "disagree")
			}
			w.empty(t)
		}
	}
}

// F-44: nodes start in any order. Closing one ends the callbacks that wait for it. Messages that
// it has sent stay, and later messages are refused.
func TestF44Leaving(t *testing.T) {
	w := newTeam(t, 2, Options{})
	ctx := bounded(t)
	out, in := []byte("the last words"), make([]byte, 14)
	wait(t, w.groups[0].Broadcast(ctx, out, 0))
	closed := make(chan error, 1)
	go func() { closed <- w.nodes[0].Close(ctx) }()
	for !w.nodes[1].hasLeft(0) {
		<-w.nodes[1].ctxTick()
	}
	wait(t, w.groups[1].Broadcast(ctx, in, 0))
	require.Equal(t, out, in)
	require.ErrorContains(t, w.groups[1].Broadcast(ctx, in, 0).Wait(ctx), "rank 0 has closed its node")
	errs := make(chan error, 1)
	require.NoError(t, w.groups[1].Recv(0, 5, func(_ []byte, err error) { errs <- err }))
	require.ErrorContains(t, <-errs, "rank 0 has closed its node")
	require.NoError(t, w.nodes[1].Close(ctx))
	require.NoError(t, <-closed)
	w.empty(t)
	_, err := w.nodes[0].Group("x", []int{0})
	require.Error(t, err)
}

// F-44: a peer that has stopped: the context ends the waiting for it.
func TestF44Silence(t *testing.T) {
	w := newTeam(t, 2, Options{})
	w.fabric.Freeze("chain", 1)
	ctx, cancel := context.WithCancel(context.Background())
	b := make([]byte, 8)
	c := w.groups[0].AllReduce(ctx, b, b, 4, each(operators["sum"]), nil)
	cancel()
	for !c.broken() {
		<-w.nodes[0].ctxTick()
	}
	// Its own message is still on the way, so the chain ends with the mesh.
	w.meshes[0].Abort(&transport.Fault{Kind: transport.FaultTimeout, Rank: 1})
	require.ErrorIs(t, c.Wait(bounded(t)), context.Canceled)
	w.meshes[1].Abort(&transport.Fault{Kind: transport.FaultTimeout, Rank: 0})
}

// F-44: a late message is refused and leaves nothing behind.
func TestF44LateMessages(t *testing.T) {
	w := newTeam(t, 2, Options{})
	ctx := bounded(t)
	w.groups[1].Close()
	wait(t, w.groups[0].Send(1, 3, []byte("late")))
	wait(t, w.groups[0].Broadcast(ctx, []byte("late too"), 0))
	// Both are there once a message behind them is.
	g := make([]*Group, 2)
	for r, n := range w.nodes {
		var err error
		g[r], err = n.Group("second", []int{0, 1})
		require.NoError(t, err)
	}
	got := make(chan string, 1)
	require.NoError(t, g[1].Recv(0, 1, func(b []byte, err error) { got <- string(b) }))
	wait(t, g[0].Send(1, 1, []byte("in time")))
	require.Equal(t, "in time", <-got)
	w.empty(t)
}

// F-45: dependants run after the chain whichever comes first, once, by a worker;
// an error passes over what would have come next.
func TestF45Chains(t *testing.T) {
	w := newTeam(t, 1, Options{Workers: 2})
	n := w.nodes[0]
	c := newChain(n.run)
	c.hold(2)
	got := make(chan error, 4)
	c.AndThen(func(err error) { got <- err })
	next := c.Next(func() error { return nil })
	c.release(nil)
	select {
	case <-c.Done():
		t.Fatal("ended too early")
	case <-got:
		t.Fatal("ran too early")
	default:
	}
	c.release(nil)
	require.NoError(t, <-got)
	c.AndThen(func(err error) { got <- err })
	require.NoError(t, <-got)
	wait(t, next)

	bad := errors.New("bad")
	failing := c.Next(func() error { return bad })
	skipped := failing.Next(func() error { t.Error("ran after an error"); return nil })
	require.ErrorIs(t, skipped.Wait(bounded(t)), bad)

	both := newChain(n.run)
	both.hold(2)
	other := errors.New("other")
	both.release(bad)
	both.release(other)
	require.ErrorIs(t, both.Err(), bad)
	require.ErrorIs(t, both.Err(), other)
}

// F-46: bytes by key, 10^4 of them, received in another order, and keys used again.
func TestF46SendRecv(t *testing.T) {
	const keys = 10_000
	w := newTeam(t, 2, Options{})
	rng := seeded(t)
	for round := range 2 {
		var all sync.WaitGroup
		var sent []*Chain
		for _, k := range rng.Perm(keys) {
			sent = append(sent, w.groups[0].Send(1, uint64(k), i32(int32(k), int32(round))))
		}
		for _, k := range rng.Perm(keys) {
			all.Add(1)
			require.NoError(t, w.groups[1].Recv(0, uint64(k), func(b []byte, err error) {
				defer all.Done()
				if err != nil || !slices.Equal(i32s(b), []int32{int32(k), int32(round)}) {
					t.Errorf("key %d: %v %v", k, b, err)
				}
			}))
		}
		all.Wait()
		wait(t, sent...)
	}
	own := make(chan string, 1)
	wait(t, w.groups[0].Send(0, 1, []byte("to myself")))
	require.NoError(t, w.groups[0].Recv(0, 1, func(b []byte, err error) { own <- string(b) }))
	require.Equal(t, "to myself", <-own)
	w.empty(t)
}

// The same over sockets.
func TestOverTCP(t *testing.T) {
	const n = 5
	ctx := bounded(t)
	es := make([]*tcp.Endpoint, n)
	addrs := make([]string, n)
	for r := range es {
		e, err := tcp.Listen(tcp.Options{Host: "127.0.0.1"})
		require.NoError(t, err)
		es[r], addrs[r] = e, e.Addr()
	}
	w := &team{meshes: make([]transport.Mesh, n)}
	var wg sync.WaitGroup
	for r := range es {
		wg.Go(func() {
			m, err := es[r].Join(ctx, r, addrs)
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
			w.meshes[r] = m
		})
	}
	wg.Wait()
	w.start(t, Options{})
	rng := seeded(t)
	for range 20 {
		w.allReduce(t, rng, "sum", rng.IntN(20_000), true, false)
	}
	w.empty(t)
}

func FuzzHead(f *testing.F) {
	var b [headLen]byte
	(&head{kind: kindStep, step: 1, seq: 2, name: 3, body: 100}).put(b[:])
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headLen {
			return
		}
		h, err := parseHead(b, 1<<20)
		if err != nil {
			return
		}
		require.LessOrEqual(t, h.body, uint64(1<<20+maxName))
		var again [headLen]byte
		h.put(again[:])
		require.Equal(t, b[:headLen], again[:])
	})
}

func BenchmarkAllReduce(b *testing.B) {
	for _, size := range []int{4, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			w := newTeam(b, 2, Options{})
			bufs := [2][]byte{make([]byte, size), make([]byte, size)}
			nothing := func(dst, src []byte) {}
			b.SetBytes(int64(size))
			for b.Loop() {
				x := w.groups[0].AllReduce(context.Background(), bufs[0], bufs[0], 4, nothing, nil)
				y := w.groups[1].AllReduce(context.Background(), bufs[1], bufs[1], 4, nothing, nil)
				<-x.Done()
				<-y.Done()
			}
		})
	}
}
