package run_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// promptly is more than Close takes on a slow host, and much less than the groups' timeouts.
const promptly = 10 * time.Second

// meet makes all ranks hear of all.
func meet(t *testing.T, bs []*gloo.Backend) {
	t.Helper()
	met := make(chan error, len(bs))
	for _, b := range bs {
		go func() { met <- barrier(b) }()
	}
	for range bs {
		require.NoError(t, <-met)
	}
}

func ones(n int) *tensor.Tensor {
	v := make([]float32, n)
	for i := range v {
		v[i] = 1
	}
	return vec(v...)
}

// TestCloseEndsWhatIsPending closes a rank with operations that wait for others.
func TestCloseEndsWhatIsPending(t *testing.T) {
	ctx := context.Background()
	for _, tc := range []struct {
		name  string
		post  func(b *gloo.Backend) (*work.Work, error)
		words string // of the other ranks; empty where the group goes on
	}{
		{"all_reduce", func(b *gloo.Backend) (*work.Work, error) {
			return b.AllReduce(ctx, list(ones(1)), backend.AllReduceOptions{})
		}, "rank 1 left the group while others needed it: it called Close with all_reduce seq 1 open"},
		{"several", func(b *gloo.Backend) (*work.Work, error) {
			if _, err := b.AllReduce(ctx, list(ones(1<<18)), backend.AllReduceOptions{}); err != nil {
				return nil, err
			}
			return b.Barrier(ctx, backend.BarrierOptions{})
		}, "rank 1 left the group while others needed it: it called Close with 2 operations (the first is all_reduce seq 1) open"},
		{"a receive", func(b *gloo.Backend) (*work.Work, error) {
			return b.Recv(ctx, ones(1), 0, backend.P2POptions{})
		}, ""},
		{"a receive from any rank", func(b *gloo.Backend) (*work.Work, error) {
			return b.RecvAnySource(ctx, ones(1), backend.P2POptions{})
		}, ""},
		{"a large send", func(b *gloo.Backend) (*work.Work, error) {
			return b.Send(ctx, ones(4<<20), 0, backend.P2POptions{})
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
				bs := connected(t, time.Hour, same(wire, 3)...)
				meet(t, bs)
				w, err := tc.post(bs[1])
				require.NoError(t, err)
				start := time.Now()
				must.End(t, "Close", func() { require.NoError(t, bs[1].Close()) })
				require.Less(t, time.Since(start), promptly)
				must.End(t, "the operation", func() { <-w.Done() })
				require.ErrorIs(t, w.Err(), work.ErrClosed)
				_, err = bs[1].Barrier(ctx, backend.BarrierOptions{})
				require.ErrorIs(t, err, work.ErrClosed)
				must.End(t, "another rank", func() {
					if tc.words == "" {
						// The others can go on without it, until they need it.
						s := must.Get(bs[0].Send(ctx, ones(1), 2, backend.P2POptions{Tag: 5}))
						require.NoError(t, wait(bs[2].Recv(ctx, ones(1), 0, backend.P2POptions{Tag: 5})))
						require.NoError(t, s.Wait(ctx))
						require.ErrorIs(t, wait(bs[0].Recv(ctx, ones(1), 1, backend.P2POptions{Tag: 6})), work.ErrPeerLeft)
						return
					}
					for _, r := range []int{0, 2} {
						err := barrier(bs[r])
						require.ErrorIs(t, err, work.ErrPeerLeft)
						require.ErrorContains(t, err, tc.words)
						e := must.As[*work.Error](t, err)
						require.Equal(t, 1, e.Peer)
					}
				})
			})
		})
	}
}

// TestCloseDuringAMonitoredBarrier that another goroutine is in.
func TestCloseDuringAMonitoredBarrier(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, time.Hour, same(wire, 2)...)
		meet(t, bs)
		before := bs[1].Seq()
		result := make(chan error)
		go func() {
			result <- bs[1].MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{})
		}()
		require.Eventually(t, func() bool { return bs[1].Seq() > before }, promptly, time.Millisecond)
		must.End(t, "Close", func() { require.NoError(t, bs[1].Close()) })
		must.End(t, "the barrier", func() { require.ErrorIs(t, <-result, work.ErrClosed) })
		must.End(t, "the other rank", func() {
			err := bs[0].MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{})
			require.ErrorContains(t, err, "rank 1 left the group while others needed it: it called Close with barrier seq 1 open")
		})
	})
}

