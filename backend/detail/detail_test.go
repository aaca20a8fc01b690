package detail_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var ctx = context.Background()

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stranger is the store of a rank that plays one of PyTorch's: it leaves no
// mark and looks for none.
type stranger struct{ store.Store }

func (s stranger) Set(ctx context.Context, key string, value []byte) error {
	if strings.Contains(key, "c10d-go/") {
		return nil
	}
	return s.Store.Set(ctx, key, value)
}

func (s stranger) Check(context.Context, ...string) (bool, error) { return false, nil }

// job runs f on size ranks that check their collectives.
func job(t *testing.T, size int, gen generation, o pg.Options, strangers []int, f func(g *pg.ProcessGroup)) {
	t.Helper()
	j := pgtest.NewJob(size)
	defer j.Close()
	inMemory := j.Options()
	o.BackendOptions, o.Detail = inMemory.BackendOptions, true
	if o.Timeout == 0 {
		o.Timeout = inMemory.Timeout
	}
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			st := j.Store
			if slices.Contains(strangers, r) {
				st = stranger{st}
			}
			g, err := pg.New(t.Context(), gen.in(st), r, size, o)
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
				return
			}
			f(g)
			if err := g.Close(); err != nil {
				t.Errorf("rank %d: close: %v", r, err)
			}
		})
	}
	wg.Wait()
}

// each collects what every rank returns.
type each[T any] struct {
	sync.Mutex
	of map[int]T
}

func (e *each[T]) put(rank int, v T) {
	e.Lock()
	defer e.Unlock()
	if e.of == nil {
		e.of = map[int]T{}
	}
	e.of[rank] = v
}

func zeros(d tensor.DType, shape ...int) *tensor.Tensor {
	t, err := tensor.New(d, shape...)
	if err != nil {
		panic(err)
	}
	return t
}

// do ends an operation and returns how.
func do(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(ctx)
}

func allReduce(g *pg.ProcessGroup, t *tensor.Tensor) error {
	return do(g.AllReduce(ctx, t, pg.Sum()))
}

func barrier(g *pg.ProcessGroup) error {
	return do(g.BarrierAsync(ctx))
}

// generation is one of PyTorch's, whose ranks may be in a group.
type generation int

var generations = []generation{1, 2}

func (g generation) in(st store.Store) store.Store {
	if g == 1 {
		return torch1{st}
	}
	return st
}

type torch1 struct{ store.Store }

func (torch1) IsTorch1() bool { return true }

const everything = `
{"op":"all_reduce","shape":[7],"fill":"frac"}
{"op":"all_reduce","dtype":"complex64","shape":[3,2]}
{"op":"all_reduce_coalesced","shapes":[[3],[4,5]],"fill":"frac"}
{"op":"reduce","shape":[11],"root":1}
{"op":"broadcast","shape":[3,5],"root":2,"fill":"frac"}
{"op":"all_gather","dtype":"float64","shape":[2,3]}
{"op":"all_gather_into_tensor","shape":[2,3]}
{"op":"gather","shape":[7],"root":1}
{"op":"scatter","shape":[7],"root":0}
{"op":"reduce_scatter","shape":[2],"reduce":"max"}
{"op":"reduce_scatter_tensor","shape":[2,2]}
{"op":"all_to_all","shape":[3]}
{"op":"all_to_all_single","shape":[4]}
{"op":"all_to_all_single","splits":[[1,2,3],[0,1,0],[4,4,4]]}
{"op":"send_recv","shape":[100],"src":0,"dst":1,"tag":4}
{"op":"recv_any","shape":[5],"src":1,"dst":0,"tag":5}
{"op":"new_group","ranks":[0,2],"name":"ends"}
{"op":"all_reduce","shape":[17],"fill":"frac","group":"ends"}
{"op":"send_recv","shape":[3],"src":2,"dst":0,"group":"ends"}
{"op":"broadcast","shape":[3],"root":2,"group":"ends"}
{"op":"all_reduce","shape":[0]}
{"op":"barrier"}
`

