package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
)

// Feature is something a store may lack.
type Feature int

const (
	// Queues: QueuePush, QueuePop and QueueLen.
	Queues Feature = iota
	// ListKeys: the method of that name.
	ListKeys
	// NumberErrors: an Add to a value that is no number gives ErrNotNumber and
	// leaves the store usable. PyTorch's own TCP servers close the connection.
	NumberErrors
	// CompareSetWakes: a CompareSet that stores wakes waiters, and so does an
	// Append that is made of it. PyTorch's single-threaded TCP server does not.
	CompareSetWakes
	// DeleteReports: Delete of a missing key returns false.
	DeleteReports
	// LargeValues: values up to 8 MiB, the most that PyTorch's TCP server takes.
	LargeValues
	// Wills: SetWill and DropWill of store.Willer.
	Wills
)

// Config describes the store to test.
type Config struct {
	// New returns an empty store. Each call returns another data set.
	New func(t *testing.T) store.Store

	// Peer returns another handle on the data of a store that New returned. Nil
	// means Clone where the store is a store.Cloner, else the store itself.
	Peer func(t *testing.T, s store.Store) store.Store

	// No lists what the store lacks.
	No []Feature
}

// patience bounds what must happen; only a broken store makes a test wait for it.
const patience = 60 * time.Second

// grace is how long the suite checks that an event does not happen.
const grace = 30 * time.Millisecond

type suite struct {
	*testing.T
	Config
	s store.Store
}

// Run runs the whole suite as subtests of t.
func Run(t *testing.T, c Config) {
	type test struct {
		name string
		run  func(*suite)
	}
	tests := []test{
		{"set and get", testSetGet},
		{"keys hold any bytes", testKeys},
		{"get waits", testGetWaits},
		{"values are copied", testCopies},
		{"add", testAdd},
		{"add to text", testAddText},
		{"compare set", testCompareSet},
		{"check", testCheck},
		{"wait", testWait},
		{"what wakes a waiter", testWakes},
		{"what does not wake a waiter", testDoesNotWake},
		{"store timeout", testTimeout},
		{"timeout setting", testSetTimeout},
		{"context deadline", testDeadline},
		{"context cancelled", testCancel},
		{"delete", testDelete},
		{"number of keys", testNumKeys},
		{"append", testAppend},
		{"multi", testMulti},
		{"list keys", testListKeys},
		{"queue", testQueue},
		{"concurrent adds", testConcurrentAdds},
		{"one winner", testOneWinner},
		{"many waiters", testManyWaiters},
		{"barrier", testBarrier},
		{"large values", testLarge},
		{"close", testClose},
		{"close of a peer", testClosePeer},
		{"wills", testWills},
	}
	if c.has(NumberErrors) {
		tests = append(tests, test{"add to what is no number", testAddErrors})
	}
	if c.has(Queues) {
		tests = append(tests, test{"queue names and keys", testQueueNames}, test{"queue poppers", testQueuePoppers})
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := &suite{T: t, Config: c, s: c.New(t)}
			t.Cleanup(func() { s.s.Close() })
			s.s.SetTimeout(patience)
			test.run(s)
		})
	}
}

func (c Config) has(f Feature) bool { return !slices.Contains(c.No, f) }

// peer returns another handle on the same data, or the store itself.
func (t *suite) peer() store.Store {
	t.Helper()
	var p store.Store
	if t.Peer != nil {
		p = t.Peer(t.T, t.s)
	} else if c, ok := t.s.(store.Cloner); ok {
		var err error
		p, err = c.Clone(t.Context())
		require.NoError(t, err)
	} else {
		return t.s
	}
	p.SetTimeout(patience)
	t.Cleanup(func() { p.Close() })
	return p
}

func (t *suite) set(s store.Store, key, value string) {
	t.Helper()
	require.NoError(t, s.Set(t.Context(), key, []byte(value)))
}

// holds fails the test unless key exists with this value.
func (t *suite) holds(s store.Store, key, value string) {
	t.Helper()
	present, err := s.Check(t.Context(), key)
	require.NoError(t, err)
	require.True(t, present, "%q is missing", key)
	got, err := s.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, value, string(got))
}

func (t *suite) missing(s store.Store, keys ...string) {
	t.Helper()
	present, err := s.Check(t.Context(), keys...)
	require.NoError(t, err)
	require.False(t, present, "%q exists", keys)
}

func (t *suite) unsupported(err error) {
	t.Helper()
	require.ErrorIs(t, err, errors.ErrUnsupported)
}

