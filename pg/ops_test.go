package pg_test

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func of[T tensor.Element](t *testing.T, v []T, shape ...int) *tensor.Tensor {
	t.Helper()
	return must.Get(tensor.Of(v, shape...))
}

func data[T tensor.Element](t *testing.T, x *tensor.Tensor) []T {
	t.Helper()
	return must.Get(tensor.Data[T](must.Get(x.Contiguous())))
}

func TestStackedGather(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		out := must.Get(tensor.New(tensor.Int32, 2, 3))
		in := of(t, []int32{1, 2, int32(g.Rank())}, 3)
		require.NoError(t, wait(g.AllGatherIntoTensor(t.Context(), out, in)))
		require.Equal(t, []int32{1, 2, 0, 1, 2, 1}, data[int32](t, out))
		scalars := must.Get(tensor.New(tensor.Int32, 2))
		require.NoError(t, wait(g.AllGatherIntoTensor(t.Context(), scalars, of(t, []int32{int32(5 + g.Rank())}, []int{}...))))
		require.Equal(t, []int32{5, 6}, data[int32](t, scalars))
	})
}

// TestStackedReduceScatter gives the input as a concatenation and as a stack, also of scalars and of a
// coalesced call.
func TestStackedReduceScatter(t *testing.T) {
	const size = 3
	pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
		ctx, rank := t.Context(), float32(g.Rank())
		v := func() []float32 { return []float32{0, 1, 2, 3, 4, 5} } // each rank's is the same
		for name, in := range map[string]*tensor.Tensor{"joined": of(t, v(), 6), "stacked": of(t, v(), size, 2)} {
			out := of(t, []float32{-1, -1}, 2)
			require.NoError(t, wait(g.ReduceScatterTensor(ctx, out, in, pg.Sum())), name)
			require.Equal(t, []float32{3 * 2 * rank, 3 * (2*rank + 1)}, data[float32](t, out), name)
		}
		scalar := of(t, []float32{-1}, []int{}...)
		require.NoError(t, wait(g.ReduceScatterTensor(ctx, scalar, of(t, v()[:size], size), pg.Sum())))
		require.Equal(t, []float32{3 * rank}, data[float32](t, scalar))

		outs := []*tensor.Tensor{of(t, []float32{-1, -1}, 2), of(t, []float32{-1}, 1)}
		ins := []*tensor.Tensor{of(t, v(), size, 2), of(t, v()[:size], size, 1)}
		require.NoError(t, wait(g.ReduceScatterTensorCoalesced(ctx, outs, ins, pg.Sum())))
		require.Equal(t, []float32{3 * 2 * rank, 3 * (2*rank + 1)}, data[float32](t, outs[0]))
		require.Equal(t, []float32{3 * rank}, data[float32](t, outs[1]))

		for _, in := range []*tensor.Tensor{of(t, v(), 2, 3), of(t, v(), 1, 6), of(t, v(), size, 1, 2), of(t, v()[:1], []int{}...)} {
			_, err := g.ReduceScatterTensor(ctx, of(t, []float32{0, 0}, 2), in, pg.Sum())
			require.ErrorContains(t, err, fmt.Sprintf("shape %v is not shape [2] times 3 along dimension 0, and not 3 of them stacked", in.Shape()))
		}
	})
}

