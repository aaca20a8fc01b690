package chain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
)

// sums is a random all-reduce or reduce-scatter and what comes of it.
type sums struct {
	*job
	operands [][][]byte // by chunk and member
	red      backend.Reduction
}

// reduction makes a job that reduces chunks of counts elements.
func (w *team) reduction(t testing.TB, rng *rand.Rand, kind Kind, op backend.ReduceOp, d tensor.DType, counts []int) *sums {
	n := len(w.members)
	red, err := op.Reduction(d, n)
	require.NoError(t, err)
	size := d.Size()
	s := &sums{job: w.job(Collective{Kind: kind, Chunks: len(counts), Elem: red.Grain, Combine: red.Combine, Finish: red.After}), red: red}
	for _, count := range counts {
		ops := make([][]byte, n)
		for p := range ops {
			ops[p] = operand(rng, d, count)
			buf := bytes.Repeat([]byte{0xa5}, count*size) // not the operand before it is ready
			if kind == AllReduce {
				s.mems[p] = append(s.mems[p], buf)
				continue
			}
			for m := range n {
				lo, hi := cut(count, n, m)
				s.mems[p] = append(s.mems[p], buf[lo*size:hi*size:hi*size])
			}
		}
		s.operands = append(s.operands, ops)
	}
	return s
}

// cut is the place of part i of count elements in n parts: the first parts have one more.
func cut(count, n, i int) (lo, hi int) {
	at := func(i int) int { return i*(count/n) + min(i, count%n) }
	return at(i), at(i + 1)
}

func operand(rng *rand.Rand, d tensor.DType, count int) []byte {
	b := make([]byte, count*d.Size())
	for i := range count {
		x := rng.IntN(2000) - 1000
		switch d {
		case tensor.Float32:
			bits := math.Float32bits(float32(x) / 7)
			for k := range 4 {
				b[4*i+k] = byte(bits >> (8 * k))
			}
		case tensor.Int32:
			for k := range 4 {
				b[4*i+k] = byte(uint32(x) >> (8 * k))
			}
		default:
			b[i] = byte(x)
		}
	}
	return b
}

func (s *sums) fill(p, k int) {
	if s.Kind == AllReduce {
		copy(s.mems[p][k], s.operands[k][p])
		return
	}
	n, at := len(s.Members), 0
	for m := range n {
		at += copy(s.mems[p][k*n+m], s.operands[k][p][at:])
	}
}

// want is chunk k reduced in the ring's order: block b begins at the member after b.
func (s *sums) want(k int) []byte {
	n := len(s.Members)
	out := slices.Clone(s.operands[k][0])
	if n == 2 && s.Kind == AllReduce && len(out) <= directBytes {
		s.red.Combine(out, slices.Clone(s.operands[k][1]))
	} else {
		for b := range n {
			lo, hi := cut(len(out)/s.red.Grain, n, b)
			lo, hi = lo*s.red.Grain, hi*s.red.Grain
			acc := slices.Clone(s.operands[k][(b+1)%n][lo:hi])
			for i := 2; i <= n; i++ {
				own := slices.Clone(s.operands[k][(b+i)%n][lo:hi])
				s.red.Combine(own, acc)
				acc = own
			}
			copy(out[lo:hi], acc)
		}
	}
	if s.red.After != nil {
		s.red.After(out)
	}
	return out
}

// check runs the job and compares every byte of every member.
func (s *sums) check(t testing.TB, w *team) {
	t.Helper()
	s.done(t, w.run(t, s.job, s.fill))
	n := len(s.Members)
	for k := range s.Chunks {
		want := s.want(k)
		for p := range n {
			if s.Kind == AllReduce {
				require.True(t, bytes.Equal(want, s.mems[p][k]), "chunk %d on member %d", k, p)
				continue
			}
			lo, hi := cut(len(want)/s.red.Grain, n, p)
			require.True(t, bytes.Equal(want[lo*s.red.Grain:hi*s.red.Grain], s.mems[p][k*n+p]), "chunk %d on member %d", k, p)
		}
	}
	w.empty(t)
}

func counts(rng *rand.Rand, chunks, most int) []int {
	all := make([]int, chunks)
	for i := range all {
		all[i] = rng.IntN(most + 1)
	}
	return all
}

