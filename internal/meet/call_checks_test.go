package meet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// errBroken is the error of a store that fails.
var errBroken = errors.New("broken")

// fails fails each call with this text.
func fails(call string) func(string) error {
	return func(text string) error {
		if text == call {
			return errBroken
		}
		return nil
	}
}

// corner has the keys of a call.
const corner = "c10d-go/meet/-/0/"

// at returns the corner of a store.
func at(st store.Store) store.Store { return store.Prefix(strings.TrimSuffix(corner, "/"), st) }

// probe is the store of one rank. It notes the rank's calls, and its wills, which it does not carry out.
type probe struct {
	store.Store
	before func(call string) error // fails a call
	after  func(call string) error // gives an error to a call that has been done; its value is returned, too

	mu    sync.Mutex
	calls []string // as in "set turn/1/end"
	wills []string // keys
}

func probed[T any](p *probe, op string, keys []string, call func() (T, error)) (v T, err error) {
	text := strings.ReplaceAll(op+" "+strings.Join(keys, " "), corner, "")
	p.mu.Lock()
	p.calls = append(p.calls, text)
	n := len(p.calls)
	p.mu.Unlock()
	if n > 1000 {
		panic("a rank calls the store for ever")
	}
	if p.before != nil {
		if err := p.before(text); err != nil {
			return v, err
		}
	}
	if v, err = call(); err == nil && p.after != nil {
		err = p.after(text)
	}
	return v, err
}

// do is probed for a call without a value.
func (p *probe) do(op string, keys []string, call func() error) error {
	_, err := probed(p, op, keys, func() (struct{}, error) { return struct{}{}, call() })
	return err
}

func (p *probe) Set(ctx context.Context, key string, value []byte) error {
	return p.do("set", []string{key}, func() error { return p.Store.Set(ctx, key, value) })
}

func (p *probe) Get(ctx context.Context, key string) ([]byte, error) {
	return probed(p, "get", []string{key}, func() ([]byte, error) { return p.Store.Get(ctx, key) })
}

func (p *probe) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return probed(p, "add", []string{key}, func() (int64, error) { return p.Store.Add(ctx, key, delta) })
}

func (p *probe) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	op := "compare set"
	if string(desired) == never {
		op = "peek"
	}
	return probed(p, op, []string{key}, func() ([]byte, error) { return p.Store.CompareSet(ctx, key, expected, desired) })
}

func (p *probe) Wait(ctx context.Context, keys ...string) error {
	return p.do("wait", keys, func() error { return p.Store.Wait(ctx, keys...) })
}

func (p *probe) Check(ctx context.Context, keys ...string) (bool, error) {
	return probed(p, "check", keys, func() (bool, error) { return p.Store.Check(ctx, keys...) })
}

func (p *probe) Delete(ctx context.Context, key string) (bool, error) {
	return probed(p, "delete", []string{key}, func() (bool, error) { return p.Store.Delete(ctx, key) })
}

func (p *probe) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return probed(p, "multi get", keys, func() ([][]byte, error) { return p.Store.MultiGet(ctx, keys) })
}

func (p *probe) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return p.do("multi set", keys, func() error { return p.Store.MultiSet(ctx, keys, values) })
}

func (p *probe) SetWill(_ context.Context, key string, _, _ []byte) error {
	return p.do("set will", []string{key}, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.wills = append(p.wills, key)
		return nil
	})
}

func (p *probe) DropWill(_ context.Context, key string) error {
	return p.do("drop will", []string{key}, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.wills = slices.DeleteFunc(p.wills, func(k string) bool { return k == key })
		return nil
	})
}

// noted returns the calls and wills up to now.
func (p *probe) noted() (calls, wills []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls), slices.Clone(p.wills)
}

// config is that of a rank whose run may be PyTorch's, and has a notice.
func (p *probe) config(rank, size int) Config {
	return Config{
		Store: p, Name: "0", Rank: rank, Size: size, Foreign: foreign(p),
		Notices: func(string) store.Store { return store.Prefix("notice", p) },
	}
}

