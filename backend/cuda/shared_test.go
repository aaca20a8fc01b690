package cuda_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestExchange all-reduces through memory that the ranks share, with crews of several
// goroutines, several operations at a time. Ranks differ in how their tensors lie,
// on which device, and how many there are.
func TestExchange(t *testing.T) {
	defer cuda.SetCrew(3, 128)()
	dtypes := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Int8, tensor.Complex64, tensor.Float64, tensor.Bool}
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		size := 2 + rng.IntN(3)
		w := newWorld(t, setup{
			size: size, timeout: patience, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s},
			options: cuda.Options{AllReduce: cuda.HostWork, Chunk: 64 + rng.IntN(3000), Slots: 1 + rng.IntN(4)},
		})
		type program struct {
			d  tensor.DType
			op backend.ReduceOp
			n  int
		}
		var ps []program
		for range 6 {
			p := program{d: dtypes[rng.IntN(len(dtypes))], op: backend.Sum, n: 1 + rng.IntN(3000)}
			if p.d == tensor.Float32 {
				p.op = []backend.ReduceOp{backend.Avg, backend.Max, backend.PreMulSum(2), backend.Product}[rng.IntN(4)]
			}
			ps = append(ps, p)
		}
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			var calls [][]*pair
			var works []*work.Work
			for _, p := range ps {
				var all []*pair
				var ts []*tensor.Tensor
				for range 1 + rng.IntN(4)/3 {
					q, err := x.pairOf(rng, p.d, rng.IntN(4)/3, laid(rng.IntN(6)/2, p.n), true)
					if err != nil {
						return err
					}
					all, ts = append(all, q), append(ts, q.dev)
				}
				v, err := x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: p.op})
				if err != nil {
					return err
				}
				calls, works = append(calls, all), append(works, v)
			}
			for i, all := range calls {
				for _, q := range all {
					if err := works[i].Synchronize(x.stream[q.device]); err != nil {
						return err
					}
					if err := x.back(q); err != nil {
						return err
					}
				}
			}
			for i, all := range calls {
				var ts []*tensor.Tensor
				for _, q := range all {
					ts = append(ts, q.cpu)
				}
				v, err := x.cpu.AllReduce(x.ctx, ts, backend.AllReduceOptions{Op: ps[i].op})
				if err != nil {
					return err
				}
				if err := work.WaitAll(x.ctx, works[i], v); err != nil {
					return err
				}
				for _, q := range all {
					if err := x.check(q); err != nil {
						return err
					}
				}
			}
			return nil
		})
		require.Contains(t, w.ranks[0].b.Explain().Choices[0].Why, "memory that the ranks share")
		w.end()
	})
}
