package shm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// TestRunAhead: a rank that only sends small data may be 14 calls ahead, and two with large data.
func TestRunAhead(t *testing.T) {
	for n, calls := range map[int]int{4: 14, 4 << 10: 14, 8<<10 + 1: 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			gs := join(t, 2, shm.Options{})
			for call := range calls {
				if n <= 4<<10 {
					require.True(t, gs[0].Ready(n), "call %d", call)
				}
				require.NoError(t, gs[0].Gather(nil, make([]byte, n), 1, func() error { return fmt.Errorf("call %d waits", call) }))
			}
			require.False(t, gs[0].Ready(n))
			for range calls {
				require.NoError(t, gs[1].Gather(make([]byte, 2*n), make([]byte, n), 1, late()))
			}
			require.NoError(t, gs[0].Gather(nil, make([]byte, n), 1, late()))
		})
	}
}

// TestReadyDoesNotWait: a rank that is ready does not wait, however far the others are.
func TestReadyDoesNotWait(t *testing.T) {
	waits := func() error { return fmt.Errorf("waits, though it is ready") }
	gs, in := join(t, 2, shm.Options{}), make([]byte, 4)
	for range 14 {
		require.NoError(t, gs[0].Gather(nil, in, 1, waits))
	}
	for range 14 {
		require.NoError(t, gs[1].Gather(make([]byte, 8), in, 1, late()))
		for gs[0].Ready(4) {
			require.NoError(t, gs[0].Gather(nil, in, 1, waits))
		}
	}
	const n = 2730 // three blocks have more than 8 KiB when they are rounded up
	gs = join(t, 3, shm.Options{})
	for gs[0].Ready(n) {
		require.NoError(t, gs[0].Scatter(make([]byte, n), make([]byte, 3*n), 0, waits))
	}
}

// TestMismatchOfForgottenCalls: ranks that have entered many calls ahead, each with itself as the root, notice.
func TestMismatchOfForgottenCalls(t *testing.T) {
	for _, n := range []int{4, 100 << 10} {
		gs := join(t, 2, shm.Options{})
		errs := make([]error, 2)
		var both sync.WaitGroup
		for r, g := range gs {
			both.Go(func() {
				var last transport.Call
				var calls []transport.Call
				for i := range 200 {
					c := transport.Call{What: [2]uint64{1, uint64(r)}}
					c.Follow(last.What, last.History)
					g.Enter(uint32(i), &c)
					last, calls = c, append(calls, c)
				}
				for i := 0; i < 100 && errs[r] == nil; i++ {
					g.Begin(uint32(i), calls[i].History)
					errs[r] = g.Broadcast(make([]byte, n), r, late())
				}
			})
		}
		both.Wait()
		require.Error(t, errs[0], "%d bytes", n)
		require.Error(t, errs[1], "%d bytes", n)
		require.True(t, errors.Is(errs[0], shm.ErrMismatch) || errors.Is(errs[1], shm.ErrMismatch), "%v; %v", errs[0], errs[1])
	}
}

// TestLaterSenderNotices has two ranks only send, in calls that differ. Neither waits for the other. The one that comes later
// notices in that call.
func TestLaterSenderNotices(t *testing.T) {
	waits := func() error { return errors.New("waits") }
	sends := map[string]func(g *shm.Group, n int) error{
		"broadcast": func(g *shm.Group, n int) error { return g.Broadcast(make([]byte, n), g.Rank(), waits) },
		"scatter": func(g *shm.Group, n int) error {
			return g.Scatter(make([]byte, n), make([]byte, n*g.Size()), g.Rank(), waits)
		},
		"gather": func(g *shm.Group, n int) error { return g.Gather(nil, make([]byte, n), g.Size()-1, waits) },
		"reduce": func(g *shm.Group, n int) error {
			return g.Reduce(nil, make([]byte, n), g.Size()-1, by(1, mix(1)), waits)
		},
	}
	for _, n := range []int{4, 4 << 10, 16 << 10} {
		for first, one := range sends {
			for second, other := range sends {
				t.Run(fmt.Sprint(first, ", ", second, ", ", n), func(t *testing.T) {
					gs := join(t, 3, shm.Options{})
					a, b := called(gs[0]), called(gs[1])
					a.begin(0)
					b.begin(1)
					require.NoError(t, one(gs[0], n))
					err := other(gs[1], n)
					require.ErrorIs(t, err, shm.ErrMismatch)
					require.ErrorContains(t, err, "as collective number 0 rank 0 called call 0, rank 1 called call 1")
					a.begin(0)
					require.ErrorIs(t, one(gs[0], n), shm.ErrAborted)
				})
			}
		}
	}
}

// TestNumbersFarApart: words and numbers from 2^31 pieces ago do not look newer than those of today.
func TestNumbersFarApart(t *testing.T) {
	for _, at := range []uint32{1 << 31, 1<<31 + 5, 3 << 30} {
		gs := join(t, 2, shm.Options{}.From(-1))
		for _, g := range gs {
			g.StartAt(at)
		}
		each(t, gs, func(g *shm.Group) error {
			for waits := g.Rank() == 0; !waits; _, waits = gs[0].WaitsFor() {
				runtime.Gosched()
			}
			return call(g, "allreduce", 3, 0, 200<<10, 1, 0, false)
		})
	}
	gs := join(t, 2, shm.Options{})
	each(t, gs, func(g *shm.Group) error { // rank 0 only receives
		for range 1<<16 + 100 {
			if err := g.Broadcast(make([]byte, 4), 1, late()); err != nil {
				return err
			}
		}
		return nil
	})
	require.GreaterOrEqual(t, gs[0].Seen(), uint32(90))
}