func TestVariants(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		ctx, r := t.Context(), g.Rank()
		in := of(t, slices.Repeat([]int16{int16(r)}, 2*r), 2*r)
		outs := func() []*tensor.Tensor {
			var ts []*tensor.Tensor
			for k := range 3 {
				x := must.Get(tensor.New(tensor.Int16, 2*k))
				ts = append(ts, x)
			}
			return ts
		}
		all := outs()
		require.NoError(t, wait(g.AllGatherV(ctx, all, in)))
		require.Equal(t, []int16{1, 1}, data[int16](t, all[1]))
		require.Equal(t, []int16{2, 2, 2, 2}, data[int16](t, all[2]))

		var at []*tensor.Tensor
		if r == 1 {
			at = outs()
		}
		require.NoError(t, wait(g.GatherV(ctx, at, in, 1)))
		if r == 1 {
			require.Equal(t, []int16{2, 2, 2, 2}, data[int16](t, at[2]))
		}

		// Coalesced forms.
		lists := make([][]*tensor.Tensor, 3)
		for k := range lists {
			lists[k] = []*tensor.Tensor{vec(1), vec(2)}
		}
		ins := []*tensor.Tensor{of(t, []float32{float32(r)}, 1), of(t, []float32{float32(r), 7}, 2)}
		require.NoError(t, wait(g.AllGatherCoalesced(ctx, lists, ins)))
		require.Equal(t, []float32{2, 7}, data[float32](t, lists[2][1]))

		c := g.Coalesce()
		o1, o2 := vec(3), vec(6)
		c.AllGatherIntoTensor(o1, ins[0])
		c.AllGatherIntoTensor(o2, ins[1])
		require.NoError(t, wait(c.End(ctx)))
		require.Equal(t, []float32{0, 1, 2}, data[float32](t, o1))
		require.Equal(t, []float32{0, 7, 1, 7, 2, 7}, data[float32](t, o2))

		c = g.Coalesce()
		p1, p2 := vec(1), vec(2)
		c.ReduceScatterTensor(p1, o1, pg.Sum())
		c.ReduceScatterTensor(p2, o2, pg.Sum())
		require.NoError(t, wait(c.End(ctx)))
		require.Equal(t, []float32{float32(3 * r)}, data[float32](t, p1))
		require.Equal(t, []float32{float32(3 * r), 21}, data[float32](t, p2))

		c = g.Coalesce()
		c.AllReduce(o1, pg.Sum())
		c.AllReduce(o2, pg.Max())
		require.ErrorContains(t, must.Err(c.End(ctx)), "operator max among")
		c = g.Coalesce()
		c.AllReduce(o1, pg.Sum())
		c.AllGatherIntoTensor(o1, ins[0])
		require.ErrorContains(t, must.Err(c.End(ctx)), "among operations of kind all_reduce")
		require.ErrorContains(t, must.Err(g.Coalesce().End(ctx)), "nothing was collected")

		// A ring of batched sends and receives.
		got := of(t, []int64{-1}, 1)
		works, err := g.BatchISendIRecv(ctx, []pg.P2P{
			{Send: of(t, []int64{int64(r)}, 1), Peer: (r + 1) % 3},
			{Recv: got, Peer: (r + 2) % 3},
		})
		require.NoError(t, err)
		require.NoError(t, work.WaitAll(ctx, works...))
		require.Equal(t, []int64{int64((r + 2) % 3)}, data[int64](t, got))
		src, err := works[1].SourceRank()
		require.NoError(t, err)
		require.Equal(t, (r+2)%3, src)
		require.Error(t, must.Err(g.BatchISendIRecv(ctx, nil)))
		_, err = g.BatchISendIRecv(ctx, []pg.P2P{{Peer: 1}})
		require.ErrorContains(t, err, "operation 0 needs either Send or Recv")
		require.ErrorContains(t, must.Err(g.BatchISendIRecv(ctx, []pg.P2P{{Send: got, Peer: 3}})), "no rank 3")
	})
}

