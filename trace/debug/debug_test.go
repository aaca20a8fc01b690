package debug_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/trace/debug"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stuck calls f on rank 0 of three, while rank 2 has not called the second all_reduce.
func stuck(t *testing.T, o trace.Options, f func(r *trace.Recorder)) {
	j := pgtest.NewJob(3)
	defer j.Close()
	looked := make(chan struct{})
	var ranks sync.WaitGroup
	defer ranks.Wait()
	for rank := range j.Size {
		ranks.Go(func() {
			options := j.Options()
			if rank == 0 {
				options.Recorder = trace.New(o)
				defer close(looked)
			}
			g, err := pg.New(t.Context(), j.Store, rank, j.Size, options)
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			x := make([]float32, 6)
			if err := pg.Wait(g.AllReduce(t.Context(), pg.Slice(x), pg.Sum())); err != nil {
				t.Error(err)
			}
			if rank == 2 {
				<-looked
				return // the others' all_reduce fails
			}
			v, err := tensor.Of(x, len(x))
			if err == nil {
				var w *work.Work
				if w, err = g.AllReduce(t.Context(), v, pg.Sum()); err == nil && rank == 0 {
					f(options.Recorder)
				} else if err == nil {
					_ = w.Wait(t.Context())
				}
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func get(t *testing.T, h http.Handler, target string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
	return w
}

func post(t *testing.T, h http.Handler, target string, form url.Values) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, target, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func statusOf(t *testing.T, h http.Handler) *debug.Status {
	t.Helper()
	s := new(debug.Status)
	require.NoError(t, json.Unmarshal(get(t, h, "/?format=json").Body.Bytes(), s))
	return s
}

// TestRank: the page of a stuck rank says what it waits for, and its buttons work.
func TestRank(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "rank_")
	stuck(t, trace.Options{Prefix: prefix, Stacks: true}, func(r *trace.Recorder) {
		p := debug.New(r)
		var s *debug.Status
		for s = statusOf(t, p); len(s.Groups[0].Probes) == 0 || len(s.Groups[0].Probes[0].Waits[0].Ranks) != 1; {
			s = statusOf(t, p) // rank 1 may not have called it yet
			if t.Context().Err() != nil {
				return
			}
		}
		wait := s.Groups[0].Probes[0].Waits[0]
		if s.Rank != 0 || s.Size != 3 || len(s.Pending) != 1 || len(s.Recent) != 1 || wait.Ranks[0] != 2 ||
			!strings.Contains(wait.Why[0], "rank 2 has not called it: it has issued 1 collectives") {
			t.Errorf("%+v", s)
		}
		if o := s.Pending[0]; o.Op != "all_reduce" || o.Collective != 2 || o.Bytes != 24 || !strings.Contains(o.Site, "debug_test.go:") || o.State == "done" {
			t.Errorf("%+v", o)
		}
		page := get(t, p, "/?refresh=2")
		for _, want := range []string{"Rank 0 of 3", "all_reduce", "24 B float32 [6]", "late", "Routes of gloo", `content="2"`, s.Token} {
			if !strings.Contains(page.Body.String(), want) {
				t.Errorf("the page lacks %q", want)
			}
		}
		if csp := page.Header().Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Errorf("policy %q", csp)
		}

		for name, c := range map[string]struct {
			form url.Values
			code int
			want string
		}{
			"no token":      {url.Values{"do": {"dump"}}, http.StatusForbidden, "load the page again"},
			"another token": {url.Values{"do": {"dump"}, "token": {"x"}}, http.StatusForbidden, "load the page again"},
			"unknown":       {url.Values{"do": {"x"}, "token": {s.Token}}, http.StatusBadRequest, "it must be dump, download or goroutines"},
			"large":         {url.Values{"do": {strings.Repeat("x", 1<<16)}}, http.StatusBadRequest, "too large"},
			"dump":          {url.Values{"do": {"dump"}, "token": {s.Token}}, http.StatusOK, "The last operations are in " + prefix + "0"},
			"goroutines":    {url.Values{"do": {"goroutines"}, "token": {s.Token}}, http.StatusOK, "debug_test.stuck"},
		} {
			w := post(t, p, "/", c.form)
			if w.Code != c.code || !strings.Contains(w.Body.String(), c.want) {
				t.Errorf("%s: %d %s", name, w.Code, w.Body)
			}
		}
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/", nil))
		if w.Code != http.StatusMethodNotAllowed {
			t.Errorf("PUT: %d", w.Code)
		}
		f, err := trace.ReadFile(prefix + "0")
		if err != nil || len(f.Entries) != 2 {
			t.Errorf("the dump: %v", err)
		}
	})
}

// TestDownload: without a prefix the dump is a download.
func TestDownload(t *testing.T) {
	r := trace.New()
	r.Join(trace.Member{Name: "0", Rank: 1, Ranks: []int{4, 7}})
	p := debug.New(r)
	token := statusOf(t, p).Token
	w := post(t, p, "/", url.Values{"do": {"dump"}, "token": {token}})
	require.Equal(t, `attachment; filename="rank_7"`, w.Header().Get("Content-Disposition"))
	name := filepath.Join(t.TempDir(), "dump")
	require.NoError(t, os.WriteFile(name, w.Body.Bytes(), 0o600))
	require.Equal(t, 7, must.Get(trace.ReadFile(name)).Rank)
}

// TestBlockedGroup: backends that do not answer, and ones that panic, cost the page their part only.
func TestBlockedGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := trace.New()
		release := make(chan struct{})
		ended := make(chan struct{})
		r.Join(trace.Member{Name: "0", Ranks: []int{0, 1}, Probe: func() []backend.Probe {
			defer close(ended)
			<-release
			return nil
		}})
		r.Join(trace.Member{Name: "1", Ranks: []int{0, 1}, Probe: func() []backend.Probe { panic("a defect") }})
		p := debug.New(r)
		s := statusOf(t, p)
		require.True(t, s.Groups[0].Busy)
		require.False(t, s.Groups[1].Busy)
		require.Contains(t, get(t, p, "/").Body.String(), "have not answered within a second")
		close(release)
		<-ended
	})
}

