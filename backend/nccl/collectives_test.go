package nccl_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// A script is a row of random operations: every rank draws the same ones.
type script struct {
	*rand.Rand
	size int
}

var dtypes = []tensor.DType{
	tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16, tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64, tensor.Uint32, tensor.Uint64,
	tensor.Bool, tensor.Complex64, tensor.Complex128,
}

// operator draws one for a dtype, of those that give the same bits in every order for small whole numbers.
func (s script) operator(d tensor.DType) backend.ReduceOp {
	all := []backend.ReduceOp{backend.Sum()}
	if d.IsFloat() {
		all = append(all, backend.Avg(), backend.PreMulSum(0.5))
	}
	if !d.IsComplex() {
		all = append(all, backend.Max(), backend.Min(), backend.Product())
	}
	return all[s.IntN(len(all))]
}

// values returns a tensor of the host with small whole numbers that a rank draws.
func values(own *rand.Rand, d tensor.DType, shape ...int) *tensor.Tensor {
	t := must.Get(tensor.New(d, shape...))
	es := d.Size()
	b := make([]byte, t.ByteLen())
	one := must.Get(tensor.New(d, 1))
	for i := range t.Len() {
		most := 4
		if d == tensor.Bool {
			most = 2
		}
		must.Do(one.Fill(float64(own.IntN(most))))
		must.Do(one.Pack(b[i*es : (i+1)*es]))
	}
	must.Do(t.Unpack(b))
	return t
}

func lists(n int, f func(i int) *tensor.Tensor) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, n)
	for i := range ts {
		ts[i] = f(i)
	}
	return ts
}