func TestOperators(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		ctx, r := t.Context(), float32(g.Rank())
		one := func(op pg.ReduceOp, v float32) float32 {
			x := []float32{v}
			require.NoError(t, pg.Wait(g.AllReduce(ctx, pg.Slice(x), op)))
			return x[0]
		}
		require.Equal(t, float32(2), one(pg.Avg(), r+1))
		require.Equal(t, float32(1.5), one(pg.PreMulSum(0.5), r))
		require.Equal(t, float32(0*1+1*2+2*3), one(pg.PreMulSum(float64(r+1)), r), "the factor may differ")
		require.Equal(t, float32(2), one(pg.Custom("farther from zero", func(a, b float32) float32 {
			if math.Abs(float64(a)) >= math.Abs(float64(b)) {
				return a
			}
			return b
		}), r))
		_, err := g.AllReduce(ctx, of(t, []int32{1}, 1), pg.Custom("f", func(a, b float32) float32 { return a }))
		require.ErrorContains(t, err, `"f" is for float32, not int32`)

		// Each of several inputs is scaled before it is added.
		a, b := of(t, []float32{r}, 1), of(t, []float32{10}, 1)
		cpu, err := g.Backend(tensor.CPU)
		require.NoError(t, err)
		require.NoError(t, wait(cpu.AllReduce(ctx, []*tensor.Tensor{a, b}, backend.AllReduceOptions{Op: pg.PreMulSum(2)})))
		require.Equal(t, []float32{2*(0+1+2) + 2*30}, data[float32](t, a))
		require.Equal(t, data[float32](t, a), data[float32](t, b))

		v := make([]float64, 2)
		require.NoError(t, pg.Wait(g.ReduceScatterTensor(ctx, pg.Slice(v), pg.Slice([]float64{1, 2, 3, 4, 5, 6}), pg.Avg())))
		require.Equal(t, []float64{float64(2*g.Rank() + 1), float64(2*g.Rank() + 2)}, v)
		_, err = g.ReduceScatterTensor(ctx, pg.Slice(v[:1]), pg.Slice([]float64{1, 2}), pg.Sum())
		require.ErrorIs(t, err, backend.ErrInvalidArgument)
		all := make([]bool, g.Size())
		require.NoError(t, pg.Wait(g.AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice([]bool{g.Rank() == 1}))))
		require.Equal(t, []bool{false, true, false}, all)
		s := []int8{int8(g.Rank())}
		require.NoError(t, pg.Wait(g.Broadcast(ctx, pg.Slice(s), 2)))
		require.Equal(t, []int8{2}, s)
	})
}

func TestSlices(t *testing.T) {
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		ctx, me, root := t.Context(), g.Rank(), 1
		sum := []int32{int32(me), 10}
		require.NoError(t, pg.Wait(g.Reduce(ctx, pg.Slice(sum), root, pg.Sum())))
		var all []int16
		if me == root {
			require.Equal(t, []int32{3, 30}, sum)
			all = []int16{0, 0, 11, 12, 21, 22}
		}
		part := make([]int16, 2)
		require.NoError(t, pg.Wait(g.Scatter(ctx, pg.Slice(part), pg.Parts(all, 3), root)))
		require.Equal(t, [][]int16{{0, 0}, {11, 12}, {21, 22}}[me], part)
		back := slices.Repeat([]int16{-1}, len(all))
		if me != root {
			back = nil
		}
		require.NoError(t, pg.Wait(g.Gather(ctx, pg.Parts(back, 3), pg.Slice(part), root)))
		require.Equal(t, all, back)

		next, prev := (me+1)%3, (me+2)%3
		sent := must.Get(g.Send(ctx, pg.Slice([]float64{float64(me)}), next))
		got := make([]float64, 1)
		require.NoError(t, pg.Wait(g.Recv(ctx, pg.Slice(got), prev)))
		require.NoError(t, sent.Wait(ctx))
		require.Equal(t, []float64{float64(prev)}, got)
		received, err := g.Recv(ctx, pg.Slice(got), next)
		require.NoError(t, err)
		require.NoError(t, pg.Wait(g.Send(ctx, pg.Slice([]float64{float64(me)}), prev)))
		require.NoError(t, received.Wait(ctx))
		require.Equal(t, []float64{float64(next)}, got)

		_, err = g.Scatter(ctx, pg.Slice(part), pg.Parts(make([]int16, 5), 3), me)
		require.ErrorIs(t, err, backend.ErrInvalidArgument, "three parts of 5 elements")
		_, err = g.Scatter(ctx, pg.Slice(part), pg.Parts(make([]int16, 6), 3), next)
		require.ErrorIs(t, err, backend.ErrInvalidArgument, "the root is another rank")
		_, err = g.Gather(ctx, nil, pg.Slice(part), 3)
		require.ErrorIs(t, err, backend.ErrInvalidArgument)

		// Slices of unequal lengths, a tag, and a message from any rank.
		in, out := make([][]int32, 3), make([][]int32, 3)
		for r := range in {
			in[r], out[r] = slices.Repeat([]int32{int32(10*me + r)}, me+r), make([]int32, me+r)
		}
		require.NoError(t, pg.Wait(g.AllToAll(ctx, pg.Slices(out...), pg.Slices(in...))))
		for r := range out {
			require.Equal(t, slices.Repeat([]int32{int32(10*r + me)}, me+r), out[r])
		}
		if me == root {
			for range 2 {
				v := []uint8{0}
				w, err := g.RecvAnySource(ctx, pg.Slice(v), pg.P2POptions{Tag: 7})
				require.NoError(t, pg.Wait(w, err))
				require.Equal(t, must.Get(w.SourceRank())+1, int(v[0]))
			}
		} else {
			require.NoError(t, pg.Wait(g.Send(ctx, pg.Slice([]uint8{uint8(me + 1)}), root, pg.P2POptions{Tag: 7})))
		}
	})
}

