package run_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
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

// nativeGroups are the ways that ranks of this library are connected.
var nativeGroups = []struct {
	name    string
	options func(ranks int) []gloo.Options // nil if there is no such group
}{
	{"memory", func(ranks int) []gloo.Options {
		return repeated(ranks, func(int) gloo.Options { return gloo.Options{Wire: gloo.WireNative} })
	}},
	{"tcp", func(ranks int) []gloo.Options {
		return repeated(ranks, func(int) gloo.Options { return gloo.Options{Wire: gloo.WireTCP} })
	}},
	{"two levels", func(ranks int) []gloo.Options {
		if ranks < 3 {
			return nil
		}
		return repeated(ranks, func(r int) gloo.Options { return gloo.Options{Wire: gloo.WireNative, Host: fmt.Sprint(2 * r / ranks)} })
	}},
	{"two levels of other sizes", func(ranks int) []gloo.Options {
		if ranks < 3 {
			return nil
		}
		return repeated(ranks, func(r int) gloo.Options { return gloo.Options{Wire: gloo.WireNative, Host: fmt.Sprint(min(r, 1))} })
	}},
}

func repeated(n int, f func(i int) gloo.Options) []gloo.Options {
	all := make([]gloo.Options, n)
	for i := range all {
		all[i] = f(i)
	}
	return all
}

// onNative runs f with each way of connecting so many ranks, except some.
func onNative(t *testing.T, ranks int, f func(t *testing.T, connect func(t *testing.T) []*gloo.Backend), except ...string) {
	for _, way := range nativeGroups {
		options := way.options(ranks)
		if options == nil || slices.Contains(except, way.name) || way.name != "tcp" && runtime.GOOS != "linux" {
			continue
		}
		t.Run(fmt.Sprint(way.name, ", ", ranks, " ranks"), func(t *testing.T) {
			f(t, func(t *testing.T) []*gloo.Backend {
				bs, errs := connectWith(t, run.GroupTimeout, options...)
				require.NoError(t, errors.Join(errs...))
				return bs
			})
		})
	}
}

// memory is where the tensors of a test come from.
type memory func(d tensor.DType, shape ...int) *tensor.Tensor

func ordinary(t *testing.T) memory {
	return func(d tensor.DType, shape ...int) *tensor.Tensor {
		return must.Get(tensor.New(d, shape...))
	}
}

// a call issues some collectives, and waits for each.
type call func(b *gloo.Backend, new memory) error

func several(n int, new memory, shape ...int) []*tensor.Tensor {
	all := make([]*tensor.Tensor, n)
	for i := range all {
		all[i] = new(tensor.Float32, shape...)
	}
	return all
}

// rooted returns blocks for a root, and none for others.
func rooted(b *gloo.Backend, new memory, root, n int) []*tensor.Tensor {
	if b.Rank() != root {
		return nil
	}
	return several(b.Size(), new, n)
}

func callAllReduce(d tensor.DType, op backend.ReduceOp, shape ...int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.AllReduce(context.Background(), list(new(d, shape...)), backend.AllReduceOptions{Op: op}))
	}
}

func callAllReduceList(shapes ...int) call {
	return func(b *gloo.Backend, new memory) error {
		var ts []*tensor.Tensor
		for _, n := range shapes {
			ts = append(ts, new(tensor.Float32, n))
		}
		return wait(b.AllReduceCoalesced(context.Background(), ts, backend.AllReduceOptions{}))
	}
}

func callBroadcast(root, n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.Broadcast(context.Background(), list(new(tensor.Float32, n)), backend.BroadcastOptions{Root: root}))
	}
}

func callReduce(root, n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.Reduce(context.Background(), new(tensor.Float32, n), backend.ReduceOptions{Root: root}))
	}
}

func callGather(root, n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.Gather(context.Background(), rooted(b, new, root, n), new(tensor.Float32, n), backend.GatherOptions{Root: root}))
	}
}

func callScatter(root, n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.Scatter(context.Background(), new(tensor.Float32, n), rooted(b, new, root, n), backend.ScatterOptions{Root: root}))
	}
}

func callAllGather(n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.AllGather(context.Background(), several(b.Size(), new, n), new(tensor.Float32, n), backend.AllGatherOptions{}))
	}
}

// callAllGatherV gathers n elements of each rank, and more of one.
func callAllGatherV(n, big, more int) call {
	return func(b *gloo.Backend, new memory) error {
		out := several(b.Size(), new, n)
		out[big] = new(tensor.Float32, n+more)
		return wait(b.AllGatherV(context.Background(), out, new(tensor.Float32, out[b.Rank()].Len()), backend.AllGatherOptions{}))
	}
}

