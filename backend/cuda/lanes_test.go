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
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// message is one of a test, from a rank to another one; or an all_reduce, if src is -1.
type message struct {
	id, src, dst, n, layout int
	tag                     uint32
	far                     bool // the tensors are on another device than the kernels
}

func (m message) value(i int) float64 { return float64((m.id*7919 + i*31) % 1000) }

// tensorOf makes a rank's tensor for a message, with what it holds afterwards.
func (x *rank) tensorOf(m message, r int, sends bool) (*pair, error) {
	device := r
	if m.far {
		device = (r + 1) % x.d.Count()
	}
	s := laid(m.layout, m.n)
	p, err := x.pairOf(rand.New(rand.NewPCG(uint64(m.id), uint64(r))), tensor.Int32, device, s, true)
	if err != nil {
		return nil, err
	}
	if sends {
		// What is sent is written to the device again.
		for i := range m.n {
			if err := p.cpu.SetFloat64(m.value(i), i); err != nil {
				return nil, err
			}
		}
		e, err := x.stream[device].Record()
		if err == nil {
			err = e.Sync(x.ctx)
			e.Release()
		}
		if err != nil {
			return nil, err
		}
		driver.HostAccess(x.d, "filling", driver.Writes(p.at, len(p.storage)))
		copy(p.host, p.storage)
		return p, x.stream[device].Copy(p.mem.Ptr(), p.at, len(p.storage))
	}
	return p, nil
}

// arrives writes into a pair's CPU tensor what a receive leaves there.
func (m message) arrives(p *pair) error {
	for i := range m.n {
		if err := p.cpu.SetFloat64(m.value(i), i); err != nil {
			return err
		}
	}
	return nil
}

// ringBytes is more than the ring of a lane has in the simulator.
const ringBytes = 40 << 10

// messagesOf draws messages of all ranks, with all_reduces among them.
func messagesOf(rng *rand.Rand, size, many int) (all []message) {
	for id := range many {
		m := message{id: id, src: rng.IntN(size), n: []int{0, 1, 300, ringBytes / 4 * 3}[rng.IntN(4)], layout: rng.IntN(4) * rng.IntN(2)}
		if m.layout > 0 {
			m.n = min(m.n, 300)
		}
		m.dst = (m.src + 1 + rng.IntN(size-1)) % size
		m.far, m.tag = rng.IntN(8) == 0, uint32(max(rng.IntN(6)-4, 0))
		if rng.IntN(6) == 0 {
			m = message{id: id, src: -1, n: 1 + rng.IntN(50)}
		}
		all = append(all, m)
	}
	return all
}

// shuffled returns a rank's part of the messages, in an order of its own: only those of a lane, and the
// all_reduces, keep theirs.
func shuffled(rng *rand.Rand, all []message, r int) (mine []message) {
	queues := make(map[[3]int][]message)
	var keys [][3]int
	for _, m := range all {
		key := [3]int{m.src, m.dst, int(m.tag)}
		switch {
		case m.src < 0:
			key = [3]int{-1, -1, 0}
		case m.src != r && m.dst != r:
			continue
		}
		if queues[key] == nil {
			keys = append(keys, key)
		}
		queues[key] = append(queues[key], m)
	}
	for len(keys) > 0 {
		k := rng.IntN(len(keys))
		q := queues[keys[k]]
		mine = append(mine, q[0])
		if queues[keys[k]] = q[1:]; len(q) == 1 {
			keys = append(keys[:k], keys[k+1:]...)
		}
	}
	return mine
}

// TestLanes posts messages of every pair of ranks, with all_reduces between, in another order on each
// rank. The ranks connect at the first all_reduce: messages before it go through the host, on one or on
// both ranks. The larger ones do not fit in a lane.
func TestLanes(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := []int{2, 2, 3, 4, 8}[seed%5]
		o := directly(size)
		o.sim.Seed, o.sim.Semantics, o.sim.Memory = seed, s, 64<<20
		w := newWorld(t, o)
		const many = 40
		all := messagesOf(rng, size, many)
		first := message{id: many, src: -1, n: 3}
		w.each(func(x *rank, r int) error {
			return x.messages(append([]message{first}[seed%2:], shuffled(rand.New(rand.NewPCG(seed, uint64(r))), all, r)...), r)
		})
		w.end()
	})
}

