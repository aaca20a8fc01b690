package agent

import "time"

const (
	// The first restart waits for firstPause, each further one twice as long as the one before, up to longestPause: what
	// fails at once would otherwise fail hundreds of times a minute. What has lived for healthyAfter begins anew.
	firstPause   = 100 * time.Millisecond
	longestPause = 30 * time.Second
	healthyAfter = time.Minute
)

// nextPause returns the pause before the next restart, after one of last (0 for none) and a life of lived.
func nextPause(last, lived time.Duration) time.Duration {
	if last == 0 || lived >= healthyAfter {
		return firstPause
	}
	return min(2*last, longestPause)
}