// TestResults wants of checked groups the results of others, with sends among
// two of three ranks in between.
func TestResults(t *testing.T) {
	const size = 3
	lines := must.Get(script.Parse(strings.NewReader(everything), size))
	var want each[[]script.Result]
	pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
		var rs []script.Result
		require.NoError(t, script.Run(t.Context(), g, lines, func(r script.Result) { rs = append(rs, r) }))
		want.put(g.Rank(), rs)
	})
	for _, d := range generations {
		var got each[[]script.Result]
		job(t, size, d, pg.Options{}, nil, func(g *pg.ProcessGroup) {
			var rs []script.Result
			err := script.Run(t.Context(), g, lines, func(r script.Result) { rs = append(rs, r) })
			if err != nil {
				t.Errorf("rank %d: %v", g.Rank(), err)
			}
			got.put(g.Rank(), rs)
		})
		require.Equal(t, want.of, got.of)
	}
}

// TestMismatches lets rank 2 call something else than ranks 0 and 1, looks at
// the errors of all, and goes on with the group.
func TestMismatches(t *testing.T) {
	usual := func(g *pg.ProcessGroup) error { return allReduce(g, zeros(tensor.Float32, 5)) }
	for _, c := range []struct {
		name  string
		other func(g *pg.ProcessGroup) error
		what  string // of rank 2's call
		short string // what those know who have only its length
	}{
		{"another operation", barrier, "barrier", "an operation whose tensors are not compared"},
		{"another dtype of the same size", func(g *pg.ProcessGroup) error { return allReduce(g, zeros(tensor.Int32, 5)) },
			"all_reduce of int32 [5] on cpu", "all_reduce of int32 [5] on cpu"},
		{"another shape", func(g *pg.ProcessGroup) error { return allReduce(g, zeros(tensor.Float32, 6)) },
			"all_reduce of float32 [6] on cpu", "all_reduce of float32 [6] on cpu"},
		{"another shape of the same size", func(g *pg.ProcessGroup) error { return allReduce(g, zeros(tensor.Float32, 5, 1)) },
			"all_reduce of float32 [5 1] on cpu", "an operation on a tensor of 2 dimensions"},
		{"an operation with the same wire", func(g *pg.ProcessGroup) error {
			return do(g.Reduce(ctx, zeros(tensor.Float32, 5), 0, pg.Sum()))
		}, "reduce of float32 [5] on cpu", "reduce of float32 [5] on cpu"},
		{"more tensors", func(g *pg.ProcessGroup) error {
			b := must.Get(g.Backend(tensor.CPU))
			return do(b.AllReduce(ctx, []*tensor.Tensor{zeros(tensor.Float32, 5), zeros(tensor.Float32, 5)}, backend.AllReduceOptions{}))
		}, "all_reduce of float32 [5] on cpu, float32 [5] on cpu", "an operation on a tensor of 5 dimensions, or on several of fewer"},
	} {
		for _, d := range generations {
			for _, strangers := range [][]int{nil, {2}, {0}} {
				t.Run(fmt.Sprintf("%s, dialect %v, PyTorch on %v", c.name, d, strangers), func(t *testing.T) {
					var errs, after each[error]
					job(t, 3, d, pg.Options{}, strangers, func(g *pg.ProcessGroup) {
						call := usual
						if g.Rank() == 2 {
							call = c.other
						}
						seq := g.Seq()
						errs.put(g.Rank(), call(g))
						if g.Seq() != seq {
							t.Errorf("rank %d: the refused call has used a number", g.Rank())
						}
						after.put(g.Rank(), usual(g))
					})
					for r := range 3 {
						require.NoError(t, after.of[r], "the group goes on")
						e := must.As[*detail.MismatchError](t, errs.of[r])
						require.ErrorIs(t, errs.of[r], work.ErrMismatch)
						require.Equal(t, r, e.Rank)
						require.Equal(t, "0", e.Group)
						require.Contains(t, e.Error(), fmt.Sprintf("rank %d of group %q calls %v", r, "0", e.Own))
						// Operators and roots, which Go ranks tell each other, are another test's.
						plain := strings.NewReplacer(" with sum", "", ", root 0", "")
						text := plain.Replace(e.Error())
						require.NotContains(t, text, "as operation", "the numbers are the same")
						// PyTorch's ranks and ranks of this library learn only each other's
						// length.
						cut := func(other int) bool {
							return slices.Contains(strangers, r) || slices.Contains(strangers, other)
						}
						if r < 2 {
							require.Len(t, e.Others, 1)
							require.Equal(t, 2, e.Peer())
							want := c.what
							if cut(2) {
								want = c.short
							}
							require.Contains(t, text, "but rank 2 calls "+want)
							continue
						}
						require.Equal(t, c.what, plain.Replace(e.Own.String()))
						require.Equal(t, 0, e.Peer())
						want := "all_reduce of float32 [5] on cpu"
						switch {
						case c.short == c.what || !cut(0) && !cut(1):
							want = "but ranks 0, 1 call " + want
						case cut(0) && cut(1):
							want = "but ranks 0, 1 call an operation on a tensor of 1 dimension"
						case cut(0):
							want = "but rank 0 calls an operation on a tensor of 1 dimension, or on several of fewer; rank 1 calls " + want
						}
						require.Contains(t, text, want)
					}
				})
			}
		}
	}
}