// TestOldHeaders has a rank only receive for so long that headers of 2^32 pieces ago are in its slots.
func TestOldHeaders(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	both := []*calls{called(gs[0]), called(gs[1])}
	each(t, gs, func(g *shm.Group) error {
		for no := range 16 { // as many as slots
			both[g.Rank()].begin(uint64(no))
			if err := g.Barrier(late()); err != nil {
				return err
			}
		}
		return nil
	})
	for _, g := range gs {
		g.StartAt(1<<32 - 100)
	}
	each(t, gs, func(g *shm.Group) error {
		for no := range 300 {
			both[g.Rank()].begin(uint64(1000 + no))
			if err := g.Broadcast(make([]byte, 4), 0, late()); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestRunAheadOfEachOther has ranks that send to a root, and look at each other only to find out how
// far they are.
func TestRunAheadOfEachOther(t *testing.T) {
	gs := join(t, 4, shm.Options{})
	each(t, gs, func(g *shm.Group) error {
		c, in, stop := called(g), make([]byte, 4), late()
		var out []byte
		if g.Rank() == 0 {
			out = make([]byte, 4)
		}
		for no := range 3000 {
			c.begin(uint64(no))
			if err := g.Reduce(out, in, 0, by(1, mix(1)), stop); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestRunAheadRandomly has ranks that are often many calls apart.
func TestRunAheadRandomly(t *testing.T) {
	seed := must.Seed(t)
	calls := testsize.Of(200, 300, 1000)
	for _, p := range []int{2, 4} {
		t.Run(fmt.Sprint(p, " ranks"), func(t *testing.T) {
			gs := join(t, p, shm.Options{})
			for _, g := range gs {
				g.StartAt(-uint32(calls / 2)) // piece numbers wrap in the middle
			}
			each(t, gs, func(g *shm.Group) error {
				c := called(g)
				rng, skew := rand.New(rand.NewPCG(seed, uint64(p))), rand.New(rand.NewPCG(seed, uint64(g.Rank())))
				root := 0
				for no := range calls {
					op := []string{"reduce", "gather", "scatter", "broadcast"}[rng.IntN(4)]
					n := []int{1, 8, 9, 1 << 10, 2 << 10, 2<<10 + 1, 8 << 10}[rng.IntN(7)] * 4
					if rng.IntN(100) == 0 {
						root = rng.IntN(p)
					}
					if skew.IntN(100) == 0 {
						time.Sleep(time.Duration(skew.IntN(200)) * time.Microsecond)
					}
					c.begin(uint64(no))
					if err := call(g, op, seed, no, n, 4, root, false); err != nil {
						g.Abort(err)
						return err
					}
				}
				return nil
			})
		})
	}
}

// TestPost: a rank that posts its part lets the others end, and need not wait itself once all have
// posted or called.
func TestPost(t *testing.T) {
	const earlyBytes = 4 << 10
	for _, c := range []struct {
		name  string
		bytes []int // of a rank's part
		post  func(g *shm.Group, buf []byte) bool
		call  func(g *shm.Group, buf []byte) error
	}{
		{"allreduce", []int{4, 32, 33, earlyBytes}, func(g *shm.Group, buf []byte) bool { return g.PostAllReduce(buf, 1) },
			func(g *shm.Group, buf []byte) error { return g.AllReduce(buf, by(1, mix(1)), late()) }},
		{"allgather", []int{4, 32, 33, earlyBytes}, (*shm.Group).PostAllGather,
			func(g *shm.Group, buf []byte) error { return g.AllGather(make([]byte, 2*len(buf)), buf, late()) }},
		{"barrier", []int{0}, func(g *shm.Group, _ []byte) bool { return g.PostBarrier() },
			func(g *shm.Group, _ []byte) error { return g.Barrier(late()) }},
	} {
		for _, n := range c.bytes {
			t.Run(fmt.Sprintf("%s of %d", c.name, n), func(t *testing.T) {
				gs := join(t, 2, shm.Options{})
				a, b := input(1, 0, 0, n), input(1, 0, 1, n)
				for range 9 { // more than there are slots
					require.False(t, c.post(gs[0], a), "rank 1 has not called")
					require.NoError(t, c.call(gs[1], b), "this rank waits for nobody")
					require.NoError(t, c.call(gs[0], a))

					require.False(t, c.post(gs[1], b))
					require.True(t, c.post(gs[0], a), "rank 1 has posted")
					require.NoError(t, c.call(gs[0], a))
					require.NoError(t, c.call(gs[1], b))
				}
			})
		}
	}
}

// TestPostWaitsForNobody: what has to wait, or is too long for one piece, is left to the collective.
func TestPostWaitsForNobody(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	long := make([]byte, 4<<10+1)
	for range 2 { // nothing was published
		require.False(t, gs[0].PostAllReduce(long, 1))
		require.False(t, gs[0].PostAllGather(long))
		require.False(t, gs[0].PostAllReduce(nil, 1))
		require.False(t, gs[0].PostAllGather(nil))
	}
	for range 14 { // slots
		require.NoError(t, gs[0].Gather(nil, long, 1, late()))
	}
	require.False(t, gs[0].PostBarrier(), "no slot is free")
	for range 14 {
		require.NoError(t, gs[1].Gather(make([]byte, 2*len(long)), long, 1, late()))
	}
	each(t, gs, func(g *shm.Group) error { return g.Barrier(late()) })

	require.False(t, gs[1].PostBarrier())
	require.ErrorIs(t, gs[0].Gather(make([]byte, 2), make([]byte, 1), 0, late()), shm.ErrMismatch)
	require.False(t, gs[1].PostBarrier(), "the group has ended")
	require.Error(t, gs[1].Barrier(late()))
}
