// Package publish hands memory over to other goroutines with fewer locked instructions than sync/atomic and
// sync.Mutex. It is for a few words that every collective call writes.
//
// Go's atomic stores are sequentially consistent. On amd64 each one is an XCHG, which waits until all stores before
// it have left the CPU. After a rank has written data for its peers that takes 5 to 10 ns. Store and StorePointer are
// release stores: who loads the value with sync/atomic also sees all that was written before it. On amd64 they are
// plain MOVs, because its CPUs keep the order of stores, and the compiler moves nothing across the call. On other
// CPUs, and in builds for the race detector, they are the stores of sync/atomic.
//
// A release store does not wait. A later load of the same goroutine may be done before others see the stored value.
// Code that needs both in order must do a write of package sync/atomic between them, such as that of Lock.Lock.
package publish

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Lock is a mutual exclusion lock for sections of less than a microsecond. Lock is one atomic read-modify-write,
// and Unlock a release store. The zero value is unlocked.
type Lock struct {
	held uint32
	slow sync.Mutex // held by the one that tries again and again
}

// Lock locks l.
func (l *Lock) Lock() {
	if !atomic.CompareAndSwapUint32(&l.held, 0, 1) {
		l.wait()
	}
}

func (l *Lock) wait() {
	l.slow.Lock()
	defer l.slow.Unlock()
	for !atomic.CompareAndSwapUint32(&l.held, 0, 1) {
		runtime.Gosched()
	}
}

// Unlock unlocks l, which must be locked.
func (l *Lock) Unlock() { Store(&l.held, 0) }