// TestOperatorsAndRoots: ranks of this library alone compare them, and the
// tensors of coalesced operations. Beside PyTorch they cannot.
func TestOperatorsAndRoots(t *testing.T) {
	type call func(g *pg.ProcessGroup, odd bool) error
	pick := func(odd bool, a, b int) int {
		if odd {
			return b
		}
		return a
	}
	reduce := func(odd bool) backend.ReduceOp {
		if odd {
			return backend.Max()
		}
		return backend.Sum()
	}
	for _, c := range []struct {
		name       string
		call       call
		one, other string
	}{
		{"all_reduce", func(g *pg.ProcessGroup, odd bool) error {
			return do(g.AllReduce(ctx, zeros(tensor.Float32, 5), reduce(odd)))
		}, "all_reduce with sum of float32 [5] on cpu", "all_reduce with max of float32 [5] on cpu"},
		{"broadcast", func(g *pg.ProcessGroup, odd bool) error {
			return do(g.Broadcast(ctx, zeros(tensor.Float32, 5), pick(odd, 0, 1)))
		}, "broadcast of float32 [5] on cpu, root 0", "broadcast of float32 [5] on cpu, root 1"},
		{"all_reduce_coalesced", func(g *pg.ProcessGroup, odd bool) error {
			return do(g.AllReduceCoalesced(ctx, []*tensor.Tensor{zeros(tensor.Float32, pick(odd, 5, 6))}, pg.Sum()))
		}, "all_reduce_coalesced with sum of float32 [5] on cpu", "all_reduce_coalesced with sum of float32 [6] on cpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var errs each[error]
			job(t, 2, 2, pg.Options{}, nil, func(g *pg.ProcessGroup) { errs.put(g.Rank(), c.call(g, g.Rank() == 1)) })
			require.EqualError(t, errs.of[0], `detail: ranks disagree on the operation: rank 0 of group "0" calls `+c.one+", but rank 1 calls "+c.other)
			require.EqualError(t, errs.of[1], `detail: ranks disagree on the operation: rank 1 of group "0" calls `+c.other+", but rank 0 calls "+c.one)
		})
	}
	var errs each[error]
	job(t, 2, 2, pg.Options{}, []int{0}, func(g *pg.ProcessGroup) {
		errs.put(g.Rank(), do(g.AllReduce(ctx, zeros(tensor.Float32, 5), reduce(g.Rank() == 1))))
	})
	require.Equal(t, map[int]error{0: nil, 1: nil}, errs.of)
}

