package agent

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/ownfile"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

const (
	// DefaultGrace is torchrun's. It is enough time to write a checkpoint.
	DefaultGrace = 30 * time.Second

	// DefaultMeeting is the longest time that agents wait for each other. It is torchrun's:
	// nodes may boot at different speeds.
	DefaultMeeting = 15 * time.Minute

	// killWait is the longest time that the agent waits for the end of a process after
	// SIGKILL. A process in a system call on a dead network file system may never end.
	killWait = 10 * time.Second

	// After the first failure the agent waits for other ranks to end, because the rank at
	// fault may end later than others. It waits for waitForOthers. While a rank writes to
	// its standard error at least every silentFor, it waits for up to waitWhileWriting. For
	// a rank that others name, or that prints a panic, it waits for up to waitForNamed.
	waitForOthers    = 200 * time.Millisecond
	silentFor        = 100 * time.Millisecond
	waitWhileWriting = time.Second
	waitForNamed     = 3 * time.Second
	lookEvery        = 20 * time.Millisecond // between two checks

	// reportWait is the longest time that node 0 waits for the other nodes' reports.
	reportWait = waitForNamed + 5*time.Second

	// scratchName begins the name of the agent's own directory.
	scratchName = "c10d-run-"

	// storeWait is the longest time that node 0 keeps the agents' store so that the other
	// nodes can read the result. It also limits each access to the store.
	storeWait = 10 * time.Second

	// againPause is how often node 0 looks whether an agent that has ended was started again.
	againPause = 100 * time.Millisecond

	// After sayWaiting, or half of Job.Meeting if that is less, an agent logs which others have not come.
	sayWaiting = 10 * time.Second

	// farewell is how long node 0 keeps that store if the agents do not meet. Telling the others of a signal takes
	// as long at most.
	farewell = 2 * time.Second
)

// Job says what to run. Command and Procs are required.
type Job struct {
	Command []string // program and arguments
	Procs   int      // ranks on this node

	Nodes, NodeRank int    // 0 nodes means 1
	MasterAddr      string // address of node 0; with one node empty means 127.0.0.1
	MasterPort      int    // port on node 0; with one node 0 means a free one
	RunID           string // the job's name, the same on all nodes; empty means node 0's, which makes a random one

	// Secrets protect the stores of agents and ranks. The ranks find the files' names in
	// their environment. TLS needs all three files, or the secret. Each certificate must be valid
	// for the addresses of its host and, on node 0, for MasterAddr.
	Secrets credentials.Files

	// SecretsDir is a directory of "c10d certs", in place of Secrets' TLS files: the agent and each
	// rank have a certificate of their own there.
	SecretsDir string

	// TLS makes the agent of a job without TLS files use a secret and a token of the store that it
	// makes itself, and removes at the end. It needs one node: the agents of several cannot pass it on.
	TLS bool

	// Least and Most, if not 0, make the job elastic. A rank that fails is started again alone. It
	// joins the others, which go on. The job goes on with at least Least ranks.
	Least, Most int

	// Debug, if set, is the address of a page with the state of all ranks, such as 127.0.0.1:6060. Node 0
	// serves it; the others must have a Debug, too. DebugToken is a file with the token that the page
	// asks for. An address that is not loopback needs it, or certificates.
	Debug, DebugToken string

	MaxRestarts int           // attempts after the first; of an elastic job, restarts of ranks on this node
	Grace       time.Duration // between a signal and SIGKILL; 0 means DefaultGrace, below 0 none
	Meeting     time.Duration // how long to wait for the other nodes; 0 means DefaultMeeting

	Env            []string  // the ranks' further environment; nil means this process's
	Stdout, Stderr io.Writer // what the ranks print; nil discards. The agent uses them from one goroutine at a time
	Color          bool      // colour the prefixes
	NoPrefix       bool      // pass output on byte by byte
	LogDir         string    // if set, rank k's output goes to the file rank<k>.log there, and the error file of a failed one to rank<k>.error.json; only this user can read them; files of an earlier run are removed
	Tee            bool      // with LogDir, also to Stdout and Stderr

	Signals <-chan os.Signal                 // passed on to the ranks
	Guard   []string                         // command that calls Guard; nil means no guard
	Logf    func(format string, args ...any) // logs attempts and signals; nil means no log
}