// TestCallsOfAMeeting: what two ranks ask of the store. Rank 1 comes first.
func TestCallsOfAMeeting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ranks := []*probe{{Store: st}, {Store: st}}
		one := start(t.Context(), ranks[1].config(1, 2))
		synctest.Wait()
		_, wills := ranks[1].noted()
		require.Equal(t, []string{corner + endKey(1), corner + endKey(2)}, wills, "it may not hear that rank 0 has come")
		zero := start(t.Context(), ranks[0].config(0, 2))
		for _, c := range []<-chan outcome{zero, one} {
			o := <-c
			require.NoError(t, o.err)
			o.Notice.Close()
		}
		if i := slices.Index(ranks[0].calls, "peek turn/2/log/1"); i >= 0 { // it was there already
			ranks[0].calls[i] = "get turn/2/log/1"
		}
		require.ElementsMatch(t, []string{
			"check v2/0", "check v1/0", "add turn", "peek turn/1/end",
			"set will notice/first", "set will turn/1/end", "set will turn/2/end",
			"compare set turn/1/end", "set turn/1/end", // it has come
			"add rank/0", "set c10d-go/meet/last", "multi set rank/0/1", "get rank/0/2", "get turn/2/end",
			"add turn/2/log", "get turn/2/log/1", "compare set turn/2/end", "set turn/2/end", // all have come
			"compare set turn", "delete rank/0/1", "drop will turn/1/end", "drop will turn/2/end",
			"drop will notice/first",
		}, ranks[0].calls)
		require.ElementsMatch(t, []string{
			"check v2/1", "check v1/1", "add turn", "peek turn/1/end",
			"set will turn/1/end", "set will turn/2/end",
			"add rank/1", "add turn/1/log", "multi set rank/1/1 turn/1/log/1", "get rank/1/2", "wait v2/0", "wait v1/0", "get turn/1/end",
			"add turn/1/log", "peek turn/1/log/1", "get turn/1/log/2", // while rank 0 is away
			"set will notice/first", "add turn/2/log", "multi set turn/2/log/1", "get turn/2/end",
			"delete rank/1/1", "delete turn/1/log/1", "delete turn/2/log/1", "drop will turn/1/end", "drop will turn/2/end",
			"drop will notice/first",
		}, ranks[1].calls)
	})
}

// TestEachFailedCall: a rank ends with the store's error, whichever call it was.
func TestEachFailedCall(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		for rank := range 2 {
			calls, err := failing(t, order, rank, "", 1)
			require.NoError(t, err)
			for i, call := range calls {
				switch op, _, _ := strings.Cut(call, "/"); op {
				case "drop will turn", "drop will notice", "delete rank", "delete turn": // the rank is done
				case "get rank", "wait v1", "wait v2": // these concern the rank only if they succeed
				default:
					if call == "set turn/2/end" || call == "compare set turn" && rank == 0 {
						continue // the ranks have met
					}
					n := int64(1)
					for _, before := range calls[:i] {
						if before == call {
							n++
						}
					}
					made, err := failing(t, order, rank, call, n)
					if strings.HasSuffix(call, " turn/2/log/1") && !slices.Contains(made, call) {
						continue // the entry was there already, or not yet
					}
					require.ErrorIs(t, err, errBroken, "order %v, rank %d, %s, the call number %d of this text", order, rank, call, n)
				}
			}
		}
	}
}

// failing lets two ranks come in this order, and fails a call of one: number n of those with this text.
func failing(t *testing.T, order []int, rank int, call string, n int64) (calls []string, err error) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var seen atomic.Int64
		var own, other <-chan outcome
		p := &probe{Store: st, before: func(text string) error {
			if text == call && seen.Add(1) == n {
				return errBroken
			}
			return nil
		}}
		for _, r := range order {
			if r == rank {
				own = start(ctx, p.config(r, 2))
			} else {
				other = start(ctx, (&probe{Store: st}).config(r, 2))
			}
			synctest.Wait()
		}
		o := <-own
		cancel()
		for _, o := range []outcome{o, <-other} {
			if o.Notice != nil {
				o.Notice.Close()
			}
		}
		calls, err = p.calls, o.err
	})
	return calls, err
}

// TestLatest: from what the store holds, in which turn a process comes.
func TestLatest(t *testing.T) {
	zero, met := end{Zero: &record{Nonce: "n"}}, end{Begun: &begun{Read: 1}}
	for name, c := range map[string]struct {
		noted  int
		ends   map[int]end
		turn   int
		before end
	}{
		"a new store":             {0, nil, 1, end{}},
		"rank 0 has come":         {0, map[int]end{1: zero}, 2, zero},
		"and somebody noted that": {1, map[int]end{1: zero}, 2, zero},
		"a run has begun":         {1, map[int]end{1: zero, 2: met}, 3, met},
		"its keys are deleted":    {2, nil, 3, end{}},
	} {
		hash := store.NewHash()
		st := at(hash)
		must.Get(st.Add(t.Context(), turnKey, int64(c.noted)))
		for turn, e := range c.ends {
			require.NoError(t, st.Set(t.Context(), endKey(turn), encode(e)))
		}
		turn, before, err := New(Config{Store: hash, Name: "0", Size: 2}).latest(t.Context())
		require.NoError(t, err)
		require.Equal(t, c.turn, turn, name)
		require.Equal(t, c.before, before, name)
		require.Equal(t, int64(c.turn-1), must.Get(st.Add(t.Context(), turnKey, 0)), name)
	}
}

// TestNoNumberOfATurn: the key has it, or the call ends.
func TestNoNumberOfATurn(t *testing.T) {
	p := &probe{Store: store.NewHash()}
	require.NoError(t, at(p.Store).Set(t.Context(), turnKey, []byte("x")))
	require.ErrorContains(t, New(p.config(0, 2)).advance(t.Context(), 0, 1), `key "turn" holds "x", which is no number`)
}