// TestSequence: beside PyTorch 2 the number in fingerprints counts what
// PyTorch counts, which a message between two of three ranks upsets. PyTorch
// 1.13 has no number, and ranks of this library alone count collectives.
func TestSequence(t *testing.T) {
	message := func(g *pg.ProcessGroup) error {
		switch g.Rank() {
		case 0:
			return do(g.Send(ctx, zeros(tensor.Float32, 1), 1))
		case 1:
			return do(g.Recv(ctx, zeros(tensor.Float32, 1), 0))
		}
		return nil
	}
	monitored := func(g *pg.ProcessGroup) error {
		return g.MonitoredBarrier(context.Background())
	}
	scatters := func(g *pg.ProcessGroup) error {
		// Counts three times, and a coalesced one twice.
		ins := []*tensor.Tensor{zeros(tensor.Float32, 2), zeros(tensor.Float32, 2), zeros(tensor.Float32, 2)}
		err := do(g.ReduceScatter(ctx, zeros(tensor.Float32, 2), ins, pg.Sum()))
		if err != nil {
			return err
		}
		out := []*tensor.Tensor{zeros(tensor.Float32, 2), zeros(tensor.Float32, 1)}
		in := []*tensor.Tensor{zeros(tensor.Float32, 6), zeros(tensor.Float32, 3)}
		return do(g.ReduceScatterTensorCoalesced(ctx, out, in, pg.Sum()))
	}
	for _, c := range []struct {
		name      string
		before    func(g *pg.ProcessGroup) error
		gen       generation
		strangers []int
		want      [3]uint64 // numbers of the next collective if they differ
	}{
		{"a message", message, 2, nil, [3]uint64{}},
		{"a message, PyTorch 1.13", message, 1, []int{2}, [3]uint64{}},
		{"a message, PyTorch 2", message, 2, []int{2}, [3]uint64{1, 1, 0}},
		{"a monitored barrier", monitored, 2, nil, [3]uint64{}},
		{"a monitored barrier, PyTorch 2", monitored, 2, []int{1}, [3]uint64{4, 2, 2}},
		{"reduce_scatter, PyTorch 2", scatters, 2, []int{1}, [3]uint64{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var errs each[error]
			job(t, 3, c.gen, pg.Options{}, c.strangers, func(g *pg.ProcessGroup) {
				if err := c.before(g); err != nil {
					t.Errorf("rank %d: %v", g.Rank(), err)
				}
				errs.put(g.Rank(), barrier(g))
			})
			for r := range 3 {
				if c.want == [3]uint64{} {
					require.NoError(t, errs.of[r])
					continue
				}
				e := must.As[*detail.MismatchError](t, errs.of[r])
				require.Equal(t, c.want[r], e.Own.Seq)
				for _, other := range e.Others {
					for _, rank := range other.Ranks {
						require.Equal(t, c.want[rank], other.Fingerprint.Seq)
					}
				}
				require.Contains(t, e.Error(), fmt.Sprintf("calls barrier as operation %d, but", c.want[r]))
				require.Contains(t, e.Error(), "PyTorch counts sends and receives")
			}
		})
	}
}

// TestCounts states how PyTorch's gloo counts the operations that are several.
func TestCounts(t *testing.T) {
	var numbers each[uint64]
	job(t, 3, 2, pg.Options{}, []int{0}, func(g *pg.ProcessGroup) {
		ins := []*tensor.Tensor{zeros(tensor.Float32, 2), zeros(tensor.Float32, 2), zeros(tensor.Float32, 2)}
		out := []*tensor.Tensor{zeros(tensor.Float32, 2), zeros(tensor.Float32, 1)}
		in := []*tensor.Tensor{zeros(tensor.Float32, 6), zeros(tensor.Float32, 3)}
		err := errors.Join(
			barrier(g),
			do(g.ReduceScatter(ctx, zeros(tensor.Float32, 2), ins, pg.Sum())),
			do(g.ReduceScatterTensorCoalesced(ctx, out, in, pg.Sum())),
		)
		if err != nil {
			t.Errorf("rank %d: %v", g.Rank(), err)
		}
		call := barrier
		if g.Rank() == 0 {
			call = func(g *pg.ProcessGroup) error { return allReduce(g, zeros(tensor.Float32, 1)) }
		}
		var e *detail.MismatchError
		if errors.As(call(g), &e) {
			numbers.put(g.Rank(), e.Own.Seq)
		}
	})
	require.Equal(t, map[int]uint64{0: 6, 1: 6, 2: 6}, numbers.of)
}

// TestRefusals: what the backend refuses leaves the ranks in step, and what
// cannot be described is refused without asking the others.
func TestRefusals(t *testing.T) {
	var errs each[[]error]
	job(t, 2, 2, pg.Options{}, nil, func(g *pg.ProcessGroup) {
		list := []error{
			do(g.AllGather(ctx, []*tensor.Tensor{zeros(tensor.Float32, 1)}, zeros(tensor.Float32, 1))),
			do(g.Broadcast(ctx, zeros(tensor.Float32, 1), 7)),
		}
		if g.Rank() == 0 { // alone
			list = append(list, do(g.AllReduce(ctx, nil, pg.Sum())))
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			_, err := g.BarrierAsync(ended)
			if !errors.Is(err, work.ErrCanceled) {
				t.Errorf("a context that has ended: %v", err)
			}
		}
		errs.put(g.Rank(), list)
		if err := barrier(g); err != nil {
			t.Errorf("rank %d, afterwards: %v", g.Rank(), err)
		}
	})
	require.Len(t, errs.of[0], 3)
	for _, list := range errs.of {
		for i, err := range list {
			require.ErrorIs(t, err, backend.ErrInvalidArgument, "%d", i)
		}
	}
}

