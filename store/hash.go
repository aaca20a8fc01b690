package store

import (
	"bytes"
	"context"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

// Hash is a store in this process's memory, c10d's HashStore. Ranks that are goroutines share it.
// Each should use its own Clone, which has its own timeout and Close. Make one with NewHash.
//
// A waiter sleeps until one of its keys changes; it does not poll.
type Hash struct {
	handle
	*table
}

// table is the data behind a Hash and its clones.
type table struct {
	mu      sync.Mutex
	values  map[string][]byte
	queues  map[string][][]byte
	signals map[string]*signal
}

// signal is closed when its key changes. The table drops it when its last waiter leaves, so a key
// that is never set uses no memory.
type signal struct {
	changed chan struct{}
	waiters int
}

// NewHash returns an empty store.
func NewHash() *Hash {
	return newHash(&table{
		values:  make(map[string][]byte),
		queues:  make(map[string][][]byte),
		signals: make(map[string]*signal),
	})
}

// LocalAddr returns a loopback address, because all users are in this process.
func (h *Hash) LocalAddr() netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }

func newHash(t *table) *Hash {
	h := &Hash{table: t}
	h.init("hash")
	return h
}

// Clone returns a second handle on the same data with the same timeout.
func (h *Hash) Clone(ctx context.Context) (Store, error) {
	if err := h.begin(ctx); err != nil {
		return nil, h.fail("clone", err, time.Time{})
	}
	c := newHash(h.table)
	c.SetTimeout(h.Timeout())
	return c, nil
}

// Close ends the pending calls of this handle. The data live as long as any
// handle is in use.
func (h *Hash) Close() error {
	h.closing.Do(func() { close(h.closed) })
	return nil
}

// has reports whether name is an ordinary key or a queue with an element.
// The caller holds mu, as for every method of table.
func (t *table) has(name string) bool {
	_, ok := t.values[name]
	return ok || len(t.queues[name]) > 0
}

func (t *table) put(key string, value []byte) {
	t.values[key] = value
	t.wake(key)
}

func (t *table) wake(key string) {
	if s := t.signals[key]; s != nil {
		close(s.changed)
		delete(t.signals, key)
	}
}

