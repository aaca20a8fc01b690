package faults

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGrowth: what grows from epoch to epoch is reported, and what only goes up and down is not.
func TestGrowth(t *testing.T) {
	uses := func(f func(i int, u *Use)) *Outcome {
		x := new(Outcome)
		for i := range 50 {
			u := Use{Memory: 40<<20 + i%3<<20, Heap: 10 << 20, Files: 12 + i%2, Goroutines: 11 + i%3, Keys: 20}
			f(i, &u)
			x.Uses = append(x.Uses, u)
		}
		return x
	}
	require.Empty(t, uses(func(int, *Use) {}).Growth())
	for what, f := range map[string]func(i int, u *Use){
		"bytes of memory":   func(i int, u *Use) { u.Memory += i << 18 },
		"bytes of heap":     func(i int, u *Use) { u.Heap += i << 17 },
		"descriptors":       func(i int, u *Use) { u.Files += i / 10 },
		"goroutines":        func(i int, u *Use) { u.Goroutines += i / 5 },
		"keys in the store": func(i int, u *Use) { u.Keys += int64(i) * 10 },
	} {
		all := uses(f).Growth()
		require.Len(t, all, 1, what)
		require.Contains(t, all[0], what)
	}
	require.Len(t, new(Outcome).Growth(), 1, "too few epochs")
}

// TestRandomSoak: it is repeatable and lasts as long as it should, and a process comes for each that dies.
func TestRandomSoak(t *testing.T) {
	for seed := range uint64(20) {
		a := RandomSoak(TCP, seed, 10*time.Minute)
		require.Equal(t, a, RandomSoak(TCP, seed, 10*time.Minute))
		var lasts time.Duration
		n := map[Fault]int{}
		for _, e := range a.Events {
			lasts += e.After
			n[e.Fault]++
		}
		require.InDelta(t, 10*time.Minute, lasts, float64(10*time.Second))
		require.Equal(t, n[Kill]+n[Panic]+n[Exit], n[Newcomer])
		require.Equal(t, n[Stop], n[Resume])
	}
}
