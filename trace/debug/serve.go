package debug

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/ownfile"
	"github.com/c10d-go/c10d/internal/strangers"
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

// Token is a secret. fmt, slog and encoding/json write "[hidden]" in its place, and nothing for an empty one. Convert it
// to a string to use it.
type Token string

// String returns "[hidden]", or "" for an empty token.
func (t Token) String() string { return credentials.Token(t).String() }

// Format implements fmt.Formatter for all verbs, also those that would show the bytes.
func (t Token) Format(f fmt.State, verb rune) { credentials.Token(t).Format(f, verb) }

// LogValue implements slog.LogValuer.
func (t Token) LogValue() slog.Value { return credentials.Token(t).LogValue() }

// MarshalText implements encoding.TextMarshaler.
func (t Token) MarshalText() ([]byte, error) { return credentials.Token(t).MarshalText() }

// Limits of a server.
const (
	wholeRequest  = 5 * time.Second // until a request has come, and before it for a TLS handshake
	wholeReply    = 90 * time.Second
	maxHeader     = 8 << 10
	mostStrangers = 256 // each costs up to 90 KB
	most          = 128 // requests, and replies
)

// Server serves a page.
type Server struct {
	http      *http.Server
	ln        net.Listener
	url       string
	done      chan struct{}
	strangers *strangers.List // connections without a turn
	turns     chan struct{}   // has room for each whole request with the token, until its reply begins
	replies   *strangers.List // connections with a reply
}

// Serve serves h at an address until Close: "host:port", where a port of 0 means any, or "unix:PATH",
// a socket for this user alone. An error says what is missing for an address. A connection has one
// request, whose body has at most 4 KiB, and its reply at most 90 seconds. Of more than 128 replies that
// nobody reads the oldest ends.
func Serve(addr string, h http.Handler, a Access) (*Server, error) {
	s := &Server{done: make(chan struct{}), strangers: strangers.Apart(mostStrangers), turns: make(chan struct{}, most), replies: strangers.Apart(most)}
	path, local := strings.CutPrefix(addr, "unix:")
	var open bool
	var err error
	if local {
		a = Access{}
		s.url = addr
		s.ln, err = listenUnix(path)
	} else if open, err = a.check(addr); err == nil {
		s.ln, err = net.Listen("tcp", addr)
	}
	if err != nil {
		return nil, fmt.Errorf("debug: page at %s: %w", addr, err)
	}
	if !local {
		s.url = "http://" + s.ln.Addr().String() + "/"
	}
	s.ln = &door{Listener: s.ln, strangers: s.strangers}
	if a.TLS != nil {
		s.url = "https" + s.url[len("http"):]
		c := a.TLS.Clone()
		c.NextProtos = []string{"http/1.1"}
		s.ln = tls.NewListener(s.ln, c)
	}
	s.http = &http.Server{
		Handler: s.admit(h, a, open), DisableGeneralOptionsHandler: true, ReadTimeout: wholeRequest, WriteTimeout: wholeRequest, MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, socket{}, socketOf(c))
		},
		ConnState: func(c net.Conn, to http.ConnState) {
			if to == http.StateClosed {
				s.strangers.Refuse(socketOf(c))
				s.replies.Remove(socketOf(c))
			}
		},
	}
	s.http.SetKeepAlivesEnabled(false)
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
	if err := credentials.CheckToken(credentials.Token(a.Token)); err != nil {
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

// admit passes on whole requests with the token. Their connections are strangers until there is a turn. A page that is
// open is shown under loopback names only: a site whose name leads to 127.0.0.1 does not get it.
func (s *Server) admit(h http.Handler, a Access, open bool) http.Handler {
	want := sha256.Sum256([]byte(a.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if open {
			host := r.Host
			if name, _, err := net.SplitHostPort(host); err == nil {
				host = name
			}
			if !isLoopback(strings.Trim(host, "[]")) {
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
				w.Header().Set("WWW-Authenticate", `Basic realm="c10d: the token as password", charset="UTF-8"`)
				http.Error(w, "this page needs the token of the job, as password", http.StatusUnauthorized)
				return
			}
		}
		c := r.Context().Value(socket{}).(*strangers.Handshake)
		c.Proved()
		body, err := io.ReadAll(io.LimitReader(r.Body, maxForm+1))
		if err != nil || len(body) > maxForm {
			http.Error(w, fmt.Sprintf("the body of a request has at most %d bytes, and comes within %v", maxForm, wholeRequest), http.StatusBadRequest)
			return
		}
		select {
		case s.turns <- struct{}{}:
		case <-r.Context().Done(): // further strangers have closed it
			return
		}
		if !s.strangers.Remove(c) {
			<-s.turns
			return
		}
		begins := sync.OnceFunc(func() {
			<-s.turns
			s.replies.Add(c, wholeReply)
		})
		defer begins()
		c.SetDeadline(time.Now().Add(wholeReply))
		r.Body = io.NopCloser(bytes.NewReader(body))
		h.ServeHTTP(&reply{w, begins}, r)
	})
}

// reply says when it begins.
type reply struct {
	http.ResponseWriter
	begins func()
}

func (r *reply) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *reply) Write(b []byte) (int, error) {
	r.begins()
	return r.ResponseWriter.Write(b)
}

// socket is the key of a request's connection, without its TLS.
type socket struct{}

func socketOf(c net.Conn) net.Conn {
	if t, ok := c.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c
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

// door enters those who connect in the list of strangers.
type door struct {
	net.Listener
	strangers *strangers.List
	accepted  int
}

func (d *door) Accept() (net.Conn, error) {
	// A flood of strangers would close a visitor before its request is read: each stays for 15 ms at least.
	if d.accepted++; d.accepted%(mostStrangers/4) == 0 && d.strangers.Len() == mostStrangers {
		time.Sleep(5 * time.Millisecond)
	}
	c, err := d.Listener.Accept()
	if err != nil {
		return nil, err
	}
	h := strangers.InHandshake(c)
	d.strangers.Add(h, wholeRequest)
	return h, nil
}
