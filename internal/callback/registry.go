package callback

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Key names one value: a step of one collective of one group.
type Key struct {
	Group string
	Seq   uint64 // the collective's number in the group
	Step  uint32
}

func (k Key) String() string { return fmt.Sprintf("%q seq %d step %d", k.Group, k.Seq, k.Step) }

// Limits bound the values without a callback.
type Limits struct {
	Values int   // 0 means 65536
	Bytes  int64 // 0 means 256 MiB
}

// Callback gets the value of a key, which it then owns, or the error that ended the wait.
type Callback func(value []byte, err error)

// Value and callback errors, all with the key around them.
var (
	// ErrDuplicate: the key has, or had, a value or a callback.
	ErrDuplicate = errors.New("set twice")
	// ErrLate: the collective is over.
	ErrLate = errors.New("the collective is over")
	// ErrEnded: the registry or the group has ended without an error.
	ErrEnded = errors.New("ended")
	// ErrTooLarge: the value alone is larger than the limit.
	ErrTooLarge = errors.New("larger than the limit")
)

// Registry matches values with callbacks. Its methods may be called from many goroutines, and
// from callbacks. NewRegistry makes one.
type Registry struct {
	limits Limits

	mu     sync.Mutex
	match  Match[Key, []byte, Callback]
	met    map[collective]map[uint32]struct{} // steps that have had both
	over   map[string]*finished
	failed map[collective]error // why collectives are over that failed, the latest of them
	groups map[string]error     // those that have ended
	ended  error
	room   chan struct{} // closed when a SetValue that waits should look again
	parked int
}

type collective struct {
	group string
	seq   uint64
}

// finished has the collectives of a group that are over: all below low, and some above. It stays
// small in a group with many collectives.
type finished struct {
	low  uint64
	some map[uint64]struct{}
}

func (f *finished) has(seq uint64) bool {
	_, ok := f.some[seq]
	return ok || seq < f.low
}

func (f *finished) add(seq uint64) {
	if seq < f.low {
		return
	}
	f.some[seq] = struct{}{}
	for {
		if _, ok := f.some[f.low]; !ok {
			return
		}
		delete(f.some, f.low)
		f.low++
	}
}

// NewRegistry returns an empty registry.
func NewRegistry(l Limits) *Registry {
	if l.Values <= 0 {
		l.Values = 1 << 16
	}
	if l.Bytes <= 0 {
		l.Bytes = 256 << 20
	}
	r := &Registry{
		limits: l,
		met:    make(map[collective]map[uint32]struct{}),
		over:   make(map[string]*finished),
		failed: make(map[collective]error),
		groups: make(map[string]error),
		room:   make(chan struct{}),
	}
	r.match.Values, r.match.Bytes = l.Values, l.Bytes
	return r
}

// refuse returns an error if k cannot be set.
func (r *Registry) refuse(k Key) error {
	if r.ended != nil {
		return r.ended
	}
	if err := r.groups[k.Group]; err != nil {
		return err
	}
	if f := r.over[k.Group]; f != nil && f.has(k.Seq) {
		if err := r.failed[collective{k.Group, k.Seq}]; err != nil {
			return err
		}
		return ErrLate
	}
	if _, ok := r.met[collective{k.Group, k.Seq}][k.Step]; ok {
		return ErrDuplicate
	}
	return nil
}

func wrap(what string, k Key, err error) error {
	return fmt.Errorf("callback: %s of group %v: %w", what, k, err)
}

// SetValue passes value to the callback of k and returns after it. Without a callback it waits
// for room and stores value, which the registry then owns.
func (r *Registry) SetValue(ctx context.Context, k Key, value []byte) error {
	if int64(len(value)) > r.limits.Bytes {
		return wrap("value", k, fmt.Errorf("%d bytes, %w of %d", len(value), ErrTooLarge, r.limits.Bytes))
	}
	for {
		r.mu.Lock()
		err := r.refuse(k)
		if _, twice := r.match.Value(k); twice && err == nil {
			err = ErrDuplicate
		}
		if err != nil {
			r.mu.Unlock()
			return wrap("value", k, err)
		}
		run, ok, err := r.match.Put(k, value, int64(len(value)))
		if err == nil {
			if ok {
				r.meet(k)
			}
			r.mu.Unlock()
			if ok {
				run(value, nil)
			}
			return nil
		}
		room := r.room
		r.parked++
		r.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return wrap("value", k, fmt.Errorf("%w: %w", context.Cause(ctx), err))
		}
	}
}