// callReduceScatter is callAllGatherV for a reduce-scatter.
func callReduceScatter(n, big, more int) call {
	return func(b *gloo.Backend, new memory) error {
		in := several(b.Size(), new, n)
		in[big] = new(tensor.Float32, n+more)
		return wait(b.ReduceScatter(context.Background(), new(tensor.Float32, in[b.Rank()].Len()), in, backend.ReduceScatterOptions{}))
	}
}

func callAllToAll(d tensor.DType, n int) call {
	return func(b *gloo.Backend, new memory) error {
		return wait(b.AllToAllSingle(context.Background(), new(d, b.Size()*n), new(d, b.Size()*n), nil, nil, backend.AllToAllOptions{}))
	}
}

func callBarrier(b *gloo.Backend, _ memory) error { return barrier(b) }

func callMonitored(b *gloo.Backend, _ memory) error {
	return b.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{})
}

func callAlloc(b *gloo.Backend, _ memory) (err error) {
	defer must.Catch(&err)
	return b.Free(must.Get(b.Alloc(context.Background(), tensor.Float32, 3)))
}

func callSparse(t *testing.T) call {
	return func(b *gloo.Backend, _ memory) error {
		return wait(b.AllReduce(context.Background(), list(sparse(t, 10, []int64{1}, []float32{2})), backend.AllReduceOptions{}))
	}
}

// inTurn makes several calls, up to the first that fails.
func inTurn(calls ...call) call {
	return func(b *gloo.Backend, new memory) error {
		for _, c := range calls {
			if err := c(b, new); err != nil {
				return err
			}
		}
		return nil
	}
}

// wrong is a program of which the last rank has another version.
type wrong struct {
	name        string
	most, other call
	says, said  string // what they call, as the error shows it
	waits       bool   // every rank needs every other for its first call
}

func wrongs(t *testing.T, ranks, n int) []wrong {
	f, last := tensor.Float32, ranks-1
	sized := func(format string, args ...any) string { return fmt.Sprintf(format, args...) }
	return []wrong{
		{"dtype", callAllReduce(f, backend.Sum(), n), callAllReduce(tensor.Int32, backend.Sum(), n),
			sized("all_reduce(sum) of float32[%d]", n), sized("all_reduce(sum) of int32[%d]", n), true},
		{"operator", callAllReduce(f, backend.Sum(), n), callAllReduce(f, backend.Max(), n),
			sized("all_reduce(sum) of float32[%d]", n), sized("all_reduce(max) of float32[%d]", n), true},
		{"count", callAllReduce(f, backend.Sum(), n), callAllReduce(f, backend.Sum(), n+1),
			sized("all_reduce(sum) of float32[%d]", n), sized("all_reduce(sum) of float32[%d]", n+1), true},
		{"broadcast's root", callBroadcast(0, n), callBroadcast(1, n),
			sized("broadcast of float32[%d] from root 0", n), sized("broadcast of float32[%d] from root 1", n), false},
		{"each its own root", callBroadcast(0, n), callBroadcast(last, n),
			sized("broadcast of float32[%d] from root 0", n), sized("broadcast of float32[%d] from root %d", n, last), false},
		{"nobody is root", callBroadcast(last, n), callBroadcast(0, n),
			sized("broadcast of float32[%d] from root %d", n, last), sized("broadcast of float32[%d] from root 0", n), false},
		{"reduce's root", callReduce(0, n), callReduce(1, n),
			sized("reduce(sum) of float32[%d] to root 0", n), sized("reduce(sum) of float32[%d] to root 1", n), false},
		{"all send", callReduce(last, n), callReduce(0, n),
			sized("reduce(sum) of float32[%d] to root %d", n, last), sized("reduce(sum) of float32[%d] to root 0", n), false},
		{"gather's root", callGather(0, n), callGather(1, n),
			sized("gather of float32[%d] to root 0", n), sized("gather of float32[%d] to root 1", n), false},
		{"scatter's root", callScatter(0, n), callScatter(1, n),
			sized("scatter of float32[%d] from root 0", n), sized("scatter of float32[%d] from root 1", n), false},
		{"order", inTurn(callAllReduce(f, backend.Sum(), n), callBroadcast(0, n)), inTurn(callBroadcast(0, n), callAllReduce(f, backend.Sum(), n)),
			sized("all_reduce(sum) of float32[%d]", n), sized("broadcast of float32[%d] from root 0", n), false},
		{"order of reductions", inTurn(callReduce(0, n), callAllReduce(f, backend.Max(), n)), inTurn(callAllReduce(f, backend.Max(), n), callReduce(0, n)),
			sized("reduce(sum) of float32[%d] to root 0", n), sized("all_reduce(max) of float32[%d]", n), false},
		{"operation", callAllReduce(f, backend.Sum(), ranks*n), callAllGather(n),
			sized("all_reduce(sum) of float32[%d]", ranks*n), sized("all_gather of float32[%d]", n), true},
		{"a list", callAllReduce(f, backend.Sum(), n), callAllReduceList(n, n),
			sized("all_reduce(sum) of float32[%d]", n), sized("all_reduce(sum) of float32[%d]", 2*n), true},
		{"uneven blocks", callAllGatherV(n, 0, 2), callAllGatherV(n, 1, 2),
			sized("all_gather of float32[%d] in parts", ranks*n+2), sized("all_gather of float32[%d] in parts", ranks*n+2), true},
		{"uneven reduce_scatter", callReduceScatter(n, 0, 2), callReduceScatter(n, 1, 2),
			sized("reduce_scatter(sum) of float32[%d] in parts", ranks*n+2), sized("reduce_scatter(sum) of float32[%d] in parts", ranks*n+2), true},
		{"all_to_all's dtype", callAllToAll(f, n), callAllToAll(tensor.Int32, n), "all_to_all of float32", "all_to_all of int32", true},
	}
}

