package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// WithTimeout returns ctx limited to d, a timeout as for SetTimeout, unless ctx has a deadline.
// Stores bound their waits with it. WaitErr returns why it ended.
func WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok || d < 0 {
		return context.WithCancel(ctx)
	}
	if d == 0 {
		d = DefaultTimeout
	}
	return context.WithTimeoutCause(ctx, d, ErrTimeout)
}

// WaitErr returns why a context of WithTimeout ended: ErrTimeout for the
// store's limit, else what ctx.Err says. Stores outside this package need it for their errors.
func WaitErr(ctx context.Context) error {
	if context.Cause(ctx) == ErrTimeout {
		return ErrTimeout
	}
	return ctx.Err()
}

// AppendByCompareSet is Append made of CompareSet, for stores without Append. It rewrites the
// whole value, so use it rarely. If two callers append equal bytes at the same moment, one append
// may be lost, as in c10d: the result of CompareSet does not show which of them set the value.
func AppendByCompareSet(ctx context.Context, s Store, key string, value []byte) error {
	// To swap a value for itself is a way to read it without waiting for the
	// key. What comes back for a missing key is the probe.
	probe := []byte("\x00c10d append")
	expected, err := s.CompareSet(ctx, key, probe, probe)
	if err != nil {
		return err
	}
	if bytes.Equal(expected, probe) {
		expected = nil
	}
	for {
		desired := append(bytes.Clone(expected), value...)
		held, err := s.CompareSet(ctx, key, expected, desired)
		if err != nil {
			return err
		}
		if bytes.Equal(held, desired) {
			return nil
		}
		if bytes.Equal(held, expected) {
			held = nil // deleted meanwhile
		}
		expected = held
	}
}

// MultiGetByGet is MultiGet made of Wait and Get.
func MultiGetByGet(ctx context.Context, s Store, keys []string) ([][]byte, error) {
	if err := s.Wait(ctx, keys...); err != nil {
		return nil, err
	}
	values := make([][]byte, len(keys))
	for i, key := range keys {
		v, err := s.Get(ctx, key)
		if err != nil {
			return nil, err
		}
		values[i] = v
	}
	return values, nil
}

// MultiSetBySet is MultiSet made of Set. It returns an error unless there are as many values as keys.
func MultiSetBySet(ctx context.Context, s Store, keys []string, values [][]byte) error {
	if err := checkMultiSet(keys, values); err != nil {
		return err
	}
	for i, key := range keys {
		if err := s.Set(ctx, key, values[i]); err != nil {
			return err
		}
	}
	return nil
}

// checkMultiSet returns an error unless there are as many values as keys.
func checkMultiSet(keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("store: multi set: %d keys but %d values", len(keys), len(values))
	}
	return nil
}

// ParseNumber parses the value that Add works on as c10d does, like C's strtoll in base 10.
// Blanks and a sign may come first, and parsing stops at the first byte that is not a digit. Its
// error is ErrNotNumber.
func ParseNumber(value []byte) (int64, error) {
	i := 0
	for i < len(value) && (value[i] == ' ' || '\t' <= value[i] && value[i] <= '\r') {
		i++
	}
	start := i
	if i < len(value) && (value[i] == '+' || value[i] == '-') {
		i++
	}
	for i < len(value) && '0' <= value[i] && value[i] <= '9' {
		i++
	}
	n, err := strconv.ParseInt(string(value[start:i]), 10, 64)
	if err != nil {
		return 0, ErrNotNumber
	}
	return n, nil
}

// Barrier returns once worldSize callers have called it with the same key. It is c10d's portable
// form: the callers count themselves in key/num_members, the last one sets key/last_member, and
// all wait for that. Use a key once. A caller that gave up stays counted.
func Barrier(ctx context.Context, s Store, key string, worldSize int) error {
	if worldSize < 1 {
		return fmt.Errorf("store: barrier %q: world size %d is below 1", key, worldSize)
	}
	n, err := s.Add(ctx, key+"/num_members", 1)
	if err != nil {
		return err
	}
	last := key + "/last_member"
	if n == int64(worldSize) {
		if err := s.Set(ctx, last, []byte("1")); err != nil {
			return err
		}
	}
	err = s.Wait(ctx, last)
	if errors.Is(err, ErrTimeout) {
		return fmt.Errorf("store: barrier %q of %d, where this was caller %d: %w", key, worldSize, n, err)
	}
	return err
}
