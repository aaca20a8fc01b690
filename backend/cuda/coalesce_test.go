package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestCoalesced has lists of tensors, of which one is too large to go with the others. The others go in
// one launch, with one for every 128 tensors that are brought in order or back.
func TestCoalesced(t *testing.T) {
	for _, size := range []int{2, 3} {
		for _, many := range []int{2, 100, 140} {
			for _, large := range []bool{false, true} {
				for name, c := range map[string]struct {
					in, out int // ranks in a tensor; 0: there is none
					packs   int // lists of so many tensors
					do      func(b backend.Backend, x *rank, out, in []*tensor.Tensor) (*work.Work, error)
				}{
					"all_reduce": {out: 1, packs: 1, do: func(b backend.Backend, x *rank, out, _ []*tensor.Tensor) (*work.Work, error) {
						return b.AllReduceCoalesced(x.ctx, out, backend.AllReduceOptions{Op: backend.Avg()})
					}},
					"all_gather": {out: size, in: 1, packs: size, do: func(b backend.Backend, x *rank, out, in []*tensor.Tensor) (*work.Work, error) {
						return b.AllGatherIntoTensorCoalesced(x.ctx, out, in, backend.AllGatherOptions{})
					}},
					"reduce_scatter": {out: 1, in: size, packs: size, do: func(b backend.Backend, x *rank, out, in []*tensor.Tensor) (*work.Work, error) {
						return b.ReduceScatterTensorCoalesced(x.ctx, out, in, backend.ReduceScatterOptions{Op: backend.Sum()})
					}},
				} {
					if large != (many > 128) && testsize.Of(true, size > 2, false) {
						continue
					}
					t.Run(fmt.Sprintf("%s, %d ranks, %d tensors, large %v", name, size, many, large), virtually(func(t *testing.T) {
						w := newWorld(t, directly(size))
						w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
						launches := w.launches()
						w.each(func(x *rank, r int) error {
							rng := rand.New(rand.NewPCG(uint64(many), uint64(r)))
							var outs, ins []*pair
							for i := range many {
								n := 1 + i%50
								if large && i == 1 {
									n = 300_000 // of an all_reduce more than one-shot takes
								}
								p := must.Get(x.pairOf(rng, tensor.Float32, r, flat(n*c.out), true))
								outs = append(outs, p)
								if c.in == 0 {
									continue
								}
								p = must.Get(x.pairOf(rng, tensor.Float32, r, flat(n*c.in), true))
								ins = append(ins, p)
							}
							run := func(b backend.Backend, of func(p *pair) *tensor.Tensor) error {
								var out, in []*tensor.Tensor
								for _, p := range outs {
									out = append(out, of(p))
								}
								for _, p := range ins {
									in = append(in, of(p))
								}
								v, err := c.do(b, x, out, in)
								if err != nil {
									return err
								}
								return v.Wait(x.ctx)
							}
							must.Do(run(x.b, func(p *pair) *tensor.Tensor { return p.dev }))
							must.Do(run(x.cpu, func(p *pair) *tensor.Tensor { return p.cpu }))
							for _, p := range append(outs, ins...) {
								must.Do(x.back(p))
								must.Do(x.check(p))
							}
							return nil
						})
						joined := many
						if large {
							joined--
						}
						lists := func(n int) int {
							if n <= 2 {
								return 0 // copies
							}
							return (n + 127) / 128
						}
						other := lists(joined) // the shorter one of input and output, of an all_reduce the output
						want := lists(joined*c.packs) + other + 1
						if large {
							want++ // the large one
						}
						if joined == 1 {
							want = 2 // each apart
						}
						require.EqualValues(t, size*want, launches.Load())
						w.end()
					}))
				}
			}
		}
	}
}
