package pg

import (
	"context"
	"net/netip"
	"sync/atomic"

	"github.com/c10d-go/c10d/store"
)

// CountedStore counts the calls of a store in N.
type CountedStore struct {
	store.Store
	N *atomic.Int64
}

func (c CountedStore) called() store.Store {
	c.N.Add(1)
	return c.Store
}

func (c CountedStore) Set(ctx context.Context, key string, value []byte) error {
	return c.called().Set(ctx, key, value)
}

func (c CountedStore) Get(ctx context.Context, key string) ([]byte, error) {
	return c.called().Get(ctx, key)
}

func (c CountedStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return c.called().Add(ctx, key, delta)
}

func (c CountedStore) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	return c.called().CompareSet(ctx, key, expected, desired)
}

func (c CountedStore) Wait(ctx context.Context, keys ...string) error {
	return c.called().Wait(ctx, keys...)
}

func (c CountedStore) Check(ctx context.Context, keys ...string) (bool, error) {
	return c.called().Check(ctx, keys...)
}

func (c CountedStore) Delete(ctx context.Context, key string) (bool, error) {
	return c.called().Delete(ctx, key)
}

func (c CountedStore) Append(ctx context.Context, key string, value []byte) error {
	return c.called().Append(ctx, key, value)
}

func (c CountedStore) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return c.called().MultiGet(ctx, keys)
}

func (c CountedStore) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return c.called().MultiSet(ctx, keys, values)
}

func (c CountedStore) Unwrap() store.Store   { return c.Store }
func (c CountedStore) LocalAddr() netip.Addr { return store.LocalAddrOf(c.Store) }
