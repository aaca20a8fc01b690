package tcp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"
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

// BenchmarkExchange is what the ranks of a group do with a store: each sets one
// key and takes those of all, at the same time and all in this process.
func BenchmarkExchange(b *testing.B) {
	value := make([]byte, 136)
	for _, n := range []int{16, 64, 256, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			server := serve(b, ServerOptions{})
			clients := make([]*Store, n)
			for i := range clients {
				clients[i] = join(b, server.Addr().String(), Options{})
			}
			round := 0
			for b.Loop() {
				round++
				keys := make([]string, n)
				for i := range keys {
					keys[i] = fmt.Sprintf("group/%d/%d", round, i)
				}
				var g errgroup.Group
				for i, s := range clients {
					g.Go(func() error {
						if err := s.Set(b.Context(), keys[i], value); err != nil {
							return err
						}
						_, err := s.MultiGet(b.Context(), keys)
						return err
					})
				}
				if err := g.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
