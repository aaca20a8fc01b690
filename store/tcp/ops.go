package tcp

import (
	"bufio"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/c10d-go/c10d/store"
)

// wireKey is how c10d's clients send a user's key. Only the counter of workers
// is sent without the slash.
func wireKey(key string) string { return "/" + key }

func wireKeys(keys []string) []string {
	wire := make([]string, len(keys))
	for i, k := range keys {
		wire[i] = wireKey(k)
	}
	return wire
}

func one(key string) []string { return []string{key} }

// The readers that calls use, for what they read into.

func intInto(n *int64) func(*bufio.Reader) error {
	return func(r *bufio.Reader) (err error) { *n, err = readInt64(r); return err }
}

func blobInto(b *[]byte) func(*bufio.Reader) error {
	return func(r *bufio.Reader) (err error) { *b, err = readBlob(r); return err }
}

func flagInto(b *byte) func(*bufio.Reader) error {
	return func(r *bufio.Reader) (err error) { *b, err = readFlag(r); return err }
}

// keyed is a request for one key.
func keyed(q query, key string, vals ...[]byte) *request {
	return &request{query: q, keys: one(wireKey(key)), vals: vals}
}

// Set overwrites the value of key. When it returns nil every client sees it:
// SET has no reply in the protocol, so a PING goes with it.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	return s.call(ctx, "set", one(key), keyed(qSet, key, value), nil)
}

// Get waits until key exists and returns its value. If it is deleted at that
// moment the value may come back empty, or from PyTorch's older server as
// ErrDisconnected.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	return s.get(ctx, "get", one(key), wireKey(key))
}

func (s *Store) get(ctx context.Context, op string, keys []string, wire string) (value []byte, err error) {
	err = s.waiting(ctx, op, time.Now(), keys, one(wire), func(ctx context.Context, c *conn) error {
		return exchange(ctx, c, &request{query: qGet, keys: one(wire)}, blobInto(&value))
	})
	return value, err
}

// Add adds delta to the number in key and returns the sum.
func (s *Store) Add(ctx context.Context, key string, delta int64) (sum int64, err error) {
	req := keyed(qAdd, key)
	req.num = delta
	err = s.call(ctx, "add", one(key), req, intInto(&sum))
	var e *store.Error
	if errors.Is(err, ErrDisconnected) && errors.As(err, &e) && s.noNumber(ctx, key) {
		e.Err = store.ErrNotNumber
	}
	return sum, err
}

// noNumber reports whether key holds what Add cannot work on. Servers close
// the connection then, without saying why.
func (s *Store) noNumber(ctx context.Context, key string) bool {
	if there, err := s.Check(ctx, key); err != nil || !there {
		return false
	}
	var value []byte
	if err := s.call(ctx, "add", one(key), keyed(qGet, key), blobInto(&value)); err != nil {
		return false
	}
	_, err := store.ParseNumber(value)
	return err != nil
}

// CompareSet sets key to desired if it holds expected, or if it is missing and
// expected is empty, and returns what it holds afterwards.
func (s *Store) CompareSet(ctx context.Context, key string, expected, desired []byte) (held []byte, err error) {
	err = s.call(ctx, "compare set", one(key), keyed(qCompareSet, key, expected, desired), blobInto(&held))
	return held, err
}

// Wait returns once every key exists. When it ends with an error for lack of
// time, that names the missing keys, if they are at most 256 and the server is
// no old one; else all.
func (s *Store) Wait(ctx context.Context, keys ...string) error {
	return s.waiting(ctx, "wait", time.Now(), keys, wireKeys(keys), nil)
}

// Check reports whether every key exists now.
func (s *Store) Check(ctx context.Context, keys ...string) (bool, error) {
	var answer byte
	err := s.call(ctx, "check", keys, &request{query: qCheck, keys: wireKeys(keys)}, flagInto(&answer))
	return err == nil && answer == ready, err
}

// Delete removes key and reports whether it was there.
func (s *Store) Delete(ctx context.Context, key string) (bool, error) {
	var n int64
	err := s.call(ctx, "delete", one(key), keyed(qDelete, key), intInto(&n))
	return n > 0, err
}

