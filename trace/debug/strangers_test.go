package debug_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/trace/debug"
)

// patience bounds what must come at once.
const patience = 30 * time.Second

// large is a page that fits in no buffer of a socket.
var large = func() http.Handler {
	text := bytes.Repeat([]byte("x"), 16<<20)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(text) })
}()

// stopping is a connection that sends so many bytes, and then none.
type stopping struct {
	net.Conn
	left int
}

func (s *stopping) Write(b []byte) (int, error) {
	n := min(len(b), s.left)
	s.left -= n
	if _, err := s.Conn.Write(b[:n]); err != nil {
		return 0, err
	}
	if n < len(b) {
		return n, errors.New("stopped")
	}
	return n, nil
}

// padded is a client with more certificates than one: n bytes of them or more.
func padded(c *tls.Config, n int) *tls.Config {
	c = c.Clone()
	get := c.GetClientCertificate
	c.GetClientCertificate = func(i *tls.CertificateRequestInfo) (_ *tls.Certificate, err error) {
		defer must.Catch(&err)
		pair := must.Get(get(i))
		more := *pair
		more.Certificate = append([][]byte{}, pair.Certificate...)
		for size := 0; size < n; size += len(pair.Certificate[0]) {
			more.Certificate = append(more.Certificate, pair.Certificate[0])
		}
		return &more, nil
	}
	return c
}

// TestStrangersKeepNobodyOut: the owner sees the page while strangers hold connections in all ways.
func TestStrangersKeepNobodyOut(t *testing.T) {
	server, client, err := certificates(t).Configs()
	require.NoError(t, err)
	unasked := server.Clone()
	unasked.GetConfigForClient, unasked.VerifyConnection, unasked.ClientAuth = nil, nil, tls.NoClientCert
	withToken := func(r *http.Request) { r.SetBasicAuth("me", token) }
	plainly := func(text string) func(net.Conn) {
		return func(c net.Conn) { io.WriteString(c, text) }
	}
	inTLS := func(config *tls.Config, bytes int, text string) func(net.Conn) {
		return func(c net.Conn) {
			if s := tls.Client(&stopping{c, bytes}, config); s.Handshake() == nil {
				io.WriteString(s, text)
			}
		}
	}
	const all = 1 << 30
	client = client.Clone()
	client.ServerName = "127.0.0.1"
	modes := map[string]struct {
		addr   string
		access debug.Access
		page   http.Handler
		change func(*http.Request)
		holds  map[string]func(net.Conn)
	}{
		"token": {"127.0.0.1:0", debug.Access{Token: token}, hello, withToken, map[string]func(net.Conn){
			"silent":      plainly(""),
			"half header": plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
			"no body":     plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"),
			"half chunk":  plainly("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"),
			"no token":    plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
		}},
		"open": {"127.0.0.1:0", debug.Access{}, hello, nil, map[string]func(net.Conn){
			"silent":      plainly(""),
			"half header": plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
			"no body":     plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"),
			"idle":        plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n"),
			"other site":  plainly("GET / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000\r\n\r\n"),
		}},
		"open, of a large page": {"127.0.0.1:0", debug.Access{}, large, nil, map[string]func(net.Conn){
			"reads nothing": plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
		}},
		"socket": {"unix:" + filepath.Join(t.TempDir(), "page"), debug.Access{}, hello, nil, map[string]func(net.Conn){
			"silent":  plainly(""),
			"no body": plainly("GET / HTTP/1.1\r\nHost: rank\r\nContent-Length: 1000\r\n\r\n"),
		}},
		"certificates": {"127.0.0.1:0", debug.Access{TLS: server}, hello, nil, map[string]func(net.Conn){
			"silent":             plainly(""),
			"half hello":         inTLS(client, 100, ""),
			"half certificate":   inTLS(padded(client, 64<<10), 12<<10, ""),
			"large certificate":  inTLS(padded(client, 64<<10), all, ""),
			"clear text":         plainly("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
			"handshake and none": inTLS(client, all, ""),
		}},
		"token, over TLS": {"127.0.0.1:0", debug.Access{TLS: unasked, Token: token}, hello, withToken, map[string]func(net.Conn){
			"silent":    plainly(""),
			"handshake": inTLS(client, all, ""),
			"no body":   inTLS(client, all, "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"),
		}},
	}
	for name, m := range modes {
		for way, hold := range m.holds {
			t.Run(name+"/"+way, func(t *testing.T) {
				s := must.Get(debug.Serve(m.addr, m.page, m.access))
				defer s.Close()
				scheme, address, _ := strings.Cut(s.URL(), "://")
				network, target := "tcp", s.URL()
				if path, local := strings.CutPrefix(s.URL(), "unix:"); local {
					network, address, scheme, target = "unix", path, "http", "http://rank/"
				}
				dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, network, strings.TrimSuffix(address, "/"))
				}
				for range 100 {
					c := must.Get(dial(t.Context(), "", ""))
					defer c.Close()
					c.SetDeadline(time.Now().Add(patience))
					hold(c)
				}
				transport := &http.Transport{DialContext: dial}
				if scheme == "https" {
					transport.TLSClientConfig = client
				}
				code, text, err := ask(t, target, transport, m.change)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, code)
				require.NotEmpty(t, text)
			})
		}
	}
}