// Failure is the end of a rank that failed, or the state of a rank that others name as the
// reason of their failure.
type Failure struct {
	Rank      int       `json:"rank"` // -1 if no rank failed, but the agents lost each other
	LocalRank int       `json:"local_rank"`
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	State     string    `json:"state,omitempty"` // of a rank that had not ended when the launcher ended the job: running, stopped or unknown
	ExitCode  int       `json:"exit_code"`       // 128 plus the signal for one that a signal ended
	Signal    string    `json:"signal,omitempty"`
	Time      time.Time `json:"time"`
	Error     string    `json:"error,omitempty"`      // one line that says why
	ErrorFile string    `json:"error_file,omitempty"` // if the rank wrote one, and there is a log directory to keep it in
	Message   string    `json:"message,omitempty"`    // what is in it
	Stderr    []string  `json:"stderr,omitempty"`     // last lines
	Crash     []string  `json:"crash,omitempty"`      // first lines of a Go panic or a Python traceback
	Log       string    `json:"log,omitempty"`        // the rank's file in the log directory

	Blames  *launch.Blame `json:"blames,omitempty"`   // what the rank's group noted when it failed
	NamedBy []int         `json:"named_by,omitempty"` // ranks that failed because of this one
	Said    string        `json:"said,omitempty"`     // what one of them says
}

func (f *Failure) how() string {
	switch {
	case f.State == stateUnknown:
		return "unknown: the agent of its node has not reported"
	case f.State != "":
		return f.State + "; the launcher ended it"
	case f.Signal != "":
		return "signal " + f.Signal
	}
	return "exit code " + strconv.Itoa(f.ExitCode)
}

// ended says which process has ended, and how.
func (f *Failure) ended() string {
	return fmt.Sprintf("rank %d (pid %d on host %s) ended with %s", f.Rank, f.PID, f.Host, f.how())
}

// Summary is how a job ended.
type Summary struct {
	OK       bool      `json:"ok"`
	ExitCode int       `json:"exit_code"` // First's; if that rank had not ended, or with 0, the first failed one's
	RunID    string    `json:"run_id"`
	Ranks    int       `json:"ranks"` // of all nodes
	Restarts int       `json:"restarts"`
	Signal   string    `json:"signal,omitempty"` // the first that the agent passed on
	Seconds  float64   `json:"seconds"`
	First    *Failure  `json:"first,omitempty"`  // of the last attempt, on any node: the rank at fault
	Others   []Failure `json:"others,omitempty"` // on this node, in the order of their ends, of ranks that a signal of the agent did not end
}

