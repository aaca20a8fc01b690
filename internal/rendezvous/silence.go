package rendezvous

import (
	"context"
	"log/slog"

	"github.com/c10d-go/c10d/internal/waiting"
)

// asked is of how many missing ranks Config.LastSeen is asked, which may take a round trip
// each. Lines and errors list no more.
const asked = 8

// report says which ranks this one waits for.
func (m *meeting) report(ctx context.Context) (string, []slog.Attr) {
	m.mu.Lock()
	elsewhere := m.elsewhere
	m.mu.Unlock()
	if elsewhere {
		return "", nil
	}
	missing := m.missing(ctx)
	if len(missing) == 0 {
		return "", nil
	}
	m.mu.Lock()
	m.reported = missing
	m.mu.Unlock()
	ranks, each := make([]int, len(missing)), make([]string, len(missing))
	for i, p := range missing {
		ranks[i], each[i] = p.Rank, p.String()
	}
	return "waiting for " + waiting.Ranks(ranks) + " to connect", []slog.Attr{slog.String("missing", waiting.Some(each))}
}

// away notes whether Native.Connect is running. It writes lines of its own.
func (m *meeting) away(yes bool) {
	m.mu.Lock()
	m.elsewhere = yes
	m.mu.Unlock()
}
