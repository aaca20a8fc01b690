package debug

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Log keeps the last lines of a logger for a page. The zero value works, and a nil Log keeps nothing.
type Log struct {
	mu   sync.Mutex
	last []Line
}

// Line is a line of a log.
type Line struct {
	Time  time.Time `json:"time"`
	Level string    `json:"level"`
	Text  string    `json:"text"`
}

// mostLines is how many lines a Log keeps.
const mostLines = 20

// Tee returns a logger that keeps its lines in l, and passes those that inner takes on to it. With nil
// for inner, lines from level Warn on go to slog.Default().
func (l *Log) Tee(inner *slog.Logger) *slog.Logger {
	least := slog.Level(-1 << 10)
	if inner == nil {
		inner, least = slog.Default(), slog.LevelWarn
	}
	return slog.New(&tee{log: l, inner: inner.Handler(), least: least})
}

func (l *Log) lines() []Line {
	if l == nil {
		return []Line{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Line{}, l.last...)
}

// tee is the handler of Tee.
type tee struct {
	log   *Log
	inner slog.Handler
	least slog.Level // that goes to inner
	attrs string     // of WithAttrs
	group string     // of WithGroup
}

func (t *tee) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || level >= t.least && t.inner.Enabled(ctx, level)
}

func (t *tee) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		var b strings.Builder
		b.WriteString(r.Message)
		b.WriteString(t.attrs)
		r.Attrs(func(a slog.Attr) bool {
			b.WriteString(t.text(a))
			return true
		})
		t.log.mu.Lock()
		t.log.last = append(t.log.last, Line{r.Time, r.Level.String(), b.String()})
		t.log.last = t.log.last[max(0, len(t.log.last)-mostLines):]
		t.log.mu.Unlock()
	}
	if r.Level >= t.least && t.inner.Enabled(ctx, r.Level) {
		return t.inner.Handle(ctx, r)
	}
	return nil
}

// text is an attribute as slog's text form has it.
func (t *tee) text(a slog.Attr) string {
	value := a.Value.Resolve().String()
	if strings.ContainsAny(value, " =\"\n") {
		value = strconv.Quote(value)
	}
	return " " + t.group + a.Key + "=" + value
}

func (t *tee) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *t
	next.inner = t.inner.WithAttrs(attrs)
	for _, a := range attrs {
		next.attrs += t.text(a)
	}
	return &next
}

func (t *tee) WithGroup(name string) slog.Handler {
	next := *t
	next.inner = t.inner.WithGroup(name)
	next.group += name + "."
	return &next
}
