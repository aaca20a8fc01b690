package pg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// sumOf all-reduces one number.
func sumOf(g *pg.ProcessGroup, x float32) (float32, error) {
	v := []float32{x}
	err := pg.Wait(g.AllReduce(context.Background(), pg.Slice(v), pg.Sum()))
	return v[0], err
}

// sumIs checks that all members of g add up to want, with 1, 2, 4 ... by member.
func sumIs(g *pg.ProcessGroup, ids []int) error {
	want := float32(0)
	for _, id := range ids {
		want += float32(int(1) << id)
	}
	got, err := sumOf(g, float32(int(1)<<ids[g.Rank()]))
	if err == nil && (got != want || g.Size() != len(ids)) {
		err = fmt.Errorf("%d members %v add up to %v, want %v", g.Size(), ids, got, want)
	}
	return err
}

// failed calls all-reduce until it fails, and checks its error.
func failed(g *pg.ProcessGroup, epoch int, suspects ...int) error {
	for {
		_, err := sumOf(g, 1)
		var e *pg.EpochError
		switch {
		case err == nil:
		case !errors.As(err, &e) || e.Epoch != epoch || !slices.Equal(e.Suspects, suspects) || !errors.As(err, new(*work.Error)):
			return fmt.Errorf("epoch error %+v, want epoch %d and suspects %v: %w", e, epoch, suspects, err)
		default:
			return nil
		}
	}
}

func TestShrink(t *testing.T) {
	for name, dead := range map[string]int{"last": 3, "middle": 1, "first": 0} {
		t.Run(name, func(t *testing.T) {
			var ids []int
			for r := range 4 {
				if r != dead {
					ids = append(ids, r)
				}
			}
			errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
				must.Do(sumIs(g, []int{0, 1, 2, 3}))
				if g.Rank() == dead {
					synctest.Wait()
					j.Kill(dead)
					return nil
				}
				old, begun := g.Rank(), time.Now()
				must.Do(failed(g, 0, dead))
				v := must.Get(g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 3, Max: 1}))
				require.Equal(t, ids, v.IDs)
				require.Equal(t, 1, v.Epoch)
				require.Equal(t, old, v.IDs[g.Rank()])
				require.Len(t, v.Left, 1)
				require.Equal(t, [2]int{dead, dead}, [2]int{v.Left[0].ID, v.Left[0].Rank})
				require.Contains(t, v.Left[0].Why, fmt.Sprintf("rank %d", dead))
				require.Equal(t, [2]uint64{1, 1}, [2]uint64{v.MinDone, v.MaxDone}, "the first all-reduce")
				require.Less(t, time.Since(begun), time.Second, "virtual time: settling only")
				return sumIs(g, ids)
			})
			require.NoError(t, errors.Join(errs...))
		})
	}
}

// TestDumpsOfEpochs: a rank has one number in its dump in all epochs, also where its rank is another. So the
// merged dumps take no rank for another one.
func TestDumpsOfEpochs(t *testing.T) {
	ids := []int{0, 2, 3}
	dumps := make([]bytes.Buffer, 4)
	errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		id := g.Rank()
		must.Do(sumIs(g, []int{0, 1, 2, 3}))
		if id == 1 {
			synctest.Wait()
			j.Kill(1)
			return nil
		}
		must.Do(failed(g, 0, 1))
		v := must.Get(g.Reconfigure(context.Background()))
		require.Equal(t, ids, v.IDs)
		must.Do(sumIs(g, v.IDs))
		sub := must.Get(g.NewGroup(context.Background(), []int{1, 2}))
		if sub.Rank() >= 0 {
			must.Get(sumOf(sub, 1))
		}
		return must.Err(g.Recorder().WriteTo(&dumps[id]))
	})
	require.NoError(t, errors.Join(errs...))
	var files []*trace.File
	for _, id := range ids {
		name := filepath.Join(t.TempDir(), "dump_9") // the dump says its rank
		require.NoError(t, os.WriteFile(name, dumps[id].Bytes(), 0o666))
		f := must.Get(trace.ReadFile(name))
		require.Equal(t, id, f.Rank)
		for _, e := range f.Entries {
			require.Contains(t, f.Groups[e.Group], id, e.Group)
		}
		files = append(files, f)
	}
	j := must.Get(trace.Merge(files))
	require.Equal(t, ids, j.Ranks)
	require.Equal(t, []int{1}, j.Missing)
	for _, s := range j.Stuck {
		require.Empty(t, s.NotCalled, "%+v", s)
	}
	of := make(map[int]int)
	for _, b := range j.Blame {
		of[b.Rank] = b.Of
	}
	require.Equal(t, map[int]int{0: 1, 2: 2, 3: 2}, of, "collectives of the second epoch: one of all, one of ranks 2 and 3")
	var report strings.Builder
	require.NoError(t, j.Print(&report, 10))
	require.Contains(t, report.String(), "3 dumps of ranks 0, 2-3 (numbers that ranks keep in all epochs)\nno dump of ranks 1\n")
}