// await gives up mu until ready reports true, looking again after every change
// of key.
func (h *Hash) await(ctx context.Context, key string, ready func() bool) error {
	for !ready() {
		s := h.signals[key]
		if s == nil {
			s = &signal{changed: make(chan struct{})}
			h.signals[key] = s
		}
		s.waiters++
		h.mu.Unlock()
		err := pause(ctx, &h.handle, s.changed)
		h.mu.Lock()
		s.waiters--
		if s.waiters == 0 && h.signals[key] == s {
			delete(h.signals, key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// do runs f under the lock.
func (h *Hash) do(ctx context.Context, op string, keys []string, f func() error) error {
	err := h.begin(ctx)
	if err == nil {
		h.mu.Lock()
		err = f()
		h.mu.Unlock()
	}
	if err != nil {
		return h.fail(op, err, time.Time{}, keys...)
	}
	return nil
}

// wait runs f under the lock with a context that the store's timeout bounds.
// keys are those that f waits for.
func (h *Hash) wait(ctx context.Context, op string, keys []string, f func(context.Context) error) error {
	start := time.Now()
	if err := h.begin(ctx); err != nil {
		return h.fail(op, err, start, keys...)
	}
	ctx, cancel := WithTimeout(ctx, h.Timeout())
	defer cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := f(ctx); err != nil {
		var missing []string
		for _, k := range keys {
			if !h.has(k) {
				missing = append(missing, k)
			}
		}
		return h.fail(op, err, start, missing...)
	}
	return nil
}

func (h *Hash) Set(ctx context.Context, key string, value []byte) error {
	return h.do(ctx, "set", []string{key}, func() error {
		h.put(key, bytes.Clone(value))
		return nil
	})
}

func (h *Hash) Get(ctx context.Context, key string) (value []byte, err error) {
	err = h.wait(ctx, "get", []string{key}, func(ctx context.Context) error {
		return h.await(ctx, key, func() bool {
			v, ok := h.values[key]
			value = append([]byte{}, v...)
			return ok
		})
	})
	if err != nil {
		return nil, err
	}
	return value, nil
}

func (h *Hash) Add(ctx context.Context, key string, delta int64) (sum int64, err error) {
	err = h.do(ctx, "add", []string{key}, func() error {
		if v, ok := h.values[key]; ok {
			var err error
			if sum, err = ParseNumber(v); err != nil {
				return err
			}
		}
		sum += delta
		h.put(key, strconv.AppendInt(nil, sum, 10))
		return nil
	})
	return sum, err
}

func (h *Hash) CompareSet(ctx context.Context, key string, expected, desired []byte) (after []byte, err error) {
	err = h.do(ctx, "compare set", []string{key}, func() error {
		var set bool
		held, ok := h.values[key]
		after, set = compareSet(held, ok, expected, desired)
		if set {
			h.put(key, bytes.Clone(after))
		}
		return nil
	})
	return after, err
}

// compareSet implements CompareSet. It returns the value after the call, in new memory, and
// whether the key changes.
func compareSet(held []byte, exists bool, expected, desired []byte) (after []byte, set bool) {
	switch {
	case exists && !bytes.Equal(held, expected):
		return append([]byte{}, held...), false
	case !exists && len(expected) > 0:
		return append([]byte{}, expected...), false
	}
	return append([]byte{}, desired...), true
}

func (h *Hash) Wait(ctx context.Context, keys ...string) error {
	return h.wait(ctx, "wait", keys, func(ctx context.Context) error {
		for _, k := range keys {
			if err := h.await(ctx, k, func() bool { return h.has(k) }); err != nil {
				return err
			}
		}
		return nil
	})
}

func (h *Hash) Check(ctx context.Context, keys ...string) (bool, error) {
	all := true
	err := h.do(ctx, "check", keys, func() error {
		for _, k := range keys {
			all = all && h.has(k)
		}
		return nil
	})
	return all && err == nil, err
}

func (h *Hash) Delete(ctx context.Context, key string) (deleted bool, err error) {
	err = h.do(ctx, "delete", []string{key}, func() error {
		_, deleted = h.values[key]
		delete(h.values, key)
		return nil
	})
	return deleted, err
}

func (h *Hash) NumKeys(ctx context.Context) (n int64, err error) {
	err = h.do(ctx, "number of keys", nil, func() error {
		n = int64(len(h.values))
		return nil
	})
	return n, err
}

func (h *Hash) Append(ctx context.Context, key string, value []byte) error {
	return h.do(ctx, "append", []string{key}, func() error {
		h.put(key, append(h.values[key], value...))
		return nil
	})
}

func (h *Hash) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	values := make([][]byte, len(keys))
	err := h.wait(ctx, "multi get", keys, func(ctx context.Context) error {
		for i, k := range keys {
			err := h.await(ctx, k, func() bool {
				v, ok := h.values[k]
				values[i] = append([]byte{}, v...)
				return ok
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return values, nil
}

func (h *Hash) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if err := checkMultiSet(keys, values); err != nil {
		return err
	}
	return h.do(ctx, "multi set", keys, func() error {
		for i, k := range keys {
			h.put(k, bytes.Clone(values[i]))
		}
		return nil
	})
}

func (h *Hash) QueuePush(ctx context.Context, key string, value []byte) error {
	return h.do(ctx, "queue push", []string{key}, func() error {
		h.queues[key] = append(h.queues[key], append([]byte{}, value...))
		h.wake(key)
		return nil
	})
}

func (h *Hash) QueuePop(ctx context.Context, key string, block bool) (value []byte, err error) {
	err = h.wait(ctx, "queue pop", []string{key}, func(ctx context.Context) error {
		if block {
			if err := h.await(ctx, key, func() bool { return len(h.queues[key]) > 0 }); err != nil {
				return err
			}
		}
		q := h.queues[key]
		if len(q) == 0 {
			return ErrQueueEmpty
		}
		value, q[0] = q[0], nil
		if h.queues[key] = q[1:]; len(q) == 1 {
			delete(h.queues, key)
		}
		return nil
	})
	return value, err
}

func (h *Hash) QueueLen(ctx context.Context, key string) (n int64, err error) {
	err = h.do(ctx, "queue length", []string{key}, func() error {
		n = int64(len(h.queues[key]))
		return nil
	})
	return n, err
}

func (h *Hash) ListKeys(ctx context.Context) (keys []string, err error) {
	err = h.do(ctx, "list keys", nil, func() error {
		for k := range h.values {
			keys = append(keys, k)
		}
		return nil
	})
	return keys, err
}
