package meet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen; only a failing test waits for it.
const patience = 20 * time.Second

// outcome is what a rank's call came to.
type outcome struct {
	Run
	err error
}

// start calls a rank.
func start(ctx context.Context, cfg Config) <-chan outcome {
	over := make(chan outcome, 1)
	go func() {
		run, err := New(cfg).Meet(ctx)
		over <- outcome{run, err}
	}()
	return over
}

// meet calls all ranks of a world and returns what each came to.
func meet(t *testing.T, st store.Store, size int) []outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var calls []<-chan outcome
	for r := range size {
		calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: size}))
	}
	var all []outcome
	for _, c := range calls {
		all = append(all, <-c)
	}
	return all
}

// here waits until a rank has written its record.
func here(t *testing.T, st store.Store, rank int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, st.Wait(ctx, "c10d-go/meet/-/0/"+rankKey(rank)))
}

func TestRunsOneAfterTheOther(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ids := make(map[string]bool)
	var all []outcome
	for range 10 {
		all = meet(t, st, 4)
		for r, o := range all {
			require.NoError(t, o.err, "rank %d", r)
			require.Equal(t, all[0].Run, o.Run)
		}
		ids[all[0].ID] = true
	}
	require.Len(t, ids, 10)
	keys := must.Get(st.ListKeys(t.Context()))
	require.LessOrEqual(t, len(keys), 4+2+4*10, "a rank's number, the last turn and rank 0; Run.Keys: %v", keys)
	for _, key := range all[0].Keys {
		require.True(t, must.Get(st.Delete(t.Context(), key)) || strings.HasSuffix(key, "/log"), key)
	}
}

// TestAfterACrash: records of processes that are gone harm nobody.
func TestAfterACrash(t *testing.T) {
	for name, crashed := range map[string][]int{
		"rank 0 came alone": {0}, "rank 1 came alone": {1}, "all but one came": {0, 1, 2}, "all but rank 0 came": {1, 2, 3},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			// To the others a rank whose store fails looks like one that has crashed.
			dead, crash := context.WithCancel(t.Context())
			var calls []<-chan outcome
			for _, r := range crashed {
				calls = append(calls, start(dead, Config{Store: mortal{st, dead}, Name: "0", Rank: r, Size: 4}))
				here(t, st, r)
			}
			crash()
			for _, c := range calls {
				require.Error(t, (<-c).err)
			}
			for r, o := range meet(t, st, 4) {
				require.NoError(t, o.err, "rank %d", r)
			}
		})
	}
}

// mortal is a store that nothing can be done with once life ends.
type mortal struct {
	store.Store
	life context.Context
}

func (m mortal) Set(ctx context.Context, key string, value []byte) error {
	if m.life.Err() != nil {
		return m.life.Err()
	}
	return m.Store.Set(ctx, key, value)
}

func (m mortal) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	if m.life.Err() != nil {
		return nil, m.life.Err()
	}
	return m.Store.CompareSet(ctx, key, expected, desired)
}

// TestStartedTwice: every process that is there is told. The second process of a rank comes last, because the two
// leave as soon as they know of each other.
func TestStartedTwice(t *testing.T) {
	for name, ranks := range map[string][]int{
		"rank 1, rank 2 missing": {0, 1, 1}, "rank 0": {0, 1, 0}, "rank 0, before others": {0, 0}, "rank 1, rank 0 missing": {1, 1}, "rank 1, rank 2 there, rank 0 missing": {2, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var calls []<-chan outcome
			for _, r := range ranks {
				calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3}))
				here(t, st, r)
			}
			for i, c := range calls {
				o := <-c
				require.ErrorIs(t, o.err, ErrTwice, "process %d", i)
				require.Regexp(t, `rank [01] was started twice: pid \d+ on host .+ and pid \d+ on host `, o.err.Error())
				e := must.As[*Error](t, o.err)
				require.False(t, e.Timeout())
			}
		})
	}
}

