package run_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

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

// ways are all ways between ranks. Draw places the ranks on hosts or in clusters.
var ways = []struct {
	name  string
	ranks func(t *testing.T, draw *rand.Rand, n int, o gloo.Options) []*gloo.Backend
}{
	{"memory", func(t *testing.T, _ *rand.Rand, n int, _ gloo.Options) []*gloo.Backend {
		return newTeam(t, n, nil).bs
	}},
	{"Gloo's wire", alike(func(o *gloo.Options, _ int) { *o = gloo.Options{Wire: gloo.WireGloo} })},
	{"tcp", alike(func(o *gloo.Options, _ int) { o.Wire = gloo.WireTCP })},
	{"tcp, one connection", alike(func(o *gloo.Options, _ int) { o.Wire, o.Lanes = gloo.WireTCP, -1 })},
	{"tcp, five connections", alike(func(o *gloo.Options, _ int) { o.Wire, o.Lanes = gloo.WireTCP, 4 })},
	{"shared memory", alike(func(o *gloo.Options, _ int) { o.Wire = gloo.WireNative })},
	{"hosts", alike(func(o *gloo.Options, place int) { o.Wire, o.Host = gloo.WireNative, fmt.Sprint(place) })},
	{"clusters", alike(func(o *gloo.Options, place int) { o.Wire, o.Cluster = gloo.WireNative, fmt.Sprint(place) })},
}

// alike connects ranks over a store. set gets the place of each rank, one of up to three.
func alike(set func(o *gloo.Options, place int)) func(*testing.T, *rand.Rand, int, gloo.Options) []*gloo.Backend {
	return func(t *testing.T, draw *rand.Rand, n int, o gloo.Options) []*gloo.Backend {
		all := make([]gloo.Options, n)
		for i := range all {
			all[i] = o
			set(&all[i], draw.IntN(3))
		}
		bs := grouped(t, all...)
		return bs
	}
}

// TestOneProgram runs the same random program on all ways between ranks. It has collectives of all kinds, dtypes and
// operators, and messages. Ranks wait when and how they like. Every result is what the operation is defined to do.
// Sums that are rounded have the same bits on all ranks, when they are called again, in memory as on Gloo's wire, and
// with SumsInRankOrder on each native way.
func TestOneProgram(t *testing.T) {
	defer run.SetClusterSizes(512, 3000)()
	for _, sums := range []gloo.Sums{gloo.SumsFast, gloo.SumsInRankOrder} {
		for range testsize.Of(1, 1, 20) {
			seed := rand.Uint64()
			draw := rand.New(rand.NewPCG(seed, 0))
			n := 2 + draw.IntN(5)
			gloos, native := make(map[string][]string), make(map[string][]string)
			for i, way := range ways {
				t.Run(fmt.Sprintf("%s, %d ranks, sums %q, seed %d", way.name, n, sums, seed), func(t *testing.T) {
					if i >= 5 && runtime.GOOS != "linux" {
						t.Skip("memory is shared on Linux only: not promised")
					}
					bs := way.ranks(t, draw, n, gloo.Options{Sums: sums})
					rounded := make([][]string, n)
					onAll(t, bs, func(r int, b *gloo.Backend) { rounded[r] = runProgram(t, seed, b) })
					for r := range rounded {
						require.Equal(t, rounded[0], rounded[r], "rounded sums of ranks 0 and %d", r)
					}
					if i >= 2 {
						native[way.name] = rounded[0]
					} else {
						gloos[way.name] = rounded[0]
					}
				})
			}
			for name, rounded := range gloos {
				require.Equal(t, gloos["memory"], rounded, "rounded sums on %s, seed %d", name, seed)
			}
			for name, rounded := range native {
				if sums == gloo.SumsInRankOrder {
					require.Equal(t, native["tcp"], rounded, "rounded sums on %s, seed %d", name, seed)
				}
			}
		}
	}
}

