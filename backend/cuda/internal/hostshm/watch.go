package hostshm

import (
	"runtime"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/internal/pause"
)

const (
	eagerFor = 2 * time.Millisecond
	yieldFor = 200 * time.Microsecond

	// LingerFor is how long the worker and the finisher poll for the next operation
	// before they sleep, where there are CPUs for that. To wake a goroutine of another
	// thread takes 5 to 50 us.
	LingerFor = 200 * time.Microsecond

	// A waiter asks each askEvery whether to go on. After every askDriver of these questions it
	// also asks the driver.
	askEvery  = 100 * time.Microsecond
	askDriver = 50
)

// Asker says whether to go on waiting. Ask is cheap, askDriver is not.
type Asker interface {
	Ask() error
	AskDriver() error
}

// Watch is how a goroutine waits for a word: it polls as fast as it can for a
// while, then lets others go first, then pauses.
type Watch struct {
	Eager        bool
	polls, asked int
	start, last  time.Time
}

// Poll is called when the word has not come. Its error ends the waiting.
func (w *Watch) Poll(o Asker) error {
	const burst = 32
	if w.polls++; w.polls%burst != 0 {
		return nil
	}
	now := time.Now()
	if w.start.IsZero() {
		w.start, w.last = now, now
	}
	if now.Sub(w.last) >= askEvery {
		w.last = now
		if err := o.Ask(); err != nil {
			return err
		}
		if w.asked++; w.asked%askDriver == 0 {
			if err := o.AskDriver(); err != nil {
				return err
			}
		}
	}
	switch waited := now.Sub(w.start); {
	case w.Eager && waited < min(eagerFor, pause.Yield):
		if w.polls%(64*burst) == 0 {
			runtime.Gosched()
		}
	case waited < min(yieldFor, pause.Yield):
		runtime.Gosched()
	default:
		time.Sleep(max(min(waited/16, 200*time.Microsecond), time.Microsecond))
	}
	return nil
}

// PollFor polls until something has come, for a while.
func PollFor(limit time.Duration, come func() bool) {
	limit = min(limit, pause.Yield)
	for i, start := 1, time.Now(); !come(); i++ {
		if i%64 == 0 && time.Since(start) >= limit {
			return
		}
	}
}
