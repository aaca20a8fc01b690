package agent

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/rankpage"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/trace/debug"
)

// pages are the debug pages of the ranks. Each rank of this node has a socket for its page. Node 0
// serves a page of all ranks. It asks the other nodes' agents through their store. A nil pages does
// nothing.
type pages struct {
	agent  *agent
	dir    string // of the sockets
	server *debug.Server
	stop   context.CancelFunc
	loop   sync.WaitGroup

	mu    sync.Mutex
	ranks map[int]*rank  // of this node, by rank
	about map[int]string // what other nodes have said of their ranks
	asked []string       // keys of questions that are over, and of answers that came too late, or not at all
}

// maxAnswer bounds the answer of a rank. The largest is the goroutines of a big program, which are cut. Between
// nodes it goes compressed, because a value of the agents' store has at most 8 MiB.
const maxAnswer = 16 << 20

// startPages begins to answer questions about the ranks.
func (a *agent) startPages() (err error) {
	if a.Debug == "" {
		return nil
	}
	p := &pages{agent: a, ranks: make(map[int]*rank), about: make(map[int]string)}
	if p.dir, err = filepath.Abs(a.dir); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop, a.pages = stop, p
	if a.NodeRank > 0 {
		if err := a.nodes.Set(ctx, pagesKey(a.NodeRank), []byte("1")); err != nil {
			return err
		}
		p.loop.Go(func() { p.answerAll(ctx) })
		return nil
	}
	access, err := p.access()
	if err != nil {
		return err
	}
	p.server, err = debug.Serve(a.Debug, debug.NewJob(debug.JobOptions{
		Name: a.RunID, Size: a.size, Ask: p.ask, About: p.aboutRank, Dir: a.LogDir,
	}), access)
	if err == nil {
		a.Logf("debug page at %s", p.server.URL())
	}
	return err
}

// access protects the page as the job is protected. If the job has TLS by a secret, which browsers do
// not know, and no token is given, it makes one.
func (p *pages) access() (debug.Access, error) {
	a := p.agent
	x := debug.Access{TLS: a.tls, Secret: a.tls != nil}
	file := a.DebugToken
	if a.Secrets.Secret != "" {
		x.TLS = nil
		if file == "" {
			file = filepath.Join(a.dir, "page-token")
			if err := os.WriteFile(file, []byte(rand.Text()+"\n"), 0o600); err != nil {
				return x, err
			}
			a.Logf("the debug page asks for a password: it is in %s", file)
		}
	}
	token, err := credentials.LoadToken(file)
	x.Token = debug.Token(token)
	return x, err
}

// close ends what startPages has begun.
func (p *pages) close() {
	if p == nil {
		return
	}
	p.stop()
	if p.server != nil {
		p.server.Close()
	}
	p.loop.Wait()
}

func (p *pages) socket(local int) string { return filepath.Join(p.dir, "page"+strconv.Itoa(local)) }

// environ returns the variables by which a rank serves its page.
func (p *pages) environ(local int) []string {
	if p == nil {
		return nil
	}
	return []string{launch.DebugVariable + "=unix:" + p.socket(local), launch.DebugTokenVariable + "="}
}

// started notes a rank of this node.
func (p *pages) started(r *rank) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ranks[r.rank] = r
}

// aboutRank says what is known of the process of a rank.
func (p *pages) aboutRank(rank int) string {
	p.mu.Lock()
	r, said := p.ranks[rank], p.about[rank]
	p.mu.Unlock()
	if r == nil || r.cmd.Process == nil {
		return said
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	pid := r.cmd.Process.Pid
	switch {
	case r.reaped:
		return fmt.Sprintf("process %d has ended", pid)
	case isStopped(pid):
		return fmt.Sprintf("process %d is stopped by a signal or a debugger", pid)
	}
	return fmt.Sprintf("process %d runs", pid)
}

var (
	errNoPage   = errors.New("it has no page: it has not called pg.Init, has left, or is no Go rank")
	errNoAnswer = errors.New("its page does not answer")
)

// ask is the Ask of debug.JobOptions.
func (p *pages) ask(ctx context.Context, rank int, form url.Values) (debug.Answer, error) {
	if local := rank - p.agent.base; local >= 0 && local < p.agent.Procs {
		return p.askLocal(ctx, local, form)
	}
	return p.askNode(ctx, rank, form)
}

// askLocal asks a rank of this node.
func (p *pages) askLocal(ctx context.Context, local int, form url.Values) (debug.Answer, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", p.socket(local))
		},
	}
	method, query, body := http.MethodGet, "?format=json", ""
	if form != nil {
		method, query, body = http.MethodPost, "", form.Encode()
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://rank/"+query, strings.NewReader(body))
	if err != nil {
		return debug.Answer{}, err
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	got, err := transport.RoundTrip(r)
	var dial *net.OpError
	switch {
	case err != nil && ctx.Err() != nil:
		return debug.Answer{}, errNoAnswer
	case errors.As(err, &dial) && dial.Op == "dial" && rankpage.Declined(p.socket(local)):
		return debug.Answer{}, fmt.Errorf("it has no page: %w", rankpage.ErrNotImported)
	case errors.As(err, &dial) && dial.Op == "dial":
		return debug.Answer{}, errNoPage
	case err != nil:
		return debug.Answer{}, errNoAnswer
	}
	defer got.Body.Close()
	_, disposition, _ := mime.ParseMediaType(got.Header.Get("Content-Disposition"))
	name := disposition["filename"]
	text, err := io.ReadAll(io.LimitReader(got.Body, maxAnswer+1))
	switch {
	case err == nil && got.StatusCode != http.StatusOK:
		err = errors.New(strings.TrimSpace(string(text)))
	case len(text) > maxAnswer && name != "":
		return debug.Answer{}, fmt.Errorf("its file %s has more than %d MiB", name, maxAnswer>>20)
	}
	return debug.Answer{Type: got.Header.Get("Content-Type"), Name: name, Body: text[:min(len(text), maxAnswer)]}, err
}

// packed compresses the body of an answer.
func packed(body []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write(body) // a Buffer takes everything
	_ = w.Close()
	return b.Bytes()
}

// unpacked is the inverse of packed.
func unpacked(text []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(r, maxAnswer))
}

