package rendezvous

import (
	"context"
	"log/slog"

	"github.com/c10d-go/c10d/internal/waiting"
)

// maxLastSeen is for how many missing ranks Config.LastSeen is called, which may take a round
// trip each. Log lines and errors list no more.
const maxLastSeen = 8

// report says which ranks this one waits for.
func (m *meeting) report(ctx context.Context) (string, []slog.Attr) {
	m.mu.Lock()
	connecting := m.connectingNative
	m.mu.Unlock()
	if connecting {
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

// setConnectingNative notes whether Native.Connect is running. It writes its own log lines.
func (m *meeting) setConnectingNative(yes bool) {
	m.mu.Lock()
	m.connectingNative = yes
	m.mu.Unlock()
}