var operators = []struct {
	op backend.ReduceOp
	d  tensor.DType
}{
	{backend.Sum(), tensor.Float32}, {backend.Avg(), tensor.Float32}, {backend.Min(), tensor.Float32}, {backend.Max(), tensor.Int32},
	{backend.Product(), tensor.Float32}, {backend.Sum(), tensor.Int32}, {backend.BAnd(), tensor.Int32}, {backend.BOr(), tensor.Uint8}, {backend.BXor(), tensor.Uint8},
}

// F-36: the ring over the registry is right to the bit on all members, for every number of members,
// operator and number of chunks. All-reduce works in place, as in c10d.
func TestF36AllReduce(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 17; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := newTeam(t, n, nil)
			for _, o := range operators {
				for _, kind := range []Kind{AllReduce, ReduceScatter} {
					w.reduction(t, rng, kind, o.op, o.d, counts(rng, rng.IntN(12), 300)).check(t, w)
				}
			}
		})
	}
}

// The same over both wires.
func TestOverTCP(t *testing.T) {
	rng := seeded(t)
	for _, w := range []*team{newTCPTeam(t, 2), newTCPTeam(t, 3), newTCPTeam(t, 5), newGlooTeam(t, 2), newGlooTeam(t, 4)} {
		for i := range 4 {
			w.reduction(t, rng, Kind(i%2), backend.Sum(), tensor.Float32, counts(rng, 1+rng.IntN(10), 60_000)).check(t, w)
		}
	}
}

// Index arithmetic of rings goes through modulo (R15).
func TestModulo(t *testing.T) {
	for n := 1; n <= 33; n++ {
		for i := -2 * n; i <= 2*n; i++ {
			m := modulo(i, n)
			require.True(t, 0 <= m && m < n && (m-i)%n == 0, "%d modulo %d is %d", i, n, m)
		}
	}
}

// F-36: a member sends 2N-2 messages for each chunk, and 2(N-1)/N of its bytes. Two members
// exchange a small chunk at once.
func TestF36Messages(t *testing.T) {
	rng := seeded(t)
	for _, n := range []int{2, 3, 5, 8} {
		w := newTeam(t, n, func(_ *team, _ int, m transport.Mesh) transport.Mesh { return &counting{Mesh: m} })
		const chunks, count = 6, 30 << 10 // a multiple of every n
		all := slices.Repeat([]int{count}, chunks)
		w.reduction(t, rng, AllReduce, backend.Sum(), tensor.Int32, all).check(t, w)
		for _, m := range w.meshes {
			c := m.(*counting)
			require.EqualValues(t, chunks*(2*n-2), c.messages.Swap(0))
			require.EqualValues(t, chunks*4*count*2*(n-1)/n, c.bytes.Load())
		}
	}
	w := newTeam(t, 2, func(_ *team, _ int, m transport.Mesh) transport.Mesh { return &counting{Mesh: m} })
	w.reduction(t, rng, AllReduce, backend.Sum(), tensor.Int32, []int{100, 200}).check(t, w)
	require.EqualValues(t, 2, w.meshes[0].(*counting).messages.Load())
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

// F-37: fewer elements than members, none at all included. Empty blocks have no messages.
func TestF37FewElements(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, func(_ *team, _ int, m transport.Mesh) transport.Mesh { return &counting{Mesh: m} })
		w.reduction(t, rng, AllReduce, backend.Avg(), tensor.Float32, slices.Repeat([]int{0}, 10)).check(t, w)
		w.reduction(t, rng, AllReduce, backend.Avg(), tensor.Float32, nil).check(t, w)
		require.Zero(t, w.meshes[0].(*counting).messages.Load())
		var all []int
		for count := range n + 1 {
			all = append(all, count)
		}
		for _, kind := range []Kind{AllReduce, ReduceScatter} {
			w.reduction(t, rng, kind, backend.Sum(), tensor.Int32, all).check(t, w)
		}
	}
}

// F-38: chunks become ready in any order, another one on every member, messages arrive in any
// order, and collectives follow each other at once: the results are the same.
func TestF38EarlyAndReordered(t *testing.T) {
	rng := seeded(t)
	for _, n := range []int{2, 3, 6} {
		w := newTeam(t, n, func(_ *team, rank int, m transport.Mesh) transport.Mesh {
			return newShuffling(t, m, rng.Uint64())
		})
		for i := range 10 {
			s := w.reduction(t, rng, Kind(i%2), backend.Sum(), tensor.Float32, counts(rng, 1+rng.IntN(20), 5000))
			for p := range n {
				s.order[p] = rng.Perm(s.Chunks)
			}
			s.check(t, w)
		}
	}
}

