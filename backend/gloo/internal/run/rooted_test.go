package run_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// rootedCall is a collective that all ranks should call alike. Different values differ on every wire.
type rootedCall struct {
	kind  int // see rootedKinds
	root  int
	n     int
	dtype tensor.DType
	op    backend.ReduceOp
}

// rootedKinds are the collectives of rootedCall, those with a root first.
var rootedKinds = [...]string{"broadcast", "reduce", "gather", "scatter", "gather", "all_reduce", "all_gather", "barrier"}

// withRoot is how many have a root.
const withRoot = 5

func randomCall(r *rand.Rand, ranks int) rootedCall {
	kind := r.IntN(withRoot)
	if r.IntN(6) == 0 {
		kind = withRoot + r.IntN(len(rootedKinds)-withRoot)
	}
	return rootedCall{
		kind: kind, root: r.IntN(ranks), n: []int{0, 1, 5, 300, 5000, 70_000}[r.IntN(6)],
		dtype: []tensor.DType{tensor.Float32, tensor.Int32, tensor.Int64}[r.IntN(3)],
		op:    []backend.ReduceOp{backend.Sum(), backend.Max()}[r.IntN(2)],
	}
}

// other returns a call that ranks may not mix with c.
func (c rootedCall) other(r *rand.Rand, ranks int) rootedCall {
	for {
		d := c
		switch r.IntN(5) {
		case 0:
			d.kind = r.IntN(len(rootedKinds))
		case 1:
			d.root = r.IntN(ranks)
		case 2:
			d.n++
		case 3:
			d.dtype = tensor.Uint8
		case 4:
			d.op = backend.Min()
		}
		if d.String() != c.String() {
			return d
		}
	}
}

// String is the call as errors show it.
func (c rootedCall) String() string {
	s := rootedKinds[c.kind]
	if s == "barrier" {
		return s
	}
	if s == "reduce" || s == "all_reduce" {
		s += fmt.Sprintf("(%v)", c.op.Kind())
	}
	s += fmt.Sprintf(" of %v", c.dtype)
	if c.kind != 4 {
		s += fmt.Sprintf("[%d]", c.n)
	}
	switch {
	case c.kind == 0 || c.kind == 3:
		s += fmt.Sprintf(" from root %d", c.root)
	case c.kind < withRoot:
		s += fmt.Sprintf(" to root %d", c.root)
	}
	return s
}

func (c rootedCall) issue(b *gloo.Backend, new memory) (*work.Work, error) {
	ctx := context.Background()
	x := new(c.dtype, c.n)
	var all []*tensor.Tensor
	for range b.Size() {
		if b.Rank() == c.root || rootedKinds[c.kind] == "all_gather" {
			all = append(all, new(c.dtype, c.n))
		}
	}
	switch c.kind {
	case 0:
		return b.Broadcast(ctx, list(x), backend.BroadcastOptions{Root: c.root})
	case 1:
		return b.Reduce(ctx, x, backend.ReduceOptions{Root: c.root, Op: c.op})
	case 2:
		return b.Gather(ctx, all, x, backend.GatherOptions{Root: c.root})
	case 3:
		return b.Scatter(ctx, x, all, backend.ScatterOptions{Root: c.root})
	case 4:
		return b.GatherV(ctx, all, x, backend.GatherOptions{Root: c.root})
	case 5:
		return b.AllReduce(ctx, list(x), backend.AllReduceOptions{Op: c.op})
	case 6:
		return b.AllGather(ctx, all, x, backend.AllGatherOptions{})
	}
	return b.Barrier(ctx, backend.BarrierOptions{})
}

// program issues calls on a rank. It waits for some of them, or none. It returns the others, and the errors.
func program(b *gloo.Backend, calls []rootedCall, own *rand.Rand, new memory) (open []*work.Work, errs []error) {
	waits := own.IntN(5) // for how many of four
	for _, c := range calls {
		w, err := c.issue(b, new)
		if err != nil {
			return open, append(errs, err)
		}
		if own.IntN(4) < waits {
			errs = append(errs, w.Wait(context.Background()))
		} else {
			open = append(open, w)
		}
	}
	return open, errs
}

// end closes the group, and returns what that and the open operations return.
func end(b *gloo.Backend, open []*work.Work, own *rand.Rand) (errs []error) {
	shutdown := own.IntN(3) == 0
	if shutdown {
		errs = append(errs, b.Shutdown(context.Background()))
	}
	for _, w := range open {
		errs = append(errs, w.Wait(context.Background()))
	}
	if !shutdown {
		errs = append(errs, b.Close())
	}
	return errs
}

func randomCalls(r *rand.Rand, ranks, most int) []rootedCall {
	calls := make([]rootedCall, 1+r.IntN(most))
	for i := range calls {
		calls[i] = randomCall(r, ranks)
	}
	return calls
}

