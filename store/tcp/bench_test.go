package tcp

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/store"
)

// BenchmarkCalls is one client's calls, one after the other, on loopback.
func BenchmarkCalls(b *testing.B) {
	for name, d := range dialects {
		s := join(b, local, Options{Server: true, Dialect: d})
		ctx, value := b.Context(), []byte("127.0.0.1:12345")
		require.NoError(b, s.Set(ctx, "k", value))
		for call, f := range map[string]func() error{
			"set":  func() error { return s.Set(ctx, "k", value) },
			"get":  func() error { _, err := s.Get(ctx, "k"); return err },
			"add":  func() error { _, err := s.Add(ctx, "n", 1); return err },
			"wait": func() error { return s.Wait(ctx, "k") },
		} {
			b.Run(call+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if err := f(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkAddClients is what a server does for many clients at once, each in
// its own goroutine; an op is one call.
func BenchmarkAddClients(b *testing.B) {
	for _, n := range []int{10, 100} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			server := serve(b, ServerOptions{})
			clients := make(chan *Store, n)
			for range n {
				clients <- join(b, server.Addr().String(), Options{})
			}
			b.SetParallelism(n)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				s := <-clients
				defer func() { clients <- s }()
				for pb.Next() {
					if _, err := s.Add(b.Context(), "n", 1); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// BenchmarkBarrier is store.Barrier of n clients, all in this process.
func BenchmarkBarrier(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			server := serve(b, ServerOptions{})
			clients := make([]*Store, n)
			for i := range clients {
				clients[i] = join(b, server.Addr().String(), Options{})
			}
			var round atomic.Int64
			for b.Loop() {
				key := fmt.Sprint(round.Add(1))
				var g errgroup.Group
				for _, s := range clients {
					g.Go(func() error { return store.Barrier(b.Context(), s, key, n) })
				}
				if err := g.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkJoin is New and Close of a client.
func BenchmarkJoin(b *testing.B) {
	server := serve(b, ServerOptions{})
	for b.Loop() {
		s, err := New(b.Context(), server.Addr().String(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

// BenchmarkLarge is Set and Get of 8 MiB.
func BenchmarkLarge(b *testing.B) {
	s := join(b, local, Options{Server: true})
	v := make([]byte, 8<<20)
	b.SetBytes(int64(2 * len(v)))
	for b.Loop() {
		require.NoError(b, s.Set(b.Context(), "k", v))
		_, err := s.Get(b.Context(), "k")
		require.NoError(b, err)
	}
}
