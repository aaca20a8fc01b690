package pg_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

// TestReasonIsTold: a rank that cannot make the group says why, and the others do not wait for
// their timeout. No store has to notice anything for that.
func TestReasonIsTold(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) store.Store{
		"memory": func(*testing.T) store.Store { return store.NewHash() },
		"file": func(t *testing.T) store.Store {
			s, err := store.NewFile(filepath.Join(t.TempDir(), "f"), 3)
			if err != nil {
				t.Skip(err)
			}
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			st := open(t)
			defer st.Close()
			var all sync.WaitGroup
			for r := range 3 {
				all.Go(func() {
					o := pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}
					if r == 1 {
						o.BackendOptions = pg.BackendOptions{gloo.Options{Interfaces: []string{"no-such-interface"}}}
					}
					begun := time.Now()
					_, err := pg.New(t.Context(), store.Prefix("default_pg", st), r, 3, o)
					var f *pg.GroupFault
					switch {
					case r == 1:
						require.NotErrorAs(t, err, &f)
					case !errors.As(err, &f) || f.Rank != 1 || f.By != 1:
						t.Errorf("rank %d: %v", r, err)
					}
					require.ErrorContains(t, err, "no-such-interface")
					require.Less(t, time.Since(begun), jobLimit/2)
				})
			}
			all.Wait()
		})
	}
}

// TestCancelIsTold: a rank whose caller gives up is named, with the caller's reason.
func TestCancelIsTold(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	why := errors.New("the user pressed a key")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	groups := make([]*pg.ProcessGroup, 3)
	var all sync.WaitGroup
	for r := range 3 {
		all.Go(func() {
			g := must.Get(pg.New(t.Context(), st, r, 3, pg.Options{Backend: "cpu:gloo", Timeout: jobLimit}))
			groups[r] = g
		})
	}
	all.Wait()
	for r, g := range groups {
		if g == nil {
			return
		}
		defer g.Close()
		if r == 2 {
			continue // it does not make the group, so the others wait
		}
		all.Go(func() {
			own := t.Context()
			if r == 1 {
				own = ctx
			}
			_, err := g.NewGroup(own, []int{0, 1, 2})
			require.ErrorContains(t, err, why.Error())
			var f *pg.GroupFault
			if r == 0 && (!errors.As(err, &f) || f.Rank != 1) {
				t.Errorf("rank 0: %v", err)
			}
		})
	}
	cancel(why)
	all.Wait()
}
