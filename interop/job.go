package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/script"
)

//go:embed rank.py
var rankPy []byte

// lab has a folder with the two programs, in which jobs run, and the command of Python.
type lab struct {
	dir     string
	python  []string // a command; what it starts must see dir
	version version
	inner   string // the interpreter, as torchrun's children find it
	noUV    bool   // PyTorch was built without libuv, on which its store is served by default
}

// c10d is the program of the Go ranks, rank the one of the PyTorch ranks.
func (l *lab) c10d() string { return filepath.Join(l.dir, "c10d") }
func (l *lab) rank() string { return filepath.Join(l.dir, "rank.py") }

// The stores of a job.
const (
	storeRank0    = "rank 0" // the first rank hosts it, as in most PyTorch jobs
	storeServer   = "c10d store"
	storeTorchrun = "torchrun" // its agent hosts it, and starts the ranks
	storeFile     = "file"
)

// job is one group of processes that run one script.
type job struct {
	Kind  string // its row in tables
	Name  string
	Size  int
	Go    []int // the ranks that are Go's
	Store string
	Again bool     // not in quick runs: it repeats another job in another place
	IPv6  bool     // in a network that has ::1 and nothing else
	Env   []string // of every rank, over the usual
	lines []script.Line
	own   map[int][]script.Line // of ranks that run another script, as long as lines
}

// script is what a rank runs.
func (j *job) script(rank int) []script.Line {
	if own, ok := j.own[rank]; ok {
		return own
	}
	return j.lines
}

func (j *job) isGo(rank int) bool { return slices.Contains(j.Go, rank) }

// limit bounds a job: the longest script takes a fifteenth of it on two idle cores.
const limit = 12 * time.Minute

// patience is the limit of an operation, from the start on. A rank that imports PyTorch may take
// tens of seconds to start.
const patience = 3 * time.Minute

// settle is how long the other ranks of a failed job have to fail too.
const settle = 20 * time.Second

// run runs a job and returns each rank's results. An error names the ranks that failed, with
// their messages.
func (l *lab) run(ctx context.Context, j job) ([][]script.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	g, err := l.start(ctx, j)
	if err != nil {
		return nil, err
	}
	defer g.stop()
	for _, p := range g.procs {
		select {
		case <-p.ended:
		case <-g.failed:
			select {
			case <-p.ended:
			case <-time.After(settle):
			}
		}
	}
	g.kill()
	return g.results()
}

// group is the processes of a running job.
type group struct {
	job    job
	dir    string
	procs  []*proc
	failed chan struct{} // closed when one has failed
	once   sync.Once
	kill   context.CancelFunc
	undo   []func()
}

// proc is one process: a rank, or torchrun with all of them.
type proc struct {
	what  string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error     // when ended
	at    time.Time // when ended
}

// stop kills the remaining processes of a group and its helpers.
func (g *group) stop() {
	g.kill()
	for _, p := range g.procs {
		<-p.ended
	}
	for _, f := range slices.Backward(g.undo) {
		f()
	}
}

func (g *group) out(rank int) string    { return filepath.Join(g.dir, "out."+strconv.Itoa(rank)) }
func (g *group) script(rank int) string { return filepath.Join(g.dir, "script."+strconv.Itoa(rank)) }
func (g *group) err(rank int) string    { return filepath.Join(g.dir, "err."+strconv.Itoa(rank)) }