// shuffling sends messages in another order than they are posted.
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
			i := rng.IntN(len(s.held))
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

// F-38: a member that is not ready takes no more than the window's blocks. What else its peers
// have for it stays with them. Chunks that arrived early meet their callbacks later.
func TestF38BoundHolds(t *testing.T) {
	const n, chunks, count = 3, 40, 3000
	w := newTeam(t, n, nil)
	s := w.reduction(t, seeded(t), AllReduce, backend.Sum(), tensor.Int32, slices.Repeat([]int{count}, chunks))
	gate := make(chan struct{})
	late := w.stages[2]
	errs := make([]error, n)
	var wg sync.WaitGroup
	for p, stage := range w.stages {
		filled, err := s.begin(stage, p, func(k int) {
			if p == 2 && k == 0 {
				<-gate
			}
			s.fill(p, k)
		})
		require.NoError(t, err)
		wg.Go(func() {
			errs[p] = stage.Wait(bounded(t))
			filled()
		})
	}
	// Member 1 gets the first chunks of member 0, and sends them on to member 2, where they wait.
	for arrivals := 0; arrivals < window*2; runtime.Gosched() {
		arrivals, _ = late.reg.waiting()
		require.LessOrEqual(t, arrivals, window*depth)
	}
	for _, l := range late.lanes {
		require.LessOrEqual(t, cap(l.scratch), depth*count*4/n)
	}
	require.Empty(t, s.results[2])
	close(gate)
	wg.Wait()
	s.done(t, errs)
	for k := range chunks {
		require.Equal(t, s.want(k), s.mems[2][k])
	}
	w.empty(t)
}

// An arrival without its callback, and a callback without its arrival, spoil the result: so the
// tests above would notice if either were not waited for.
func TestEachHalfIsNeeded(t *testing.T) {
	const count = 1000
	for _, half := range []string{"both", "no readiness", "no arrival"} {
		t.Run(half, func(t *testing.T) {
			w := newTeam(t, 2, nil)
			s := w.reduction(t, rand.New(rand.NewPCG(1, 2)), ReduceScatter, backend.Sum(), tensor.Int32, []int{count})
			calls := make([]Call, 2)
			for p, stage := range w.stages {
				c := s.Collective
				c.Block = func(k, m int) []byte { return s.mems[p][2*k+m] }
				var err error
				calls[p], err = stage.Begin(&c)
				require.NoError(t, err)
			}
			a := w.stages[0]
			receive := a.lanes[0].recvs[0].key()
			ready := func(p int) {
				s.fill(p, 0)
				require.NoError(t, calls[p].Ready(0))
			}
			pump := func() {
				for range 10 {
					for _, stage := range w.stages {
						stage.Advance()
					}
				}
			}
			switch half {
			case "both":
				ready(1)
				pump()
				arrivals, _ := a.reg.waiting()
				require.Equal(t, 1, arrivals)
				ready(0)
			case "no readiness":
				require.NoError(t, a.reg.register(receive))
				ready(1)
				pump()
				ready(0)
			case "no arrival":
				ready(0)
				pump()
				require.NoError(t, a.reg.arrive(a.round, receive))
				pump()
				ready(1)
			}
			pump()
			want := s.want(0)[:4*count/2]
			require.Equal(t, half == "both", bytes.Equal(want, s.mems[0][0]))
			for p, stage := range w.stages { // whatever is left
				calls[p].Fail(errors.New("enough"))
				stage.Wait(bounded(t))
			}
		})
	}
}

// dying is a rank that dies instead of sending its message number at.
type dying struct {
	transport.Mesh
	sent, at int
	die      func()
}

func (d *dying) Send(r *transport.Request) {
	if d.sent++; d.sent == d.at {
		d.die()
	}
	d.Mesh.Send(r)
}