// messages posts messages, waits for all of them and compares the tensors.
func (x *rank) messages(mine []message, r int) (err error) {
	defer must.Catch(&err)
	var works []*work.Work
	var ps []*pair
	for _, m := range mine {
		p, err := x.tensorOf(m, r, m.src == r)
		if err != nil {
			return err
		}
		var v *work.Work
		switch {
		case m.src < 0:
			v, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{Op: backend.Max()})
			p = nil
		case m.src == r:
			v, err = x.b.Send(x.ctx, p.dev, m.dst, backend.P2POptions{Tag: m.tag})
		default:
			v, err = x.b.Recv(x.ctx, p.dev, m.src, backend.P2POptions{Tag: m.tag})
		}
		if err != nil {
			return fmt.Errorf("message %d: %w", m.id, err)
		}
		if m.dst == r && m.src >= 0 {
			must.Do(m.arrives(p))
		}
		works, ps = append(works, v), append(ps, p)
	}
	for i, v := range works {
		if err := v.Wait(x.ctx); err != nil {
			return fmt.Errorf("message %d: %w", mine[i].id, err)
		}
		if m := mine[i]; m.dst == r && m.src >= 0 {
			if src, err := v.SourceRank(); err != nil || src != m.src {
				return fmt.Errorf("message %d came from rank %d, want %d: %w", m.id, src, m.src, err)
			}
		}
	}
	for i, p := range ps {
		if p == nil {
			continue
		}
		must.Do(x.back(p))
		if err := x.check(p); err != nil {
			return fmt.Errorf("message %d (%+v): %w", mine[i].id, mine[i], err)
		}
	}
	return nil
}

// TestLaneOnce: a message is a launch and an event on the caller's stream (InStream), and no thread of the
// host copies it.
func TestLaneOnce(t *testing.T) {
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	for _, n := range []int{1, 1000} {
		launches := w.launches()
		w.each(func(x *rank, r int) error {
			var err error
			m := message{id: n, src: 0, dst: 1, n: n}
			p := must.Get(x.tensorOf(m, r, r == 0))
			ctx := cuda.InStream(x.ctx, x.stream[r])
			var v *work.Work
			if r == 0 {
				v, err = x.b.Send(ctx, p.dev, 1, backend.P2POptions{})
			} else if err = m.arrives(p); err == nil {
				v, err = x.b.Recv(ctx, p.dev, 0, backend.P2POptions{})
			}
			if err == nil {
				err = x.back(p) // on the stream, after the operation
			}
			return errors.Join(err, v.Wait(x.ctx), x.check(p))
		})
		require.EqualValues(t, 2, launches.Load())
	}
	w.end()
}

// TestLaneAny receives from any rank: first what was sent through the host before the ranks connected,
// then from the lanes, with receives from given ranks behind it.
func TestLaneAny(t *testing.T) {
	eachSeed(t, 4, func(t *testing.T, seed uint64, s sim.Semantics) {
		const size, each = 3, 5
		o := directly(size)
		o.sim.Seed, o.sim.Semantics = seed, s
		w := newWorld(t, o)
		before := int(seed % each) // how many rank 1 sends before the first collective
		w.each(func(x *rank, r int) error {
			value := func(src, k int) message { return message{id: 100*src + k, src: src, n: 20} }
			if r != 0 {
				var works []*work.Work
				for k := range each {
					if r == 1 && k == before || r == 2 && k == 0 {
						must.Do(x.meetDirectly(r))
					}
					p := must.Get(x.tensorOf(value(r, k), r, true))
					v := must.Get(x.b.Send(x.ctx, p.dev, 0, backend.P2POptions{}))
					works = append(works, v)
				}
				return work.WaitAll(x.ctx, works...)
			}
			must.Do(x.meetDirectly(r))
			var works []*work.Work
			var ps []*pair
			const many = (size - 1) * each
			for k := range many {
				p := must.Get(x.tensorOf(message{id: k, n: 20}, r, false))
				v := must.Get(x.b.RecvAnySource(x.ctx, p.dev, backend.P2POptions{}))
				works, ps = append(works, v), append(ps, p)
			}
			next := make([]int, size)
			for k, v := range works {
				must.Do(v.Wait(x.ctx))
				src := must.Get(v.SourceRank())
				must.Do(value(src, next[src]).arrives(ps[k]))
				next[src]++
				must.Do(errors.Join(x.back(ps[k]), x.check(ps[k])))
			}
			if next[1] != each || next[2] != each {
				return fmt.Errorf("%v messages came", next)
			}
			return nil
		})
		w.end()
	})
}

