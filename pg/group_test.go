package pg_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/work"
)

// job runs f on size ranks of a job with options.
func job(t *testing.T, size int, options func(o *pg.Options), f func(g *pg.ProcessGroup)) *pgtest.Job {
	t.Helper()
	return jobIn(t, pgtest.NewJob(size), options, f)
}

func jobIn(t *testing.T, j *pgtest.Job, options func(o *pg.Options), f func(g *pg.ProcessGroup)) *pgtest.Job {
	t.Helper()
	t.Cleanup(func() { j.Close() })
	o, size := j.Options(), j.Size
	options(&o)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			g, err := pg.New(context.Background(), j.Store, r, size, o)
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			f(g)
		})
	}
	wg.Wait()
	return j
}

// TestBarrierKeys states where ranks meet in the store, which PyTorch ranks do too.
func TestBarrierKeys(t *testing.T) {
	for _, tc := range []struct {
		name    string
		torch1  bool
		options pg.Options
		names   []string // of the default group and of the first of NewGroup
		want    []string
	}{
		{"2", false, pg.Options{InitBarrier: true}, []string{"0", "1"}, []string{
			"0//store_based_barrier_key:1", "0//store_based_barrier_key:1:last_worker",
			"store_based_barrier_key:0", "store_based_barrier_key:0:last_worker",
		}},
		{"2, named", false, pg.Options{InitBarrier: true, Name: "all"}, []string{"all", "0"}, []string{
			"all//store_based_barrier_key:0", "all//store_based_barrier_key:0:last_worker",
			"store_based_barrier_key:all", "store_based_barrier_key:all:last_worker",
		}},
		{"1", true, pg.Options{}, []string{"0", "1"}, []string{
			"store_based_barrier_key:1", "store_based_barrier_key:2",
		}},
		{"1, named", true, pg.Options{Name: "all"}, []string{"all", "0"}, []string{
			"store_based_barrier_key:0", "store_based_barrier_key:1",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			j := pgtest.NewJob(2)
			if tc.torch1 {
				j.Store = pg.Torch1{Store: j.Store}
			}
			jobIn(t, j, func(o *pg.Options) {
				o.InitBarrier, o.Name = tc.options.InitBarrier, tc.options.Name
			}, func(g *pg.ProcessGroup) {
				sub := must.Get(g.NewGroup(context.Background(), []int{1}))
				require.Equal(t, tc.names, []string{g.Name(), sub.Name()})
			})
			keys := must.Get(j.Store.ListKeys(t.Context()))
			keys = slices.DeleteFunc(keys, func(k string) bool { return !strings.Contains(k, "barrier") })
			slices.Sort(keys)
			require.Equal(t, tc.want, keys)
		})
	}
}

// silent is a store whose server stops once somebody has waited in it.
type silent struct {
	store.Store
	stopped atomic.Bool
}

func (s *silent) Wait(ctx context.Context, keys ...string) error {
	defer s.stopped.Store(true)
	return s.Store.Wait(ctx, keys...)
}

func (s *silent) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if s.stopped.Load() {
		ctx, cancel := store.WithTimeout(ctx, s.Timeout())
		defer cancel()
		<-ctx.Done()
		return 0, store.WaitErr(ctx)
	}
	return s.Store.Add(ctx, key, delta)
}

// TestBarrierInASilentStore: a barrier that has run out of time does not wait
// long to learn who was missing.
func TestBarrierInASilentStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(2)
		defer j.Close()
		o := j.Options()
		o.InitBarrier = true
		start := time.Now()
		_, err := pg.New(t.Context(), &silent{Store: j.Store}, 0, 2, o)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, `pg: store barrier of group "0": 1 of 2 ranks came`)
		require.Less(t, time.Since(start), pgtest.Timeout+2*time.Second)
	})
}

func TestARefusedNewGroupUsesNoName(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		_, err := g.NewGroup(t.Context(), []int{0}, pg.GroupOptions{Backend: "none"})
		require.ErrorIs(t, err, backend.ErrUnknownBackend)
		require.Equal(t, "1", must.Get(g.NewGroup(t.Context(), []int{0, 1})).Name())
	})
}

// TestARefusedSplitIsRefusedOnEveryRank: a rank that went ahead would wait for the others.
func TestARefusedSplitIsRefusedOnEveryRank(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		_, err := g.SplitRanks(t.Context(), [][]int{{0}, {}, {1}})
		require.ErrorContains(t, err, "list 1 of the split is empty")
		require.NoError(t, pending["barrier"](must.Get(g.SplitRanks(t.Context(), [][]int{{0, 1}}))))
	})
}

