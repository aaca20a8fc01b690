package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// cliqueCase is a host whose devices have neither a mesh nor a ring.
type cliqueCase struct {
	name  string
	size  int
	apart func(a, b int) bool // which devices do not reach each other
	want  [][]int             // the clusters
	text  string              // what Explain says of them
}

var cliqueCases = []cliqueCase{
	{
		"two quads", 8, func(a, b int) bool { return a/4 != b/4 },
		[][]int{{0, 1, 2, 3}, {4, 5, 6, 7}}, "the devices of ranks 0-3 and of ranks 4-7 reach each other",
	},
	{
		"two pairs", 4, func(a, b int) bool { return a/2 != b/2 },
		[][]int{{0, 1}, {2, 3}}, "the devices of ranks 0-1 and of ranks 2-3 reach each other",
	},
	{
		"two pairs in turn", 4, func(a, b int) bool { return a%2 != b%2 },
		[][]int{{0, 2}, {1, 3}}, "the devices of ranks [0 2] and of ranks [1 3] reach each other",
	},
	{
		"three and one", 4, func(a, b int) bool { return a == 3 || b == 3 },
		[][]int{{0, 1, 2}, {3}}, "the devices of ranks 0-2 reach each other",
	},
	{
		"a pair and one", 3, func(a, b int) bool { return a == 0 || b == 0 },
		[][]int{{0}, {1, 2}}, "the devices of ranks 1-2 reach each other",
	},
	{
		"a star", 4, func(a, b int) bool { return a != 1 && b != 1 },
		[][]int{{0, 1}, {2}, {3}}, "the devices of ranks 0-1 reach each other",
	},
	{
		// Rank 2 could write to rank 3, which could not answer. Ranks 0 and 1 see nothing of that.
		"ranks see different peers", 4, func(a, b int) bool { return a/2 != b/2 || a == 3 && b == 2 },
		[][]int{{0, 1}, {2}, {3}}, "the devices of ranks 0-1 reach each other",
	},
	{
		"more than a mesh has", 10, func(a, b int) bool { return a/5 != b/5 },
		[][]int{{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}}, "the devices of ranks 0-4 and of ranks 5-9 reach each other",
	},
}

func (c cliqueCase) setup() setup {
	s := directly(c.size)
	s.sim.Topology.NoPeer = c.apart
	return s
}

// clusterOps are the operations that go through clusters.
var clusterOps = []work.OpType{
	work.AllReduce, work.AllReduceCoalesced, work.Reduce, work.Broadcast, work.AllGather, work.AllGatherCoalesced,
	work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced,
}

// goes returns an error if the operations of the clusters go another way than by an algorithm.
func (x *rank) goes(algorithm string) error {
	for _, op := range clusterOps {
		if c := x.does(op); (c.Algorithm == cuda.ClustersWork) != (algorithm == cuda.ClustersWork) {
			return fmt.Errorf("%v goes by %s: %s", op, c.Algorithm, c.Why)
		}
	}
	return nil
}

// explains returns an error if Explain does not say so of all_reduces.
func (x *rank) explains(text string) error { return says(errors.New(x.does(work.AllReduce).Why), text) }

// TestCliques has ordinary calls in groups whose devices reach each other in parts. The parts are clusters, each with
// kernels, and Explain says so. Calls that no kernels can do go through the host.
func TestCliques(t *testing.T) {
	for _, c := range cliqueCases {
		t.Run(c.name, virtually(func(t *testing.T) {
			s := c.setup()
			s.limit, s.timeout = 5*patience, 5*patience
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error {
				must.Do(x.meetDirectly(r))
				must.Do(x.goes(cuda.ClustersWork))
				e := x.b.Explain()
				var parts [][]int
				for _, p := range e.Clusters {
					parts = append(parts, p.Ranks)
				}
				how := "inside the cluster: by kernels"
				for _, p := range c.want {
					if len(p) == 1 && p[0] == r {
						how = "inside the cluster: which it has no partners for"
					}
				}
				err := errors.Join(x.explains(c.text+"; this rank is in cluster"), x.explains(how))
				if err != nil || fmt.Sprint(parts) != fmt.Sprint(c.want) {
					return fmt.Errorf("the clusters are %v: %w", parts, err)
				}
				for _, op := range []work.OpType{
					work.Gather, work.Scatter, work.AllToAll, work.Send, work.Recv, work.Barrier,
				} {
					if y := x.does(op); y.Algorithm != cuda.HostWork {
						return fmt.Errorf("%v goes by %s: %s", op, y.Algorithm, y.Why)
					}
				}
				rng := rand.New(rand.NewPCG(uint64(r), 1))
				for i, op := range deviceOps {
					for k, d := range deviceTypes {
						if _, err := op.Reduction(d, c.size); err != nil || !addsExactly(d, c.size) {
							continue
						}
						sizes := []int{0, 1, c.size - 1, 7 * (i + k), 3001}
						if c.name != "two pairs" && !testsize.Long() {
							sizes = sizes[(i+k)%5:][:1]
							if testing.Short() && (i+k)%4 != 0 {
								continue
							}
						}
						if err := x.allReduces(d, op, sizes, r, rng); err != nil {
							return fmt.Errorf("%v of %v: %w", op, d, err)
						}
					}
				}
				err = errors.Join(x.allReduces(tensor.Bool, backend.Sum(), []int{50}, r, rng),
					x.allReduces(tensor.Float32, backend.PreMulSum(2), []int{50}, r, rng))
				return errors.Join(err, x.goes(cuda.ClustersWork))
			})
			w.end()
		}))
	}
}

