package rollcall

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

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
	require.NoError(t, st.Wait(ctx, "c10d-go/rollcall/-/0/"+rankKey(rank)))
}

func TestRunsOneAfterTheOther(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	ids := make(map[string]bool)
	for range 10 {
		all := meet(t, st, 4)
		for r, o := range all {
			require.NoError(t, o.err, "rank %d", r)
			require.Equal(t, all[0].Run, o.Run)
		}
		ids[all[0].ID] = true
	}
	require.Len(t, ids, 10)
	keys, err := st.ListKeys(t.Context())
	require.NoError(t, err)
	require.Less(t, len(keys), 4+1+10+1, "%v", keys)
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

// TestStartedTwice: every process that is there is told.
func TestStartedTwice(t *testing.T) {
	for name, ranks := range map[string][]int{
		"rank 1, rank 2 missing": {0, 1, 1}, "rank 0": {0, 0, 1}, "rank 0, before others": {0, 0}, "rank 1, rank 0 missing": {1, 1}, "rank 1, rank 2 there, rank 0 missing": {2, 1, 1},
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
				var e *Error
				require.ErrorAs(t, o.err, &e)
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
			// Only processes that are there hear of the error: rank 1, which differs, comes last.
			var calls []<-chan outcome
			for _, c := range []Config{{Rank: 0, Size: zero}, {Rank: 2, Size: two}, {Rank: 1, Size: other}} {
				c.Store, c.Name = st, "0"
				calls = append(calls, start(ctx, c))
				here(t, st, c.Rank)
			}
			for i, c := range calls {
				o := <-c
				require.ErrorIs(t, o.err, ErrDiffer, "call %d", i)
				require.Regexp(t, fmt.Sprintf(`rank 1 \(pid \d+ on host .+\) was started with a world of %d ranks, rank 0 \(pid \d+ on host .+\) with one of %d`, other, zero), o.err.Error())
			}
		})
	}
}