// F-39: a member dies at step k, for all k: every other chain ends with an error that names it, or
// was done, and nothing is left in a registry.
func TestF39Death(t *testing.T) {
	const n, chunks, victim = 4, 3, 2
	for _, kind := range []Kind{AllReduce, ReduceScatter, AllGather, Broadcast} {
		steps := map[Kind]int{AllReduce: 2*n - 2, ReduceScatter: n - 1, AllGather: n - 1, Broadcast: 1}[kind]
		for at := 1; at <= chunks*steps; at++ {
			w := newTeam(t, n, func(w *team, rank int, m transport.Mesh) transport.Mesh {
				if rank != victim {
					return m
				}
				return &dying{Mesh: m, at: at, die: func() { w.fabric.Kill("g", victim) }}
			})
			j := w.job(Collective{Kind: kind, Chunks: chunks, Elem: 4, Combine: func(dst, src []byte) {}})
			for p := range n {
				for range chunks * n {
					j.mems[p] = append(j.mems[p], make([]byte, 400))
				}
			}
			failed := 0
			for p, err := range w.run(t, j, func(int, int) {}) {
				if err == nil {
					continue
				}
				failed++
				var e *Error
				require.ErrorAs(t, err, &e, "member %d", p)
				require.Equal(t, kind, e.Kind)
				var f *transport.Fault
				require.ErrorAs(t, err, &f, "member %d", p)
				require.Equal(t, victim, f.Rank)
				require.ErrorContains(t, err, fmt.Sprintf("chain: %v between clusters", kind))
				require.ErrorContains(t, err, "rank 2")
			}
			require.GreaterOrEqual(t, failed, 2, "%v: rank 2 and the next cannot end", kind)
			w.empty(t)
			c := j.Collective
			c.Chunk, c.Block = func(int) []byte { return nil }, func(int, int) []byte { return nil }
			_, err := w.stages[0].Begin(&c)
			require.ErrorContains(t, err, "rank 2 died")
		}
	}
}

// F-39: a member whose blocks have another size, whose function panics, or whose program gives
// up ends the collective on all of them.
func TestF39OneMemberFails(t *testing.T) {
	const n = 3
	job := func(w *team) *job {
		j := w.job(Collective{Kind: AllReduce, Chunks: 5, Elem: 4, Combine: func(dst, src []byte) {}})
		for p := range n {
			for range 5 {
				j.mems[p] = append(j.mems[p], make([]byte, 400))
			}
		}
		return j
	}
	check := func(t *testing.T, w *team, errs []error, say string) {
		for _, err := range errs {
			require.ErrorContains(t, err, say)
		}
		w.empty(t)
	}
	t.Run("size", func(t *testing.T) {
		w := newTeam(t, n, nil)
		j := job(w)
		j.mems[1][3] = make([]byte, 440)
		check(t, w, w.run(t, j, func(int, int) {}), "disagree on operation, size or dtype")
	})
	t.Run("elements", func(t *testing.T) {
		w := newTeam(t, n, nil)
		j := job(w)
		j.mems[1][4] = make([]byte, 402)
		check(t, w, w.run(t, j, func(int, int) {}), "chunk 4 has 402 bytes, want elements of 4")
	})
	t.Run("context", func(t *testing.T) {
		w := newTeam(t, n, nil)
		j := job(w)
		errs := make([]error, n)
		w.each(func(p int) {
			ctx, cancel := context.WithCancelCause(bounded(t))
			defer cancel(nil)
			filled, err := j.begin(w.stages[p], p, func(k int) {
				if p == 1 && k == 2 {
					cancel(errors.New("enough of it"))
				}
			})
			if errs[p] = err; err != nil {
				return
			}
			defer filled()
			if p == 1 {
				filled()
			}
			errs[p] = w.stages[p].Wait(ctx)
		})
		for p, err := range errs {
			if err != nil || p == 1 {
				require.ErrorContains(t, err, "enough of it")
			}
		}
		w.empty(t)
	})
	t.Run("panic", func(t *testing.T) {
		w := newTeam(t, n, nil)
		j := job(w)
		errs := make([]error, n)
		w.each(func(p int) {
			c := j.Collective
			c.Chunk = func(k int) []byte { return j.mems[p][k] }
			if p == 1 {
				c.Combine = func(dst, src []byte) { panic("no sum") }
			}
			s := w.stages[p]
			call, err := s.Begin(&c)
			if errs[p] = err; err != nil {
				return
			}
			for k := range c.Chunks {
				call.Ready(k)
			}
			func() {
				defer func() {
					if v := recover(); v != nil {
						call.Fail(fmt.Errorf("panic: %v", v))
					}
				}()
				s.Wait(bounded(t))
			}()
			errs[p] = s.Wait(bounded(t))
		})
		check(t, w, errs, "panic: no sum")
	})
}

