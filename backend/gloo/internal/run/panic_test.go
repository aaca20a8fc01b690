package run_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// broken is a custom operator that fails.
func broken(how func()) backend.ReduceOp {
	return backend.Custom("broken", func(tensor.DType, []byte, []byte) { how() })
}

// TestAPanicInAnOperator ends the operation and the group. The rank itself gets the panic and its
// stack, the others get that rank and the panic's value. The process goes on.
func TestAPanicInAnOperator(t *testing.T) {
	ctx := context.Background()
	cause := errors.New("no such row")
	call := map[string]func(b *gloo.Backend, op backend.ReduceOp) (*work.Work, error){
		"all_reduce, small": func(b *gloo.Backend, op backend.ReduceOp) (*work.Work, error) {
			return b.AllReduce(ctx, list(vec(1, 2)), backend.AllReduceOptions{Op: op})
		},
		"all_reduce, large": func(b *gloo.Backend, op backend.ReduceOp) (*work.Work, error) {
			return b.AllReduce(ctx, list(vec(make([]float32, 1<<18)...)), backend.AllReduceOptions{Op: op})
		},
		"reduce": func(b *gloo.Backend, op backend.ReduceOp) (*work.Work, error) {
			return b.Reduce(ctx, vec(make([]float32, 1<<18)...), backend.ReduceOptions{Op: op, Root: 1})
		},
		"reduce_scatter": func(b *gloo.Backend, op backend.ReduceOp) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, vec(make([]float32, 1<<16)...), vec(make([]float32, 3<<16)...), backend.ReduceScatterOptions{Op: op})
		},
	}
	for name, how := range map[string]struct {
		f     func()
		is    error
		words string
	}{
		"panic":  {func() { panic(cause) }, cause, "no such row"},
		"index":  {func() { _ = make([]int, 3)[len(name(nil))] }, nil, "runtime error: index out of range [5] with length 3"},
		"Goexit": {runtime.Goexit, work.ErrExited, "the function called runtime.Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
				for op, call := range call {
					if op != "all_reduce, small" && name != "panic" {
						continue // one operation is enough
					}
					t.Run(op, func(t *testing.T) {
						bs := connected(t, time.Minute, same(wire, 3)...)
						meet(t, bs) // on Gloo's wire words go to ranks that have been heard of
						errs := make([]error, len(bs))
						var culprit atomic.Int32 // 1 more than the first rank that combines: not every one does
						must.End(t, op, func() {
							onAll(t, bs, func(r int, b *gloo.Backend) {
								w, err := call(b, broken(func() {
									if culprit.CompareAndSwap(0, int32(r)+1) {
										how.f()
									}
								}))
								if err != nil {
									errs[r] = err
									return
								}
								defer func() { errs[r] = w.Err() }() // Goexit ends the waiting goroutine
								w.Wait(ctx)
							})
						})
						bad := int(culprit.Load()) - 1
						for r, err := range errs {
							if err == nil && r != bad {
								continue // it had all that it needed
							}
							require.ErrorIs(t, err, work.ErrPanicked, "rank %d: %v", r, err)
							require.ErrorContains(t, err, how.words)
							e := must.As[*work.Error](t, err)
							require.Equal(t, bad, e.Peer)
							var p *work.PanicError
							if r != bad {
								require.ErrorContains(t, err, fmt.Sprintf("rank %d panicked: %s", bad, how.words))
								require.NotContains(t, err.Error(), "goroutine")
								continue
							}
							require.ErrorAs(t, err, &p)
							require.Contains(t, string(p.Stack), "panic_test.go")
							require.Contains(t, err.Error(), "panic_test.go", "the text has the stack")
							if how.is != nil {
								require.ErrorIs(t, err, how.is)
							}
						}
						for r, b := range bs {
							must.End(t, "a later operation", func() {
								err := barrier(b)
								require.Error(t, err, "rank %d", r)
								require.NotContains(t, err.Error(), "goroutine", "one stack is enough")
							})
						}
					})
				}
			})
		})
	}
}

func name(s []byte) string { return "index" + string(s) }

