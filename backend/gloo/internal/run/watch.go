package run

import (
	"time"

	"github.com/c10d-go/c10d/internal/lazytimer"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// oldestWatch notices that the oldest of some operations has stayed the same. It looks ticks times
// before the first line.
type oldestWatch struct {
	lazytimer.Timer
	first    time.Duration
	oldest   *work.Work
	since    time.Time
	due      time.Time     // for a line
	interval time.Duration // between lines
}

const ticks = 8

// start begins to look, if no look is due.
func (w *oldestWatch) start(oldest *work.Work) {
	if !w.Pending && !w.Stopped() {
		w.After(w.first / ticks)
		w.begin(oldest)
	}
}

func (w *oldestWatch) begin(oldest *work.Work) {
	w.oldest, w.since, w.interval = oldest, time.Now(), w.first
	w.due = w.since.Add(w.first)
}

// look takes note of the oldest operation, nil if there is none, and reports whether a line is due.
func (w *oldestWatch) look(oldest *work.Work) bool {
	if oldest == nil || w.Stopped() {
		w.Rest()
		w.oldest = nil
		return false
	}
	w.After(w.first / ticks)
	if oldest != w.oldest {
		w.begin(oldest)
	}
	now := time.Now()
	if now.Before(w.due) {
		return false
	}
	w.interval = waiting.Next(w.interval)
	w.due = now.Add(w.interval)
	return true
}
