package cuda_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestF33Phases: a collective through the hosts in one piece has three phases: the copy to the host, the host's part,
// and the copy back. On the virtual clock they take as long as the whole, to 5 %.
func TestF33Phases(t *testing.T) {
	const n = 1 << 20
	one := func(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }
	parts := func(t *tensor.Tensor, k int) (all []*tensor.Tensor) {
		for i := range k {
			part, err := t.Slice(0, i*t.Len()/k, (i+1)*t.Len()/k)
			if err != nil {
				panic(err)
			}
			all = append(all, part)
		}
		return all
	}
	for name, call := range map[string]func(x *rank, r int, t *tensor.Tensor) (*work.Work, error){
		"all_reduce_coalesced": func(x *rank, _ int, t *tensor.Tensor) (*work.Work, error) {
			return x.b.AllReduceCoalesced(x.ctx, one(t), backend.AllReduceOptions{})
		},
		"broadcast": func(x *rank, _ int, t *tensor.Tensor) (*work.Work, error) {
			return x.b.Broadcast(x.ctx, one(t), backend.BroadcastOptions{})
		},
		"reduce": func(x *rank, _ int, t *tensor.Tensor) (*work.Work, error) {
			return x.b.Reduce(x.ctx, t, backend.ReduceOptions{})
		},
		"all_gather": func(x *rank, r int, t *tensor.Tensor) (*work.Work, error) {
			return x.b.AllGatherIntoTensor(x.ctx, t, parts(t, 2)[r], backend.AllGatherOptions{})
		},
		"reduce_scatter": func(x *rank, r int, t *tensor.Tensor) (*work.Work, error) {
			return x.b.ReduceScatterTensor(x.ctx, parts(t, 2)[r], t, backend.ReduceScatterOptions{})
		},
		"all_to_all": func(x *rank, _ int, t *tensor.Tensor) (*work.Work, error) {
			quarters := parts(t, 4)
			return x.b.AllToAll(x.ctx, quarters[:2], quarters[2:], backend.AllToAllOptions{})
		},
	} {
		t.Run(name, virtually(func(t *testing.T) {
			s := setup{size: 2, sim: sim.Config{Devices: 2}, options: cuda.Options{Chunk: n, AllReduce: cuda.HostWork, Broadcast: cuda.BroadcastHost}}
			phases := map[string]time.Duration{}
			var first, last time.Duration
			for _, x := range timeline(t, s, n, func(x *rank, r int) (err error) {
				defer must.Catch(&err)
				return must.Get(x.b.Barrier(x.ctx, backend.BarrierOptions{})).Wait(x.ctx)
			}, call) {
				if !strings.HasPrefix(x.Stream, "rank 0/") && x.Stream != "host of rank 0" || x.End == x.Start {
					continue
				}
				phase := "host"
				for _, at := range []string{"down", "up"} {
					if strings.Contains(x.Stream, fmt.Sprintf("rank 0 %s.0", at)) {
						phase = at
					}
				}
				phases[phase] += x.End - x.Start
				if first == 0 {
					first = x.Start
				}
				first, last = min(first, x.Start), max(last, x.End)
			}
			t.Log(phases, last-first)
			require.NotZero(t, phases["host"])
			sum := phases["down"] + phases["host"] + phases["up"]
			require.InEpsilon(t, float64(last-first), float64(sum), 0.05, "%v, and the whole took %v", phases, last-first)
		}))
	}
}
