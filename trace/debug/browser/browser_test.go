package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/trace/debug"
)

// patience is for a loaded machine.
const patience = 4 * time.Minute

// rankVariable makes this program a rank. Its value is a file for which rank 2 waits.
const rankVariable = "BROWSER_TEST_RANK"

func TestMain(m *testing.M) {
	if release := os.Getenv(rankVariable); release != "" {
		if err := rank(release); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := m.Run()
	os.RemoveAll(built)
	os.Exit(code)
}

// rank is a job whose rank 2 does something else before the sixth all_reduce.
func rank(release string) (err error) {
	defer must.Catch(&err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	g := must.Get(pg.Init(ctx, "env://"))
	defer g.Close()
	gradients := make([]float32, 1<<18)
	for step := range 6 {
		if step == 5 && g.Rank() == 2 {
			must.Do(loadCheckpoint(ctx, release))
		}
		must.Do(pg.Wait(g.AllReduce(ctx, pg.Slice(gradients), pg.Sum())))
	}
	return nil
}

// loadCheckpoint waits for a pipe to be opened and closed.
func loadCheckpoint(ctx context.Context, pipe string) error {
	f, err := os.Open(pipe)
	if err != nil {
		return err
	}
	defer f.Close()
	return must.Err(io.ReadAll(f))
}

var (
	// built is where build has put c10d.
	built string

	// build compiles c10d, once for all tests, and returns the program.
	build = sync.OnceValues(func() (program string, err error) {
		if built, err = os.MkdirTemp("", "c10d-browser-"); err != nil {
			return "", err
		}
		program = filepath.Join(built, "c10d")
		cmd := exec.Command("go", "build", "-o", program, "./cmd/c10d")
		cmd.Dir = "../../.." // the core, which has the requirements of the program
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
		return program, nil
	})
)

// job is c10d run with four ranks of this program.
type job struct {
	t      *testing.T
	cmd    *exec.Cmd
	pipe   string
	dir    string
	url    string
	output *bytes.Buffer
	copied chan struct{}
}

// start starts a job and waits until its page is served.
func start(t *testing.T, flags ...string) *job {
	t.Helper()
	program := must.Get(build())
	j := &job{t: t, dir: t.TempDir(), output: new(bytes.Buffer), copied: make(chan struct{})}
	j.pipe = filepath.Join(j.dir, "pipe")
	require.NoError(t, syscall.Mkfifo(j.pipe, 0o600))
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	args := append([]string{"run", "-n", "4", "-log-dir", filepath.Join(j.dir, "logs"), "-debug", "127.0.0.1:0"}, flags...)
	j.cmd = exec.CommandContext(ctx, program, append(args, "--", self)...)
	j.cmd.Env = append(os.Environ(), rankVariable+"="+j.pipe, "C10D_TRACE_STACKS=1")
	errs := must.Get(j.cmd.StderrPipe())
	require.NoError(t, j.cmd.Start())
	found := make(chan string, 1)
	go func() {
		defer close(j.copied)
		defer close(found)
		for lines := bufio.NewScanner(errs); lines.Scan(); {
			fmt.Fprintln(j.output, lines.Text())
			if _, url, ok := strings.Cut(lines.Text(), "debug page at "); ok {
				found <- url
			}
		}
	}()
	j.url = <-found
	if j.url == "" {
		<-j.copied
		t.Fatalf("no page: %s", j.output)
	}
	t.Cleanup(func() {
		cancel()
		<-j.copied
		_ = j.cmd.Wait() // it was killed, unless end was called
	})
	return j
}

// dump takes a dump of all ranks, which the page merges, and returns the files.
func (j *job) dump(ctx context.Context) []string {
	j.t.Helper()
	require.NoError(j.t, chromedp.Run(ctx, chromedp.Navigate(j.url), chromedp.Click("#dump", chromedp.ByQuery), chromedp.WaitReady("#report", chromedp.ByQuery)))
	require.Contains(j.t, text(j.t, ctx, "#report"), "not called by ranks 2")
	dumps, err := filepath.Glob(filepath.Join(j.dir, "logs", "c10d-dump-*", "rank_*"))
	require.NoError(j.t, err)
	require.Len(j.t, dumps, 4)
	return dumps
}

// end lets rank 2 go on, and waits for the job's end.
func (j *job) end() {
	j.t.Helper()
	f, err := os.OpenFile(j.pipe, os.O_WRONLY, 0)
	require.NoError(j.t, err)
	require.NoError(j.t, f.Close())
	<-j.copied
	require.NoError(j.t, j.cmd.Wait(), "%s", j.output)
}

// chromium returns a tab of a browser.
func chromium(t *testing.T, options ...chromedp.ExecAllocatorOption) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
		}
		t.Skip("chromium is not installed")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	options = append(append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WindowSize(1180, 820),
		chromedp.WSURLReadTimeout(patience), chromedp.Flag("disable-gpu", true)), options...)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	return ctx
}

