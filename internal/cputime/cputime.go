// Package cputime measures for how long this process waited for a CPU. A rank that waits for answers
// does not count that time: the other processes on its host are late as well.
package cputime

import (
	"context"
	"time"
)

// tick is how often Watch checks for delays.
const tick = 5 * time.Millisecond

// Watch measures until stop is called. stop returns the sum of all delays.
func Watch() (stop func() time.Duration) {
	end, kept := make(chan struct{}), make(chan time.Duration)
	due, t := time.Now().Add(tick), time.NewTimer(tick)
	go func() {
		defer t.Stop()
		var sum time.Duration
		for {
			select {
			case <-t.C:
				sum += max(0, time.Since(due))
				due = time.Now().Add(tick)
				t.Reset(tick)
			case <-end:
				kept <- sum + max(0, time.Since(due))
				return
			}
		}
	}()
	return func() time.Duration {
		close(end)
		return <-kept
	}
}

// most is how many times as long as asked for WithTimeout waits while this process is late.
const most = 10

// WithTimeout returns a context that is cancelled after d. Time for which this process waits for a CPU
// does not count, but after ten times d the context is cancelled in any case. cancel must be called.
func WithTimeout(ctx context.Context, d time.Duration) (_ context.Context, cancel context.CancelFunc) {
	ctx, cancel = context.WithTimeout(ctx, most*d)
	go func() {
		defer cancel()
		t := time.NewTimer(tick)
		defer t.Stop()
		for range d / tick { // a late tick counts as one
			select {
			case <-t.C:
				t.Reset(tick)
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, cancel
}
