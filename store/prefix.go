package store

import (
	"context"
	"net/netip"
	"strings"
	"time"
)

// Prefix returns a view of inner in which every key k stands for
// prefix + "/" + k, c10d's PrefixStore. The prefix is used as it is: one that
// ends in a slash gives two of them, as in c10d. Prefixes nest from the
// outside in: key k of Prefix("b", Prefix("a", s)) is "a/b/k" in s. It is Prefix("a/b", s): closing the view
// "a" does not close it.
//
// NumKeys counts all keys of inner, as in c10d. ListKeys returns only the keys
// under the prefix; unlike c10d's it does not mistake "ab/x" for a key under
// "a". The timeout is inner's: SetTimeout changes it for all its users. Errors
// name keys as inner knows them.
//
// Close ends the calls of the view and leaves inner open, because other views
// share it. The view has a LocalAddr and wills, and can be cloned, if inner does; a clone
// owns the connection it was given, and its Close closes that.
func Prefix(prefix string, inner Store) Store {
	return newPrefix(prefix, inner, false)
}

func newPrefix(prefix string, inner Store, owned bool) Store {
	p := &prefixed{inner: inner, prefix: prefix + "/", owned: owned}
	if v, ok := inner.(interface{ view() *prefixed }); ok && !owned {
		outer := v.view()
		p.inner, p.prefix, p.above, p.note = outer.inner, outer.prefix+p.prefix, len(outer.prefix), outer.note
	}
	p.life, p.end = context.WithCancel(context.Background())
	if c, ok := p.inner.(Cloner); ok {
		return &clonablePrefixed{p, c}
	}
	return p
}

type prefixed struct {
	inner  Store
	prefix string // with the slash
	above  int    // how much of prefix is that of the view which this one was made of
	owned  bool   // Close closes inner
	note   func(key string)
	life   context.Context
	end    context.CancelFunc
}

// clonablePrefixed is a view of a store that is a Cloner.
type clonablePrefixed struct {
	*prefixed
	cloner Cloner
}

func (p *clonablePrefixed) Clone(ctx context.Context) (Store, error) {
	return prefixCall(p.prefixed, ctx, "clone", func(ctx context.Context) (Store, error) {
		inner, err := p.cloner.Clone(ctx)
		if err != nil {
			return nil, err
		}
		clone := newPrefix(strings.TrimSuffix(p.prefix, "/"), inner, true)
		clone.(interface{ view() *prefixed }).view().note = p.note // inner itself may have no Clone
		return clone, nil
	})
}

func (p *prefixed) view() *prefixed { return p }

// Note makes the view call f with each key that is about to be written. So do clones and views that are made of it
// later. The key is that of the store under the view. Package pg uses it. No call may be under way.
func (p *prefixed) Note(f func(key string)) {
	outer := p.note
	p.note = func(key string) {
		f(key[p.above:])
		if outer != nil {
			outer(key)
		}
	}
}

// writes returns the keys as inner knows them, of a call that writes them.
func (p *prefixed) writes(keys ...string) []string {
	joined := p.join(keys)
	if p.note != nil {
		for _, key := range joined {
			p.note(key)
		}
	}
	return joined
}

func (p *prefixed) LocalAddr() netip.Addr { return LocalAddrOf(p.inner) }

// prefixCall runs f with a context that Close ends too.
func prefixCall[T any](p *prefixed, ctx context.Context, op string, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	closed := &Error{Store: "prefix " + p.prefix, Op: op, Err: ErrClosed}
	if p.life.Err() != nil {
		var none T
		return none, closed
	}
	result, err := f(ctx)
	if err != nil && p.life.Err() != nil {
		return result, closed
	}
	return result, err
}

// do is prefixCall for a method that returns nothing else.
func (p *prefixed) do(ctx context.Context, op string, f func(context.Context) error) error {
	_, err := prefixCall(p, ctx, op, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

func (p *prefixed) join(keys []string) []string {
	joined := make([]string, len(keys))
	for i, k := range keys {
		joined[i] = p.prefix + k
	}
	return joined
}

func (p *prefixed) Set(ctx context.Context, key string, value []byte) error {
	return p.do(ctx, "set", func(ctx context.Context) error { return p.inner.Set(ctx, p.writes(key)[0], value) })
}

func (p *prefixed) Get(ctx context.Context, key string) ([]byte, error) {
	return prefixCall(p, ctx, "get", func(ctx context.Context) ([]byte, error) { return p.inner.Get(ctx, p.prefix+key) })
}

func (p *prefixed) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return prefixCall(p, ctx, "add", func(ctx context.Context) (int64, error) { return p.inner.Add(ctx, p.writes(key)[0], delta) })
}

func (p *prefixed) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	return prefixCall(p, ctx, "compare set", func(ctx context.Context) ([]byte, error) {
		return p.inner.CompareSet(ctx, p.writes(key)[0], expected, desired)
	})
}