// TestParse: an end with an error in it is none.
func TestParse(t *testing.T) {
	for text, want := range map[string]end{
		"":                                  {},
		"null":                              {},
		`{"zero":{"nonce":"n","rank":"0"}}`: {},
		`{"zero":{"nonce":""}}`:             {},
		`{"zero":{"nonce":"n"}}`:            {Zero: &record{Nonce: "n"}},
		`{"fault":{"rank":2,"by":-1,"text":"x"}}`: {Fault: &Fault{Rank: 2, By: -1, Text: "x", place: 3}},
	} {
		require.Equal(t, want, new(Call).parse(text), text)
	}
	require.Panics(t, func() { encode(func() {}) })
}

// TestOtherEnds: a rank that waits goes on to the next turn if the end of its own does not concern it.
func TestOtherEnds(t *testing.T) {
	for _, c := range []struct {
		zero bool // rank 0 has come in the turn before
		text string
	}{
		{true, "null"}, {true, `{"foreign":9}`}, {true, `{"foreign":-1}`}, {true, `{"zero":{"nonce":"other","size":2}}`},
		{false, "null"}, {false, `{"foreign":1}`}, {false, `{"begun":{"read":1}}`},
	} {
		synctest.Test(t, func(t *testing.T) {
			st, turn := store.NewHash(), 1
			if c.zero {
				zeroCame(t, st, 2)
				turn++
			}
			ctx, cancel := context.WithCancel(t.Context())
			one := start(ctx, (&probe{Store: st}).config(1, 2))
			synctest.Wait()
			require.NoError(t, at(st).Set(ctx, endKey(turn), []byte(c.text)))
			synctest.Wait()
			require.True(t, must.Get(at(st).Check(ctx, entryKey(turn+1, 1))), "%+v", c)
			cancel()
			require.ErrorIs(t, (<-one).err, context.Canceled)
		})
	}
}

// TestSecondZero: a rank 0 that waits for its ranks does not come again when another rank 0 has come.
func TestSecondZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probe{Store: store.NewHash()}
		zero := start(t.Context(), p.config(0, 2))
		synctest.Wait()
		require.NoError(t, at(p.Store).Set(t.Context(), endKey(2), encode(end{Zero: &record{Nonce: "other", Size: 2, PID: 7, Host: "h"}})))
		err := (<-zero).err
		require.ErrorIs(t, err, ErrTwice)
		require.ErrorContains(t, err, "and pid 7 on host h")
	})
}

// TestTurnEndsBeforeZeroComes: rank 0 comes in the next one.
func TestTurnEndsBeforeZeroComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		p := &probe{Store: st, before: func(call string) error {
			if call == "compare set turn/1/end" {
				return at(st).Set(t.Context(), endKey(1), encode(end{Fault: &Fault{Rank: 1, By: 1, Text: "an earlier run"}}))
			}
			return nil
		}}
		o := <-start(t.Context(), p.config(0, 1))
		require.NoError(t, o.err)
		require.Contains(t, o.Keys, corner+endKey(3))
		o.Notice.Close()
	})
}

// TestNoticeOfALaterZero: a rank has a will in the notice of the rank 0 that it meets, and in no other.
func TestNoticeOfALaterZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		zeroCame(t, st, 2)
		p := &probe{Store: st}
		cfg := p.config(1, 2)
		cfg.Notices = func(id string) store.Store { return store.Prefix(id, p) }
		one := start(t.Context(), cfg)
		synctest.Wait()
		_, wills := p.noted()
		require.Contains(t, wills, "n/first")
		zero := start(t.Context(), Config{Store: st, Name: "0", Rank: 0, Size: 2})
		require.NoError(t, (<-zero).err)
		o := <-one
		require.NoError(t, o.err)
		require.Equal(t, []string{o.ID + "/first"}, p.wills)
		o.Notice.Close()
	})
}

// TestKeysOfARun: with and without answered questions.
func TestKeysOfARun(t *testing.T) {
	c := New(Config{Store: store.NewHash(), Name: "0"})
	keys := []string{corner + "turn/1/end", corner + "turn/1/log", corner + "turn/2/end", corner + "turn/2/log"}
	require.Equal(t, keys, c.left(2, 0))
	require.Equal(t, append(keys, corner+"turn/2/answers", corner+"turn/2/ask/1", corner+"turn/2/answer/1"), c.left(2, 1))
}

// TestFirstGeneration: of two generations whose keys are there the first counts, whichever reply comes first.
func TestFirstGeneration(t *testing.T) {
	for _, slow := range []string{"check v2/1", "check v1/1"} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: func(call string) error {
				if call == slow {
					time.Sleep(time.Millisecond)
				}
				return nil
			}}
			require.NoError(t, p.MultiSet(t.Context(), []string{"v1/1", "v2/1"}, [][]byte{nil, nil}))
			place, key, err := New(p.config(0, 2)).foreign(t.Context(), 1)
			require.NoError(t, err)
			require.Equal(t, "v2/1", key, "%s is slow", slow)
			require.Zero(t, place)
		})
	}
}