// do does one random operation on both backends and compares.
func (x *rank) do(s script, own *rand.Rand, k int) {
	d := dtypes[s.IntN(len(dtypes))]
	op := s.operator(d)
	n, root, kind := 1+s.IntN(9), s.IntN(s.size), s.IntN(13)
	uneven := lists(s.size, func(int) *tensor.Tensor { return must.Get(tensor.New(d, s.IntN(4))) })
	ctx := x.context()
	if s.IntN(2) == 0 {
		ctx = x.within()
	}
	fresh := func(shape ...int) *tensor.Tensor { return values(own, d, shape...) }
	var ref, mine []*tensor.Tensor // results
	both := func(outs []*tensor.Tensor, ins []*tensor.Tensor, f func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error)) {
		ref = outs
		mine = lists(len(outs), func(i int) *tensor.Tensor { return x.on(outs[i]) })
		in := lists(len(ins), func(i int) *tensor.Tensor { return x.on(ins[i]) })
		w := must.Get(f(x.b, mine, in))
		must.Do(w.Synchronize(x.stream))
		must.Do(must.Get(f(x.ref, outs, ins)).Wait(x.ctx))
	}
	name := ""
	switch kind {
	case 0:
		name = fmt.Sprint("all_reduce ", op)
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), nil, func(b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
			return b.AllReduce(ctx, out, backend.AllReduceOptions{Op: op})
		})
	case 1:
		name = fmt.Sprint("all_reduce_coalesced ", op)
		both(lists(3, func(i int) *tensor.Tensor { return fresh(n + i) }), nil, func(b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
			return b.AllReduceCoalesced(ctx, out, backend.AllReduceOptions{Op: op})
		})
	case 2:
		name = "broadcast"
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), nil, func(b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, out, backend.BroadcastOptions{Root: root})
		})
	case 3:
		name = fmt.Sprint("reduce ", op)
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), nil, func(b backend.Backend, out, _ []*tensor.Tensor) (*work.Work, error) {
			return b.Reduce(ctx, out[0], backend.ReduceOptions{Root: root, Op: op})
		})
		if x.r != root {
			ref = nil // undefined
		}
	case 4:
		name = "all_gather"
		both(lists(s.size, func(int) *tensor.Tensor { return fresh(n) }), lists(1, func(int) *tensor.Tensor { return fresh(n) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.AllGather(ctx, out, in[0], backend.AllGatherOptions{})
		})
	case 5:
		name = "all_gather of unequal sizes"
		both(lists(s.size, func(i int) *tensor.Tensor { return fresh(uneven[i].Len()) }), lists(1, func(int) *tensor.Tensor { return fresh(uneven[x.r].Len()) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.AllGatherV(ctx, out, in[0], backend.AllGatherOptions{})
		})
	case 6:
		name = "all_gather_into_tensor, coalesced"
		both(lists(2, func(i int) *tensor.Tensor { return fresh(s.size * (n + i)) }), lists(2, func(i int) *tensor.Tensor { return fresh(n + i) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.AllGatherIntoTensorCoalesced(ctx, out, in, backend.AllGatherOptions{})
		})
	case 7:
		name = "gather"
		outs := 0
		if x.r == root {
			outs = s.size
		}
		both(lists(outs, func(int) *tensor.Tensor { return fresh(n) }), lists(1, func(int) *tensor.Tensor { return fresh(n) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.Gather(ctx, out, in[0], backend.GatherOptions{Root: root})
		})
	case 8:
		name = "scatter"
		ins := 0
		if x.r == root {
			ins = s.size
		}
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), lists(ins, func(int) *tensor.Tensor { return fresh(n) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.Scatter(ctx, out[0], in, backend.ScatterOptions{Root: root})
		})
	case 9:
		name = fmt.Sprint("reduce_scatter ", op)
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), lists(s.size, func(int) *tensor.Tensor { return fresh(n) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatter(ctx, out[0], in, backend.ReduceScatterOptions{Op: op})
		})
	case 10:
		name = fmt.Sprint("reduce_scatter of unequal sizes ", op)
		both(lists(1, func(int) *tensor.Tensor { return fresh(uneven[x.r].Len()) }), lists(s.size, func(i int) *tensor.Tensor { return fresh(uneven[i].Len()) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatter(ctx, out[0], in, backend.ReduceScatterOptions{Op: op})
		})
	case 11:
		name = fmt.Sprint("reduce_scatter_tensor ", op)
		both(lists(1, func(int) *tensor.Tensor { return fresh(n) }), lists(1, func(int) *tensor.Tensor { return fresh(n * s.size) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, out[0], in[0], backend.ReduceScatterOptions{Op: op})
		})
	case 12:
		name = "all_to_all_single with splits"
		split := make([][]int, s.size) // [from][to]
		for i := range split {
			split[i] = lists2(s)
		}
		send, recv := split[x.r], make([]int, s.size)
		sent, received := 0, 0
		for r := range s.size {
			recv[r] = split[r][x.r]
			sent, received = sent+send[r], received+recv[r]
		}
		both(lists(1, func(int) *tensor.Tensor { return fresh(received, 2) }), lists(1, func(int) *tensor.Tensor { return fresh(sent, 2) }), func(b backend.Backend, out, in []*tensor.Tensor) (*work.Work, error) {
			return b.AllToAllSingle(ctx, out[0], in[0], recv, send, backend.AllToAllOptions{})
		})
	}
	for i := range ref {
		got := x.get(mine[i])
		same := must.Get(got.Equal(ref[i]))
		if !same {
			must.Do(fmt.Errorf("operation %d, %s of %v: tensor %d is %s, want %s", k, name, d, i, got.Dump(), ref[i].Dump()))
		}
	}
}

// lists2 draws the rows for each rank.
func lists2(s script) []int {
	n := make([]int, s.size)
	for i := range n {
		n[i] = s.IntN(3)
	}
	return n
}

// TestRandomOperations compares rows of operations with backend gloo.
func TestRandomOperations(t *testing.T) {
	for _, size := range []int{1, 2, 3, 4} {
		t.Run(fmt.Sprintf("%d ranks", size), func(t *testing.T) {
			seed := must.Seed(t)
			w := newWorld(t, setup{size: size})
			w.each(func(x *rank) error {
				s := script{rand.New(rand.NewPCG(seed, 1)), size}
				own := rand.New(rand.NewPCG(seed, uint64(x.r+2)))
				for k := range 60 {
					x.do(s, own, k)
				}
				return nil
			})
			w.end()
		})
	}
}

// TestCallsOfNCCL has the calls that PyTorch makes for each operation.
func TestCallsOfNCCL(t *testing.T) {
	var c calls
	w := newWorld(t, setup{size: 2, trace: c.trace})
	const f32 = " float32"
	both := func(f func(x *rank) (*work.Work, error), want ...string) {
		t.Helper()
		w.each(func(x *rank) error {
			x.wait(f(x))
			return nil
		})
		for r := range 2 {
			require.Equal(t, want[min(r, len(want)-1)], c.take(r), "rank %d", r)
		}
	}
	ops := map[string]backend.ReduceOp{"sum": backend.Sum(), "premul": backend.PreMulSum(2)}
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1, 2, 3))}, backend.AllReduceOptions{})
	}, "CommInit 0 of 2, 1 ids; AllReduce 3 float32 op 0", "CommInit 1 of 2, 1 ids; AllReduce 3 float32 op 0")
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{Op: ops["premul"]})
	}, "AllReduce 1 float32 op 0 times 2")
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllReduceCoalesced(x.context(), []*tensor.Tensor{x.on(floats(1)), x.on(floats(1, 2))}, backend.AllReduceOptions{Op: backend.Max()})
	}, "GroupStart; AllReduce 1 float32 op 2; AllReduce 2 float32 op 2; GroupEnd")
	both(func(x *rank) (*work.Work, error) {
		return x.b.Broadcast(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.BroadcastOptions{Root: 1})
	}, "Broadcast 1"+f32+" root 1")
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllGatherV(x.context(), []*tensor.Tensor{x.alloc(tensor.Float32, 1), x.alloc(tensor.Float32, 2)}, x.alloc(tensor.Float32, x.r+1), backend.AllGatherOptions{})
	}, "GroupStart; Broadcast 1 float32 root 0; Broadcast 2 float32 root 1; GroupEnd")
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllGather(x.context(), lists(2, func(int) *tensor.Tensor { return x.alloc(tensor.Complex64, 2) }), x.alloc(tensor.Complex64, 2), backend.AllGatherOptions{})
	}, "AllGather 4 float32")
	both(func(x *rank) (*work.Work, error) {
		return x.b.ReduceScatter(x.context(), x.alloc(tensor.Bool, x.r+1), []*tensor.Tensor{x.alloc(tensor.Bool, 1), x.alloc(tensor.Bool, 2)}, backend.ReduceScatterOptions{})
	}, "GroupStart; Reduce 1 uint8 op 2 root 0; Reduce 2 uint8 op 2 root 1; GroupEnd")
	both(func(x *rank) (*work.Work, error) {
		return x.b.AllToAllSingle(x.context(), x.alloc(tensor.Int64, 4), x.alloc(tensor.Int64, 4), nil, nil, backend.AllToAllOptions{})
	}, "GroupStart; Send 2 int64 peer 0; Recv 2 int64 peer 0; Send 2 int64 peer 1; Recv 2 int64 peer 1; GroupEnd")
	both(func(x *rank) (*work.Work, error) {
		var out []*tensor.Tensor
		if x.r == 1 {
			out = lists(2, func(int) *tensor.Tensor { return x.alloc(tensor.Float32, 2) })
		}
		return x.b.Gather(x.context(), out, x.alloc(tensor.Float32, 2), backend.GatherOptions{Root: 1})
	}, "Send 2 float32 peer 1", "GroupStart; Recv 2 float32 peer 0; GroupEnd")
	both(func(x *rank) (*work.Work, error) { return x.b.Barrier(x.ctx, backend.BarrierOptions{}) }, "AllReduce 1 float32 op 0")
	both(func(x *rank) (*work.Work, error) {
		if x.r == 0 {
			return x.b.Send(x.context(), x.on(floats(1)), 1, backend.P2POptions{})
		}
		return x.b.Recv(x.context(), x.alloc(tensor.Float32, 1), 0, backend.P2POptions{})
	}, "CommInit 0 of 2, 1 ids; Send 1 float32 peer 1", "CommInit 1 of 2, 1 ids; Recv 1 float32 peer 0")
	both(func(x *rank) (*work.Work, error) {
		return x.b.Batch(x.context(), []backend.P2P{{Send: x.on(floats(1)), Peer: 1 - x.r}, {Recv: x.alloc(tensor.Float32, 1), Peer: 1 - x.r}})
	}, "GroupStart; Send 1 float32 peer 1; Recv 1 float32 peer 1; GroupEnd", "GroupStart; Send 1 float32 peer 0; Recv 1 float32 peer 0; GroupEnd")
	for r, x := range w.ranks {
		peers := x.b.Communicators()
		slices.Sort(peers)
		require.Equal(t, []int{-1, 1 - r}, peers)
		require.EqualValues(t, 12, x.b.Seq())
	}
	w.end()
}