// TestWorldsDiffer: every process that is there is told, also a rank that rank 0's world has not.
func TestWorldsDiffer(t *testing.T) {
	for _, zero := range []int{2, 3} {
		t.Run(fmt.Sprint("rank 0 has a world of ", zero), func(t *testing.T) {
			other := 5 - zero
			two := max(zero, other) // the world of rank 2
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			// Only processes that are there hear of the error.
			var calls []<-chan outcome
			first, last := Config{Rank: 1, Size: other}, Config{Rank: 0, Size: zero}
			if zero > other {
				first, last = last, first
			}
			for _, c := range []Config{first, {Rank: 2, Size: two}, last} {
				c.Store, c.Name = st, "0"
				calls = append(calls, start(ctx, c))
				if c.Rank == 2 || len(calls) == 1 {
					here(t, st, c.Rank)
				}
			}
			for i, c := range calls {
				o := <-c
				require.ErrorIs(t, o.err, ErrDiffer, "call %d", i)
				require.Regexp(t, fmt.Sprintf(`rank [12] \(pid \d+ on host .+\) was started with a world of %d ranks, rank 0 \(pid \d+ on host .+\) with one of %d`, other, zero), o.err.Error())
			}
		})
	}
}

// TestTwoRunsAtOnce: two runs that nothing tells apart are never mixed up: a run
// that comes about has each rank once.
func TestTwoRunsAtOnce(t *testing.T) {
	const size = 3
	for range 20 {
		synctest.Test(t, func(t *testing.T) { twoRunsAtOnce(t, size) })
	}
}

func twoRunsAtOnce(t *testing.T, size int) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // a run whose rank 0 was told to end misses it
	defer cancel()
	var mu sync.Mutex
	runs := make(map[string]map[int]int)
	var all sync.WaitGroup
	for i := range 2 * size {
		all.Go(func() {
			run, err := New(Config{Store: st, Name: "0", Rank: i % size, Size: size}).Meet(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				if !errors.Is(err, ErrTwice) && !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				return
			}
			if runs[run.ID] == nil {
				runs[run.ID] = make(map[int]int)
			}
			if runs[run.ID][i%size]++; runs[run.ID][i%size] > 1 {
				t.Errorf("rank %d is in run %s twice", i%size, run.ID)
			}
		})
	}
	all.Wait()
}

// TestJobsAtOnce: jobs with names share a store.
func TestJobsAtOnce(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	calls := make(map[string][]<-chan outcome)
	for r := range 2 {
		for _, job := range []string{"A", "B", ""} {
			calls[job] = append(calls[job], start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 2, Job: job}))
		}
	}
	ids := make(map[string]bool)
	for job, ranks := range calls {
		zero, one := <-ranks[0], <-ranks[1]
		require.NoError(t, errors.Join(zero.err, one.err), job)
		require.Equal(t, zero.Run, one.Run)
		ids[zero.ID] = true
	}
	require.Len(t, ids, 3)
}

func TestMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		zero := start(ctx, Config{Store: st, Name: "0", Rank: 0, Size: 4})
		three := start(t.Context(), Config{Store: st, Name: "0", Rank: 3, Size: 4}) // learns from rank 0
		var e *Error
		for _, c := range []<-chan outcome{three, zero} {
			err := (<-c).err
			require.ErrorAs(t, err, &e)
			require.Equal(t, []int{1, 2}, e.Missing)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, ErrDiffer)
			require.True(t, e.Timeout())
			require.ErrorContains(t, err, "rank 1 has not called Init within")
			if c == three {
				require.Equal(t, 1, must.As[*Fault](t, err).Rank)
			}
		}
		require.Equal(t, context.DeadlineExceeded, e.Err)
		// Without a rank 0 nobody can tell more.
		ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		other := store.Prefix("other", st)
		require.NoError(t, other.Set(ctx, lastKey, encode(record{Nonce: "x", Job: "B", PID: 7, Host: "h"})))
		_, err := New(Config{Store: other, Name: "0", Rank: 2, Size: 3, Job: "A"}).Meet(ctx)
		require.ErrorContains(t, err, "rank 0 has not called Init")
		require.ErrorContains(t, err, `the last rank 0 in this store, pid 7 on host h, is of job "B"; this rank is of job "A"`)
		require.Equal(t, []int{0, 1}, must.As[*Error](t, err).Missing)

		// A run of two ranks has begun without rank 2 of three.
		third := store.Prefix("third", st)
		for _, o := range meet(t, third, 2) {
			require.NoError(t, o.err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err = New(Config{Store: third, Name: "0", Rank: 2, Size: 3}).Meet(ctx)
		require.Regexp(t, `the last rank 0 in this store, pid \d+ on host .+, was started with a world of 2 ranks; this rank with one of 3`, err.Error())
	})
}