// NumKeys returns the number of keys, the counter of workers included.
func (s *Store) NumKeys(ctx context.Context) (n int64, err error) {
	err = s.call(ctx, "num keys", nil, &request{query: qNumKeys}, intInto(&n))
	return n, err
}

// Append adds value to the end of what key holds. An old server has no such
// operation; for it the value is rewritten as store.AppendByCompareSet does, and
// those who wait for the key are not told if the server is PyTorch's.
func (s *Store) Append(ctx context.Context, key string, value []byte) error {
	if s.Dialect() == store.DialectV1 {
		return store.AppendByCompareSet(ctx, s, key, value)
	}
	return s.call(ctx, "append", one(key), keyed(qAppend, key, value), nil)
}

// MultiGet waits until every key exists and returns their values in order.
func (s *Store) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	if len(keys) == 0 && !s.isClosed() {
		return nil, nil
	}
	wire := wireKeys(keys)
	var values [][]byte
	err := s.waiting(ctx, "multi get", time.Now(), keys, wire, func(ctx context.Context, c *conn) error {
		if c.dialect == store.DialectV2 {
			return exchange(ctx, c, &request{query: qMultiGet, keys: wire}, func(r *bufio.Reader) (err error) {
				values, err = readBlobs(r, int64(len(wire)))
				return err
			})
		}
		values = make([][]byte, len(wire))
		for i := range wire {
			if err := exchange(ctx, c, &request{query: qGet, keys: wire[i : i+1]}, blobInto(&values[i])); err != nil {
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

// MultiSet sets keys[i] to values[i], in order.
func (s *Store) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if s.Dialect() == store.DialectV1 {
		return store.MultiSetBySet(ctx, s, keys, values)
	}
	if err := store.CheckMultiSet(keys, values); err != nil {
		return err
	}
	return s.call(ctx, "multi set", keys, &request{query: qMultiSet, keys: wireKeys(keys), vals: values}, nil)
}

// QueuePush adds value at the end of the queue named key.
func (s *Store) QueuePush(ctx context.Context, key string, value []byte) error {
	return s.call(ctx, "queue push", one(key), keyed(qQueuePush, key, value), nil)
}

// raced is how long a blocked pop waits after it was told of an element and
// found none, the second time in a row: an ordinary key of the queue's name
// makes every wait succeed, and then the pop has to poll.
const raced = 10 * time.Millisecond

// QueuePop takes the first element of the queue named key.
func (s *Store) QueuePop(ctx context.Context, key string, block bool) ([]byte, error) {
	start := time.Now()
	pop := keyed(qQueuePop, key)
	var value []byte
	var n int64
	read := func(r *bufio.Reader) (err error) {
		if n, err = readInt64(r); err == nil && n > 0 {
			value, err = readBlob(r)
		}
		return err
	}
	if !block {
		err := s.call(ctx, "queue pop", one(key), pop, read)
		if err == nil && n == 0 {
			err = s.fail(ctx, "queue pop", one(key), start, store.ErrQueueEmpty)
		}
		return value, err
	}

	ctx, cancel, err := s.begin(ctx, pop)
	defer cancel()
	if err != nil {
		return nil, s.fail(ctx, "queue pop", one(key), start, err)
	}
	for try := 0; ; try++ {
		err := s.waiting(ctx, "queue pop", start, one(key), pop.keys, func(ctx context.Context, c *conn) error {
			return exchange(ctx, c, pop, read)
		})
		if err != nil || n > 0 {
			return value, err
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

// QueueLen returns the number of elements in the queue named key.
func (s *Store) QueueLen(ctx context.Context, key string) (n int64, err error) {
	err = s.call(ctx, "queue len", one(key), keyed(qQueueLen, key), intInto(&n))
	return n, err
}

// ListKeys returns the keys that users set, in no particular order.
func (s *Store) ListKeys(ctx context.Context) ([]string, error) {
	var keys []string
	err := s.call(ctx, "list keys", nil, &request{query: qListKeys}, func(r *bufio.Reader) error {
		n, err := readInt64(r)
		if err != nil {
			return err
		}
		all, err := readBlobs(r, n)
		for _, k := range all {
			if key, ok := strings.CutPrefix(string(k), "/"); ok {
				keys = append(keys, key)
			}
		}
		return err
	})
	return keys, err
}
