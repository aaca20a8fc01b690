package pg_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func vec(n int) *tensor.Tensor {
	t, err := tensor.New(tensor.Float32, n)
	if err != nil {
		panic(err)
	}
	return t
}

// faulty runs size ranks under virtual time. What f returns on each rank, or gives to must, is the result.
func faulty(t *testing.T, size int, f func(j *pgtest.Job, g *pg.ProcessGroup) error) []error {
	t.Helper()
	return faultyWith(t, size, func(*pg.Options) {}, f)
}

// faultyWith is faulty for groups with other options.
func faultyWith(t *testing.T, size int, change func(*pg.Options), f func(j *pgtest.Job, g *pg.ProcessGroup) error) []error {
	t.Helper()
	errs := make([]error, size)
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(size)
		defer j.Close()
		o := j.Options()
		change(&o)
		groups := make([]*pg.ProcessGroup, size)
		var wg sync.WaitGroup
		for r := range size {
			wg.Go(func() { groups[r], errs[r] = pg.New(t.Context(), j.Store, r, size, o) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		for r, g := range groups {
			wg.Go(func() {
				errs[r] = errors.New("f did not return")
				defer func() {
					if t.Failed() {
						g.Abort(errors.New("the test has failed"))
					}
					g.Close()
				}()
				defer must.Catch(&errs[r])
				errs[r] = f(j, g)
			})
		}
		wg.Wait()
	})
	return errs
}

func wait(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

// culprit checks that err is an operation's, of a kind, and names a rank.
func culprit(t *testing.T, err error, kind error, rank int) *work.Error {
	t.Helper()
	require.ErrorIs(t, err, kind)
	e := must.As[*work.Error](t, err)
	require.Equal(t, rank, e.Peer, "%v", err)
	return e
}

var pending = map[string]func(g *pg.ProcessGroup) error{
	"all_reduce": func(g *pg.ProcessGroup) error {
		return wait(g.AllReduce(context.Background(), vec(100), pg.Sum()))
	},
	"barrier": func(g *pg.ProcessGroup) error {
		return g.Barrier(context.Background())
	},
	"recv": func(g *pg.ProcessGroup) error {
		return wait(g.Recv(context.Background(), vec(4), (g.Rank()+1)%g.Size()))
	},
	"recv any": func(g *pg.ProcessGroup) error {
		return wait(g.RecvAnySource(context.Background(), vec(4)))
	},
	"monitored barrier": func(g *pg.ProcessGroup) error {
		return g.MonitoredBarrier(context.Background())
	},
}

func TestDeathEndsEveryPendingOperation(t *testing.T) {
	for name, op := range pending {
		t.Run(name, func(t *testing.T) {
			errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
				if g.Rank() == 2 {
					synctest.Wait() // the others are in the operation
					j.Kill(2)
					return nil
				}
				start := time.Now()
				err := op(g)
				require.Less(t, time.Since(start), 2*time.Second)
				require.ErrorIs(t, op(g), work.ErrPeerDied, "later operations fail at once")
				return err
			})
			for _, r := range []int{0, 1, 3} {
				e := culprit(t, errs[r], work.ErrPeerDied, 2)
				require.Equal(t, r, e.Rank)
				require.ErrorContains(t, errs[r], "rank 2 died")
			}
		})
	}
}

func TestAStoppedRankIsNamedAtTheTimeout(t *testing.T) {
	for name, op := range pending {
		t.Run(name, func(t *testing.T) {
			const limit = 5 * time.Second
			errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
				g.SetTimeout(limit)
				if g.Rank() == 1 {
					j.Freeze(1)
					g.Abort(errors.New("gone"))
					return nil
				}
				time.Sleep(time.Second)
				start := time.Now()
				err := op(g)
				require.LessOrEqual(t, time.Since(start), limit+1100*time.Millisecond) // to ask the others takes a second
				return err
			})
			for _, r := range []int{0, 2} {
				culprit(t, errs[r], work.ErrTimeout, 1)
				ne := must.As[net.Error](t, errs[r])
				require.True(t, ne.Timeout())
			}
		})
	}
}

