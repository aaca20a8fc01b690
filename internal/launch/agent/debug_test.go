//go:build unix

package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/rankpage"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/trace/debug"
)

// paged runs a job of one rank on each of two nodes, with a page, until look returns. The ranks are
// shells. It serves their pages itself: addresses has what the launcher has told each.
func paged(t *testing.T, change func(*Job), look func(url string, addresses []string)) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	_, port, err := splitPort(freeport.Loopback(t))
	require.NoError(t, err)
	url := make(chan string, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 2)
	for node := range 2 {
		j := sh(1, fmt.Sprintf(`echo "$C10D_DEBUG_ADDR" > %[1]s/a$RANK.new; mv %[1]s/a$RANK.new %[1]s/a$RANK; until [ -e %[1]s/go ]; do sleep 0.05; done`, dir))
		j.Nodes, j.NodeRank, j.MasterAddr, j.MasterPort, j.Debug = 2, node, "127.0.0.1", port, "127.0.0.1:0"
		j.Logf = func(format string, args ...any) {
			if _, at, ok := strings.Cut(fmt.Sprintf(format, args...), "debug page at "); ok {
				url <- at
			}
		}
		if change != nil {
			change(&j)
		}
		go func() {
			s, err := Run(ctx, j)
			if err == nil && !s.OK {
				err = fmt.Errorf("node %d: %s", node, s.Report())
			}
			ended <- err
		}()
	}
	var addresses []string
	for rank := range 2 {
		var text []byte
		require.Eventually(t, func() (ok bool) {
			text, err = os.ReadFile(filepath.Join(dir, "a"+strconv.Itoa(rank)))
			return err == nil
		}, time.Minute, 10*time.Millisecond)
		addresses = append(addresses, strings.TrimSpace(string(text)))
	}
	look(<-url, addresses)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o600))
	for range 2 {
		require.NoError(t, <-ended)
	}
}

func splitPort(addr string) (host string, port int, err error) {
	host, text, _ := strings.Cut(addr, ":")
	port, err = strconv.Atoi(text)
	return host, port, err
}

// jobPage reads the page of a job.
func jobPage(t *testing.T, url string, change func(*http.Request)) (code int, s debug.JobStatus) {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, url+"?format=json", nil))
	if change != nil {
		change(r)
	}
	got := must.Get((&http.Transport{DisableKeepAlives: true}).RoundTrip(r))
	defer got.Body.Close()
	if got.StatusCode == http.StatusOK {
		require.NoError(t, json.NewDecoder(got.Body).Decode(&s))
	}
	return got.StatusCode, s
}

// TestPages: node 0's page has the ranks of all nodes, and what is known of those without a page.
func TestPages(t *testing.T) {
	paged(t, nil, func(url string, addresses []string) {
		var s debug.JobStatus
		require.Eventually(t, func() bool { // a process may run before its agent has noted it
			_, s = jobPage(t, url, nil)
			return len(s.Ranks) == 2 && s.Ranks[0].About != "" && s.Ranks[1].About != ""
		}, time.Minute, 10*time.Millisecond)
		for _, r := range s.Ranks {
			require.Contains(t, r.Error, "it has no page")
			require.Regexp(t, `process \d+ runs`, r.About)
		}
		for rank, addr := range addresses {
			path := strings.TrimPrefix(addr, "unix:")
			rankpage.Decline(addr)
			_, s = jobPage(t, url, nil)
			require.Contains(t, s.Ranks[rank].Error, `it has no page: its program lacks import _ "github.com/c10d-go/c10d/trace/debug"`)
			require.NoError(t, os.Remove(path))
			r := trace.New()
			r.Join(trace.Member{Name: "0", Rank: rank, Ranks: []int{0, 1}})
			p := must.Get(debug.Serve(addr, debug.New(r), debug.Access{}))
			defer p.Close()
		}
		_, s = jobPage(t, url, nil)
		for rank, r := range s.Ranks {
			require.Empty(t, r.Error)
			require.Equal(t, rank, r.Status.Rank)
		}
	})
}

// TestPageOfOneNode: an agent without a page says nothing of its ranks.
func TestPageOfOneNode(t *testing.T) {
	paged(t, func(j *Job) {
		if j.NodeRank == 1 {
			j.Debug = ""
		}
	}, func(url string, addresses []string) {
		require.Empty(t, addresses[1])
		_, s := jobPage(t, url, nil)
		require.Equal(t, "c10d run of node 1 has no -debug", s.Ranks[1].Error)
	})
}

