package store_test

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// noWills: the end of a process with its memory is nobody's to notice.
var noWills = []storetest.Feature{storetest.Wills}

func TestHash(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Config{New: func(*testing.T) store.Store { return store.NewHash() }, No: noWills})
}

// oneHandle hides Clone, so that all of the suite goes through one handle.
type oneHandle struct{ store.Store }

func TestHashOneHandle(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Config{New: func(*testing.T) store.Store { return oneHandle{store.NewHash()} }, No: noWills})
}

func TestPrefix(t *testing.T) {
	for name, wrap := range map[string]func(store.Store) store.Store{
		"one":    func(s store.Store) store.Store { return store.Prefix("job", s) },
		"empty":  func(s store.Store) store.Store { return store.Prefix("", s) },
		"slash":  func(s store.Store) store.Store { return store.Prefix("0/", s) },
		"nested": func(s store.Store) store.Store { return store.Prefix("cpu/", store.Prefix("0/", s)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, storetest.Config{No: noWills, New: func(t *testing.T) store.Store {
				inner := store.NewHash()
				t.Cleanup(func() { inner.Close() })
				// Neighbours that a careless prefix would take for its own.
				for _, k := range []string{"jobs/x", "job", "0", "x", "cpu//0//x"} {
					require.NoError(t, inner.Set(t.Context(), k, nil))
				}
				return wrap(inner)
			}})
		})
	}
}

func TestPrefixNames(t *testing.T) {
	ctx := t.Context()
	inner := store.NewHash()
	s := store.Prefix("cpu/", store.Prefix("0/", inner))
	require.NoError(t, s.Set(ctx, "rank_0", []byte("x")))
	require.NoError(t, s.QueuePush(ctx, "q", []byte("x")))
	require.Equal(t, []string{"0//cpu//rank_0"}, must.Get(inner.ListKeys(ctx)))
	require.EqualValues(t, 1, must.Get(inner.QueueLen(ctx, "0//cpu//q")))

	s.SetTimeout(time.Minute)
	require.Equal(t, time.Minute, inner.Timeout())
	require.NoError(t, s.Close())
	require.NoError(t, inner.Set(ctx, "k", nil), "closing a view closes nothing else")
}

// TestPrefixOfPrefix: a view of a view costs what one view does, and both hear of the keys that are written.
func TestPrefixOfPrefix(t *testing.T) {
	inner := store.NewHash()
	heard := map[string]string{}
	view := func(prefix string, st store.Store) store.Store {
		s := store.Prefix(prefix, st)
		s.(interface{ Note(func(key string)) }).Note(func(key string) { heard[prefix] = key })
		return s
	}
	c := store.Prefix("c", view("b", view("a", inner)))
	require.NoError(t, c.Set(t.Context(), "k", []byte("v")))
	require.Equal(t, map[string]string{"a": "a/b/c/k", "b": "b/c/k"}, heard)
	allocs := func(s store.Store) float64 {
		return testing.AllocsPerRun(100, func() { _, _ = s.Check(t.Context(), "k") })
	}
	require.InDelta(t, allocs(store.Prefix("a", inner)), allocs(c), 0.5)
}

type torch1 struct{ store.Store }

func (torch1) IsTorch1() bool { return true }

func TestPrefixPassesAbilities(t *testing.T) {
	inner := store.NewHash()
	p := store.Prefix("a", torch1{inner})
	_, can := p.(store.Cloner)
	require.False(t, can, "the inner store hides Clone")

	require.False(t, store.LocalAddrOf(p).IsValid())
	require.True(t, store.LocalAddrOf(store.Prefix("b", store.Prefix("a", inner))).IsLoopback())

	clone := must.Get(store.Prefix("a", inner).(store.Cloner).Clone(t.Context()))
	require.NoError(t, clone.Set(t.Context(), "k", nil))
	require.NoError(t, inner.Wait(t.Context(), "a/k"))
	require.NoError(t, clone.Close())
	require.NoError(t, inner.Set(t.Context(), "k", nil))
}

func TestTorch1(t *testing.T) {
	inner := store.NewHash()
	defer inner.Close()
	require.False(t, store.IsTorch1(inner))
	require.False(t, store.IsTorch1(store.Prefix("a", inner)))
	require.True(t, store.IsTorch1(store.Prefix("b", store.Prefix("a", torch1{inner}))))
}