// TestMissing: a rank that does not come is named with the operation, and the
// group has ended on the others.
func TestMissing(t *testing.T) { synctest.Test(t, testMissing) }

func testMissing(t *testing.T) {
	var first, second each[error]
	job(t, 3, 2, pg.Options{}, nil, func(g *pg.ProcessGroup) {
		if g.Rank() == 1 {
			return // and closes
		}
		g.SetTimeout(2 * time.Second)
		first.put(g.Rank(), allReduce(g, zeros(tensor.Float32, 5)))
		second.put(g.Rank(), barrier(g))
	})
	for _, r := range []int{0, 2} {
		e := must.As[*work.Error](t, first.of[r])
		require.Equal(t, work.AllReduce, e.Op)
		require.Contains(t, e.Error(), "before all_reduce of float32 [5] on cpu")
		require.Error(t, second.of[r])
	}
	e := must.As[*work.Error](t, first.of[0])
	require.Equal(t, 1, e.Peer, "rank 0 knows who is missing: %v", e)
}

// TestCancel: a call's context ends its check, and with it the group.
func TestCancel(t *testing.T) { synctest.Test(t, testCancel) }

func testCancel(t *testing.T) {
	var errs each[error]
	job(t, 2, 2, pg.Options{}, nil, func(g *pg.ProcessGroup) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second) // when both ranks wait
		defer cancel()
		if g.Rank() == 0 {
			_, err := g.BarrierAsync(ctx)
			errs.put(0, err)
			return
		}
		// Ends although nobody comes: the other rank's failure is everybody's.
		errs.put(1, do(g.Recv(context.Background(), zeros(tensor.Float32, 1), 0)))
	})
	require.ErrorContains(t, errs.of[0], "detail: before barrier")
	e := must.As[*work.Error](t, errs.of[0])
	require.Equal(t, work.Barrier, e.Op)
	require.Error(t, errs.of[1])
}

// TestTheCulpritStaysTheCulprit: ranks that wait in the group itself hear the same fault as those
// whose control group has failed.
func TestTheCulpritStaysTheCulprit(t *testing.T) {
	stop := errors.New("user pressed stop")
	for _, tc := range []struct {
		name string
		end  func(j *pgtest.Job, g *pg.ProcessGroup) error // on rank 0
		is   error
		peer int
		text string
	}{
		{"a rank dies", func(j *pgtest.Job, g *pg.ProcessGroup) error {
			j.Fabric().Kill("pg_wrapper:0/0", 2)
			return barrier(g)
		}, work.ErrPeerDied, 2, "rank 2 died"},
		{"a context is cancelled", func(_ *pgtest.Job, g *pg.ProcessGroup) error {
			ctx, cancel := context.WithCancelCause(context.Background())
			time.AfterFunc(time.Millisecond, func() { cancel(stop) })
			return must.Err(g.BarrierAsync(ctx))
		}, work.ErrCanceled, 0, "rank 0 cancelled the operation: user pressed stop"},
		{"time runs out", func(_ *pgtest.Job, g *pg.ProcessGroup) error {
			return must.Err(g.BarrierAsync(context.Background(), pg.BarrierOptions{Timeout: time.Millisecond}))
		}, work.ErrTimeout, 1, "rank 1 did not take part in time (noticed by rank 0): timed out: [Rank 0]: Ranks 1, 2 failed"},
		{"an abort", func(_ *pgtest.Job, g *pg.ProcessGroup) error {
			g.Abort(stop)
			return barrier(g)
		}, work.ErrAborted, 0, "rank 0 aborted the group: user pressed stop"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := pgtest.NewJob(3)
				defer j.Close()
				o := j.Options()
				o.Detail = true
				var errs each[error]
				var met, wg sync.WaitGroup
				met.Add(3)
				for r := range 3 {
					wg.Go(func() {
						g, err := pg.New(context.Background(), j.Store, r, 3, o)
						met.Done()
						if err != nil {
							t.Errorf("rank %d: %v", r, err)
							return
						}
						defer g.Close()
						met.Wait()
						switch r {
						case 0:
							errs.put(r, tc.end(j, g))
						case 1:
							errs.put(r, do(g.Recv(ctx, zeros(tensor.Float32, 1), 0)))
						default:
							errs.put(r, do(g.Recv(ctx, zeros(tensor.Float32, 1), 1)))
						}
					})
				}
				wg.Wait()
				for r, err := range errs.of {
					require.ErrorIs(t, err, tc.is, "rank %d", r)
					if r > 0 {
						require.ErrorContains(t, err, tc.text, "rank %d", r)
					}
					e := must.As[*work.Error](t, err)
					require.Equal(t, tc.peer, e.Peer, "rank %d: %v", r, err)
				}
			})
		})
	}
}

