//go:build unix

package trace

import (
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

// DumpOnSignal calls Dump whenever the process gets SIGUSR1, until stop is called. It logs the name
// of the file, or why there is none, with l, or with slog.Default() if l is nil. Without DumpOnSignal
// or C10D_TRACE, Go programs ignore SIGUSR1. On Windows DumpOnSignal does nothing.
func (r *Recorder) DumpOnSignal(l *slog.Logger) (stop func()) {
	if l == nil {
		l = slog.Default()
	}
	asked, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		defer close(done)
		for range asked {
			if name, err := r.Dump(); err != nil {
				l.Error("no dump of the last operations", "error", err)
			} else {
				l.Warn("dumped the last operations", "file", name)
			}
		}
	}()
	return func() {
		signal.Stop(asked)
		close(asked)
		<-done
	}
}