// TestLateJoin: members that have no fault take in processes that wait. Ids are not used again.
func TestLateJoin(t *testing.T) {
	errs := faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		var wg sync.WaitGroup
		defer wg.Wait()
		ctx := context.Background()
		if n, err := g.Pending(ctx); err != nil || n != 0 {
			return fmt.Errorf("%d wait: %w", n, err)
		}
		must.Do(g.Barrier(ctx))
		if g.Rank() == 0 {
			for range 2 {
				wg.Go(func() {
					joined, err := pg.Join(ctx, j.Store, j.Options())
					if err != nil {
						t.Errorf("newcomer: %v", err)
						return
					}
					defer joined.Close()
					if err := sumIs(joined, []int{0, 1, 2, 3}); err != nil {
						t.Error(err)
					}
					joined.Barrier(ctx)
				})
			}
		}
		for {
			n := must.Get(g.Pending(ctx))
			ready := []int64{int64(n)}
			must.Do(pg.Wait(g.AllReduce(ctx, pg.Slice(ready), pg.Min())))
			if ready[0] == 2 {
				break
			}
			time.Sleep(time.Millisecond) // virtual: a step
		}
		v := must.Get(g.Reconfigure(ctx, pg.ReconfigureOptions{Min: g.Size(), Max: 4}))
		require.Equal(t, []int{2, 3}, v.Joined)
		require.Empty(t, v.Left)
		if n, err := g.Pending(ctx); err != nil || n != 0 {
			return fmt.Errorf("%d wait: %w", n, err)
		}
		return errors.Join(sumIs(g, v.IDs), g.Barrier(ctx))
	})
	require.NoError(t, errors.Join(errs...))
}

// TestAStoppedRankIsEvicted: it comes back after the others have gone on, and joins again.
func TestAStoppedRankIsEvicted(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			time.Sleep(2 * pgtest.Timeout)
			if _, err := sumOf(g, 1); err == nil {
				return errors.New("an operation of an old epoch works")
			}
			require.ErrorIs(t, must.Err(g.Reconfigure(context.Background())), pg.ErrEvicted)
			g.Close()
			g = must.Get(pg.Join(context.Background(), j.Store, j.Options()))
			defer g.Close()
			return errors.Join(sumIs(g, []int{0, 2, 3}), g.Barrier(context.Background()))
		}
		must.Do(failed(g, 0, 1))
		v := must.Get(g.Reconfigure(context.Background()))
		require.Equal(t, []int{0, 2}, v.IDs)
		require.Contains(t, v.Left[0].Why, "timed out")
		v = must.Get(g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 3}))
		return errors.Join(sumIs(g, v.IDs), g.Barrier(context.Background()))
	})
	require.NoError(t, errors.Join(errs...))
}