// TestStates: ranks without groups.
func TestStates(t *testing.T) {
	lines := new(debug.Log)
	var passed bytes.Buffer
	l := lines.Tee(slog.New(slog.NewTextHandler(&passed, &slog.HandlerOptions{Level: slog.LevelWarn}))).With("rank", 2)
	l.Info("made", "group", "a b")
	l.WithGroup("x").Warn("waiting for rank 1", "n", 3)
	require.NotContains(t, passed.String(), "made")
	require.Contains(t, passed.String(), "waiting for rank 1")
	r := trace.New()
	p := debug.New(r, debug.Options{Rank: 2, Size: 4, Log: lines})
	s := statusOf(t, p)
	require.Equal(t, 2, s.Rank)
	require.Contains(t, s.State, "not made yet")
	require.Equal(t, `made rank=2 group="a b"`, s.Log[0].Text)
	require.Equal(t, "waiting for rank 1 rank=2 x.n=3", s.Log[1].Text)
	page := get(t, p, "/").Body.String()
	require.Contains(t, page, "Rank 2 of 4")
	require.Contains(t, page, `class="verdict stuck"`)
	r.Join(trace.Member{Name: "0", Rank: 0, Ranks: []int{0}}).Leave()
	require.Contains(t, statusOf(t, p).State, "closed")
	require.Contains(t, statusOf(t, debug.New(trace.Off)).State, "not recorded")
}

// hello is a page.
var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })

const token = "a token of 24 characters"

func certificates(t *testing.T) credentials.Files {
	t.Helper()
	dir := t.TempDir()
	a, _, err := credentials.OpenAuthority(dir)
	require.NoError(t, err)
	require.NoError(t, a.Issue(dir, "rank0", []string{"127.0.0.1"}, time.Now().Add(time.Hour)))
	return credentials.InDir(dir, "rank0")
}

// TestRefusedAddresses: a page that strangers could see is not served, and the error says what to do.
func TestRefusedAddresses(t *testing.T) {
	server, _, err := certificates(t).Configs()
	require.NoError(t, err)
	open := server.Clone()
	open.ClientAuth = 0
	for name, c := range map[string]struct {
		addr   string
		access debug.Access
		want   string // "" if it is served
	}{
		"all interfaces":              {"0.0.0.0:0", debug.Access{}, "everybody in the network could see the page"},
		"no host":                     {":0", debug.Access{}, "everybody in the network"},
		"no port":                     {"127.0.0.1", debug.Access{}, "must be host:port or unix:PATH"},
		"short token":                 {"127.0.0.1:0", debug.Access{Token: "abc"}, "the token has 3 bytes, want at least 16"},
		"no certificates of clients":  {"127.0.0.1:0", debug.Access{TLS: open}, "does not ask clients for certificates"},
		"clear text of a secured job": {"0.0.0.0:0", debug.Access{Token: token, Secret: true}, "would be in clear text"},
		"open page of a secured job":  {"127.0.0.1:0", debug.Access{Secret: true}, "everybody on this host could see the page"},
		"loopback":                    {"127.0.0.1:0", debug.Access{}, ""},
		"loopback of IPv6 or a name":  {"localhost:0", debug.Access{}, ""},
		"token":                       {"0.0.0.0:0", debug.Access{Token: token}, ""},
		"mutual TLS":                  {"0.0.0.0:0", debug.Access{TLS: server, Secret: true}, ""},
		"token in a secured job":      {"127.0.0.1:0", debug.Access{Token: token, Secret: true}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := debug.Serve(c.addr, hello, c.access)
			if c.want != "" {
				require.ErrorContains(t, err, c.want)
				return
			}
			require.NoError(t, err)
			require.NoError(t, s.Close())
			require.NoError(t, s.Close())
		})
	}
}