// text returns the text of an element.
func text(t *testing.T, ctx context.Context, selector string) string {
	t.Helper()
	var got string
	require.NoError(t, chromedp.Run(ctx, chromedp.Text(selector, &got, chromedp.ByQuery)))
	return got
}

// await loads a page until its verdict contains want.
func await(t *testing.T, ctx context.Context, url, want string) string {
	t.Helper()
	for {
		require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(url), chromedp.WaitReady("#verdict", chromedp.ByQuery)))
		if got := text(t, ctx, "#verdict"); strings.Contains(got, want) {
			return got
		}
		require.NoError(t, ctx.Err())
	}
}

// TestStuckRank: a person finds the rank that keeps the others waiting, what it does, and takes a dump.
func TestStuckRank(t *testing.T) {
	ctx := chromium(t)
	j := start(t)
	const waits = `all_reduce, collective 5 of group "0", waits for rank 2.`
	got := await(t, ctx, j.url, waits)
	require.Contains(t, got, "Rank 2 has not called it: it has called 5 of 6 collectives")
	require.Contains(t, got, "Ranks 0-1, 3 wait in it")
	require.Contains(t, text(t, ctx, "#rank2"), "late")
	require.Contains(t, text(t, ctx, "#rank1"), "browser_test.go:", "the line of the call")
	picture(t, ctx, "debug.png", 1080, "light")
	picture(t, ctx, "debug-dark.png", 1080, "dark")
	picture(t, ctx, "debug-narrow.png", narrow, "light")
	var right float64
	require.NoError(t, chromedp.Run(ctx, chromedp.Evaluate(`document.querySelector("#rank2 .tag").getBoundingClientRect().right`, &right)))
	require.LessOrEqual(t, right, float64(narrow), "on a narrow screen the mark of the late rank is visible")

	// The page of a rank that waits, by the link.
	require.NoError(t, chromedp.Run(ctx, chromedp.Click("#rank1 a", chromedp.ByQuery), chromedp.WaitReady("#pending", chromedp.ByQuery)))
	require.Contains(t, text(t, ctx, "#verdict"), "all_reduce waits for rank 2")
	require.Contains(t, text(t, ctx, "#pending"), "1 MiB float32 [262144]")
	picture(t, ctx, "rank.png", 1080, "light")

	// What the late rank does.
	require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(j.url), chromedp.Click("#goroutines2", chromedp.ByQuery),
		chromedp.WaitReady(`//pre[contains(., "loadCheckpoint")]`)))

	dumps := j.dump(ctx)
	require.Len(t, must.Get(trace.ReadFile(dumps[1])).Entries, 6)
	j.end()
}

// TestStoppedRank: a rank that a signal has stopped has no page, and is named.
func TestStoppedRank(t *testing.T) {
	ctx := chromium(t)
	j := start(t)
	await(t, ctx, j.url, "waits for rank 2.")
	var pid int
	must.Get(fmt.Sscan(text(t, ctx, "#rank2 td:nth-child(3)"), &pid))
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	got := await(t, ctx, j.url, "is stopped by a signal or a debugger")
	require.Contains(t, got, "waits for rank 2.")
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	await(t, ctx, j.url, "Rank 2 has not called it")
	j.end()
}

// TestClientCertificate: a job with certificates shows its page over TLS, to browsers with a certificate
// of the job.
func TestClientCertificate(t *testing.T) {
	if _, err := exec.LookPath("certutil"); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
		}
		t.Skip("certutil is not installed")
	}
	program := must.Get(build())
	dir := t.TempDir()
	certs, home := filepath.Join(dir, "certs"), filepath.Join(dir, "home")
	run(t, nil, program, "certs", "-dir", certs, "-n", "4", "-hosts", "localhost,127.0.0.1")

	stranger := chromium(t, chromedp.Env("HOME="+filepath.Join(dir, "empty")), chromedp.IgnoreCertErrors)
	j := start(t, "-tls-dir", certs)
	require.True(t, strings.HasPrefix(j.url, "https://"), j.url)
	err := chromedp.Run(stranger, chromedp.Navigate(j.url))
	require.ErrorContains(t, err, "net::ERR_") // the server's alert, or the end of the connection

	importCertificate(t, home, certs, "agent")
	member := chromium(t, chromedp.Env("HOME="+home), chromedp.UserDataDir(filepath.Join(home, "profile")))
	policies(t, j.url)
	await(t, member, j.url, "waits for rank 2.")
	j.dump(member)
	j.end()
}

