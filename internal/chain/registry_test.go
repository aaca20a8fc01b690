package chain

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// F-35: arrival first, callback first, and both at once, 10^5 keys in parallel. Each callback runs
// once, outside the lock.
func TestF35EachRunsOnce(t *testing.T) {
	const n = 100_000
	var r registry
	r.init()
	round := r.begin(n)
	rng := seeded(t)
	orders := [2][]int{rng.Perm(n), rng.Perm(n)}
	var wg sync.WaitGroup
	for half, order := range orders {
		for part := range 4 {
			wg.Go(func() {
				for i := part; i < n; i += 4 {
					err := error(nil)
					if half == 0 {
						err = r.arrive(round, order[i])
					} else {
						err = r.register(order[i])
					}
					if err != nil {
						t.Errorf("key %d: %v", order[i], err)
					}
				}
			})
		}
	}
	ran, total := make([]int, n), 0
	for ctx := bounded(t); total < n; {
		k, ok := r.next()
		if !ok {
			select {
			case <-r.awake():
				continue
			case <-ctx.Done():
				t.Fatalf("%d of %d callbacks ran", total, n)
			}
		}
		r.failed() // it would hang if the lock were held
		ran[k]++
		total++
	}
	wg.Wait()
	_, ok := r.next()
	require.False(t, ok)
	for k, times := range ran {
		require.Equal(t, 1, times, "key %d", k)
	}
	arrivals, callbacks := r.waiting()
	require.Zero(t, arrivals+callbacks)
}

// F-35: neither half runs a callback alone.
func TestF35BothHalves(t *testing.T) {
	var r registry
	r.init()
	round := r.begin(2)
	require.NoError(t, r.arrive(round, 0))
	require.NoError(t, r.register(1))
	_, ok := r.next()
	require.False(t, ok)
	arrivals, callbacks := r.waiting()
	require.Equal(t, []int{1, 1}, []int{arrivals, callbacks})
	require.NoError(t, r.arrive(round, 1))
	k, ok := r.next()
	require.True(t, ok)
	require.Equal(t, 1, k)
	require.NoError(t, r.register(0))
	k, ok = r.next()
	require.True(t, ok)
	require.Zero(t, k)
}

// F-35: a second arrival or callback is refused and changes nothing, before and after the two have
// met. A key that is expected again may be used again.
func TestF35DuplicatesAreRefused(t *testing.T) {
	var r registry
	r.init()
	round := r.begin(1)
	require.NoError(t, r.arrive(round, 0))
	require.ErrorIs(t, r.arrive(round, 0), ErrDuplicate)
	require.NoError(t, r.register(0))
	require.ErrorIs(t, r.register(0), ErrDuplicate)
	_, ok := r.next()
	require.True(t, ok)
	require.ErrorIs(t, r.arrive(round, 0), ErrDuplicate)
	require.ErrorIs(t, r.register(0), ErrDuplicate)
	_, ok = r.next()
	require.False(t, ok)
	r.expect(0, true)
	require.NoError(t, r.arrive(round, 0))
	_, ok = r.next()
	require.True(t, ok)
}

// F-44: what comes for a round that is over is late.
func TestF44LateArrivals(t *testing.T) {
	var r registry
	r.init()
	first := r.begin(1)
	r.end()
	require.ErrorIs(t, r.arrive(first, 0), ErrLate)
	second := r.begin(1)
	require.ErrorIs(t, r.arrive(first, 0), ErrLate)
	r.fail(first, errors.New("late"))
	err, _ := r.failed()
	require.NoError(t, err)
	require.NoError(t, r.arrive(second, 0))
}

// After a failure no callback runs. The round is over when every posted message has ended.
func TestFailedRound(t *testing.T) {
	var r registry
	r.init()
	round := r.begin(3)
	for k := range 3 {
		r.expect(k, true)
	}
	require.NoError(t, r.arrive(round, 0))
	cause := errors.New("rank 3 died")
	r.lose(1, cause)
	r.lose(2, errors.New("a consequence"))
	_, ok := r.next()
	require.False(t, ok)
	err, over := r.failed()
	require.Equal(t, cause, err)
	require.True(t, over)
}

func BenchmarkRegistry(b *testing.B) {
	var r registry
	r.init()
	round := r.begin(1)
	b.ReportAllocs()
	for b.Loop() {
		r.expect(0, true)
		r.arrive(round, 0)
		r.next()
	}
}
