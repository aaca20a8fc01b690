package libcuda

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
)

// TestBlockedCall has a call of CUDA's that does not return: a stream is full, or launches block. Who asks
// whether the stream works, and the first commands of other streams, do not wait for it.
func TestBlockedCall(t *testing.T) {
	x := newFixture(t, newFake(1))
	mem := x.alloc(x.v, 100)
	other, err := x.v.NewStream()
	require.NoError(t, err)
	var once atomic.Bool
	inside, release := make(chan struct{}), make(chan struct{})
	x.f.during = func(name string) {
		if name == "MemsetAsync" && once.CompareAndSwap(false, true) {
			close(inside)
			<-release
		}
	}
	ended := make(chan error)
	go func() { ended <- x.s.Memset(mem.Ptr(), 1, 100) }()
	<-inside
	soon := func(what string, f func() error) {
		done := make(chan error, 1)
		go func() { done <- f() }()
		select {
		case err := <-done:
			require.NoError(t, err, what)
		case <-time.After(20 * time.Second):
			close(release)
			t.Fatalf("%s waits for a call of another goroutine", what)
		}
	}
	soon("Err", x.s.Err)
	soon("the first Memset of another stream", func() error { return other.Memset(mem.Ptr(), 1, 100) })
	close(release)
	require.NoError(t, <-ended)
	x.end(mem, other)
}

// TestBorrowedHistory has a stream that is borrowed again and again. Only its first command of a kind is
// one for CUDA.
func TestBorrowedHistory(t *testing.T) {
	x := newFixture(t, newFake(1))
	mem := x.alloc(x.v, 100)
	for i := range 3 {
		s := must.Get(x.v.BorrowStream(77))
		firstCommands <- struct{}{} // somebody else's first command is under way
		start := time.Now()
		if i == 0 {
			<-firstCommands
		}
		require.NoError(t, s.Memset(mem.Ptr(), 1, 100))
		if i > 0 {
			require.Less(t, time.Since(start), firstWait)
			<-firstCommands
		}
		require.NoError(t, s.Close())
	}
	x.end(mem)
}

// TestForeignCapture captures a borrowed stream without this Driver, as other libraries do. The stream says
// so, and nothing is asked of it that would end the capture.
func TestForeignCapture(t *testing.T) {
	x := newFixture(t, newFake(1))
	s := must.Get(x.v.BorrowStream(77))
	require.False(t, driver.Capturing(s))
	require.False(t, driver.Capturing(x.s))
	require.Equal(t, 1, x.f.count("StreamCapturing"), "a stream of this Driver's own is not asked")
	x.f.mu.Lock()
	x.f.capturing[77] = true
	x.f.mu.Unlock()
	require.True(t, driver.Capturing(s))
	require.NoError(t, s.Err())
	require.Zero(t, x.f.count("StreamQuery"))
	e, err := s.Record()
	require.NoError(t, err)
	_, err = e.Done()
	refused(t, err, "Done", driver.ErrCapture)
	require.NoError(t, x.s.Wait(e), "the stream becomes part of the capture")
	x.f.mu.Lock()
	x.f.capturing[x.s.h] = true
	x.f.mu.Unlock()
	require.True(t, driver.Capturing(x.s))
	require.NoError(t, x.s.Err())
	require.Zero(t, x.f.count("StreamQuery"))
	refused(t, x.s.BeginCapture(), "BeginCapture", driver.ErrCapture)
	x.f.mu.Lock()
	clear(x.f.capturing)
	x.f.mu.Unlock()
	require.False(t, driver.Capturing(s))
	e.Release()
	x.end(s)
}

// TestReleaseTwice releases an event from two goroutines. Two records do not get one event.
func TestReleaseTwice(t *testing.T) {
	x := newFixture(t, newFake(1))
	for range 20_000 {
		e := must.Get(x.s.Record())
		var both sync.WaitGroup
		var here atomic.Int32
		for range 2 {
			both.Go(func() {
				for here.Add(1); here.Load() < 2; { // at the same time
				}
				e.Release()
			})
		}
		both.Wait()
		require.Len(t, x.v.events.idle, 1)
	}
	x.end()
}
