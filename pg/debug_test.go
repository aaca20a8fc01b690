package pg_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/trace/debug"
)

// logged is a log whose text can be read while it grows.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) url() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return regexp.MustCompile(`https?://[^/]+/`).FindString(l.text.String())
}

// paged begins the default group of rank 0 of size, with a page.
func paged(t *testing.T, size int, o pg.InitOptions) (url string, made <-chan *pg.ProcessGroup) {
	t.Helper()
	lines, groups := new(logged), make(chan *pg.ProcessGroup, 1)
	o.Rank, o.Size, o.Logger = 0, size, slog.New(slog.NewTextHandler(lines, nil))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	failed := make(chan error, 1)
	at := freeport.Loopback(t)
	t.Cleanup(func() {
		cancel()
		for g := range groups { // until Init has returned
			g.Close()
		}
	})
	go func() {
		defer close(groups)
		g, err := pg.Init(ctx, "tcp://"+at, o)
		if err != nil {
			failed <- err
			return
		}
		groups <- g
	}()
	require.Eventually(t, func() bool {
		select {
		case err := <-failed:
			require.NoError(t, err)
		default:
		}
		return lines.url() != ""
	}, time.Minute, 10*time.Millisecond)
	return lines.url(), groups
}

func rankPage(t *testing.T, url string, transport *http.Transport) (_ *debug.Status, err error) {
	defer must.Catch(&err)
	t.Helper()
	transport.DisableKeepAlives = true
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, url+"?format=json", nil))
	got := must.Get(transport.RoundTrip(r))
	defer got.Body.Close()
	s := new(debug.Status)
	return s, json.NewDecoder(got.Body).Decode(s)
}

// TestDebugPage: a rank has its page until it is closed.
func TestDebugPage(t *testing.T) {
	t.Setenv("C10D_DEBUG_ADDR", "127.0.0.1:0")
	t.Setenv("C10D_TRACE_STACKS", "1")
	url, made := paged(t, 1, pg.InitOptions{})
	g := <-made
	require.NotNil(t, g)
	require.NoError(t, pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())))
	s, err := rankPage(t, url, new(http.Transport))
	require.NoError(t, err)
	require.Equal(t, 1, s.Size)
	require.Len(t, s.Recent, 1)
	require.Contains(t, s.Recent[0].Site, "debug_test.go:")
	require.NotEmpty(t, s.Groups[0].Explain)
	require.NoError(t, g.Close())
	require.Error(t, must.Err(rankPage(t, url, new(http.Transport))), "the page outlives the group")
}

// TestDebugPageBeforeTheGroup: a rank that waits for others has its page already, with its log.
func TestDebugPageBeforeTheGroup(t *testing.T) {
	t.Setenv("C10D_DEBUG_ADDR", "127.0.0.1:0")
	url, made := paged(t, 2, pg.InitOptions{})
	s := must.Get(rankPage(t, url, new(http.Transport)))
	require.Equal(t, 2, s.Size)
	require.Contains(t, s.State, "not made yet")
	select {
	case <-made:
		t.Error("the group has been made without rank 1")
	default:
	}
}

// TestDebugPageAccess: a page is protected as the job is, and one that strangers could see is refused.
func TestDebugPageAccess(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(secret))
	for name, c := range map[string]struct {
		addr string
		o    pg.InitOptions
		want string
	}{
		"all interfaces": {"0.0.0.0:0", pg.InitOptions{}, "environment variable C10D_DEBUG_ADDR: debug: page at 0.0.0.0:0: everybody in the network could see the page"},
		"secret":         {"127.0.0.1:0", pg.InitOptions{Security: pg.Security{Secret: secret}}, "give a token (C10D_DEBUG_TOKEN_FILE), or certificates"},
		"no address":     {"here", pg.InitOptions{}, "must be host:port or unix:PATH"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("C10D_DEBUG_ADDR", c.addr)
			c.o.Size = 1
			require.ErrorContains(t, must.Err(pg.Init(t.Context(), "tcp://"+freeport.Loopback(t), c.o)), c.want)
		})
	}

	t.Run("certificates", func(t *testing.T) {
		t.Setenv("C10D_DEBUG_ADDR", "0.0.0.0:0")
		dir := t.TempDir()
		a, _, err := credentials.OpenAuthority(dir)
		require.NoError(t, err)
		require.NoError(t, a.Issue(dir, "rank0", []string{"127.0.0.1"}, time.Now().Add(time.Hour)))
		files := credentials.InDir(dir, "rank0")
		_, client, err := files.Configs()
		require.NoError(t, err)
		url, made := paged(t, 1, pg.InitOptions{Security: pg.Security(files)})
		g := <-made
		require.NotNil(t, g)
		defer g.Close()
		_, port, err := net.SplitHostPort(strings.Trim(strings.TrimPrefix(url, "https://"), "/"))
		require.NoError(t, err)
		url = "https://127.0.0.1:" + port + "/"
		must.Get(rankPage(t, url, &http.Transport{TLSClientConfig: client}))
		stranger := client.Clone()
		stranger.GetClientCertificate = nil
		_, err = rankPage(t, url, &http.Transport{TLSClientConfig: stranger})
		require.ErrorContains(t, err, "certificate required")
	})
}

// TestDebugPort: local ranks have ports in a row, and one that is in use costs the page alone.
func TestDebugPort(t *testing.T) {
	taken := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer taken.Close()
	t.Setenv("C10D_DEBUG_ADDR", taken.Addr().String())
	lines := new(logged)
	o := pg.InitOptions{Size: 1}
	o.Logger = slog.New(slog.NewTextHandler(lines, nil))
	require.NoError(t, must.Get(pg.Init(t.Context(), "tcp://"+freeport.Loopback(t), o)).Close())
	require.Contains(t, lines.text.String(), "no debug page of rank 0")
}
