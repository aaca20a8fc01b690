package store_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// lookups counts the runs of TestLookup: a scheme is registered for good.
var lookups atomic.Int64

func TestLookup(t *testing.T) {
	_, err := store.Lookup("rediss")
	require.EqualError(t, err, `store: rediss:// is not in this program: add import _ "github.com/c10d-go/c10d/store/redis" to it`)
	_, err = store.Lookup("etcd")
	require.EqualError(t, err, `store: no store for scheme "etcd": there are env, tcp, file, redis, rediss and those of store.Register`)

	open := func(context.Context, string, store.OpenOptions) (store.Store, error) { return store.NewHash(), nil }
	scheme := fmt.Sprint("lookup", lookups.Add(1))
	store.Register(scheme, open)
	got := must.Get(store.Lookup(scheme))
	require.NoError(t, must.Get(got(t.Context(), scheme+"://h", store.OpenOptions{})).Close())
	require.PanicsWithValue(t, "store: Register called twice for scheme "+scheme, func() { store.Register(scheme, open) })
	require.Panics(t, func() { store.Register("", open) })
	require.Panics(t, func() { store.Register("nil", nil) })
}