// TestCliqueCollectives has operations of all kinds at a time, in chunks, under the checker of orders. Only some go
// through the clusters. Some have several tensors of a rank, or tensors in CPU memory.
func TestCliqueCollectives(t *testing.T) {
	inRealTime(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		c := cliqueCases[rng.IntN(len(cliqueCases)-1)]
		if seed%8 == 5 {
			c = cliqueCases[len(cliqueCases)-1]
		}
		o := c.setup()
		o.sim.Seed, o.sim.Semantics = seed, s
		o.options = cuda.Options{Chunk: 16 + rng.IntN(200), Scratch: 1 << rng.IntN(20)}
		o.native = seed%4 == 2 && runtime.GOOS == "linux" // through memory between the clusters
		w := newWorld(t, o)
		var ps []program
		for i := range 6 {
			name := names[rng.IntN(len(names))]
			if i%3 != 0 {
				name = between[rng.IntN(len(between))]
			}
			ps = append(ps, draw(rng, name, o.size))
		}
		w.each(func(x *rank, r int) error {
			if seed%2 == 0 { // else the first call may be any, and ranks may use one device
				must.Do(x.meetDirectly(r))
			}
			if seed%3 == 1 {
				x.mixes = func(rng *rand.Rand) bool { return r%2 == 0 || rng.IntN(3) == 0 }
			}
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// TestCliquesRefuse has cliques that cannot use kernels on some rank. All ranks go through the host then, also those of
// other cliques.
func TestCliquesRefuse(t *testing.T) {
	t.Run("ranks share a device", virtually(func(t *testing.T) {
		s := directly(4)
		s.sim.Devices = 3 // ranks 0 and 3 share one
		s.sim.Topology.NoPeer = func(a, b int) bool { return a == 0 || b == 0 }
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			must.Do(x.adds(tensor.Float32, r))
			return errors.Join(x.goes(cuda.HostWork), x.explains(
				"not clusters: rank 0: no kernels in its cluster: rank 0: direct: ranks 0 and 1 share a device"))
		})
		require.Empty(t, w.ranks[1].b.Explain().Clusters)
		w.end()
	}))
	t.Run("kernels are not loaded", virtually(func(t *testing.T) {
		s := cliqueCases[3].setup()
		s.vary = func(o *cuda.Options, r int) {
			o.Driver = &loading{o.Driver, func(image string) error {
				if r == 1 && strings.Contains(image, "c10d_direct_others_") {
					return errors.New("no room for it")
				}
				return nil
			}}
		}
		w := newWorld(t, s)
		for _, d := range []tensor.DType{tensor.Float32, tensor.Int32} {
			w.each(func(x *rank, r int) error { return errors.Join(x.adds(d, r), x.goes(cuda.HostWork)) })
		}
		w.end()
	}))
	t.Run("sums in rank order", virtually(func(t *testing.T) {
		s := cliqueCases[1].setup()
		s.vary = func(o *cuda.Options, _ int) {
			h := o.CPUOptions.(gloo.Options)
			h.Sums = gloo.SumsInRankOrder
			o.CPUOptions = h
		}
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			err := x.adds(tensor.Float32, r)
			return errors.Join(err, x.goes(cuda.HostWork), x.explains("not clusters: rank 0: gloo.Options.Sums"))
		})
		w.end()
	}))
	t.Run("clusters by hand", virtually(func(t *testing.T) {
		s := clustered(1, 3)
		s.sim.Topology.NoPeer = cliqueCases[1].apart
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			return errors.Join(x.adds(tensor.Float32, r), x.goes(cuda.ClustersWork))
		})
		require.Equal(t, []int{1, 2, 3}, w.ranks[0].b.Explain().Clusters[1].Ranks)
		require.Contains(t, w.ranks[1].b.Explain().Choices[0].Why, "inside the cluster: on the hosts: rank 1: window")
		w.end()
	}))
	t.Run("nobody reaches another", virtually(func(t *testing.T) {
		s := directly(4)
		s.sim.Topology.NoPeer = func(int, int) bool { return true }
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			err := x.adds(tensor.Float32, r)
			return errors.Join(err, x.goes(cuda.HostWork), x.explains("not clusters: the ranks form one cluster"))
		})
		w.end()
	}))
}

// TestCliquesCapture has a capture refused: what goes through clusters needs the hosts.
func TestCliquesCapture(t *testing.T) {
	w := newWorld(t, cliqueCases[1].setup())
	w.each(func(x *rank, r int) error {
		must.Do(x.meetDirectly(r))
		y, err := x.vector(tensor.Float32, r, make([]byte, 8))
		if err != nil {
			return err
		}
		s := x.stream[r]
		_, err = driver.Capture(s, func() error {
			_, err := x.b.AllReduce(cuda.InStream(x.ctx, s), []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
			return err
		})
		if !errors.Is(err, driver.ErrCapture) {
			return fmt.Errorf("a capture: %w", err)
		}
		return x.adds(tensor.Float32, r)
	})
	w.end()
}
