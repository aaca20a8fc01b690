//go:build !unix

package trace

import "log/slog"

// DumpOnSignal does nothing: this system has no SIGUSR1.
func (r *Recorder) DumpOnSignal(*slog.Logger) (stop func()) { return func() {} }