// Report describes the failure in lines of text. It is empty for a job that succeeded.
func (s *Summary) Report() string {
	if s.First == nil {
		return ""
	}
	f := s.First
	var b strings.Builder
	line := func(name, format string, args ...any) {
		text := strings.TrimRight(fmt.Sprintf(format, args...), "\n")
		fmt.Fprintf(&b, "  %-11s %s\n", name, strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", 14)))
	}
	const clock = "15:04:05.000"
	switch {
	case f.Rank < 0:
		fmt.Fprintf(&b, "%s\n", f.Message)
	case f.State != "":
		fmt.Fprintf(&b, "rank %d of %d is at fault\n", f.Rank, s.Ranks)
		line("state", "%s", f.how())
	default:
		fmt.Fprintf(&b, "rank %d of %d failed first\n", f.Rank, s.Ranks)
		line("ended with", "%s", f.how())
	}
	if f.Rank >= 0 && f.Error != "" {
		line("error", "%s", f.Error)
	}
	if !f.Time.IsZero() {
		line("time", "%s", f.Time.Format("2006-01-02 "+clock+" MST"))
	}
	if f.PID != 0 {
		line("where", "host %s, local rank %d, pid %d", f.Host, f.LocalRank, f.PID)
	}
	if f.Log != "" {
		line("log", "%s", f.Log)
	}
	if len(f.NamedBy) > 0 {
		line("named by", "%s", strings.Trim("rank "+rankList(f.NamedBy)+": "+f.Said, ": "))
	}
	if f.ErrorFile != "" {
		line("error file", "%s", f.ErrorFile)
	}
	if f.Rank >= 0 && f.Message != "" {
		line("message", "%s", f.Message)
	}
	if len(f.Crash) > 0 && !slices.Contains(f.Stderr, f.Crash[0]) {
		line("crash", "%s", strings.Join(f.Crash, "\n"))
	} else if len(f.Stderr) > 0 {
		line("last lines", "%s", strings.Join(f.Stderr, "\n"))
	}
	for i, o := range s.Others {
		if i == listedOthers {
			line("also", "%d more ranks", len(s.Others)-i)
			break
		}
		line("also", "%s", strings.TrimSuffix(fmt.Sprintf("rank %d at %s, %s: %s", o.Rank, o.Time.Format(clock), o.how(), o.Error), ": "))
	}
	if s.Restarts > 0 {
		line("restarts", "%d", s.Restarts)
	}
	return b.String()
}

// listedOthers is the number of other failed ranks that a report lists.
const listedOthers = 16

// rankList returns a list of ranks as text, shortened if it is long.
func rankList(ranks []int) string {
	const most = 8
	var words []string
	for i, r := range ranks {
		if i == most {
			return strings.Join(words, ", ") + fmt.Sprintf(" and %d more", len(ranks)-most)
		}
		words = append(words, strconv.Itoa(r))
	}
	return strings.Join(words, ", ")
}

func (j *Job) check() error {
	switch {
	case len(j.Command) == 0:
		return errors.New("no command")
	case j.Procs < 1:
		return fmt.Errorf("%d ranks on this node", j.Procs)
	case j.Nodes < 1 || j.NodeRank < 0 || j.NodeRank >= j.Nodes:
		return fmt.Errorf("node %d is not within %d nodes", j.NodeRank, j.Nodes)
	case j.Nodes > 1 && (j.MasterAddr == "" || j.MasterPort == 0):
		return fmt.Errorf("%d nodes need the address and port of node 0 (-master-addr, -master-port)", j.Nodes)
	case j.MasterPort < 0 || j.MasterPort > 65535:
		return fmt.Errorf("no port %d", j.MasterPort)
	case j.MaxRestarts < 0:
		return fmt.Errorf("%d restarts", j.MaxRestarts)
	case j.Most > 0 && (j.Least < 1 || j.Least > j.Most):
		return fmt.Errorf("at least %d and at most %d ranks", j.Least, j.Most)
	case j.Tee && j.LogDir == "":
		return errors.New("tee without a log directory")
	}
	return j.CheckSecrets()
}

// CheckSecrets returns an error if the job's files are incomplete.
func (j *Job) CheckSecrets() error {
	switch {
	case j.SecretsDir != "" && j.Secrets.TLS():
		return errors.New("give either a directory of certificates (-tls-dir) or TLS files")
	case j.TLS && j.Nodes > 1 && j.SecretsDir == "" && !j.Secrets.TLS():
		return fmt.Errorf("TLS on %d nodes needs files that all of them have: make a secret with c10d certs -secret FILE, copy it to every node, and give -tls-secret FILE", j.Nodes)
	}
	return j.Secrets.CheckMutual()
}

// maxHeld bounds what the agents' store holds for strangers. The longest value is an answer of a rank's page.
const maxHeld = 12 << 20

// Run runs the job to its end. It returns an error if a command cannot be started, a port is
// in use, or a node does not come. Ranks that fail are in the Summary. The end of ctx counts
// as a SIGTERM.
func Run(ctx context.Context, j Job) (*Summary, error) {
	if j.Nodes == 0 {
		j.Nodes = 1
	}
	if j.Grace == 0 {
		j.Grace = DefaultGrace
	}
	if j.Meeting == 0 {
		j.Meeting = DefaultMeeting
	}
	if j.Env == nil {
		j.Env = os.Environ()
	}
	if j.Logf == nil {
		j.Logf = func(string, ...any) {}
	}
	if err := j.check(); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	if j.MasterAddr == "" {
		j.MasterAddr = "127.0.0.1"
	}
	a := &agent{Job: j, out: newOutput(j.Stdout, j.Stderr)}
	a.out.logf = j.Logf
	a.host, _ = os.Hostname()
	s, err := a.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	return s, nil
}

type agent struct {
	Job
	out   *output
	host  string
	dir   string      // of the files that ranks write for the agent; removed at the end, by the guard if the agent is killed
	nodes store.Store // where the agents meet
	guard *guard

	tls *tls.Config // of the stores

	rankSecrets [][]string // variables of each local rank
	logs        []*os.File // of each local rank; none without LogDir
	pages       *pages     // nil without Debug

	base, size int       // this node's first rank; ranks of all nodes
	procs      []int     // ranks of each node
	gone       []string  // keys that are there when a node's agent has left the store, or is gone
	late       bool      // the job runs already, without this node, and its ranks join
	signal     os.Signal // the first one passed on
}

func (a *agent) run(ctx context.Context) (_ *Summary, err error) {
	start := time.Now()
	if a.LogDir != "" {
		if err := ownfile.MkdirAll(a.LogDir); err != nil {
			return nil, err
		}
	}
	// Not in LogDir: whoever may write there could put another directory in its place.
	if a.dir, err = os.MkdirTemp("", scratchName); err != nil {
		return nil, fmt.Errorf("%w: set TMPDIR to a directory of your own", err)
	}
	defer os.RemoveAll(a.dir)
	if a.guard, err = startGuard(a.Guard); err != nil {
		return nil, err
	}
	defer a.guard.close()
	a.guard.remove(a.dir)
	if err := a.loadSecrets(); err != nil {
		return nil, err
	}
	if err := a.meet(ctx); a.signal != nil {
		return a.interrupted(start, err == nil), nil
	} else if err != nil {
		return nil, err
	}
	defer a.part()
	defer func() {
		for _, log := range a.logs {
			log.Close()
		}
	}()
	if err := a.openLogs(); err != nil {
		return nil, err
	}
	if err := a.nameSecrets(); err != nil {
		return nil, err
	}
	if a.Most > 0 && (a.size < a.Least || a.size > a.Most) {
		return nil, fmt.Errorf("the nodes start %d ranks (-n times -nnodes), and the job has at least %d and at most %d (-elastic)", a.size, a.Least, a.Most)
	}

	defer func() { a.pages.close() }()
	if err := a.startPages(); err != nil {
		return nil, err
	}

	s := &Summary{RunID: a.RunID, Ranks: a.size}
	exitCode := 0
	var pause time.Duration
	for {
		begun := time.Now().Add(pause)
		end, failures, restarts, err := a.attempt(ctx, s.Restarts, pause)
		if err != nil {
			return nil, err
		}
		if a.Most > 0 {
			s.Restarts = restarts
		}
		if a.Most > 0 || end.OK || a.signal != nil || ctx.Err() != nil || s.Restarts == a.MaxRestarts || end.Last || end.First.Rank < 0 {
			s.OK, s.First, exitCode = end.OK, end.First, end.code()
			s.Others = slices.DeleteFunc(failures, func(f Failure) bool { return end.First != nil && f.Rank == end.First.Rank })
			break
		}
		s.Restarts++
		pause = nextPause(pause, time.Since(begun))
		a.Logf("rank %d failed (%s); restart %d of %d in %v", end.First.Rank, end.First.how(), s.Restarts, a.MaxRestarts, pause)
	}
	if s.First != nil {
		s.ExitCode = exitCode
	}
	if a.signal != nil {
		s.Signal = signalName(a.signal)
	}
	s.Seconds = time.Since(start).Seconds()
	return s, nil
}

// interrupted is the summary of a job that a signal ended before it began.
func (a *agent) interrupted(start time.Time, met bool) *Summary {
	if met {
		a.nodes.Close()
	}
	return &Summary{
		ExitCode: signalCode(a.signal), Signal: signalName(a.signal),
		RunID: a.RunID, Seconds: time.Since(start).Seconds(),
	}
}

// meet connects to the other nodes' agents and computes the numbers of this node's ranks.
func (a *agent) meet(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, a.Meeting, fmt.Errorf("not all %d nodes came within %v", a.Nodes, a.Meeting))
	defer cancel()
	ctx, stop := a.untilSignal(ctx)
	defer stop()
	given := a.RunID
	if a.RunID == "" {
		a.RunID = strings.ToLower(rand.Text())
	}
	if a.Nodes == 1 {
		a.nodes = store.NewHash()
	} else {
		addr := net.JoinHostPort(a.MasterAddr, strconv.Itoa(a.MasterPort))
		st, err := tcp.New(ctx, addr, tcp.Options{
			Server: a.NodeRank == 0, Listen: launch.ListenAddr(addr), Timeout: a.Meeting,
			TLS: a.tls, Rank: a.NodeRank, WorldSize: a.Nodes, NoWait: true, HostedBy: "node 0", Job: given,
			ServerOptions: tcp.ServerOptions{MaxHeld: maxHeld},
		})
		if errors.Is(err, tcp.ErrOtherJob) {
			return fmt.Errorf("node 0 has another -run-id: %w", err)
		}
		if err != nil {
			return err
		}
		a.nodes = st
	}
	a.nodes.SetTimeout(-1)
	err := func() error {
		self := node{Gone: "gone/" + rand.Text(), Procs: a.Procs, Nodes: a.Nodes, Least: a.Least, Most: a.Most}
		var err error
		if a.late, err = a.comesLate(ctx, self); err != nil {
			return err
		}
		if a.Nodes > 1 {
			if err := store.SetWill(ctx, a.nodes, self.Gone, nil, []byte("1")); err != nil {
				return err
			}
		}
		if a.Most == 0 {
			self.MaxRestarts = a.MaxRestarts
		}
		text, err := json.Marshal(self)
		if err == nil {
			err = a.nodes.Set(ctx, nodeKey(a.NodeRank), text)
		}
		if err != nil {
			return err
		}
		keys := make([]string, a.Nodes)
		for n := range keys {
			keys[n] = nodeKey(n)
		}
		late := time.AfterFunc(min(sayWaiting, a.Meeting/2), func() { a.sayMissing(ctx, keys) })
		defer late.Stop()
		for n := range keys {
			v, err := a.nodes.Get(ctx, keys[n])
			if err == nil {
				_, err = self.other(n, v)
			} else {
				err = fmt.Errorf("waiting for node %d of %d: %w", n, a.Nodes, err)
			}
			if err != nil {
				return err
			}
		}
		if a.NodeRank == 0 {
			if err := a.awaitAll(ctx, keys); err != nil {
				return err
			}
			if err := a.nodes.Set(ctx, "run_id", []byte(a.RunID)); err != nil {
				return err
			}
		}
		id, err := a.nodes.Get(ctx, "run_id")
		if err != nil {
			return err
		}
		a.RunID = string(id)
		if given != "" && given != a.RunID { // the store refuses other names, but node 0 has none
			return fmt.Errorf("node 0 was started without -run-id, and this node with -run-id %s: all nodes need the same", given)
		}
		values, err := a.nodes.MultiGet(ctx, keys)
		if err != nil {
			return err
		}
		for n, v := range values {
			other, err := self.other(n, v)
			if err != nil {
				return err
			}
			if n < a.NodeRank {
				a.base += other.Procs
			}
			a.size += other.Procs
			a.procs, a.gone = append(a.procs, other.Procs), append(a.gone, other.Gone)
		}
		return nil
	}()
	if err != nil {
		if st, ok := a.nodes.(*tcp.Store); ok {
			// The others may still have to read what this node was started with.
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
			st.Drain(last)
			cancel()
		}
		a.nodes.Close()
		if cause := context.Cause(ctx); cause != nil && ctx.Err() == context.DeadlineExceeded {
			err = fmt.Errorf("%w: %w", cause, err)
		}
	}
	return err
}