// async runs f in a goroutine that ends before the test does.
func (t *suite) async(f func() error) <-chan error {
	done := make(chan error, 1)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		done <- f()
	}()
	t.Cleanup(func() { <-finished })
	return done
}

func (t *suite) await(done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		require.FailNow(t, "the call did not return", "within %v", patience)
		return nil
	}
}

func (t *suite) blocked(done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		require.FailNow(t, "the call returned", "it was to wait; its error is %v", err)
	case <-time.After(grace):
	}
}

func testSetGet(t *suite) {
	t.set(t.s, "k", "one")
	t.holds(t.s, "k", "one")
	t.set(t.s, "k", "two")
	t.holds(t.s, "k", "two")
	t.holds(t.peer(), "k", "two")
	t.set(t.s, "empty", "")
	t.holds(t.s, "empty", "")
	require.NoError(t, t.s.Set(t.Context(), "nil", nil))
	t.holds(t.s, "nil", "")
	t.set(t.s, "k", "")
	t.holds(t.s, "k", "")
}

// oddKeys hold what a store might take for its own syntax.
func oddKeys() []string {
	return []string{
		"", "/", "//", "a", "/a", "a/", "a/b", "a\x00b", "\x00", "\xff\xfe", "-", "-/a", "-a",
		"cleanup/", "refcount/", "init/", "../up", ".", "*", "a*", "[a]", "a?", "{a}", "a b", "\r\n", "%s", "é",
		strings.Repeat("long", 1000),
	}
}

func testKeys(t *suite) {
	keys := oddKeys()
	for i, k := range keys {
		t.missing(t.s, k)
		t.set(t.s, k, fmt.Sprint(i))
	}
	p := t.peer()
	for i, k := range keys {
		t.holds(p, k, fmt.Sprint(i))
	}
	for i, k := range keys {
		deleted, err := t.s.Delete(t.Context(), k)
		require.NoError(t, err)
		require.True(t, deleted, "%q", k)
		t.missing(p, k)
		if i+1 < len(keys) {
			t.holds(p, keys[i+1], fmt.Sprint(i+1))
		}
	}
}

func testGetWaits(t *suite) {
	p := t.peer()
	var got []byte
	done := t.async(func() (err error) { got, err = t.s.Get(t.Context(), "late"); return err })
	t.blocked(done)
	t.set(p, "other", "x")
	t.blocked(done)
	t.set(p, "late", "value")
	require.NoError(t, t.await(done))
	require.Equal(t, "value", string(got))
}

func testCopies(t *suite) {
	ctx := t.Context()
	scribble := func(b []byte) { copy(b, bytes.Repeat([]byte{'#'}, len(b))) }

	v := []byte("abc")
	require.NoError(t, t.s.Set(ctx, "k", v))
	scribble(v)
	got, err := t.s.Get(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "abc", string(got))
	scribble(got)
	t.holds(t.s, "k", "abc")

	expected, desired := []byte("abc"), []byte("def")
	got, err = t.s.CompareSet(ctx, "k", expected, desired)
	require.NoError(t, err)
	require.Equal(t, "def", string(got))
	scribble(got)
	scribble(desired)
	t.holds(t.s, "k", "def")

	desired = []byte("ghi")
	got, err = t.s.CompareSet(ctx, "missing", desired, nil)
	require.NoError(t, err)
	scribble(got)
	require.Equal(t, "ghi", string(desired), "the answer is the caller's own slice")

	v = []byte("jkl")
	require.NoError(t, t.s.Append(ctx, "k", v))
	scribble(v)
	t.holds(t.s, "k", "defjkl")

	v = []byte("mno")
	require.NoError(t, t.s.MultiSet(ctx, []string{"k"}, [][]byte{v}))
	scribble(v)
	multi, err := t.s.MultiGet(ctx, []string{"k"})
	require.NoError(t, err)
	require.Equal(t, "mno", string(multi[0]))
	scribble(multi[0])
	t.holds(t.s, "k", "mno")

	if t.has(Queues) {
		v = []byte("pqr")
		require.NoError(t, t.s.QueuePush(ctx, "q", v))
		scribble(v)
		got, err = t.s.QueuePop(ctx, "q", true)
		require.NoError(t, err)
		require.Equal(t, "pqr", string(got))
	}
}

