package run_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// waits are calls of rank 0 that wait for others.
var waits = map[string]func(ctx context.Context, b *gloo.Backend, limit time.Duration) error{
	"all_reduce": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{Timeout: limit}))
	},
	"broadcast": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.Broadcast(ctx, list(vec(1)), backend.BroadcastOptions{Root: 1, Timeout: limit}))
	},
	"all_to_all": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.AllToAllSingle(ctx, vec(0, 0, 0), vec(1, 2, 3), nil, nil, backend.AllToAllOptions{Timeout: limit}))
	},
	"barrier": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.Barrier(ctx, backend.BarrierOptions{Timeout: limit}))
	},
	"barrier after another call": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		if _, err := b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{Timeout: time.Hour}); err != nil {
			return err
		}
		return wait(b.Barrier(ctx, backend.BarrierOptions{Timeout: limit}))
	},
	"monitored_barrier": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{Timeout: limit})
	},
	"send": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.Send(ctx, zeros(1<<20), 1, backend.P2POptions{Timeout: limit}))
	},
	"recv": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.Recv(ctx, vec(0), 1, backend.P2POptions{Timeout: limit}))
	},
	"recv from any rank": func(ctx context.Context, b *gloo.Backend, limit time.Duration) error {
		return wait(b.RecvAnySource(ctx, vec(0), backend.P2POptions{Timeout: limit}))
	},
	"batch": func(ctx context.Context, b *gloo.Backend, limit time.Duration) (err error) {
		defer must.Catch(&err)
		var all []*work.Work
		for i := range 20 {
			w := must.Get(b.Recv(ctx, vec(0), 1+i%2, backend.P2POptions{Tag: uint32(i), Timeout: limit}))
			all = append(all, w)
		}
		for _, w := range all[:19] {
			_ = w.Wait(context.Background())
		}
		return all[19].Wait(context.Background())
	},
}

func zeros(n int) *tensor.Tensor {
	t, err := tensor.New(tensor.Float32, n)
	if err != nil {
		panic(err)
	}
	return t
}

// TestTimeoutOfEveryCall: a call ends when its time is over, or 0.3 s or a tenth of the time later. The text has
// the time that the program has set.
func TestTimeoutOfEveryCall(t *testing.T) {
	for name, call := range waits {
		for _, limit := range []time.Duration{10 * time.Millisecond, 200 * time.Millisecond, 3 * time.Second, time.Minute} {
			for _, byContext := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %v, by its context %v", name, limit, byContext), func(t *testing.T) {
					ranks(t, mem.NewFabric(), 3, 1, 0, func(t *testing.T, b *gloo.Backend) {
						if b.Rank() != 0 {
							time.Sleep(2 * time.Minute)
							return
						}
						begun, ctx, timeout := time.Now(), context.Background(), limit
						if byContext {
							var cancel context.CancelFunc
							ctx, cancel = context.WithTimeout(ctx, limit)
							defer cancel()
							timeout = time.Hour
						}
						err := call(ctx, b, timeout)
						took := time.Since(begun)
						require.ErrorIs(t, err, work.ErrTimeout)
						require.GreaterOrEqual(t, took, limit)
						require.LessOrEqual(t, took, max(limit+300*time.Millisecond, limit*11/10))
						switch {
						case name == "monitored_barrier":
							require.ErrorContains(t, err, fmt.Sprintf("in %d ms", limit.Milliseconds()))
						case byContext:
							require.ErrorContains(t, err, "context deadline exceeded")
						default:
							require.ErrorContains(t, err, fmt.Sprintf("timed out after %v", limit))
						}
					})
				})
			}
		}
	}
}

// TestEndsInTime: a call that ends in the last hundredth of its time succeeds, and the group works. The questions of the
// rank that waits do not disturb the others.
func TestEndsInTime(t *testing.T) {
	for _, limit := range []time.Duration{100 * time.Millisecond, time.Second, 5 * time.Second} {
		t.Run(limit.String(), func(t *testing.T) {
			ranks(t, mem.NewFabric(), 3, 1, 0, func(t *testing.T, b *gloo.Backend) {
				for range 3 {
					if b.Rank() == 2 {
						time.Sleep(limit * 99 / 100)
					}
					require.NoError(t, wait(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{Timeout: limit})))
					require.NoError(t, wait(b.Barrier(context.Background(), backend.BarrierOptions{Timeout: limit})))
					if b.Rank() == 2 {
						time.Sleep(limit * 99 / 100)
						require.NoError(t, wait(b.Send(context.Background(), vec(1), 0, backend.P2POptions{Timeout: limit})))
					} else if b.Rank() == 0 {
						require.NoError(t, wait(b.Recv(context.Background(), vec(1), 2, backend.P2POptions{Timeout: limit})))
					}
					if b.Rank() == 2 {
						time.Sleep(limit * 98 / 100)
					}
					require.NoError(t, b.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{Timeout: 2 * limit}))
				}
			})
		})
	}
}

// TestTimeoutFromBefore: with a begun.Context the time counts from there, and the text has the program's timeout.
func TestTimeoutFromBefore(t *testing.T) {
	for name, call := range waits {
		if name == "barrier after another call" {
			continue // the other call has its own time
		}
		t.Run(name, func(t *testing.T) {
			ranks(t, mem.NewFabric(), 3, 1, 0, func(t *testing.T, b *gloo.Backend) {
				if b.Rank() != 0 {
					time.Sleep(time.Minute)
					return
				}
				ctx := &begun.Context{Context: context.Background(), Since: time.Now()}
				time.Sleep(2 * time.Second)
				now := time.Now()
				err := call(ctx, b, 3*time.Second)
				require.GreaterOrEqual(t, time.Since(now), time.Second)
				require.LessOrEqual(t, time.Since(now), 1300*time.Millisecond)
				require.ErrorIs(t, err, work.ErrTimeout)
				require.Regexp(t, "after 3s|in 3000 ms", err.Error())
			})
		})
	}
}

// TestTimeoutOnEveryWire: every call that waits ends with the rank that does not come.
func TestTimeoutOnEveryWire(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Parallel()
		for _, name := range []string{"all_reduce", "monitored_barrier", "send", "recv", "batch"} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				bs := connected(t, run.GroupTimeout, same(wire, 3)...)
				err := waits[name](context.Background(), bs[0], 2*time.Second)
				require.ErrorIs(t, err, work.ErrTimeout)
				require.Regexp(t, "after 2s|in 2000 ms", err.Error())
				e := must.As[*work.Error](t, err)
				if !tooBusy(t, err.Error()) {
					require.Contains(t, []int{1, 2}, e.Peer, "%v", err)
				}
			})
		}
	})
}