// F-40: a rank that is no member, members that cannot be, and arguments that mean nothing: errors,
// and the stage can be used.
func TestF40NoMember(t *testing.T) {
	w := newTeam(t, 3, nil)
	s := w.stages[0]
	chunk := func(int) []byte { return nil }
	block := func(int, int) []byte { return nil }
	combine := func(dst, src []byte) {}
	for say, c := range map[string]Collective{
		"rank 0, members [1 2]: this rank is no member":                   {Members: []int{1, 2}, Elem: 1, Chunk: chunk, Combine: combine},
		"rank 0, members []":                                              {Elem: 1, Chunk: chunk, Combine: combine},
		"members [0 0]: want different ranks of a mesh of 3":              {Members: []int{0, 0}, Elem: 1, Chunk: chunk, Combine: combine},
		"members [0 3]: want different ranks":                             {Members: []int{0, 3}, Elem: 1, Chunk: chunk, Combine: combine},
		"members [0 -1]: want different ranks":                            {Members: []int{0, -1}, Elem: 1, Chunk: chunk, Combine: combine},
		"root 2, want a place in 2 members":                               {Kind: Broadcast, Root: 2, Members: []int{0, 1}, Chunk: chunk},
		"root -1":                                                         {Kind: Broadcast, Root: -1, Members: []int{0, 1}, Chunk: chunk},
		"collective 4 is unknown":                                         {Kind: 4, Members: []int{0, 1}, Chunk: chunk, Block: block},
		"-1 chunks":                                                       {Kind: Broadcast, Chunks: -1, Members: []int{0, 1}, Chunk: chunk},
		"8388609 chunks of 2 messages, want at most 16777216 messages":    {Chunks: 1<<23 + 1, Members: []int{0, 1}, Elem: 1, Chunk: chunk, Combine: combine},
		"slot 0x1000001, want a multiple of 0x1000000":                    {Kind: Broadcast, Slot: 1<<24 + 1, Members: []int{0, 1}, Chunk: chunk},
		"elements of 0 bytes":                                             {Members: []int{0, 1}, Chunk: chunk, Combine: combine},
		"no Combine":                                                      {Kind: ReduceScatter, Members: []int{0, 1}, Block: block},
		"no memory: Chunk is for all-reduce and broadcast":                {Members: []int{0, 1}, Elem: 1, Block: block, Combine: combine},
		"no memory: Chunk is for all-reduce and broadcast, Block for the": {Kind: AllGather, Members: []int{0, 1}, Chunk: chunk},
	} {
		_, err := s.Begin(&c)
		require.ErrorContains(t, err, say)
		var e *Error
		require.ErrorAs(t, err, &e)
		if say[:4] == "rank" {
			require.ErrorIs(t, err, ErrNotMember)
		}
	}
	c := Collective{Kind: Broadcast, Members: []int{0, 1}, Root: 1, Chunks: 1, Chunk: func(int) []byte { return make([]byte, 4) }}
	call, err := s.Begin(&c)
	require.NoError(t, err)
	_, err = s.Begin(&c)
	require.ErrorContains(t, err, "a collective is under way")
	require.ErrorContains(t, call.Ready(1), "chunk 1 of 1")
	require.ErrorContains(t, call.Ready(-1), "chunk -1 of 1")
	require.NoError(t, call.Ready(0))
	require.ErrorIs(t, call.Ready(0), ErrDuplicate)
	call.Fail(errors.New("enough"))
	require.ErrorContains(t, s.Wait(bounded(t)), "chain: broadcast between clusters: enough")
}

// F-41: from every member, for every number of them. Each sends the data once at most.
func TestF41Broadcast(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, func(_ *team, _ int, m transport.Mesh) transport.Mesh { return &counting{Mesh: m} })
		for root := range n {
			j := w.job(Collective{Kind: Broadcast, Root: root, Chunks: 7})
			lengths, total := counts(rng, 7, 3000), 0
			want := make([][]byte, 7)
			for k, length := range lengths {
				total += length
				want[k] = operand(rng, tensor.Uint8, length)
				for p := range n {
					j.mems[p] = append(j.mems[p], make([]byte, length))
				}
			}
			j.done(t, w.run(t, j, func(p, k int) {
				if p == root {
					copy(j.mems[p][k], want[k])
				}
			}))
			for p := range n {
				require.Equal(t, want, j.mems[p])
				sent := total
				if p == modulo(root-1, n) {
					sent = 0
				}
				require.EqualValues(t, sent, w.meshes[p].(*counting).bytes.Swap(0))
			}
			w.empty(t)
		}
	}
}