// small are those of which the size is of no interest.
func small(t *testing.T) []wrong {
	f := tensor.Float32
	return []wrong{
		{"barrier", callAllReduce(f, backend.Sum(), 1), callBarrier, "all_reduce(sum) of float32[1]", "barrier", true},
		{"monitored", callMonitored, callAllReduce(f, backend.Sum(), 1), "monitored_barrier", "all_reduce(sum) of float32[1]", true},
		{"sparse", callSparse(t), callAllReduce(f, backend.Sum(), 1), "all_reduce of a sparse tensor", "all_reduce(sum) of float32[1]", true},
		{"nothing to send", callAllReduce(f, backend.Sum(), 0), callBroadcast(0, 0), "all_reduce(sum) of float32[0]", "broadcast of float32[0] from root 0", false},
		// What comes later fits.
		{"then all_reduce", inTurn(callBroadcast(0, 3), callAllReduce(f, backend.Sum(), 7)), inTurn(callBroadcast(1, 3), callAllReduce(f, backend.Sum(), 7)),
			"broadcast of float32[3] from root 0", "broadcast of float32[3] from root 1", true},
		{"then a barrier", inTurn(callReduce(0, 3), callMonitored), inTurn(callReduce(1, 3), callMonitored),
			"reduce(sum) of float32[3] to root 0", "reduce(sum) of float32[3] to root 1", true},
		{"then more of it", inTurn(slices.Repeat([]call{callBroadcast(0, 3)}, 40)...), inTurn(slices.Repeat([]call{callBroadcast(1, 3)}, 40)...),
			"broadcast of float32[3] from root 0", "broadcast of float32[3] from root 1", false},
	}
}

// TestDisagreement has the last rank of a group call something else than the others. Every rank gets
// an error that shows both calls: from that call if it needs all others for it, else from a
// barrier, or from Close.
func TestDisagreement(t *testing.T) {
	sizes := []int{5, 1024, 1, 1 << 20}[:testsize.Of(1, 2, 4)]
	for _, ranks := range []int{2, 4} {
		onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			t.Parallel()
			for _, x := range small(t) {
				t.Run(x.name, func(t *testing.T) { disagree(t, connect, x, ordinary(t)) })
			}
			for _, n := range sizes {
				for _, x := range wrongs(t, ranks, n) {
					t.Run(fmt.Sprint(x.name, " of ", n), func(t *testing.T) { disagree(t, connect, x, ordinary(t)) })
				}
			}
		})
	}
}

func disagree(t *testing.T, connect func(t *testing.T) []*gloo.Backend, x wrong, new memory) {
	ends := []string{"barrier", "close"}
	if x.waits {
		ends = []string{"here"}
	}
	for _, end := range ends {
		bs := connect(t)
		onAll(t, bs, func(_ int, b *gloo.Backend) { assert.NoError(t, barrier(b)) })
		checkDisagreement(t, bs, x, end, 1, func(int) memory { return new })
	}
}