// comesLate reports whether the job has begun, and this node's agent has ended since. In an elastic job with a group it is
// replaced, and in others that is an error.
func (a *agent) comesLate(ctx context.Context, self node) (bool, error) {
	if begun, err := a.nodes.Check(ctx, "run_id"); !begun || err != nil || a.NodeRank == 0 {
		return false, err
	}
	there, err := a.there(ctx, nodeKey(a.NodeRank))
	if err == nil && there {
		err = fmt.Errorf("node %d has a launcher already", a.NodeRank)
	}
	if err != nil {
		return false, err
	}
	met, err := a.nodes.Check(ctx, metKey)
	if err == nil && (a.Most == 0 || !met) {
		err = fmt.Errorf("the job has begun, and the launcher of node %d has ended: only an elastic job whose group has been made takes another one", a.NodeRank)
	}
	if err != nil {
		return false, err
	}
	text, err := a.nodes.Get(ctx, nodeKey(a.NodeRank))
	if err != nil {
		return false, err
	}
	last, err := self.other(a.NodeRank, text)
	if err == nil && last.Procs != a.Procs {
		err = fmt.Errorf("node %d had %d ranks before its launcher ended, and has %d now", a.NodeRank, last.Procs, a.Procs)
	}
	return err == nil, err
}

// sayMissing logs which agents are not there.
func (a *agent) sayMissing(ctx context.Context, keys []string) {
	var missing []string
	for n, key := range keys {
		if there, err := a.there(ctx, key); err == nil && !there {
			missing = append(missing, strconv.Itoa(n))
		}
	}
	if len(missing) > 0 {
		a.Logf("waiting for node %s of %d, for at most %v", strings.Join(missing, ", "), a.Nodes, a.Meeting)
	}
}

