package copies_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/copies"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// TestBytes compares Bytes and Uncached with the built-in copy, also where source and destination overlap.
func TestBytes(t *testing.T) {
	for name, f := range map[string]func(dst, src []byte) int{"Bytes": copies.Bytes, "Uncached": copies.Uncached} {
		t.Run(name, func(t *testing.T) { testCopy(t, f) })
	}
}

func testCopy(t *testing.T, f func(dst, src []byte) int) {
	g := must.Rand(t)
	const room = 300 << 10
	got := make([]byte, room)
	for i := range got {
		got[i] = byte(g.Uint32())
	}
	want := slices.Clone(got)
	for range testsize.Of(100, 300, 1000) {
		most := []int{100, 5000, 20_000, room}[g.IntN(4)]
		dst, src := g.IntN(room), g.IntN(room)
		if g.IntN(3) == 0 {
			src = min(max(dst+g.IntN(200)-100, 0), room)
		}
		to, from := min(room, dst+g.IntN(most)), min(room, src+g.IntN(most))
		n := copy(want[dst:to], want[src:from])
		require.Equal(t, n, f(got[dst:to], got[src:from]), "%d:%d from %d:%d", dst, to, src, from)
		require.True(t, slices.Equal(want, got), "%d:%d from %d:%d", dst, to, src, from)
	}
	require.Zero(t, f(nil, got))
	require.Zero(t, f(got, nil))
}

// TestClaim: Claim changes nothing, whatever part of a line it gets.
func TestClaim(t *testing.T) {
	b := make([]byte, 1000)
	for i := range b {
		b[i] = byte(i)
	}
	want := slices.Clone(b)
	for at := range 130 {
		for _, n := range []int{0, 1, 63, 64, 65, 500} {
			copies.Claim(b[at:][:n])
		}
	}
	copies.Claim(b)
	copies.Claim(nil)
	require.Equal(t, want, b)
}

// BenchmarkBytes copies what another thread has written to where that thread reads.
func BenchmarkBytes(b *testing.B) {
	if runtime.GOMAXPROCS(0) < 2 {
		b.Skip("two threads need as many CPUs")
	}
	for _, c := range []struct {
		name string
		f    func(dst, src []byte) int
	}{{"copy", func(dst, src []byte) int { return copy(dst, src) }}, {"Bytes", copies.Bytes}, {"Uncached", copies.Uncached}} {
		for _, n := range []int{2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				src, dst := make([]byte, n), make([]byte, n)
				var turn atomic.Int64 // even: the other thread's
				var other sync.WaitGroup
				other.Go(func() {
					for i := range int64(b.N) {
						for turn.Load() != 2*i {
						}
						var v byte
						for at := 0; at < n; at += 64 {
							v += dst[at]
						}
						for at := range src {
							src[at] = v + byte(i)
						}
						turn.Add(1)
					}
				})
				var took time.Duration
				for i := range int64(b.N) {
					for turn.Load() != 2*i+1 {
					}
					begin := time.Now()
					c.f(dst, src)
					took += time.Since(begin)
					turn.Add(1)
				}
				other.Wait()
				b.ReportMetric(float64(took)/float64(b.N), "ns/op")
			})
		}
	}
}
