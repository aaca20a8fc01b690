package run_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// All-reduces by the algorithm that Options.AllReduce names, as ordinary calls of ordinary groups.

// onWires runs f on groups of so many ranks, on every wire, whose all-reduces take an algorithm.
func onWires(t *testing.T, n int, name string, f func(t *testing.T, bs []*gloo.Backend)) {
	t.Run(fmt.Sprintf("%s, fabric, %d ranks", name, n), func(t *testing.T) { f(t, newTeamBy(t, n, name, nil).bs) })
	if n == 1 {
		return
	}
	for _, way := range nativeGroups {
		options := way.options(n)
		if options == nil || way.name != "tcp" && runtime.GOOS != "linux" {
			continue
		}
		for i := range options {
			options[i].AllReduce = name
		}
		t.Run(fmt.Sprintf("%s, %s, %d ranks", name, way.name, n), func(t *testing.T) {
			bs := grouped(t, options...)
			f(t, bs)
		})
	}
}

// summed all-reduces tensors of so many elements and compares every byte with what the operands become in any order.
func summed(t *testing.T, rng *rand.Rand, bs []*gloo.Backend, d tensor.DType, op backend.ReduceOp, n int) {
	t.Helper()
	ts, want := reduced(t, rng, len(bs), 1, d, op, n)
	errs := make([]error, len(bs))
	onAll(t, bs, func(r int, b *gloo.Backend) {
		errs[r] = wait(b.AllReduce(context.Background(), list(ts[r]), backend.AllReduceOptions{Op: op}))
	})
	require.NoError(t, errors.Join(errs...))
	for r, x := range ts {
		require.True(t, bytes.Equal(want.Bytes(), x.Bytes()), "%v of %d %v on rank %d of %d", op, n, d, r, len(bs))
	}
}

// reduced draws operands of n elements, so many for each rank, and what they become in any order.
func reduced(
	t testing.TB, rng *rand.Rand, ranks, operands int, d tensor.DType, op backend.ReduceOp, n int,
) (ts []*tensor.Tensor, want *tensor.Tensor) {
	red := must.Get(op.Reduction(d, ranks))
	var all []byte
	for i := range ranks * operands {
		b := numbered(rng, d, n)
		ts = append(ts, must.Get(tensor.FromBytes(d, b, n)))
		b = bytes.Clone(b)
		if red.Before != nil {
			red.Before(b)
		}
		if i == 0 {
			all = b
		} else {
			red.Combine(all, b)
		}
	}
	if red.After != nil {
		red.After(all)
	}
	return ts, must.Get(tensor.FromBytes(d, all, n))
}

// TestF36CallbackRing: an ordinary all_reduce of an ordinary group is a ring over the registry, on every wire, for every
// number of ranks, dtype and operator (F-35, F-36, F-37, F-46). Among the calls are others, which go as usual.
func TestF36CallbackRing(t *testing.T) {
	rng := drawn(t)
	for n := 1; n <= 17; n++ {
		if n > 3 && n != 5 {
			t.Run(fmt.Sprint("fabric, ", n), func(t *testing.T) { ringCalls(t, rng, newTeamBy(t, n, gloo.CallbackRing, nil).bs) })
			continue
		}
		onWires(t, n, gloo.CallbackRing, func(t *testing.T, bs []*gloo.Backend) { ringCalls(t, rng, bs) })
	}
}

