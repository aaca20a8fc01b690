package pg

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/trace/debug"
)

// debugPage serves the page of this rank where the environment asks for it, until stop is called. The
// page shows the lines of o.Logger, which debugPage replaces. A port that is in use costs the page and
// not the job.
func debugPage(o *InitOptions, env launch.Env, getenv func(string) string) (stop func(), err error) {
	addr := getenv(launch.DebugVariable)
	if addr == "" {
		return func() {}, nil
	}
	if addr, err = debugAddr(addr, env.LocalRank); err != nil {
		return nil, fmt.Errorf("environment variable %s: %w", launch.DebugVariable, err)
	}
	access, err := debugAccess(o, getenv)
	if err != nil {
		return nil, fmt.Errorf("environment variable %s: %w", launch.DebugTokenVariable, err)
	}
	lines, logger := new(debug.Log), o.Logger
	if logger == nil {
		logger = slog.Default()
	}
	page := debug.New(o.Recorder, debug.Options{Rank: env.Rank, Size: env.Size, Log: lines})
	s, err := debug.Serve(addr, page, access)
	var busy *net.OpError
	if errors.As(err, &busy) {
		logger.Warn("c10d: no debug page of rank "+strconv.Itoa(env.Rank), "err", err)
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("environment variable %s: %w", launch.DebugVariable, err)
	}
	o.Logger = lines.Tee(o.Logger)
	if !strings.HasPrefix(addr, "unix:") { // the launcher's
		logger.Info("c10d: debug page of rank " + strconv.Itoa(env.Rank) + " at " + s.URL())
	}
	return func() { s.Close() }, nil
}

// debugAddr is where a rank serves its page: local ranks have ports in a row.
func debugAddr(addr string, local int) (string, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return addr, nil // a socket, or an address that debug.Serve refuses
	}
	port, err := strconv.Atoi(text)
	if err != nil || port == 0 || local <= 0 {
		return addr, nil
	}
	if port += local; port > 65535 {
		return "", fmt.Errorf("%s: local rank %d would have port %d", addr, local, port)
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// debugAccess protects the page with the job's certificates and the page's token.
func debugAccess(o *InitOptions, getenv func(string) string) (debug.Access, error) {
	a := debug.Access{TLS: o.TLS, Secret: o.TLS != nil}
	if o.secretTLS {
		a.TLS = nil // browsers have no part in a secret
	}
	var err error
	_, a.Token, err = credentials.Files{Token: getenv(launch.DebugTokenVariable)}.Load()
	return a, err
}