// TestOddCallIsTold has ranks make random calls. One rank makes one of them in another way. Each rank has been told both
// calls when it has closed the group: by an operation, by Shutdown or by Close.
func TestOddCallIsTold(t *testing.T) {
	for _, ranks := range []int{2, 3, 4, 8} {
		onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			for range testsize.Of(2, 2, 10) {
				seed := rand.Uint64()
				r := rand.New(rand.NewPCG(seed, 0))
				calls := randomCalls(r, ranks, 20)
				odd, at := r.IntN(ranks), r.IntN(len(calls))
				others := slices.Clone(calls)
				others[at] = calls[at].other(r, ranks)
				what := fmt.Sprintf("seed %d: as call %d of %d, rank %d calls %v, the others %v", seed, at, len(calls), odd, others[at], calls[at])
				bs, own, open, errs := connect(t), make([]*rand.Rand, ranks), make([][]*work.Work, ranks), make([][]error, ranks)
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					calls := calls
					if rank == odd {
						calls = others
					}
					own[rank] = rand.New(rand.NewPCG(seed, uint64(rank)+1))
					open[rank], errs[rank] = program(b, calls, own[rank], ordinary(t))
				})
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					err := errors.Join(append(errs[rank], end(b, open[rank], own[rank])...)...)
					if !assert.ErrorIs(t, err, work.ErrMismatch, "rank %d, %s", rank, what) {
						return
					}
					if text := err.Error(); !strings.Contains(text, "an earlier call of theirs differs") {
						assert.Contains(t, text, fmt.Sprint(" called ", calls[at]), "rank %d, %s", rank, what)
						assert.Contains(t, text, fmt.Sprint("rank ", odd, " called ", others[at]), "rank %d, %s", rank, what)
					}
				})
			}
		})
	}
}

// TestRootsRunAhead has ranks make the same random calls, some rank far ahead of the others. No operation fails, and
// neither do Shutdown and Close.
func TestRootsRunAhead(t *testing.T) {
	for _, ranks := range []int{2, 3, 5} {
		onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			for range testsize.Of(1, 1, 5) {
				seed := rand.Uint64()
				r := rand.New(rand.NewPCG(seed, 0))
				var calls []rootedCall
				for range 8 { // each call many times: its root, or all others, run ahead
					calls = append(calls, slices.Repeat(randomCalls(r, ranks, 1), 1+r.IntN(40))...)
				}
				slow := r.IntN(ranks)
				bs := connect(t)
				onAll(t, bs, func(rank int, b *gloo.Backend) {
					own := rand.New(rand.NewPCG(seed, uint64(rank)+1))
					for rank == slow && bs[(slow+1)%ranks].Seq() == 0 {
						runtime.Gosched()
					}
					open, errs := program(b, calls, own, ordinary(t))
					assert.NoError(t, errors.Join(append(errs, end(b, open, own)...)...), "seed %d, rank %d", seed, rank)
				})
			}
		})
	}
}

// TestTheThirdRankNotices has a rank notice, before its first call, that the calls of two others differ. These have sent
// what they had to, and close the group.
func TestTheThirdRankNotices(t *testing.T) {
	for next, close := range map[string]func(b *gloo.Backend) error{
		"close":    (*gloo.Backend).Close,
		"shutdown": func(b *gloo.Backend) error { return b.Shutdown(context.Background()) },
	} {
		onNative(t, 3, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
			t.Run(next, func(t *testing.T) {
				bs, errs := connect(t), make([]error, 2)
				onAll(t, bs[:2], func(r int, b *gloo.Backend) {
					gather := callGather(2, 5)
					if r == 1 {
						gather = callReduce(2, 5)
					}
					err := gather(b, ordinary(t)) // mostly nil
					errs[r] = errors.Join(err, close(b))
				})
				for r, err := range append(errs, callBroadcast(2, 5)(bs[2], ordinary(t))) {
					require.ErrorIs(t, err, work.ErrMismatch, "rank %d", r)
					require.ErrorContains(t, err, " called gather of float32[5] to root 2", "rank %d", r)
					require.ErrorContains(t, err, "rank 1 called reduce(sum) of float32[5] to root 2", "rank %d", r)
				}
			})
		}, "memory", "two levels", "two levels of other sizes")
	}
}

// TestTwoRoots has two ranks of a group in shared memory broadcast, each as the root. Neither waits for the other. The one
// that comes later is told in its first call, and the other one in its next call, or in Close.
func TestTwoRoots(t *testing.T) {
	onLinux(t)
	for _, ranks := range []int{2, 4} {
		for _, next := range []string{"broadcast", "close", "shutdown"} {
			onNative(t, ranks, func(t *testing.T, connect func(t *testing.T) []*gloo.Backend) {
				t.Run(next, func(t *testing.T) {
					bs := connect(t)
					told := func(r int, err error) {
						t.Helper()
						require.ErrorIs(t, err, work.ErrMismatch, "rank %d", r)
						require.ErrorContains(t, err, "as collective number 0 rank 0 called broadcast of float32[5] from root 0, rank 1 called broadcast of float32[5] from root 1")
					}
					broadcast := func(r int) error { return callBroadcast(r, 5)(bs[r], ordinary(t)) }
					for range 3 {
						require.NoError(t, broadcast(0))
					}
					told(1, broadcast(1))
					switch next {
					case "broadcast":
						told(0, broadcast(0))
					case "close":
						told(0, bs[0].Close())
					case "shutdown":
						told(0, bs[0].Shutdown(context.Background()))
					}
				})
			}, "tcp", "two levels", "two levels of other sizes")
		}
	}
}