// question is a question of node 0 to another node's agent. reply is the answer.
type (
	question struct {
		Key    string        `json:"key"` // of the reply; see openKey
		Rank   int           `json:"rank"`
		Form   url.Values    `json:"form,omitempty"`
		Within time.Duration `json:"within"`
	}
	reply struct {
		Answer debug.Answer `json:"answer"` // its body is packed
		Error  string       `json:"error,omitempty"`
		About  string       `json:"about,omitempty"`
	}
)

// openKey is there as long as node 0 waits for a reply. An agent that was stopped finds questions that node 0 has
// given up.
func (q *question) openKey() string { return q.Key + "/open" }

// pagesKey says that a node answers questions, and is the queue of these.
func pagesKey(node int) string { return "debug/node/" + strconv.Itoa(node) }

// askNode asks a rank of another node, through the agents' store.
func (p *pages) askNode(ctx context.Context, rank int, form url.Values) (debug.Answer, error) {
	node, st := p.agent.nodeOf(rank), p.agent.nodes
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, storeWait)
		defer cancel()
	}
	p.mu.Lock()
	old := p.asked
	p.asked = nil
	p.mu.Unlock()
	for _, key := range old {
		if _, err := st.Delete(ctx, key); err != nil {
			p.forget(key)
		}
	}
	if ok, err := st.Check(ctx, pagesKey(node)); err != nil {
		return debug.Answer{}, fmt.Errorf("the agents' store does not answer: %w", err)
	} else if !ok {
		return debug.Answer{}, fmt.Errorf("c10d run of node %d has no -debug", node)
	}
	until, _ := ctx.Deadline()
	q := question{Key: "debug/reply/" + rand.Text(), Rank: rank, Form: form, Within: time.Until(until)}
	text, err := json.Marshal(q)
	if err == nil {
		err = st.Set(ctx, q.openKey(), []byte("1"))
	}
	if err == nil {
		err = st.QueuePush(ctx, pagesKey(node), text)
	}
	if err == nil {
		text, err = st.Get(ctx, q.Key)
	}
	if err != nil {
		p.forget(q.Key, q.openKey())
		p.mu.Lock()
		p.about[rank] = ""
		p.mu.Unlock()
		return debug.Answer{}, fmt.Errorf("c10d run of node %d does not answer", node)
	}
	for _, key := range []string{q.Key, q.openKey()} {
		if _, err := st.Delete(ctx, key); err != nil {
			p.forget(key)
		}
	}
	var x reply
	if err := json.Unmarshal(text, &x); err != nil {
		return debug.Answer{}, err
	}
	if x.Answer.Body, err = unpacked(x.Answer.Body); err != nil {
		return debug.Answer{}, fmt.Errorf("the answer of node %d: %w", node, err)
	}
	p.mu.Lock()
	p.about[rank] = x.About
	p.mu.Unlock()
	if x.Error != "" {
		return x.Answer, errors.New(x.Error)
	}
	return x.Answer, nil
}

// forget has the next question delete keys.
func (p *pages) forget(keys ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, keys...)
}

// answerAll answers node 0's questions until ctx ends.
func (p *pages) answerAll(ctx context.Context) {
	for {
		text, err := p.agent.nodes.QueuePop(ctx, pagesKey(p.agent.NodeRank), true)
		if err != nil {
			return
		}
		var q question
		if json.Unmarshal(text, &q) == nil {
			p.loop.Go(func() { p.answer(ctx, q) })
		}
	}
}

func (p *pages) answer(ctx context.Context, q question) {
	const margin = 10 // the rank gets all but this part of the time
	ctx, cancel := context.WithTimeout(ctx, q.Within)
	defer cancel()
	inner, stop := context.WithTimeout(ctx, q.Within-q.Within/margin)
	defer stop()
	if open, err := p.agent.nodes.Check(ctx, q.openKey()); err != nil || !open {
		return
	}
	var x reply
	var err error
	if x.Answer, err = p.askLocal(inner, q.Rank-p.agent.base, q.Form); err != nil {
		x.Error, x.About = cmp.Or(err.Error(), "no answer"), p.aboutRank(q.Rank)
	}
	x.Answer.Body = packed(x.Answer.Body)
	if ctx.Err() != nil {
		return
	}
	err = p.reply(ctx, q, x)
	if errors.Is(err, store.ErrTooLarge) {
		// If this fails, node 0 says that this node does not answer.
		_ = p.reply(ctx, q, reply{Answer: debug.Answer{Body: packed(nil)}, Error: "its answer is too large: " + err.Error()})
	}
}

func (p *pages) reply(ctx context.Context, q question, x reply) error {
	text, err := json.Marshal(x)
	if err != nil {
		return err
	}
	return p.agent.nodes.Set(ctx, q.Key, text)
}

// nodeOf returns the node of a rank.
func (a *agent) nodeOf(rank int) int {
	for n, procs := range a.procs {
		if rank < procs {
			return n
		}
		rank -= procs
	}
	return len(a.procs) - 1
}