// awaitAll waits until all agents are there. One that has ended may be started again.
func (a *agent) awaitAll(ctx context.Context, keys []string) error {
	for n := 0; n < len(keys); {
		there, err := a.there(ctx, keys[n])
		switch {
		case err != nil:
			return fmt.Errorf("node %d: %w", n, err)
		case there:
			n++
			continue
		}
		select {
		case <-time.After(againPause):
		case <-ctx.Done():
			return fmt.Errorf("the agent of node %d has ended, and was not started again: %w", n, ctx.Err())
		}
	}
	return nil
}

// there reports whether an agent has written its key, and has not ended since.
func (a *agent) there(ctx context.Context, key string) (bool, error) {
	if written, err := a.nodes.Check(ctx, key); !written || err != nil {
		return false, err
	}
	text, err := a.nodes.Get(ctx, key)
	if err != nil {
		return false, err
	}
	var other node
	if err := json.Unmarshal(text, &other); err != nil {
		return false, err
	}
	gone, err := a.nodes.Check(ctx, other.Gone)
	return !gone, err
}

// untilSignal returns a context that the first signal ends, until stop is called.
func (a *agent) untilSignal(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case a.signal = <-a.Signals:
			cancel()
		case <-stopped:
		}
	})
	return ctx, func() {
		close(stopped)
		watch.Wait()
		cancel()
	}
}