// TestACallThatWasNotStarted: its context had ended, so the rank may call again. If it leaves the
// epoch or the group instead, the ranks that wait for it hear why. So do those that wait for a message.
func TestACallThatWasNotStarted(t *testing.T) {
	why := errors.New("the user pressed a key")
	ended, cancel := context.WithCancelCause(context.Background())
	cancel(why)
	calls := map[string]func(ctx context.Context, g *pg.ProcessGroup) error{
		"all_reduce": func(ctx context.Context, g *pg.ProcessGroup) error {
			return wait(g.AllReduce(ctx, vec(4), pg.Sum()))
		},
		"monitored barrier": func(ctx context.Context, g *pg.ProcessGroup) error {
			return g.MonitoredBarrier(ctx)
		},
		"messages": func(ctx context.Context, g *pg.ProcessGroup) error {
			if g.Rank() == 1 {
				for _, dst := range []int{0, 2} {
					if err := wait(g.Send(ctx, vec(4), dst)); err != nil {
						return err
					}
				}
				return nil
			}
			return wait(g.Recv(ctx, vec(4), 1))
		},
	}
	for name, call := range maps.Clone(calls) {
		calls["detail: "+name] = call
	}
	for name, call := range calls {
		detailed := strings.HasPrefix(name, "detail: ")
		for _, then := range []string{"calls again", "reconfigures", "closes"} {
			t.Run(name+", "+then, func(t *testing.T) {
				errs := faultyWith(t, 3, func(o *pg.Options) { o.Detail = detailed }, func(j *pgtest.Job, g *pg.ProcessGroup) error {
					must.Do(sumIs(g, []int{0, 1, 2}))
					begun := time.Now()
					if g.Rank() == 1 {
						time.Sleep(time.Second) // virtual: the others wait by then
						err := call(ended, g)
						require.ErrorIs(t, err, work.ErrCanceled)
						require.ErrorContains(t, err, "not started")
					}
					if then == "calls again" {
						return errors.Join(call(context.Background(), g), g.Barrier(context.Background()))
					}
					if g.Rank() == 1 && then == "closes" {
						return g.Close()
					}
					if g.Rank() != 1 {
						err := call(context.Background(), g)
						e := must.As[*pg.EpochError](t, err)
						require.ErrorIs(t, err, work.ErrCanceled)
						require.ErrorContains(t, err, "rank 1 cancelled the operation")
						require.ErrorContains(t, err, why.Error())
						require.Equal(t, []int{1}, e.Suspects)
						require.Less(t, time.Since(begun), 2*time.Second, "virtual time")
					}
					if then == "closes" {
						return nil
					}
					v := must.Get(g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 3}))
					require.Less(t, time.Since(begun), 2*time.Second, "virtual time")
					return sumIs(g, v.IDs)
				})
				require.NoError(t, errors.Join(errs...))
			})
		}
	}
}

// TestAFaultOfASubgroup ends the default group when a rank of it reconfigures: the others would
// work on, and then wait for that rank.
func TestAFaultOfASubgroup(t *testing.T) {
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprint("closed: ", closed), func(t *testing.T) { testAFaultOfASubgroup(t, closed) })
	}
}

func testAFaultOfASubgroup(t *testing.T, closed bool) {
	why := errors.New("enough")
	errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		sub, err := g.NewSubgroups(ctx, 2)
		if err != nil {
			return err
		}
		begun := time.Now()
		if g.Rank() >= 2 {
			for err == nil {
				err = sumIs(sub, []int{0, 1})
				if e := wait(g.Recv(ctx, vec(1), g.Rank()-2)); e != nil {
					err = e // the default group's
				}
			}
		} else {
			if g.Rank() == 0 {
				time.AfterFunc(time.Second, func() { cancel(why) })
				err = wait(sub.Recv(ctx, vec(1), 1))
			} else {
				_, err = sumOf(sub, 1)
			}
		}
		e := must.As[*pg.EpochError](t, err)
		require.ErrorIs(t, err, work.ErrCanceled)
		require.ErrorContains(t, err, why.Error())
		require.Equal(t, []int{0}, e.Suspects)
		if closed && g.Rank() < 2 {
			require.NoError(t, sub.Close())
		}
		v := must.Get(g.Reconfigure(context.Background()))
		require.Less(t, time.Since(begun), 5*time.Second, "virtual time: nobody is waited for")
		return sumIs(g, []int{0, 1, 2, 3}[:len(v.IDs)])
	})
	require.NoError(t, errors.Join(errs...))
}