// checkDisagreement runs a wrong program, which begins with the collective of a number.
func checkDisagreement(t *testing.T, bs []*gloo.Backend, x wrong, end string, number int, new func(rank int) memory) {
	odd := len(bs) - 1
	errs := make([]error, len(bs))
	onAll(t, bs, func(r int, b *gloo.Backend) {
		if r == odd {
			errs[r] = x.other(b, new(r))
		} else {
			errs[r] = x.most(b, new(r))
		}
	})
	onAll(t, bs, func(r int, b *gloo.Backend) {
		switch had := errs[r] != nil; {
		case end == "barrier" && !had:
			errs[r] = barrier(b)
		case end == "close" && !had:
			errs[r] = b.Close()
		case had:
			assert.NoError(t, b.Close(), "an operation has returned it")
		}
	})
	for r, err := range errs {
		var e *work.Error
		if !assert.ErrorIs(t, err, work.ErrMismatch, "rank %d, %s", r, end) || !assert.ErrorAs(t, err, &e) {
			continue
		}
		assert.Contains(t, err.Error(), fmt.Sprintf("transport: the ranks disagree on the operation: as collective number %d rank ", number), "rank %d", r)
		assert.Contains(t, err.Error(), " called "+x.says, "rank %d", r)
		assert.Contains(t, err.Error(), fmt.Sprintf("rank %d called %s", odd, x.said), "rank %d", r)
		assert.GreaterOrEqual(t, e.Peer, 0)
	}
}

// arena gives tensors out of memory of Alloc, one after the other.
func arena(t *testing.T, b *gloo.Backend, bytes int) memory {
	whole := must.Get(b.Alloc(context.Background(), tensor.Uint8, bytes))
	t.Cleanup(func() { require.NoError(t, b.Free(whole)) })
	rest := whole.Bytes()
	return func(d tensor.DType, shape ...int) *tensor.Tensor {
		n := d.Size()
		for _, m := range shape {
			n *= m
		}
		x := must.Get(tensor.FromBytes(d, rest[:n], shape...))
		rest = rest[(n+63)&^63:]
		return x
	}
}

// TestDisagreementInAlloc is TestDisagreement with tensors of Alloc, which are not staged.
func TestDisagreementInAlloc(t *testing.T) {
	onLinux(t)
	sizes := []int{64 << 10, 1 << 20}[:testsize.Of(1, 1, 2)]
	for _, ranks := range []int{2, 4} {
		onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			t.Parallel()
			t.Run("alloc", func(t *testing.T) {
				disagree(t, connect, wrong{"", callAlloc, callBroadcast(0, 5), "Alloc", "broadcast of float32[5] from root 0", false}, ordinary(t))
			})
			for _, n := range sizes {
				for i, x := range wrongs(t, ranks, n) {
					t.Run(fmt.Sprint(x.name, " of ", n), func(t *testing.T) {
						bs := connect(t)
						new := make([]memory, ranks)
						onAll(t, bs, func(r int, b *gloo.Backend) { new[r] = arena(t, b, 4*(3*ranks+3)*(n+64)) })
						end := []string{"barrier", "close"}[i%2]
						checkDisagreement(t, bs, x, end, 1, func(r int) memory { return new[r] }) // Alloc is number 0
					})
				}
			}
		}, "tcp") // no memory is shared
	}
}