// TestLeavingAfterAFault: rank 2 waits in a check while another rank closes its group. The last call of
// that rank was not started, so no Work of it has failed. Rank 2 hears why the group has ended, not that a
// rank has left.
func TestLeavingAfterAFault(t *testing.T) {
	stop := errors.New("user pressed stop")
	recv := func(ctx context.Context, g *pg.ProcessGroup, from int) error {
		w, err := g.Recv(ctx, zeros(tensor.Float32, 1), from)
		if err == nil {
			err = w.Wait(context.Background())
		}
		return err
	}
	for _, tc := range []struct {
		name string
		of   [2]func(ctx context.Context, cancel func(error), g *pg.ProcessGroup) error // ranks 0 and 1
	}{
		{"the call of the rank that cancelled", [2]func(context.Context, func(error), *pg.ProcessGroup) error{
			func(_ context.Context, _ func(error), g *pg.ProcessGroup) error { return barrier(g) },
			func(ctx context.Context, cancel func(error), g *pg.ProcessGroup) error {
				cancel(stop)
				return recv(ctx, g, 0)
			},
		}},
		{"the next call of another one", [2]func(context.Context, func(error), *pg.ProcessGroup) error{
			func(_ context.Context, _ func(error), g *pg.ProcessGroup) error {
				time.Sleep(time.Second)
				w, err := g.Send(context.Background(), zeros(tensor.Float32, 1), 1)
				if w != nil {
					return errors.New("the call was not refused")
				}
				return err
			},
			func(ctx context.Context, cancel func(error), g *pg.ProcessGroup) error {
				time.AfterFunc(time.Millisecond, func() { cancel(stop) })
				err := recv(ctx, g, 0)
				time.Sleep(2 * time.Second) // it closes its group last
				return err
			},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var errs each[error]
				job(t, 3, 2, pg.Options{}, nil, func(g *pg.ProcessGroup) {
					if g.Rank() == 2 {
						errs.put(2, barrier(g))
						return
					}
					ctx, cancel := context.WithCancelCause(context.Background())
					defer cancel(nil)
					errs.put(g.Rank(), tc.of[g.Rank()](ctx, cancel, g))
				})
				for r, err := range errs.of {
					require.ErrorIs(t, err, work.ErrCanceled, "rank %d", r)
					require.ErrorContains(t, err, stop.Error(), "rank %d", r)
					e := must.As[*work.Error](t, err)
					if r != 1 {
						require.Equal(t, 1, e.Peer, "rank %d: %v", r, err)
					}
				}
			})
		})
	}
}

// TestCheckWaitsForADiagnosis: rank 0 waits in a check for rank 1, which waits in an operation for
// rank 2, which has stopped. All name rank 2.
func TestCheckWaitsForADiagnosis(t *testing.T) { synctest.Test(t, testCheckWaits) }

func testCheckWaits(t *testing.T) {
	j := pgtest.NewJob(3)
	defer j.Close()
	o := j.Options()
	o.Detail = true
	var errs each[error]
	var met, wg sync.WaitGroup
	met.Add(3)
	for r := range 3 {
		wg.Go(func() {
			g, err := pg.New(context.Background(), j.Store, r, 3, o)
			met.Done()
			if err != nil {
				t.Errorf("rank %d: %v", r, err)
				return
			}
			defer g.Close()
			g.SetTimeout(2 * time.Second)
			met.Wait()
			switch r {
			case 0:
				errs.put(r, barrier(g))
			case 1:
				errs.put(r, do(g.Recv(ctx, zeros(tensor.Float32, 1), 2)))
			case 2:
				j.Freeze(2)
				time.Sleep(20 * time.Second)
			}
		})
	}
	wg.Wait()
	for r, err := range errs.of {
		e := must.As[*work.Error](t, err)
		require.Equal(t, 2, e.Peer, "rank %d: %v", r, err)
	}
}

