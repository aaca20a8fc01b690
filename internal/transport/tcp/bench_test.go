package tcp

import (
	"fmt"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

// await ends a request, by polling if the mesh does.
func await(m *Mesh, r *transport.Request) {
	m.PollUntil(waiter{r})
	<-r.Done()
}

// eachWay runs a benchmark for two ranks, asleep and polling, with messages of several sizes.
func eachWay(b *testing.B, sizes []int, run func(b *testing.B, ms []*Mesh, n int)) {
	for _, way := range []struct {
		name string
		poll time.Duration
	}{{"asleep", -1}, {"polling", pollFor}} {
		for _, n := range sizes {
			b.Run(fmt.Sprintf("%s/%d", way.name, n), func(b *testing.B) {
				o := local
				o.Poll = way.poll
				ms := join(b, 2, o)
				b.ReportAllocs()
				b.ResetTimer()
				run(b, ms, n)
			})
		}
	}
}

func BenchmarkPingPong(b *testing.B) {
	eachWay(b, []int{4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}, func(b *testing.B, ms []*Mesh, n int) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			s, r := req(0, 1, make([]byte, n)), req(0, 1, make([]byte, n))
			ms[1].Recv(r)
			for i := range b.N {
				await(ms[1], r)
				if i+1 < b.N {
					ms[1].Recv(r)
				}
				ms[1].Send(s)
				await(ms[1], s)
			}
		}()
		s, r := req(1, 1, make([]byte, n)), req(1, 1, make([]byte, n))
		for range b.N {
			ms[0].Recv(r)
			ms[0].Send(s)
			await(ms[0], s)
			await(ms[0], r)
		}
		<-done
	})
}

// Both ranks send and receive at the same time, as in an all-reduce of two.
func BenchmarkExchange(b *testing.B) {
	eachWay(b, []int{4, 1 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20, 8 << 20, 32 << 20}, func(b *testing.B, ms []*Mesh, n int) {
		run := func(i int) {
			s, r := req(1-i, 1, make([]byte, n)), req(1-i, 1, make([]byte, n))
			for range b.N {
				ms[i].Recv(r)
				ms[i].Send(s)
				await(ms[i], s)
				await(ms[i], r)
			}
		}
		done := make(chan struct{})
		go func() { defer close(done); run(1) }()
		b.SetBytes(int64(n))
		run(0)
		<-done
	})
}
