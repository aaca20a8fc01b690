package cuda_test

import (
	"bytes"
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestAPanicInAnOperator ends the operation, and the group, wherever the host combines: through the CPU
// backend, in memory that the ranks share, with a worker alone and with a crew.
func TestAPanicInAnOperator(t *testing.T) {
	for name, how := range map[string]func(){
		"panic":  func() { panic("no such row") },
		"Goexit": runtime.Goexit,
	} {
		for way, s := range map[string]struct {
			options cuda.Options
			bytes   int
			reduce  bool
		}{
			"all_reduce, small":  {cuda.Options{AllReduce: cuda.HostWork}, 64, false},
			"all_reduce, large":  {cuda.Options{AllReduce: cuda.HostWork}, 4 << 20, false},
			"all_reduce, pieces": {cuda.Options{AllReduce: cuda.HostWork, Chunk: 4 << 10}, 64 << 10, false},
			"reduce":             {cuda.Options{}, 1 << 10, true},
		} {
			t.Run(name+", "+way, func(t *testing.T) {
				w := newWorld(t, setup{size: 2, options: s.options, native: true, timeout: patience})
				var culprit atomic.Int32 // 1 more than the rank
				errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
					var err error
					y := must.Get(x.vector(tensor.Float32, 0, make([]byte, s.bytes)))
					op := backend.Custom("broken", func(tensor.DType, []byte, []byte) {
						if culprit.CompareAndSwap(0, int32(r)+1) {
							how()
						}
					})
					var v *work.Work
					if s.reduce {
						v, err = x.b.Reduce(x.ctx, y.t, backend.ReduceOptions{Op: op})
					} else {
						v, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{Op: op})
					}
					if err != nil {
						return err
					}
					<-v.Done() // not Wait: Goexit would end this goroutine
					return v.Err()
				})
				bad := int(culprit.Load()) - 1
				require.GreaterOrEqual(t, bad, 0)
				for r, err := range errs {
					if err == nil && r != bad {
						continue // it had all that it needed
					}
					require.ErrorIs(t, err, work.ErrPanicked, "rank %d", r)
					e := must.As[*work.Error](t, err)
					require.Equal(t, bad, e.Peer, "%v", err)
					var p *work.PanicError
					if r == bad {
						require.ErrorAs(t, err, &p)
						require.True(t, bytes.Contains(p.Stack, []byte("panic_test.go")))
					}
				}
				w.drop(t)
			})
		}
	}
}

// TestCloseAndShutdown with a collective that another rank does not call.
func TestCloseAndShutdown(t *testing.T) {
	for name, end := range map[string]func(b *cuda.Backend) error{
		"Close": func(b *cuda.Backend) error { return b.Close() },
		"Shutdown": func(b *cuda.Backend) error {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			defer cancel()
			err := b.Shutdown(ctx)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorContains(t, err, "cuda: Shutdown gave up waiting for all_reduce seq 0")
			return nil
		},
	} {
		t.Run(name, virtually(func(t *testing.T) {
			w := newWorld(t, setup{size: 2, options: cuda.Options{AllReduce: cuda.HostWork}, timeout: time.Hour})
			var ys [2]*vector
			for r, x := range w.ranks {
				ys[r] = must.Get(x.vector(tensor.Float32, 0, make([]byte, 64)))
			}
			v, err := w.ranks[1].b.AllReduce(w.ctx, []*tensor.Tensor{ys[1].t}, backend.AllReduceOptions{})
			require.NoError(t, err)
			start := time.Now()
			require.NoError(t, end(w.ranks[1].b))
			require.Less(t, time.Since(start), 20*time.Second)
			require.ErrorIs(t, v.Err(), work.ErrClosed)
			_, err = w.ranks[0].b.AllReduce(w.ctx, []*tensor.Tensor{ys[0].t}, backend.AllReduceOptions{})
			e := must.As[*work.Error](t, err)
			require.Equal(t, 1, e.Peer)
			require.ErrorContains(t, err, "rank 1 left the group while others needed it: it called Close with all_reduce seq 0 open")
			w.drop(t)
		}))
	}
	t.Run("Shutdown waits", virtually(func(t *testing.T) {
		w := newWorld(t, setup{size: 2, options: cuda.Options{AllReduce: cuda.HostWork}, timeout: patience})
		w.each(func(x *rank, r int) error {
			var err error
			y := must.Get(x.vector(tensor.Float32, 0, make([]byte, 64)))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
			err = x.b.Shutdown(x.ctx)
			require.True(t, v.IsSuccess(), "%v", v.Err())
			return err
		})
		w.drop(t)
	}))
	t.Run("Shutdown while an operation waits for room", virtually(func(t *testing.T) {
		defer cuda.SetMostQueued(0)()
		w := newWorld(t, setup{size: 2, options: cuda.Options{AllReduce: cuda.HostWork}, timeout: time.Hour})
		x := w.ranks[1]
		y, err := x.vector(tensor.Float32, 0, make([]byte, 64))
		require.NoError(t, err)
		call := func() error {
			return must.Err(x.b.AllReduce(w.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
		}
		require.NoError(t, call())
		require.NoError(t, call()) // it waits for room, in the feeder
		ctx, cancel := context.WithTimeout(w.ctx, 10*time.Millisecond)
		defer cancel()
		start := time.Now()
		require.ErrorIs(t, x.b.Shutdown(ctx), context.DeadlineExceeded)
		require.Less(t, time.Since(start), 20*time.Second)
		w.drop(t)
	}))
}
