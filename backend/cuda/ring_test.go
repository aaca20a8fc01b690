package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ringCase is a host whose ranks get a ring without asking for one.
type ringCase struct {
	name  string
	size  int
	apart func(a, b int) bool // which devices do not reach each other
	order []int
}

func notBeside(size int) func(a, b int) bool {
	return func(a, b int) bool { return (a-b+size)%size != 1 && (b-a+size)%size != 1 }
}

var ringCases = []ringCase{
	{"neighbours only", 4, notBeside(4), []int{0, 1, 2, 3}},
	{"neighbours only", 6, notBeside(6), []int{0, 1, 2, 3, 4, 5}},
	{"neighbours only", 8, notBeside(8), []int{0, 1, 2, 3, 4, 5, 6, 7}},
	{"one missing pair", 4, func(a, b int) bool { return a+b == 1 }, []int{0, 2, 1, 3}},
	{"all reach each other", 12, nil, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}},
}

func (c ringCase) setup() setup {
	s := directly(c.size)
	s.sim.Topology.NoPeer = c.apart
	return s
}

// around are the operations that go round a ring.
var around = []work.OpType{
	work.AllReduce, work.AllReduceCoalesced, work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced,
	work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced,
}

// TestRing has ordinary calls in groups that have a ring. Those that can go round it do, and Explain says so. The
// others go through the host.
func TestRing(t *testing.T) {
	for n, c := range ringCases {
		t.Run(fmt.Sprintf("%s of %d", c.name, c.size), virtually(func(t *testing.T) {
			s := c.setup()
			s.limit, s.timeout = 5*patience, 5*patience
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error {
				for i, op := range deviceOps {
					for k, d := range deviceTypes {
						if _, err := op.Reduction(d, c.size); err != nil || !addsExactly(d, c.size) {
							continue
						}
						sizes := []int{0, 1, c.size - 1, 7 * (i + k), 3001}
						if n > 0 && !testsize.Long() {
							sizes = sizes[(i+k)%5:][:1]
						}
						rng := rand.New(rand.NewPCG(uint64(r), uint64(i)))
						if err := x.allReduces(d, op, sizes, r, rng); err != nil {
							return fmt.Errorf("%v of %v: %w", op, d, err)
						}
					}
				}
				for _, op := range around {
					order := fmt.Sprintf("in a ring of the ranks %v", c.order)
					if y := x.does(op); y.Algorithm != cuda.RingWork || !strings.Contains(y.Why, order) {
						return fmt.Errorf("%v goes by %s: %s", op, y.Algorithm, y.Why)
					}
				}
				for _, op := range []work.OpType{
					work.Broadcast, work.Reduce, work.AllToAll, work.Barrier, work.Send, work.Recv,
				} {
					if y := x.does(op); y.Algorithm == cuda.RingWork || y.Algorithm == cuda.DirectWork {
						return fmt.Errorf("%v goes by %s: %s", op, y.Algorithm, y.Why)
					}
				}
				if link := x.b.Explain().DeviceLink; link != "neighbours" {
					return fmt.Errorf("the link is %q", link)
				}
				return nil
			})
			w.end()
		}))
	}
}

// TestRingCollectives has all kinds of operations at a time in groups that have a ring, under the checker of orders.
func TestRingCollectives(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		c := ringCases[rng.IntN(len(ringCases))]
		o := c.setup()
		o.sim.Seed, o.sim.Semantics = seed, s
		o.options = cuda.Options{Chunk: 16 + rng.IntN(200), Scratch: 1 << rng.IntN(20)}
		w := newWorld(t, o)
		var ps []program
		for range 6 {
			name := names[rng.IntN(len(names))]
			if rng.IntN(2) == 0 {
				round := []string{
					"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
					"all_gather_into_tensor_coalesced", "all_gather_v", "reduce_scatter", "reduce_scatter_tensor",
					"reduce_scatter_tensor_coalesced",
				}
				name = round[rng.IntN(len(round))]
			}
			ps = append(ps, draw(rng, name, o.size))
		}
		w.each(func(x *rank, r int) error {
			return x.collectives(ps, rand.New(rand.NewPCG(seed, uint64(r))), r)
		})
		w.end()
	})
}