// start starts the processes of a job. Their results go to files.
func (l *lab) start(ctx context.Context, j job) (_ *group, err error) {
	ctx, cancel := context.WithCancel(ctx)
	g := &group{job: j, failed: make(chan struct{}), kill: cancel}
	defer func() {
		if err != nil {
			g.stop()
		}
	}()
	if g.dir, err = os.MkdirTemp(l.dir, "job"); err != nil {
		return nil, err
	}
	g.undo = append(g.undo, func() { os.RemoveAll(g.dir) })
	file := filepath.Join(g.dir, "script")
	if err := os.WriteFile(file, text(j.lines), 0o644); err != nil {
		return nil, err
	}
	for r, lines := range j.own {
		if err := os.WriteFile(g.script(r), text(lines), 0o644); err != nil {
			return nil, err
		}
	}
	host, port := "127.0.0.1", "29500"
	var prefix []string
	if j.IPv6 {
		host = "::1"
		enter, leave, err := onlyIPv6(ctx)
		if err != nil {
			return nil, err
		}
		prefix, g.undo = enter, append(g.undo, leave)
	} else {
		addr, err := freeport.Reserve()
		if err != nil {
			return nil, fmt.Errorf("interop: a free port: %w", err)
		}
		if _, port, err = net.SplitHostPort(addr); err != nil {
			return nil, err
		}
	}
	env := append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", fmt.Sprint("SCRIPT_TIMEOUT=", patience.Seconds()),
		"MASTER_ADDR="+host, "MASTER_PORT="+port, "WORLD_SIZE="+strconv.Itoa(j.Size))
	if l.noUV {
		env = append(env, "USE_LIBUV=0")
	}
	env = append(env, j.Env...)
	python := slices.Concat(prefix, l.python)
	goRank := slices.Concat(prefix, []string{l.c10d(), "rank", "-wire", "gloo", "-timeout", patience.String(), "-script", file})
	torchRank := slices.Concat(python, []string{l.rank(), file})

	switch j.Store {
	case storeServer:
		_, leave, err := background(ctx, slices.Concat(prefix, []string{l.c10d(), "store", "-listen", net.JoinHostPort(host, port)}), "listening")
		if err != nil {
			return nil, err
		}
		g.undo = append(g.undo, leave)
		env = append(env, "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0")
	case storeFile:
		url := "file://" + filepath.Join(g.dir, "store")
		goRank, torchRank = append(goRank, "-init", url), append(torchRank, url)
	case storeTorchrun:
		wrapper, err := l.wrapper(g, file)
		if err != nil {
			return nil, err
		}
		run := []string{l.rank(), "--torchrun", "--nnodes=1", "--node_rank=0", "--nproc_per_node=" + strconv.Itoa(j.Size),
			"--master_addr=" + host, "--master_port=" + port,
			// Without these, torchrun 1.13 fails under Python 3.11, whose enumerations leave out zero.
			"--redirects=1", "--tee=1", "--log_dir=" + g.dir, "--no_python", wrapper}
		return g, g.launch(ctx, "torchrun", -1, slices.Concat(python, run), env)
	}
	for r := range j.Size {
		args, what := torchRank, fmt.Sprintf("rank %d, PyTorch", r)
		if j.isGo(r) {
			args, what = goRank, fmt.Sprintf("rank %d, Go", r)
		}
		if j.own[r] != nil {
			args = slices.Clone(args)
			args[slices.Index(args, file)] = g.script(r)
		}
		if err := g.launch(ctx, what, r, args, append(slices.Clip(env), "RANK="+strconv.Itoa(r))); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// wrapper writes the program that torchrun starts for each rank.
func (l *lab) wrapper(g *group, file string) (string, error) {
	var ours strings.Builder
	for _, r := range g.job.Go {
		fmt.Fprintf(&ours, " %d ", r)
	}
	path := filepath.Join(g.dir, "wrapper")
	return path, os.WriteFile(path, fmt.Appendf(nil, `#!/bin/sh
exec >%[1]s/out.$RANK 2>%[1]s/err.$RANK
case "%[2]s" in
*" $RANK "*) exec %[3]s rank -wire gloo -timeout %[7]s -script %[4]s ;;
esac
exec %[5]s %[6]s %[4]s
`, g.dir, ours.String(), l.c10d(), file, l.inner, l.rank(), patience), 0o755)
}

// launch starts one process. Rank -1 is a helper; its output matters only if it fails.
func (g *group) launch(ctx context.Context, what string, rank int, args, env []string) error {
	out, err := os.Create(g.out(rank))
	if err != nil {
		return err
	}
	defer out.Close()
	stderr, err := os.Create(g.err(rank))
	if err != nil {
		return err
	}
	defer stderr.Close()
	p := &proc{what: what, cmd: exec.CommandContext(ctx, args[0], args[1:]...), ended: make(chan struct{})}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = env, out, stderr
	if err := p.cmd.Start(); err != nil {
		return err
	}
	g.procs = append(g.procs, p)
	go func() {
		p.err, p.at = p.cmd.Wait(), time.Now()
		close(p.ended)
		if p.err != nil {
			g.once.Do(func() { close(g.failed) })
		}
	}()
	return nil
}

// results reads what the ranks of an ended group have printed.
func (g *group) results() ([][]script.Result, error) {
	var errs []error
	for i, p := range g.procs {
		<-p.ended
		if p.err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", p.what, p.err))
		ranks := []int{i}
		if g.job.Store == storeTorchrun {
			ranks = ranks[:0]
			for r := -1; r < g.job.Size; r++ {
				ranks = append(ranks, r)
			}
		}
		for _, r := range ranks {
			if s := tail(g.err(r)); s != "" {
				errs = append(errs, fmt.Errorf("\t%s", strings.ReplaceAll(s, "\n", "\n\t")))
			}
		}
	}
	all := make([][]script.Result, g.job.Size)
	for r := range all {
		printed, err := os.ReadFile(g.out(r))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for sc := bufio.NewScanner(bytes.NewReader(printed)); sc.Scan(); {
			var x script.Result
			if err := json.Unmarshal(sc.Bytes(), &x); err != nil {
				errs = append(errs, fmt.Errorf("rank %d printed %q: %w", r, sc.Text(), err))
				break
			}
			all[r] = append(all[r], x)
		}
		lines := g.job.script(r)
		if n := len(all[r]); n != len(lines) {
			var next []byte
			if n < len(lines) {
				next = bytes.TrimSpace(text(lines[n : n+1]))
			}
			errs = append(errs, fmt.Errorf("rank %d printed %d results of %d; next is %s", r, n, len(lines), next))
		}
	}
	return all, errors.Join(errs...)
}

// tail returns the last lines of a file; they have the error of a Python traceback.
func tail(file string) string {
	text, _ := os.ReadFile(file)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// onlyIPv6 makes a network namespace in which this host has the address ::1 only. leave removes
// it. A command runs there with enter before it. It needs root, or the right to make namespaces,
// and the program ip.
func onlyIPv6(ctx context.Context) (enter []string, leave func(), err error) {
	pid, leave, err := background(ctx, []string{"unshare", "--net", "sh", "-c",
		"ip link set lo up && ip address del 127.0.0.1/8 dev lo && echo ready && exec sleep infinity"}, "ready")
	return []string{"nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", pid)}, leave, err
}

// background starts a helper of a job and waits until it prints word. leave ends it.
func background(ctx context.Context, args []string, word string) (pid int, leave func(), err error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	leave = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	said := bufio.NewReader(out)
	line, err := said.ReadString('\n')
	if !strings.HasPrefix(line, word) {
		leave()
		return 0, nil, fmt.Errorf("%s: %q, %v\n%s", strings.Join(args, " "), line, err, stderr.String())
	}
	return cmd.Process.Pid, leave, nil
}