func TestCancelled(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithCancel(t.Context())
	one := start(t.Context(), Config{Store: st, Name: "0", Rank: 1, Size: 3})
	zero := start(ctx, Config{Store: st, Name: "0", Rank: 0, Size: 3})
	here(t, st, 0)
	here(t, st, 1)
	cancel()
	require.ErrorIs(t, (<-zero).err, context.Canceled)
	err := (<-one).err
	require.ErrorContains(t, err, "rank 0 (pid ")
	require.ErrorContains(t, err, "gave up")
}

// cancelling cancels a context when a key is set.
type cancelling struct {
	store.Store
	key    string
	cancel context.CancelFunc
}

func (c cancelling) Set(ctx context.Context, key string, value []byte) error {
	if key == c.key {
		c.cancel()
		return ctx.Err()
	}
	return c.Store.Set(ctx, key, value)
}

// TestCancelledEarly: rank 0 tells the others even if it is cancelled while it shows itself.
func TestCancelledEarly(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithCancel(t.Context())
	one := start(t.Context(), Config{Store: st, Name: "0", Rank: 1, Size: 3})
	here(t, st, 1)
	zero := start(ctx, Config{Store: cancelling{st, lastKey, cancel}, Name: "0", Rank: 0, Size: 3})
	require.ErrorIs(t, (<-zero).err, context.Canceled)
	require.ErrorContains(t, (<-one).err, "gave up")
}

// TestAbsentRankComesFirst: after a run that failed, the rank that was not there begins the next one.
func TestAbsentRankComesFirst(t *testing.T) {
	for name, came := range map[string][]int{"rank 2": {0, 1, 1}, "rank 0": {2, 1, 1}} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var failed []<-chan outcome
			for _, r := range came {
				failed = append(failed, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3}))
				here(t, st, r)
			}
			for _, c := range failed {
				require.ErrorIs(t, (<-c).err, ErrTwice, name)
			}
			absent := 2 - came[0]
			next := []<-chan outcome{start(ctx, Config{Store: st, Name: "0", Rank: absent, Size: 3})}
			synctest.Wait() // it looks at what is there
			for r := range 3 {
				if r != absent {
					next = append(next, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3}))
				}
			}
			for _, c := range next {
				require.NoError(t, (<-c).err, name)
			}
		})
	}
}

// TestLateRankSaysWhy: a rank that comes when all others have failed waits for the next run, and says at its timeout why
// there was none.
func TestLateRankSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		var failed []<-chan outcome
		for _, r := range []int{0, 1, 1} {
			failed = append(failed, start(t.Context(), Config{Store: st, Name: "0", Rank: r, Size: 3}))
			here(t, st, r)
		}
		for _, c := range failed {
			require.ErrorIs(t, (<-c).err, ErrTwice)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := (<-start(ctx, Config{Store: st, Name: "0", Rank: 2, Size: 3})).err
		require.ErrorContains(t, err, "the last meeting in this store failed: rank 1 was started twice")
		require.NotErrorIs(t, err, ErrTwice)
	})
}

// foreign are the keys of two generations, whose stores are views of st.
func foreign(st store.Store) []Foreign {
	var all []Foreign
	for _, name := range []string{"v2", "v1"} {
		all = append(all, Foreign{named{st, name}, func(r int) []string { return []string{fmt.Sprint(name, "/", r)} }})
	}
	return all
}

type named struct {
	store.Store
	name string
}

