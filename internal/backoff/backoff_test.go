package backoff_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/backoff"
)

func TestTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var at []time.Duration
		var timer *backoff.Timer
		left := 0
		timer = backoff.New(time.Millisecond, 4*time.Millisecond, func() bool {
			at = append(at, time.Since(begin)/time.Millisecond)
			timer.Grow()
			left--
			return left > 0
		})
		run := func(calls int) []time.Duration {
			begin, at, left = time.Now(), nil, calls
			timer.Start()
			timer.Start() // it is set already
			time.Sleep(time.Second)
			return at
		}
		time.Sleep(2 * time.Hour)
		require.Empty(t, at, "nobody started it")
		require.Equal(t, []time.Duration{1, 3, 7, 11}, run(4))
		require.Equal(t, []time.Duration{4}, run(1), "the interval stays")
		timer.Shrink()
		require.Equal(t, []time.Duration{1}, run(1))
		timer.Start()
		timer.Stop()
		time.Sleep(time.Hour)
		require.Empty(t, run(1))
	})
}

// TestStartDuringCheck: a Start while check runs is not lost, though that check asks for no other.
func TestStartDuringCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var timer *backoff.Timer
		checks := 0
		timer = backoff.New(time.Millisecond, time.Millisecond, func() bool {
			if checks++; checks == 1 {
				timer.Start()
			}
			return false
		})
		timer.Start()
		time.Sleep(time.Second)
		require.Equal(t, 2, checks)
	})
}