// TestValueWithAnError: a value that comes with an error is none.
func TestValueWithAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probe{Store: store.NewHash(), after: fails("compare set k")}
		_, err := Once(t.Context(), p, "k", []byte("v"))
		require.ErrorIs(t, err, errBroken)
		require.Equal(t, []string{"compare set k"}, p.calls)

		// Rank 0 has come, and the reply that says so is lost.
		p = &probe{Store: store.NewHash(), after: fails("compare set turn/1/end")}
		zeroCame(t, p.Store, 2)
		c := New(p.config(1, 2))
		c.enter(1, end{})
		_, err = c.post(t.Context(), &Fault{Text: "x"})
		require.ErrorIs(t, err, errBroken)
		require.Equal(t, []string{"compare set turn/1/end"}, p.calls)

		// A second process has come, and the reply that says so is lost.
		p = &probe{Store: store.NewHash(), after: fails("get rank/1/2")}
		require.NoError(t, at(p.Store).Set(t.Context(), processKey(1, 2), encode(record{Nonce: "n", Rank: 1, Size: 2})))
		ctx, cancel := context.WithCancel(t.Context())
		one := start(ctx, p.config(1, 2))
		synctest.Wait()
		cancel()
		require.ErrorIs(t, (<-one).err, context.Canceled)
	})
}

// TestEndedThatIsNoEnd: the launcher cannot tell, or means an earlier process of this rank.
func TestEndedThatIsNoEnd(t *testing.T) {
	for rank, failed := range []error{errBroken, nil} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			cfg := (&probe{Store: st}).config(1, 2)
			cfg.Ended = func(context.Context) (int, string, error) { return rank, "it ended", failed }
			one := start(t.Context(), cfg)
			synctest.Wait()
			zero := start(t.Context(), Config{Store: st, Name: "0", Rank: 0, Size: 2})
			require.NoError(t, (<-zero).err)
			o := <-one
			require.NoError(t, o.err)
			o.Notice.Close()
		})
	}
}

// TestLongText: a fault has to fit into a will.
func TestLongText(t *testing.T) {
	c := New(Config{Store: store.NewHash(), Name: "0", Rank: 1, Size: 2})
	c.enter(1, end{})
	long := strings.Repeat("x", 2*maxText)
	require.Len(t, must.Get(c.post(t.Context(), &Fault{Text: long})).Fault.Text, maxText)
	require.Len(t, Tell(store.NewHash(), Fault{Text: long}).Text, maxText)
}

// TestGivesUp: a rank that is cancelled says who is missing. That rank 0 has given up means that the ranks are not of one run.
func TestGivesUp(t *testing.T) {
	for r := range 2 {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			ctx, cancel := context.WithCancel(t.Context())
			own := start(ctx, (&probe{Store: st}).config(r, 3))
			synctest.Wait()
			other := start(t.Context(), (&probe{Store: st}).config(1-r, 3))
			synctest.Wait()
			cancel()
			err := (<-own).err
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, []int{2}, must.As[*Error](t, err).Missing, "rank %d", r)
			err = (<-other).err
			require.ErrorContains(t, err, fmt.Sprintf("rank %d (pid ", r))
			require.ErrorContains(t, err, "gave up: context canceled")
			require.Equal(t, r == 0, errors.Is(err, ErrDiffer))
			require.Equal(t, []int{2}, must.As[*Error](t, err).Missing)
			require.False(t, must.Get(st.Check(t.Context(), "notice/first")), "no run has begun")
		})
	}
}

// TestGivesUpForAReason: the error is the reason, also if it is another call's fault. If time ran out it says who is missing.
func TestGivesUpForAReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ctx, cancel := context.WithCancelCause(t.Context())
		zero := start(ctx, (&probe{Store: st}).config(0, 3))
		one := start(t.Context(), (&probe{Store: st}).config(1, 3))
		synctest.Wait()
		reason := &Fault{Rank: 2, By: 2, Text: "all stop"}
		cancel(reason)
		e := must.As[*Error](t, (<-zero).err)
		require.Same(t, reason, e.Err)
		require.Empty(t, e.Missing, "nobody was waited for")
		require.ErrorContains(t, (<-one).err, "gave up: all stop")

		st = store.NewHash()
		limit := fmt.Errorf("the job's limit: %w", context.DeadlineExceeded)
		ctx, stop := context.WithTimeoutCause(t.Context(), time.Second, limit)
		defer stop()
		e = must.As[*Error](t, (<-start(ctx, (&probe{Store: st}).config(0, 2))).err)
		require.Equal(t, limit, e.Err)
		require.Equal(t, []int{1}, e.Missing)

		// The store has a timeout of its own.
		p := &probe{Store: store.NewHash(), before: func(call string) error {
			if call == "get turn/1/end" {
				return store.ErrTimeout
			}
			return nil
		}}
		e = must.As[*Error](t, (<-start(t.Context(), p.config(1, 2))).err)
		require.Equal(t, store.ErrTimeout, e.Err)
		require.Equal(t, []int{0}, e.Missing)
	})
}

