package lazytimer_test

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/lazytimer"
)

func TestTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ms = time.Millisecond
		var mu sync.Mutex
		var timer lazytimer.Timer
		var at []time.Duration
		begin, left := time.Now(), 0
		timer.Check = func() {
			mu.Lock()
			defer mu.Unlock()
			at = append(at, time.Since(begin)/ms)
			if left--; left > 0 {
				timer.After(2 * timer.Pause)
			} else {
				timer.Rest()
			}
		}
		run := func(calls int, f func()) []time.Duration {
			mu.Lock()
			begin, at, left = time.Now(), nil, calls
			f()
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			defer mu.Unlock()
			return at
		}
		require.Empty(t, run(1, func() {}))
		require.Equal(t, []time.Duration{1, 3, 7}, run(3, func() { timer.After(ms) }))
		require.False(t, timer.Pending)
		require.Equal(t, []time.Duration{5}, run(1, func() { timer.Within(5 * ms); timer.Within(9 * ms) }), "it is due earlier")
		require.Equal(t, []time.Duration{2}, run(1, func() { timer.Within(5 * ms); timer.Within(2 * ms) }))
		require.Equal(t, []time.Duration{9}, run(1, func() { timer.Within(5 * ms); timer.After(9 * ms) }))
		require.Empty(t, run(1, func() { timer.After(ms); timer.Stop() }))
		require.Empty(t, run(1, func() { timer.After(ms) }), "it is stopped")
	})
}