// TestASubgroupThatIsNotMade ends the default group as well: a rank that is not in the sub-group works on.
func TestASubgroupThatIsNotMade(t *testing.T) {
	why := errors.New("the user pressed a key")
	st := store.NewHash()
	defer st.Close()
	errs := make([]error, 3)
	var all, made sync.WaitGroup
	made.Add(len(errs))
	for r := range errs {
		all.Go(func() {
			errs[r] = func() (err error) {
				defer must.Catch(&err)
				g, err := pg.New(t.Context(), st, r, len(errs), pg.Options{
					Timeout: 20 * time.Second, Elastic: true, BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.WireTCP, Address: "127.0.0.1"}},
				})
				made.Done()
				made.Wait()
				must.Do(err)
				defer g.Close()
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				if r == 1 {
					cancel(why)
				}
				_, err = g.NewGroup(ctx, []int{0, 1})
				if r == 2 {
					must.Do(err)
					_, err = sumOf(g, 1)
				}
				if err == nil || !strings.Contains(err.Error(), why.Error()) || errors.Is(err, work.ErrTimeout) {
					return fmt.Errorf("%q is not named: %w", why, err)
				}
				return sumIs(g, must.Get(g.Reconfigure(t.Context(), pg.ReconfigureOptions{Min: 3})).IDs)
			}()
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
}

// TestARankThatIsLeftOut hears so from its next operation, in all of its groups, without a fault
// before.
func TestARankThatIsLeftOut(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx := context.Background()
		pair := must.Get(g.NewGroup(ctx, []int{0, 2}))
		part, err := g.Split(ctx, g.Rank()%2, 0)
		if err != nil {
			return err
		}
		if g.Rank() != 2 {
			return sumIs(g, must.Get(g.Reconfigure(ctx, pg.ReconfigureOptions{Timeout: 2 * time.Second})).IDs)
		}
		time.Sleep(5 * time.Second) // virtual: it computes
		for _, x := range []*pg.ProcessGroup{g, pair, part} {
			_, err := sumOf(x, 1)
			must.As[*pg.EpochError](t, err)
			require.ErrorContains(t, err, "the group is in epoch 1 now, without member 2: it did not come within 2s")
		}
		_, err = g.Reconfigure(ctx)
		require.ErrorIs(t, err, pg.ErrEvicted)
		for _, x := range []*pg.ProcessGroup{g, pair, part} {
			_, err := sumOf(x, 1)
			must.As[*pg.EpochError](t, err)
			require.ErrorIs(t, err, pg.ErrEvicted)
			require.ErrorContains(t, err, "member 2 was evicted from the group in epoch 1: it did not come within 2s")
		}
		require.ErrorIs(t, must.Err(g.NewGroup(ctx, []int{0, 2})), pg.ErrEvicted)
		require.ErrorIs(t, must.Err(g.Reconfigure(ctx)), pg.ErrEvicted)
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}

// TestGroupsOfNewcomers: members have split the group in the epoch before, and a newcomer has not.
func TestGroupsOfNewcomers(t *testing.T) {
	errs := faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx := context.Background()
		var wg sync.WaitGroup
		defer wg.Wait()
		groups := func(g *pg.ProcessGroup) (err error) {
			defer must.Catch(&err)
			part := must.Get(g.Split(ctx, 0, 0))
			sub := must.Get(g.NewGroup(ctx, []int{0, g.Size() - 1}))
			err = sumIs(part, []int{0, 1, 2}[:part.Size()])
			if sub.IsMember() {
				err = errors.Join(err, sumIs(sub, []int{0, 1}))
			}
			return errors.Join(err, g.Barrier(ctx))
		}
		for range 2 {
			must.Do(groups(g))
		}
		if g.Rank() == 0 {
			wg.Go(func() {
				joined, err := pg.Join(ctx, j.Store, j.Options())
				if err == nil {
					err = errors.Join(groups(joined), joined.Close())
				}
				if err != nil {
					t.Errorf("newcomer: %v", err)
				}
			})
		}
		must.Get(g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 3}))
		return groups(g)
	})
	require.NoError(t, errors.Join(errs...))
}

