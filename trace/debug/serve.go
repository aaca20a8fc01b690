package debug

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/ownfile"
)

// Access says who may see a page, and how. The zero value lets everybody on this host see it.
type Access struct {
	// TLS makes the page speak HTTPS. It must ask for certificates of clients, unless there is a Token.
	TLS *tls.Config

	// Token is asked for: as password of HTTP's basic authentication, with any user name, or as bearer
	// token. It has at least 16 bytes. Without TLS it is sent in clear text.
	Token Token

	// Secret says that clear text may not leave the host: other addresses than loopback need TLS. An
	// address of this host needs TLS or Token.
	Secret bool
}

// Token is a secret. fmt, slog and encoding/json do not show it.
type Token = credentials.Token

// Limits of a server, before a client has shown anything.
const (
	headerTimeout  = 5 * time.Second
	idleTimeout    = time.Minute
	requestTimeout = maxProfile + 30*time.Second
	maxHeader      = 16 << 10
	maxConns       = 64
)

// Server serves a page.
type Server struct {
	http *http.Server
	ln   net.Listener
	url  string
	done chan struct{}
}

// Serve serves h at an address until Close: "host:port", where a port of 0 means any, or "unix:PATH",
// a socket for this user alone. An error says what is missing for an address.
func Serve(addr string, h http.Handler, a Access) (*Server, error) {
	s := &Server{done: make(chan struct{})}
	path, local := strings.CutPrefix(addr, "unix:")
	var err error
	if local {
		s.ln, err = listenUnix(path)
		s.url = addr
	} else {
		var open bool
		if open, err = a.check(addr); err == nil {
			s.ln, err = net.Listen("tcp", addr)
		}
		if err == nil {
			h = a.guard(h, open)
			s.url = "http://"
			if a.TLS != nil {
				s.url = "https://"
			}
			s.url += s.ln.Addr().String() + "/"
		}
	}
	if err != nil {
		return nil, fmt.Errorf("debug: page at %s: %w", addr, err)
	}
	s.ln = &bounded{Listener: s.ln, free: make(chan struct{}, maxConns)}
	if a.TLS != nil && !local {
		c := a.TLS.Clone()
		c.NextProtos = []string{"http/1.1"}
		if inner := c.GetConfigForClient; inner != nil {
			c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
				its, err := inner(hello)
				if its != nil {
					its = its.Clone()
					its.NextProtos = c.NextProtos
				}
				return its, err
			}
		}
		s.ln = tls.NewListener(s.ln, c)
	}
	s.http = &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, WriteTimeout: requestTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0),
	}
	go func() {
		defer close(s.done)
		_ = s.http.Serve(s.ln)
	}()
	return s, nil
}

// URL returns where the page is, or "unix:PATH".
func (s *Server) URL() string { return s.url }

// Close ends the server and its connections. It may be called more than once.
func (s *Server) Close() error {
	err := s.http.Close()
	<-s.done
	return err
}

// check refuses addresses that need more protection. It reports whether the page is open to everybody
// on the host.
func (a Access) check(addr string) (open bool, err error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false, errors.New("the address must be host:port or unix:PATH")
	}
	if err := credentials.CheckToken(a.Token); err != nil {
		return false, err
	}
	loopback := isLoopback(host)
	switch {
	case a.TLS != nil && a.Token == "" && !asks(a.TLS):
		return false, errors.New("the TLS configuration does not ask clients for certificates: set ClientAuth, or give a token")
	case a.TLS != nil:
		return false, nil
	case a.Secret && !loopback:
		return false, errors.New("the job has TLS, and the page would be in clear text: give certificates (C10D_TLS_CERT, C10D_TLS_KEY, C10D_TLS_CA), or a loopback address and a token. Browsers do not take part in a shared secret")
	case a.Secret && a.Token == "":
		return false, errors.New("the job has TLS, and everybody on this host could see the page: give a token (C10D_DEBUG_TOKEN_FILE), or certificates (C10D_TLS_CERT, C10D_TLS_KEY, C10D_TLS_CA). Browsers do not take part in a shared secret")
	case !loopback && a.Token == "":
		return false, errors.New("everybody in the network could see the page: give a loopback address such as 127.0.0.1:6060, certificates (C10D_TLS_CERT, C10D_TLS_KEY, C10D_TLS_CA) or a token (C10D_DEBUG_TOKEN_FILE)")
	}
	return a.Token == "", nil
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

// asks reports whether a server with this configuration checks the certificates of clients.
func asks(c *tls.Config) bool {
	return c.ClientAuth == tls.RequireAndVerifyClientCert ||
		c.ClientAuth == tls.RequireAnyClientCert && (c.VerifyConnection != nil || c.VerifyPeerCertificate != nil)
}

// guard refuses requests without the token, and closes their connections. A page that is open is shown under
// loopback names only: a site whose name leads to 127.0.0.1 does not get it.
func (a Access) guard(h http.Handler, open bool) http.Handler {
	want := sha256.Sum256([]byte(a.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if open {
			host := r.Host
			if name, _, err := net.SplitHostPort(host); err == nil {
				host = name
			}
			if !isLoopback(strings.Trim(host, "[]")) {
				w.Header().Set("Connection", "close")
				http.Error(w, "this page is for 127.0.0.1 and localhost, not for "+host, http.StatusForbidden)
				return
			}
		}
		if a.Token != "" {
			_, got, _ := r.BasicAuth()
			if bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
				got = bearer
			}
			if sum := sha256.Sum256([]byte(got)); subtle.ConstantTimeCompare(sum[:], want[:]) != 1 {
				w.Header().Set("Connection", "close")
				w.Header().Set("WWW-Authenticate", `Basic realm="c10d: the token as password", charset="UTF-8"`)
				http.Error(w, "this page needs the token of the job, as password", http.StatusUnauthorized)
				return
			}
		}
		h.ServeHTTP(w, r)
	})
}

// listenUnix listens on a socket that only this user can use. A socket that a process has left behind
// is replaced. One on which somebody listens is in use.
func listenUnix(path string) (net.Listener, error) {
	ln, err := ownfile.Listen(path)
	if err != nil && leftBehind(path) {
		_ = os.Remove(path)
		ln, err = ownfile.Listen(path)
	}
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// leftBehind reports whether there is a socket on which nobody listens.
func leftBehind(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return false
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		c.Close()
	}
	return err != nil
}

// bounded closes connections above a number.
type bounded struct {
	net.Listener
	free chan struct{} // has room for each connection
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.free <- struct{}{}:
			return &counted{Conn: c, ended: func() { <-b.free }}, nil
		default:
			c.Close()
		}
	}
}

// counted is a connection of a bounded listener.
type counted struct {
	net.Conn
	once  sync.Once
	ended func()
}

func (c *counted) Close() error {
	c.once.Do(c.ended)
	return c.Conn.Close()
}