func TestLocalAddrFor(t *testing.T) {
	for _, c := range []struct{ local, host, want string }{
		{"127.0.0.1", "127.0.0.1", "127.0.0.1"},
		{"127.0.0.1", "localhost", "127.0.0.1"},
		{"::1", "::1", "::1"},
		{"192.0.2.7", "store.example", "192.0.2.7"},
		{"192.0.2.7", "192.0.2.7", "192.0.2.7"},
		{"2001:db8::7", "store.example", "2001:db8::7"},
		{"::ffff:192.0.2.7", "store.example", "192.0.2.7"},
		{"127.0.1.1", "myhost", ""}, // Debian's address of the host's own name
		{"fe80::7%eth0", "store.example", ""},
	} {
		local := net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(c.local), 9))
		want, _ := netip.ParseAddr(c.want)
		require.Equal(t, want, store.LocalAddrFor(local, c.host), "%+v", c)
	}
	require.False(t, store.LocalAddrFor(&net.UnixAddr{}, "localhost").IsValid())
}

func TestHashClonesAreIndependent(t *testing.T) {
	ctx := t.Context()
	s := store.NewHash()
	s.SetTimeout(time.Hour)
	c := must.Get(s.Clone(ctx))
	require.Equal(t, time.Hour, c.Timeout())
	c.SetTimeout(time.Minute)
	require.Equal(t, time.Hour, s.Timeout())
	require.NoError(t, s.Close())
	require.NoError(t, c.Set(ctx, "k", nil))
	require.ErrorIs(t, must.Err(s.Clone(ctx)), store.ErrClosed)
}

func TestBarrierErrors(t *testing.T) {
	s := store.NewHash()
	require.ErrorContains(t, store.Barrier(t.Context(), s, "b", 0), "world size 0")

	s.SetTimeout(20 * time.Millisecond)
	err := store.Barrier(t.Context(), s, "b", 3)
	require.ErrorIs(t, err, store.ErrTimeout)
	require.ErrorContains(t, err, `barrier "b" of 3, where this was caller 1`)

	require.NoError(t, s.Set(t.Context(), "c/num_members", []byte("x")))
	require.ErrorIs(t, store.Barrier(t.Context(), s, "c", 3), store.ErrNotNumber)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, store.Barrier(ctx, s, "d", 3), context.Canceled)
}

func TestErrorText(t *testing.T) {
	keys := strings.Split("abcdefghij", "")
	err := error(&store.Error{Store: "hash", Op: "wait", Keys: keys, After: 1500 * time.Millisecond, Err: store.ErrTimeout})
	require.EqualError(t, err, `store: hash: wait "a" "b" "c" "d" "e" "f" "g" "h" and 2 more: timed out after 1.5s`)
	n := must.As[net.Error](t, err)
	require.True(t, n.Timeout())
	err = &store.Error{Store: "hash", Op: "wait", Err: context.DeadlineExceeded}
	require.ErrorIs(t, err, store.ErrTimeout)
	err = &store.Error{Store: "hash", Op: "wait", Err: context.Canceled}
	require.NotErrorIs(t, err, store.ErrTimeout)
}

// basic hides the methods that a store of the old TCP dialect lacks, and makes
// them of what is left.
type basic struct{ store.Store }

func (b basic) Append(ctx context.Context, key string, value []byte) error {
	return store.AppendByCompareSet(ctx, b.Store, key, value)
}

func (b basic) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return store.MultiGetByGet(ctx, b.Store, keys)
}

func (b basic) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	return store.MultiSetBySet(ctx, b.Store, keys, values)
}

func TestFallbacks(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Config{
		New: func(*testing.T) store.Store { return basic{store.NewHash()} },
		No:  noWills,
		Peer: func(t *testing.T, s store.Store) store.Store {
			c := must.Get(s.(basic).Store.(store.Cloner).Clone(t.Context()))
			return basic{c}
		},
	})
}

func TestAppendFallbackKnowsItsProbe(t *testing.T) {
	ctx := t.Context()
	s := store.NewHash()
	for _, start := range []string{"\x00c10d append", "x", ""} {
		require.NoError(t, s.Set(ctx, "k", []byte(start)))
		require.NoError(t, store.AppendByCompareSet(ctx, s, "k", []byte("x")))
		require.Equal(t, start+"x", string(must.Get(s.Get(ctx, "k"))))
	}
}

// once can be cloned, and its clones cannot.
type once struct{ store.Store }

func (o once) Clone(context.Context) (store.Store, error) { return struct{ store.Store }{o.Store}, nil }

func TestPrefixOfAStoreWhoseCloneHasNone(t *testing.T) {
	h := store.NewHash()
	c := must.Get(store.Prefix("a", once{h}).(store.Cloner).Clone(t.Context()))
	require.NoError(t, c.Set(t.Context(), "k", []byte("v")))
	v := must.Get(h.Get(t.Context(), "a/k"))
	require.Equal(t, "v", string(v))
}