// TestForeign: whichever rank is foreign, whenever it comes, the others learn its
// generation, once rank 0 of theirs has shown itself like it.
func TestForeign(t *testing.T) {
	const size = 3
	for _, name := range []string{"v1", "v2"} {
		for stranger := range size {
			for _, late := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/rank %d/late %v", name, stranger, late), func(t *testing.T) {
					st := store.NewHash()
					defer st.Close()
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					show := func(r int) {
						require.NoError(t, st.Set(ctx, fmt.Sprint(name, "/", r), nil))
					}
					if !late {
						show(stranger)
					}
					calls := make([]<-chan outcome, size)
					for r := range size {
						if r != stranger {
							calls[r] = start(ctx, Config{Store: st, Name: "0", Rank: r, Size: size, Foreign: foreign(st)})
							here(t, st, r)
						}
					}
					if late {
						show(stranger)
					}
					for r, c := range calls {
						if r != stranger {
							o := <-c
							require.NoError(t, o.err)
							require.Equal(t, Run{Store: named{st, name}}, o.Run)
							if r == 0 {
								show(0)
							}
						}
					}
				})
			}
		}
	}
}

func TestStaleForeignKeys(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	for r := range 2 {
		require.NoError(t, st.Set(t.Context(), fmt.Sprint("v2/", r), nil))
	}
	for r := range 2 {
		_, err := New(Config{Store: st, Name: "0", Rank: r, Size: 2, Foreign: foreign(st)}).Meet(t.Context())
		require.ErrorIs(t, err, ErrStale)
		require.ErrorContains(t, err, fmt.Sprintf(`keys of an earlier run are in the store: rank %d has an address there already, at "v2/%[1]d": use another prefix or a new store`, r))
	}
	require.NotContains(t, must.Get(st.ListKeys(t.Context())), "c10d-go/meet/-/0/"+endKey(0), "the ranks were in no turn")
}

// TestGarbage: ranks pass over values that are no records.
func TestGarbage(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	corner := store.Prefix("c10d-go/meet/-/0", st)
	for i, text := range []string{"{", "null", "7", `{"zero":{"nonce":""}}`, `{"nonce":7}`, `{"nonce":"n","rank":"1"}`} {
		turn := 3*i + 1 // rank 0 comes in the next one, and its run meets in the one after
		require.NoError(t, corner.MultiSet(t.Context(),
			[]string{endKey(turn), entryKey(turn+2, 1), processKey(1, i+2)}, [][]byte{[]byte(text), []byte(text), []byte(text)}))
		must.Get(corner.Add(t.Context(), countKey(turn+2), 1))
		for r, o := range meet(t, st, 2) {
			require.NoError(t, o.err, "rank %d", r)
		}
	}
}

// willing is a store that only notes wills.
type willing struct {
	store.Store
	mu    *sync.Mutex
	wills map[string]bool
}

func newWilling() willing {
	return willing{store.NewHash(), new(sync.Mutex), make(map[string]bool)}
}

func (w willing) SetWill(_ context.Context, key string, _, _ []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wills[key] = true
	return nil
}

func (w willing) DropWill(ctx context.Context, key string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.wills, key)
	return ctx.Err()
}

// TestARankThatGivesUpLeavesNoWill: its connection to the store may end during the next run, whose
// ranks would take it for one of theirs.
func TestARankThatGivesUpLeavesNoWill(t *testing.T) {
	for r := range 2 {
		st := newWilling()
		ctx, cancel := context.WithCancel(t.Context())
		call := start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3, Notices: func(string) store.Store { return store.Prefix("notice", st) }})
		here(t, st, r)
		cancel()
		require.ErrorIs(t, (<-call).err, context.Canceled)
		require.Empty(t, st.wills)
	}
}

// TestForeignLeavesNoWill: rank 0 ends its call when it finds a foreign rank, and withdraws its will.
func TestForeignLeavesNoWill(t *testing.T) {
	st := newWilling()
	require.NoError(t, st.Set(t.Context(), "v2/1", nil))
	c := New(Config{Store: st, Name: "0", Rank: 0, Size: 2, Foreign: foreign(st)})
	require.Equal(t, Run{Store: named{st, "v2"}}, must.Get(c.Meet(t.Context())))
	require.Empty(t, st.wills)
}