func testAdd(t *suite) {
	add := func(s store.Store, delta, want int64) {
		t.Helper()
		got, err := s.Add(t.Context(), "n", delta)
		require.NoError(t, err)
		require.Equal(t, want, got)
		t.holds(t.s, "n", fmt.Sprint(want))
	}
	p := t.peer()
	add(t.s, 5, 5)
	add(p, -7, -2)
	add(t.s, 0, -2)
	add(p, 2, 0)
	add(t.s, math.MaxInt64, math.MaxInt64)
	add(p, 1, math.MinInt64)
	add(t.s, -1, math.MaxInt64)
	add(t.s, math.MaxInt64, -2)
	add(t.s, math.MinInt64, math.MaxInt64-1)
	got, err := t.s.Add(t.Context(), "zero", 0)
	require.NoError(t, err)
	require.Zero(t, got)
	t.holds(t.s, "zero", "0")
}

func testAddText(t *suite) {
	for _, test := range []struct {
		text  string
		delta int64
		want  int64
	}{
		{" 12abc", 1, 13},
		{"\t\n\v\f\r -5", 1, -4},
		{"+7", 1, 8},
		{"007", 1, 8},
		{"-0", 0, 0},
		{"3.9", 1, 4},
		{"1e3", 1, 2},
		{"0x10", 1, 1},
		{"12\x0034", 1, 13},
		{"9007199254740993", 1, 9007199254740994},
		{"9223372036854775807", 1, math.MinInt64},
		{"-9223372036854775808", -1, math.MaxInt64},
		{"-9223372036854775808junk", 0, math.MinInt64},
		{"000000000000000000000000000009", 1, 10},
	} {
		t.set(t.s, "n", test.text)
		got, err := t.s.Add(t.Context(), "n", test.delta)
		require.NoError(t, err, "%q", test.text)
		require.Equal(t, test.want, got, "%q", test.text)
		t.holds(t.s, "n", fmt.Sprint(test.want))
	}
}

func testAddErrors(t *suite) {
	for _, text := range []string{
		"", " ", "abc", "+", "-", "- 1", "+-1", "\x001", "x1", "\u00a01",
		"9223372036854775808", "-9223372036854775809", "99999999999999999999999999",
	} {
		t.set(t.s, "count", text)
		_, err := t.s.Add(t.Context(), "count", 1)
		require.ErrorIs(t, err, store.ErrNotNumber, "%q", text)
		require.ErrorContains(t, err, "count")
		t.holds(t.s, "count", text)
	}
	t.set(t.s, "count", "1")
	got, err := t.s.Add(t.Context(), "count", 1)
	require.NoError(t, err)
	require.EqualValues(t, 2, got)
}

func testCompareSet(t *suite) {
	const none = "(missing)"
	for _, test := range []struct{ held, expected, desired, answer, after string }{
		{none, "", "new", "new", "new"},
		{none, "", "", "", ""},
		{none, "exp", "new", "exp", none},
		{none, "exp", "", "exp", none},
		{"new", "new", "n2", "n2", "n2"},
		{"new", "new", "", "", ""},
		{"new", "wrong", "n3", "new", "new"},
		{"new", "", "n3", "new", "new"},
		{"new", "wrong", "new", "new", "new"},
		{"", "", "new", "new", "new"},
		{"", "exp", "new", "", ""},
		{"new", "ne", "n3", "new", "new"},
		{"a\x00b", "a\x00c", "n3", "a\x00b", "a\x00b"},
		{"a\x00b", "a\x00b", "\xff\x00", "\xff\x00", "\xff\x00"},
	} {
		_, err := t.s.Delete(t.Context(), "k")
		require.NoError(t, err)
		if test.held != none {
			t.set(t.s, "k", test.held)
		}
		got, err := t.s.CompareSet(t.Context(), "k", []byte(test.expected), []byte(test.desired))
		require.NoError(t, err, "%+v", test)
		require.Equal(t, test.answer, string(got), "%+v", test)
		if test.after == none {
			t.missing(t.s, "k")
		} else {
			t.holds(t.s, "k", test.after)
		}
	}
}

func testCheck(t *suite) {
	check := func(want bool, keys ...string) {
		t.Helper()
		got, err := t.s.Check(t.Context(), keys...)
		require.NoError(t, err)
		require.Equal(t, want, got, "%q", keys)
	}
	check(true)
	check(false, "a")
	t.set(t.s, "a", "")
	check(true, "a")
	check(true, "a", "a")
	check(false, "a", "b")
	check(false, "b", "a")
	t.set(t.peer(), "b", "")
	check(true, "a", "b")
}

func testWait(t *suite) {
	p := t.peer()
	require.NoError(t, t.s.Wait(t.Context()))
	t.set(t.s, "a", "")
	require.NoError(t, t.s.Wait(t.Context(), "a"))
	require.NoError(t, t.s.Wait(t.Context(), "a", "a"))

	several := t.async(func() error { return t.s.Wait(t.Context(), "a", "b", "c", "b") })
	t.blocked(several)
	t.set(p, "c", "")
	t.blocked(several)
	t.set(p, "b", "")
	require.NoError(t, t.await(several))

	twice := t.async(func() error { return t.s.Wait(t.Context(), "twice", "twice") })
	t.blocked(twice)
	t.set(p, "twice", "")
	require.NoError(t, t.await(twice))
}

