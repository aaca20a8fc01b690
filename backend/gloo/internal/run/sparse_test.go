package run_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// sparseGroups are the ways in which ranks are connected; each option is of one rank.
func sparseGroups(size int) map[string][]gloo.Options {
	groups := map[string][]gloo.Options{}
	for r := range size {
		groups["memory"] = append(groups["memory"], gloo.Options{})
		groups["tcp"] = append(groups["tcp"], gloo.Options{Wire: gloo.WireTCP})
		groups["two levels"] = append(groups["two levels"], gloo.Options{Host: []string{"a", "b"}[r%2]})
	}
	return groups
}

// onAll calls do once for each rank, at the same time.
func onAll(t testing.TB, bs []*gloo.Backend, do func(r int, b *gloo.Backend)) {
	t.Helper()
	var wg sync.WaitGroup
	for r, b := range bs {
		wg.Go(func() { do(r, b) })
	}
	run.Finish(t, "all ranks", &wg)
}

// sparseShape is a shape of which the first dims dimensions are sparse.
type sparseShape struct {
	dims  int
	shape []int
}

func (s sparseShape) coords() int {
	n := 1
	for _, d := range s.shape[:s.dims] {
		n *= d
	}
	return n
}

// entries makes a sparse tensor of integers that may have coordinates twice.
func entries(t testing.TB, r *rand.Rand, d tensor.DType, s sparseShape, nnz int) *tensor.Tensor {
	t.Helper()
	if s.coords() == 0 {
		nnz = 0
	}
	at := make([]int64, s.dims*nnz)
	for i := range at {
		at[i] = r.Int64N(int64(s.shape[i/nnz]))
	}
	values := must.Get(tensor.New(d, append([]int{nnz}, s.shape[s.dims:]...)...))
	flat := values
	if d.IsComplex() {
		flat = must.Get(values.ViewAsReal())
	}
	for i := range flat.Len() {
		index, rest := make([]int, flat.Dims()), i
		for dim := flat.Dims() - 1; dim >= 0; dim-- {
			index[dim], rest = rest%flat.Shape()[dim], rest/flat.Shape()[dim]
		}
		require.NoError(t, flat.SetFloat64(float64(r.IntN(2)), index...))
	}
	return must.Get(tensor.Sparse(of(t, at, s.dims, nnz), values, s.shape...))
}

func of[T tensor.Element](t testing.TB, v []T, shape ...int) *tensor.Tensor {
	t.Helper()
	return must.Get(tensor.Of(v, shape...))
}

func sameSparse(t testing.TB, want, got *tensor.Tensor, msg string, args ...any) {
	msg = fmt.Sprintf(msg, args...)
	_ = assert.True(t, got.IsCoalesced(), msg) &&
		assert.Equal(t, want.Indices().Shape(), got.Indices().Shape(), msg) &&
		assert.Equal(t, string(want.Indices().Bytes()), string(got.Indices().Bytes()), msg) &&
		assert.Equal(t, want.Values().Shape(), got.Values().Shape(), msg) &&
		assert.Equal(t, string(want.Values().Bytes()), string(got.Values().Bytes()), msg)
}

var sparseShapes = []sparseShape{
	{1, []int{40}}, {1, []int{7, 3}}, {2, []int{5, 9}}, {2, []int{6, 4, 2, 3}}, {3, []int{3, 4, 5}}, {1, []int{1}},
	{0, []int{3}}, {1, []int{9, 0}}, {1, []int{0, 4}}, {2, []int{1, 30, 64}}, {1, []int{5000, 3}}, {3, []int{2, 3, 2, 1, 2}},
}

// TestF18SparseAgainstSumSparse has every kind of group make what
// tensor.SumSparse makes of all ranks' tensors.
func TestF18SparseAgainstSumSparse(t *testing.T) {
	onLinux(t)
	rounds := testsize.Of(4, 4, 12)
	for size := 1; size <= 6; size++ {
		for name, options := range sparseGroups(size) {
			t.Run(fmt.Sprintf("%d ranks, %s", size, name), func(t *testing.T) {
				bs := grouped(t, options...)
				seed := must.Seed(t)
				r := rand.New(rand.NewPCG(seed, 0))
				for range rounds {
					sparseRound(t, r, bs)
				}
			})
		}
	}
}