// TestEndedRank: the launcher knows that a rank's process has ended. All others name it, whenever they come.
func TestEndedRank(t *testing.T) {
	for _, ended := range []int{0, 2} {
		t.Run(fmt.Sprint("rank ", ended), func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			known := make(chan struct{})
			says := func(ctx context.Context) (int, string, error) {
				select {
				case <-known:
				case <-ctx.Done():
				}
				return ended, "rank x ended with code 0", ctx.Err()
			}
			var calls []<-chan outcome
			for _, r := range []int{0, 1, 2, 3} {
				if r == ended {
					continue
				}
				if r == 3 { // comes later
					close(known)
					for _, c := range calls {
						requireEnded(t, (<-c).err, ended)
					}
					calls = nil
				}
				calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 4, Ended: says}))
				here(t, st, r)
			}
			requireEnded(t, (<-calls[0]).err, ended)
		})
	}
}

func requireEnded(t *testing.T, err error, rank int) {
	t.Helper()
	require.ErrorContains(t, err, "rank x ended with code 0 before all ranks had called Init")
	var of interface{ Culprit() int }
	require.ErrorAs(t, err, &of)
	require.Equal(t, rank, of.Culprit())
}

// TestEndedAfterAll: a rank that ends once all have come is not missed by one that has not read so.
func TestEndedAfterAll(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	place := store.Prefix("c10d-go/meet/-/0", st)
	says := func(ctx context.Context) (int, string, error) {
		return 2, "rank 2 ended", place.Wait(ctx, endKey(2)) // all have come
	}
	var calls []<-chan outcome
	for r := range 3 {
		calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3, Ended: says}))
	}
	for _, c := range calls {
		require.NoError(t, (<-c).err)
	}
}

// zeroCame writes that a rank 0 has come, which does nothing more.
func zeroCame(t *testing.T, st store.Store, size int) {
	t.Helper()
	zero := record{Nonce: "n", Size: size}
	require.NoError(t, st.Set(t.Context(), "c10d-go/meet/-/0/"+endKey(1), encode(end{Zero: &zero})))
}

// TestZeroDoesNotAnswer: rank 0 has come and does not answer, and rank 1 is away. Rank 2 says both.
func TestZeroDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		zeroCame(t, st, 3)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := (<-start(ctx, Config{Store: st, Name: "0", Rank: 2, Size: 3})).err
		e := must.As[*Error](t, err)
		require.Equal(t, []int{1}, e.Missing)
		require.Equal(t, []int{0}, e.Stopped)
		require.ErrorContains(t, err, "rank 1 has not called Init within 1s")
		require.ErrorContains(t, err, "rank 0 has called Init and does not answer")
		require.NotContains(t, err.Error(), "rank 0 has not called Init")
	})
}

// TestZeroIsStartedAgain: rank 0 dies without a word, and its next process meets the ranks that wait.
func TestZeroIsStartedAgain(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	zeroCame(t, st, 3)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var calls []<-chan outcome
	for _, r := range []int{1, 2, 0} {
		calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3}))
		here(t, st, r)
	}
	for _, c := range calls {
		o := <-c
		require.NoError(t, o.err)
		require.NotEqual(t, "n", o.ID)
	}
}

// TestHole: a process dies after it has taken a place in the log. The others meet without its entry.
func TestHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		zero := start(t.Context(), Config{Store: st, Name: "0", Rank: 0, Size: 3})
		here(t, st, 0)
		place := store.Prefix("c10d-go/meet/-/0", st)
		one := start(t.Context(), Config{Store: st, Name: "0", Rank: 1, Size: 3})
		synctest.Wait()
		require.Equal(t, int64(2), must.Get(place.Add(t.Context(), countKey(2), 1)))
		two := start(t.Context(), Config{Store: st, Name: "0", Rank: 2, Size: 3})
		for _, c := range []<-chan outcome{zero, one, two} {
			require.NoError(t, (<-c).err)
		}
	})
}