// ask sends a request and returns the code and the body.
func ask(t *testing.T, target string, transport *http.Transport, change func(*http.Request)) (int, string, error) {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, target, nil))
	if change != nil {
		change(r)
	}
	transport.DisableKeepAlives = true
	got, err := transport.RoundTrip(r)
	if err != nil {
		return 0, "", err
	}
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	return got.StatusCode, string(text), err
}

func TestAccess(t *testing.T) {
	open := must.Get(debug.Serve("127.0.0.1:0", hello, debug.Access{}))
	defer open.Close()
	code, text, err := ask(t, open.URL(), new(http.Transport), nil)
	require.NoError(t, err)
	require.Equal(t, "hello", text)
	require.Equal(t, http.StatusOK, code)
	code, text, err = ask(t, open.URL(), new(http.Transport), func(r *http.Request) { r.Host = "evil.example:80" })
	require.NoError(t, err)
	require.Equal(t, http.StatusForbidden, code)
	require.Contains(t, text, "this page is for 127.0.0.1 and localhost, not for evil.example")

	closed := must.Get(debug.Serve("127.0.0.1:0", hello, debug.Access{Token: token}))
	defer closed.Close()
	for name, c := range map[string]struct {
		change func(*http.Request)
		code   int
	}{
		"none":   {nil, http.StatusUnauthorized},
		"star":   {func(r *http.Request) { r.Method, r.URL.Opaque = http.MethodOptions, "*" }, http.StatusUnauthorized},
		"wrong":  {func(r *http.Request) { r.SetBasicAuth("me", "a token of 24 characterx") }, http.StatusUnauthorized},
		"empty":  {func(r *http.Request) { r.SetBasicAuth("me", "") }, http.StatusUnauthorized},
		"basic":  {func(r *http.Request) { r.SetBasicAuth("me", token) }, http.StatusOK},
		"bearer": {func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }, http.StatusOK},
	} {
		t.Run("token/"+name, func(t *testing.T) {
			code, text, err := ask(t, closed.URL(), new(http.Transport), c.change)
			require.NoError(t, err)
			require.Equal(t, c.code, code)
			require.NotContains(t, text, token)
		})
	}

	server, client, err := certificates(t).Configs()
	require.NoError(t, err)
	secure, err := debug.Serve("127.0.0.1:0", hello, debug.Access{TLS: server, Secret: true})
	require.NoError(t, err)
	defer secure.Close()
	code, _, err = ask(t, secure.URL(), &http.Transport{TLSClientConfig: client}, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, code)
	stranger := client.Clone()
	stranger.GetClientCertificate = nil
	_, _, err = ask(t, secure.URL(), &http.Transport{TLSClientConfig: stranger}, nil)
	require.ErrorContains(t, err, "certificate required")
	code, _, err = ask(t, strings.Replace(secure.URL(), "https", "http", 1), new(http.Transport), nil)
	require.True(t, err != nil || code == http.StatusBadRequest, "clear text: %d", code)
}

// TestSocket: a socket is for this user, and replaces one that was left behind.
func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "page")
	left := must.Get(net.Listen("unix", path))
	left.(*net.UnixListener).SetUnlinkOnClose(false)
	left.Close()
	s := must.Get(debug.Serve("unix:"+path, hello, debug.Access{}))
	defer s.Close()
	require.Equal(t, os.FileMode(0o600), must.Get(os.Stat(path)).Mode().Perm())
	_, text, err := ask(t, "http://rank/", &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}, nil)
	require.NoError(t, err)
	require.Equal(t, "hello", text)
}

// TestSocketInUse: two processes with one path do not take each other's page.
func TestSocketInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "page")
	first := must.Get(debug.Serve("unix:"+path, hello, debug.Access{}))
	defer first.Close()
	second, err := debug.Serve("unix:"+path, http.NotFoundHandler(), debug.Access{})
	if err == nil {
		second.Close()
	}
	require.ErrorAs(t, err, new(*net.OpError))
	_, text, err := ask(t, "http://rank/", &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}, nil)
	require.NoError(t, err)
	require.Equal(t, "hello", text)
}