func ringCalls(t *testing.T, rng *rand.Rand, bs []*gloo.Backend) {
	n := len(bs)
	for _, o := range stagedOperators {
		summed(t, rng, bs, o.d, o.op, rng.IntN(3000))
	}
	for elements := range n + 1 {
		summed(t, rng, bs, tensor.Int32, backend.Sum(), elements)
	}
	summed(t, rng, bs, tensor.Float32, backend.Sum(), 100_000)
	onAll(t, bs, func(r int, b *gloo.Backend) { require.NoError(t, barrier(b)) })
	root := vec(float32(bs[0].Rank()))
	onAll(t, bs, func(r int, b *gloo.Backend) {
		x := root
		if r > 0 {
			x = vec(-1)
		}
		require.NoError(t, wait(b.Broadcast(context.Background(), list(x), backend.BroadcastOptions{})))
		require.Equal(t, []float32{0}, float32s(t, x))
	})
	// Rounded sums have the same bits on all ranks.
	ts := make([]*tensor.Tensor, n)
	for r := range ts {
		v := make([]float32, 999)
		for i := range v {
			v[i] = float32(rng.NormFloat64())
		}
		ts[r] = vec(v...)
	}
	onAll(t, bs, func(r int, b *gloo.Backend) {
		require.NoError(t, wait(b.AllReduce(context.Background(), list(ts[r]), backend.AllReduceOptions{})))
	})
	for _, x := range ts {
		require.Equal(t, ts[0].Bytes(), x.Bytes())
	}
	for _, c := range bs[0].Explain().Choices {
		if c.Op == plan.OpAllReduce.String() {
			require.Equal(t, gloo.CallbackRing, c.Algorithm)
			require.Contains(t, c.Why, fmt.Sprintf("%d blocks go around the ring", n))
		}
	}
}