func sparseRound(t *testing.T, r *rand.Rand, bs []*gloo.Backend) {
	dtypes := tensor.DTypes()
	d := dtypes[r.IntN(len(dtypes))]
	if d.IsFloat() && d.Size() == 1 && bs[0].Explain().Links != nil && bs[0].Explain().Links[0].Transport != "shm" {
		d = tensor.Float16 // others do not hold the sums, and a dense one's order is the algorithm's
	}
	s := sparseShapes[r.IntN(len(sparseShapes))]
	most := []int{0, 1, s.coords() / 100, s.coords() / 2, 3 * s.coords()}[r.IntN(5)]
	each := 1 + r.IntN(2)
	var all []*tensor.Tensor
	ts := make([][]*tensor.Tensor, len(bs))
	for rank := range bs {
		var own []*tensor.Tensor
		for range each {
			n := most
			if r.IntN(4) == 0 {
				n = r.IntN(most + 1)
			}
			x := entries(t, r, d, s, n)
			if r.IntN(2) == 0 {
				x = must.Get(x.Coalesce())
			}
			ts[rank] = append(ts[rank], x)
			c := must.Get(x.Clone())
			own = append(own, c)
		}
		sum := must.Get(tensor.SumSparse(own...))
		all = append(all, sum)
	}
	want := must.Get(tensor.SumSparse(all...))
	if want.Values() == all[0].Values() { // of one rank
		want = must.Get(want.Clone())
	}
	op := backend.Sum()
	native := bs[0].Explain().Wire == string(gloo.WireNative)
	if d.IsFloat() && d.Size() >= 4 {
		op = []backend.ReduceOp{backend.Sum(), backend.Avg(), backend.PreMulSum(4)}[r.IntN(3)]
		if op.Kind() == backend.PreMulSum(4).Kind() && !native {
			op = backend.Sum()
		}
	}
	red := must.Get(op.Reduction(d, len(bs)))
	if red.Before != nil {
		red.Before(want.Values().Bytes()) // as if before the sum, of integers
	}
	if red.After != nil {
		red.After(want.Values().Bytes())
	}
	onAll(t, bs, func(rank int, b *gloo.Backend) {
		kept := ts[rank][0].Values()
		before := slices.Clone(kept.Bytes())
		if !assert.NoError(t, wait(b.AllReduce(context.Background(), ts[rank], backend.AllReduceOptions{Op: op}))) {
			return
		}
		for i, x := range ts[rank] {
			sameSparse(t, want, x, "rank %d, tensor %d: %v %v of %v, up to %d entries", rank, i, op, d, s, most)
		}
		assert.Equal(t, before, kept.Bytes(), "the values that the tensor had are not written to")
	})
}

// TestSparseInRounds has messages so much larger than the window that
// each takes several.
func TestSparseInRounds(t *testing.T) {
	onLinux(t)
	groups := sparseGroups(3)
	groups["gloo"] = slices.Repeat([]gloo.Options{{Wire: gloo.WireGloo}}, 3) // has no rounds; memory grows
	for name, options := range groups {
		t.Run(name, func(t *testing.T) {
			bs := grouped(t, options...)
			defer run.SetWindow(200)()
			r := must.Rand(t)
			for range 10 {
				sparseRound(t, r, bs)
			}
		})
	}
}

// TestSparseFarApart has coordinates beyond 2^31 and 2^32, most of them on the
// first few.
func TestSparseFarApart(t *testing.T) {
	onLinux(t)
	in64Bits(t)
	for name, options := range sparseGroups(3) {
		t.Run(name, func(t *testing.T) {
			bs := grouped(t, options...)
			r := rand.New(rand.NewPCG(1, 2))
			var all, ts []*tensor.Tensor
			for range bs {
				at := make([]int64, 2*1000)
				for i := range 1000 {
					at[i], at[1000+i] = r.Int64N(50), r.Int64N(1<<20)
					if r.IntN(10) == 0 {
						at[i], at[1000+i] = r.Int64N(1<<30), r.Int64N(1<<20)
					}
				}
				v := make([]float64, 2*1000)
				for i := range v {
					v[i] = float64(r.IntN(1000))
				}
				x := must.Get(tensor.Sparse(of(t, at, 2, 1000), of(t, v, 1000, 2), 1<<30, 1<<20, 2))
				ts = append(ts, x)
				c := must.Get(x.Clone())
				all = append(all, c)
			}
			want := must.Get(tensor.SumSparse(all...))
			onAll(t, bs, func(rank int, b *gloo.Backend) {
				if assert.NoError(t, wait(b.AllReduce(context.Background(), list(ts[rank]), backend.AllReduceOptions{}))) {
					sameSparse(t, want, ts[rank], "rank %d", rank)
				}
			})
		})
	}
}

// TestSparseSumsAreInRankOrder has floats whose sums show the order.
func TestSparseSumsAreInRankOrder(t *testing.T) {
	onLinux(t)
	for name, options := range sparseGroups(4) {
		t.Run(name, func(t *testing.T) {
			bs := grouped(t, options...)
			values := []float32{1, 1e8, 1, -1e8}
			onAll(t, bs, func(rank int, b *gloo.Backend) {
				x := sparse(t, 1000, []int64{5, 700}, []float32{values[rank], 1})
				if !assert.NoError(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{}))) {
					return
				}
				want := float32(0)
				for _, v := range values {
					want += v
				}
				assert.Equal(t, vec(want, 4).Bytes(), x.Values().Bytes())
			})
		})
	}
}

