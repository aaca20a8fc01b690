package run_test

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/sockets"
	"github.com/c10d-go/c10d/internal/testcerts"
	"github.com/c10d-go/c10d/store"
)

// TestALoopbackStoreMeansLoopback has groups listen and connect within the host
// where only the host reaches their store.
func TestALoopbackStoreMeansLoopback(t *testing.T) {
	for _, wire := range []gloo.Wire{gloo.WireAuto, gloo.WireTCP, gloo.WireGloo} {
		t.Run(string(wire), func(t *testing.T) {
			bs := connected(t, time.Minute, wire, wire, wire, wire)
			var wg sync.WaitGroup
			for _, b := range bs {
				wg.Go(func() {
					assert.NoError(t, wait(b.AllReduce(context.Background(), list(vec(1, 2)), backend.AllReduceOptions{})))
				})
			}
			wg.Wait()
			all := must.Get(sockets.Of(os.Getpid()))
			require.NotEmpty(t, all)
			for _, s := range all {
				require.True(t, s.IsLoopback(), "%v", s)
			}
		})
	}
}

// blind is a store that cannot tell by which address it is reached.
type blind struct{ store.Store }

// TestWhereRanksListen has what is asked for win over the store's address.
func TestWhereRanksListen(t *testing.T) {
	listens := func(st store.Store, o gloo.Options) (all []sockets.Socket) {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error)
		go func() {
			_, err := gloo.New(ctx, backend.Options{Store: st, Size: 2, Timeout: time.Minute, Specific: o})
			ended <- err
		}()
		require.NoError(t, st.Wait(t.Context(), "0/0")) // the rank has published where it listens
		found := must.Get(sockets.Of(os.Getpid()))
		for _, s := range found {
			if s.Listens {
				all = append(all, s)
			}
		}
		cancel()
		require.Error(t, <-ended)
		return all
	}
	open := listens(blind{store.NewHash()}, gloo.Options{})
	require.Len(t, open, 2)
	require.False(t, open[0].IsLoopback() && open[1].IsLoopback(), "%v", open)
	for _, s := range listens(blind{store.NewHash()}, gloo.Options{Interfaces: []string{"lo"}}) {
		require.True(t, s.IsLoopback(), "%v", s)
	}
	for _, wire := range []gloo.Wire{gloo.WireNative, gloo.WireTCP} {
		require.Len(t, listens(store.NewHash(), gloo.Options{Wire: wire}), 1, "nothing listens for Gloo's wire")
	}
	require.Len(t, listens(store.NewHash(), gloo.Options{TLS: testcerts.Config(t)}), 1)
	open = listens(store.NewHash(), gloo.Options{Address: "0.0.0.0"})
	require.Len(t, open, 2)
	require.NotEqual(t, open[0].IsLoopback(), open[1].IsLoopback(), "%v", open)
}