func TestLocalRank(t *testing.T) {
	for name, value := range map[string]string{
		"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
	} {
		t.Setenv(name, value)
	}
	require.Equal(t, []int{1, 4}, []int{pg.LocalRank(), pg.LocalSize()})
	t.Setenv("RANK", "none")
	require.Equal(t, []int{-1, 0}, []int{pg.LocalRank(), pg.LocalSize()}, "no launcher that Init would believe")
}

func TestSparse(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for size := 1; size <= 5; size++ {
		pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
			const rows, cols = 7, 3
			want := make([]float32, rows*cols)
			var mine *tensor.Tensor
			for r := range size {
				rng := rand.New(rand.NewPCG(seed, uint64(r)))
				nnz := rng.IntN(6) * (r % 3) // rank 0 and 3 have nothing
				at, v := make([]int64, nnz), make([]float32, nnz*cols)
				for k := range nnz {
					at[k] = int64(rng.IntN(rows))
					for c := range cols {
						v[k*cols+c] = float32(rng.IntN(100))
						want[int(at[k])*cols+c] += v[k*cols+c]
					}
				}
				if r == g.Rank() {
					mine = must.Get(tensor.Sparse(of(t, at, 1, nnz), of(t, v, nnz, cols), rows, cols))
				}
			}
			require.NoError(t, wait(g.AllReduce(t.Context(), mine, pg.Sum())))
			require.True(t, mine.IsCoalesced())
			d, err := mine.Dense()
			require.NoError(t, err)
			require.Equal(t, want, data[float32](t, d))

			_, err = g.AllReduce(t.Context(), mine, pg.Max())
			require.ErrorContains(t, err, "only works with ReduceOp.SUM")
		})
	}
}

func TestSparseShapesMustMatch(t *testing.T) {
	errs := faulty(t, 2, func(j *pgtest.Job, g *pg.ProcessGroup) error {
		x := must.Get(tensor.Sparse(of(t, []int64{0}, 1, 1), of(t, []float32{1}, 1), 4+g.Rank()))
		return wait(g.AllReduce(context.Background(), x, pg.Sum()))
	})
	for _, err := range errs {
		require.ErrorIs(t, err, work.ErrMismatch)
	}
	require.ErrorContains(t, errors.Join(errs...), "sparse dimensions do not match")
}

type point struct {
	X, Y int
	Name string
}

// gobs is a codec for encoding/gob.
type gobs[T any] struct{}

func (gobs[T]) Encode(v T) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(v)
	return b.Bytes(), err
}

