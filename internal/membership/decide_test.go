package membership

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// all runs f for each of these members under virtual time.
func all(t *testing.T, ids []ID, f func(id ID) (View, error)) (views map[ID]View, errs map[ID]error) {
	t.Helper()
	var mu sync.Mutex
	views, errs = make(map[ID]View), make(map[ID]error)
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			v, err := f(id)
			mu.Lock()
			defer mu.Unlock()
			views[id], errs[id] = v, err
		})
	}
	wg.Wait()
	return views, errs
}

func TestASuspectThatIsGoneIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, begun := store.NewHash(), time.Now()
		views, errs := all(t, []ID{0, 1, 3}, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: First(4), Done: 10 + uint64(id), Suspects: []ID{2}, Cause: "rank 2 died"})
		})
		require.Equal(t, DefaultSettle, time.Since(begun))
		for _, id := range []ID{0, 1, 3} {
			require.NoError(t, errs[id])
			require.Equal(t, View{
				Epoch: 1, First: 4, IDs: []ID{0, 1, 3}, MinDone: 10, MaxDone: 13, Left: []Absent{{2, "rank 2 died"}},
			}, views[id])
		}
		_, err := Decide(t.Context(), st, Config{Self: 2, Base: First(4)})
		require.ErrorIs(t, err, ErrEvicted)
		require.EqualError(t, err, "member 2 was evicted from the group in epoch 1: rank 2 died")
	})
}

func TestAMemberThatIsLateIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		views, errs := all(t, []ID{0, 1, 2}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * 20 * time.Second)
			return Decide(t.Context(), st, Config{Self: id, Base: First(3)})
		})
		require.NoError(t, errors.Join(errs[0], errs[1], errs[2]))
		require.Equal(t, []ID{0, 1, 2}, views[0].IDs)
	})
}

func TestAMemberThatNeverComesIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, begun := store.NewHash(), time.Now()
		v := must.Get(Decide(t.Context(), st, Config{Self: 1, Base: First(2)}))
		require.Equal(t, []ID{1}, v.IDs)
		require.Equal(t, []Absent{{0, "it did not come within 1m0s"}}, v.Left)
		require.Equal(t, DefaultPatience, time.Since(begun))
	})
}

// TestAMemberThatDiesAfterItsVoteIsLeftOut: the leader waits for another member meanwhile.
func TestAMemberThatDiesAfterItsVoteIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		require.NoError(t, st.Set(t.Context(), voteKey(1, 1), []byte(encode(vote{}))))
		time.AfterFunc(5*time.Second, func() { st.Set(t.Context(), voteKey(1, 1), []byte(gone)) }) // its will
		views, errs := all(t, []ID{0, 2}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * 5 * time.Second)
			return Decide(t.Context(), st, Config{Self: id, Base: First(3)})
		})
		require.NoError(t, errors.Join(errs[0], errs[2]))
		require.Equal(t, []ID{0, 2}, views[0].IDs)
	})
}

// TestALeaderThatGivesUpWithdraws: the next one does not wait until it seems silent.
func TestALeaderThatGivesUpWithdraws(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, must.Err(Decide(ctx, st, Config{Self: 0, Base: First(3)})), context.DeadlineExceeded)
		begun := time.Now()
		views, errs := all(t, []ID{0, 1, 2}, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * 10 * time.Millisecond) // member 0 has given up its vote, too
			return Decide(t.Context(), st, Config{Self: id, Base: First(3)})
		})
		require.NoError(t, errors.Join(errs[0], errs[1], errs[2]))
		require.Equal(t, []ID{0, 1, 2}, views[2].IDs)
		require.Less(t, time.Since(begun), DefaultBeat)
	})
}

// TestShortCallsFollowASilentLeader: each call of a member ends before the leader seems silent, but not all together.
func TestShortCallsFollowASilentLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		require.NoError(t, st.Set(t.Context(), leadKey(1), []byte("0 20 1"))) // it has stopped, and was not the first
		var leaders Leaders
		begun := time.Now()
		for {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			v, err := Decide(ctx, st, Config{Self: 1, Base: First(2), Suspects: []ID{0}, Leaders: &leaders})
			cancel()
			if err == nil {
				require.Equal(t, []ID{1}, v.IDs)
				break
			}
			require.Less(t, time.Since(begun), 10*time.Second, "%v", err)
		}
	})
}