// TestZeroIsSlow: rank 0 has stopped if it does not answer in time, whatever else is missing. Rank 2 of three asks it.
func TestZeroIsSlow(t *testing.T) {
	for name, c := range map[string]struct {
		cancel           bool // or its time runs out
		fails            string
		answer           time.Duration // after the question; 0: none
		missing, stopped []int
	}{
		"no answer":            {missing: []int{1}, stopped: []int{0}},
		"a late answer":        {answer: time.Second, missing: []int{1}},
		"no time to ask":       {cancel: true, missing: []int{1}},
		"nothing can be asked": {fails: "add turn/2/answers"},
	} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			zeroCame(t, st, 3)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			two := start(ctx, (&probe{Store: st, before: fails(c.fails)}).config(2, 3))
			synctest.Wait()
			if c.answer > 0 {
				require.NoError(t, at(st).Wait(t.Context(), askKey(2, 1)))
				time.Sleep(c.answer)
				require.NoError(t, at(st).Set(t.Context(), answerKey(2, 1), []byte("[1]")))
			}
			if c.cancel {
				cancel()
			}
			e := must.As[*Error](t, (<-two).err)
			require.Equal(t, c.missing, e.Missing, name)
			require.Equal(t, c.stopped, e.Stopped, name)
		})
	}
}

// TestComesLast: at its timeout rank 0 reads what has come since it looked, behind an entry that is missing.
func TestComesLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probe{Store: store.NewHash()}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		zero := start(ctx, p.config(0, 3))
		time.Sleep(999 * time.Millisecond) // it looks after 810 ms, and would again after 1060 ms
		entries(t, p, "", "1a")
		require.Equal(t, []int{2}, must.As[*Error](t, (<-zero).err).Missing)
	})
}

// TestGivesUpAfterAll: a rank that gives up when all have come tells the others in the run's notice.
func TestGivesUpAfterAll(t *testing.T) {
	for _, c := range []struct{ come, lost, notice, told bool }{
		{come: true, notice: true, told: true}, {come: true}, {notice: true}, {come: true, lost: true, notice: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash()}
			zeroCame(t, p.Store, 2)
			p.before = func(call string) error {
				if call != "get turn/2/end" {
					return nil
				}
				if c.come {
					must.Do(at(p.Store).Set(t.Context(), endKey(2), encode(end{Begun: &begun{Read: 1}})))
				}
				return errBroken
			}
			if c.lost { // the reply that says so
				p.after = fails("compare set turn/2/end")
			}
			cfg := p.config(1, 2)
			if !c.notice {
				cfg.Notices = nil
			}
			require.ErrorIs(t, (<-start(t.Context(), cfg)).err, errBroken)
			require.Equal(t, c.told, must.Get(p.Check(t.Context(), "notice/first")), "%+v", c)
		})
	}
}

// TestTurnThatHasNotEnded: rank 0 does not note that it has.
func TestTurnThatHasNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probe{Store: store.NewHash(), before: fails("compare set turn/2/end")}
		ctx, cancel := context.WithCancel(t.Context())
		zero := start(ctx, p.config(0, 2))
		synctest.Wait()
		cancel()
		require.ErrorIs(t, (<-zero).err, context.Canceled)
		require.Zero(t, must.Get(at(p.Store).Add(t.Context(), turnKey, 0)))
	})
}

// TestOneReadsForAll: while rank 0 is away, the first rank of a turn answers the others.
func TestOneReadsForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		ctx, cancel := context.WithCancel(t.Context())
		one := start(ctx, (&probe{Store: st}).config(1, 3))
		synctest.Wait()
		p := &probe{Store: st}
		c := New(p.config(2, 3))
		two := make(chan error)
		go func() { two <- must.Err(c.Meet(ctx)) }()
		synctest.Wait()
		begun := time.Now()
		missing, answered, err := c.Missing(ctx)
		require.NoError(t, err)
		require.Equal(t, []int{0}, missing)
		require.True(t, answered)
		require.LessOrEqual(t, time.Since(begun), longestLook)
		calls, _ := p.noted()
		require.False(t, slices.ContainsFunc(calls, func(call string) bool { return strings.HasPrefix(call, "get turn/1/log/") }), "it reads as well")
		cancel()
		require.Error(t, (<-one).err)
		require.Error(t, <-two)
	})
}

// TestWhoIsMissing: what rank 2 of three finds out when rank 0 has come.
func TestWhoIsMissing(t *testing.T) {
	for name, c := range map[string]struct {
		fails    string
		over     bool   // the caller's time
		end      end    // of the turn, after a moment, or before if it is over
		answer   string // after a moment
		missing  []int
		answered bool
		err      error
		took     time.Duration
	}{
		"an answer":             {answer: "[0]", missing: []int{0}, answered: true, took: moment},
		"no answer":             {missing: []int{1}, took: answerLimit},
		"no time":               {over: true, missing: []int{1}},
		"no time, and a fault":  {over: true, end: end{Fault: &Fault{Missing: []int{1, 2}}}, missing: []int{1}, answered: true},
		"a fault":               {end: end{Fault: &Fault{Missing: []int{1}, Stopped: []int{0}}}, missing: []int{1}, took: moment},
		"all have come":         {end: end{Begun: &begun{Read: 2}}, answered: true, took: moment},
		"no number":             {fails: "add turn/2/answers", err: errBroken},
		"no question":           {fails: "set turn/2/ask/1", err: errBroken},
		"no answer and no log":  {fails: "add turn/2/log", err: errBroken, took: answerLimit},
		"no answer and no ends": {fails: "peek turn/2/end", err: errBroken, took: answerLimit},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: fails(c.fails)}
			call := New(p.config(2, 3))
			missing, answered, err := call.Missing(t.Context())
			require.True(t, missing == nil && answered && err == nil, "it has not begun")
			call.enter(2, end{Zero: &record{Nonce: "n", Size: 3}})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			come := func() {
				if c.end != (end{}) {
					must.Do(at(p.Store).Set(t.Context(), endKey(2), encode(c.end)))
				}
				if c.answer != "" {
					must.Do(at(p.Store).Set(t.Context(), answerKey(2, 1), []byte(c.answer)))
				}
			}
			if c.over {
				cancel()
				come()
			} else {
				time.AfterFunc(moment, come)
			}
			begun := time.Now()
			missing, answered, err = call.Missing(ctx)
			require.ErrorIs(t, err, c.err, name)
			require.Equal(t, c.missing, missing, name)
			require.Equal(t, c.answered, answered, name)
			require.Equal(t, c.took, time.Since(begun), name)
		})
	}
}