func TestARankThatDoesNotCallIsNamed(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		g.SetTimeout(time.Second)
		require.NoError(t, pending["all_reduce"](g))
		if g.Rank() == 1 {
			time.Sleep(3 * time.Second) // forgets to call
			return pending["barrier"](g)
		}
		return pending["all_reduce"](g)
	})
	for _, r := range []int{0, 2} {
		e := culprit(t, errs[r], work.ErrTimeout, 1)
		require.EqualValues(t, 1, e.Seq)
	}
	require.ErrorContains(t, errors.Join(errs[0], errs[2]), "rank 1 has not called it: it has issued 1 collectives, this is number 1")
	culprit(t, errs[1], work.ErrTimeout, 1)
}

// TestBlameFollowsTheChain stops rank 1, for which rank 0 waits in something
// else while rank 2 waits for both.
func TestBlameFollowsTheChain(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		switch g.Rank() {
		case 0:
			return wait(g.Recv(context.Background(), vec(1), 1))
		case 1:
			j.Freeze(1)
			g.Abort(errors.New("gone"))
			return nil
		}
		return wait(g.AllReduce(context.Background(), vec(4), pg.Sum(), pg.CallOptions{Timeout: time.Second}))
	})
	culprit(t, errs[0], work.ErrTimeout, 1)
	culprit(t, errs[2], work.ErrTimeout, 1)

	// Nobody is stopped: rank 1 is idle, and rank 0 waits for it.
	errs = faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		switch g.Rank() {
		case 0:
			return wait(g.Broadcast(context.Background(), vec(4), 1))
		case 1:
			time.Sleep(time.Minute)
			return nil
		}
		w := must.Get(g.Broadcast(context.Background(), vec(4), 1))
		err := wait(g.AllReduce(context.Background(), vec(4), pg.Sum(), pg.CallOptions{Timeout: time.Second}))
		require.Error(t, w.Wait(context.Background()))
		return err
	})
	culprit(t, errs[0], work.ErrTimeout, 1)
	culprit(t, errs[2], work.ErrTimeout, 1)
}

func TestCancelOnOneRankReachesAll(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		switch g.Rank() {
		case 0:
			w := must.Get(g.AllReduce(ctx, vec(4), pg.Sum()))
			time.Sleep(time.Second)
			cancel(errors.New("user pressed stop"))
			return w.Wait(context.Background())
		case 1:
			return pending["all_reduce"](g)
		}
		return pending["recv any"](g) // in something else
	})
	for _, err := range errs {
		culprit(t, err, work.ErrCanceled, 0)
	}
	require.ErrorContains(t, errs[0], "user pressed stop")

	// A wait with the context of the call returns what became of the call.
	errs = faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			return pending["recv"](g)
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Second, func() { cancel(errors.New("user pressed stop")) })
		return pg.Wait(g.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum()))
	})
	for _, err := range errs {
		culprit(t, err, work.ErrCanceled, 0)
		require.ErrorAs(t, err, new(*pg.EpochError))
		require.ErrorContains(t, err, "user pressed stop")
	}
}

func TestTheCallsDeadlineBoundsTheOperation(t *testing.T) {
	errs := faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			return pending["recv any"](g)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		return wait(g.Recv(ctx, vec(1), 1))
	})
	require.ErrorIs(t, errs[0], work.ErrTimeout)
	require.ErrorIs(t, errs[0], context.DeadlineExceeded)
	require.ErrorIs(t, errs[1], work.ErrTimeout)

	errs = faulty(t, 1, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, err := g.BarrierAsync(ctx)
		require.ErrorIs(t, err, work.ErrCanceled)
		require.ErrorIs(t, err, context.Canceled)
		require.Zero(t, g.Seq(), "nothing was started")
		return pending["barrier"](g)
	})
	require.NoError(t, errs[0])
}

