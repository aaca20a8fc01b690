package run_test

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/store"
)

// reduce is an all-reduce of one element.
func reduce(b *gloo.Backend) error {
	return wait(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{}))
}

// loud makes a group over f whose ranks write to logs.
func loud(t *testing.T, f *mem.Fabric, size int) ([]*gloo.Backend, []*waitingtest.Log) {
	bs, logs := make([]*gloo.Backend, size), make([]*waitingtest.Log, size)
	for r := range bs {
		o := over(f, r, size, 1, 2)
		logs[r] = new(waitingtest.Log)
		o.Logger, o.Group, o.Timeout = logs[r].Logger(), "0", 2*time.Minute
		bs[r] = join(t, o)
	}
	return bs, logs
}

// TestLateRankIsNamed: every rank that waits for another names it within 12 s, and again at
// growing intervals.
func TestLateRankIsNamed(t *testing.T) {
	for _, tc := range []struct {
		name   string
		freeze bool
		before int // operations that all ranks do before
		call   func(b *gloo.Backend) error
		want   string // a regular expression
	}{
		{"all_reduce", false, 2, reduce, `level=WARN msg="c10d: all_reduce waits for rank 1" group=0 rank=RANK op=all_reduce seq=2 ` +
			`missing="rank 1 has not called it: it has issued 2 collectives, this is number 2" waited=1[01]s until=2000-01-01T00:0\d:\d\dZ$`},
		{"stopped", true, 0, reduce, `missing="rank 1 does not answer \(stopped or unreachable\)"`},
		{"barrier", false, 0, barrier, `msg="c10d: barrier waits for rank 1"`},
		{"monitored barrier", false, 0, func(b *gloo.Backend) error {
			return b.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{})
		}, `msg="c10d: barrier waits for rank 1" group=0 rank=RANK op=barrier seq=0 missing="rank 1 has not called it`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := mem.NewFabric()
				bs, logs := loud(t, f, 3)
				var wg sync.WaitGroup
				for range tc.before {
					for _, b := range bs {
						wg.Go(func() { require.NoError(t, reduce(b)) })
					}
					wg.Wait()
				}
				if tc.freeze {
					f.Freeze("0", 1)
				}
				begun := time.Now()
				for _, r := range []int{0, 2} {
					wg.Go(func() { require.Error(t, tc.call(bs[r])) })
				}
				for _, n := range []struct {
					at    time.Duration
					lines int
				}{{9, 0}, {12, 1}, {29, 1}, {33, 2}, {69, 2}, {74, 3}} {
					time.Sleep(time.Until(begun.Add(n.at * time.Second)))
					synctest.Wait()
					for _, r := range []int{0, 2} {
						require.Len(t, logs[r].Lines(), n.lines, "after %v s: %v", int(n.at), logs[r].Lines())
					}
				}
				for _, r := range []int{0, 2} {
					require.Regexp(t, strings.ReplaceAll(tc.want, "RANK", strconv.Itoa(r)), logs[r].Lines()[0])
				}
				require.Empty(t, logs[1].Lines())
				bs[1].Abort(nil)
				wg.Wait()
				for _, b := range bs {
					wg.Go(func() { b.Close() })
				}
				wg.Wait()
			})
		})
	}
}

// TestSteadyRanksAreSilent: operations that follow each other say nothing, however long they
// go on, and neither does a group without operations.
func TestSteadyRanksAreSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bs, logs := loud(t, mem.NewFabric(), 2)
		var wg sync.WaitGroup
		for _, b := range bs {
			wg.Go(func() {
				for range 100 {
					if b.Rank() == 1 {
						time.Sleep(3 * time.Second)
					}
					require.NoError(t, reduce(b))
				}
			})
		}
		wg.Wait()
		time.Sleep(10 * time.Minute)
		for r, b := range bs {
			wg.Go(func() { b.Close() })
			require.Empty(t, logs[r].Lines())
		}
		wg.Wait()
	})
}

func TestLateMessagesAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bs, logs := loud(t, mem.NewFabric(), 3)
		x := must.Get(bs[0].Recv(context.Background(), vec(0), 1, backend.P2POptions{Tag: 7}))
		y := must.Get(bs[0].Recv(context.Background(), vec(0), 2, backend.P2POptions{Tag: 7}))
		z := must.Get(bs[2].RecvAnySource(context.Background(), vec(0), backend.P2POptions{Tag: 8}))
		time.Sleep(12 * time.Second)
		synctest.Wait()
		require.Len(t, logs[0].Lines(), 1, "one line at a time")
		require.Contains(t, logs[0].Lines()[0], `msg="c10d: recv waits for rank 1" group=0 rank=0 op=recv seq=0 missing="rank 1 has not sent it (tag 7)"`)
		require.Empty(t, logs[2].Lines(), "a receive from any rank waits for nobody in particular")
		require.NoError(t, wait(bs[1].Send(context.Background(), vec(1), 0, backend.P2POptions{Tag: 7})))
		require.NoError(t, x.Wait(context.Background()))
		time.Sleep(12 * time.Second)
		synctest.Wait()
		require.Len(t, logs[0].Lines(), 2)
		require.Contains(t, logs[0].Lines()[1], "recv waits for rank 2")
		bs[1].Abort(nil)
		require.Error(t, y.Wait(context.Background()))
		require.Error(t, z.Wait(context.Background()))
		for _, b := range bs {
			b.Close()
		}
	})
}

// TestLateRankIsNamedOnEveryWire does so with the transports that there are.
func TestLateRankIsNamedOnEveryWire(t *testing.T) {
	onLinux(t)
	for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP, gloo.WireNative, onHosts} {
		t.Run(string(wire), func(t *testing.T) {
			ctx := waiting.WithFirst(t.Context(), 20*time.Millisecond)
			st := store.NewHash()
			defer st.Close()
			bs, logs := make([]*gloo.Backend, 3), make([]*waitingtest.Log, 3)
			var wg sync.WaitGroup
			for r := range bs {
				logs[r] = new(waitingtest.Log)
				o := gloo.Options{Wire: wire}
				if wire == onHosts {
					o = gloo.Options{Host: string(rune('a' + r/2))}
				}
				wg.Go(func() {
					var err error
					bs[r], err = gloo.New(ctx, backend.Options{
						Store: st, Rank: r, Size: 3, Timeout: time.Minute, Specific: o, Logger: logs[r].Logger(),
					})
					require.NoError(t, err)
				})
			}
			wg.Wait()
			for _, r := range []int{0, 2} {
				wg.Go(func() { require.NoError(t, reduce(bs[r])) })
			}
			for _, r := range []int{0, 2} {
				require.Eventually(t, func() bool {
					return strings.Contains(strings.Join(logs[r].Lines(), "\n"), "all_reduce waits for rank 1")
				}, 20*time.Second, time.Millisecond)
			}
			require.NoError(t, reduce(bs[1]))
			wg.Wait()
			for _, b := range bs {
				wg.Go(func() { b.Close() })
			}
			wg.Wait()
		})
	}
}