// TestLaneBehindAny posts a receive from any rank, and then one from rank 1: the first message of rank 1
// is for the first.
func TestLaneBehindAny(t *testing.T) {
	w := newWorld(t, directly(2))
	posted := make(chan struct{})
	w.each(func(x *rank, r int) error {
		var err error
		must.Do(x.meetDirectly(r))
		a, b := message{id: 1, n: 9}, message{id: 2, n: 9}
		p := must.Get(x.tensorOf(a, r, r == 1))
		q := must.Get(x.tensorOf(b, r, r == 1))
		var v, u *work.Work
		if r == 0 {
			v, err = x.b.RecvAnySource(x.ctx, p.dev, backend.P2POptions{})
			if err == nil {
				u, err = x.b.Recv(x.ctx, q.dev, 1, backend.P2POptions{})
			}
			close(posted)
		} else {
			<-posted
			v, err = x.b.Send(x.ctx, p.dev, 0, backend.P2POptions{})
			if err == nil {
				u, err = x.b.Send(x.ctx, q.dev, 0, backend.P2POptions{})
			}
		}
		if err == nil {
			err = work.WaitAll(x.ctx, v, u)
		}
		if err != nil || r == 1 {
			return err
		}
		return errors.Join(a.arrives(p), b.arrives(q), x.back(p), x.back(q), x.check(p), x.check(q))
	})
	w.end()
}

// TestLaneFull posts more messages than a lane has room for, before their receives: those behind wait in
// goroutines, and no call blocks.
func TestLaneFull(t *testing.T) { onVirtualTime(t, testLaneFull) }

func testLaneFull(t *testing.T) {
	const many = 150
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	sent := make(chan struct{})
	w.each(func(x *rank, r int) error {
		var all []message
		for k := range many {
			all = append(all, message{id: k, src: 0, dst: 1, n: k})
		}
		if r == 1 {
			<-sent
			return x.messages(all, r)
		}
		works := make([]*work.Work, 0, many)
		for _, m := range all {
			p := must.Get(x.tensorOf(m, r, true))
			v := must.Get(x.b.Send(x.ctx, p.dev, 1, backend.P2POptions{}))
			works = append(works, v)
		}
		close(sent)
		return work.WaitAll(x.ctx, works...)
	})
	w.end()
}

// TestLaneMemory has messages and collectives use the same tensors: each has what the one before has
// left. The simulator finds an order that is missing.
func TestLaneMemory(t *testing.T) {
	eachSeed(t, 4, func(t *testing.T, seed uint64, s sim.Semantics) {
		o := directly(2)
		o.sim.Seed, o.sim.Semantics = seed, s
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			must.Do(x.meetDirectly(r))
			m := message{id: 3, n: 64}
			p := must.Get(x.tensorOf(m, r, true))
			// Rank 0 sends the sum, rank 1 adds what it gets, sends it back, and both add again.
			var works []*work.Work
			note := func(v *work.Work, err error) error {
				if err == nil {
					works = append(works, v)
				}
				return err
			}
			sum := func() error {
				return note(x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{Op: backend.Sum()}))
			}
			pass := func(from int, tag uint32) error {
				if r == from {
					return note(x.b.Send(x.ctx, p.dev, 1-r, backend.P2POptions{Tag: tag}))
				}
				return note(x.b.Recv(x.ctx, p.dev, from, backend.P2POptions{Tag: tag}))
			}
			must.Do(errors.Join(sum(), pass(0, 0), sum(), pass(1, 0), pass(0, 1), pass(1, 0), sum(), pass(0, 1), sum()))
			must.Do(work.WaitAll(x.ctx, works...))
			for i := range m.n {
				must.Do(p.cpu.SetFloat64(16*m.value(i), i))
			}
			return errors.Join(x.back(p), x.check(p))
		})
		w.end()
	})
}