// TestGone: the vote for the view, or the will for the next one, says that a member has died.
func TestGone(t *testing.T) {
	for _, epoch := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			require.NoError(t, st.Set(t.Context(), voteKey(epoch, 5), []byte(gone)))
			require.NoError(t, Gone(t.Context(), st, View{Epoch: 1}, 5))
		})
	}
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		require.NoError(t, st.Set(t.Context(), voteKey(2, 5), []byte(encode(vote{})))) // it goes on
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, Gone(ctx, st, View{Epoch: 1}, 5), context.DeadlineExceeded)
	})
}

func TestTooFewMembersTryAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: First(3), Min: 3, Suspects: []ID{2}, Cause: "rank 2 died"})
		})
		for _, id := range []ID{0, 1} {
			require.ErrorIs(t, errs[id], ErrTooFew)
			require.EqualError(t, errs[id], "too few members for epoch 1: 2 of at least 3; missing: member 2: rank 2 died")
		}
		require.Equal(t, views[0], views[1])

		// With a joiner they are enough.
		var id ID
		var joined View
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(5 * time.Second)
			var err error
			id, joined, err = Join(t.Context(), st, 3, nil)
			require.NoError(t, err)
		})
		views, errs = all(t, []ID{0, 1}, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: views[id], Min: 3})
		})
		wg.Wait()
		require.NoError(t, errors.Join(errs[0], errs[1]))
		require.Equal(t, ID(3), id)
		require.Equal(t, []ID{0, 1, 3}, joined.IDs)
		require.Equal(t, 2, joined.Epoch)
		require.Equal(t, joined, views[0])
	})
}

// TestMaxLimitsJoiners: the smallest limit of all votes counts; 0 is none.
func TestMaxLimitsJoiners(t *testing.T) {
	for _, limits := range [][2]int{{4, 4}, {0, 4}, {5, 4}, {4, 0}, {4, 5}} {
		t.Run(fmt.Sprint(limits), func(t *testing.T) { maxLimitsJoiners(t, limits) })
	}
}

func maxLimitsJoiners(t *testing.T, limits [2]int) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ctx, cancel := context.WithCancel(t.Context())
		var admitted, refused atomic.Int64
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, _, err := Join(ctx, st, 2, nil); err == nil {
					admitted.Add(1)
				} else if errors.Is(err, context.Canceled) {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()
		base := First(2)
		n := must.Get(Pending(ctx, st, base))
		require.Equal(t, 3, n)
		views, errs := all(t, base.IDs, func(id ID) (View, error) {
			time.Sleep(time.Duration(id) * time.Millisecond) // member 0 leads
			return Decide(ctx, st, Config{Self: id, Base: base, Max: limits[id]})
		})
		require.NoError(t, errors.Join(errs[0], errs[1]))
		base = views[0]
		require.Len(t, base.IDs, 4)
		synctest.Wait()
		require.EqualValues(t, 3, must.Get(st.Add(ctx, joinersKey, 0)), "the third keeps its number")
		n = must.Get(Pending(ctx, st, base))
		require.Equal(t, 1, n)
		cancel()
		wg.Wait()
		require.EqualValues(t, 2, admitted.Load())
		require.EqualValues(t, 1, refused.Load())
		n = must.Get(Pending(t.Context(), st, base))
		require.Zero(t, n, "one that gave up waits no longer")
	})
}

func TestAMemberThatGivesUpIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, why := store.NewHash(), errors.New("the user has had enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := Decide(ctx, st, Config{Self: 2, Base: First(3)})
			require.ErrorIs(t, err, why)
			require.ErrorIs(t, err, context.Canceled)
		})
		synctest.Wait()
		cancel(why)
		wg.Wait()
		begun := time.Now()
		views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: First(3)})
		})
		require.NoError(t, errors.Join(errs[0], errs[1]))
		require.Equal(t, []ID{0, 1}, views[0].IDs)
		require.Equal(t, []Absent{{2, "it gave up: the user has had enough"}}, views[0].Left)
		require.Less(t, time.Since(begun), 5*time.Second, "another takes the lead, and does not wait for member 2")
	})
}