func testWakes(t *suite) {
	p := t.peer()
	ctx := t.Context()
	for _, test := range []struct {
		name string
		no   Feature
		do   func(key string) error
	}{
		{"set", -1, func(k string) error { return p.Set(ctx, k, []byte("1")) }},
		{"add", -1, func(k string) error { _, err := p.Add(ctx, k, 1); return err }},
		{"append", CompareSetWakes, func(k string) error { return p.Append(ctx, k, []byte("1")) }},
		{"multi set", -1, func(k string) error {
			return p.MultiSet(ctx, []string{"other", k}, [][]byte{nil, []byte("1")})
		}},
		{"compare set", CompareSetWakes, func(k string) error {
			_, err := p.CompareSet(ctx, k, nil, []byte("1"))
			return err
		}},
		{"queue push", Queues, func(k string) error { return p.QueuePush(ctx, k, []byte("1")) }},
	} {
		if !t.has(test.no) {
			continue
		}
		done := t.async(func() error { return t.s.Wait(ctx, test.name) })
		t.blocked(done)
		require.NoError(t, test.do(test.name), test.name)
		require.NoError(t, t.await(done), test.name)
		if test.no != Queues {
			t.holds(t.s, test.name, "1")
		}
	}
}

func testDoesNotWake(t *suite) {
	p := t.peer()
	t.set(p, "there", "x")
	done := t.async(func() error { return t.s.Wait(t.Context(), "k", "there") })
	t.blocked(done)
	_, err := p.Delete(t.Context(), "k")
	require.NoError(t, err)
	got, err := p.CompareSet(t.Context(), "k", []byte("wrong"), []byte("new"))
	require.NoError(t, err)
	require.Equal(t, "wrong", string(got))
	present, err := p.Check(t.Context(), "k")
	require.NoError(t, err)
	require.False(t, present)
	t.set(p, "k2", "")
	t.blocked(done)
	t.set(p, "k", "")
	require.NoError(t, t.await(done))
}

// timedOut fails the test unless err is a timeout in all its forms.
func (t *suite) timedOut(err error, key string) {
	t.Helper()
	require.ErrorIs(t, err, store.ErrTimeout)
	require.ErrorContains(t, err, key)
	var n net.Error
	require.ErrorAs(t, err, &n)
	require.True(t, n.Timeout())
	require.NotErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, store.ErrClosed)
}

func testTimeout(t *suite) {
	ctx, p := t.Context(), t.peer()
	t.set(t.s, "a", "")
	t.s.SetTimeout(50 * time.Millisecond)
	start := time.Now()
	err := t.s.Wait(ctx, "a", "never")
	require.GreaterOrEqual(t, time.Since(start), 50*time.Millisecond)
	t.timedOut(err, "never")
	_, err = t.s.Get(ctx, "never")
	t.timedOut(err, "never")
	_, err = t.s.MultiGet(ctx, []string{"a", "never"})
	t.timedOut(err, "never")
	if t.has(Queues) {
		_, err = t.s.QueuePop(ctx, "never", true)
		t.timedOut(err, "never")
	}
	t.s.SetTimeout(patience)

	before, err := t.s.NumKeys(ctx)
	require.NoError(t, err)
	t.set(p, "never", "late")
	after, err := t.s.NumKeys(ctx)
	require.NoError(t, err)
	require.Equal(t, before+1, after)
	t.holds(t.s, "never", "late")
}

func testSetTimeout(t *suite) {
	t.s.SetTimeout(7 * time.Second)
	require.Equal(t, 7*time.Second, t.s.Timeout())
	t.s.SetTimeout(0)
	require.Equal(t, store.DefaultTimeout, t.s.Timeout())

	p := t.peer()
	t.s.SetTimeout(-1)
	require.Negative(t, t.s.Timeout())
	done := t.async(func() error { return t.s.Wait(t.Context(), "k") })
	t.blocked(done)
	t.set(p, "k", "")
	require.NoError(t, t.await(done))
}

