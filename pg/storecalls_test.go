package pg

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
	"github.com/c10d-go/c10d/trace"
)

// ear is an observer that notes the store's calls.
type ear struct {
	mu     sync.Mutex
	ok     map[string]int
	failed map[string]int
}

func (*ear) Called(trace.Event) {}
func (*ear) Ended(trace.Event)  {}

func (e *ear) StoreCalled(call string, took time.Duration, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if took < 0 {
		panic("a call has ended before it began")
	}
	if err != nil {
		e.failed[call]++
	} else {
		e.ok[call]++
	}
}

func newEar() *ear { return &ear{ok: make(map[string]int), failed: make(map[string]int)} }

// heardOf returns how many calls have succeeded and failed.
func (e *ear) heardOf(call string) (ok, failed int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ok[call], e.failed[call]
}

func recorderFor(e *ear) *trace.Recorder {
	return trace.New(trace.Options{Observers: []trace.Observer{e}})
}

// TestHeardStore: a store that observers hear of does what it does without them, and every call is told.
func TestHeardStore(t *testing.T) {
	e := newEar()
	t.Run("suite", func(t *testing.T) {
		storetest.Run(t, storetest.Config{
			New: func(*testing.T) store.Store { return heard(store.NewHash(), recorderFor(e)) },
			No:  []storetest.Feature{storetest.Wills},
		})
	})
	all := []string{
		"set", "get", "add", "compare_set", "wait", "check", "delete", "num_keys", "append", "multi_get", "multi_set", "queue_push", "queue_pop", "queue_len", "list_keys",
	}
	require.Len(t, e.ok, len(all), "%v", e.ok)
	for _, call := range all {
		require.NotZero(t, e.ok[call], call)
	}
	require.NotZero(t, e.failed["get"])
}

// TestStoreCalls: the calls of a group and of its program are told. Without a StoreObserver the group has
// the caller's store.
func TestStoreCalls(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	require.Same(t, store.Store(st), heard(st, trace.New()))
	require.Same(t, store.Store(st), heard(st, trace.Off))
	e := newEar()
	var groups [2]*ProcessGroup
	var made sync.WaitGroup
	for rank := range groups {
		made.Go(func() {
			o := Options{}
			if rank == 0 {
				o.Recorder = recorderFor(e)
			}
			var err error
			if groups[rank], err = New(t.Context(), st, rank, len(groups), o); err != nil {
				t.Error(err)
			}
		})
	}
	made.Wait()
	require.False(t, t.Failed())
	defer groups[1].Close()
	defer groups[0].Close()
	sets, _ := e.heardOf("set")
	require.NotZero(t, sets, "the group's own")
	require.NoError(t, groups[0].Store().Append(t.Context(), "k", []byte("v")))
	appended, _ := e.heardOf("append")
	require.Equal(t, 1, appended)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Error(t, must.Err(groups[0].Store().QueuePop(ctx, "missing", true)))
	_, failed := e.heardOf("queue_pop")
	require.Equal(t, 1, failed)
	require.Equal(t, store.LocalAddrOf(st), store.LocalAddrOf(heard(st, recorderFor(e))))
	require.True(t, store.IsTorch1(heard(torch1Store{st}, recorderFor(e))))
}