func TestAbort(t *testing.T) {
	cause := errors.New("enough")
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			time.Sleep(time.Second)
			g.Abort(cause)
		}
		return pending["all_reduce"](g)
	})
	for _, err := range errs {
		culprit(t, err, work.ErrAborted, 1)
	}

	errs = faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		w := must.Get(g.Recv(context.Background(), vec(1), 1-g.Rank()))
		if g.Rank() == 1 {
			time.Sleep(time.Second)
			w.Abort(cause)
		}
		return w.Wait(context.Background())
	})
	for _, err := range errs {
		culprit(t, err, work.ErrAborted, 1)
	}
	require.ErrorContains(t, errs[1], "enough")
}

func TestARankThatLeft(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 0 {
			return nil // closes
		}
		time.Sleep(time.Second)
		must.Do(wait(g.Send(context.Background(), vec(1), 0)))
		return nil
	})
	for _, err := range errs[1:] {
		culprit(t, err, work.ErrPeerLeft, 0)
	}
}

func TestBarrierWaitsForEarlierOperations(t *testing.T) {
	faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			time.Sleep(time.Second)
		}
		first := must.Get(g.AllReduce(context.Background(), vec(10), pg.Sum()))
		require.NoError(t, pending["barrier"](g))
		require.True(t, first.IsSuccess())
		return nil
	})
}

func TestCloseAndMembership(t *testing.T) {
	faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		sub, err := g.NewGroup(context.Background(), []int{1})
		require.NoError(t, err)
		if g.Rank() == 0 {
			require.False(t, sub.IsMember())
			require.Equal(t, -1, sub.Rank())
			require.Equal(t, -1, sub.Size())
			require.ErrorIs(t, must.Err(sub.BarrierAsync(context.Background())), pg.ErrNotMember)
			require.ErrorIs(t, sub.MonitoredBarrier(context.Background()), pg.ErrNotMember)
		} else {
			require.NoError(t, pending["all_reduce"](sub))
		}
		require.NoError(t, pending["barrier"](g))
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
		_, err = g.BarrierAsync(context.Background())
		require.ErrorIs(t, err, pg.ErrClosed)
		if sub.IsMember() {
			_, err = sub.BarrierAsync(context.Background())
			require.ErrorIs(t, err, pg.ErrClosed, "closing the default group closes the others")
		}
		return nil
	})
}

func TestARankThatComesAfterTheFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(2)
		defer j.Close()
		g := must.Get(j.Join(t.Context(), 0))
		g.Abort(errors.New("no"))
		require.NoError(t, g.Close())
		late := must.Get(j.Join(t.Context(), 1))
		culprit(t, pending["barrier"](late), work.ErrAborted, 0)
		require.NoError(t, late.Close())
	})
}

// TestWhoIsBlamedWhenADeadlinePasses has ranks missing, and one that left when
// it was done.
func TestWhoIsBlamedWhenADeadlinePasses(t *testing.T) {
	timeout := func(d time.Duration, call func(ctx context.Context) error) error {
		ctx, cancel := context.WithTimeoutCause(context.Background(), d, errors.New("of the trainer"))
		defer cancel()
		return call(ctx)
	}
	for _, tc := range []struct {
		name    string
		call    func(g *pg.ProcessGroup) error // on rank 0; rank 1 leaves or calls too, rank 2 does not call
		culprit int
		what    string
	}{
		{"receive", func(g *pg.ProcessGroup) error {
			return wait(g.Recv(context.Background(), vec(1), 2, pg.P2POptions{Timeout: time.Second}))
		}, 2, "rank 2 did not send or receive"},
		{"receive with a context", func(g *pg.ProcessGroup) error {
			return timeout(time.Second, func(ctx context.Context) error {
				return wait(g.Recv(ctx, vec(1), 2))
			})
		}, 2, "of the trainer"},
		{"all-reduce with a context", func(g *pg.ProcessGroup) error {
			return timeout(time.Second, func(ctx context.Context) error {
				return wait(g.AllReduce(ctx, vec(1), pg.Sum()))
			})
		}, 2, "rank 2 has not called it"},
		{"monitored barrier with a context", func(g *pg.ProcessGroup) error {
			return timeout(time.Second, func(ctx context.Context) error {
				return g.MonitoredBarrier(ctx)
			})
		}, 2, "Ranks 2, 3 failed to pass monitoredBarrier in 1000 ms"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
				require.NoError(t, pending["barrier"](g))
				switch g.Rank() {
				case 1:
					if strings.HasPrefix(tc.name, "receive") {
						return nil
					}
					time.Sleep(500 * time.Millisecond)
					return tc.call(g)
				case 2, 3:
					time.Sleep(3 * time.Second)
					return nil
				}
				return tc.call(g)
			})
			culprit(t, errs[0], work.ErrTimeout, tc.culprit)
			require.ErrorContains(t, errs[0], tc.what)
			require.NotContains(t, errs[0].Error(), "\n")
		})
	}
}