// TestRefused has what NCCL lacks.
func TestRefused(t *testing.T) {
	w := newWorld(t, setup{size: 1})
	x := w.ranks[0]
	ctx := x.context()
	f := x.alloc(tensor.Float32, 2)
	matrix := must.Get(x.alloc(tensor.Float32, 2, 2).Transpose(0, 1))
	both := []*tensor.Tensor{f, x.alloc(tensor.Float32, 2)}
	unsupported := map[string]error{
		"bitwise":      must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{x.alloc(tensor.Int32, 1)}, backend.AllReduceOptions{Op: backend.BXor()})),
		"custom":       must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{f}, backend.AllReduceOptions{Op: backend.CustomOf("own", func(a, b float32) float32 { return a })})),
		"int16":        must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{x.alloc(tensor.Int16, 1)}, backend.AllReduceOptions{})),
		"two tensors":  must.Err(x.b.AllReduce(ctx, both, backend.AllReduceOptions{})),
		"two sources":  must.Err(x.b.Broadcast(ctx, both, backend.BroadcastOptions{})),
		"tag":          must.Err(x.b.Batch(ctx, []backend.P2P{{Send: f, P2POptions: backend.P2POptions{Tag: 1}}})),
		"any source":   must.Err(x.b.RecvAnySource(ctx, f, backend.P2POptions{})),
		"lists":        must.Err(x.b.AllGatherCoalesced(ctx, nil, nil, backend.AllGatherOptions{})),
		"monitored":    x.b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}),
		"premul int64": must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{x.alloc(tensor.Int64, 1)}, backend.AllReduceOptions{Op: backend.PreMulSum(2)})),
	}
	for name, err := range unsupported {
		if !errors.Is(err, backend.ErrInvalidArgument) { // what no backend has
			require.ErrorIs(t, err, errors.ErrUnsupported, name)
			require.ErrorContains(t, err, "backend cuda has", name)
		}
	}
	wrong := map[string]error{
		"CPU memory":  must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{floats(1)}, backend.AllReduceOptions{})),
		"holes":       must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{matrix}, backend.AllReduceOptions{})),
		"nil":         must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{nil}, backend.AllReduceOptions{})),
		"itself":      must.Err(x.b.Send(ctx, f, 0, backend.P2POptions{})),
		"mean of int": must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{x.alloc(tensor.Int32, 1)}, backend.AllReduceOptions{Op: backend.Avg()})),
		"rank":        must.Err(x.b.Send(ctx, f, 3, backend.P2POptions{})),
	}
	for name, err := range wrong {
		require.ErrorIs(t, err, backend.ErrInvalidArgument, name)
	}
	require.Zero(t, x.b.Seq())
	w.end()
}

// TestPremulBesidePyTorch: PyTorch's ranks pass a factor of the wrong type for bfloat16, so the results would be wrong.
func TestPremulBesidePyTorch(t *testing.T) {
	for _, torch := range []bool{true, false} {
		w := newWorld(t, setup{size: 2, torch: torch})
		half := backend.AllReduceOptions{Op: backend.PreMulSum(0.5)}
		w.each(func(x *rank) error {
			v := x.on(values(rand.New(rand.NewPCG(1, 1)), tensor.BFloat16, 3))
			got, err := x.b.AllReduce(x.context(), []*tensor.Tensor{v}, half)
			if !torch {
				x.wait(got, err)
				return nil
			}
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.ErrorContains(t, err, "premul_sum(0.5)")
			require.ErrorContains(t, err, "multiply first, and then sum")
			x.wait(x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, half))
			return nil
		})
		w.end()
	}
}