func testDeadline(t *suite) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := t.s.Wait(ctx, "never")
	t.timedOut(err, "never")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = t.s.Get(ctx, "never")
	t.timedOut(err, "never")

	// A deadline of the context replaces the store's timeout, also a shorter one.
	p := t.peer()
	t.s.SetTimeout(time.Millisecond)
	ctx, cancel = context.WithTimeout(t.Context(), patience)
	defer cancel()
	done := t.async(func() error { return t.s.Wait(ctx, "k") })
	t.blocked(done)
	t.s.SetTimeout(patience) // the peer may be the same handle
	t.set(p, "k", "")
	require.NoError(t, t.await(done))
}

func testCancel(t *suite) {
	p := t.peer()
	calls := map[string]func(context.Context) error{
		"wait":      func(ctx context.Context) error { return t.s.Wait(ctx, "never") },
		"get":       func(ctx context.Context) error { _, err := t.s.Get(ctx, "never"); return err },
		"multi get": func(ctx context.Context) error { _, err := t.s.MultiGet(ctx, []string{"never"}); return err },
	}
	if t.has(Queues) {
		calls["queue pop"] = func(ctx context.Context) error {
			_, err := t.s.QueuePop(ctx, "never", true)
			return err
		}
	}
	for name, call := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		done := t.async(func() error { return call(ctx) })
		t.blocked(done)
		cancel()
		err := t.await(done)
		require.ErrorIs(t, err, context.Canceled, name)
		require.NotErrorIs(t, err, store.ErrTimeout, name)
		require.ErrorIs(t, t.await(t.async(func() error { return call(ctx) })), context.Canceled, name)
	}

	// A call that queues behind a long wait on the same handle can be cancelled too.
	first, stop := context.WithCancel(t.Context())
	defer stop()
	long := t.async(func() error { return t.s.Wait(first, "never") })
	t.blocked(long)
	second, cancel := context.WithCancel(t.Context())
	behind := t.async(func() error { return t.s.Wait(second, "never either") })
	t.blocked(behind)
	cancel()
	require.ErrorIs(t, t.await(behind), context.Canceled)
	t.blocked(long)
	t.set(p, "never", "now")
	require.NoError(t, t.await(long))
	t.holds(t.s, "never", "now")
}

func testDelete(t *suite) {
	p := t.peer()
	del := func(s store.Store, want bool) {
		t.Helper()
		got, err := s.Delete(t.Context(), "k")
		require.NoError(t, err)
		if want || t.has(DeleteReports) {
			require.Equal(t, want, got)
		}
		t.missing(t.s, "k")
		t.missing(p, "k")
	}
	del(t.s, false)
	t.set(t.s, "k", "v")
	del(p, true)
	del(t.s, false)
	t.set(p, "k", "")
	del(t.s, true)
	n, err := t.s.Add(t.Context(), "k", 3)
	require.NoError(t, err)
	require.EqualValues(t, 3, n, "a deleted key counts as 0")
	del(t.s, true)
	require.NoError(t, t.s.Append(t.Context(), "k", []byte("x")))
	t.holds(p, "k", "x")
}

func testNumKeys(t *suite) {
	p := t.peer()
	base, err := t.s.NumKeys(t.Context())
	require.NoError(t, err)
	more := func(want int64) {
		t.Helper()
		for _, s := range []store.Store{t.s, p} {
			got, err := s.NumKeys(t.Context())
			require.NoError(t, err)
			require.Equal(t, base+want, got)
		}
	}
	t.set(t.s, "a", "1")
	t.set(p, "b", "1")
	more(2)
	t.set(p, "a", "2")
	_, err = t.s.Add(t.Context(), "n", 1)
	require.NoError(t, err)
	more(3)
	_, err = t.s.CompareSet(t.Context(), "no", []byte("x"), []byte("y"))
	require.NoError(t, err)
	more(3)
	if t.has(Queues) {
		require.NoError(t, t.s.QueuePush(t.Context(), "q", []byte("x")))
		more(3)
	}
	_, err = p.Delete(t.Context(), "a")
	require.NoError(t, err)
	more(2)
}

func testAppend(t *suite) {
	p := t.peer()
	app := func(s store.Store, value, want string) {
		t.Helper()
		require.NoError(t, s.Append(t.Context(), "k", []byte(value)))
		t.holds(t.s, "k", want)
	}
	app(t.s, "", "")
	app(t.s, "ab", "ab")
	app(p, "ab", "abab")
	app(t.s, "\x00", "abab\x00")
	app(p, "", "abab\x00")

	const writers = 20
	handles := []store.Store{t.s, p}
	var writes []<-chan error
	for i := range writers {
		writes = append(writes, t.async(func() error {
			return handles[i%2].Append(t.Context(), "all", []byte{byte('a' + i)})
		}))
	}
	for _, w := range writes {
		require.NoError(t, t.await(w))
	}
	all, err := t.s.Get(t.Context(), "all")
	require.NoError(t, err)
	slices.Sort(all)
	require.Equal(t, "abcdefghijklmnopqrst", string(all))
}