// TestWhoReadsAsksNobody: the rank that reads the log knows who is missing.
func TestWhoReadsAsksNobody(t *testing.T) {
	p := &probe{Store: store.NewHash()}
	l := logOf(p, 0)
	missing, answered, err := l.c.Missing(t.Context())
	require.NoError(t, err)
	require.Equal(t, []int{1, 2}, missing)
	require.True(t, answered)
	require.Empty(t, p.calls)
}

// moment is less than any limit.
const moment = 100 * time.Millisecond

// TestOtherRun: what the store says of other runs to a rank without a rank 0.
func TestOtherRun(t *testing.T) {
	fault := end{Fault: &Fault{Text: "rank 1 died"}}
	for _, c := range []struct {
		before end
		last   *record
		want   string
	}{
		{end{Zero: &record{Nonce: "n"}}, &record{Job: "B", Size: 3}, ""},
		{end{}, nil, ""},
		{end{}, &record{Job: "A", Size: 3}, ""},
		{end{}, &record{Job: "B", Size: 3}, `is of job "B"; this rank is of job "A"`},
		{end{}, &record{Job: "A", Size: 2}, "was started with a world of 2 ranks; this rank with one of 3"},
		{fault, &record{Job: "A", Size: 3}, "the last meeting in this store failed: rank 1 died"},
		{fault, nil, "the last meeting in this store failed: rank 1 died"},
	} {
		st := store.NewHash()
		if c.last != nil {
			require.NoError(t, st.Set(t.Context(), lastKey, encode(c.last)))
		}
		call := New(Config{Store: st, Rank: 1, Size: 3, Job: "A"})
		call.enter(1, c.before)
		err := call.otherRun(t.Context(), errBroken)
		require.ErrorIs(t, err, errBroken)
		require.ErrorContains(t, err, c.want)
		require.Equal(t, c.want == "", err == errBroken, "%v", err)
	}
}