// TestHostileText: a browser finds no element and no attribute in text that ranks send.
func TestHostileText(t *testing.T) {
	ctx := chromium(t)
	var said string // by the ranks
	j := debug.NewJob(debug.JobOptions{Name: "job", Size: 2, Ask: func(_ context.Context, rank int, _ url.Values) (debug.Answer, error) {
		if rank == 1 {
			return debug.Answer{}, errors.New(said)
		}
		o := debug.Operation{
			Group: said, Op: said, Peer: -1, DType: said, Bytes: 4, Route: said, State: said, Error: said, Site: said, Stack: []string{said, said}, Took: time.Minute,
		}
		text, err := json.Marshal(debug.Status{
			Size: 2, Host: said, Program: said, Now: time.Now(), Pending: []debug.Operation{o}, Recent: []debug.Operation{o}, Log: []debug.Line{{Level: said, Text: said}},
			Groups: []debug.Group{{
				Name: said, Description: said, Ranks: []int{0, 1},
				Explain: []backend.Explanation{{
					Backend: said, Wire: said, Why: said, Links: []backend.Link{{Rank: 1, Transport: said, Detail: said}}, Choices: []backend.Choice{{Op: said, Algorithm: said, Why: said}},
				}},
				Probes: []backend.Probe{{Waits: []backend.Wait{{Text: said, Why: []string{said}, Ranks: []int{1}}}}},
			}},
		})
		return debug.Answer{Body: text}, err
	}, About: func(int) string { return said }})
	s := httptest.NewServer(j)
	defer s.Close()
	// look returns the elements of a page with their attributes, and its text.
	look := func(path string) (elements []string, text string) {
		require.NoError(t, chromedp.Run(ctx, chromedp.Navigate(s.URL+path), chromedp.WaitReady("#verdict", chromedp.ByQuery),
			chromedp.Evaluate(`[...document.querySelectorAll("*")].map(e => e.localName + " " + e.getAttributeNames())`, &elements),
			chromedp.Evaluate(`document.body.textContent`, &text)))
		return elements, text
	}
	for _, path := range []string{"/", "/?rank=0"} {
		said = "harmless"
		known, _ := look(path)
		for _, said = range []string{
			`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `" onmouseover="alert(1)`, `</pre></td></table></style><h1>`, `<!--`, `&lt;b&gt;`, `&quot;>`, "%s",
		} {
			elements, text := look(path)
			require.Equal(t, known, elements, "%s with %s", path, said)
			require.Contains(t, text, said)
		}
	}
}

// narrow is the width of a telephone.
const narrow = 480

// picture makes the page so wide, and writes a screenshot into the directory C10D_TEST_PICTURES, if that is set.
func picture(t *testing.T, ctx context.Context, name string, width int64, scheme string) {
	t.Helper()
	require.NoError(t, chromedp.Run(ctx, emulation.SetDeviceMetricsOverride(width, 600, 1, false),
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}})))
	dir := os.Getenv("C10D_TEST_PICTURES")
	if dir == "" {
		return
	}
	var image []byte
	require.NoError(t, chromedp.Run(ctx, chromedp.FullScreenshot(&image, 100)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), image, 0o644))
}

func run(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %v: %s", name, args, out)
}

// importCertificate gives the browser of a home directory a certificate of the job and its authority.
func importCertificate(t *testing.T, home, certs, name string) {
	t.Helper()
	const password = "test"
	bundle := filepath.Join(t.TempDir(), "bundle.p12")
	run(t, nil, "openssl", "pkcs12", "-export", "-out", bundle, "-passout", "pass:"+password, "-name", name,
		"-in", filepath.Join(certs, name+".pem"), "-inkey", filepath.Join(certs, name+"-key.pem"))
	for _, db := range []string{".pki/nssdb", ".local/share/pki/nssdb"} { // of older and newer browsers
		db = filepath.Join(home, db)
		require.NoError(t, os.MkdirAll(db, 0o700))
		db = "sql:" + db
		run(t, nil, "certutil", "-d", db, "-N", "--empty-password")
		run(t, nil, "certutil", "-d", db, "-A", "-t", "C,,", "-n", "authority", "-i", filepath.Join(certs, "ca.pem"))
		run(t, nil, "pk12util", "-d", db, "-i", bundle, "-W", password, "-K", "")
	}
}

// policies makes browsers choose their certificate for a page without a question, as a person would.
func policies(t *testing.T, url string) {
	t.Helper()
	const dir = "/etc/chromium/policies/managed"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skip("not permitted here: ", err)
	}
	path := filepath.Join(dir, "c10d-test.json")
	pattern := must.Get(json.Marshal(map[string]any{"pattern": strings.TrimSuffix(url, "/"), "filter": map[string]any{}}))
	rule := must.Get(json.Marshal(map[string][]string{"AutoSelectCertificateForUrls": {string(pattern)}}))
	require.NoError(t, os.WriteFile(path, rule, 0o644))
	t.Cleanup(func() { os.Remove(path) })
}
