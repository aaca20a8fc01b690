package callback

import (
	"errors"
	"sync"
	"sync/atomic"
)

// Errors of a Registry.
var (
	// ErrDuplicate: the key has arrived before.
	ErrDuplicate = errors.New("said twice")
	// ErrLate: the registry is closed.
	ErrLate = errors.New("the operation has ended")
)

// Registry pairs the arrivals of keys with the callbacks that wait for them, whichever comes first.
// Any goroutine calls Arrive. One goroutine, the owner, calls Expect and runs the callbacks: at once
// if Expect returns true, else when Next returns the key's value. So each callback runs once and
// without locks, and the owner need not wait for one key alone.
//
// A Registry allocates nothing. NewRegistry makes one.
type Registry[T any] struct {
	some        atomic.Bool // first is not nil
	mu          sync.Mutex
	first, last *Key[T] // due, in the order of their arrivals
	posted      int
	idle        sync.Cond // posted is 0
	wake        chan struct{}
	asleep      bool // somebody waits for wake
	closed      bool
}

// Key is where an arrival and a callback meet. Its Value may be set until it is expected. The zero
// Key has neither arrived nor is it expected.
type Key[T any] struct {
	Value T
	has   uint8
	next  *Key[T]
}

// What a key has had.
const (
	arrived uint8 = 1 << iota
	expected
	posted // counts in Registry.posted until it arrives
)

// NewRegistry returns a registry.
func NewRegistry[T any]() *Registry[T] {
	r := &Registry[T]{wake: make(chan struct{}, 1)}
	r.idle.L = &r.mu
	return r
}

// Post says that k is sure to arrive. An earlier use of k is forgotten.
func (r *Registry[T]) Post(k *Key[T]) {
	r.mu.Lock()
	k.has = posted
	r.posted++
	r.mu.Unlock()
}

// Arrive notes that k has arrived.
func (r *Registry[T]) Arrive(k *Key[T]) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case k.has&arrived != 0:
		return ErrDuplicate
	case k.has&posted != 0:
		if r.posted--; r.posted == 0 {
			r.idle.Broadcast()
		}
	case r.closed:
		return ErrLate
	}
	if k.has |= arrived; k.has&expected == 0 {
		return nil
	}
	if k.next = nil; r.first == nil {
		r.first = k
	} else {
		r.last.next = k
	}
	r.last = k
	r.some.Store(true)
	if r.asleep {
		r.asleep = false
		r.wake <- struct{}{}
	}
	return nil
}

// Expect reports whether k has arrived. If not, Next returns its value when it has.
func (r *Registry[T]) Expect(k *Key[T]) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	k.has |= expected
	return k.has&arrived != 0
}

// Next returns the value of the next key that was expected and has arrived since, if there is one.
func (r *Registry[T]) Next() (v T, ok bool) {
	if !r.some.Load() {
		return v, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	v = r.first.Value
	if r.first = r.first.next; r.first == nil {
		r.some.Store(false)
	}
	return v, true
}

// Due reports whether Next has a value. It takes no lock.
func (r *Registry[T]) Due() bool { return r.some.Load() }

// Posted returns how many keys are sure to arrive and have not yet.
func (r *Registry[T]) Posted() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.posted
}

// Awake returns a channel that delivers once when Next has a value. Only the owner waits for it.
func (r *Registry[T]) Awake() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.wake: // of an earlier wait
	default:
	}
	if r.asleep = r.first == nil; !r.asleep {
		r.wake <- struct{}{}
	}
	return r.wake
}

// Settle waits until all posted keys have arrived, and drops what is due.
func (r *Registry[T]) Settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.posted > 0 {
		r.idle.Wait()
	}
	r.first, r.last = nil, nil
	r.some.Store(false)
}

// Close refuses later arrivals with ErrLate, but for keys that have been posted.
func (r *Registry[T]) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
}