// SetCallback makes f run with the value of k. If the value is there, SetCallback runs f and
// returns after it.
func (r *Registry) SetCallback(k Key, f Callback) error {
	r.mu.Lock()
	err := r.refuse(k)
	if _, twice := r.match.Taker(k); twice && err == nil {
		err = ErrDuplicate
	}
	if err != nil {
		r.mu.Unlock()
		return wrap("callback", k, err)
	}
	value, ok := r.match.Take(k, f)
	if ok {
		r.meet(k)
	}
	r.wake()
	r.mu.Unlock()
	if ok {
		f(value, nil)
	}
	return nil
}

// meet remembers that a key is done.
func (r *Registry) meet(k Key) {
	c := collective{k.Group, k.Seq}
	if r.met[c] == nil {
		r.met[c] = make(map[uint32]struct{})
	}
	r.met[c][k.Step] = struct{}{}
}

// wake wakes the goroutines that wait in SetValue.
func (r *Registry) wake() {
	if r.parked > 0 {
		r.parked = 0
		close(r.room)
		r.room = make(chan struct{})
	}
}

// keepFailed is for how many failed collectives a registry keeps the error. Of others it knows
// only that they are over.
const keepFailed = 4096

// EndCollective ends a collective. Its waiting callbacks get err, its values are dropped, and
// later ones are refused as late. End a successful collective too, with a nil err: otherwise the
// registry keeps its steps for ever.
func (r *Registry) EndCollective(group string, seq uint64, err error) {
	c := collective{group, seq}
	r.mu.Lock()
	f := r.over[group]
	if f == nil {
		f = &finished{some: make(map[uint64]struct{})}
		r.over[group] = f
	}
	if err == nil {
		err = ErrLate
	} else if !f.has(seq) {
		if len(r.failed) == keepFailed {
			clear(r.failed)
		}
		r.failed[c] = err
	}
	f.add(seq)
	delete(r.met, c)
	r.drop(err, func(k Key) bool { return k.Group == group && k.Seq == seq })
}

// Abandon ends the callbacks that wait under some keys, whose values will never come. Stored
// values stay.
func (r *Registry) Abandon(which func(Key) bool, err error) {
	r.mu.Lock()
	r.drop(err, func(k Key) bool {
		_, waits := r.match.Taker(k)
		return waits && which(k)
	})
}

// Forget resets a key that has had a value and a callback, so that it can be used again.
func (r *Registry) Forget(k Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := collective{k.Group, k.Seq}
	if delete(r.met[c], k.Step); len(r.met[c]) == 0 {
		delete(r.met, c)
	}
}

// EndGroup ends a group for good: its name is remembered, so that late messages
// are refused. The err is ErrEnded if nil.
func (r *Registry) EndGroup(group string, err error) {
	if err == nil {
		err = ErrEnded
	}
	r.mu.Lock()
	if r.groups[group] == nil {
		r.groups[group] = err
	}
	delete(r.over, group)
	for c := range r.met {
		if c.group == group {
			delete(r.met, c)
		}
	}
	for c := range r.failed {
		if c.group == group {
			delete(r.failed, c)
		}
	}
	r.drop(err, func(k Key) bool { return k.Group == group })
}

// End ends the registry: every waiting callback, and every later call, gets err, or ErrEnded if
// it is nil. Only the first End counts.
func (r *Registry) End(err error) {
	if err == nil {
		err = ErrEnded
	}
	r.mu.Lock()
	if r.ended == nil {
		r.ended = err
	}
	clear(r.met)
	clear(r.over)
	clear(r.failed)
	r.drop(err, nil)
}

// drop ends the callbacks under some keys. It is called with the lock and returns without it.
func (r *Registry) drop(err error, which func(Key) bool) {
	type waiter struct {
		key Key
		f   Callback
	}
	var waiters []waiter
	r.match.Drop(which, nil, func(k Key, f Callback) { waiters = append(waiters, waiter{k, f}) })
	r.wake()
	r.mu.Unlock()
	for _, w := range waiters {
		w.f(nil, wrap("callback", w.key, err))
	}
}

// Waiting returns how many values and callbacks wait, and the bytes of the values.
func (r *Registry) Waiting() (values int, bytes int64, callbacks int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.match.Waiting()
}