// F-41: the chain is pipelined: a chunk comes to its end before the next one is ready at its
// beginning.
func TestF41Pipelined(t *testing.T) {
	const n, chunks = 4, 10
	w := newTeam(t, n, nil)
	j := w.job(Collective{Kind: Broadcast, Chunks: chunks})
	for p := range n {
		for range chunks {
			j.mems[p] = append(j.mems[p], make([]byte, 100))
		}
	}
	came := make(chan int, chunks)
	errs := make([]error, n)
	w.each(func(p int) {
		c := j.Collective
		c.Chunk = func(k int) []byte { return j.mems[p][k] }
		if p == n-1 {
			c.Result = func(k int) { came <- k }
		}
		call, err := w.stages[p].Begin(&c)
		if err != nil {
			t.Error(err)
			return
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for k := range chunks {
				call.Ready(k)
				if p == 0 && <-came != k {
					t.Errorf("another chunk than %d", k)
				}
			}
		})
		errs[p] = w.stages[p].Wait(bounded(t))
		wg.Wait()
	})
	for _, err := range errs {
		require.NoError(t, err)
	}
}

// F-42 and F-43 at the stage: blocks of any length, none among them, land in their places on every
// member. TestF42AllGatherOnAnyAxis and TestF43AllGatherOfAnyShape in package pg have the tensors.
func TestF43AllGather(t *testing.T) {
	rng := seeded(t)
	for n := 1; n <= 9; n++ {
		w := newTeam(t, n, nil)
		const chunks = 6
		j := w.job(Collective{Kind: AllGather, Chunks: chunks})
		var want [][]byte
		for range chunks {
			for range n {
				want = append(want, operand(rng, tensor.Uint8, rng.IntN(4)*rng.IntN(500)))
			}
		}
		for p := range n {
			for _, b := range want {
				j.mems[p] = append(j.mems[p], make([]byte, len(b)))
			}
			j.order[p] = rng.Perm(chunks)
		}
		j.done(t, w.run(t, j, func(p, k int) { copy(j.mems[p][k*n+p], want[k*n+p]) }))
		for p := range n {
			require.Equal(t, want, j.mems[p])
		}
		w.empty(t)
	}
}

// F-44: a member leaves, or falls silent. The mesh's own liveness ends the first wait, the context's
// deadline the second. Both errors name the rank.
func TestF44Vanished(t *testing.T) {
	begin := func(t *testing.T, w *team, p int) (*Stage, Call) {
		c := Collective{Kind: AllReduce, Members: w.members, Chunks: 2, Elem: 4, Combine: func(dst, src []byte) {}, Chunk: func(int) []byte { return make([]byte, 80) }}
		call, err := w.stages[p].Begin(&c)
		require.NoError(t, err)
		require.NoError(t, call.Ready(0))
		return w.stages[p], call
	}
	t.Run("leaves", func(t *testing.T) {
		w := newTeam(t, 3, nil)
		s, call := begin(t, w, 0)
		s.Advance()
		require.NoError(t, w.meshes[2].Close())
		err := s.Wait(bounded(t))
		require.ErrorContains(t, err, "rank 2 left the group while others needed it")
		require.Regexp(t, "^chain: all-reduce between clusters, chunk [01], step ., message to or from rank [12]: ", err.Error())
		require.ErrorIs(t, call.Ready(1), ErrLate)
		w.empty(t)
	})
	t.Run("silent", func(t *testing.T) {
		w := newTeam(t, 3, nil)
		w.fabric.Freeze("g", 2)
		s, call := begin(t, w, 0)
		s.Advance()
		chunk, step, peer := s.Awaited()
		require.Equal(t, []int{0, 0, 2}, []int{chunk, step, peer})
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		err := s.Wait(ctx)
		require.ErrorContains(t, err, "chain: all-reduce between clusters, chunk 0, step 0, message to or from rank 2: rank 2 did not take part in time")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, call.Ready(1), ErrLate)
		var f *transport.Fault
		require.ErrorAs(t, w.meshes[1].Fault(), &f)
		require.Equal(t, 2, f.Rank)
		w.empty(t)
	})
	t.Run("not ready", func(t *testing.T) {
		w := newTeam(t, 1, nil)
		s, _ := begin(t, w, 0)
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		require.ErrorContains(t, s.Wait(ctx), "chain: all-reduce between clusters, chunk 1 is not ready on this rank: rank 0 cancelled the operation")
	})
	t.Run("nothing posted", func(t *testing.T) { // the mesh's end reaches a stage without messages
		w := newTeam(t, 2, nil)
		c := Collective{Kind: AllGather, Members: w.members, Chunks: 1, Block: func(int, int) []byte { return make([]byte, 4) }}
		_, err := w.stages[0].Begin(&c)
		require.NoError(t, err)
		w.fabric.Kill("g", 1)
		require.ErrorContains(t, w.stages[0].Wait(bounded(t)), "rank 1 died")
	})
}

