package pg_test

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// BenchmarkCalls is what a call costs by itself. One goroutine is both ranks of a group in shared
// memory: each call comes when it has nothing to wait for. An iteration is two calls, one of each
// rank. least-ns/op is that of the fastest 50 in a row, which other programs of the machine hardly
// change.
func BenchmarkCalls(b *testing.B) {
	ctx := context.Background()
	st := store.NewHash()
	defer st.Close()
	var groups [2]*pg.ProcessGroup
	var made sync.WaitGroup
	for rank := range groups {
		made.Go(func() {
			var err error
			o := pg.Options{BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.WireNative}}}
			if groups[rank], err = pg.New(ctx, st, rank, 2, o); err != nil {
				panic(err)
			}
		})
	}
	made.Wait()
	alone, err := pg.New(ctx, store.Prefix("alone", st), 0, 1)
	require.NoError(b, err)
	defer alone.Close()
	for _, g := range groups {
		defer g.Close()
	}
	for _, size := range []int{4, 1 << 10} {
		t, u := vec(size/4), vec(size/4)
		one, other := []*tensor.Tensor{t}, []*tensor.Tensor{u}
		both := []*tensor.Tensor{vec(size / 4), vec(size / 4)}
		type call func(g *pg.ProcessGroup) (*work.Work, error)
		for _, op := range []struct {
			name          string
			first, second call
		}{
			{"broadcast", func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Broadcast(ctx, one[0], 0)
			}, func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Broadcast(ctx, other[0], 0)
			}},
			{"scatter", func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Scatter(ctx, t, both, 0)
			}, func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Scatter(ctx, u, nil, 0)
			}},
			{"gather", func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Gather(ctx, nil, t, 1)
			}, func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Gather(ctx, both, u, 1)
			}},
			{"reduce", func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Reduce(ctx, t, 1, pg.Sum())
			}, func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Reduce(ctx, u, 1, pg.Sum())
			}},
			{"all_reduce_alone", func(*pg.ProcessGroup) (*work.Work, error) {
				return alone.AllReduce(ctx, one[0], pg.Max())
			}, func(*pg.ProcessGroup) (*work.Work, error) {
				return alone.AllReduce(ctx, other[0], pg.Max())
			}},
			{"send_recv", func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Send(ctx, t, 1)
			}, func(g *pg.ProcessGroup) (*work.Work, error) {
				return g.Recv(ctx, u, 0)
			}},
		} {
			b.Run(op.name+"/"+strconv.Itoa(size), func(b *testing.B) {
				b.ReportAllocs()
				const row = 50
				least, n, began := time.Hour, 0, time.Now()
				for b.Loop() {
					for rank, call := range []call{op.first, op.second} {
						w, err := call(groups[rank])
						if err == nil {
							err = w.Wait(ctx)
						}
						if err != nil {
							b.Fatal(err)
						}
					}
					if n++; n%row == 0 {
						now := time.Now()
						least, began = min(least, now.Sub(began)), now
					}
				}
				b.ReportMetric(float64(least.Nanoseconds())/row, "least-ns/op")
			})
		}
	}
}
