package tcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/c10d-go/c10d/store"
)

// wireKey is how c10d's clients send a user's key. Only the counter of workers
// is sent without the slash.
func wireKey(key string) string { return "/" + key }

func wireKeys(keys []string) []string {
	size := len(keys)
	for _, k := range keys {
		size += len(k)
	}
	var all strings.Builder
	all.Grow(size)
	for _, k := range keys {
		all.WriteByte('/')
		all.WriteString(k)
	}
	wire, rest := make([]string, len(keys)), all.String()
	for i, k := range keys {
		wire[i], rest = rest[:1+len(k)], rest[1+len(k):]
	}
	return wire
}

func one(key string) []string { return []string{key} }

// keyed is a request for one key.
func keyed(q query, key string, vals ...[]byte) *request {
	return &request{query: q, keys: one(wireKey(key)), vals: vals}
}

// Set overwrites the value of key. When it returns nil every client sees the value: if SET has no
// reply, the client sends another request after it.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, "set", keyed(qSet, key, value))
	return err
}

// Get waits until key exists and returns its value. If it is deleted at that
// moment the value may come back empty from a PyTorch server, or as ErrDisconnected.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	return s.get(ctx, "get", wireKey(key))
}

func (s *Store) get(ctx context.Context, op, wire string) (value []byte, err error) {
	if s.mux.Load() != nil {
		rep, err := s.ask(ctx, op, &request{query: qGet, keys: one(wire)})
		return rep.value, err
	}
	var rep reply
	err = s.waiting(ctx, op, time.Now(), one(wire), func(ctx context.Context, c *conn) error {
		req := &request{query: qGet, keys: one(wire)}
		return exchange(ctx, c, req, replyInto(&rep, req))
	})
	return rep.value, err
}

// Add adds delta to the number in key and returns the sum.
func (s *Store) Add(ctx context.Context, key string, delta int64) (int64, error) {
	req := keyed(qAdd, key)
	req.num = delta
	rep, err := s.call(ctx, "add", req)
	var e *store.Error
	if errors.Is(err, ErrDisconnected) && s.mux.Load() == nil && errors.As(err, &e) && s.noNumber(ctx, key) {
		e.Err = store.ErrNotNumber
	}
	return rep.num, err
}

// noNumber reports whether key holds a value that Add cannot work on. Servers then close the
// connection without a reason.
func (s *Store) noNumber(ctx context.Context, key string) bool {
	if there, err := s.Check(ctx, key); err != nil || !there {
		return false
	}
	rep, err := s.call(ctx, "add", keyed(qGet, key))
	if err != nil {
		return false
	}
	_, err = store.ParseNumber(rep.value)
	return err != nil
}

// CompareSet sets key to desired if it holds expected, or if it is missing and
// expected is empty, and returns what it holds afterwards.
func (s *Store) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	rep, err := s.call(ctx, "compare set", keyed(qCompareSet, key, expected, desired))
	return rep.value, err
}

// Wait returns once every key exists. A timeout's error names the missing keys. With a PyTorch
// server it names all keys if they are more than 256 or the server cannot cancel a wait.
func (s *Store) Wait(ctx context.Context, keys ...string) error {
	wire := wireKeys(keys)
	if s.mux.Load() != nil {
		_, err := s.ask(ctx, "wait", &request{query: qWait, keys: wire})
		return err
	}
	return s.waiting(ctx, "wait", time.Now(), wire, nil)
}

// Check reports whether every key exists now.
func (s *Store) Check(ctx context.Context, keys ...string) (bool, error) {
	rep, err := s.call(ctx, "check", &request{query: qCheck, keys: wireKeys(keys)})
	return err == nil && rep.num == ready, err
}

// Delete removes key and reports whether it was there.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	rep, err := s.call(ctx, "delete", keyed(qDelete, key))
	return rep.num > 0, err
}

// NumKeys returns the number of keys. The counter of workers and what Options.Rank has
// written are among them.
func (s *Store) NumKeys(ctx context.Context) (int64, error) {
	rep, err := s.call(ctx, "num keys", &request{query: qNumKeys})
	return rep.num, err
}

// Append adds value to the end of what key holds. If the server has no such operation, it is
// store.AppendByCompareSet, which does not wake waiters on a PyTorch server.
func (s *Store) Append(ctx context.Context, key string, value []byte) error {
	if s.dialer.dialect.number(qAppend) < 0 {
		return store.AppendByCompareSet(ctx, s, key, value)
	}
	_, err := s.call(ctx, "append", keyed(qAppend, key, value))
	return err
}

