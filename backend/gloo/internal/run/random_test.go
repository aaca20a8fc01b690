package run_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/work"
)

// TestNothingHangs has ranks issue a common list of operations while one of
// them dies, stops, aborts, cancels, forgets one or closes early: every Work
// and every Close ends, within the timeout.
func TestNothingHangs(t *testing.T) {
	const limit = 10 * time.Second
	for range testsize.Of(40, 80, 500) {
		seed := must.Seed(t)
		run.VirtualTime(t, func(t *testing.T) {
			common := rand.New(rand.NewPCG(seed, 0))
			size, interfaces, workers := 1+common.IntN(4), 1+common.IntN(2), 1+common.IntN(3)
			culprit, fault, at := common.IntN(size), common.IntN(7), common.IntN(20)
			ops := make([]int, 20)
			for i := range ops {
				ops[i] = common.IntN(6)
			}
			f := mem.NewFabric()
			var wg sync.WaitGroup
			for r := range size {
				o := over(f, r, size, interfaces, workers)
				o.Timeout = limit
				b := join(t, o)
				own := rand.New(rand.NewPCG(seed, uint64(r)+1))
				wg.Go(func() {
					var works []*work.Work
					for i, op := range ops {
						ctx, cancel := context.WithCancel(context.Background())
						defer cancel()
						if r == culprit && i == at {
							switch fault {
							case 0:
								f.Kill("", r)
							case 1:
								f.Freeze("", r)
							case 2:
								b.Abort(errors.New("enough"))
							case 3:
								time.AfterFunc(time.Duration(own.IntN(1000))*time.Millisecond, cancel)
							case 4:
								continue
							case 5:
								wg.Go(func() { b.Close() })
							}
						}
						time.Sleep(time.Duration(own.IntN(300)) * time.Millisecond)
						w, err := start(ctx, b, op, uint32(i))
						if err != nil {
							continue
						}
						if own.IntN(4) == 0 && w != nil {
							w.Wait(context.Background())
						}
						works = append(works, w)
					}
					start := time.Now()
					require.NoError(t, b.Close())
					for _, w := range works {
						require.True(t, w == nil || w.IsCompleted())
					}
					// What was queued begins its time when what was before has ended.
					require.Less(t, time.Since(start), 2*limit)
				})
			}
			wg.Wait()
		})
	}
}

func start(ctx context.Context, b *gloo.Backend, op int, tag uint32) (*work.Work, error) {
	right := (b.Rank() + 1) % b.Size()
	switch op {
	case 0:
		return b.AllReduce(ctx, list(vec(1, 2, 3)), backend.AllReduceOptions{})
	case 1:
		return b.Broadcast(ctx, list(vec(1)), backend.BroadcastOptions{Root: int(tag) % b.Size()})
	case 2:
		return b.Barrier(ctx, backend.BarrierOptions{})
	case 3:
		return nil, b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{})
	case 4:
		if _, err := b.Send(ctx, vec(1), right, backend.P2POptions{Tag: tag}); err != nil {
			return nil, err
		}
		return b.RecvAnySource(ctx, vec(1), backend.P2POptions{Tag: tag})
	}
	return b.AllGather(ctx, nil, vec(1), backend.AllGatherOptions{}) // refused
}
