package pg_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
	"github.com/c10d-go/c10d/store/tcp"
)

// everyStore runs f with each kind of store that can delete keys. handle returns one rank's.
func everyStore(t *testing.T, f func(t *testing.T, handle func() store.Store)) {
	opened := func(t *testing.T, open func() (store.Store, error)) func() store.Store {
		return func() store.Store {
			st := must.Get(open())
			st.SetTimeout(jobLimit)
			t.Cleanup(func() { st.Close() })
			return st
		}
	}
	t.Run("hash", func(t *testing.T) {
		all := store.NewHash()
		f(t, opened(t, func() (store.Store, error) { return all.Clone(t.Context()) }))
	})
	t.Run("file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "store")
		f(t, opened(t, func() (store.Store, error) { return store.NewFile(path, -1) }))
	})
	t.Run("tcp", func(t *testing.T) {
		server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
		t.Cleanup(func() { server.Close() })
		f(t, opened(t, func() (store.Store, error) { return tcp.New(t.Context(), server.Addr().String()) }))
	})
	t.Run("redis", func(t *testing.T) {
		addr := redisServer(t)
		if addr == "" {
			t.Skip("redis-server is not installed")
		}
		f(t, opened(t, func() (store.Store, error) {
			return redis.New(t.Context(), "redis://"+addr+"/0?prefix=tidy")
		}))
	})
}

// TestClosedGroupsTakeTheirKeys: what groups write to meet is gone when they are closed. Of a run
// stays what does not grow with the number of runs.
func TestClosedGroupsTakeTheirKeys(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]pg.Options{
		"plain":              {},
		"DETAIL and barrier": {Detail: true, InitBarrier: true},
		"PyTorch 1's names":  {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyStore(t, func(t *testing.T, handle func() store.Store) {
				const size = 3
				var handles [size]store.Store
				for r := range handles {
					if handles[r] = handle(); name == "PyTorch 1's names" {
						handles[r] = pg.Torch1{Store: handles[r]}
					}
				}
				var left []string
				for run := range 2 {
					closeOneRun(t, handles[:], o)
					keys := must.Get(handles[0].ListKeys(t.Context()))
					keys = slices.DeleteFunc(keys, func(k string) bool { return k == "program's" })
					slices.Sort(keys)
					if run == 0 {
						left = keys
						require.LessOrEqual(t, len(left), size+2, "a counter for each rank, the last turn and the last rank 0: %v", left)
					}
					require.Equal(t, left, keys)
				}
			})
		})
	}
}

// closeOneRun makes groups of every kind and closes them. A key that the program writes stays.
func closeOneRun(t *testing.T, handles []store.Store, o pg.Options) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	o.Backend, o.Timeout = "cpu:gloo", jobLimit
	var all errgroup.Group
	for r, st := range handles {
		all.Go(func() (err error) {
			defer must.Catch(&err)
			g := must.Get(pg.New(ctx, st, r, len(handles), o))
			defer g.Close()
			must.Do(g.Store().Set(ctx, "k", nil))
			must.Get(g.Store().Delete(ctx, "k"))
			for range 3 {
				sub := must.Get(g.NewGroup(ctx, []int{0, 2}))
				sub.Close()
				if r == 1 {
					continue
				}
				// Of one name each time.
				local := must.Get(g.NewGroup(ctx, []int{0, 2}, pg.GroupOptions{Local: true}))
				must.Do(pg.Wait(local.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum())))
				local.Close()
			}
			return must.Get(g.Split(ctx, r%2, 0)).Close()
		})
	}
	require.NoError(t, all.Wait())
}

// A rank outside the group may come when the members have closed it. Until then the list of
// members stays, and the rank still finds a difference.
func TestASlowRankFindsTheListOfAClosedGroup(t *testing.T) {
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var membersDone sync.WaitGroup
	membersDone.Add(2)
	var all errgroup.Group
	for r := range 3 {
		all.Go(func() (err error) {
			defer must.Catch(&err)
			st := must.Get(tcp.New(ctx, server.Addr().String()))
			defer st.Close()
			g, err := pg.New(ctx, st, r, 3, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
			if err != nil {
				return err
			}
			defer g.Close()
			for range 2 { // the second time with a difference
				if r == 2 {
					membersDone.Wait()
					must.Get(g.NewGroup(ctx, []int{0, 1}))
					require.ErrorIs(t, must.Err(g.NewGroup(ctx, []int{0, 2})), pg.ErrGroupMismatch)
					return nil
				}
				sub := must.Get(g.NewGroup(ctx, []int{0, 1}))
				sub.Close()
			}
			membersDone.Done()
			return nil
		})
	}
	require.NoError(t, all.Wait())
	st := must.Get(tcp.New(ctx, server.Addr().String(), tcp.Options{Timeout: 10 * time.Second}))
	defer st.Close()
	keys := must.Get(st.ListKeys(ctx))
	for _, k := range keys {
		require.NotContains(t, k, "lists/1", "the last rank has seen the list of the first group")
		if strings.HasSuffix(k, "lists/2") {
			return
		}
	}
	require.Fail(t, "the list of the second group is gone", "%v", keys)
}