// TestTwoRunsAtOnce: two runs that nothing tells apart are never mixed up: a run
// that comes about has each rank once.
func TestTwoRunsAtOnce(t *testing.T) {
	const size = 3
	for range 20 {
		st := store.NewHash()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		var mu sync.Mutex
		runs := make(map[string]map[int]int)
		var all sync.WaitGroup
		for i := range 2 * size {
			all.Go(func() {
				run, err := New(Config{Store: st, Name: "0", Rank: i % size, Size: size}).Meet(ctx)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					if !errors.Is(err, ErrTwice) && !errors.Is(err, context.Canceled) {
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
		settled := make(chan struct{})
		go func() { all.Wait(); close(settled) }()
		select {
		case <-settled:
		case <-time.After(2 * time.Second): // a run whose rank 0 was told to end misses it
		}
		cancel()
		<-settled
		st.Close()
	}
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
	st := store.NewHash()
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	zero := start(ctx, Config{Store: st, Name: "0", Rank: 0, Size: 4})
	three := start(t.Context(), Config{Store: st, Name: "0", Rank: 3, Size: 4}) // learns from rank 0
	for _, c := range []<-chan outcome{zero, three} {
		var e *Error
		err := (<-c).err
		require.ErrorAs(t, err, &e)
		require.Equal(t, []int{1, 2}, e.Missing)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.True(t, e.Timeout())
		require.ErrorContains(t, err, "rank 1 has not called Init within")
	}
	// Without a rank 0 nobody can tell more.
	ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	other := store.Prefix("other", st)
	require.NoError(t, other.Set(ctx, lastKey, encode(record{Nonce: "x", Job: "B", PID: 7, Host: "h"})))
	c := New(Config{Store: other, Name: "0", Rank: 2, Size: 3, Job: "A"})
	_, err := c.Meet(ctx)
	require.ErrorContains(t, err, "rank 0 has not called Init")
	require.ErrorContains(t, err, `the last rank 0 in this store, pid 7 on host h, is of job "B"; this rank is of job "A"`)
	require.Equal(t, []int{0, 1}, c.Missing(t.Context()))

	// A run of two ranks has begun without rank 2 of three.
	third := store.Prefix("third", st)
	for _, o := range meet(t, third, 2) {
		require.NoError(t, o.err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = New(Config{Store: third, Name: "0", Rank: 2, Size: 3}).Meet(ctx)
	require.Regexp(t, `the last rank 0 in this store, pid \d+ on host .+, was started with a world of 2 ranks; this rank with one of 3`, err.Error())
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
		t.Run(name, func(t *testing.T) {
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
				require.ErrorIs(t, (<-c).err, ErrTwice)
			}
			absent := 2 - came[0]
			next := []<-chan outcome{start(ctx, Config{Store: st, Name: "0", Rank: absent, Size: 3})}
			time.Sleep(300 * time.Millisecond) // it looks at what is there
			for r := range 3 {
				if r != absent {
					next = append(next, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3}))
				}
			}
			for _, c := range next {
				require.NoError(t, (<-c).err)
			}
		})
	}
}

// TestLateRankSaysWhy: a rank that comes when all others have failed waits for the next run, and says at its timeout why
// there was none.
func TestLateRankSaysWhy(t *testing.T) {
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
	require.ErrorContains(t, err, "the last roll call in this store failed: rank 1 was started twice")
	require.NotErrorIs(t, err, ErrTwice)
}

// foreign are the keys of two generations.
func foreign(st store.Store) []Foreign {
	return []Foreign{
		{store.DialectV2, st, func(r int) []string { return []string{fmt.Sprint("v2/", r)} }},
		{store.DialectV1, st, func(r int) []string { return []string{fmt.Sprint("v1/", r)} }},
	}
}

// TestForeign: whichever rank is foreign, whenever it comes, the others learn its
// generation, once rank 0 of theirs has shown itself like it.
func TestForeign(t *testing.T) {
	const size = 3
	for _, dialect := range []store.Dialect{store.DialectV1, store.DialectV2} {
		for stranger := range size {
			for _, late := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/rank %d/late %v", dialect, stranger, late), func(t *testing.T) {
					st := store.NewHash()
					defer st.Close()
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					show := func(r int) {
						require.NoError(t, st.Set(ctx, fmt.Sprintf("v%d/%d", int(dialect), r), nil))
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
							require.Equal(t, Run{Dialect: dialect}, o.Run)
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
}

// TestGarbage: ranks overwrite values that are no records, or pass over them.
func TestGarbage(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	corner := store.Prefix("c10d-go/rollcall/-/0", st)
	for _, text := range []string{"{", "null", "7", `{"nonce":7}`} {
		require.NoError(t, corner.Set(t.Context(), rankKey(1), []byte(text)))
		require.NoError(t, corner.Set(t.Context(), rankKey(0), []byte(text)))
		for r, o := range meet(t, st, 2) {
			require.NoError(t, o.err, "rank %d", r)
		}
	}
}

// willing is a store that only notes wills.
type willing struct {
	store.Store
	wills map[string]bool
}

func (w willing) SetWill(_ context.Context, key string, _, _ []byte) error {
	w.wills[key] = true
	return nil
}

func (w willing) DropWill(ctx context.Context, key string) error {
	delete(w.wills, key)
	return ctx.Err()
}

// TestARankThatGivesUpLeavesNoWill: its connection to the store may end during the next run, whose
// ranks would take it for one of theirs.
func TestARankThatGivesUpLeavesNoWill(t *testing.T) {
	for r := range 2 {
		st := willing{store.NewHash(), make(map[string]bool)}
		ctx, cancel := context.WithCancel(t.Context())
		call := start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 3})
		here(t, st, r)
		cancel()
		require.ErrorIs(t, (<-call).err, context.Canceled)
		require.Empty(t, st.wills)
	}
}

// TestForeignLeavesNoWill: rank 0 ends its call when it finds a foreign rank, and withdraws its will.
func TestForeignLeavesNoWill(t *testing.T) {
	st := willing{store.NewHash(), make(map[string]bool)}
	require.NoError(t, st.Set(t.Context(), "v2/1", nil))
	c := New(Config{Store: st, Name: "0", Rank: 0, Size: 2, Foreign: foreign(st)})
	run, err := c.Meet(t.Context())
	require.NoError(t, err)
	require.Equal(t, Run{Dialect: store.DialectV2}, run)
	require.Empty(t, st.wills)
	record, err := c.peek(t.Context(), rankKey(0))
	require.NoError(t, err)
	require.Empty(t, record)
}

// TestEndedRank: the launcher knows that a rank's process has ended. All others name it, whenever they come.
func TestEndedRank(t *testing.T) {
	for _, ended := range []int{0, 2} {
		t.Run(fmt.Sprint("rank ", ended), func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			var known atomic.Bool
			says := func(context.Context) (int, string, bool, error) {
				return ended, "rank x ended with code 0", known.Load(), nil
			}
			var calls []<-chan outcome
			for _, r := range []int{0, 1, 2, 3} {
				if r == ended {
					continue
				}
				if r == 3 { // comes later
					known.Store(true)
				}
				calls = append(calls, start(ctx, Config{Store: st, Name: "0", Rank: r, Size: 4, Ended: says}))
				here(t, st, r)
			}
			for _, c := range calls {
				err := (<-c).err
				require.ErrorContains(t, err, "rank x ended with code 0 before all ranks had called Init")
				var of interface{ Culprit() int }
				require.ErrorAs(t, err, &of)
				require.Equal(t, ended, of.Culprit())
			}
		})
	}
}

// TestEndedAfterAll: a rank that ends once all have joined is not missed by one that has not read so.
func TestEndedAfterAll(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	c := New(Config{Store: st, Name: "0", Rank: 1, Size: 3, Ended: func(context.Context) (int, string, bool, error) { return 2, "rank 2 ended", true, nil }})
	c.run = "n"
	require.ErrorContains(t, c.someGone(t.Context()), "rank 2 ended")
	require.NoError(t, c.corner.Set(t.Context(), begunKey("n"), encode(fault{})))
	require.NoError(t, c.someGone(t.Context()))
}

// TestUnanswered: rank 0 has come and has not answered, and rank 1 is away. Rank 2 says both.
func TestUnanswered(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	require.NoError(t, st.Set(t.Context(), "c10d-go/rollcall/-/0/"+rankKey(0), []byte(`{"nonce":"n"}`)))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := (<-start(ctx, Config{Store: st, Name: "0", Rank: 2, Size: 3})).err
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []int{1}, e.Missing)
	require.ErrorContains(t, err, "rank 1 has not called Init")
	require.ErrorContains(t, err, "rank 0 has called Init, but this rank has no answer of it")
	require.NotContains(t, err.Error(), "rank 0 has not called Init")
}

// counting counts a store's calls.
type counting struct {
	store.Store
	calls *atomic.Int64
}

func (c counting) Set(ctx context.Context, key string, value []byte) error {
	c.calls.Add(1)
	return c.Store.Set(ctx, key, value)
}

func (c counting) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	c.calls.Add(1)
	return c.Store.CompareSet(ctx, key, expected, desired)
}