func (gobs[T]) Decode(b []byte) (v T, err error) {
	return v, gob.NewDecoder(bytes.NewReader(b)).Decode(&v)
}

func TestObjects(t *testing.T) {
	for _, tc := range []struct {
		name  string
		codec pg.Codec[point]
		torch bool
	}{{"json", nil, false}, {"another codec", gobs[point]{}, false}, {"beside PyTorch", nil, true}} {
		t.Run(tc.name, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				if tc.torch {
					pg.BesidePyTorch(g)
				}
				ctx := t.Context()
				p := func(r int) point { return point{r, r * r, strings.Repeat("x", 10*r)} }
				all := must.Get(pg.AllGatherObject(ctx, g, p(g.Rank()), tc.codec))
				require.Equal(t, []point{p(0), p(1), p(2)}, all)

				at := must.Get(pg.GatherObject(ctx, g, p(g.Rank()), 2, tc.codec))
				if g.Rank() == 2 {
					require.Equal(t, all, at)
				} else {
					require.Nil(t, at)
				}

				vs := make([]point, 2)
				if g.Rank() == 1 {
					vs = []point{p(4), p(5)}
				}
				vs = must.Get(pg.BroadcastObject(ctx, g, vs, 1, tc.codec))
				require.Equal(t, []point{p(4), p(5)}, vs)

				var parts []point
				if g.Rank() == 0 {
					parts = all
				}
				require.Equal(t, p(g.Rank()), must.Get(pg.ScatterObject(ctx, g, parts, 0, tc.codec)))

				if g.Rank() == 0 {
					require.NoError(t, pg.SendObject(ctx, g, all, 1, tc.codec))
				} else if g.Rank() == 1 {
					require.Equal(t, all, must.Get(pg.RecvObject(ctx, g, 3, 0, tc.codec)))
				}
			})
		})
	}
}

// TestHostileLengths lets a rank announce an object that nobody may allocate.
func TestHostileLengths(t *testing.T) {
	for _, n := range []int64{-1, pg.MaxObject + 1, math.MaxInt64} {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			if g.Rank() == 0 {
				require.NoError(t, wait(g.Send(t.Context(), of(t, []int64{n}, 1), 1)))
				return
			}
			_, err := pg.RecvObject[[]byte](t.Context(), g, 1, 0)
			oe := must.As[*pg.ObjectError](t, err)
			require.Equal(t, 0, oe.Rank)
			require.ErrorContains(t, err, fmt.Sprint(n))
		})
	}
}

// TestObjectsOverTheLimit has one rank, or all but rank 0, announce more than the ranks may send in one
// call. The others refuse alike, before they allocate.
func TestObjectsOverTheLimit(t *testing.T) {
	const ranks = 6
	announce := func(t *testing.T, g *pg.ProcessGroup) {
		out := make([]*tensor.Tensor, ranks)
		for r := range out {
			out[r] = of(t, []int64{0}, 1)
		}
		require.NoError(t, wait(g.AllGather(t.Context(), out, of(t, []int64{pg.MaxObject}, 1))))
	}
	for _, tc := range []struct {
		name  string
		torch bool
		lies  func(rank int) bool
		tell  func(t *testing.T, g *pg.ProcessGroup)
		call  func(ctx context.Context, g *pg.ProcessGroup) error
		want  string
	}{
		{"AllGatherObject", false, func(rank int) bool { return rank > 0 }, announce, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.AllGatherObject(ctx, g, []byte("x")))
		}, "pg: AllGatherObject: the objects of 6 ranks take 5368709121 bytes"},
		{"GatherObject", false, func(rank int) bool { return rank > 0 }, announce, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.GatherObject(ctx, g, []byte("x"), 1))
		}, "pg: GatherObject: the objects of 6 ranks take 5368709121 bytes"},
		{"AllGatherObject beside PyTorch", true, func(rank int) bool { return rank == 1 }, announce, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.AllGatherObject(ctx, g, []byte("x")))
		}, "pg: AllGatherObject: the objects of 6 ranks take 6442450944 bytes"},
		{"GatherObject beside PyTorch", true, func(rank int) bool { return rank == 1 }, announce, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.GatherObject(ctx, g, []byte("x"), 2))
		}, "pg: GatherObject: the objects of 6 ranks take 6442450944 bytes"},
		{"ScatterObject beside PyTorch", true, func(rank int) bool { return rank == 1 }, func(t *testing.T, g *pg.ProcessGroup) {
			require.NoError(t, wait(g.Broadcast(t.Context(), of(t, []int64{pg.MaxObject}, 1), 1)))
		}, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.ScatterObject[[]byte](ctx, g, nil, 1))
		}, "pg: ScatterObject: the objects of 6 ranks take 6442450944 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.Less(t, allocated(func() {
				pgtest.Run(t, ranks, func(t *testing.T, g *pg.ProcessGroup) {
					if tc.torch {
						pg.BesidePyTorch(g)
					}
					if tc.lies(g.Rank()) {
						tc.tell(t, g)
						return
					}
					require.ErrorContains(t, tc.call(t.Context(), g), tc.want)
				})
			}), uint64(64<<20))
		})
	}
}