// TestABrokenLinkLeavesOutTheSmallerSide: members that cannot connect say so. One report of a pair will do.
func TestABrokenLinkLeavesOutTheSmallerSide(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  int
		lacks map[ID][]ID
		want  []ID
		left  []Absent
	}{
		{"two hosts, the larger one without member 0", 5, map[ID][]ID{0: {2, 3, 4}, 1: {2, 3, 4}}, []ID{2, 3, 4}, []Absent{
			{0, "the link with member 2 is broken, and both reach the store"}, {1, "the link with member 2 is broken, and both reach the store"},
		}},
		{"two hosts of the same size", 4, map[ID][]ID{2: {0, 1}, 3: {0, 1}}, []ID{0, 1}, []Absent{
			{2, "the link with member 0 is broken, and both reach the store"}, {3, "the link with member 0 is broken, and both reach the store"},
		}},
		{"both ends report it", 3, map[ID][]ID{0: {1}, 1: {0}}, []ID{0, 2}, []Absent{{1, "the link with member 0 is broken, and both reach the store"}}},
		{"two links", 4, map[ID][]ID{0: {1}, 3: {2}}, []ID{0, 2}, []Absent{
			{1, "the link with member 0 is broken, and both reach the store"}, {3, "the link with member 2 is broken, and both reach the store"},
		}},
		{"one of them is reported twice", 4, map[ID][]ID{0: {1, 2}, 1: {0}, 3: {2}}, []ID{0, 3}, []Absent{
			{1, "the link with member 0 is broken, and both reach the store"}, {2, "the link with member 0 is broken, and both reach the store"},
		}},
		{"a member that is no member", 2, map[ID][]ID{0: {7, 0}}, []ID{0, 1}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := store.NewHash()
				views, errs := all(t, First(c.size).IDs, func(id ID) (View, error) {
					return Decide(t.Context(), st, Config{Self: id, Base: First(c.size), Lacks: c.lacks[id]})
				})
				for id, err := range errs {
					require.Equal(t, c.want, views[id].IDs)
					require.Equal(t, c.left, views[id].Left)
					require.Equal(t, !slices.Contains(c.want, id), errors.Is(err, ErrEvicted), "%v", err)
				}
			})
		})
	}
}

// TestABrokenLinkOfTooFewMembers: none of them is evicted, and all learn why.
func TestABrokenLinkOfTooFewMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		_, errs := all(t, First(2).IDs, func(id ID) (View, error) {
			return Decide(t.Context(), st, Config{Self: id, Base: First(2), Min: 2, Lacks: []ID{1 - id}})
		})
		for _, err := range errs {
			require.ErrorIs(t, err, ErrTooFew)
			require.ErrorContains(t, err, "member 1: the link with member 0 is broken")
		}
	})
}

// TestAJoinerOfNobody: it learns that all members have ended. One that has given up may call again.
func TestAJoinerOfNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		v := View{Epoch: 3, First: 2, IDs: []ID{0, 1, 2}, Joiners: 1}
		must.Get(st.Add(t.Context(), joinersKey, 1))
		require.NoError(t, st.Set(t.Context(), viewKey(3), []byte(encode(v))))
		require.NoError(t, st.Set(t.Context(), latestKey, []byte("3")))
		require.NoError(t, st.Set(t.Context(), voteKey(4, 0), []byte(gone)))
		require.NoError(t, st.Set(t.Context(), voteKey(3, 1), []byte(gone)), "it has died before it got the view")
		require.NoError(t, st.Set(t.Context(), voteKey(4, 2), []byte(gaveUp+"no patience")))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, _, err := Join(ctx, st, 2, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, ErrNoMembers)
		require.NoError(t, st.Set(t.Context(), voteKey(4, 2), []byte(gone)))
		begun := time.Now()
		_, _, err = Join(t.Context(), st, 2, nil)
		require.ErrorIs(t, err, ErrNoMembers)
		require.Zero(t, time.Since(begun))
	})
}

// TestAJoinerThatDoesNotAnswer: it has died, and the store does not know. Nobody waits for it again. One that has only stood
// still applies again.
func TestAJoinerThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		must.Get(st.Add(t.Context(), joinersKey, 1))
		require.NoError(t, st.Set(t.Context(), joinKey(2), []byte(waiting)))
		require.Equal(t, 1, must.Get(Pending(t.Context(), st, First(2))))
		var wg sync.WaitGroup
		defer wg.Wait()
		paused := &pausing{Hash: st, key: callKey(1), pause: 2 * time.Second}
		var numbers []ID
		wg.Go(func() {
			id, v, err := Join(t.Context(), paused, 2, func(id ID) { numbers = append(numbers, id) })
			require.NoError(t, err)
			require.Equal(t, ID(4), id)
			require.Equal(t, []ID{0, 1, 4}, v.IDs)
		})
		synctest.Wait()
		begun, v := time.Now(), First(2)
		decide := func() {
			views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) { return Decide(t.Context(), st, Config{Self: id, Base: v}) })
			require.NoError(t, errors.Join(errs[0], errs[1]))
			v = views[0]
		}
		decide()
		require.Equal(t, answerBeats*DefaultBeat, time.Since(begun))
		require.Equal(t, First(2).IDs, v.IDs)
		require.Zero(t, must.Get(Pending(t.Context(), st, v)))
		time.Sleep(paused.pause)
		synctest.Wait()
		require.Equal(t, 1, must.Get(Pending(t.Context(), st, v)))
		begun = time.Now()
		decide()
		require.Zero(t, time.Since(begun))
		wg.Wait()
		require.Equal(t, []ID{3, 4}, numbers)
	})
}

