package debug

import (
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/internal/rankpage"
)

func init() { rankpage.Serve = serveRank }

// serveRank serves the page of a rank for pg.Init.
func serveRank(r rankpage.Rank) (logger *slog.Logger, stop func(), err error) {
	addr, err := rankAddr(r.Addr, r.LocalRank)
	if err != nil {
		return nil, nil, err
	}
	lines := new(Log)
	page := New(r.Recorder, Options{Rank: r.Rank, Size: r.Size, Log: lines})
	s, err := Serve(addr, page, Access{TLS: r.TLS, Secret: r.Secure, Token: Token(r.Token)})
	if err != nil {
		return nil, nil, err
	}
	if logger = r.Logger; logger == nil {
		logger = slog.Default()
	}
	if !strings.HasPrefix(addr, "unix:") { // the launcher's
		logger.Info("c10d: debug page of rank " + strconv.Itoa(r.Rank) + " at " + s.URL())
	}
	return lines.Tee(r.Logger), func() { s.Close() }, nil
}

// rankAddr is where a rank serves its page: local ranks have ports in a row.
func rankAddr(addr string, local int) (string, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return addr, nil // a socket, or an address that Serve refuses
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