// TestF18SparseMismatch: what one rank has otherwise is an error on all, which
// names it, and no tensor changes.
func TestF18SparseMismatch(t *testing.T) {
	onLinux(t)
	mk := func(t *testing.T, d tensor.DType, dims int, shape ...int) *tensor.Tensor {
		return entries(t, rand.New(rand.NewPCG(1, 1)), d, sparseShape{dims, shape}, 5)
	}
	for _, tc := range []struct {
		name  string
		other func(t *testing.T) (*tensor.Tensor, backend.ReduceOp)
		want  string
	}{
		{"dtype", func(t *testing.T) (*tensor.Tensor, backend.ReduceOp) {
			return mk(t, tensor.Int32, 1, 30, 2), backend.Sum()
		}, "int32"},
		{"shape", func(t *testing.T) (*tensor.Tensor, backend.ReduceOp) {
			return mk(t, tensor.Float32, 1, 31, 2), backend.Sum()
		}, "[31 2]"},
		{"dense shape", func(t *testing.T) (*tensor.Tensor, backend.ReduceOp) {
			return mk(t, tensor.Float32, 1, 30, 3), backend.Sum()
		}, "[30 3]"},
		{"sparse dimensions", func(t *testing.T) (*tensor.Tensor, backend.ReduceOp) {
			return mk(t, tensor.Float32, 2, 30, 2), backend.Sum()
		}, "with 2 sparse dimensions"},
		{"operator", func(t *testing.T) (*tensor.Tensor, backend.ReduceOp) {
			return mk(t, tensor.Float32, 1, 30, 2), backend.Avg()
		}, "avg of float32"},
	} {
		for name, options := range sparseGroups(4) {
			t.Run(tc.name+", "+name, func(t *testing.T) {
				bs := grouped(t, options...)
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					x, op := mk(t, tensor.Float32, 1, 30, 2), backend.Sum()
					if rank == 2 {
						x, op = tc.other(t)
					}
					before := must.Get(x.Clone())
					err := wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{Op: op}))
					assert.ErrorIs(t, err, work.ErrMismatch)
					var e *work.Error
					if assert.ErrorAs(t, err, &e) {
						assert.Equal(t, 2, e.Peer)
					}
					assert.ErrorContains(t, err, "rank 2 has ")
					assert.ErrorContains(t, err, tc.want)
					assert.Equal(t, before.Indices().Bytes(), x.Indices().Bytes())
					assert.Equal(t, before.Values().Bytes(), x.Values().Bytes())
				})
			})
		}
	}
}

func TestSparseRefused(t *testing.T) {
	bs := connected(t, run.GroupTimeout, gloo.WireTCP, gloo.WireTCP)
	_, err := bs[0].AllReduce(context.Background(), list(sparse(t, 3, []int64{1}, []float32{1})), backend.AllReduceOptions{Op: backend.Max()})
	require.ErrorContains(t, err, "only works with ReduceOp.SUM")
}

// lies is an operator with which a rank of the next test says what it likes.
var lies = backend.CustomOf("lies", func(a, b float32) float32 { return a })

// lie is what it says, by group.
var lie sync.Map

func init() {
	err := run.RegisterTestWork(run.TestWork{
		Name: "lying", Device: tensor.CPU, Layout: tensor.SparseCOO, Priority: 1,
		Can: func(_ []*tensor.Tensor, op backend.ReduceOp) error {
			if op != lies {
				return errors.New("for a test")
			}
			return nil
		},
		New: func(ts []*tensor.Tensor, h run.Host) (func(ctx context.Context) error, error) {
			return func(ctx context.Context) error {
				tell, _ := lie.Load(ts[0])
				tell.(func(h run.Host))(h)
				<-ctx.Done() // until the other has had enough
				return ctx.Err()
			}, nil
		},
	})
	if err != nil {
		panic(err)
	}
}