// node is what an agent tells the others. All but Gone and Procs must be the same on all nodes.
type node struct {
	Gone        string `json:"gone"` // see agent.gone; another one for each process, which may be started again
	Procs       int    `json:"procs"`
	Nodes       int    `json:"nodes"`
	MaxRestarts int    `json:"max_restarts"` // 0 for an elastic job
	Least       int    `json:"least"`
	Most        int    `json:"most"`
}

// other reads what node n tells. Flags in which it differs from this node are an error.
func (n node) other(number int, text []byte) (other node, err error) {
	if json.Unmarshal(text, &other) != nil || other.Procs < 1 || other.Procs > 1<<20 {
		return other, fmt.Errorf("node %d says that it is %.80q", number, text)
	}
	what := ""
	switch {
	case other.Nodes != n.Nodes:
		what = fmt.Sprintf("-nnodes %d, and this node with %d", other.Nodes, n.Nodes)
	case other.Least != n.Least || other.Most != n.Most:
		what = fmt.Sprintf("-elastic %d:%d, and this node with %d:%d (0:0 is none)", other.Least, other.Most, n.Least, n.Most)
	case other.MaxRestarts != n.MaxRestarts:
		what = fmt.Sprintf("-max-restarts %d, and this node with %d", other.MaxRestarts, n.MaxRestarts)
	default:
		return other, nil
	}
	return other, fmt.Errorf("node %d was started with %s: all nodes need the same", number, what)
}

func nodeKey(n int) string { return "node/" + strconv.Itoa(n) }

// part leaves the agents' store, node 0 as the last.
func (a *agent) part() {
	if a.NodeRank == 0 && a.Nodes > 1 {
		ctx, cancel := context.WithTimeout(context.Background(), storeWait)
		defer cancel()
		a.nodes.Wait(ctx, a.gone[1:]...)
	}
	a.nodes.Close()
}

// ending is the result of an attempt, the same on all nodes.
type ending struct {
	OK    bool
	First *Failure
	Last  bool // no attempt follows
	Code  int  // the exit code of the job if First has none: it had not ended, or with 0
}

func (e *ending) code() int {
	if e.First == nil {
		return 0
	}
	return cmp.Or(e.First.ExitCode, e.Code, 1)
}

// declare makes e the attempt's ending unless it has one.
func (a *agent) declare(key string, e ending) {
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	text, err := json.Marshal(e)
	if err == nil {
		_, err = a.nodes.CompareSet(ctx, key, nil, text)
	}
	if err != nil {
		a.Logf("telling the other nodes: %v", err)
	}
}

func nodeDoneKey(doneKey string, node int) string { return doneKey + "/" + strconv.Itoa(node) }

// done counts the nodes whose ranks have all succeeded. The last one declares the end. It marks the node only
// after that. If the agent dies before, awaitGone ends the attempt.
func (a *agent) done(doneKey, endKey string) {
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	n, err := a.nodes.Add(ctx, doneKey, 1)
	if err != nil {
		return // awaitEnd says so
	}
	if n == int64(a.Nodes) {
		a.declare(endKey, ending{OK: true})
	}
	_ = a.nodes.Set(ctx, nodeDoneKey(doneKey, a.NodeRank), nil)
}

// jobName is the name in the ranks' TORCHELASTIC_RUN_ID. torchrun writes "none" for a job
// without a name.
func (a *agent) jobName() string {
	if a.RunID == "none" {
		return ""
	}
	return a.RunID
}