// TestF36CallbackRingTypes: all dtypes and operators.
func TestF36CallbackRingTypes(t *testing.T) {
	w := newTeamBy(t, 3, gloo.CallbackRing, nil)
	ops := []backend.ReduceOp{
		backend.Sum(), backend.Avg(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor(), backend.PreMulSum(2),
		backend.Custom("first", func(tensor.DType, []byte, []byte) {}),
	}
	for _, d := range tensor.DTypes() {
		for _, op := range ops {
			red, err := op.Reduction(d, 3)
			if err != nil || op.Kind() == ops[9].Kind() {
				continue
			}
			ts := make([]*tensor.Tensor, 3)
			var all [][]byte
			for r := range ts {
				ts[r] = must.Get(tensor.New(d, 10))
				for i := range 10 {
					require.NoError(t, ts[r].SetFloat64(float64((r+i)%2), i))
				}
				b := bytes.Clone(ts[r].Bytes())
				if red.Before != nil {
					red.Before(b)
				}
				all = append(all, b)
			}
			want := all[0]
			red.Combine(want, all[1])
			red.Combine(want, all[2])
			if red.After != nil {
				red.After(want)
			}
			onAll(t, w.bs, func(r int, b *gloo.Backend) {
				require.NoError(t, wait(b.AllReduce(context.Background(), list(ts[r]), backend.AllReduceOptions{Op: op})))
			})
			for _, x := range ts {
				require.Equal(t, want, x.Bytes(), "%v of %v", op, d)
			}
		}
	}
}

// TestF36CallbackRingMessages: a rank sends 2N-2 messages, and 2(N-1)/N of the bytes.
func TestF36CallbackRingMessages(t *testing.T) {
	for _, n := range []int{2, 3, 5, 8} {
		w, counts := countedBy(t, n, gloo.CallbackRing)
		const elements = 30 << 10 // a multiple of every n
		summed(t, drawn(t), w.bs, tensor.Int32, backend.Sum(), elements)
		for _, c := range counts {
			require.EqualValues(t, 2*n-2, c.messages.Load())
			require.EqualValues(t, 4*elements*2*(n-1)/n, c.bytes.Load())
		}
		summed(t, drawn(t), w.bs, tensor.Int32, backend.Sum(), 0)
		require.EqualValues(t, 2*n-2, counts[0].messages.Load(), "no elements, no messages")
		w.settled(t)
	}
}

// TestF38CallbackRing has messages of different blocks arrive in any order. Then a rank calls last, when the others have
// sent all that they can, and calls follow each other at once.
func TestF38CallbackRing(t *testing.T) {
	rng := drawn(t)
	for _, n := range []int{2, 3, 6} {
		w := newTeamBy(t, n, gloo.CallbackRing, func(_ *team, rank int, m transport.Mesh) transport.Mesh {
			return newShuffling(t, m, rng.Uint64())
		})
		for range 10 {
			summed(t, rng, w.bs, tensor.Float32, backend.Sum(), rng.IntN(20_000))
		}
		w.settled(t)
	}
	const n, calls = 4, 3
	w, counts := countedBy(t, n, gloo.CallbackRing)
	works, ts := make([][]*work.Work, n), make([][]*tensor.Tensor, n)
	call := func(r int) {
		for range calls {
			x := vec(1, 2, 3, 4, 5)
			v := must.Get(w.bs[r].AllReduce(context.Background(), list(x), backend.AllReduceOptions{}))
			ts[r], works[r] = append(ts[r], x), append(works[r], v)
		}
	}
	for r := range n - 1 {
		call(r)
	}
	var wg sync.WaitGroup
	for r := range n - 1 {
		for _, v := range works[r] {
			wg.Go(func() { v.Wait(context.Background()) })
		}
	}
	// Ranks 0 to 2 send their own blocks, and pass on those that have come.
	for ctx := bounded(t); counts[0].messages.Load() == 0 || counts[1].messages.Load() < 2 || counts[2].messages.Load() < 3; runtime.Gosched() {
		require.NoError(t, ctx.Err())
	}
	for r := range n - 1 {
		require.False(t, works[r][0].IsCompleted())
	}
	call(n - 1)
	for _, v := range works[n-1] {
		require.NoError(t, v.Wait(bounded(t)))
	}
	run.Finish(t, "all ranks", &wg)
	for r := range n {
		for k, x := range ts[r] {
			require.NoError(t, works[r][k].Err())
			require.Equal(t, []float32{4, 8, 12, 16, 20}, float32s(t, x))
		}
	}
	w.settled(t)
}

// TestF39CallbackRing: a rank dies at each of its messages. All other ranks that need it end with an error that names it
// and the block. Nothing is left over, and the next call says why.
func TestF39CallbackRing(t *testing.T) {
	const n, victim = 4, 2
	for at := int64(1); ; at++ {
		var d *dying
		w := newTeamBy(t, n, gloo.CallbackRing, func(w *team, rank int, m transport.Mesh) transport.Mesh {
			if rank != victim {
				return m
			}
			d = &dying{Mesh: m, at: at, die: func() { w.fabric.Kill("/0", victim) }}
			return d
		})
		errs := make([]error, n)
		onAll(t, w.bs, func(r int, b *gloo.Backend) {
			errs[r] = wait(b.AllReduce(context.Background(), list(vec(1, 2, 3, 4, 5)), backend.AllReduceOptions{}))
		})
		if d.sent.Load() < at {
			require.EqualValues(t, 2*n-1, at)
			require.NoError(t, errors.Join(errs...))
			break
		}
		failed := 0
		for r, err := range errs {
			if err == nil {
				continue
			}
			failed++
			e := must.As[*work.Error](t, err, "rank %d", r)
			require.Regexp(t, `on rank \d: (block \d of 4: |rank 2 died)`, err.Error()) // it may have died before the call
			if r != victim {
				require.Equal(t, victim, e.Peer)
				require.ErrorIs(t, err, work.ErrPeerDied)
			}
		}
		require.GreaterOrEqual(t, failed, 2)
		w.settled(t)
		_, err := w.bs[0].AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{})
		require.ErrorContains(t, err, "rank 2 died")
	}
}

// TestF44CallbackRing has a rank that does not call, on every wire. The call of the others ends with their time, with
// their context, and when that rank leaves or aborts the group.
func TestF44CallbackRing(t *testing.T) {
	const n, absent = 3, 1
	for what, end := range map[string]struct {
		do   func(b *gloo.Backend, cancel func()) error
		is   error
		text string
	}{
		"times out": {nil, work.ErrTimeout, ""},
		"leaves":    {func(b *gloo.Backend, _ func()) error { return b.Close() }, work.ErrPeerLeft, "rank 1"},
		"aborts":    {func(b *gloo.Backend, _ func()) error { b.Abort(errors.New("enough")); return nil }, work.ErrAborted, "enough"},
		"canceled":  {func(_ *gloo.Backend, cancel func()) error { cancel(); return nil }, work.ErrCanceled, ""},
	} {
		onWires(t, n, gloo.CallbackRing, func(t *testing.T, bs []*gloo.Backend) {
			t.Parallel()
			summed(t, drawn(t), bs, tensor.Int32, backend.Sum(), 50)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			errs := make([]error, n)
			var wg sync.WaitGroup
			for r, b := range bs {
				if r == absent {
					continue
				}
				o := backend.AllReduceOptions{}
				if end.do == nil {
					o.Timeout = 500 * time.Millisecond
				}
				v := must.Get(b.AllReduce(ctx, list(vec(1, 2, 3, 4)), o))
				wg.Go(func() { errs[r] = v.Wait(context.Background()) })
			}
			if end.do != nil {
				require.NoError(t, end.do(bs[absent], cancel))
			}
			run.Finish(t, "both ranks that have called", &wg)
			for r, err := range errs {
				if r == absent {
					continue
				}
				must.As[*work.Error](t, err, "%s: rank %d", what, r)
				require.ErrorIs(t, err, end.is, "%s: rank %d", what, r)
				require.ErrorContains(t, err, end.text, "%s: rank %d", what, r)
			}
		})
	}
}