// TestObjectsTakeNoPadding: one long object takes its own length on a rank that gets it, whatever the
// number of ranks.
func TestObjectsTakeNoPadding(t *testing.T) {
	const ranks, long = 8, 4 << 20
	mine := func(rank int) []byte {
		if rank == 3 {
			return make([]byte, long)
		}
		return []byte{byte(rank)}
	}
	for _, tc := range []struct {
		name string
		most uint64 // in multiples of the object, on all ranks
		call func(ctx context.Context, g *pg.ProcessGroup) error
	}{
		{"AllGatherObject", 3 * ranks, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.AllGatherObject(ctx, g, mine(g.Rank())))
		}},
		{"GatherObject", 10, func(ctx context.Context, g *pg.ProcessGroup) error {
			return must.Err(pg.GatherObject(ctx, g, mine(g.Rank()), 0))
		}},
		{"ScatterObject", 10, func(ctx context.Context, g *pg.ProcessGroup) error {
			var vs [][]byte
			if g.Rank() == 0 {
				for r := range ranks {
					vs = append(vs, mine(r))
				}
			}
			return must.Err(pg.ScatterObject(ctx, g, vs, 0))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			took := allocated(func() {
				pgtest.Run(t, ranks, func(t *testing.T, g *pg.ProcessGroup) { require.NoError(t, tc.call(t.Context(), g)) })
			})
			t.Logf("%d MiB", took>>20)
			require.Less(t, took, tc.most*long)
		})
	}
}

// allocated returns how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&now)
	return now.TotalAlloc - before.TotalAlloc
}