// TestTimeout: an operation and its check together have the operation's timeout. The text has that time, and no
// numbers of the check's own collectives.
func TestTimeout(t *testing.T) {
	for _, limit := range []time.Duration{200 * time.Millisecond, 3 * time.Second, time.Minute} {
		for _, byContext := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v, by the context %v", limit, byContext), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var errs each[error]
					var took each[time.Duration]
					job(t, 3, 2, pg.Options{Timeout: 10 * time.Minute}, nil, func(g *pg.ProcessGroup) {
						if err := barrier(g); err != nil {
							t.Errorf("rank %d: %v", g.Rank(), err)
						}
						if g.Rank() == 1 {
							time.Sleep(limit + 10*time.Second)
							return
						}
						begun, ctx, timeout := time.Now(), context.Background(), limit
						if byContext {
							var cancel context.CancelFunc
							ctx, cancel = context.WithTimeout(ctx, limit)
							defer cancel()
							timeout = 0
						}
						_, err := g.AllReduce(ctx, zeros(tensor.Float32, 1), pg.Sum(), pg.CallOptions{Timeout: timeout})
						errs.put(g.Rank(), err)
						took.put(g.Rank(), time.Since(begun))
					})
					for _, r := range []int{0, 2} {
						err, d := errs.of[r], took.of[r]
						require.ErrorIs(t, err, work.ErrTimeout)
						require.GreaterOrEqual(t, d, limit)
						require.LessOrEqual(t, d, max(limit+300*time.Millisecond, limit*11/10))
						require.ErrorContains(t, err, fmt.Sprintf("failed to pass monitoredBarrier in %d ms", limit.Milliseconds()))
						require.ErrorContains(t, err, "rank 1 has not called it")
						require.NotContains(t, err.Error(), "has issued")
						e := must.As[*work.Error](t, err)
						require.Equal(t, 1, e.Peer)
					}
				})
			})
		}
	}
}

// TestLongestTimeout: a group or an operation with the longest timeout waits for a rank in its check, too.
func TestLongestTimeout(t *testing.T) {
	for name, limits := range map[string][2]time.Duration{"of the group": {math.MaxInt64, 0}, "of the operation": {0, math.MaxInt64}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var errs each[error]
				job(t, 2, 2, pg.Options{Timeout: limits[0]}, nil, func(g *pg.ProcessGroup) {
					if g.Rank() == 1 {
						time.Sleep(2 * backend.DefaultTimeout)
					}
					errs.put(g.Rank(), do(g.BarrierAsync(ctx, pg.BarrierOptions{Timeout: limits[1]})))
				})
				require.NoError(t, errs.of[0])
				require.NoError(t, errs.of[1])
			})
		})
	}
}

