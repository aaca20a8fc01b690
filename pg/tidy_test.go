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

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
	"github.com/c10d-go/c10d/store/tcp"
)

// everyStore runs f with each kind of store that can delete keys. handle returns one rank's.
func everyStore(t *testing.T, f func(t *testing.T, handle func() store.Store)) {
	opened := func(t *testing.T, open func() (store.Store, error)) func() store.Store {
		return func() store.Store {
			st, err := open()
			require.NoError(t, err)
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
		server, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
		require.NoError(t, err)
		t.Cleanup(func() { server.Close() })
		f(t, opened(t, func() (store.Store, error) { return tcp.New(t.Context(), server.Addr().String(), tcp.Options{}) }))
	})
	t.Run("redis", func(t *testing.T) {
		addr := redisServer(t)
		if addr == "" {
			t.Skip("redis-server is not installed")
		}
		f(t, opened(t, func() (store.Store, error) {
			return redis.New(t.Context(), "redis://"+addr+"/0?prefix=tidy", redis.Options{})
		}))
	})
}

// TestClosedGroupsTakeTheirKeys: what groups write to meet is gone when they are closed. Of a run
// stays what does not grow with the number of runs.
func TestClosedGroupsTakeTheirKeys(t *testing.T) {
	for name, o := range map[string]pg.Options{
		"plain":              {},
		"DETAIL and barrier": {Detail: true, InitBarrier: true},
		"PyTorch 1's names":  {Dialect: store.DialectV1},
	} {
		t.Run(name, func(t *testing.T) {
			everyStore(t, func(t *testing.T, handle func() store.Store) {
				const size = 3
				var handles [size]store.Store
				for r := range handles {
					handles[r] = handle()
				}
				var left []string
				for run := range 2 {
					closeOneRun(t, handles[:], o)
					keys, err := handles[0].ListKeys(t.Context())
					require.NoError(t, err)
					keys = slices.DeleteFunc(keys, func(k string) bool { return k == "program's" })
					slices.Sort(keys)
					if run == 0 {
						left = keys
						require.LessOrEqual(t, len(left), size+1, "%v", left)
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
		all.Go(func() error {
			g, err := pg.New(ctx, st, r, len(handles), o)
			if err != nil {
				return err
			}
			defer g.Close()
			if err := g.Store().Set(ctx, "k", nil); err != nil {
				return err
			}
			if _, err := g.Store().Delete(ctx, "k"); err != nil {
				return err
			}
			for range 3 {
				sub, err := g.NewGroup(ctx, []int{0, 2}, pg.GroupOptions{})
				if err != nil {
					return err
				}
				sub.Close()
				if r == 1 {
					continue
				}
				// Of one name each time.
				local, err := g.NewGroup(ctx, []int{0, 2}, pg.GroupOptions{Local: true})
				if err != nil {
					return err
				}
				if err := pg.AllReduceSlice(ctx, local, []float32{1}, backend.Sum()); err != nil {
					return err
				}
				local.Close()
			}
			part, err := g.Split(ctx, r%2, 0, pg.GroupOptions{})
			if err != nil {
				return err
			}
			return part.Close()
		})
	}
	require.NoError(t, all.Wait())
}

// A rank outside the group may come when the members have closed it. Until then the list of
// members stays, and the rank still finds a difference.
func TestASlowRankFindsTheListOfAClosedGroup(t *testing.T) {
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
	require.NoError(t, err)
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var membersDone sync.WaitGroup
	membersDone.Add(2)
	var all errgroup.Group
	for r := range 3 {
		all.Go(func() error {
			st, err := tcp.New(ctx, server.Addr().String(), tcp.Options{})
			if err != nil {
				return err
			}
			defer st.Close()
			g, err := pg.New(ctx, st, r, 3, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit})
			if err != nil {
				return err
			}
			defer g.Close()
			for range 2 { // the second time with a difference
				if r == 2 {
					membersDone.Wait()
					if _, err := g.NewGroup(ctx, []int{0, 1}, pg.GroupOptions{}); err != nil {
						return err
					}
					_, err := g.NewGroup(ctx, []int{0, 2}, pg.GroupOptions{})
					require.ErrorIs(t, err, pg.ErrLists)
					return nil
				}
				sub, err := g.NewGroup(ctx, []int{0, 1}, pg.GroupOptions{})
				if err != nil {
					return err
				}
				sub.Close()
			}
			membersDone.Done()
			return nil
		})
	}
	require.NoError(t, all.Wait())
	st, err := tcp.New(ctx, server.Addr().String(), tcp.Options{Timeout: 10 * time.Second})
	require.NoError(t, err)
	defer st.Close()
	keys, err := st.ListKeys(ctx)
	require.NoError(t, err)
	for _, k := range keys {
		require.NotContains(t, k, "lists/1", "the last rank has seen the list of the first group")
		if strings.HasSuffix(k, "lists/2") {
			return
		}
	}
	require.Fail(t, "the list of the second group is gone", "%v", keys)
}
