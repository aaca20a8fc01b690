package callback

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestF35EachRunsOnce: arrival first, callback first, and both at once, 10^5 keys in parallel. Each
// callback runs once, outside the lock.
func TestF35EachRunsOnce(t *testing.T) {
	const n = 100_000
	r := NewRegistry[int]()
	keys := make([]Key[int], n)
	rng := must.Rand(t)
	arrivals, callbacks := rng.Perm(n), rng.Perm(n)
	var wg sync.WaitGroup
	for part := range 4 {
		wg.Go(func() {
			for i := part; i < n; i += 4 {
				if err := r.Arrive(&keys[arrivals[i]]); err != nil {
					t.Errorf("key %d: %v", arrivals[i], err)
				}
			}
		})
	}
	ran, total := make([]int, n), 0
	run := func(k int) {
		r.Posted() // it would hang if the lock were held
		ran[k]++
		total++
	}
	due := func() {
		for k, ok := r.Next(); ok; k, ok = r.Next() {
			run(k)
		}
	}
	for _, k := range callbacks {
		if keys[k].Value = k; r.Expect(&keys[k]) {
			run(k)
		}
		due()
	}
	for limit := time.After(20 * time.Second); total < n; due() {
		select {
		case <-r.Awake():
		case <-limit:
			t.Fatalf("%d of %d callbacks ran", total, n)
		}
	}
	wg.Wait()
	require.False(t, r.Due())
	for k, times := range ran {
		require.Equal(t, 1, times, "key %d", k)
	}
}

// TestF35BothHalves: neither half runs a callback alone.
func TestF35BothHalves(t *testing.T) {
	r := NewRegistry[string]()
	first, second := Key[string]{Value: "first"}, Key[string]{Value: "second"}
	require.NoError(t, r.Arrive(&first))
	require.False(t, r.Expect(&second))
	_, ok := r.Next()
	require.False(t, ok)
	require.NoError(t, r.Arrive(&second))
	require.True(t, r.Due())
	v, ok := r.Next()
	require.True(t, ok)
	require.Equal(t, "second", v)
	require.True(t, r.Expect(&first))
	require.False(t, r.Due())
}

// TestF35DuplicatesAreRefused: a second arrival is refused and changes nothing, before and after the
// callback. A key that is posted again may be used again.
func TestF35DuplicatesAreRefused(t *testing.T) {
	r := NewRegistry[int]()
	var k Key[int]
	require.NoError(t, r.Arrive(&k))
	require.ErrorIs(t, r.Arrive(&k), ErrDuplicate)
	require.True(t, r.Expect(&k))
	require.ErrorIs(t, r.Arrive(&k), ErrDuplicate)
	require.False(t, r.Due())
	r.Post(&k)
	require.False(t, r.Expect(&k))
	require.NoError(t, r.Arrive(&k))
	_, ok := r.Next()
	require.True(t, ok)
}

// TestF44LateArrivals: arrivals after the end are refused, but for posted ones.
func TestF44LateArrivals(t *testing.T) {
	r := NewRegistry[int]()
	var late, posted Key[int]
	r.Post(&posted)
	r.Close()
	require.ErrorIs(t, r.Arrive(&late), ErrLate)
	require.NoError(t, r.Arrive(&posted))
	require.Zero(t, r.Posted())
}

// TestSettle returns when every posted key has arrived, and nothing is due then.
func TestSettle(t *testing.T) {
	r := NewRegistry[int]()
	keys := make([]Key[int], 3)
	for i := range keys {
		r.Post(&keys[i])
		r.Expect(&keys[i])
	}
	settled := make(chan struct{})
	go func() {
		r.Settle()
		close(settled)
	}()
	for i := range keys {
		select {
		case <-settled:
			t.Fatalf("settled with %d of %d keys", i, len(keys))
		default:
		}
		require.NoError(t, r.Arrive(&keys[i]))
	}
	<-settled
	require.False(t, r.Due())
	require.Zero(t, r.Posted())
}

func TestRegistryAllocatesNothing(t *testing.T) {
	r := NewRegistry[int]()
	keys := make([]Key[int], 3)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		for i := range keys {
			r.Post(&keys[i])
			r.Expect(&keys[i])
			r.Arrive(&keys[i])
		}
		<-r.Awake()
		for range keys {
			r.Next()
		}
	}))
}
