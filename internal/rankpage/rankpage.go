// Package rankpage is where trace/debug registers the debug page of a rank, and where pg.Init finds it.
// So pg has a page, and an HTTP server, only in programs that import trace/debug.
package rankpage

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"strings"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/trace"
)

// Rank is a rank that has to have a page.
type Rank struct {
	Addr       string // HOST:PORT or unix:PATH
	Rank, Size int
	LocalRank  int // of the host: the page is at PORT+LocalRank
	Recorder   *trace.Recorder
	Logger     *slog.Logger // nil if the program has none
	TLS        *tls.Config  // of the page; nil without certificates
	Secure     bool         // the job has TLS, from certificates or a secret
	Token      credentials.Token
}

// Serve serves the page of r until stop is called. It returns the logger that the rank has from now on.
// The error is a *net.OpError if the address is in use. The init of trace/debug sets Serve; in programs
// without that package it is nil.
var Serve func(r Rank) (logger *slog.Logger, stop func(), err error)

// ErrNotImported is the reason why a rank has no page.
var ErrNotImported = errors.New(`its program lacks import _ "github.com/c10d-go/c10d/trace/debug"`)

// Decline tells c10d run that a rank has no page because of ErrNotImported. It puts an empty file where
// the page would have its socket. It does nothing for an address other than unix:PATH.
func Decline(addr string) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		_ = os.WriteFile(path, nil, 0o600) // without it the job's page says less
	}
}

// Declined reports whether the rank whose page would be at path has called Decline.
func Declined(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}
