package tcp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
)

// BenchmarkPipelined is 16 clients with 64 calls at a time each, all in this
// process with the server; an op is one call.
func BenchmarkPipelined(b *testing.B) {
	const clients, calls = 16, 64
	value := []byte("127.0.0.1:12345")
	for _, op := range []struct {
		name string
		call func(context.Context, *Store, string) error
	}{
		{"set", func(ctx context.Context, s *Store, key string) error { return s.Set(ctx, key, value) }},
		{"get", func(ctx context.Context, s *Store, key string) error { _, err := s.Get(ctx, key); return err }},
	} {
		b.Run(op.name, func(b *testing.B) {
			server := serve(b, ServerOptions{})
			var stores [clients]*Store
			for i := range stores {
				stores[i] = join(b, server.Addr().String(), Options{})
			}
			var left atomic.Int64
			run := func(n int64) {
				left.Store(n)
				var wg sync.WaitGroup
				for i, s := range stores {
					for j := range calls {
						key := fmt.Sprintf("job/%d/%d", i, j)
						if err := s.Set(b.Context(), key, value); err != nil {
							b.Fatal(err)
						}
						wg.Go(func() {
							for left.Add(-1) >= 0 {
								if err := op.call(b.Context(), s, key); err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
				}
				wg.Wait()
			}
			b.ReportAllocs()
			b.ResetTimer()
			run(int64(b.N))
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), op.name+"/s")
		})
	}
}