// TestRingByName has groups whose devices all reach each other, and that ask for the ring by the option or the table.
// The operations for which nobody asks go the direct way, on the same tensors, and messages go on lanes.
func TestRingByName(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int
		option string
		rows   string
		rings  []work.OpType
	}{
		{"option", 2, cuda.RingWork, "", []work.OpType{work.AllReduce}},
		{"option", 4, cuda.RingWork, "", []work.OpType{work.AllReduce}},
		{
			"table", 4, "", "all_reduce peers 4 1 1000 ring 1\nall_gather peers 4 1 1000 ring:2 1\n",
			[]work.OpType{work.AllReduce, work.AllGather},
		},
	} {
		t.Run(fmt.Sprintf("%s, %d ranks", c.name, c.size), func(t *testing.T) {
			s := directly(c.size)
			s.options.AllReduce = c.option
			if c.rows != "" {
				s.options.Table = tableOf(t, c.rows)
			}
			w := newWorld(t, s)
			w.each(func(x *rank, r int) error {
				must.Do(x.meetDirectly(r))
				for _, op := range []work.OpType{
					work.AllReduce, work.AllGather, work.ReduceScatter, work.Broadcast, work.Barrier, work.Send,
				} {
					want := cuda.DirectWork
					if slices.Contains(c.rings, op) {
						want = cuda.RingWork
					}
					if y := x.does(op); y.Algorithm != want {
						return fmt.Errorf("%v goes by %s: %s", op, y.Algorithm, y.Why)
					}
				}
				rng := rand.New(rand.NewPCG(1, uint64(r)))
				var ps []program
				same := random(t, 5)
				for _, name := range []string{
					"all_reduce", "broadcast", "all_reduce", "all_gather", "send", "reduce_scatter", "all_reduce",
				} {
					p := draw(same, name, c.size)
					for name == "all_reduce" && !promised(cuda.RingWork, p.op, p.dtype, c.size) {
						p = draw(same, name, c.size)
					}
					ps = append(ps, p)
				}
				return x.collectives(ps, rng, r)
			})
			// A ring and a mesh write the same tensor in turn.
			sums := make([]*vector, c.size)
			w.each(func(x *rank, r int) (err error) {
				sums[r] = must.Get(x.vector(tensor.Int32, r, bytes.Repeat([]byte{1, 0, 0, 0}, 500)))
				var v *work.Work
				ts := []*tensor.Tensor{sums[r].t}
				for range 3 {
					must.Get(x.b.AllReduce(x.ctx, ts, backend.AllReduceOptions{}))
					v = must.Get(x.b.Broadcast(x.ctx, ts, backend.BroadcastOptions{Root: 1}))
				}
				must.Do(v.Synchronize(x.stream[r]))
				got, err := x.bytes(sums[r], r)
				n := byte(c.size * c.size * c.size)
				return errors.Join(err, v.Wait(x.ctx), same(got, bytes.Repeat([]byte{n, 0, 0, 0}, 500)))
			})
			w.end()
		})
	}
}

// TestRingBits adds floats of very different size round a ring: all ranks get the same bits, in every run.
func TestRingBits(t *testing.T) {
	c := ringCases[3]
	var before []byte
	for run := range 2 {
		s := c.setup()
		s.sim.Seed = uint64(run)
		w := newWorld(t, s)
		all := make([][]byte, c.size)
		w.each(func(x *rank, r int) (err error) {
			in := make([]float32, 1001)
			rng := rand.New(rand.NewPCG(7, uint64(r)))
			for i := range in {
				in[i] = float32(rng.NormFloat64()) * float32(int(1)<<rng.IntN(30))
			}
			y := must.Get(x.vector(tensor.Float32, r, tensorBytes(in)))
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: backend.Avg()})
			if err == nil {
				err = v.Synchronize(x.stream[r])
			}
			if err != nil {
				return err
			}
			all[r], err = x.bytes(y, r)
			return errors.Join(err, v.Wait(x.ctx))
		})
		for _, b := range all {
			if before == nil {
				before = b
			}
			require.Equal(t, before, b)
		}
		w.end()
	}
}

// TestRingCapture replays graphs of operations that go round a ring, with eager calls between.
func TestRingCapture(t *testing.T) {
	for i, c := range ringCases[:1] {
		o := c.setup()
		o.sim.Seed = uint64(i)
		w := newWorld(t, o)
		w.each(func(x *rank, r int) error {
			var err error
			must.Do(x.meetDirectly(r))
			y := must.Get(x.vector(tensor.Int32, r, make([]byte, 4*700)))
			s := x.stream[r]
			ctx := cuda.InStream(x.ctx, s)
			sum := func() error {
				return x.wait(x.b.AllReduce(ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
			}
			graph := must.Get(driver.Capture(s, sum))
			defer graph.Close()
			must.Get(x.bytes(y, r))
			want := byte(0)
			for round := range 12 {
				must.Do(x.fillVector(y, r, bytes.Repeat([]byte{1 + byte(r+round%3), 0, 0, 0}, 700)))
				want = byte(c.size*(c.size+1)/2 + c.size*(round%3))
				if round%4 == 3 {
					err = sum()
				} else {
					err = graph.Launch(s)
				}
				if err != nil {
					return err
				}
				got, err := x.bytes(y, r)
				if err := errors.Join(err, same(got, bytes.Repeat([]byte{want, 0, 0, 0}, 700))); err != nil {
					return fmt.Errorf("round %d: %w", round, err)
				}
			}
			return nil
		})
		w.end()
	}
}

// TestNoRing has groups that are asked for a ring and cannot have one: they say why.
func TestNoRing(t *testing.T) {
	s := directly(4)
	s.options.AllReduce = cuda.RingWork
	s.sim.Topology.NoPeer = func(a, b int) bool { return a == 3 || b == 3 }
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error {
		var err error
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		_, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
		if err == nil {
			return errors.New("there is no ring")
		}
		for _, text := range []string{
			`all_reduce work "ring", which Options.AllReduce asks for`, "no ring of the ranks", "0 that of 3",
		} {
			if !strings.Contains(err.Error(), text) {
				return fmt.Errorf("%q is not in %w", text, err)
			}
		}
		return must.Err(x.bytes(y, r))
	})
	w.end()
}
