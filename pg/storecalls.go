package pg

import (
	"context"
	"net/netip"
	"time"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/trace"
)

// heard returns st, whose calls are told to the recorder's observers that want them. Without any it
// returns st itself.
func heard(st store.Store, r *trace.Recorder) store.Store {
	observers := r.StoreObservers()
	if len(observers) == 0 {
		return st
	}
	return heardBy(st, observers)
}

func heardBy(st store.Store, observers []trace.StoreObserver) store.Store {
	h := &heardStore{Store: st, observers: observers}
	if c, ok := st.(store.Cloner); ok {
		return &clonableHeard{h, c}
	}
	return h
}

// heardStore tells observers of the calls of a store.
type heardStore struct {
	store.Store
	observers []trace.StoreObserver
}

// clonableHeard is a heardStore whose store is a store.Cloner.
type clonableHeard struct {
	*heardStore
	cloner store.Cloner
}

func (h *clonableHeard) Clone(ctx context.Context) (store.Store, error) {
	inner, err := h.cloner.Clone(ctx)
	if err != nil {
		return nil, err
	}
	return heardBy(inner, h.observers), nil
}

// heardCall makes a call and tells the observers of it.
func heardCall[T any](h *heardStore, call string, f func() (T, error)) (T, error) {
	begun := time.Now()
	v, err := f()
	took := time.Since(begun)
	for _, o := range h.observers {
		o.StoreCalled(call, took, err)
	}
	return v, err
}

// do is heardCall for a method that returns nothing else.
func (h *heardStore) do(call string, f func() error) error {
	_, err := heardCall(h, call, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

func (h *heardStore) Set(ctx context.Context, key string, value []byte) error {
	return h.do("set", func() error { return h.Store.Set(ctx, key, value) })
}

func (h *heardStore) Get(ctx context.Context, key string) ([]byte, error) {
	return heardCall(h, "get", func() ([]byte, error) { return h.Store.Get(ctx, key) })
}

func (h *heardStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return heardCall(h, "add", func() (int64, error) { return h.Store.Add(ctx, key, delta) })
}

func (h *heardStore) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	return heardCall(h, "compare_set", func() ([]byte, error) { return h.Store.CompareSet(ctx, key, expected, desired) })
}

func (h *heardStore) Wait(ctx context.Context, keys ...string) error {
	return h.do("wait", func() error { return h.Store.Wait(ctx, keys...) })
}

func (h *heardStore) Check(ctx context.Context, keys ...string) (bool, error) {
	return heardCall(h, "check", func() (bool, error) { return h.Store.Check(ctx, keys...) })
}

func (h *heardStore) Delete(ctx context.Context, key string) (bool, error) {
	return heardCall(h, "delete", func() (bool, error) { return h.Store.Delete(ctx, key) })
}

func (h *heardStore) NumKeys(ctx context.Context) (int64, error) {
	return heardCall(h, "num_keys", func() (int64, error) { return h.Store.NumKeys(ctx) })
}

func (h *heardStore) Append(ctx context.Context, key string, value []byte) error {
	return h.do("append", func() error { return h.Store.Append(ctx, key, value) })
}

func (h *heardStore) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return heardCall(h, "multi_get", func() ([][]byte, error) { return h.Store.MultiGet(ctx, keys) })
}

func (h *heardStore) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return h.do("multi_set", func() error { return h.Store.MultiSet(ctx, keys, values) })
}

func (h *heardStore) QueuePush(ctx context.Context, key string, value []byte) error {
	return h.do("queue_push", func() error { return h.Store.QueuePush(ctx, key, value) })
}

func (h *heardStore) QueuePop(ctx context.Context, key string, block bool) ([]byte, error) {
	return heardCall(h, "queue_pop", func() ([]byte, error) { return h.Store.QueuePop(ctx, key, block) })
}

func (h *heardStore) QueueLen(ctx context.Context, key string) (int64, error) {
	return heardCall(h, "queue_len", func() (int64, error) { return h.Store.QueueLen(ctx, key) })
}

func (h *heardStore) ListKeys(ctx context.Context) ([]string, error) {
	return heardCall(h, "list_keys", func() ([]string, error) { return h.Store.ListKeys(ctx) })
}

// What a store may have besides is that of the inner one, and nobody is told of it.

// Unwrap returns the store.
func (h *heardStore) Unwrap() store.Store { return h.Store }

func (h *heardStore) SetWill(ctx context.Context, key string, expected, desired []byte) error {
	return store.SetWill(ctx, h.Store, key, expected, desired)
}

func (h *heardStore) DropWill(ctx context.Context, key string) error {
	return store.DropWill(ctx, h.Store, key)
}

func (h *heardStore) Kept(ctx context.Context) error { return store.Kept(ctx, h.Store) }

func (h *heardStore) LocalAddr() netip.Addr { return store.LocalAddrOf(h.Store) }