func TestGroups(t *testing.T) {
	pgtest.Run(t, 6, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		sum := func(sub *pg.ProcessGroup) int32 {
			v := []int32{int32(g.Rank())}
			require.NoError(t, pg.Wait(sub.AllReduce(ctx, pg.Slice(v), pg.Sum())))
			return v[0]
		}
		sub := must.Get(g.NewSubgroups(ctx, 2))
		first := g.Rank() / 2 * 2
		require.Equal(t, []int{first, first + 1}, sub.Ranks())
		require.EqualValues(t, 2*first+1, sum(sub))
		require.Equal(t, fmt.Sprint(1+first/2), sub.Name(), "the counter goes on for groups of others")

		if g.Rank()%2 == 1 {
			local := must.Get(g.NewGroup(ctx, []int{5, 3, 1}, pg.GroupOptions{Local: true}))
			require.EqualValues(t, 9, sum(local))
			require.Len(t, local.Name(), 40)
		}
		outer := must.Get(g.NewSubgroupsByEnumeration(ctx, [][]int{{5, 0}, {2, 3}}))
		if g.Rank() == 1 || g.Rank() == 4 {
			require.False(t, outer.IsMember())
			require.Equal(t, []int{2, 3}, outer.Ranks(), "the last group")
		} else {
			require.EqualValues(t, 5, sum(outer))
		}

		half := must.Get(g.SplitRanks(ctx, [][]int{{0, 1, 2}, {3, 4, 5}}))
		require.EqualValues(t, []int32{3, 12}[g.Rank()/3], sum(half))
		again := must.Get(half.SplitRanks(ctx, [][]int{{2}, {0, 1}}))
		require.Equal(t, g.Rank(), must.Get(again.GlobalRank(again.Rank())))
		require.NotEqual(t, half.Name(), again.Name())
		none, err := half.SplitRanks(ctx, [][]int{{0}})
		require.NoError(t, err)
		require.Equal(t, half.Rank() == 0, none.IsMember())

		for _, bad := range [][]int{nil, {6}, {-1}, {1, 1}} {
			require.Error(t, must.Err(g.NewGroup(ctx, bad)))
		}
		require.ErrorContains(t, must.Err(g.NewSubgroups(ctx, 4)), "does not divide")
		require.ErrorContains(t, must.Err(half.NewGroup(ctx, []int{0})), "for the default group")
	})
}

func TestRefusedCalls(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		f, i := vec(4), of(t, []int32{1, 2, 3, 4}, 4)
		sparse := must.Get(tensor.Sparse(of(t, []int64{0}, 1, 1), of(t, []float32{1}, 1), 4))
		ts := func(x ...*tensor.Tensor) []*tensor.Tensor { return x }
		b, err := g.Backend(tensor.CPU)
		require.NoError(t, err)
		for _, tc := range []struct {
			want string
			call func() (*work.Work, error)
		}{
			{"invalid root rank: 2", func() (*work.Work, error) { return g.Broadcast(ctx, f, 2) }},
			{"invalid root tensor: 1", func() (*work.Work, error) {
				return b.Broadcast(ctx, ts(f), backend.BroadcastOptions{RootTensor: 1})
			}},
			{"requires non-empty tensor list", func() (*work.Work, error) { return b.AllReduce(ctx, nil, backend.AllReduceOptions{}) }},
			{"tensor 1 is nil", func() (*work.Work, error) { return b.AllReduce(ctx, ts(f, nil), backend.AllReduceOptions{}) }},
			{"invalid tensor type at index 1 (expected float32", func() (*work.Work, error) { return b.AllReduce(ctx, ts(f, i), backend.AllReduceOptions{}) }},
			{"invalid tensor size at index 1", func() (*work.Work, error) { return b.AllReduce(ctx, ts(f, vec(5)), backend.AllReduceOptions{}) }},
			{"invalid tensor layout at index 1", func() (*work.Work, error) {
				return b.AllReduce(ctx, ts(f, sparse), backend.AllReduceOptions{})
			}},
			{"band", func() (*work.Work, error) {
				return g.AllReduce(ctx, f, pg.BAnd())
			}},
			{"avg", func() (*work.Work, error) { return g.Reduce(ctx, i, 0, pg.Avg()) }},
			{"only supports dense tensors", func() (*work.Work, error) { return g.Reduce(ctx, sparse, 0, pg.Sum()) }},
			{"only supports dense tensors, tensor 1 is", func() (*work.Work, error) { return b.Broadcast(ctx, ts(f, sparse), backend.BroadcastOptions{}) }},
			{"only supports dense tensors, output 1 is", func() (*work.Work, error) { return g.AllGather(ctx, ts(f, sparse), f) }},
			{"invalid root tensor: 0 (requires non-empty tensor list)", func() (*work.Work, error) {
				return b.Broadcast(ctx, nil, backend.BroadcastOptions{})
			}},
			{"invalid output tensor list (expected length 2, got 1)", func() (*work.Work, error) { return g.AllGather(ctx, ts(f), f) }},
			{"invalid tensor size at index 1", func() (*work.Work, error) { return g.AllGather(ctx, ts(vec(4), vec(5)), f) }},
			{"is not shape", func() (*work.Work, error) { return g.AllGatherIntoTensor(ctx, vec(7), f) }},
			{"world size", func() (*work.Work, error) {
				return g.AllGatherCoalesced(ctx, [][]*tensor.Tensor{{f}}, ts(f))
			}},
			{"requires", func() (*work.Work, error) {
				if g.Rank() == 0 {
					return g.Gather(ctx, ts(f, f), f, 1) // requires empty output on non-root
				}
				return g.Scatter(ctx, f, ts(f, f), 0) // requires empty input on non-root
			}},
			{"does not divide equally", func() (*work.Work, error) {
				return g.AllToAllSingle(ctx, vec(3), vec(3), nil, nil)
			}},
			{"Split sizes doesn't match", func() (*work.Work, error) {
				return g.AllToAllSingle(ctx, vec(4), vec(4), []int{2, 2}, []int{2, 1})
			}},
			{"Number of tensor splits", func() (*work.Work, error) {
				return g.AllToAllSingle(ctx, vec(4), vec(4), []int{4}, nil)
			}},
			{"invalid rank 2", func() (*work.Work, error) { return g.Send(ctx, f, 2) }},
			{"itself", func() (*work.Work, error) { return g.Recv(ctx, f, g.Rank()) }},
		} {
			before := g.Seq()
			_, err := tc.call()
			require.ErrorContains(t, err, tc.want)
			require.ErrorIs(t, err, backend.ErrInvalidArgument)
			require.Equal(t, before, g.Seq(), "no number was used: %s", tc.want)
		}
		require.NoError(t, g.Barrier(ctx), "the group goes on")
	})
}