// TestSplitByColourAndKey: ranks of one colour make a group in the order of their keys, and equal
// keys leave the order of the group that is cut.
func TestSplitByColourAndKey(t *testing.T) {
	// Rank 5 wants no group.
	colors, keys := []int{7, 0, 7, 0, 7, -1}, []int{3, 0, -2, 0, 3, 0}
	want := map[int][]int{7: {2, 0, 4}, 0: {1, 3}}
	pgtest.Run(t, len(colors), func(t *testing.T, g *pg.ProcessGroup) {
		r := g.Rank()
		for round := range 2 {
			part := must.Get(g.Split(t.Context(), colors[r], keys[r], pg.GroupOptions{Description: "part"}))
			if colors[r] < 0 {
				require.False(t, part.IsMember())
				require.ErrorIs(t, part.Barrier(t.Context()), pg.ErrNotMember)
				continue
			}
			require.Equal(t, want[colors[r]], part.Ranks())
			require.Equal(t, r, part.Ranks()[part.Rank()])
			require.Equal(t, fmt.Sprintf("0:split:%d:%d", round+1, colors[r]), part.Name())
			all := make([]int64, part.Size())
			require.NoError(t, pg.Wait(part.AllGatherIntoTensor(t.Context(), pg.Slice(all), pg.Slice([]int64{int64(r)}))))
			require.Equal(t, fmt.Sprint(want[colors[r]]), fmt.Sprint(all))
			// A part of a part: the order turns round.
			back := must.Get(part.Split(t.Context(), 0, -part.Rank()))
			turned := slices.Clone(want[colors[r]])
			slices.Reverse(turned)
			require.Equal(t, turned, back.Ranks())
			require.NoError(t, pending["barrier"](back))
		}
	})
}

// TestSplitNamesADeadRank: a rank that dies before it calls Split is named at once.
func TestSplitNamesADeadRank(t *testing.T) {
	j := pgtest.NewJob(2)
	defer j.Close()
	var ranks sync.WaitGroup
	for r := range 2 {
		g, err := j.Join(t.Context(), r)
		require.NoError(t, err)
		ranks.Go(func() {
			defer g.Close()
			if r == 1 {
				j.Kill(1)
				return
			}
			_, err := g.Split(t.Context(), 0, 0)
			assert.ErrorIs(t, err, work.ErrPeerDied)
		})
	}
	ranks.Wait()
}

func TestNoGroupsFromAClosedOne(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		sub := must.Get(g.NewGroup(t.Context(), []int{0}))
		require.NoError(t, sub.Close())
		require.ErrorIs(t, must.Err(sub.SplitRanks(t.Context(), [][]int{{0}})), pg.ErrClosed)
		require.NoError(t, g.Close())
		require.ErrorIs(t, must.Err(g.NewGroup(t.Context(), []int{0})), pg.ErrClosed)
		require.ErrorIs(t, must.Err(g.SplitRanks(t.Context(), [][]int{{0}})), pg.ErrClosed)
		require.ErrorIs(t, must.Err(g.Split(t.Context(), 0, 0)), pg.ErrClosed)
	})
}

// TestCloseWhileAGroupIsMade: whoever comes second closes the new group, or
// TestMain finds its goroutines.
func TestCloseWhileAGroupIsMade(t *testing.T) {
	for range 100 {
		pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
			var wg sync.WaitGroup
			wg.Go(func() {
				if sub, err := g.NewGroup(context.Background(), []int{0}); err != nil {
					require.ErrorIs(t, err, pg.ErrClosed)
				} else {
					require.NotNil(t, sub)
				}
			})
			require.NoError(t, g.Close())
			wg.Wait()
		})
	}
}

func TestTimeoutMayChangeAtAnyTime(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			g.SetTimeout(time.Second)
		}()
		g.Timeout()
		<-done
		require.Equal(t, time.Second, g.Timeout())
		g.SetTimeout(-1)
		require.Equal(t, backend.DefaultTimeout, g.Timeout())
	})
}

func TestASecondShutdownWaitsForTheFirst(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		if g.Rank() == 1 {
			time.Sleep(50 * time.Millisecond)
			require.NoError(t, wait(g.Send(t.Context(), vec(1), 0)))
			return
		}
		w := must.Get(g.Recv(t.Context(), vec(1), 1))
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				require.NoError(t, g.Shutdown(t.Context()))
				require.True(t, w.IsSuccess())
			})
		}
		wg.Wait()
	})
}
