package meet_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

// patience bounds what must come at once.
const patience = 20 * time.Second

// rank is one rank of a group: its notice, and the context that the notice ends.
type rank struct {
	*meet.Notice
	ctx context.Context
}

func join(t *testing.T, st store.Store, ranks []int, i int) rank {
	t.Helper()
	ctx, stop := context.WithCancelCause(t.Context())
	n := must.Get(meet.Join(ctx, meet.NoticeConfig{Store: st, Ranks: ranks, Rank: i}, stop))
	t.Cleanup(n.Close)
	return rank{n, ctx}
}

// told returns the fault that ended a rank's context.
func (r rank) told(t *testing.T) *meet.Fault {
	t.Helper()
	select {
	case <-r.ctx.Done():
	case <-time.After(patience):
		require.Fail(t, "nobody told this rank")
	}
	f := must.As[*meet.Fault](t, context.Cause(r.ctx))
	return f
}

var three = []int{0, 1, 2}

func TestPost(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	a, b, c := join(t, st, three, 0), join(t, st, three, 1), join(t, st, three, 2)
	mine := meet.Fault{Rank: 1, Text: "rank 1: a bad certificate"}
	require.Equal(t, 1, b.Post(mine).By)
	require.Equal(t, "rank 1: a bad certificate", a.told(t).Error())
	require.Equal(t, 1, c.told(t).Culprit())
	// The first fault counts, for those that come later too.
	first := c.Post(meet.Fault{Rank: 0, Text: "rank 0: another reason"})
	require.Equal(t, 1, first.Rank)
	require.Equal(t, 1, join(t, st, three, 2).told(t).Rank)
}

func TestFaultError(t *testing.T) {
	f := meet.Fault{Rank: 2, By: 1, Text: "rank 2 died", Late: true}
	require.Equal(t, "rank 2 died (noticed by rank 1)", f.Error())
	require.ErrorIs(t, &f, context.DeadlineExceeded)
	require.ErrorIs(t, &f, store.ErrTimeout)
	require.False(t, errors.Is(&meet.Fault{}, store.ErrTimeout))
}

// A rank whose connection to the store ends is named, with its number in the default group.
func TestGone(t *testing.T) {
	server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	defer server.Close()
	var stores [2]store.Store
	for i := range stores {
		stores[i] = must.Get(tcp.New(t.Context(), server.Addr().String()))
		defer stores[i].Close()
	}
	members := []int{3, 5}
	a := join(t, stores[0], members, 0)
	join(t, stores[1], members, 1)
	require.NoError(t, stores[1].Close())
	f := a.told(t)
	require.True(t, f.Gone)
	require.Equal(t, 5, f.Rank)
	require.Equal(t, 1, f.Culprit(), "in the group")
	require.ErrorContains(t, f, "rank 1 (global rank 5) (host ")
	require.ErrorContains(t, f, "died, or lost the store, before the group was made")
}

// A rank that has made the group leaves nothing behind.
func TestNoticeClose(t *testing.T) {
	server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	defer server.Close()
	st := must.Get(tcp.New(t.Context(), server.Addr().String()))
	a := join(t, st, three, 0)
	a.Close()
	require.NoError(t, a.ctx.Err())
	require.NoError(t, st.Close())
	for deadline := time.Now().Add(patience); server.Stats().Clients > 0; {
		require.True(t, time.Now().Before(deadline))
		time.Sleep(time.Millisecond)
	}
	require.Zero(t, server.Stats().Keys)
}

// Rank 3 has stopped and rank 4 never came. Rank 0 waits for 1, which runs and waits for 3.
func TestSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		five := []int{0, 1, 2, 3, 4}
		var ranks []rank
		for r, lacks := range [][]int{{1}, {3}, {4}} {
			n := join(t, st, five, r)
			n.Lacks(func() []int { return lacks })
			ranks = append(ranks, n)
		}
		var wg sync.WaitGroup
		for r, lacks := range [][]int{{1}, {3}} { // at once
			wg.Go(func() {
				if got := ranks[r].Silent(lacks); fmt.Sprint(got) != "[3 4]" {
					t.Errorf("rank %d: %v", r, got)
				}
			})
		}
		wg.Wait()
		// All learn what the one that asked concludes.
		ranks[0].Post(meet.Fault{Rank: 3, Text: "rank 3 does not answer", Late: true})
		require.Equal(t, 3, ranks[2].told(t).Rank)
		require.Equal(t, []int{3}, ranks[1].Silent([]int{0}), "what was told counts")
	})
}

// All ranks run: the link between two is at fault, and no rank.
func TestSilentAllRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		a := join(t, st, three, 0)
		join(t, st, three, 1)
		join(t, st, three, 2)
		require.Empty(t, a.Silent([]int{2}))
	})
}

// slow is a store in which a rank's answers take their time.
type slow struct {
	store.Store
	pause time.Duration
}

func (s slow) Set(ctx context.Context, key string, value []byte) error {
	time.Sleep(s.pause)
	return s.Store.Set(ctx, key, value)
}

// Ranks of a busy host answer one after the other. All run, so none is silent.
func TestSilentWaitsWhileAnswersCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewHash()
		defer st.Close()
		six := []int{0, 1, 2, 3, 4, 5}
		var ranks []rank
		for r := range six {
			ranks = append(ranks, join(t, slow{st, time.Duration(r) * 240 * time.Millisecond}, six, r))
		}
		begun := time.Now()
		require.Empty(t, ranks[0].Silent([]int{1, 5}))
		require.Less(t, time.Since(begun), 2*time.Second)
		for _, r := range ranks {
			r.Close()
		}
	})
}

// What is no fault ends the wait with an error, not with a panic or never.
func TestGarbageInNotice(t *testing.T) {
	for _, garbage := range []string{"", "x", "{}", `{"fault":null}`, "[]", `{"asks":true,"fault":7}`} {
		st := store.NewHash()
		require.NoError(t, st.Set(t.Context(), "first", []byte(garbage)))
		r := join(t, st, three, 0)
		select {
		case <-r.ctx.Done():
		case <-time.After(patience):
			require.Fail(t, "no end")
		}
		require.ErrorContains(t, context.Cause(r.ctx), "where ranks tell why a group failed")
		r.Close()
		st.Close()
	}
}