// TestSmallAllReduceAllocates states what one all-reduce costs its caller.
func TestSmallAllReduceAllocates(t *testing.T) {
	j := pgtest.NewJob(1)
	defer j.Close()
	g, err := j.Join(t.Context(), 0)
	require.NoError(t, err)
	defer g.Close()
	ts, ctx := []*tensor.Tensor{vec(16)}, context.Background()
	var failed error
	call := func() {
		w, err := g.AllReduce(ctx, ts[0], pg.Sum())
		if err == nil {
			err = w.Wait(ctx)
		}
		failed = errors.Join(failed, err)
	}
	n := testing.AllocsPerRun(200, call)
	var before, after runtime.MemStats
	const runs = 5000
	runtime.ReadMemStats(&before)
	for range runs {
		call()
	}
	runtime.ReadMemStats(&after)
	bytes := (after.TotalAlloc - before.TotalAlloc) / runs
	require.NoError(t, failed)
	t.Logf("%v allocations, %d bytes", n, bytes)
	require.LessOrEqual(t, n, 2.0, "the Work, and under the race detector perhaps one more")
	require.LessOrEqual(t, bytes, uint64(400), "of the Work 176, and under the race detector now and then what is used again otherwise")
}

// TestEndedWorks: whatever is done with the Work of an operation that has ended, or ends at
// that moment, later operations do not feel it.
func TestEndedWorks(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		x := vec(4)
		ts, ctx := []*tensor.Tensor{x}, t.Context()
		works, done := make(chan *work.Work, 64), make(chan struct{})
		go func() {
			defer close(done)
			for w := range works {
				<-w.Done()
				w.Abort(errors.New("too late"))
				if err := w.Wait(ctx); err != nil {
					t.Errorf("%v: %v", w.Info(), err)
				}
			}
		}()
		for range 2000 {
			require.NoError(t, x.Fill(1))
			w := must.Get(g.AllReduce(ctx, ts[0], pg.Sum()))
			works <- w
			require.NoError(t, w.Wait(ctx))
			require.InDelta(t, 2, must.Get(x.Float64At(3)), 0)
		}
		close(works)
		<-done
	})
}