// TestHostileSparseNative has a peer that announces what cannot be, and sends
// what it did not announce. The tensor of 1000 has entries 10 and 600 on rank 0.
func TestHostileSparseNative(t *testing.T) {
	onLinux(t)
	ctx := context.Background()
	says := func(h run.Host, b []byte) { h.AllGatherBytes(ctx, make([]byte, 2*len(b)), b) }
	shape := []int{1000}
	for _, tc := range []struct {
		name string
		tell func(h run.Host)
		want string
	}{
		{"fewer than none", func(h run.Host) { says(h, run.SparseMeta(shape, -1)) }, "rank 1 announces -1 entries, of at most 1000"},
		{"more than there are", func(h run.Host) { says(h, run.SparseMeta(shape, 1001)) }, "rank 1 announces 1001 entries, of at most 1000"},
		{"enormous", func(h run.Host) { says(h, run.SparseMeta(shape, math.MaxInt64)) }, "of at most 1000"},
		{"coordinates outside", func(h run.Host) {
			says(h, run.SparseMeta(shape, 2))
			h.AllGatherVBytes(ctx, make([]byte, 32), run.Numbers(20, 1000), []int64{16, 16})
			h.AllGatherVBytes(ctx, make([]byte, 16), make([]byte, 8), []int64{8, 8})
		}, "entries of rank 1: "},
	} {
		for name, options := range sparseGroups(2) {
			if name == "two levels" {
				continue // of one rank each, as tcp
			}
			t.Run(tc.name+", "+name, func(t *testing.T) {
				bs := grouped(t, options...)
				ctx, cancel := context.WithCancel(ctx)
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					x := sparse(t, 1000, []int64{10, 600}, []float32{1, 2})
					if rank == 1 {
						lie.Store(x, tc.tell)
						defer lie.Delete(x)
						assert.Error(t, wait(b.AllReduce(ctx, list(x), backend.AllReduceOptions{Op: lies})))
						return
					}
					defer cancel()
					err := wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{}))
					assert.ErrorIs(t, err, work.ErrMismatch)
					var e *work.Error
					if assert.ErrorAs(t, err, &e) {
						assert.Equal(t, 1, e.Peer)
					}
					assert.ErrorContains(t, err, tc.want)
					assert.Equal(t, vec(1, 2).Bytes(), x.Values().Bytes())
				})
			})
		}
	}
}

// TestHostileSparseTakesNoMemory has a peer that announces two to the power of 30 entries of
// 4 KiB and sends none of them.
func TestHostileSparseTakesNoMemory(t *testing.T) {
	onLinux(t)
	defer run.SetWindow(1 << 20)()
	shape := []int{math.MaxInt >> 23, 1 << 10}
	const n = 1 << 30
	for name, o := range map[string]gloo.Options{"gloo": {Wire: gloo.WireGloo}, "tcp": {Wire: gloo.WireTCP}} {
		t.Run(name, func(t *testing.T) {
			bs := grouped(t, o, o)
			mk := func() *tensor.Tensor {
				return must.Get(tensor.Sparse(of(t, []int64{}, 1, 0), of(t, []float32{}, 0, 1<<10), shape...))
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var before, now runtime.MemStats
			runtime.ReadMemStats(&before)
			onAll(t, bs, func(rank int, b *gloo.Backend) {
				x, op := mk(), backend.Sum()
				if rank == 1 {
					op = lies
					lie.Store(x, func(h run.Host) {
						meta := run.SparseMeta(shape, n)
						if o.Wire == gloo.WireGloo {
							meta = run.Numbers(int64(shape[0]), 0, 0, 0, int64(shape[1]), 0, 0, 0, n)
						}
						h.AllGatherBytes(ctx, make([]byte, 2*len(meta)), meta)
						// Rank 0 knows all of the lie, and has this long to believe it.
						time.AfterFunc(500*time.Millisecond, cancel)
					})
					defer lie.Delete(x)
				}
				assert.Error(t, wait(b.AllReduce(ctx, list(x), backend.AllReduceOptions{Op: op})))
			})
			runtime.ReadMemStats(&now)
			require.Less(t, now.TotalAlloc-before.TotalAlloc, uint64(64<<20))
		})
	}
}

// TestSparseSteadyState: the memory of gathered entries is used again. New are the result, and what sorts the entries.
func TestSparseSteadyState(t *testing.T) {
	onLinux(t)
	for name, options := range sparseGroups(4) {
		t.Run(name, func(t *testing.T) {
			bs := grouped(t, options...)
			const n, row, rounds = 500, 16, 10
			at, values := make([]int64, n), make([]float32, n*row)
			for i := range at {
				at[i] = int64(5 * i)
			}
			var before, now runtime.MemStats
			var result int64
			run := func(rounds int) {
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					indices, v := of(t, at, 1, n), of(t, values, n, row)
					x, err := tensor.Sparse(indices, v, 5*n, row)
					assert.NoError(t, err)
					for range rounds {
						assert.NoError(t, x.SetSparse(indices, v, true))
						assert.NoError(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})))
					}
					if rank == 0 {
						result = int64(len(bs) * (x.Indices().ByteLen() + x.Values().ByteLen()))
					}
				})
			}
			run(5)
			runtime.ReadMemStats(&before)
			run(rounds)
			runtime.ReadMemStats(&now)
			each := int64(now.TotalAlloc-before.TotalAlloc) / rounds
			require.Less(t, each, result+int64(len(bs)*len(bs)*n*64), "of which the results are %d", result)
			require.Less(t, int64(now.Mallocs-before.Mallocs)/rounds, int64(400*len(bs)))
		})
	}
}
