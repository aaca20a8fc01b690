package publish

import (
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// TestLock: one goroutine at a time has the lock, and sees what the others have written. The race detector looks on.
func TestLock(t *testing.T) {
	var l Lock
	n, inside := 0, 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 20000 {
				l.Lock()
				if inside++; inside != 1 {
					t.Error("two goroutines have the lock")
				}
				n++
				inside--
				l.Unlock()
			}
		})
	}
	all.Wait()
	require.Equal(t, 80000, n)
}

// TestStore: who loads a stored value sees what was written before.
func TestStore(t *testing.T) {
	const rounds = 20000
	var data [2][rounds]int
	var word uint32
	var pointer unsafe.Pointer
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := range rounds {
			data[0][i] = i + 1
			Store(&word, uint32(i+1))
			data[1][i] = i + 1
			StorePointer(&pointer, unsafe.Pointer(&data[1][i]))
		}
	})
	for n := uint32(0); n < rounds; {
		if n = atomic.LoadUint32(&word); n > 0 && data[0][n-1] != int(n) {
			t.Fatalf("value %d came before the data", n)
		}
		if p := (*int)(atomic.LoadPointer(&pointer)); p != nil && *p == 0 {
			t.Fatal("a pointer came before the data")
		}
	}
	writer.Wait()
}
