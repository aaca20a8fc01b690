package pg_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

// BenchmarkSetup makes and closes whole groups, whose ranks are goroutines with a
// client of one TCP store each: the time from the first call of New until all
// ranks have their group.
func BenchmarkSetup(b *testing.B) {
	for _, wire := range []gloo.Wire{gloo.WireNative, gloo.WireTCP, gloo.WireGloo} {
		for _, size := range []int{2, 4, 8, 16, 32} {
			b.Run(fmt.Sprintf("%s/ranks=%d", wire, size), func(b *testing.B) {
				ctx := context.Background()
				srv, err := tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{})
				require.NoError(b, err)
				defer srv.Close()
				stores := make([]store.Store, size)
				for r := range stores {
					stores[r], err = tcp.New(ctx, srv.Addr().String(), tcp.Options{WorldSize: size})
					require.NoError(b, err)
					defer stores[r].Close()
				}
				groups, errs := make([]*pg.ProcessGroup, size), make([]error, size)
				for i := 0; b.Loop(); i++ {
					o := pg.Options{Name: fmt.Sprint(i), BackendOptions: []backend.SpecificOptions{gloo.Options{Wire: wire}}}
					var wg sync.WaitGroup
					for r := range size {
						wg.Go(func() { groups[r], errs[r] = pg.New(ctx, stores[r], r, size, o) })
					}
					wg.Wait()
					b.StopTimer()
					require.NoError(b, errors.Join(errs...))
					for _, g := range groups {
						wg.Go(func() { g.Close() })
					}
					wg.Wait()
					b.StartTimer()
				}
				b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/group")
			})
		}
	}
}