// pausing is the store of a process that stands still once it has read a key.
type pausing struct {
	*store.Hash
	key   string
	pause time.Duration
}

func (p *pausing) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	values, err := p.Hash.MultiGet(ctx, keys)
	if err == nil && keys[0] == p.key {
		time.Sleep(p.pause)
	}
	return values, err
}

// TestForget: of dead members, failed epochs and joiners nothing stays but views.
func TestForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, base := store.NewHash(), First(3)
		require.NoError(t, Leave(st, 0, 2))
		var wg sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() { Join(ctx, st, 3, nil) })
		synctest.Wait()
		cancel()
		wg.Wait()
		wg.Go(func() { Join(t.Context(), st, 3, nil) })
		synctest.Wait()
		var left []Absent
		v := base
		for _, want := range [][]ID{{0, 1, 4}, {0, 1}} {
			views, errs := all(t, []ID{0, 1}, func(id ID) (View, error) { return Decide(t.Context(), st, Config{Self: id, Base: v}) })
			require.NoError(t, errors.Join(errs[0], errs[1]))
			v = views[0]
			require.Equal(t, want, v.IDs)
			left = append(left, v.Left...)
			wg.Wait()
			require.NoError(t, Leave(st, 1, 4)) // epoch 1 does not connect
		}
		for _, id := range v.IDs {
			require.NoError(t, Forget(t.Context(), st, base, v, left, id))
		}
		keys := must.Get(st.ListKeys(t.Context()))
		slices.Sort(keys)
		require.Equal(t, []string{callKey(2), joinersKey, latestKey, viewKey(1), viewKey(2)}, keys)
	})
}

// deaf is a store whose CompareSet wakes nobody, as those of PyTorch's servers.
type deaf struct {
	*store.Hash
	mu    sync.Mutex
	woken map[string]chan struct{}
}

func (d *deaf) wake(key string) chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.woken[key] == nil {
		d.woken[key] = make(chan struct{})
	}
	return d.woken[key]
}

func (d *deaf) Set(ctx context.Context, key string, value []byte) error {
	err := d.Hash.Set(ctx, key, value)
	d.mu.Lock()
	defer d.mu.Unlock()
	if woken := d.woken[key]; woken != nil {
		close(woken)
		delete(d.woken, key)
	}
	return err
}

func (d *deaf) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	for _, key := range keys {
		woken := d.wake(key)
		if there, err := d.Check(ctx, key); err != nil || there {
			continue
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return d.Hash.MultiGet(ctx, keys)
}

// TestAViewWakesMembers: also in a store whose CompareSet does not.
func TestAViewWakesMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, begun := &deaf{Hash: store.NewHash(), woken: make(map[string]chan struct{})}, time.Now()
		_, errs := all(t, First(3).IDs, func(id ID) (View, error) { return Decide(t.Context(), st, Config{Self: id, Base: First(3)}) })
		require.NoError(t, errors.Join(errs[0], errs[1], errs[2]))
		require.Zero(t, time.Since(begun))
	})
}

// TestWillsVote: where the store notices deaths, nobody waits for a member that has died.
func TestWillsVote(t *testing.T) {
	server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	defer server.Close()
	stores := make([]store.Store, 3)
	for i := range stores {
		stores[i] = must.Get(tcp.New(t.Context(), server.Addr().String()))
		defer stores[i].Close()
	}
	decide := func(base View, ids ...ID) map[ID]View {
		views, errs := all(t, ids, func(id ID) (View, error) {
			return Decide(t.Context(), stores[id], Config{Self: id, Base: base})
		})
		for _, id := range ids {
			require.NoError(t, errs[id])
		}
		return views
	}
	base := decide(First(3), 0, 1, 2)[0]
	require.Equal(t, []ID{0, 1, 2}, base.IDs)
	stores[2].Close() // the process of member 2 ends, and nobody suspects it
	begun := time.Now()
	require.Equal(t, []ID{0, 1}, decide(base, 0, 1)[0].IDs)
	require.Less(t, time.Since(begun), DefaultPatience/2)
}

func TestAMemberThatLeavesIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		require.NoError(t, Leave(st, 0, 1))
		require.Equal(t, []ID{0}, must.Get(Decide(t.Context(), st, Config{Self: 0, Base: First(2)})).IDs)
	})
}

func TestForeignBytesInTheStore(t *testing.T) {
	for key, value := range map[string]string{
		"view/1": "nonsense", "lead/1": "nonsense", "vote/1/1": "nonsense", "joiners": "nonsense", "join/2": "nonsense",
	} {
		t.Run(key, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := store.NewHash()
				st.Set(t.Context(), key, []byte(value))
				v, err := Decide(t.Context(), st, Config{Self: 0, Base: First(2), Suspects: []ID{1}})
				if key == "view/1" || key == "joiners" {
					require.ErrorContains(t, err, key)
					return
				}
				require.NoError(t, err)
				require.Equal(t, []ID{0}, v.IDs)
			})
		})
	}
}

// counted counts the calls of a store.
type counted struct {
	store.Store
	calls *atomic.Int64
}

func (c *counted) Set(ctx context.Context, key string, value []byte) error {
	c.calls.Add(1)
	return c.Store.Set(ctx, key, value)
}

func (c *counted) Add(ctx context.Context, key string, delta int64) (int64, error) {
	c.calls.Add(1)
	return c.Store.Add(ctx, key, delta)
}

func (c *counted) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	c.calls.Add(1)
	return c.Store.CompareSet(ctx, key, expected, desired)
}

func (c *counted) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	c.calls.Add(1)
	return c.Store.MultiGet(ctx, keys)
}

// decideAll lets all members but the last decide, each with a store of its own. It returns the calls
// of each.
func decideAll(tb testing.TB, st store.Store, size int) []int64 {
	calls := make([]atomic.Int64, size-1)
	errs := make([]error, size-1)
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() {
			_, errs[i] = Decide(tb.Context(), &counted{st, &calls[i]}, Config{
				Self: ID(i), Base: First(size), Suspects: []ID{ID(size - 1)}, Settle: time.Millisecond,
			})
		})
	}
	wg.Wait()
	require.NoError(tb, errors.Join(errs...))
	n := make([]int64, len(calls))
	for i := range calls {
		n[i] = calls[i].Load()
	}
	slices.Sort(n)
	return n
}

func TestAMemberCallsTheStoreThreeTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := decideAll(t, store.NewHash(), 50)
		require.EqualValues(t, 3, calls[0])
		require.EqualValues(t, 3, calls[len(calls)-2], "all but the leader")
		require.LessOrEqual(t, calls[len(calls)-1], int64(12), "the leader")
	})
}

// BenchmarkDecide lets 1000 ranks, goroutines with one store in memory or connections to one server,
// decide who is in the next epoch after a death.
func BenchmarkDecide(b *testing.B) {
	for _, size := range []int{16, 1000} {
		b.Run(fmt.Sprintf("%d ranks", size), func(b *testing.B) {
			var calls []int64
			for b.Loop() {
				calls = decideAll(b, store.NewHash(), size)
			}
			b.ReportMetric(float64(calls[0]), "calls/member")
			b.ReportMetric(float64(calls[len(calls)-1]), "calls/leader")
		})
	}
}

// forgetful is a store that may have lost keys.
type forgetful struct {
	store.Store
	err error
}

func (f forgetful) Kept(context.Context) error { return f.err }

// TestNoViewFromAStoreThatLosesKeys: there may have been another view of the epoch.
func TestNoViewFromAStoreThatLosesKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := errors.New("keys are lost")
		st := store.NewHash()
		_, err := Decide(t.Context(), store.Prefix("group", forgetful{st, lost}), Config{Self: 0, Base: First(1)})
		require.ErrorIs(t, err, lost)
		v := must.Get(Decide(t.Context(), forgetful{st, nil}, Config{Self: 0, Base: First(1)}))
		require.Equal(t, 1, v.Epoch)
	})
}
