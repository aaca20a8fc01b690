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

// Limits bound the values that no callback waits for.
type Limits struct {
	Values int   // 0 means 65536
	Bytes  int64 // 0 means 256 MiB
}

// Callback takes the value of a key, which is its own from then on, or the error
// that ended it.
type Callback func(value []byte, err error)

// Value and callback errors, all with the key around them.
var (
	// ErrDuplicate: the key has a value or a callback already, or had.
	ErrDuplicate = errors.New("set twice")
	// ErrLate: the collective is over.
	ErrLate = errors.New("the collective is over")
	// ErrEnded: the registry or the group has ended, for no other reason.
	ErrEnded = errors.New("ended")
	// ErrTooLarge: the value alone is larger than the limit.
	ErrTooLarge = errors.New("larger than the limit")
)

// Registry joins values with callbacks. Its methods may be called from many
// goroutines, and from callbacks. NewRegistry makes one.
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

// finished is which collectives of a group are over: all below low, and some
// above. So it stays small though a group lives long.
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

// refuse returns why nothing can be set under k, nil if it can.
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

// SetValue hands value to the callback of k. Without one it stores value,
// which belongs to the registry from then on, and waits until there is room. It
// returns after the callback, if that runs here.
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

// SetCallback makes f run with the value of k, here if the value has come. It
// returns after f in that case.
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

// wake lets those look again who wait in SetValue.
func (r *Registry) wake() {
	if r.parked > 0 {
		r.parked = 0
		close(r.room)
		r.room = make(chan struct{})
	}
}

// keepFailed is for how many collectives a registry remembers why they failed;
// of the others it knows only that they are over.
const keepFailed = 4096

// EndCollective ends a collective: what waits for it ends with err, values are
// forgotten, and what still comes is late. A collective whose steps have all run
// has to be ended too, with a nil err, or the registry remembers them for ever.
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

// Abandon ends the callbacks that wait under some keys: nobody will send their
// values any more. Values that have come stay.
func (r *Registry) Abandon(which func(Key) bool, err error) {
	r.mu.Lock()
	r.drop(err, func(k Key) bool {
		_, waits := r.match.Taker(k)
		return waits && which(k)
	})
}

// Forget makes a key that has had both, value and callback, one that has had
// neither, for messages whose keys are used again.
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

// End ends everything: every callback that waits ends with err, ErrEnded if nil,
// and so does every later call. Only the first End counts.
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

// drop ends what waits under some keys. It is called with the lock and returns
// without it.
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