func testMulti(t *suite) {
	ctx, p := t.Context(), t.peer()
	require.NoError(t, t.s.MultiSet(ctx, nil, nil))
	got, err := t.s.MultiGet(ctx, nil)
	require.NoError(t, err)
	require.Empty(t, got)

	keys := []string{"c", "a", "b"}
	require.NoError(t, t.s.MultiSet(ctx, keys, [][]byte{[]byte("C"), nil, []byte("B")}))
	got, err = p.MultiGet(ctx, []string{"b", "c", "a", "b"})
	require.NoError(t, err)
	require.Equal(t, "B|C||B", string(bytes.Join(got, []byte("|"))))

	require.NoError(t, t.s.MultiSet(ctx, []string{"d", "d"}, [][]byte{[]byte("1"), []byte("2")}))
	t.holds(p, "d", "2")
	require.Error(t, t.s.MultiSet(ctx, []string{"x", "y"}, [][]byte{nil}))
	t.missing(p, "x")

	done := t.async(func() (err error) { got, err = t.s.MultiGet(ctx, []string{"late", "a", "later"}); return err })
	t.blocked(done)
	t.set(p, "later", "2")
	t.blocked(done)
	t.set(p, "late", "1")
	require.NoError(t, t.await(done))
	require.Equal(t, "1||2", string(bytes.Join(got, []byte("|"))))
}

func testListKeys(t *suite) {
	ctx, p := t.Context(), t.peer()
	got, err := t.s.ListKeys(ctx)
	if !t.has(ListKeys) {
		t.unsupported(err)
		return
	}
	require.NoError(t, err)
	require.Empty(t, got)
	keys := oddKeys()
	for _, k := range keys {
		t.set(t.s, k, "v")
	}
	t.set(t.s, "gone", "")
	_, err = t.s.Delete(ctx, "gone")
	require.NoError(t, err)
	if t.has(Queues) {
		require.NoError(t, t.s.QueuePush(ctx, "q", nil))
	}
	for _, s := range []store.Store{t.s, p} {
		got, err = s.ListKeys(ctx)
		require.NoError(t, err)
		require.ElementsMatch(t, keys, got)
	}
}

