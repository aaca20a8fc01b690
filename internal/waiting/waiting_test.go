package waiting

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// plain writes lines without their time.
func plain(to *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var at []time.Duration
		begun := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
		defer cancel()
		stop := Start(ctx, slog.New(slog.DiscardHandler), func(context.Context) (string, []slog.Attr) {
			at = append(at, time.Since(begun))
			return "waiting", nil
		})
		<-ctx.Done()
		stop()
		const s = time.Second
		require.Equal(t, []time.Duration{10 * s, 30 * s, 70 * s, 150 * s, 310 * s, 610 * s, 910 * s, 1210 * s, 1510 * s}, at)
	})
}

func TestLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stop := Start(ctx, plain(&b), func(context.Context) (string, []slog.Attr) {
			return "waiting for rank 1", []slog.Attr{slog.Int("rank", 0)}
		})
		time.Sleep(11 * time.Second)
		stop()
		time.Sleep(time.Minute)
		until := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC).Local().Format("2006-01-02T15:04:05.000Z07:00")
		require.Equal(t, `level=WARN msg="c10d: waiting for rank 1" rank=0 waited=10s until=`+until, strings.TrimSpace(b.String()))
	})
}

// A wait that ends early writes nothing, and neither does one whose report has nothing to say.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		stop := Start(t.Context(), plain(&b), func(context.Context) (string, []slog.Attr) { return "waiting", nil })
		time.Sleep(9 * time.Second)
		stop()
		stop = Start(t.Context(), plain(&b), func(context.Context) (string, []slog.Attr) { return "", nil })
		time.Sleep(time.Minute)
		stop()
		require.Empty(t, b.String())
	})
}

// Stop ends a report that waits for its context.
func TestStopEndsReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		stop := Start(t.Context(), plain(&b), func(ctx context.Context) (string, []slog.Attr) {
			<-ctx.Done()
			return "late", nil
		})
		time.Sleep(10*time.Second + 1)
		stop()
		require.Empty(t, b.String())
	})
}

func TestRanks(t *testing.T) {
	many := make([]int, 100)
	for i := range many {
		many[i] = i
	}
	for want, ranks := range map[string][]int{
		"rank 3":           {3},
		"ranks 1 and 2":    {1, 2},
		"ranks 1, 2 and 4": {1, 2, 4},
		"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more": many,
	} {
		require.Equal(t, want, Ranks(ranks))
	}
	texts := make([]string, 10)
	for i := range texts {
		texts[i] = fmt.Sprint("r", i)
	}
	require.Equal(t, "r0; r1; r2; r3; r4; r5; r6; r7; and 2 more", Some(texts))
	require.Equal(t, "r0; r1", Some(texts[:2]))
}