func (c counting) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	c.calls.Add(1)
	return c.Store.MultiGet(ctx, keys)
}

func (c counting) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	c.calls.Add(1)
	return c.Store.MultiSet(ctx, keys, values)
}

// TestDismissTellsAllAtOnce: rank 0 fails while a thousand ranks have come and have not joined. It does not tell one
// after the other, which takes longer than the time for its last words.
func TestDismissTellsAllAtOnce(t *testing.T) {
	const size = 1000
	var calls atomic.Int64
	st := counting{store.NewHash(), &calls}
	defer st.Close()
	c := New(Config{Store: st, Name: "0", Rank: 0, Size: size})
	c.run = c.self.Nonce
	answered := make([]string, size)
	for r := 1; r < size; r++ {
		answered[r] = fmt.Sprint("nonce", r)
		text := encode(record{Nonce: answered[r], Rank: r, Size: size})
		require.NoError(t, c.corner.Set(t.Context(), rankKey(r), text))
		c.seen[r] = sight{text: string(text)}
	}
	calls.Store(0)
	c.dismiss(t.Context(), answered, errors.New("an error of rank 0"))
	require.Less(t, calls.Load(), int64(10))
	for r := 1; r < size; r++ {
		text, err := c.corner.Get(t.Context(), faultKey(answered[r]))
		require.NoError(t, err)
		require.Contains(t, string(text), "an error of rank 0")
	}
}