// TestTwice: a process that cannot take part ends the call of another process of its rank 0, if one is under way.
func TestTwice(t *testing.T) {
	met := end{Begun: &begun{Read: 2}}
	for name, c := range map[string]struct {
		size      int // of the world of the rank 0 that has come; 0: none
		end       end // of its turn
		meanwhile end
		fails     string
		twice     bool
		took      time.Duration
	}{
		"no call":               {took: time.Second},
		"a call":                {size: 3, twice: true},
		"of another world":      {size: 2},
		"all have come":         {size: 3, end: met},
		"all come meanwhile":    {size: 3, meanwhile: met},
		"the store fails":       {size: 3, fails: "compare set turn/2/end"},
		"the store fails later": {size: 3, fails: "set turn/2/end"},
	} {
		synctest.Test(t, func(t *testing.T) {
			st := store.NewHash()
			p := &probe{Store: st, before: func(call string) error {
				if call == "compare set turn/2/end" && c.meanwhile != (end{}) {
					must.Do(at(st).Set(t.Context(), endKey(2), encode(c.meanwhile)))
				}
				return fails(c.fails)(call)
			}}
			if c.size > 0 {
				zeroCame(t, st, c.size)
			}
			if c.end != (end{}) {
				must.Do(at(st).Set(t.Context(), endKey(2), encode(c.end)))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			begun := time.Now()
			err := Twice(ctx, p.config(0, 3))
			require.Equal(t, c.took, time.Since(begun), name)
			require.Equal(t, c.twice, errors.Is(err, ErrTwice), "%s: %v", name, err)
			require.True(t, c.twice || err == nil, "%s: %v", name, err)
		})
	}
}

// entries writes entries of turn 2's log from its first place on: a rank, and the nonce of its process. For "" there is none.
func entries(t *testing.T, p *probe, all ...string) {
	t.Helper()
	for i, e := range all {
		if e != "" {
			r := record{Nonce: e[1:], Rank: int(e[0] - '0'), Size: 3}
			require.NoError(t, at(p.Store).Set(t.Context(), entryKey(2, i+1), encode(r)))
		}
	}
	require.NoError(t, at(p.Store).Set(t.Context(), countKey(2), fmt.Append(nil, len(all))))
}

// logOf returns the log of turn 2 in a world of three ranks that a rank reads.
func logOf(p *probe, rank int) *log {
	c := New(p.config(rank, 3))
	var before end
	if rank == 0 {
		before.Zero = &c.self
	}
	c.enter(2, before)
	return c.newLog()
}

// TestTake: which entries are those of a rank.
func TestTake(t *testing.T) {
	for rank := range 2 {
		l := logOf(&probe{Store: store.NewHash()}, rank)
		for _, text := range []string{"{", "null", `{"rank":2}`, `{"nonce":"a","rank":"2"}`, `{"nonce":"a","rank":-1}`, `{"nonce":"a","rank":3}`} {
			require.NoError(t, l.take([]byte(text)))
			require.Len(t, l.came, 1, text)
		}
		for range 2 {
			require.NoError(t, l.take([]byte(`{"nonce":"a","rank":2}`)))
			require.Len(t, l.came, 2)
		}
		err := l.take([]byte(`{"nonce":"b","rank":2}`))
		if rank == 0 {
			require.ErrorIs(t, err, ErrTwice)
			require.Zero(t, must.As[*Fault](t, err).By)
		} else {
			require.NoError(t, err, "the log may have processes of earlier runs")
		}
	}
}

// added and both are the calls that read a log of two entries which are there.
var (
	added = []string{"add turn/2/log"}[:1:1]
	both  = []string{"check turn/2/log/1 turn/2/log/2", "multi get turn/2/log/1 turn/2/log/2"}
)

// TestReadLog: rank 0 reads until all have come, one has come twice, or the store fails.
func TestReadLog(t *testing.T) {
	for _, c := range []struct {
		entries []string
		count   int // if it is not their number
		fails   string
		err     error
		calls   []string
	}{
		{entries: []string{"1a", "2a"}, calls: slices.Concat(added, both)},
		{entries: []string{"1a", "1b"}, err: ErrTwice, calls: slices.Concat(added, both)},
		{entries: []string{"1a", "1b"}, count: 1, err: ErrTwice, calls: append(added, "peek turn/2/log/1", "get turn/2/log/2")},
		{entries: []string{"1a", "2a"}, count: 1, calls: append(added, "peek turn/2/log/1", "get turn/2/log/2")},
		{fails: "get turn/2/log/1", err: errBroken, calls: append(added, "get turn/2/log/1")},
		{entries: []string{"1a"}, fails: "add turn/2/log", err: errBroken, calls: added},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: fails(c.fails)}
			entries(t, p, c.entries...)
			if c.count > 0 {
				require.NoError(t, at(p.Store).Set(t.Context(), countKey(2), fmt.Append(nil, c.count)))
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			require.ErrorIs(t, logOf(p, 0).read(ctx, time.Second), c.err)
			require.Equal(t, c.calls, p.calls)
		})
	}
}

// TestCatchUp: what is read of a log without waiting, and what stays for later.
func TestCatchUp(t *testing.T) {
	peeks := []string{"peek turn/2/log/1", "peek turn/2/log/2"}
	for name, c := range map[string]struct {
		entries []string
		late    []int // those that were not there before; all others have been read

		fails, loses string
		err          error
		still        []int
		absent       []int
		calls        []string
	}{
		"all are there":          {entries: []string{"1a", "2a"}, absent: []int{}, calls: both},
		"twice":                  {entries: []string{"1a", "1b"}, err: ErrTwice, absent: []int{2}, calls: both},
		"one is not there":       {entries: []string{"", "2a"}, still: []int{1}, absent: []int{1}, calls: slices.Concat(both[:1], peeks)},
		"twice, beside a hole":   {entries: []string{"1a", "", "1b"}, err: ErrTwice, absent: []int{2}, calls: append([]string{both[0] + " turn/2/log/3", "peek turn/2/log/3"}, peeks...)},
		"one was not there":      {entries: []string{"1a"}, late: []int{1}, absent: []int{2}, calls: peeks[:1]},
		"one is not there still": {entries: []string{""}, late: []int{1}, still: []int{1}, absent: []int{1, 2}, calls: peeks[:1]},
		"no check":               {entries: []string{"1a", "2a"}, late: []int{1, 2}, fails: both[0], err: errBroken, absent: []int{1, 2}, calls: both[:1]},
		"a check, perhaps":       {entries: []string{"1a", "2a"}, late: []int{1, 2}, loses: both[0], err: errBroken, absent: []int{1, 2}, calls: both[:1]},
		"no values":              {entries: []string{"1a", "2a"}, late: []int{1, 2}, fails: both[1], err: errBroken, absent: []int{1, 2}, calls: both},
		"no value":               {entries: []string{"1a"}, late: []int{1}, fails: peeks[0], err: errBroken, absent: []int{1, 2}, calls: peeks[:1]},
		"no count":               {fails: "add turn/2/log", err: errBroken, absent: []int{1, 2}},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: fails(c.fails), after: fails(c.loses)}
			entries(t, p, c.entries...)
			l := logOf(p, 0)
			l.late, l.next = c.late, len(c.late)+1
			require.ErrorIs(t, l.catchUp(t.Context()), c.err, name)
			require.Equal(t, c.absent, l.absent(), name)
			require.ElementsMatch(t, slices.Concat(added, c.calls), p.calls, name)
			if c.err == nil {
				require.Equal(t, c.still, l.late, name)
			}
		})
	}
}