// TestStrangersCloseNoReply: more strangers than have places close each other, and not who has shown the token.
func TestStrangersCloseNoReply(t *testing.T) {
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	s, err := debug.Serve("127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-release
		hello(w, r)
	}), debug.Access{Token: token})
	require.NoError(t, err)
	defer s.Close()
	got := make(chan string, 1)
	go func() {
		_, text, err := ask(t, s.URL(), new(http.Transport), func(r *http.Request) { r.SetBasicAuth("me", token) })
		if err != nil {
			text = err.Error()
		}
		got <- text
	}()
	<-entered
	addr := strings.TrimSuffix(strings.TrimPrefix(s.URL(), "http://"), "/")
	var first net.Conn
	for i := range 257 {
		c := must.Get(net.Dial("tcp", addr))
		defer c.Close()
		if i == 0 {
			first = c
		}
	}
	first.SetReadDeadline(time.Now().Add(patience))
	_, err = first.Read(make([]byte, 1))
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	close(release)
	require.Equal(t, "hello", <-got)
}

// TestReplies: a server has at most 128 replies under way. One more ends the oldest. As many requests wait for their
// reply, and one more waits for its turn.
func TestReplies(t *testing.T) {
	const most = 128
	for name, begun := range map[string]bool{"requests": false, "replies": true} {
		t.Run(name, func(t *testing.T) {
			release, entered := make(chan struct{}), make(chan struct{}, 2*most)
			s, err := debug.Serve("127.0.0.1:0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if begun {
					hello(w, r)
					http.NewResponseController(w).Flush()
				}
				entered <- struct{}{}
				if <-release; !begun {
					hello(w, r)
				}
			}), debug.Access{})
			require.NoError(t, err)
			defer s.Close()
			ended := make([]chan error, most+1)
			for i := range ended {
				end := make(chan error, 1)
				ended[i] = end
				go func() {
					_, text, err := ask(t, s.URL(), new(http.Transport), nil)
					if err == nil && text != "hello" {
						err = errors.New(text)
					}
					end <- err
				}()
				if begun || i < most {
					<-entered
				}
			}
			if begun {
				require.Error(t, <-ended[0])
				ended = ended[1:]
			}
			close(release)
			for _, e := range ended {
				require.NoError(t, <-e)
			}
		})
	}
}

// TestLargeCertificates: a client that sends more than 16 KiB before the end of its handshake is refused, however good
// its certificates are.
func TestLargeCertificates(t *testing.T) {
	server, client, err := certificates(t).Configs()
	require.NoError(t, err)
	s := must.Get(debug.Serve("127.0.0.1:0", hello, debug.Access{TLS: server}))
	defer s.Close()
	_, text, err := ask(t, s.URL(), &http.Transport{TLSClientConfig: padded(client, 4<<10)}, nil)
	require.NoError(t, err)
	require.Equal(t, "hello", text)
	_, _, err = ask(t, s.URL(), &http.Transport{TLSClientConfig: padded(client, 16<<10)}, nil)
	require.Error(t, err)
}

// TestLargeRequests: a body has at most 4 KiB, and a header 12 KiB.
func TestLargeRequests(t *testing.T) {
	s := must.Get(debug.Serve("127.0.0.1:0", hello, debug.Access{}))
	defer s.Close()
	for name, change := range map[string]func(*http.Request){
		"body": func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(strings.Repeat("x", 5<<10))), 5<<10
		},
		"chunked": func(r *http.Request) {
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(strings.Repeat("x", 5<<10))), -1
		},
		"header": func(r *http.Request) { r.Header.Set("Cookie", strings.Repeat("x", 13<<10)) },
	} {
		t.Run(name, func(t *testing.T) {
			code, text, err := ask(t, s.URL(), new(http.Transport), change)
			require.True(t, err != nil || code >= http.StatusBadRequest, "%d %s", code, text)
		})
	}
	_, text, err := ask(t, s.URL(), new(http.Transport), func(r *http.Request) { r.Header.Set("Cookie", strings.Repeat("x", 8<<10)) })
	require.NoError(t, err)
	require.Equal(t, "hello", text)
	s.Close()
	for until := time.Now().Add(patience); goleak.Find() != nil; { // net/http keeps some that it refuses for half a second
		require.True(t, time.Now().Before(until))
	}
}