// runProgram runs the program of a seed on one rank and returns hashes of the sums that are rounded. The first error ends
// the group.
func runProgram(t *testing.T, seed uint64, b *gloo.Backend) (hashes []string) {
	const kinds = levelledKinds + 5
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	common, own := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, uint64(b.Rank())+2))
	arena := must.Get(b.Alloc(ctx, tensor.Float32, 2_000_000))
	defer func() { assert.NoError(t, b.Free(arena)) }()
	assert.Equal(t, make([]byte, 8_000_000), arena.Bytes())
	perhapsEmpty := must.Get(b.Alloc(ctx, tensor.Float64, b.Rank(), 3))
	assert.Equal(t, []int{b.Rank(), 3}, perhapsEmpty.Shape())
	assert.NoError(t, b.Free(perhapsEmpty))
	used := 0
	allocated := func(x *tensor.Tensor) *tensor.Tensor { // some of the tensors are in memory of Alloc, at odd places
		skip := 1 + own.IntN(50)
		if own.IntN(4) == 0 || used+skip+x.Len() > arena.Len() {
			return x
		}
		v := must.Get(arena.Slice(0, used+skip, used+skip+x.Len()))
		assert.NoError(t, v.CopyFrom(x))
		used += skip + x.Len()
		return v
	}
	var messages []func() bool
	var open []levelled
	var works []*work.Work
	var rounded []*tensor.Tensor
	wait := func() bool {
		for _, end := range messages {
			if !end() {
				return false
			}
		}
		var many sync.WaitGroup
		how := own.IntN(3)
		for _, k := range own.Perm(len(works)) {
			switch w := works[k]; how {
			case 0:
				assert.NoError(t, w.Wait(ctx), open[k].name)
			case 1:
				<-w.Done() // nobody helps
				assert.NoError(t, w.Err(), open[k].name)
			default:
				many.Go(func() { assert.NoError(t, w.Wait(context.Background()), open[k].name) })
			}
		}
		many.Wait()
		right := true
		for _, x := range open {
			for j := range x.want {
				right = assert.True(t, bytes.Equal(x.want[j].Bytes(), bytesOf(x.got[j])), "rank %d: %s, tensor %d", b.Rank(), x.name, j) && right
			}
		}
		messages, open, works, used = nil, nil, nil, 0
		return right
	}
	for i := range 4 * kinds {
		var steps []levelled
		switch kind := i % kinds; kind {
		case levelledKinds:
			messages = append(messages, exchangeMessages(t, common, b, i))
			continue
		case levelledKinds + 1, levelledKinds + 4:
			steps = append(steps, drawReduction(t, common, b))
		case levelledKinds + 2:
			steps = append(steps, drawInPlace(t, common, b, i))
		case levelledKinds + 3:
			seed, n := common.Uint64(), []int{1, 100, 3000, 40_000}[common.IntN(4)]
			for range 2 {
				x := rounding(t, seed, n, b)
				steps, rounded = append(steps, x), append(rounded, x.got[0])
			}
		default:
			steps = append(steps, drawLevelledOf(t, common, b, i, kind, allocated))
		}
		for _, x := range steps {
			x.name = fmt.Sprintf("%d: %s", i, x.name)
			w, err := x.call()
			if !assert.NoError(t, err, x.name) {
				b.Abort(nil)
				return nil
			}
			open, works = append(open, x), append(works, w)
		}
		if own.IntN(4) == 0 && !wait() {
			b.Abort(nil)
			return nil
		}
	}
	if !wait() {
		b.Abort(nil)
	}
	for i, x := range rounded {
		hashes = append(hashes, fmt.Sprintf("%x", sha256.Sum256(x.Bytes())))
		assert.Equal(t, hashes[i&^1], hashes[i], "the same sum again")
	}
	return hashes
}

