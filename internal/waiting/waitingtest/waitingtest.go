// Package waitingtest helps tests that read what a logger has written.
package waitingtest

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Log is the lines that its logger has written. The zero value is empty.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

// String returns all lines.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Lines returns the lines one by one.
func (l *Log) Lines() []string {
	return strings.FieldsFunc(l.String(), func(r rune) bool { return r == '\n' })
}

// Logger returns a logger that writes here. It leaves out the time of each line, and writes the time
// "until" in seconds, in UTC.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch a.Key {
		case slog.TimeKey:
			return slog.Attr{}
		case "until":
			return slog.String("until", a.Value.Time().UTC().Format(time.RFC3339))
		}
		return a
	}}))
}
