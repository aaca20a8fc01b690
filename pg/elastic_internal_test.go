package pg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/membership"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/work"
)

// TestGroupsWithPyTorchRanksHaveNoEpochs: they are refused, and their errors are as before.
func TestGroupsWithPyTorchRanksHaveNoEpochs(t *testing.T) {
	st := store.NewHash()
	w := &world{store: st, begunIn: st, size: 2} // the meeting has found a PyTorch rank
	g := &ProcessGroup{name: "0"}
	g.current.Store(&epoch{world: w, name: "0", size: 2, ranks: []int{0, 1}})
	w.root = g
	_, err := g.Reconfigure(t.Context())
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.EqualError(t, err, `pg: Reconfigure of group "0": PyTorch ranks may be in the group, and they cannot change their group: unsupported operation`)
	require.ErrorIs(t, must.Err(g.Pending(t.Context())), errors.ErrUnsupported)
	require.Nil(t, g.now().noteFailure())
	require.Zero(t, must.Get(st.NumKeys(t.Context())), "no key of ours")
}

// TestSuspects: the first fault counts as the cause, and the ranks of all are suspected.
func TestSuspects(t *testing.T) {
	w := &world{ours: true, number: 3}
	g := &epoch{world: w, ranks: []int{4, 6}}
	died, link := &work.Error{Peer: 1, Err: work.ErrPeerDied}, &work.Error{Peer: -1, Err: &work.LinkError{}}
	told := g.noteFailure()
	told(died)
	told(died)
	told(link)
	e := must.As[*EpochError](t, died)
	require.Equal(t, EpochError{Epoch: 3, Suspects: []int{6}, Err: work.ErrPeerDied}, *e)
	require.ErrorIs(t, died, work.ErrPeerDied)
	require.ErrorAs(t, link, &e)
	require.Empty(t, e.Suspects)
	require.Equal(t, []int{6}, w.suspects)
	require.EqualError(t, w.cause, work.ErrPeerDied.Error())
	require.False(t, w.unsure)
	told(&work.Error{Peer: 0, Err: work.ErrTimeout})
	require.True(t, w.unsure, "rank 4 may have stopped")
}

// TestAMemberDiesAfterItsVote: it is in the view, and dies before it connects. The others do not wait for it.
func TestAMemberDiesAfterItsVote(t *testing.T) {
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	defer server.Close()
	const size, victim = 3, 2
	var all, back sync.WaitGroup // back: those that have met again, or failed
	back.Add(size - 1)
	errs := make([]error, size)
	for r := range size {
		all.Go(func() {
			errs[r] = func() (err error) {
				defer must.Catch(&err)
				met := sync.OnceFunc(back.Done)
				if r != victim {
					defer met()
				}
				st := must.Get(tcp.New(t.Context(), server.Addr().String()))
				defer st.Close()
				g, err := New(t.Context(), st, r, size, Options{Backend: "gloo", Elastic: true, Timeout: time.Minute})
				if err != nil {
					return err
				}
				defer g.Close()
				if r == victim {
					m := g.membership
					cfg := m.config(ReconfigureOptions{})
					cfg.Base = m.view
					v, err := membership.Decide(t.Context(), m.store, cfg)
					if err == nil && len(v.IDs) != size {
						err = fmt.Errorf("view %+v", v)
					}
					return errors.Join(err, st.Close())
				}
				begun := time.Now()
				v, err := g.Reconfigure(t.Context())
				took := time.Since(begun)
				met()
				back.Wait() // a rank that closes its group leaves
				if err == nil && (len(v.IDs) != size-1 || took > membership.DefaultPatience/2) {
					err = fmt.Errorf("view %+v after %v", v, took)
				}
				return err
			}()
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
}

// stopping is a store whose server stops.
type stopping struct {
	store.Store
	stopped *atomic.Bool
}

func (s stopping) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if s.stopped.Load() {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return s.Store.Add(ctx, key, delta)
}

// TestPendingDoesNotWaitForAStoreThatHasStopped: it returns within its own limit, and says what is wrong.
func TestPendingDoesNotWaitForAStoreThatHasStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := stopping{store.NewHash(), new(atomic.Bool)}
		g, err := New(t.Context(), st, 0, 1, Options{Elastic: true})
		require.NoError(t, err)
		_, err = g.Pending(t.Context())
		require.NoError(t, err)
		st.stopped.Store(true)
		begun := time.Now()
		_, err = g.Pending(t.Context())
		require.ErrorContains(t, err, "the store does not answer")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.LessOrEqual(t, time.Since(begun), pendingLimit)
		g.Close()
	})
}