// MultiGet waits until every key exists and returns their values in order. With a server of this
// package it takes one round trip, with one of PyTorch two. If the server has no such operation, it is
// store.MultiGetByGet.
func (s *Store) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	if len(keys) == 0 && !s.isClosed() {
		return nil, nil
	}
	if s.dialer.dialect.number(qMultiGet) < 0 {
		return store.MultiGetByGet(ctx, s, keys)
	}
	wire := wireKeys(keys)
	if s.mux.Load() != nil {
		rep, err := s.ask(ctx, "multi get", &request{query: qMultiGet, keys: wire})
		return rep.values, err
	}
	req := &request{query: qMultiGet, keys: wire}
	var rep reply
	err := s.waiting(ctx, "multi get", time.Now(), wire, func(ctx context.Context, c *conn) error {
		return exchange(ctx, c, req, replyInto(&rep, req))
	})
	return rep.values, err
}

// MultiSet sets keys[i] to values[i], in order.
func (s *Store) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if s.dialer.dialect.number(qMultiSet) < 0 || len(keys) != len(values) { // which MultiSetBySet refuses
		return store.MultiSetBySet(ctx, s, keys, values)
	}
	_, err := s.call(ctx, "multi set", &request{query: qMultiSet, keys: wireKeys(keys), vals: values})
	return err
}

// QueuePush adds value at the end of the queue named key.
func (s *Store) QueuePush(ctx context.Context, key string, value []byte) error {
	_, err := s.call(ctx, "queue push", keyed(qQueuePush, key, value))
	return err
}

// raced is the pause of a blocked pop that has found no element twice after a successful wait. An
// ordinary key with the queue's name makes every wait succeed, so the pop must poll.
const raced = 10 * time.Millisecond

// QueuePop takes the first element of the queue named key.
func (s *Store) QueuePop(ctx context.Context, key string, block bool) ([]byte, error) {
	start := time.Now()
	pop := keyed(qQueuePop, key)
	if !block {
		rep, err := s.call(ctx, "queue pop", pop)
		if err == nil && rep.num == 0 {
			err = s.fail(ctx, "queue pop", one(key), start, store.ErrQueueEmpty)
		}
		return rep.value, err
	}
	if s.mux.Load() != nil {
		rep, err := s.ask(ctx, "queue pop", keyed(qQueueTake, key))
		return rep.value, err
	}

	ctx, cancel, err := s.begin(ctx, pop)
	defer cancel()
	if err != nil {
		return nil, s.fail(ctx, "queue pop", one(key), start, err)
	}
	for try := 0; ; try++ {
		var rep reply
		err := s.waiting(ctx, "queue pop", start, pop.keys, func(ctx context.Context, c *conn) error {
			return exchange(ctx, c, pop, replyInto(&rep, pop))
		})
		if err != nil || rep.num > 0 {
			return rep.value, err
		}
		if try > 0 {
			select {
			case <-time.After(raced):
			case <-ctx.Done():
			case <-s.ctx.Done():
			}
		}
	}
}

// SetWill makes the server carry out a CompareSet when this store's connection ends, see
// store.Willer. Close and the end of the process do that, and so does a stopped network that TCP
// keep-alive finds. It needs a server of this package. A connection has at most 64 wills, each with
// at most 4 KiB of key and values.
func (s *Store) SetWill(ctx context.Context, key string, expected, desired []byte) error {
	if s.mux.Load() == nil {
		return s.fail(ctx, "set will", one(key), time.Time{}, fmt.Errorf("a server of PyTorch's has none: %w", errors.ErrUnsupported))
	}
	_, err := s.call(ctx, "set will", keyed(qSetWill, key, expected, desired))
	return err
}

// DropWill withdraws the will for key.
func (s *Store) DropWill(ctx context.Context, key string) error {
	if s.mux.Load() == nil {
		return nil
	}
	_, err := s.call(ctx, "drop will", keyed(qDropWill, key))
	return err
}

// QueueLen returns the number of elements in the queue named key.
func (s *Store) QueueLen(ctx context.Context, key string) (int64, error) {
	rep, err := s.call(ctx, "queue len", keyed(qQueueLen, key))
	return rep.num, err
}

// ListKeys returns the keys that users set, in no particular order.
func (s *Store) ListKeys(ctx context.Context) ([]string, error) {
	rep, err := s.call(ctx, "list keys", &request{query: qListKeys})
	var keys []string
	for _, k := range rep.values {
		if key, ok := strings.CutPrefix(string(k), "/"); ok {
			keys = append(keys, key)
		}
	}
	return keys, err
}