func (p *prefixed) Wait(ctx context.Context, keys ...string) error {
	return p.do(ctx, "wait", func(ctx context.Context) error { return p.inner.Wait(ctx, p.join(keys)...) })
}

func (p *prefixed) Check(ctx context.Context, keys ...string) (bool, error) {
	return prefixCall(p, ctx, "check", func(ctx context.Context) (bool, error) { return p.inner.Check(ctx, p.join(keys)...) })
}

func (p *prefixed) Delete(ctx context.Context, key string) (bool, error) {
	return prefixCall(p, ctx, "delete", func(ctx context.Context) (bool, error) { return p.inner.Delete(ctx, p.prefix+key) })
}

func (p *prefixed) NumKeys(ctx context.Context) (int64, error) {
	return prefixCall(p, ctx, "number of keys", p.inner.NumKeys)
}

func (p *prefixed) Append(ctx context.Context, key string, value []byte) error {
	return p.do(ctx, "append", func(ctx context.Context) error { return p.inner.Append(ctx, p.writes(key)[0], value) })
}

func (p *prefixed) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return prefixCall(p, ctx, "multi get", func(ctx context.Context) ([][]byte, error) { return p.inner.MultiGet(ctx, p.join(keys)) })
}

func (p *prefixed) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return p.do(ctx, "multi set", func(ctx context.Context) error { return p.inner.MultiSet(ctx, p.writes(keys...), values) })
}

func (p *prefixed) QueuePush(ctx context.Context, key string, value []byte) error {
	return p.do(ctx, "queue push", func(ctx context.Context) error { return p.inner.QueuePush(ctx, p.prefix+key, value) })
}

func (p *prefixed) QueuePop(ctx context.Context, key string, block bool) ([]byte, error) {
	return prefixCall(p, ctx, "queue pop", func(ctx context.Context) ([]byte, error) {
		return p.inner.QueuePop(ctx, p.prefix+key, block)
	})
}

func (p *prefixed) QueueLen(ctx context.Context, key string) (int64, error) {
	return prefixCall(p, ctx, "queue length", func(ctx context.Context) (int64, error) { return p.inner.QueueLen(ctx, p.prefix+key) })
}

func (p *prefixed) ListKeys(ctx context.Context) ([]string, error) {
	return prefixCall(p, ctx, "list keys", func(ctx context.Context) ([]string, error) {
		all, err := p.inner.ListKeys(ctx)
		if err != nil {
			return nil, err
		}
		var keys []string
		for _, k := range all {
			if rest, ok := strings.CutPrefix(k, p.prefix); ok {
				keys = append(keys, rest)
			}
		}
		return keys, nil
	})
}

// SetWill returns an error that matches errors.ErrUnsupported if inner is no Willer.
func (p *prefixed) SetWill(ctx context.Context, key string, expected, desired []byte) error {
	return p.do(ctx, "set will", func(ctx context.Context) error {
		return SetWill(ctx, p.inner, p.prefix+key, expected, desired)
	})
}

func (p *prefixed) DropWill(ctx context.Context, key string) error {
	return p.do(ctx, "drop will", func(ctx context.Context) error { return DropWill(ctx, p.inner, p.prefix+key) })
}

// Kept is that of inner.
func (p *prefixed) Kept(ctx context.Context) error {
	return p.do(ctx, "kept", func(ctx context.Context) error { return Kept(ctx, p.inner) })
}

func (p *prefixed) Timeout() time.Duration { return p.inner.Timeout() }

func (p *prefixed) SetTimeout(d time.Duration) { p.inner.SetTimeout(d) }

func (p *prefixed) Close() error {
	p.end()
	if p.owned {
		return p.inner.Close()
	}
	return nil
}

// Root returns the store under all views of s, which may be nil.
func Root(s Store) Store {
	for {
		switch v := s.(type) {
		case interface{ view() *prefixed }:
			s = v.view().inner
		case interface{ Unwrap() Store }:
			s = v.Unwrap()
		default:
			return s
		}
	}
}

// Unnoted returns the view s without what Note has set: nobody deletes keys that are written by it.
func Unnoted(s Store) Store {
	if v, ok := s.(interface{ view() *prefixed }); ok {
		return newPrefix(strings.TrimSuffix(v.view().prefix, "/"), v.view().inner, false)
	}
	return s
}