// environ is the environment of a rank, the caller's with torchrun's variables.
func (a *agent) environ(local, restarts int, addr, errorFile string) []string {
	host, port, _ := net.SplitHostPort(addr)
	rank, size := strconv.Itoa(a.base+local), strconv.Itoa(a.size)
	set := [][2]string{
		{"RANK", rank},
		{"WORLD_SIZE", size},
		{"LOCAL_RANK", strconv.Itoa(local)},
		{"LOCAL_WORLD_SIZE", strconv.Itoa(a.Procs)},
		{"GROUP_RANK", strconv.Itoa(a.NodeRank)},
		{"GROUP_WORLD_SIZE", strconv.Itoa(a.Nodes)},
		{"ROLE_NAME", "default"},
		{"ROLE_RANK", rank},
		{"ROLE_WORLD_SIZE", size},
		{"MASTER_ADDR", host},
		{"MASTER_PORT", port},
		{"TORCHELASTIC_RESTART_COUNT", strconv.Itoa(restarts)},
		{"TORCHELASTIC_MAX_RESTARTS", strconv.Itoa(a.MaxRestarts)},
		{"TORCHELASTIC_RUN_ID", a.RunID},
		{"TORCHELASTIC_USE_AGENT_STORE", "True"},
		{"TORCHELASTIC_ERROR_FILE", errorFile},
	}
	elastic := ""
	if a.Most > 0 {
		elastic = fmt.Sprintf("%d:%d", a.Least, a.Most)
	}
	// This process may itself be a rank of an elastic job.
	set = append(set, [2]string{launch.ElasticVariable, elastic}, [2]string{launch.JoinVariable, ""}, [2]string{launch.EpochVariable, ""})
	isSet := func(name string) bool {
		return slices.ContainsFunc(a.Env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
	}
	if !isSet("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
		set = append(set, [2]string{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"})
	}
	if !isSet("OMP_NUM_THREADS") && a.Procs > 1 {
		set = append(set, [2]string{"OMP_NUM_THREADS", "1"}) // as torchrun, so that ranks do not compete for the cores
	}
	env := slices.Clone(a.Env)
	for _, kv := range set {
		env = append(env, kv[0]+"="+kv[1])
	}
	env = append(env, a.pages.environ(local)...)
	return append(env, a.rankSecrets[local]...) // the last of a name counts, see exec.Cmd
}

// start starts a rank. Its end is sent to exits. again is not 0 for a rank of an elastic job that is
// started again; with join it joins a group that exists.
func (a *agent) start(local, restarts, again int, join bool, addr string, exits chan<- exit) (*rank, error) {
	attempt, err := filepath.Abs(filepath.Join(a.dir, "attempt_"+strconv.Itoa(restarts)))
	if err != nil {
		return nil, err
	}
	dir, scratch := filepath.Join(attempt, strconv.Itoa(local)), filepath.Join(attempt, "scratch")
	if again > 0 {
		dir = filepath.Join(attempt, fmt.Sprintf("%d.%d", local, again))
	}
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.MkdirAll(scratch, 0o700)); err != nil {
		return nil, err
	}
	r := &rank{
		rank: a.base + local, local: local,
		errorFile: filepath.Join(dir, "error.json"), blameFile: filepath.Join(dir, "blame.json"), epochFile: filepath.Join(dir, "epoch.json"),
		cmd: exec.Command(a.Command[0], a.Command[1:]...), guard: a.guard,
	}
	r.cmd.Env = append(a.environ(local, restarts, addr, r.errorFile), launch.FailureVariable+"="+r.blameFile, launch.ScratchVariable+"="+scratch)
	if a.Most > 0 {
		r.cmd.Env = append(r.cmd.Env, launch.EpochVariable+"="+r.epochFile)
	}
	if join {
		r.cmd.Env = append(r.cmd.Env, launch.JoinVariable+"=1")
	}
	if again > 0 {
		restarts = again
	}
	setProcAttr(r.cmd)
	r.lines = &rankOutput{out: a.out, show: a.LogDir == "" || a.Tee}
	if a.LogDir != "" {
		r.lines.log = a.logs[local]
		if restarts > 0 {
			fmt.Fprintf(r.lines.log, "--- restart %d ---\n", restarts)
		}
	}
	if !a.NoPrefix {
		r.lines.prefix = prefix(r.rank, a.Color)
	}
	if err := r.start(exits); err != nil {
		return r, err
	}
	a.pages.started(r)
	return r, nil
}

// failure describes a rank that has ended.
func (a *agent) failure(x exit) Failure {
	f := a.stateOf(x.rank)
	f.State, f.ExitCode, f.Signal, f.Time = "", x.code, x.signal, x.at
	if x.code == 0 {
		return f
	}
	f.Stderr, f.Crash = x.rank.lines.lastLines(), x.rank.lines.crashed()
	text, _ := ownfile.Read(x.rank.errorFile, maxErrorFile)
	f.Message = errorMessage(text)
	f.Blames = readBlame(x.rank.blameFile)
	if f.Message != "" && a.LogDir != "" {
		f.ErrorFile = filepath.Join(a.LogDir, errorName(f.Rank))
		if err := ownfile.Replace(f.ErrorFile, text); err != nil {
			a.Logf("keeping the error file of rank %d: %v", f.Rank, err)
			f.ErrorFile = ""
		}
	}
	f.Error = f.reason(x.rank.lines.whyCrashed())
	return f
}

// stateOf describes a rank that may not have ended.
func (a *agent) stateOf(r *rank) Failure {
	f := Failure{Rank: r.rank, LocalRank: r.local, Host: a.host, PID: r.cmd.Process.Pid, State: stateRunning}
	if isStopped(f.PID) {
		f.State = stateStopped
	}
	if a.LogDir != "" {
		f.Log = a.logFile(r.rank)
	}
	return f
}

// openLogs makes the logs of this node's ranks. Before that it removes an earlier run's files from the log
// directory, also those of ranks that this job does not have.
func (a *agent) openLogs() error {
	if a.LogDir == "" {
		return nil
	}
	old, err := os.ReadDir(a.LogDir)
	for _, f := range old {
		var rank int
		if _, no := fmt.Sscanf(f.Name(), "rank%d.", &rank); no != nil || f.Name() != errorName(rank) && f.Name() != logName(rank) {
			continue
		}
		if mine := rank >= a.base && rank < a.base+a.Procs; mine || rank >= max(a.size, a.Most) {
			path := filepath.Join(a.LogDir, f.Name())
			err = errors.Join(err, ownfile.Explain(path, os.Remove(path)))
		}
	}
	for local := 0; err == nil && local < a.Procs; local++ {
		var log *os.File
		if log, err = ownfile.Create(a.logFile(a.base + local)); err == nil {
			a.logs = append(a.logs, log)
		}
	}
	return err
}

// errorName is the name of a rank's error file in the log directory.
func errorName(rank int) string { return fmt.Sprintf("rank%d.error.json", rank) }

// logName is the name of a rank's output in the log directory.
func logName(rank int) string { return fmt.Sprintf("rank%d.log", rank) }

func (a *agent) logFile(rank int) string { return filepath.Join(a.LogDir, logName(rank)) }

// reason returns the line that says why a rank failed. crash is the line of a panic or a
// traceback.
func (f *Failure) reason(crash string) string {
	text := cmp.Or(crash, lastLine(strings.Split(f.Message, "\n")), lastLine(f.Stderr))
	return text[:min(len(text), tailWidth)]
}

// lastLine returns the last line that is not empty.
func lastLine(lines []string) string {
	for _, line := range slices.Backward(lines) {
		if line = strings.TrimSpace(line); line != "" {
			return line
		}
	}
	return ""
}

// Tracebacks have a few KiB. The log directory gets more of a rank's error file than reports do.
const (
	maxErrorFile    = 1 << 20
	maxErrorMessage = 64 << 10
)

// errorMessage returns what reports have of a rank's error file: the traceback or the message if
// it has torchrun's form, otherwise the text.
func errorMessage(text []byte) string {
	text = text[:min(len(text), maxErrorMessage)]
	var outer struct{ Message json.RawMessage }
	if json.Unmarshal(text, &outer) != nil || len(outer.Message) == 0 {
		return string(text)
	}
	var message string
	if json.Unmarshal(outer.Message, &message) == nil {
		return message
	}
	var inner struct {
		Message   string
		ExtraInfo struct {
			Stack string `json:"py_callstack"`
		}
	}
	if json.Unmarshal(outer.Message, &inner) != nil || inner.ExtraInfo.Stack+inner.Message == "" {
		return string(text)
	}
	if inner.ExtraInfo.Stack != "" {
		return inner.ExtraInfo.Stack
	}
	return inner.Message
}