// legal issues a collective. All gives the same numbers on every rank: the ranks' collectives fit. Own
// gives other numbers: they differ in what ranks may choose.
func legal(t *testing.T, b *gloo.Backend, all, own *rand.Rand) (*work.Work, error) {
	ctx, size, me := context.Background(), b.Size(), b.Rank()
	kind, root, n := all.IntN(9), all.IntN(size), []int{0, 1, 4, 6, 1024, 5000, 40_000}[all.IntN(7)]
	op := []backend.ReduceOp{backend.Sum(), backend.Max(), backend.Avg()}[all.IntN(3)]
	// What one rank sends another, by sender and receiver.
	splits := make([]int, size*size)
	for i := range splits {
		splits[i] = all.IntN(2) * all.IntN(200)
	}
	pick := own.IntN(3)
	zeros := func(shape ...int) *tensor.Tensor {
		x, err := tensor.New(tensor.Float32, shape...)
		assert.NoError(t, err)
		return x
	}
	each := func(counts []int) []*tensor.Tensor {
		var ts []*tensor.Tensor
		for _, n := range counts {
			ts = append(ts, zeros(n))
		}
		return ts
	}
	same := slices.Repeat([]int{n}, size)
	// shaped is the same number of elements in a shape of this rank's own.
	shaped := func() *tensor.Tensor {
		switch {
		case n%2 == 0 && pick == 1:
			return zeros(2, n/2)
		case n%2 == 0 && pick == 2:
			x, err := zeros(n/2, 2).Transpose(0, 1)
			assert.NoError(t, err)
			return x
		}
		return zeros(n)
	}
	switch kind {
	case 0:
		if cut := own.IntN(n + 1); pick == 0 {
			return b.AllReduceCoalesced(ctx, list(zeros(cut), zeros(n-cut)), backend.AllReduceOptions{Op: op})
		}
		return b.AllReduce(ctx, list(shaped()), backend.AllReduceOptions{Op: op})
	case 1: // several tensors of one rank are combined first
		return b.AllReduce(ctx, each(slices.Repeat([]int{n}, 1+pick)), backend.AllReduceOptions{Op: op})
	case 2:
		return b.AllReduce(ctx, list(zeros(n)), backend.AllReduceOptions{Op: backend.PreMulSum(float64(1 + pick))})
	case 3:
		return b.Broadcast(ctx, each(slices.Repeat([]int{n}, 1+pick)), backend.BroadcastOptions{Root: root})
	case 4:
		return b.Reduce(ctx, shaped(), backend.ReduceOptions{Root: root, Op: op})
	case 5:
		switch pick {
		case 0:
			return b.AllGather(ctx, each(same), zeros(n), backend.AllGatherOptions{})
		case 1:
			return b.AllGatherIntoTensor(ctx, zeros(size*n), zeros(n), backend.AllGatherOptions{})
		}
		cut := own.IntN(n + 1)
		out := make([][]*tensor.Tensor, size)
		for r := range out {
			out[r] = each([]int{cut, n - cut})
		}
		return b.AllGatherCoalesced(ctx, out, each([]int{cut, n - cut}), backend.AllGatherOptions{})
	case 6:
		if pick == 0 {
			return b.ReduceScatter(ctx, zeros(n), each(same), backend.ReduceScatterOptions{Op: op})
		}
		if pick == 1 {
			return b.ReduceScatterTensorCoalesced(ctx, list(zeros(n)), list(zeros(size*n)), backend.ReduceScatterOptions{Op: op})
		}
		return b.ReduceScatterTensor(ctx, zeros(n), zeros(size*n), backend.ReduceScatterOptions{Op: op})
	case 7:
		send, recv := splits[me*size:][:size], make([]int, size)
		in, out := 0, 0
		for r := range recv {
			recv[r] = splits[r*size+me]
			in += send[r]
			out += recv[r]
		}
		if pick == 0 {
			return b.AllToAll(ctx, each(recv), each(send), backend.AllToAllOptions{})
		}
		return b.AllToAllSingle(ctx, zeros(out), zeros(in), recv, send, backend.AllToAllOptions{})
	}
	at := make([]int64, pick)
	for i := range at {
		at[i] = int64(10*i + own.IntN(10))
	}
	return b.AllReduce(ctx, list(sparse(t, 30, at, make([]float32, pick))), backend.AllReduceOptions{})
}

// TestNoFalseAlarm has ranks issue collectives that fit but are not the same, and wait for them at
// different times. No operation fails, and neither does Close.
func TestNoFalseAlarm(t *testing.T) {
	rounds, calls := testsize.Of(1, 1, 5), 40
	for _, ranks := range []int{2, 3, 5} {
		onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			for range rounds {
				seed := must.Seed(t)
				onAll(t, connect(t), func(r int, b *gloo.Backend) {
					b.SetTimeout(time.Minute)
					all, own := rand.New(rand.NewPCG(seed, 0)), rand.New(rand.NewPCG(seed, uint64(r)+1))
					var works []*work.Work
					for i := range calls {
						w, err := legal(t, b, all, own)
						if !assert.NoError(t, err, "rank %d, call %d", r, i) {
							return
						}
						works = append(works, w)
						if own.IntN(4) == 0 {
							assert.NoError(t, work.WaitAll(context.Background(), works...), "rank %d, up to call %d", r, i)
							works = nil
						}
					}
					assert.NoError(t, work.WaitAll(context.Background(), works...), "rank %d", r)
					assert.NoError(t, b.Close(), "rank %d", r)
				})
			}
		})
	}
}
