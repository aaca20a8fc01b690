// Package waiting writes log lines while a rank waits for others.
//
//	stop := waiting.Start(ctx, logger, func(ctx context.Context) (string, []slog.Attr) {
//		return "waiting for rank 3", nil
//	})
//	defer stop()
//
// The first line comes after 10 s. The pause to the next one doubles each time, up to 5
// minutes, so a wait of half an hour writes nine lines. A wait that ends sooner writes none.
package waiting

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"time"
)

const (
	first   = 10 * time.Second
	longest = 5 * time.Minute

	// reportLimit bounds one Report, which may ask a store that does not answer.
	reportLimit = 5 * time.Second
)

type key struct{}

// WithFirst returns a context whose waits write their first line after d. It is for tests.
func WithFirst(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, key{}, d)
}

// First returns when the first line of a wait under ctx comes.
func First(ctx context.Context) time.Duration {
	if d, ok := ctx.Value(key{}).(time.Duration); ok {
		return d
	}
	return first
}

// Next returns the pause that follows a pause.
func Next(pause time.Duration) time.Duration { return min(2*pause, longest) }

// Report returns the text and attributes of a line about a wait. Its context ends with the wait.
// An empty text means no line.
type Report func(ctx context.Context) (text string, attrs []slog.Attr)

// Start writes report's lines until ctx ends or stop is called. Each line has how long the wait
// has lasted and ctx's deadline. A nil log is slog.Default(). stop returns once no report runs.
func Start(ctx context.Context, log *slog.Logger, report Report) (stop func()) {
	begun := time.Now()
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(ended)
		pause := First(ctx)
		t := time.NewTimer(pause)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			limited, cancel := context.WithTimeout(ctx, reportLimit)
			text, attrs := report(limited)
			cancel()
			until, _ := ctx.Deadline()
			if text != "" && ctx.Err() == nil {
				Write(ctx, log, text, attrs, begun, until)
			}
			pause = Next(pause)
			t.Reset(pause)
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// Write writes one line, "c10d: " and text, about a wait that began at begun and ends at until,
// unless that is zero.
func Write(ctx context.Context, log *slog.Logger, text string, attrs []slog.Attr, begun, until time.Time) {
	if log == nil {
		log = slog.Default()
	}
	attrs = append(attrs, slog.Duration("waited", time.Since(begun).Round(time.Second)))
	if !until.IsZero() {
		attrs = append(attrs, slog.Time("until", until.Round(time.Second)))
	}
	log.LogAttrs(ctx, slog.LevelWarn, "c10d: "+text, attrs...)
}

// most is how many ranks a line lists.
const most = 8

// Ranks lists ranks as "rank 2", "ranks 1 and 2" or "ranks 0, 1, 2 and 9 more".
func Ranks(ranks []int) string {
	var b strings.Builder
	b.WriteString("rank")
	if len(ranks) != 1 {
		b.WriteString("s")
	}
	for i, r := range ranks {
		switch {
		case i == most:
			b.WriteString(" and " + strconv.Itoa(len(ranks)-most) + " more")
			return b.String()
		case i > 0 && i == len(ranks)-1:
			b.WriteString(" and")
		case i > 0:
			b.WriteString(",")
		}
		b.WriteString(" " + strconv.Itoa(r))
	}
	return b.String()
}

// Some joins descriptions of several ranks by "; ", and cuts long lists.
func Some(each []string) string {
	if len(each) > most {
		return strings.Join(each[:most], "; ") + "; and " + strconv.Itoa(len(each)-most) + " more"
	}
	return strings.Join(each, "; ")
}