// TestNamedAlgorithms: every algorithm can be asked for, on every wire that it can use (F-10 to F-14). Explain has it.
func TestNamedAlgorithms(t *testing.T) {
	rng := drawn(t)
	for _, name := range gloo.AllReduceAlgorithms() {
		if name == gloo.CallbackRing {
			continue
		}
		for _, n := range []int{1, 2, 3, 4}[:testsize.Of(3, 3, 4)] {
			onWires(t, n, name, func(t *testing.T, bs []*gloo.Backend) {
				for _, elements := range []int{0, 1, n, 1000} {
					summed(t, rng, bs, tensor.Int32, backend.Sum(), elements)
					summed(t, rng, bs, tensor.Float32, backend.Max(), elements)
				}
				require.Equal(t, name, bs[0].Explain().Choices[0].Algorithm)
				require.Contains(t, bs[0].Explain().Choices[0].Why, "Options.AllReduce asks for it")
			})
		}
	}
}

// float32s returns the elements of a tensor.
func float32s(t *testing.T, x *tensor.Tensor) []float32 {
	return must.Get(tensor.Data[float32](x))
}

// TestNamedRefused: New refuses what an algorithm cannot do. The error says what is possible.
func TestNamedRefused(t *testing.T) {
	for text, o := range map[string]gloo.Options{
		`Options.AllReduce is "rings", want one of ring, halving-doubling, bcube, `:                            {Tuning: gloo.Tuning{AllReduce: "rings"}},
		`"callback-ring", which does not add in rank order: Options.Sums needs one of direct, two-step, chain`: {Sums: gloo.SumsInRankOrder, Tuning: gloo.Tuning{AllReduce: gloo.CallbackRing}},
		`gloo, whose ranks all have the segmented ring only`:                                                   {Wire: gloo.WireGloo, Tuning: gloo.Tuning{AllReduce: gloo.CallbackRing}},
	} {
		_, errs := connectWith(t, run.GroupTimeout, o, o)
		for _, err := range errs {
			require.ErrorContains(t, err, text)
		}
	}
	_, errs := connectWith(t, run.GroupTimeout, gloo.Options{Wire: gloo.WireTCP, Tuning: gloo.Tuning{AllReduce: "ring"}}, gloo.Options{Wire: gloo.WireTCP})
	require.ErrorContains(t, errors.Join(errs...), `Options.AllReduce is "ring" on rank 0 and "" on rank 1`)
}

// TestNamedRankOrder: an algorithm in rank order serves sums in rank order.
func TestNamedRankOrder(t *testing.T) {
	for _, name := range []string{"direct", "two-step", "chain"} {
		o := gloo.Options{Wire: gloo.WireTCP, Sums: gloo.SumsInRankOrder, Tuning: gloo.Tuning{AllReduce: name}}
		bs := grouped(t, o, o, o)
		onAll(t, bs, func(r int, b *gloo.Backend) {
			x := vec([]float32{1e8, 1, -1e8}[r])
			require.NoError(t, wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})))
			require.Equal(t, []float32{0}, float32s(t, x), "(1e8 + 1) - 1e8 in float32")
		})
	}
}
