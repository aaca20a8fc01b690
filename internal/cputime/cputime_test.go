package cputime

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A process that is always in time.
func TestInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stop := Watch()
		ctx, cancel := WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		<-ctx.Done()
		require.Equal(t, time.Second, time.Since(begun))
		require.Zero(t, stop())
	})
}

func TestWithTimeoutEndsWithItsParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parent, end := context.WithCancel(t.Context())
		ctx, cancel := WithTimeout(parent, time.Second)
		defer cancel()
		end()
		<-ctx.Done()
	})
}

// A process whose only CPU is busy.
func TestLate(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	end := time.Now().Add(time.Minute)
	busy, idle := context.WithCancel(t.Context())
	defer idle()
	for range 10 { // each runs for 10 ms at a time
		go func() {
			for busy.Err() == nil && time.Now().Before(end) {
			}
		}()
	}
	stop := Watch()
	begun := time.Now()
	ctx, cancel := WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	<-ctx.Done()
	require.Greater(t, time.Since(begun), 150*time.Millisecond)
	require.Greater(t, stop(), 100*time.Millisecond)
}