// TestTooFewRanks: nothing changes, and the ranks may try again.
func TestTooFewRanks(t *testing.T) {
	errs := faulty(t, 3, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 2 {
			synctest.Wait()
			j.Kill(2)
			return nil
		}
		must.Do(failed(g, 0, 2))
		_, err := g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 3, Timeout: 5 * time.Second})
		require.ErrorIs(t, err, pg.ErrTooFew)
		require.ErrorContains(t, err, `pg: Reconfigure of group "0": too few members for epoch 1: 2 of at least 3; missing: member 2: `)
		require.Equal(t, 3, g.Size())
		must.Do(failed(g, 0, 2))
		v, err := g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 2})
		if err != nil {
			return err
		}
		require.Equal(t, 2, v.Epoch)
		require.Equal(t, []int{0, 1}, v.IDs)
		_, err = g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 3, Timeout: time.Second})
		require.ErrorContains(t, err, "too few members for epoch 3: 2 of at least 3; no newcomer waits")
		return sumIs(g, v.IDs)
	})
	require.NoError(t, errors.Join(errs...))
}

// TestDeathWhileReconfiguring: a rank dies after its vote. The others go on without it.
func TestDeathWhileReconfiguring(t *testing.T) {
	errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 3 {
			synctest.Wait()
			j.Kill(3)
			return nil
		}
		must.Do(failed(g, 0, 3))
		v := must.Get(g.Reconfigure(context.Background()))
		if g.Rank() == 1 {
			j.Fabric().Kill("0@1", 1)
			return nil
		}
		must.Do(failed(g, 1, 1))
		v = must.Get(g.Reconfigure(context.Background()))
		require.Equal(t, []int{0, 2}, v.IDs)
		require.Equal(t, 1, v.Left[0].Rank)
		return sumIs(g, v.IDs)
	})
	require.NoError(t, errors.Join(errs...))
}

// TestSubgroupsEndWithTheirEpoch: they say so, and can be made again.
func TestSubgroupsEndWithTheirEpoch(t *testing.T) {
	errs := faulty(t, 4, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		ctx := context.Background()
		sub := must.Get(g.NewSubgroups(ctx, 2))
		part, err := g.Split(ctx, g.Rank()%2, 0)
		if err != nil {
			return err
		}
		_, err = part.Reconfigure(ctx)
		require.ErrorContains(t, err, "it was made from the default group: reconfigure that")
		must.Get(g.Reconfigure(ctx, pg.ReconfigureOptions{Min: g.Size()}))
		for _, old := range []*pg.ProcessGroup{sub, part} {
			_, err := sumOf(old, 1)
			e := must.As[*pg.EpochError](t, err)
			require.Zero(t, e.Epoch)
			require.ErrorContains(t, err, "it was made in epoch 0 of the default group, which is in epoch 1 now: make it again, with NewGroup or Split")
			_, err = old.Backend(tensor.CPU)
			require.ErrorAs(t, err, &e)
			require.NoError(t, old.Close())
		}
		sub = must.Get(g.NewSubgroups(ctx, 2))
		part = must.Get(g.Split(ctx, g.Rank()%2, 0))
		x, err := sumOf(sub, float32(g.Rank()))
		require.Equal(t, []float32{1, 1, 5, 5}[g.Rank()], x)
		y, err2 := sumOf(part, float32(g.Rank()))
		require.Equal(t, []float32{2, 4, 2, 4}[g.Rank()], y)
		return errors.Join(err, err2, g.Barrier(ctx))
	})
	require.NoError(t, errors.Join(errs...))
}

// TestCloseEndsReconfigure: Close does not wait for ranks that do not come.
func TestCloseEndsReconfigure(t *testing.T) {
	errs := faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		if g.Rank() == 1 {
			return nil
		}
		begun := time.Now()
		time.AfterFunc(time.Second, func() { g.Close() })
		_, err := g.Reconfigure(context.Background(), pg.ReconfigureOptions{Min: 2})
		require.ErrorIs(t, err, pg.ErrClosed)
		require.Less(t, time.Since(begun), 10*time.Second)
		require.ErrorIs(t, must.Err(g.Reconfigure(context.Background())), pg.ErrClosed)
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}

