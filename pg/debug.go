package pg

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/rankpage"
)

// debugPage serves the page of this rank where the environment asks for it, until stop is called. The
// page shows the lines of o.Logger, which debugPage replaces. A port that is in use costs the page and
// not the job, and so does a program without trace/debug.
func debugPage(o *InitOptions, env launch.Env, getenv func(string) string) (stop func(), err error) {
	addr := getenv(launch.DebugVariable)
	if addr == "" {
		return func() {}, nil
	}
	none := func(why error) (func(), error) {
		logger := o.Logger
		if logger == nil {
			logger = slog.Default()
		}
		logger.Warn("c10d: no debug page of rank "+strconv.Itoa(env.Rank), "err", why)
		return func() {}, nil
	}
	if rankpage.Serve == nil {
		rankpage.Decline(addr)
		return none(rankpage.ErrNotImported)
	}
	token, err := credentials.LoadToken(getenv(launch.DebugTokenVariable))
	if err != nil {
		return nil, fmt.Errorf("environment variable %s: %w", launch.DebugTokenVariable, err)
	}
	r := rankpage.Rank{
		Addr: addr, Rank: env.Rank, Size: env.Size, LocalRank: env.LocalRank,
		Recorder: o.Recorder, Logger: o.Logger, TLS: o.TLS, Secure: o.TLS != nil, Token: token,
	}
	if o.secretTLS {
		r.TLS = nil // browsers have no part in a secret
	}
	logger, stop, err := rankpage.Serve(r)
	var busy *net.OpError
	switch {
	case errors.As(err, &busy):
		return none(err)
	case err != nil:
		return nil, fmt.Errorf("environment variable %s: %w", launch.DebugVariable, err)
	}
	o.Logger = logger
	return stop, nil
}