// TestAMessageWinsOverACancel cancels a context right after its operation has
// taken place: the group must not end with it.
func TestAMessageWinsOverACancel(t *testing.T) {
	faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		for i := range 50 {
			if g.Rank() == 1 {
				require.NoError(t, wait(g.Recv(context.Background(), vec(1), 0)))
			} else {
				time.Sleep(time.Second) // the receive is posted
				ctx, cancel := context.WithCancel(context.Background())
				w := must.Get(g.Send(ctx, vec(1), 1))
				cancel()
				require.NoError(t, w.Wait(context.Background()), "message %d", i)
			}
		}
		return nil
	})
}

func TestANilContextLeavesTheGroupUsable(t *testing.T) {
	faulty(t, 1, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		//lint:ignore SA1012 the misuse under test
		require.Panics(t, func() { g.BarrierAsync(nil) })
		return pending["barrier"](g)
	})
}

func TestAbortOfTheDefaultGroupReachesItsSubgroups(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		sub := must.Get(g.NewGroup(context.Background(), []int{0, 1}))
		if g.Rank() == 1 {
			time.Sleep(time.Second)
			g.Abort(errors.New("enough"))
			return nil
		}
		if g.Rank() == 0 {
			return pending["barrier"](sub)
		}
		return pending["barrier"](g)
	})
	culprit(t, errs[0], work.ErrAborted, 1)
	culprit(t, errs[2], work.ErrAborted, 1)
}

// TestAbortForAnotherGroupsFailure: the rank at fault has another number in each group.
func TestAbortForAnotherGroupsFailure(t *testing.T) {
	errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		sub := must.Get(g.NewGroup(context.Background(), []int{1, 3}))
		other := must.Get(g.NewGroup(context.Background(), []int{2, 3}))
		third, err := g.NewGroup(context.Background(), []int{1, 2})
		require.NoError(t, err)
		switch g.Rank() {
		case 1: // rank 3 does not come: rank 1 of sub
			w := must.Get(sub.BarrierAsync(context.Background(), pg.BarrierOptions{Timeout: time.Second}))
			err := w.Wait(context.Background())
			culprit(t, err, work.ErrTimeout, 1)
			g.Abort(fmt.Errorf("in step 7: %w", err))
			return nil
		case 2:
			err := pending["barrier"](third) // rank 3 is not in it
			culprit(t, err, work.ErrAborted, 0)
			require.ErrorContains(t, err, "rank 0 (global rank 1) aborted the group: in step 7")
			require.ErrorContains(t, err, `on rank 0 (global rank 1) of group "1": rank 1 (global rank 3) did not take part in time`)
			return pending["barrier"](g)
		case 3:
			defer other.Close()
		}
		return pending["barrier"](g)
	})
	for _, r := range []int{0, 2, 3} {
		culprit(t, errs[r], work.ErrTimeout, 3)
	}
}
