package pg_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// What BenchmarkCollector tells the process of its other rank.
const (
	collectorStore = "PG_TEST_COLLECTOR_STORE"
	collectorWire  = "PG_TEST_COLLECTOR_WIRE"
)

// collected is a rank of BenchmarkCollector.
type collected struct {
	st   *tcp.Store
	g    *pg.ProcessGroup
	t    *tensor.Tensor
	done int
}

func newCollected(ctx context.Context, addr string, wire gloo.Wire, rank int) (x *collected, err error) {
	x = new(collected)
	if x.st, err = tcp.New(ctx, addr, tcp.Options{}); err != nil {
		return nil, err
	}
	o := pg.Options{BackendOptions: []backend.SpecificOptions{gloo.Options{Wire: wire}}}
	if x.g, err = pg.New(ctx, x.st, rank, 2, o); err != nil {
		return nil, err
	}
	data := make([]float32, 1<<30/4)
	for i := range data {
		data[i] = 1
	}
	x.t, err = tensor.Of(data, len(data))
	return x, err
}

func (x *collected) reduce(ctx context.Context) error {
	w, err := x.g.AllReduce(ctx, []*tensor.Tensor{x.t}, backend.AllReduceOptions{Op: backend.Max()})
	if err == nil {
		err = w.Wait(ctx)
	}
	x.done++
	return err
}

// next is the key that says whether there is another all-reduce.
func (x *collected) next() string { return fmt.Sprint("go on ", x.done) }

// TestCollectorRank is the other rank of BenchmarkCollector. By itself it does nothing.
func TestCollectorRank(t *testing.T) {
	addr := os.Getenv(collectorStore)
	if addr == "" {
		return
	}
	ctx := t.Context()
	x, err := newCollected(ctx, addr, gloo.Wire(os.Getenv(collectorWire)), 1)
	require.NoError(t, err)
	for {
		more, err := x.st.Get(ctx, x.next())
		require.NoError(t, err)
		if string(more) != "yes" {
			break
		}
		require.NoError(t, x.reduce(ctx))
	}
	require.NoError(t, x.g.Close())
	require.NoError(t, x.st.Close())
}

// BenchmarkCollector all-reduces 1 GiB with a rank in another process while the collector
// runs over and over. It prints for how long it stopped all goroutines at most: while a
// loop over memory that is written in assembly has not ended, none can go on.
func BenchmarkCollector(b *testing.B) {
	for _, wire := range []gloo.Wire{gloo.WireNative, gloo.WireTCP} {
		b.Run(string(wire), func(b *testing.B) {
			ctx := b.Context()
			srv, err := tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{})
			require.NoError(b, err)
			defer srv.Close()
			other := exec.CommandContext(ctx, os.Args[0], "-test.run", "^TestCollectorRank$")
			other.Env = append(os.Environ(), collectorStore+"="+srv.Addr().String(), collectorWire+"="+string(wire))
			other.Stdout, other.Stderr = os.Stderr, os.Stderr
			require.NoError(b, other.Start())
			x, err := newCollected(ctx, srv.Addr().String(), wire, 0)
			require.NoError(b, err)
			reduce := func() {
				require.NoError(b, x.st.Set(ctx, x.next(), []byte("yes")))
				require.NoError(b, x.reduce(ctx))
			}
			reduce()
			var over atomic.Bool
			var collector sync.WaitGroup
			before, cycles := stops(b), 0
			collector.Go(func() {
				for ; !over.Load(); cycles++ {
					runtime.GC()
				}
			})
			for b.Loop() {
				reduce()
			}
			over.Store(true)
			collector.Wait()
			most := time.Duration(0)
			for i, n := range stops(b).Counts {
				if n > before.Counts[i] {
					// A bucket of this length or up to a fifth less.
					most = time.Duration(min(before.Buckets[i+1], math.MaxInt32) * float64(time.Second))
				}
			}
			b.ReportMetric(float64(most.Microseconds()), "us-stopped-at-most")
			b.ReportMetric(float64(cycles)/float64(b.N), "collections/op")
			require.NoError(b, x.st.Set(ctx, x.next(), []byte("no")))
			require.NoError(b, x.g.Close())
			require.NoError(b, other.Wait())
			require.NoError(b, x.st.Close())
		})
	}
}

// stops returns for how long the collector has stopped all goroutines, and how often.
func stops(b *testing.B) *metrics.Float64Histogram {
	s := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
	metrics.Read(s)
	require.Equal(b, metrics.KindFloat64Histogram, s[0].Value.Kind())
	return s[0].Value.Float64Histogram()
}