// TestCloseDoesNotWaitForTheProgram: an operator that does not return holds Close up for half a second.
func TestCloseDoesNotWaitForTheProgram(t *testing.T) {
	defer run.SetCloseWithin(50 * time.Millisecond)()
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, time.Hour, same(wire, 2)...)
		inside, release := make(chan *gloo.Backend, 2), make(chan struct{})
		works := map[*gloo.Backend]*work.Work{}
		for _, b := range bs {
			w, err := b.AllReduce(context.Background(), list(ones(1<<17)), backend.AllReduceOptions{Op: broken(func() {
				select {
				case inside <- b:
				default:
				}
				<-release
			})})
			require.NoError(t, err)
			works[b] = w
		}
		b := <-inside
		must.End(t, "Close", func() {
			require.ErrorContains(t, b.Close(), "all_reduce seq 0 has not returned from a function of the program")
			require.NoError(t, b.Close(), "again")
		})
		require.False(t, works[b].IsCompleted(), "it still has the memory")
		close(release)
		must.End(t, "the operation", func() { <-works[b].Done() })
	})
}

// TestShutdown waits for what is open, and gives up with its context.
func TestShutdown(t *testing.T) {
	ctx := context.Background()
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Run("drains", func(t *testing.T) {
			bs := connected(t, time.Minute, same(wire, 2)...)
			var works []*work.Work
			for range 3 {
				w := must.Get(bs[1].AllReduce(ctx, list(ones(1<<15)), backend.AllReduceOptions{}))
				works = append(works, w)
			}
			r := must.Get(bs[1].Recv(ctx, ones(1), 0, backend.P2POptions{}))
			ended := make(chan error)
			go func() { ended <- bs[1].Shutdown(ctx) }()
			for range 3 {
				require.NoError(t, wait(bs[0].AllReduce(ctx, list(ones(1<<15)), backend.AllReduceOptions{})))
			}
			require.NoError(t, wait(bs[0].Send(ctx, ones(1), 1, backend.P2POptions{})))
			must.End(t, "Shutdown", func() { require.NoError(t, <-ended) })
			for _, w := range append(works, r) {
				require.True(t, w.IsSuccess())
			}
			require.ErrorIs(t, must.Err(bs[1].Barrier(ctx, backend.BarrierOptions{})), work.ErrClosed)
		})
		t.Run("gives up", func(t *testing.T) {
			for what, post := range map[string]func(b *gloo.Backend) (*work.Work, error){
				"barrier seq 0": func(b *gloo.Backend) (*work.Work, error) { return b.Barrier(ctx, backend.BarrierOptions{}) },
				"sends or receives": func(b *gloo.Backend) (*work.Work, error) {
					return b.Recv(ctx, ones(1), 0, backend.P2POptions{})
				},
			} {
				bs := connected(t, time.Hour, same(wire, 2)...)
				w := must.Get(post(bs[1]))
				enough, cancel := context.WithCancelCause(ctx)
				cancel(errors.New("no more time"))
				must.End(t, "Shutdown", func() {
					err := bs[1].Shutdown(enough)
					require.ErrorIs(t, err, context.Canceled)
					require.ErrorContains(t, err, "gloo: Shutdown gave up waiting for "+what)
					require.ErrorContains(t, err, "no more time")
				})
				require.ErrorIs(t, w.Err(), work.ErrClosed)
			}
		})
		t.Run("Close cuts it short", func(t *testing.T) {
			bs := connected(t, time.Hour, same(wire, 2)...)
			w := must.Get(bs[1].Barrier(ctx, backend.BarrierOptions{}))
			ended := make(chan error)
			go func() { ended <- bs[1].Shutdown(ctx) }()
			must.End(t, "Close", func() {
				require.NoError(t, bs[1].Close())
				require.NoError(t, <-ended)
			})
			require.ErrorIs(t, w.Err(), work.ErrClosed)
		})
	})
}