// F-45 at the stage: whichever goroutine waits drives the collective, in turns. Package work has
// the futures: TestF45Chains.
func TestF45DrivenInTurns(t *testing.T) {
	w := newTeam(t, 3, nil)
	s := w.reduction(t, seeded(t), AllReduce, backend.Sum(), tensor.Int32, slices.Repeat([]int{1000}, 20))
	var calls []func()
	for p, stage := range w.stages {
		filled, err := s.begin(stage, p, func(k int) { s.fill(p, k) })
		require.NoError(t, err)
		calls = append(calls, filled)
	}
	for ended, ctx := 0, bounded(t); ended < len(w.stages); {
		require.NoError(t, ctx.Err())
		ended = 0
		for _, stage := range w.stages { // each time another goroutine
			done := make(chan bool)
			go func() { done <- stage.Advance() }()
			if <-done {
				ended++
			}
		}
	}
	for p, filled := range calls {
		filled()
		require.NoError(t, w.stages[p].Err())
		for k := range s.Chunks {
			require.Equal(t, s.want(k), s.mems[p][k])
		}
	}
	w.empty(t)
}

// Two stages share a mesh, as operations do that run at the same time.
func TestStagesShareAMesh(t *testing.T) {
	rng := seeded(t)
	w := newTCPTeam(t, 3)
	other := &team{meshes: w.meshes, members: w.members, slot: 1 << 40}
	for _, m := range w.meshes {
		other.stages = append(other.stages, New(m))
	}
	var sums [2]*sums
	for i, x := range []*team{w, other} {
		sums[i] = x.reduction(t, rng, AllReduce, backend.Sum(), tensor.Float32, counts(rng, 12, 30_000))
	}
	var wg sync.WaitGroup
	var errs [2][]error
	for i, x := range []*team{w, other} {
		wg.Go(func() { errs[i] = x.run(t, sums[i].job, sums[i].fill) })
	}
	wg.Wait()
	for i, s := range sums {
		s.done(t, errs[i])
		for k := range s.Chunks {
			require.True(t, bytes.Equal(s.want(k), s.mems[2][k]))
		}
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	if testing.CoverMode() != "" {
		t.Skip("coverage counts")
	}
	w := newTCPTeam(t, 2)
	const chunks, size = 8, 400 << 10
	var cs [2]Collective
	for p := range cs {
		buf := make([]byte, chunks*size)
		cs[p] = Collective{
			Kind: AllReduce, Members: w.members, Chunks: chunks, Elem: 4, Combine: func(dst, src []byte) {},
			Chunk:  func(k int) []byte { return buf[k*size : (k+1)*size] },
			Result: func(int) {},
		}
	}
	run := func(p int) {
		cs[p].Slot += MaxSlots
		call, err := w.stages[p].Begin(&cs[p])
		for k := 0; err == nil && k < chunks; k++ {
			err = call.Ready(k)
		}
		if err == nil {
			err = w.stages[p].Wait(context.Background())
		}
		if err != nil {
			t.Error(err)
		}
	}
	begin, end := make(chan struct{}), make(chan struct{})
	defer close(begin)
	go func() {
		for range begin {
			run(1)
			end <- struct{}{}
		}
	}()
	both := func() {
		begin <- struct{}{}
		run(0)
		<-end
	}
	for range 20 {
		both()
	}
	require.Less(t, testing.AllocsPerRun(50, both), 1.0)
}