// TestLaneFailures has rank 0 wait for a message that does not come as it should. Its error names rank 1
// and says why, and both ranks end.
func TestLaneFailures(t *testing.T) {
	defer cuda.SetCloseLimit(patience / 2)()
	for name, c := range map[string]struct {
		timeout time.Duration
		sends   bool
		other   func(x *rank) error // what rank 1 does
		is      error
		text    string
	}{
		"a receive in vain": {timeout: 200 * time.Millisecond, is: work.ErrTimeout, text: "rank 1 has not sent message 0"},
		"a send in vain":    {timeout: 200 * time.Millisecond, sends: true, is: work.ErrTimeout, text: "rank 1 has not received message 0"},
		"another length": {other: func(x *rank) error {
			p, err := x.tensorOf(message{id: 1, n: 5}, 1, true)
			if err == nil {
				var v *work.Work
				if v, err = x.b.Send(x.ctx, p.dev, 0, backend.P2POptions{}); err == nil && v.Wait(x.ctx) == nil {
					err = errors.New("a send of another length ended well")
				}
			}
			return err
		}, text: "expects another length than is sent by rank 1"},
		"leaving": {other: func(x *rank) error { return x.b.Close() }, is: work.ErrPeerLeft, text: "rank 1"},
		"abort": {other: func(x *rank) error {
			x.b.Abort(errors.New("no more"))
			return nil
		}, is: work.ErrAborted, text: "no more"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, directly(2))
			w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
			ended := make(chan struct{})
			waiting := make(chan struct{})
			w.each(func(x *rank, r int) error {
				if r == 1 {
					<-waiting
					if c.other != nil {
						return c.other(x)
					}
					<-ended
					return nil
				}
				defer close(ended)
				p, err := x.tensorOf(message{id: 1, n: 8}, 0, c.sends)
				if err != nil {
					close(waiting)
					return err
				}
				if c.timeout > 0 {
					x.b.SetTimeout(c.timeout)
				}
				var v *work.Work
				if c.sends {
					v, err = x.b.Send(x.ctx, p.dev, 1, backend.P2POptions{})
				} else {
					v, err = x.b.Recv(x.ctx, p.dev, 1, backend.P2POptions{})
				}
				close(waiting)
				if err != nil {
					return err
				}
				err = v.Wait(context.Background())
				var e *work.Error
				switch {
				case !errors.As(err, &e) || e.Peer != 1 || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text):
					return fmt.Errorf("rank %d is to blame, want %v of rank 1, %q: %w", e.Peer, c.is, c.text, err)
				}
				if _, err := x.b.Recv(x.ctx, p.dev, 1, backend.P2POptions{}); err == nil {
					return errors.New("the group has failed, and takes a message")
				}
				if errors.Is(c.is, work.ErrPeerLeft) {
					return x.b.Close() // rank 1 waits for that
				}
				return nil
			})
			w.drop(t)
		})
	}
}

// TestLanesClose has goroutines that send and receive while both ranks close the group. They get errors.
func TestLanesClose(t *testing.T) {
	for run := range 4 {
		s := directly(2)
		s.sim.Seed = uint64(run)
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			var err error
			must.Do(x.meetDirectly(r))
			p := must.Get(x.tensorOf(message{id: 1, n: 8}, r, r == 0))
			for range 3 {
				must.Get(x.passes(r, p))
			}
			var calls sync.WaitGroup
			var over atomic.Bool
			calls.Go(func() {
				for last := false; !last; { // also once Close has begun, and the last one when it has ended
					last = over.Load()
					_, err = x.passes(r, p)
				}
			})
			closed := x.b.Close()
			over.Store(true)
			calls.Wait()
			if !errors.Is(err, work.ErrClosed) && !errors.Is(err, work.ErrPeerLeft) {
				return fmt.Errorf("the last message ended with %w", err)
			}
			return closed
		})
		w.drop(t)
	}
}

// passes sends a tensor from rank 0 to rank 1.
func (x *rank) passes(r int, p *pair) (*work.Work, error) {
	if r == 0 {
		return x.b.Send(x.ctx, p.dev, 1, backend.P2POptions{})
	}
	return x.b.Recv(x.ctx, p.dev, 0, backend.P2POptions{})
}