func testQueue(t *suite) {
	ctx, p := t.Context(), t.peer()
	if !t.has(Queues) {
		t.unsupported(t.s.QueuePush(ctx, "q", nil))
		_, err := t.s.QueuePop(ctx, "q", false)
		t.unsupported(err)
		_, err = t.s.QueueLen(ctx, "q")
		t.unsupported(err)
		return
	}
	length := func(want int64) {
		t.Helper()
		got, err := t.s.QueueLen(ctx, "q")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	pop := func(s store.Store, block bool, want string) {
		t.Helper()
		got, err := s.QueuePop(ctx, "q", block)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	length(0)
	_, err := t.s.QueuePop(ctx, "q", false)
	require.ErrorIs(t, err, store.ErrQueueEmpty)
	for _, v := range []string{"a", "", "\x00b"} {
		require.NoError(t, t.s.QueuePush(ctx, "q", []byte(v)))
	}
	length(3)
	pop(t.s, false, "a")
	pop(p, true, "")
	length(1)
	pop(p, false, "\x00b")
	length(0)
	_, err = p.QueuePop(ctx, "q", false)
	require.ErrorIs(t, err, store.ErrQueueEmpty)

	var got []byte
	done := t.async(func() (err error) { got, err = t.s.QueuePop(ctx, "q", true); return err })
	t.blocked(done)
	require.NoError(t, p.QueuePush(ctx, "q", []byte("late")))
	require.NoError(t, t.await(done))
	require.Equal(t, "late", string(got))
	length(0)
}

func testQueueNames(t *suite) {
	ctx, p := t.Context(), t.peer()
	require.NoError(t, t.s.QueuePush(ctx, "q", []byte("element")))
	require.NoError(t, t.s.Wait(ctx, "q"))
	present, err := p.Check(ctx, "q")
	require.NoError(t, err)
	require.True(t, present)
	deleted, err := p.Delete(ctx, "q")
	require.NoError(t, err)
	if t.has(DeleteReports) {
		require.False(t, deleted)
	}
	n, err := p.Add(ctx, "q", 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	t.holds(t.s, "q", "1")
	_, err = p.Delete(ctx, "q")
	require.NoError(t, err)
	n, err = t.s.QueueLen(ctx, "q")
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	got, err := t.s.QueuePop(ctx, "q", false)
	require.NoError(t, err)
	require.Equal(t, "element", string(got))
	t.missing(t.s, "q")

	// An ordinary key does not satisfy a pop.
	t.set(t.s, "q", "v")
	done := t.async(func() (err error) { got, err = t.s.QueuePop(ctx, "q", true); return err })
	t.blocked(done)
	require.NoError(t, p.QueuePush(ctx, "q", []byte("element")))
	require.NoError(t, t.await(done))
	require.Equal(t, "element", string(got))
	t.holds(t.s, "q", "v")
}

func testQueuePoppers(t *suite) {
	const poppers, each = 4, 10
	ctx := t.Context()
	results := make([][]string, poppers)
	var pops []<-chan error
	for i := range poppers {
		p := t.peer()
		pops = append(pops, t.async(func() error {
			for range each {
				v, err := p.QueuePop(ctx, "q", true)
				if err != nil {
					return err
				}
				results[i] = append(results[i], string(v))
			}
			return nil
		}))
	}
	for _, pop := range pops {
		t.blocked(pop)
	}
	var want []string
	for i := range poppers * each {
		want = append(want, fmt.Sprint(i))
		require.NoError(t, t.s.QueuePush(ctx, "q", []byte(fmt.Sprint(i))))
	}
	for _, pop := range pops {
		require.NoError(t, t.await(pop))
	}
	require.ElementsMatch(t, want, slices.Concat(results...))
	n, err := t.s.QueueLen(ctx, "q")
	require.NoError(t, err)
	require.Zero(t, n)
}

func testConcurrentAdds(t *suite) {
	const adders, each = 100, 5
	handles := []store.Store{t.s, t.peer(), t.peer(), t.peer()}
	var mu sync.Mutex
	var sums []int
	var want []int
	var adds []<-chan error
	for i := range adders {
		s := handles[i%len(handles)]
		adds = append(adds, t.async(func() error {
			for range each {
				n, err := s.Add(t.Context(), "n", 1)
				if err != nil {
					return err
				}
				mu.Lock()
				sums = append(sums, int(n))
				mu.Unlock()
			}
			return nil
		}))
	}
	for _, a := range adds {
		require.NoError(t, t.await(a))
	}
	for i := range adders * each {
		want = append(want, i+1)
	}
	require.ElementsMatch(t, want, sums)
	t.holds(t.s, "n", fmt.Sprint(adders*each))
}

func testOneWinner(t *suite) {
	const candidates = 16
	handles := []store.Store{t.s, t.peer()}
	answers := make([]string, candidates)
	var calls []<-chan error
	for i := range candidates {
		calls = append(calls, t.async(func() error {
			v, err := handles[i%2].CompareSet(t.Context(), "leader", nil, fmt.Append(nil, i))
			answers[i] = string(v)
			return err
		}))
	}
	for _, c := range calls {
		require.NoError(t, t.await(c))
	}
	require.Len(t, slices.Compact(answers), 1)
	t.holds(t.s, "leader", answers[0])
}

func testManyWaiters(t *suite) {
	const waiters = 50
	p := t.peer()
	var waits []<-chan error
	for i := range waiters {
		waits = append(waits, t.async(func() error {
			v, err := t.s.Get(t.Context(), fmt.Sprint(i))
			if err == nil && string(v) != fmt.Sprint("v", i) {
				err = fmt.Errorf("key %d holds %q", i, v)
			}
			return err
		}))
	}
	t.blocked(waits[0])
	for i := range waiters {
		t.set(p, fmt.Sprint(i), fmt.Sprint("v", i))
	}
	for _, w := range waits {
		require.NoError(t, t.await(w))
	}
}

func testBarrier(t *suite) {
	const world = 4
	for round := range 3 {
		key := fmt.Sprint("round ", round)
		var calls []<-chan error
		for i := range world {
			s := t.s
			if i > 0 {
				s = t.peer()
			}
			calls = append(calls, t.async(func() error { return store.Barrier(t.Context(), s, key, world) }))
			if i < world-1 {
				t.blocked(calls[0])
			}
		}
		for _, c := range calls {
			require.NoError(t, t.await(c))
		}
	}
}

func testLarge(t *suite) {
	sizes := []int{64 << 10, 1 << 20}
	if t.has(LargeValues) {
		sizes = append(sizes, 8<<20)
	}
	p := t.peer()
	for _, size := range sizes {
		v := make([]byte, size)
		for i := range v {
			v[i] = byte(uint32(i) * 2654435761 >> 13)
		}
		require.NoError(t, t.s.Set(t.Context(), "large", v))
		got, err := p.Get(t.Context(), "large")
		require.NoError(t, err)
		require.True(t, bytes.Equal(v, got), "%d bytes came back as %d, or changed", len(v), len(got))
		v[size/2]++
		got, err = p.CompareSet(t.Context(), "large", got, v)
		require.NoError(t, err)
		require.True(t, bytes.Equal(v, got))
	}
}

func testClose(t *suite) {
	ctx := t.Context()
	t.set(t.s, "there", "x")
	pending := map[string]<-chan error{
		"wait": t.async(func() error { return t.s.Wait(ctx, "never") }),
		"get":  t.async(func() error { _, err := t.s.Get(ctx, "never"); return err }),
	}
	if t.has(Queues) {
		pending["pop"] = t.async(func() error { _, err := t.s.QueuePop(ctx, "never", true); return err })
	}
	for _, p := range pending {
		t.blocked(p)
	}
	require.NoError(t, t.s.Close())
	for name, p := range pending {
		require.ErrorIs(t, t.await(p), store.ErrClosed, name)
	}
	require.NoError(t, t.s.Close())

	one := []string{"there"}
	for name, call := range map[string]func() error{
		"set":         func() error { return t.s.Set(ctx, "there", nil) },
		"get":         func() error { _, err := t.s.Get(ctx, "there"); return err },
		"add":         func() error { _, err := t.s.Add(ctx, "n", 1); return err },
		"compare set": func() error { _, err := t.s.CompareSet(ctx, "there", nil, nil); return err },
		"wait":        func() error { return t.s.Wait(ctx, "there") },
		"check":       func() error { _, err := t.s.Check(ctx, "there"); return err },
		"delete":      func() error { _, err := t.s.Delete(ctx, "there"); return err },
		"num keys":    func() error { _, err := t.s.NumKeys(ctx); return err },
		"append":      func() error { return t.s.Append(ctx, "there", nil) },
		"multi get":   func() error { _, err := t.s.MultiGet(ctx, one); return err },
		"multi set":   func() error { return t.s.MultiSet(ctx, one, [][]byte{nil}) },
		"queue push":  func() error { return t.s.QueuePush(ctx, "q", nil) },
		"queue pop":   func() error { _, err := t.s.QueuePop(ctx, "q", false); return err },
		"queue len":   func() error { _, err := t.s.QueueLen(ctx, "q"); return err },
		"list keys":   func() error { _, err := t.s.ListKeys(ctx); return err },
	} {
		if strings.HasPrefix(name, "queue") && !t.has(Queues) || name == "list keys" && !t.has(ListKeys) {
			continue
		}
		require.ErrorIs(t, call(), store.ErrClosed, name)
	}
}

func testClosePeer(t *suite) {
	p := t.peer()
	if p == t.s {
		return // it has one handle, and the test before this one closes it
	}
	t.set(p, "k", "v")
	require.NoError(t, p.Close())
	t.holds(t.s, "k", "v")
	t.set(t.s, "k", "w")
	t.holds(t.s, "k", "w")
}

func testWills(t *suite) {
	ctx := t.Context()
	p := t.peer()
	if !t.has(Wills) {
		t.unsupported(store.SetWill(ctx, p, "k", nil, []byte("v")))
		require.NoError(t, store.DropWill(ctx, p, "k"))
		return
	}
	will := func(s store.Store, key, expected, desired string) {
		t.Helper()
		require.NoError(t, store.SetWill(ctx, s, key, []byte(expected), []byte(desired)))
	}
	will(t.s, "own", "", "never") // some stores carry out the wills of others
	t.set(t.s, "changed", "new")
	t.set(t.s, "expected", "old")
	will(p, "missing", "", "first")
	will(p, "missing", "", "second")
	will(p, "changed", "old", "wrong")
	will(p, "expected", "old", "right")
	will(p, "dropped", "", "wrong")
	require.NoError(t, store.DropWill(ctx, p, "dropped"))
	require.NoError(t, store.DropWill(ctx, p, "never set"))
	got := t.async(func() error { return t.s.Wait(ctx, "missing") })
	t.blocked(got)
	t.missing(t.s, "missing", "dropped")
	require.NoError(t, p.Close())
	require.NoError(t, t.await(got))
	t.holds(t.s, "missing", "second")
	last := t.peer() // what it does comes after what p's end did
	will(last, "last", "", "done")
	require.NoError(t, last.Close())
	require.NoError(t, t.s.Wait(ctx, "last"))
	t.holds(t.s, "expected", "right")
	t.holds(t.s, "changed", "new")
	t.missing(t.s, "dropped")
	t.missing(t.s, "own")
}