// drawReduction reduces one or several tensors of some dtype by some operator. The results are exact. An operator that
// divides the result, or multiplies the inputs, does so for each tensor of a list, and once. Inputs do not change.
func drawReduction(t testing.TB, common *rand.Rand, b *gloo.Backend) levelled {
	ctx, size, me, root := context.Background(), b.Size(), b.Rank(), common.IntN(b.Size())
	o := stagedOperators[common.IntN(len(stagedOperators))]
	form, n, count := common.IntN(5), common.IntN(3000), 1+common.IntN(3)
	draw := func(operands, n int) (mine []*tensor.Tensor, want *tensor.Tensor) {
		all, want := reduced(t, common, size, operands, o.d, o.op, n)
		return all[me*operands:][:operands], want
	}
	empty := func(n int) *tensor.Tensor { return must.Get(tensor.New(o.d, n)) }
	var in, out, want []*tensor.Tensor
	scatter := backend.ReduceScatterOptions{Op: o.op}
	var call func() (*work.Work, error)
	switch form {
	case 0: // each becomes what all tensors of all ranks do
		x, all := draw(count, n)
		out, want = x, slices.Repeat(list(all), count)
		call = func() (*work.Work, error) { return b.AllReduce(ctx, out, backend.AllReduceOptions{Op: o.op}) }
	case 1:
		for i := range count {
			x, all := draw(1, n/(i+1))
			out, want = append(out, x...), append(want, all)
		}
		call = func() (*work.Work, error) { return b.AllReduceCoalesced(ctx, out, backend.AllReduceOptions{Op: o.op}) }
	case 2:
		x, all := draw(1, n)
		if out, want = x, list(all); me != root {
			want = list(must.Get(x[0].Clone()))
		}
		call = func() (*work.Work, error) { return b.Reduce(ctx, x[0], backend.ReduceOptions{Op: o.op, Root: root}) }
	case 3:
		for q := range size {
			x, all := draw(1, n)
			if in = append(in, x...); q == me {
				out, want = list(empty(n)), list(all)
			}
		}
		call = func() (*work.Work, error) { return b.ReduceScatter(ctx, out[0], in[:size], scatter) }
	default:
		for i := range count {
			n := n / (i + 1)
			x, all := draw(1, size*n)
			in, out, want = append(in, x...), append(out, empty(n)), append(want, must.Get(all.Slice(0, me*n, (me+1)*n)))
		}
		call = func() (*work.Work, error) {
			return b.ReduceScatterTensorCoalesced(ctx, out[:count], in[:count], scatter)
		}
	}
	got := slices.Concat(out, in)
	for _, x := range in {
		want = append(want, must.Get(x.Clone()))
	}
	return levelled{fmt.Sprintf("reduction %d (%v) of %d times %d %v", form, o.op.Kind(), count, n, o.d), got, want, call}
}

// drawInPlace is a reduce_scatter_tensor whose output is a part of its input.
func drawInPlace(t testing.TB, common *rand.Rand, b *gloo.Backend, salt int) levelled {
	n, size := []int{4, 5000, 70_000}[common.IntN(3)], b.Size()
	part := func(x *tensor.Tensor) *tensor.Tensor {
		return must.Get(x.Slice(0, b.Rank()*n, (b.Rank()+1)*n))
	}
	in := numbers(t, b.Rank(), salt, size*n)
	out, all := part(in), sum(t, size, size*n, func(q int) *tensor.Tensor { return numbers(t, q, salt, size*n) })
	return levelled{"reduce_scatter_tensor in place", list(out), list(part(all)), func() (*work.Work, error) {
		return b.ReduceScatterTensor(context.Background(), out, in, backend.ReduceScatterOptions{})
	}}
}

// rounding is an all_reduce of numbers whose sum has to be rounded.
func rounding(t testing.TB, seed uint64, n int, b *gloo.Backend) levelled {
	own, v := rand.New(rand.NewPCG(seed, uint64(b.Rank()))), make([]float32, n)
	for i := range v {
		v[i] = float32(own.NormFloat64())
	}
	x := of(t, v, n)
	return levelled{"rounded all_reduce", list(x), nil, func() (*work.Work, error) {
		return b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})
	}}
}