// TestForgottenQuestions: an agent that was stopped does not answer the questions that node 0 has given up. Nobody
// would delete the answers.
func TestForgottenQuestions(t *testing.T) {
	nodes := store.NewHash()
	defer nodes.Close()
	of := func(node int) *pages {
		a := &agent{Job: Job{Procs: 1, NodeRank: node}, nodes: nodes, base: node, size: 2, procs: []int{1, 1}}
		return &pages{agent: a, dir: t.TempDir(), ranks: make(map[int]*rank), about: make(map[int]string)}
	}
	asks, answers := of(0), of(1)
	require.NoError(t, nodes.Set(t.Context(), pagesKey(1), nil))
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, err := asks.ask(ctx, 1, nil)
		cancel()
		require.Error(t, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	answers.loop.Go(func() { answers.answerAll(ctx) })
	defer answers.loop.Wait()
	defer stop()
	for until := time.Now().Add(time.Minute); ; {
		require.ErrorContains(t, must.Err(asks.ask(t.Context(), 1, nil)), "it has no page")
		n := must.Get(nodes.NumKeys(t.Context()))
		if n == 1 { // that of the node
			return
		}
		require.True(t, time.Now().Before(until), "%d keys", n)
	}
}

// TestLargeAnswers: an answer from another node may be larger than a value of the agents' store. One that does not
// fit is an error that says so.
func TestLargeAnswers(t *testing.T) {
	addr := freeport.Loopback(t)
	of := func(node int) *pages {
		st, err := tcp.New(t.Context(), addr, tcp.Options{Server: node == 0, Rank: node, WorldSize: 2, NoWait: true})
		require.NoError(t, err)
		t.Cleanup(func() { st.Close() })
		a := &agent{Job: Job{Procs: 1, NodeRank: node}, nodes: st, base: node, size: 2, procs: []int{1, 1}}
		return &pages{agent: a, dir: t.TempDir(), ranks: make(map[int]*rank), about: make(map[int]string)}
	}
	asks, answers := of(0), of(1)
	require.NoError(t, answers.agent.nodes.Set(t.Context(), pagesKey(1), nil))
	ctx, stop := context.WithCancel(t.Context())
	answers.loop.Go(func() { answers.answerAll(ctx) })
	defer answers.loop.Wait()
	defer stop()
	stacks := bytes.Repeat([]byte("goroutine 7 [chan receive]:\n"), 1<<18) // 7 MiB, and a third more as JSON
	random := make([]byte, 7<<20)
	rand.Read(random)
	page, err := debug.Serve("unix:"+answers.socket(0), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := stacks
		if what := r.PostFormValue("do"); what != "goroutines" {
			w.Header().Set("Content-Disposition", `attachment; filename="rank_1"`)
			if body = random; what == "huge" {
				w.Write(body)
				w.Write(body)
			}
		}
		w.Write(body)
	}), debug.Access{})
	require.NoError(t, err)
	defer page.Close()
	asking, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	x, err := asks.ask(asking, 1, url.Values{"do": {"goroutines"}})
	require.NoError(t, err)
	require.True(t, bytes.Equal(stacks, x.Body))
	_, err = asks.ask(asking, 1, url.Values{"do": {"download"}})
	require.ErrorContains(t, err, "its answer is too large: ")
	_, err = asks.ask(asking, 1, url.Values{"do": {"huge"}})
	require.ErrorContains(t, err, "its file rank_1 has more than 16 MiB")
}

// TestPageWithSecret: the page of a job with a secret has a token of its own, in a file.
func TestPageWithSecret(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(secret))
	paged(t, func(j *Job) { j.Secrets.Secret = secret }, func(url string, _ []string) {
		code, _ := jobPage(t, url, nil)
		require.Equal(t, http.StatusUnauthorized, code)
		files := must.Get(filepath.Glob(filepath.Join(os.Getenv("TMPDIR"), scratchName+"*", "page-token")))
		require.Len(t, files, 1)
		require.Equal(t, os.FileMode(0o600), must.Get(os.Stat(files[0])).Mode().Perm())
		token := must.Get(os.ReadFile(files[0]))
		code, s := jobPage(t, url, func(r *http.Request) { r.SetBasicAuth("", strings.TrimSpace(string(token))) })
		require.Equal(t, http.StatusOK, code)
		require.Len(t, s.Ranks, 2)
	})
}

// TestRefusedPages: a page that strangers could see ends the job before it begins.
func TestRefusedPages(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for name, c := range map[string]struct {
		change func(*Job)
		want   string
	}{
		"open":         {func(j *Job) { j.Debug = "0.0.0.0:0" }, "everybody in the network could see the page"},
		"secret":       {func(j *Job) { j.Debug, j.TLS = "0.0.0.0:0", true }, "the page would be in clear text"},
		"no such file": {func(j *Job) { j.Debug, j.DebugToken = "127.0.0.1:0", "/nowhere/token" }, "no such file"},
		"no address":   {func(j *Job) { j.Debug = "6060" }, "must be host:port"},
		"a short socket": {func(j *Job) {
			j.Debug = "127.0.0.1:0"
			j.LogDir = filepath.Join(t.TempDir(), strings.Repeat("long", 30))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			j := sh(1, `case ${#C10D_DEBUG_ADDR} in [0-9]|[0-9][0-9]) exit 0;; esac; exit 1`)
			c.change(&j)
			s, err := Run(t.Context(), j)
			if c.want == "" {
				require.NoError(t, err)
				require.True(t, s.OK)
				return
			}
			require.ErrorContains(t, err, c.want)
		})
	}
}
