package chain

import (
	"errors"
	"sync"
	"sync/atomic"
)

// Errors of a registry.
var (
	// ErrDuplicate: the key has, or had, an arrival or a callback.
	ErrDuplicate = errors.New("set twice")
	// ErrLate: the collective is over.
	ErrLate = errors.New("the collective is over")
)

// registry pairs arrivals with the callbacks that wait for them, by key, whichever comes first.
// Arrivals may come from any goroutine. A callback is what the owner does with its key. The second
// of the two makes the key due. The owner takes due keys with next, in their order, and runs them
// without the lock. So each runs exactly once, and no goroutine waits for a key.
//
// A registry works in rounds of one collective. In the steady state it allocates nothing.
type registry struct {
	mu     sync.Mutex
	round  uint64
	keys   []uint8 // what each key has had
	due    []int32 // a ring of n keys from head on
	head   int
	n      int
	posted int   // keys whose arrival is certain: with a message, or with its error
	err    error // why the round has failed
	asleep bool  // somebody waits for wake
	wake   chan struct{}
	some   atomic.Bool // next has a key, or the round has failed
}

// What a key has had.
const (
	arrived uint8 = 1 << iota
	registered
	expected // counts in posted

	met = arrived | registered
)

func (r *registry) init() { r.wake = make(chan struct{}, 1) }

// begin begins a round with keys from 0 to keys-1 and returns its number.
func (r *registry) begin(keys int) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cap(r.keys) < keys {
		r.keys, r.due = make([]uint8, keys), make([]int32, keys)
	}
	r.keys, r.due = r.keys[:keys], r.due[:keys]
	r.clear()
	return r.round
}

// end ends the round. Later arrivals are late.
func (r *registry) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clear()
}

func (r *registry) clear() {
	clear(r.keys)
	r.round++
	r.head, r.n, r.posted, r.err = 0, 0, 0, nil
	r.some.Store(false)
}

// expect says that a message of key is about to be posted. An earlier use of the key is
// forgotten. With callback it registers the callback too.
func (r *registry) expect(key int, callback bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.posted++
	r.keys[key] = expected
	if callback {
		r.keys[key] |= registered
	}
}

// register makes key due once it has arrived.
func (r *registry) register(key int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.set(key, registered)
}

// arrive notes the arrival of key in a round. Any goroutine may call it.
func (r *registry) arrive(round uint64, key int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if round != r.round {
		return ErrLate
	}
	return r.set(key, arrived)
}

func (r *registry) set(key int, what uint8) error {
	has := r.keys[key]
	if has&what != 0 {
		return ErrDuplicate
	}
	if what == arrived && has&expected != 0 {
		has &^= expected
		r.posted--
	}
	has |= what
	r.keys[key] = has
	if has&met == met && r.err == nil {
		at := r.head + r.n
		if at >= len(r.due) {
			at -= len(r.due)
		}
		r.due[at] = int32(key)
		r.n++
	}
	r.tell()
	return nil
}

// lose notes that the message of key does not come. The round fails with err.
func (r *registry) lose(key int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys[key] &^= expected
	r.posted--
	if r.err == nil {
		r.err = err
	}
	r.tell()
}

// fail ends a round with err. Only the first error counts.
func (r *registry) fail(round uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil && round == r.round {
		r.err = err
	}
	r.tell()
}

// tell wakes whoever waits, if there is something to do.
func (r *registry) tell() {
	some := r.n > 0 || r.err != nil
	r.some.Store(some)
	if some && r.asleep {
		r.asleep = false
		r.wake <- struct{}{}
	}
}

// next returns a key that is due. A round that has failed has none.
func (r *registry) next() (key int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == 0 || r.err != nil {
		return 0, false
	}
	key = int(r.due[r.head])
	if r.head++; r.head == len(r.due) {
		r.head = 0
	}
	r.n--
	r.some.Store(r.n > 0)
	return key, true
}

// failed returns why the round has failed, nil if it has not. over reports whether all posted
// messages have ended.
func (r *registry) failed() (err error, over bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err, r.posted == 0
}

// awaits reports whether a message of key is posted and has not ended.
func (r *registry) awaits(key int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keys[key]&expected != 0
}

// awake returns a channel that delivers once when there is something to do.
func (r *registry) awake() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.wake: // of an earlier wait
	default:
	}
	r.asleep = r.n == 0 && (r.err == nil || r.posted > 0)
	if !r.asleep {
		r.wake <- struct{}{}
	}
	return r.wake
}

// waiting returns how many keys have had an arrival or a callback alone.
func (r *registry) waiting() (arrivals, callbacks int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, has := range r.keys {
		switch has & met {
		case arrived:
			arrivals++
		case registered:
			callbacks++
		}
	}
	return arrivals, callbacks
}
