package pool

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// block is memory that notes whether it is closed.
type block struct {
	n      int
	closed bool
}

func (b *block) Len() int     { return b.n }
func (b *block) Close() error { b.closed = true; return nil }

// TestPool holds that a pool gives memory out again, and that put frees none. Get frees
// the surplus once no operation is under way.
func TestPool(t *testing.T) {
	var made []*block
	p := newPool(3*smallestPooled, func(_, n int) (*block, error) {
		b := &block{n: n}
		made = append(made, b)
		return b, nil
	})
	get := func(dev, n int) *block {
		b := must.Get(p.Get(dev, n))
		require.GreaterOrEqual(t, b.n, n)
		return b
	}
	closed := func() (n int) {
		for _, b := range made {
			if b.closed {
				n++
			}
		}
		return n
	}
	require.Zero(t, Underway.Load())
	Underway.Add(1)
	var out []*block
	for range 5 {
		out = append(out, get(0, 1))
	}
	other := get(1, smallestPooled+1)
	for _, b := range out {
		p.Put(0, b)
	}
	p.Put(1, other)
	require.Same(t, other, get(1, 2*smallestPooled))
	p.Put(1, other)
	require.Contains(t, out, get(0, 100))
	p.Put(0, out[4])
	require.Len(t, made, 6)
	require.Zero(t, closed(), "an operation is under way")
	Underway.Add(-1)
	b := get(0, 4*smallestPooled)
	require.Equal(t, 2, closed(), "five blocks, of which three are kept")
	require.False(t, other.closed, "of another device")
	p.Put(0, b)
	p.Put(0, get(0, 1))
	require.True(t, b.closed, "the largest")
	require.Equal(t, 3*smallestPooled, p.held[0])
	require.NoError(t, p.Close())
	require.Equal(t, len(made), closed())
	require.Empty(t, p.held[0]+p.held[1])
}

// TestNothingBeginsMeanwhile: an operation that begins waits until no memory is freed. Nothing is freed while one is under
// way. A device that frees memory waits for kernels, and they may wait for a rank whose
// operation cannot begin before.
func TestNothingBeginsMeanwhile(t *testing.T) {
	require.False(t, Alone(-1, func() { t.Error("operations are under way") }))
	begun := make(chan int64, 1)
	within := Alone(0, func() {
		go func() {
			Begin()
			begun <- Underway.Load()
		}()
		for Underway.Load() == 0 {
			runtime.Gosched()
		}
		select {
		case <-begun:
			t.Error("an operation has begun while memory is freed")
		case <-time.After(10 * time.Millisecond):
		}
	})
	require.True(t, within)
	require.EqualValues(t, 1, <-begun)
	require.False(t, Alone(0, func() { t.Error("an operation is under way") }))
	require.True(t, Alone(1, func() {}), "it is the caller's own")
	Underway.Add(-1)
}

// TestManyBegin holds the same of goroutines that begin and end operations, and of others that free memory.
func TestManyBegin(t *testing.T) {
	var underway atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range testsize.Of(200, 2000, 20000) {
				Begin()
				underway.Add(1)
				underway.Add(-1)
				Underway.Add(-1)
			}
		})
		all.Go(func() {
			for range testsize.Of(200, 2000, 20000) {
				Alone(0, func() {
					if n := underway.Load(); n != 0 {
						t.Errorf("%d operations are under way while memory is freed", n)
					}
				})
			}
		})
	}
	all.Wait()
	require.Zero(t, Underway.Load())
}

// TestSizes holds that memory for large operations is at most an eighth larger than what they use, and is found again.
func TestSizes(t *testing.T) {
	p := newPool(math.MaxInt, func(_, n int) (*block, error) { return &block{n: n}, nil })
	for n := 1; n < math.MaxInt>>2; n += n/7 + 1 {
		for _, n := range []int{n - 1, n, n + 1} {
			b := must.Get(p.Get(0, n))
			require.GreaterOrEqual(t, b.n, n)
			if n > roughly {
				require.LessOrEqual(t, b.n, n+n/8, "for %d bytes", n)
			}
			require.Zero(t, b.n%512)
			require.NoError(t, p.Put(0, b))
			require.Same(t, b, must.Get(p.Get(0, b.n)))
		}
	}
	require.Equal(t, 11<<20, must.Get(p.Get(0, 10<<20+1)).n)
	require.NoError(t, p.Close())
}