// TestKeys states where the control groups meet, which PyTorch's do too.
func TestKeys(t *testing.T) {
	for d, want := range map[generation][]string{
		1: {"pg_wrapper:0/c10d-go/0", "pg_wrapper:0/c10d-go/1", "pg_wrapper:1/c10d-go/0"},
		2: {"0//1//cpu//pg_wrapper:1/c10d-go/0", "0//cpu//pg_wrapper:0/c10d-go/0", "0//cpu//pg_wrapper:0/c10d-go/1"},
	} {
		j := pgtest.NewJob(2)
		o := j.Options()
		o.Detail = true
		var wg sync.WaitGroup
		for r := range 2 {
			wg.Go(func() {
				g, err := pg.New(t.Context(), d.in(j.Store), r, 2, o)
				if err == nil {
					_, err = g.NewGroup(t.Context(), []int{1})
					g.Close()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		keys := must.Get(j.Store.ListKeys(t.Context()))
		keys = slices.DeleteFunc(keys, func(k string) bool { return !strings.Contains(k, "pg_wrapper") })
		slices.Sort(keys)
		require.Equal(t, want, keys)
		require.NoError(t, j.Close())
	}
}

// fake is a backend that notes what is called.
type fake struct {
	backend.Unsupported
	barrier error
	called  []string
	ended   int
}

func (f *fake) Name() string             { return "fake" }
func (f *fake) Rank() int                { return 0 }
func (f *fake) Size() int                { return 2 }
func (f *fake) Seq() uint64              { return 0 }
func (f *fake) SetTimeout(time.Duration) { f.called = append(f.called, "SetTimeout") }
func (f *fake) Abort(error)              { f.called = append(f.called, "Abort") }
func (f *fake) Close() error             { f.ended++; return nil }
func (f *fake) MonitoredBarrier(context.Context, backend.MonitoredBarrierOptions) error {
	f.called = append(f.called, "MonitoredBarrier")
	return f.barrier
}

// TestEveryCollectiveIsChecked finds the operations by their signature, so
// that one which is new cannot be forgotten.
func TestEveryCollectiveIsChecked(t *testing.T) {
	sentinel := errors.New("not all came")
	operation := reflect.TypeFor[func() (*work.Work, error)]()
	checked := 0
	for i := range reflect.TypeFor[backend.Backend]().NumMethod() {
		m := reflect.TypeFor[backend.Backend]().Method(i)
		if m.Type.NumOut() != 2 || m.Type.Out(0) != operation.Out(0) {
			continue
		}
		inner, control := &fake{}, &fake{barrier: sentinel}
		b, err := detail.New(t.Context(), inner, func(context.Context, backend.Options) (backend.Backend, error) { return control, nil },
			backend.Options{Store: store.NewHash(), Size: 2})
		require.NoError(t, err)
		args, overlapping := make([]reflect.Value, m.Type.NumIn()), make([]reflect.Value, m.Type.NumIn())
		for k := range args {
			args[k] = argument(m.Type.In(k), 1)
			overlapping[k] = argument(m.Type.In(k), 0)
		}
		if m.Name != "Barrier" && !isMessage(m.Name) {
			err, _ := reflect.ValueOf(b).MethodByName(m.Name).Call(overlapping)[1].Interface().(error)
			require.ErrorIs(t, err, backend.ErrInvalidArgument, m.Name)
			require.Empty(t, control.called, "%s: refused before the ranks meet", m.Name)
		}
		out := reflect.ValueOf(b).MethodByName(m.Name).Call(args)
		err, _ = out[1].Interface().(error)
		if isMessage(m.Name) {
			require.ErrorIs(t, err, errors.ErrUnsupported, m.Name)
			require.Empty(t, control.called, m.Name)
		} else {
			require.ErrorIs(t, err, sentinel, m.Name)
			require.Equal(t, []string{"MonitoredBarrier", "Abort"}, control.called, m.Name)
			require.Equal(t, []string{"Abort"}, inner.called, "%s: the whole group ends", m.Name)
			checked++
		}
		require.NoError(t, b.Close())
		require.Equal(t, 1, inner.ended)
		require.Equal(t, 1, control.ended)
	}
	require.Equal(t, 18, checked)
}

func isMessage(name string) bool {
	return slices.Contains([]string{"Send", "Recv", "RecvAnySource"}, name)
}

// argument returns a value that an operation takes. Elements of tensors share memory if the stride is 0.
func argument(typ reflect.Type, stride int) reflect.Value {
	switch typ {
	case reflect.TypeFor[context.Context]():
		return reflect.ValueOf(context.Background())
	case reflect.TypeFor[*tensor.Tensor]():
		t, err := zeros(tensor.Float32, 2).AsStrided([]int{2}, []int{stride}, 0)
		if err != nil {
			panic(err)
		}
		return reflect.ValueOf(t)
	}
	if typ.Kind() == reflect.Slice {
		return reflect.Append(reflect.Zero(typ), argument(typ.Elem(), stride))
	}
	return reflect.Zero(typ)
}

// TestNew: what fails leaves nothing open.
func TestNew(t *testing.T) {
	closed := store.NewHash()
	require.NoError(t, closed.Close())
	o := backend.Options{Store: closed, Size: 2}
	_, err := detail.New(t.Context(), &fake{}, nil, o)
	require.ErrorIs(t, err, store.ErrClosed)

	o.Store = store.NewHash()
	no := errors.New("no way through")
	_, err = detail.New(t.Context(), &fake{}, func(context.Context, backend.Options) (backend.Backend, error) { return nil, no }, o)
	require.ErrorIs(t, err, no)

	control := &fake{}
	_, err = detail.New(t.Context(), &fake{}, func(_ context.Context, o backend.Options) (backend.Backend, error) {
		return control, o.Store.Close()
	}, o)
	require.ErrorIs(t, err, store.ErrClosed)
	require.Equal(t, 1, control.ended)

	inner, control := &fake{}, &fake{}
	o.Store = store.NewHash()
	b := must.Get(detail.New(t.Context(), inner, func(context.Context, backend.Options) (backend.Backend, error) { return control, nil }, o))
	require.Same(t, inner, b.Unwrap())
	b.SetTimeout(time.Second)
	require.Equal(t, []string{"SetTimeout"}, inner.called)
	require.Equal(t, []string{"SetTimeout"}, control.called)
}