// TestJoinGivesUp with its context.
func TestJoinGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := pgtest.NewJob(1)
		defer j.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		require.ErrorIs(t, must.Err(pg.Join(ctx, j.Store, j.Options())), context.DeadlineExceeded)
		ended, end := context.WithCancelCause(context.Background())
		end(errStop)
		require.ErrorIs(t, must.Err(pg.Join(ended, j.Store, j.Options())), errStop)

		g, err := j.Join(context.Background(), 0)
		require.NoError(t, err)
		defer g.Close()
		must.Get(g.Pending(context.Background()))
		o := j.Options()
		o.Timeout = 5 * time.Second
		begin := time.Now()
		_, err = pg.Join(context.Background(), j.Store, o) // the group never calls Reconfigure
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "has not taken this process in within 5s")
		require.Equal(t, o.Timeout, time.Since(begin))

		why := errors.New("no more")
		waits, stop := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Second, func() { stop(why) })
		require.ErrorIs(t, must.Err(pg.Join(waits, j.Store, j.Options())), why)
		v := must.Get(g.Reconfigure(context.Background()))
		require.Equal(t, []int{0}, v.IDs, "one that gave up is not taken in")
	})
}

// TestFreeAfterReconfigure: memory of an old epoch can be used and freed in the next.
func TestFreeAfterReconfigure(t *testing.T) {
	st := store.NewHash()
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() {
			ctx := context.Background()
			g, err := pg.New(ctx, st, r, 2, pg.Options{Timeout: pgtest.Timeout})
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			const n = 200_000
			x, err := g.Alloc(ctx, tensor.Float32, n)
			if err == nil {
				_, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: g.Size()})
			}
			if err == nil {
				x.Fill(float64(1 + r))
				err = wait(g.AllReduce(ctx, x, pg.Sum()))
			}
			if err != nil {
				t.Error(err)
				return
			}
			if v, err := x.Float64At(n - 1); v != 3 || err != nil {
				t.Errorf("%v, %v", v, err)
			}
			if err := errors.Join(g.Free(x), g.Barrier(ctx)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestOneRankGrows: a group of one can grow and shrink.
func TestOneRankGrows(t *testing.T) {
	st, ctx := store.NewHash(), context.Background()
	g, err := pg.New(ctx, st, 0, 1, pg.Options{Timeout: pgtest.Timeout, Elastic: true})
	require.NoError(t, err)
	defer g.Close()
	joined := make(chan error)
	go func() {
		g, err := pg.Join(ctx, st, pg.Options{Timeout: pgtest.Timeout, Elastic: true})
		if err == nil {
			err = sumIs(g, []int{0, 1})
			err = errors.Join(err, g.Barrier(ctx), g.Close())
		}
		joined <- err
	}()
	v := must.Get(g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 2}))
	require.Equal(t, pg.View{Epoch: 1, IDs: []int{0, 1}, Joined: []int{1}}, v)
	require.NoError(t, sumIs(g, v.IDs))
	require.NoError(t, g.Barrier(ctx))
	require.NoError(t, <-joined)
	begun := time.Now()
	v = must.Get(g.Reconfigure(ctx))
	require.Equal(t, []int{0}, v.IDs, "the other one has closed its group")
	require.Less(t, time.Since(begun), 20*time.Second, "and is not waited for")
	require.EqualValues(t, 7, must.Get(sumOf(g, 7)))
}

// TestForeignAnnouncement: what no rank writes is an error of Join.
func TestForeignAnnouncement(t *testing.T) {
	for _, text := range []string{"", "nonsense", `{"size":0}`, `{"size":2,"run":"../x"}`} {
		st := store.NewHash()
		require.NoError(t, st.Set(context.Background(), "c10d-go/elastic/0", []byte(text)))
		require.ErrorContains(t, must.Err(pg.Join(context.Background(), st)), "c10d-go/elastic/0")
	}
}
