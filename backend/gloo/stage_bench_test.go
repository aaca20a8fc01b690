package gloo

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/chain"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// stageChunk is the size of the stage's chunks for each member: blocks of that size go over the
// wire.
const stageChunk = 256 << 10

// BenchmarkStage all-reduces the same bytes in turn with the network stage of clusters and with the
// executor of plans, by a ring on the same mesh. It reports the least and the median time of each,
// and how fast the stage is as a share of the ring.
func BenchmarkStage(b *testing.B) {
	sum, err := backend.Sum().Reduction(tensor.Float32, 2)
	require.NoError(b, err)
	for _, n := range []int{2, 3, 4} {
		for size := 64 << 10; size <= 64<<20; size *= 4 {
			b.Run(fmt.Sprintf("%d/%dKiB", n, size>>10), func(b *testing.B) {
				ms := benchMeshes(b, n)
				members := make([]int, n)
				for r := range members {
					members[r] = r
				}
				engines, stages, bufs := make([]*engine, n), make([]*chain.Stage, n), make([][]byte, n)
				for r, m := range ms {
					engines[r] = newEngine(&session{rank: r, size: n, meshes: []transport.Mesh{m}, tcp: m})
					stages[r] = chain.New(m)
					bufs[r] = make([]byte, size)
				}
				tag := uint32(0)
				each := func(run func(r int) error) time.Duration {
					tag++
					var wg sync.WaitGroup
					start := time.Now()
					for r := range n {
						wg.Go(func() {
							if err := run(r); err != nil {
								b.Errorf("rank %d: %v", r, err)
							}
						})
					}
					wg.Wait()
					return time.Since(start)
				}
				plans := make([]*plan.Plan, n)
				ring, _ := plan.Lookup(plan.OpAllReduce, "ring")
				for r := range plans {
					plans[r] = ring.Plan(plan.Call{Rank: r, Size: n, Bytes: int64(size), Elem: 4, Chunk: ringChunk})
				}
				chunk := min(size, n*stageChunk)
				var times [2][]time.Duration
				for b.Loop() {
					times[0] = append(times[0], each(func(r int) error {
						e := engines[r]
						e.begin(&operation{ctx: context.Background(), timeout: time.Minute, prefix: prefixAllReduce, tag: tag})
						defer e.end()
						return e.run(plans[r], bufs[r], nil, sum.Combine)
					}))
					times[1] = append(times[1], each(func(r int) error {
						c := chain.Collective{
							Kind: chain.AllReduce, Members: members, Slot: slotOf(prefixAllReduce, tag), Chunks: (size + chunk - 1) / chunk, Elem: 4,
							Chunk:   func(k int) []byte { return bufs[r][k*chunk : min((k+1)*chunk, size)] },
							Combine: sum.Combine,
						}
						call, err := stages[r].Begin(&c)
						for k := range c.Chunks {
							if err == nil {
								err = call.Ready(k)
							}
						}
						if err != nil {
							return err
						}
						return stages[r].Wait(context.Background())
					}))
				}
				b.ReportMetric(0, "ns/op")
				for i, name := range []string{"ring", "stage"} {
					slices.Sort(times[i])
					b.ReportMetric(float64(times[i][0].Microseconds()), name+"-min-us")
					b.ReportMetric(float64(times[i][len(times[i])/2].Microseconds()), name+"-median-us")
				}
				share := func(i int) float64 { return float64(times[0][i]) / float64(times[1][i]) }
				b.ReportMetric(share(0), "share-min")
				b.ReportMetric(share(len(times[0])/2), "share-median")
			})
		}
	}
}

// ringChunk is the ring's.
const ringChunk = 256 << 10

func benchMeshes(b *testing.B, n int) []*tcp.Mesh {
	es, addrs := make([]*tcp.Endpoint, n), make([]string, n)
	for r := range es {
		e, err := tcp.Listen(tcp.Options{Host: "127.0.0.1"})
		require.NoError(b, err)
		es[r], addrs[r] = e, e.Addr()
	}
	ms, errs := make([]*tcp.Mesh, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range es {
		wg.Go(func() { ms[r], errs[r] = es[r].Join(context.Background(), r, addrs) })
	}
	wg.Wait()
	for r, err := range errs {
		require.NoError(b, err)
		b.Cleanup(func() { ms[r].Close() })
	}
	return ms
}