// TestWorkersOutliveGoexit: an operator that ends its goroutine takes one of the backend's with it,
// and operations that are queued behind end all the same.
func TestWorkersOutliveGoexit(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, time.Minute, same(wire, 2)...)
		must.End(t, "an operation", func() {
			for _, b := range bs {
				for range 4 {
					w, err := b.AllReduce(context.Background(), list(vec(make([]float32, 1<<15)...)), backend.AllReduceOptions{Op: broken(runtime.Goexit)})
					if err != nil {
						continue // the first has failed by now
					}
					defer func() { <-w.Done(); assert.Error(t, w.Err()) }()
				}
			}
		})
	})
}

// TestCauseIsBounded: whatever the cause of a cancelled context has, the others get a short line of
// it that can be printed.
func TestCauseIsBounded(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, time.Minute, same(wire, 2)...)
		ctx, cancel := context.WithCancelCause(context.Background())
		w := must.Get(bs[0].AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{}))
		own := must.Get(bs[1].Recv(ctx, vec(1), 0, backend.P2POptions{}))
		cause := errors.New("enough:\x1b[31m\n\xff\x00" + strings.Repeat("\u00e9", 10_000))
		cancel(cause)
		must.End(t, "the end", func() {
			require.ErrorIs(t, own.Wait(context.Background()), cause)
			err := w.Wait(context.Background())
			require.ErrorIs(t, err, work.ErrCanceled)
			require.ErrorContains(t, err, "rank 1 cancelled the operation: enough:?[31m")
			require.Less(t, len(err.Error()), 2*transport.MaxWords)
			for _, r := range err.Error() {
				require.True(t, unicode.IsPrint(r), "%q", err)
			}
		})
	})
}

// TestWordsOfAbort: the other ranks hear why, on every wire.
func TestWordsOfAbort(t *testing.T) {
	ctx := context.Background()
	stop := errors.New("user pressed stop")
	for _, tc := range []struct {
		name string
		is   error
		want string
		end  func(b *gloo.Backend, cancel context.CancelCauseFunc)
	}{
		{"cancelled with a cause", work.ErrCanceled, "rank 1 cancelled the operation: user pressed stop",
			func(_ *gloo.Backend, cancel context.CancelCauseFunc) { cancel(stop) }},
		{"cancelled without", work.ErrCanceled, "rank 1 cancelled the operation",
			func(_ *gloo.Backend, cancel context.CancelCauseFunc) { cancel(nil) }},
		{"aborted with a cause", work.ErrAborted, "rank 1 aborted the group: user pressed stop",
			func(b *gloo.Backend, _ context.CancelCauseFunc) { b.Abort(stop) }},
		{"aborted without", work.ErrAborted, "rank 1 aborted the group",
			func(b *gloo.Backend, _ context.CancelCauseFunc) { b.Abort(nil) }},
		{"aborted for another", work.ErrPeerDied, "rank 2 died (noticed by rank 0): connection reset",
			func(b *gloo.Backend, _ context.CancelCauseFunc) {
				f := &transport.Fault{Kind: transport.FaultPeerDied, Rank: 2, Err: errors.New("connection reset")}
				b.Abort(errors.Join(errors.New("above"), &work.Error{Info: work.Info{Op: work.Barrier}, Peer: 2, Err: f}))
			}},
		{"aborted for a kind alone", work.ErrTimeout, "rank 2 did not take part in time (noticed by rank 1): timed out",
			func(b *gloo.Backend, _ context.CancelCauseFunc) {
				b.Abort(&work.Error{Info: work.Info{Op: work.Barrier}, Peer: 2, Err: work.ErrTimeout})
			}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
				bs := connected(t, time.Minute, same(wire, 3)...)
				met := make(chan error, 3)
				for _, b := range bs {
					go func() { met <- barrier(b) }() // so all have heard of all
				}
				for range bs {
					require.NoError(t, <-met)
				}
				mine, cancel := context.WithCancelCause(ctx)
				defer cancel(nil)
				var works []*work.Work
				for r, b := range bs[:2] {
					w := must.Get(b.AllReduce([]context.Context{ctx, mine}[r], list(vec(1)), backend.AllReduceOptions{}))
					works = append(works, w)
				}
				tc.end(bs[1], cancel)
				must.End(t, "the end", func() {
					for r, w := range works {
						err := w.Wait(ctx)
						require.ErrorIs(t, err, tc.is)
						require.ErrorContains(t, err, tc.want)
						if r == 0 {
							require.True(t, strings.HasSuffix(strings.TrimSuffix(err.Error(), " (in barrier seq 0)"), tc.want), err.Error())
						}
					}
				})
			})
		})
	}
}