// TestEntryThatGoes: a rank that gives up deletes its entry. Who reads the log does not wait for it.
func TestEntryThatGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &probe{Store: store.NewHash()}
		entries(t, p, "1a", "2a")
		p.after = func(call string) error {
			if call == both[0] {
				must.Get(at(p.Store).Delete(t.Context(), entryKey(2, 2)))
			}
			return nil
		}
		l, begun := logOf(p, 0), time.Now()
		require.NoError(t, l.catchUp(t.Context()))
		require.LessOrEqual(t, time.Since(begun), longestLook)
		require.Equal(t, []int{2}, l.absent())
		require.Equal(t, []int{2}, l.late)
	})
}

// TestLook: what the reader of a log does between readings.
func TestLook(t *testing.T) {
	asks := []string{"check turn/2/ask/1", "add turn/2/log"}[:2:2]
	foreigners := []string{"check v2/1", "check v1/1", "check v2/2", "check v1/2"}
	for name, c := range map[string]struct {
		rank         int
		asked        bool
		fails, loses string
		err          error
		calls        []string
	}{
		"rank 1":              {rank: 1, calls: []string{"check turn/2/ask/1"}},
		"rank 0":              {calls: append([]string{"check turn/2/ask/1"}, foreigners...)},
		"a question":          {rank: 1, asked: true, calls: append(asks, "set turn/2/answer/1", "add turn/2/answers")},
		"no count":            {rank: 1, asked: true, fails: "add turn/2/log", err: errBroken, calls: asks},
		"no question":         {fails: "check turn/2/ask/1", err: errBroken, calls: []string{"check turn/2/ask/1"}},
		"a question, perhaps": {asked: true, loses: "check turn/2/ask/1", err: errBroken, calls: []string{"check turn/2/ask/1"}},
		"no answer":           {asked: true, fails: "set turn/2/answer/1", err: errBroken, calls: append(asks, "set turn/2/answer/1")},
		"no foreigner":        {fails: "check v2/1", err: errBroken, calls: []string{"check turn/2/ask/1", "check v2/1", "check v1/1"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash(), before: fails(c.fails), after: fails(c.loses)}
			l := logOf(p, c.rank)
			if c.asked {
				require.NoError(t, at(p.Store).Set(t.Context(), askKey(2, 1), nil))
			}
			over, err := l.look(t.Context())
			require.ErrorIs(t, err, c.err, name)
			require.False(t, over)
			require.ElementsMatch(t, c.calls, p.calls, name)
		})
	}
}

// TestLead: the reader of a log ends when the turn has ended, or its own time, and tells its rank that the store has failed.
func TestLead(t *testing.T) {
	read := slices.Concat(added, both)
	ends := []string{"compare set turn/2/end", "set turn/2/end"}
	for name, c := range map[string]struct {
		entries []string
		foreign bool
		limit   time.Duration
		fails   error // the first reading
		stop    error
		end     end
		calls   []string // nil: any
	}{
		"all have come":         {entries: []string{"1a", "2a"}, end: end{Begun: &begun{Read: 2}}, calls: slices.Concat(read, ends)},
		"twice":                 {entries: []string{"1a", "1b"}, end: end{Fault: &Fault{}}, calls: slices.Concat(read, ends)},
		"a foreign rank":        {foreign: true, end: end{Foreign: 1}},
		"no time":               {limit: firstLook / 2, calls: []string{"add turn/2/log", "get turn/2/log/1"}},
		"the store's timeout":   {entries: []string{"1a", "2a"}, fails: store.ErrTimeout, end: end{Begun: &begun{Read: 2}}},
		"the reading's timeout": {entries: []string{"1a", "2a"}, fails: context.DeadlineExceeded, end: end{Begun: &begun{Read: 2}}},
		"the store fails":       {fails: errBroken, stop: errBroken, calls: added},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &probe{Store: store.NewHash()}
			var first sync.Once
			p.before = func(string) (err error) {
				first.Do(func() { err = c.fails })
				return err
			}
			entries(t, p, c.entries...)
			if c.foreign {
				require.NoError(t, p.Store.Set(t.Context(), "v2/1", nil))
			}
			ctx := t.Context()
			if c.limit > 0 {
				limited, cancel := context.WithTimeout(ctx, c.limit)
				defer cancel()
				ctx = limited
			}
			l := logOf(p, 0)
			var stopped error
			l.lead(ctx, func(err error) { stopped = err })
			require.Equal(t, c.stop, stopped, name)
			if c.calls != nil {
				require.Equal(t, c.calls, p.calls, name)
			}
			ended := must.Get(l.c.peek(t.Context(), endKey(2)))
			switch e := l.c.parse(ended); {
			case c.end.Fault != nil:
				require.ErrorIs(t, e.Fault, ErrTwice)
			default:
				require.Equal(t, c.end, e, name)
			}
		})
	}
}
