package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCalls is one client's calls, one after the other, on loopback.
func BenchmarkCalls(b *testing.B) {
	for name, d := range dialects {
		s := join(b, local, Options{Server: true, dialect: d})
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