// TestSecondProcessIsNotInTheRun: it comes when all ranks are there already, or its entry does.
func TestSecondProcessIsNotInTheRun(t *testing.T) {
	for _, run := range []begun{{Read: 1}, {Read: 2, Late: []int{2}}} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			zeroCame(t, st, 2)
			place := store.Prefix("c10d-go/meet/-/0", st)
			require.NoError(t, place.Set(t.Context(), entryKey(2, 1), encode(record{Nonce: "first", Rank: 1, Size: 2})))
			must.Get(place.Add(t.Context(), countKey(2), 1))
			one := start(t.Context(), Config{Store: st, Name: "0", Rank: 1, Size: 2})
			synctest.Wait()
			require.NoError(t, place.Set(t.Context(), endKey(2), encode(end{Begun: &run})))
			err := (<-one).err
			require.ErrorIs(t, err, ErrTwice)
			require.ErrorContains(t, err, "and another one has met the others")
		})
	}
}

// far is a store at the end of a network: each request takes a millisecond. It counts them.
type far struct {
	store.Store
	calls *atomic.Int64
}

func (f far) trip() {
	f.calls.Add(1)
	time.Sleep(time.Millisecond)
}

func (f far) Set(ctx context.Context, key string, value []byte) error {
	f.trip()
	return f.Store.Set(ctx, key, value)
}

func (f far) Get(ctx context.Context, key string) ([]byte, error) {
	f.trip()
	return f.Store.Get(ctx, key)
}

func (f far) Add(ctx context.Context, key string, delta int64) (int64, error) {
	f.trip()
	return f.Store.Add(ctx, key, delta)
}

func (f far) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	f.trip()
	return f.Store.CompareSet(ctx, key, expected, desired)
}

func (f far) Wait(ctx context.Context, keys ...string) error {
	f.trip()
	return f.Store.Wait(ctx, keys...)
}

func (f far) Check(ctx context.Context, keys ...string) (bool, error) {
	f.trip()
	return f.Store.Check(ctx, keys...)
}

func (f far) Delete(ctx context.Context, key string) (bool, error) {
	f.trip()
	return f.Store.Delete(ctx, key)
}

func (f far) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	f.trip()
	return f.Store.MultiGet(ctx, keys)
}

func (f far) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	f.trip()
	return f.Store.MultiSet(ctx, keys, values)
}

// TestThousandRanks: one rank of 1000 is away for 12 s. Each of the others names it and no other, after 10 s and at the
// end. All of them make at most 30 requests for each rank. When the last rank comes in time, all have met within 12 round
// trips.
func TestThousandRanks(t *testing.T) {
	const size = 1000
	for _, away := range []int{0, 999} {
		for _, late := range []bool{true, false} {
			t.Run(fmt.Sprintf("rank %d/comes %v", away, !late), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var calls atomic.Int64
					st := far{store.NewHash(), &calls}
					defer st.Close()
					ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second)
					defer cancel()
					var wg sync.WaitGroup
					var wrong atomic.Pointer[string]
					fault := func(format string, args ...any) {
						text := fmt.Sprintf(format, args...)
						wrong.Store(&text)
					}
					begin := func(r int) {
						c := New(Config{Store: st, Name: "0", Rank: r, Size: size, Foreign: foreign(st)})
						wg.Go(func() {
							_, err := c.Meet(ctx)
							var e *Error
							if late && (!errors.As(err, &e) || fmt.Sprint(e.Missing) != fmt.Sprintf("[%d]", away) || len(e.Stopped) > 0) || !late && err != nil {
								fault("rank %d: %v", r, err)
							}
						})
						if late {
							wg.Go(func() {
								time.Sleep(10 * time.Second)
								missing, answered, err := c.Missing(ctx)
								if err != nil || !answered || fmt.Sprint(missing) != fmt.Sprintf("[%d]", away) {
									fault("line of rank %d: %v, %v, %v", r, missing, answered, err)
								}
							})
						}
					}
					for r := range size {
						if r != away {
							begin(r)
						}
					}
					if !late {
						time.Sleep(5 * time.Second)
						came := time.Now()
						begin(away)
						wg.Wait()
						require.LessOrEqual(t, time.Since(came), 12*time.Millisecond)
					}
					wg.Wait()
					if text := wrong.Load(); text != nil {
						require.Fail(t, *text)
					}
					t.Logf("%.1f requests a rank", float64(calls.Load())/size)
					require.LessOrEqual(t, calls.Load(), int64(30*size))
				})
			})
		}
	}
}
