package ddp_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// sharing counts what a DDP has of a group's memory.
type sharing struct {
	*pg.ProcessGroup
	full        bool
	taken, held atomic.Int64
}

func (s *sharing) Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
	if s.full {
		return nil, fmt.Errorf("test: %w", backend.ErrExhausted)
	}
	t, err := s.ProcessGroup.Alloc(ctx, dtype, shape...)
	if err == nil {
		s.taken.Add(1)
		s.held.Add(1)
	}
	return t, err
}

func (s *sharing) Free(t *tensor.Tensor) error {
	s.held.Add(-1)
	return s.ProcessGroup.Free(t)
}

// TestBucketsInSharedMemory: buckets lie in memory of Alloc where the program cannot keep them. They
// are freed when they are rebuilt and when nobody has the DDP. Without room, gradients are averaged
// all the same.
func TestBucketsInSharedMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		o     ddp.Options
		full  bool
		taken int64 // the first bucket, and two after the order is known
	}{
		{name: "default", o: ddp.Options{FirstBucket: 1, BucketCap: 1}, taken: 3},
		{name: "no room", o: ddp.Options{FirstBucket: 1, BucketCap: 1}, full: true},
		{name: "views", o: ddp.Options{GradientAsBucketView: true}},
		{name: "hook", o: ddp.Options{Hook: ddp.AllReduceHook}},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			var all sync.WaitGroup
			defer all.Wait()
			for rank := range 2 {
				all.Go(func() {
					p, err := pg.New(soon(t), st, rank, 2)
					if !assert.NoError(t, err) {
						return
					}
					defer p.Close()
					g := &sharing{ProcessGroup: p, full: c.full}
					assert.NoError(t, trainShared(soon(t), g, c.o))
					assert.Equal(t, c.taken, g.taken.Load())
					assert.Eventually(t, func() bool {
						runtime.GC()
						return g.held.Load() == 0
					}, 20*time.Second, time.Millisecond)
				})
			}
		})
	}
}

// trainShared averages gradients that are the rank plus 1, and the square of that, three times.
func trainShared(ctx context.Context, g *sharing, o ddp.Options) (err error) {
	defer must.Catch(&err)
	values := [][]float32{make([]float32, 40), make([]float32, 50000)}
	grads := [][]float32{make([]float32, 40), make([]float32, 50000)}
	ps := must.Get(ddp.Params(values, grads))
	if o.GradientAsBucketView {
		ps[0].Grad, ps[1].Grad = nil, nil
	}
	d := must.Get(ddp.New(ctx, g, ps, o))
	for range 3 {
		must.Do(d.Begin(ctx))
		x := float32(g.Rank() + 1)
		for i, v := range []float32{x, x * x} {
			if o.GradientAsBucketView {
				grads[i] = must.Get(tensor.Data[float32](d.GradView(i)))
			}
			for k := range grads[i] {
				grads[i][k] = v
			}
			must.Do(d.Ready(i))
		}
		must.Do(d.Finish(ctx))
		if grads[0][39] != 1.5 || grads[1][49999] != 2.5 {
			return fmt.Errorf("averages %v and %v, want 1.5 and 2.5", grads[0][39], grads[1][49999])
		}
	}
	if held := g.held.Load(); !g.full && o.Hook == nil && !o.GradientAsBucketView && held != 2 {
		return fmt.Errorf("%d buckets are held, want 2", held)
	}
	runtime.KeepAlive(d)
	return nil
}
