package main

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/store/tcp"
)

//go:embed trainer.py
var trainerPy []byte

// grace is how long ranks may go on after the first of them has failed, to say
// what they know of it.
const grace = 5 * time.Second

// launcher starts trainings with one job file.
type launcher struct {
	config *config
	job    *job
	stderr io.Writer
	mu     sync.Mutex // of stderr
	dir    string     // with job.json and trainer.py
}

func newLauncher(ctx context.Context, c *config, stderr io.Writer) (*launcher, error) {
	l := &launcher{config: c, stderr: stderr}
	torch := ""
	if c.pyRanks > 0 || c.store == "python" {
		var err error
		if torch, err = torchVersion(ctx, c.python); err != nil {
			return nil, err
		}
	}
	var err error
	if l.job, err = newJob(c, torch); err != nil {
		return nil, err
	}
	b, err := json.Marshal(l.job)
	if err != nil {
		return nil, fmt.Errorf("ddp: %w", err)
	}
	if l.dir, err = os.MkdirTemp("", "c10d-torch-ddp-"); err != nil {
		return nil, fmt.Errorf("ddp: %w", err)
	}
	for name, b := range map[string][]byte{"job.json": b, "trainer.py": trainerPy} {
		if err := os.WriteFile(filepath.Join(l.dir, name), b, 0o600); err != nil {
			l.close()
			return nil, fmt.Errorf("ddp: %w", err)
		}
	}
	return l, nil
}

func (l *launcher) close() { _ = os.RemoveAll(l.dir) } // a temporary directory that stays does no harm

// torchVersion asks without importing PyTorch, which takes seconds.
func torchVersion(ctx context.Context, python string) (string, error) {
	const ask = `
import importlib.util, os, runpy, sys
spec = importlib.util.find_spec("torch")
if spec is None: sys.exit("no module named torch")
print(runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))["__version__"])`
	out, err := exec.CommandContext(ctx, python, "-c", ask).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = errors.New(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return "", fmt.Errorf("ddp: -python-exe %s has no PyTorch: %w", python, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// train runs one training with ranks of the given kinds and returns what each says.
func (l *launcher) train(ctx context.Context, kinds []kind) ([]result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	env, stop, err := l.meet(ctx, len(kinds))
	if err != nil {
		return nil, err
	}
	defer stop()
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("ddp: %w", err)
	}
	file := filepath.Join(l.dir, "job.json")
	out := make([]bytes.Buffer, len(kinds))
	errs := make([]error, len(kinds))
	ended := make(chan int)
	for rank, k := range kinds {
		args := []string{self, "-job", file}
		if k == pythonRank {
			args = []string{l.config.python, filepath.Join(l.dir, "trainer.py"), file}
		}
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Env = append(env[:len(env):len(env)], "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank))
		cmd.Stdout = &out[rank]
		cmd.Stderr = &prefixer{out: l.stderr, mu: &l.mu, prefix: fmt.Sprintf("[rank %d %s] ", rank, k)}
		if err := start(cmd); err != nil {
			cancel()
			for range rank {
				<-ended
			}
			return nil, fmt.Errorf("ddp: start rank %d (%s): %w", rank, k, err)
		}
		go func() {
			errs[rank] = cmd.Wait()
			ended <- rank
		}()
	}
	var failed []string // in the order of their ends
	for range kinds {
		rank := <-ended
		if errs[rank] == nil {
			continue
		}
		if len(failed) == 0 {
			late := time.AfterFunc(grace, cancel)
			defer late.Stop()
		}
		failed = append(failed, fmt.Sprintf("rank %d (%s): %v", rank, kinds[rank], errs[rank]))
	}
	if len(failed) > 0 {
		return nil, fmt.Errorf("ddp: %d of %d ranks failed: %s", len(failed), len(kinds), strings.Join(failed, "; "))
	}
	results := make([]result, len(kinds))
	for rank := range results {
		if err := json.Unmarshal(out[rank].Bytes(), &results[rank]); err != nil {
			return nil, fmt.Errorf("ddp: result of rank %d (%s): %w", rank, kinds[rank], err)
		}
	}
	return results, nil
}

// start starts cmd with a standard input that ends when this process does,
// however it does.
func start(cmd *exec.Cmd) error {
	cmd.WaitDelay = time.Second // what it started must not keep Wait from returning
	if _, err := cmd.StdinPipe(); err != nil {
		return err
	}
	return cmd.Start()
}

// meet returns the environment in which ranks find each other, and starts the
// store unless rank 0 hosts it. stop ends the store.
func (l *launcher) meet(ctx context.Context, ranks int) (env []string, stop func(), err error) {
	loopback := net.IPv4(127, 0, 0, 1).String()
	agent, port := "", 0
	stop = func() {}
	if l.config.store == "go" {
		server, err := tcp.Listen(ctx, net.JoinHostPort(loopback, "0"), tcp.ServerOptions{})
		if err != nil {
			return nil, nil, err
		}
		agent, port = "True", server.Addr().(*net.TCPAddr).Port
		stop = func() { _ = server.Close() } // the training is over
	} else if port, err = freePort(loopback); err != nil {
		return nil, nil, err
	}
	if l.config.store == "python" {
		agent = "True"
	}
	env = append(os.Environ(),
		"MASTER_ADDR="+loopback, "MASTER_PORT="+strconv.Itoa(port),
		"WORLD_SIZE="+strconv.Itoa(ranks), "LOCAL_WORLD_SIZE="+strconv.Itoa(ranks),
		// With these, ranks take the store for that of an agent, as torchrun's.
		"TORCHELASTIC_USE_AGENT_STORE="+agent, "TORCHELASTIC_RESTART_COUNT=0")
	if os.Getenv("GLOO_SOCKET_IFNAME") == "" {
		// A PyTorch rank would look up the host's name, which need not have an address.
		name, err := loopbackInterface()
		if err != nil {
			return nil, nil, err
		}
		env = append(env, "GLOO_SOCKET_IFNAME="+name)
	}
	if l.config.store == "python" {
		stop, err = l.pythonStore(ctx, env)
	}
	return env, stop, err
}

// pythonStore starts a process that hosts the store and waits until it does.
func (l *launcher) pythonStore(ctx context.Context, env []string) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, l.config.python, filepath.Join(l.dir, "trainer.py"), "--store")
	cmd.Env = env
	cmd.Stderr = &prefixer{out: l.stderr, mu: &l.mu, prefix: "[store python] "}
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = start(cmd)
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("ddp: start the store: %w", err)
	}
	stop = func() {
		cancel()
		_ = cmd.Wait() // says that it was killed
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "ready\n" {
		stop()
		return nil, fmt.Errorf("ddp: the store in Python did not start: it says %q", line)
	}
	return stop, nil
}

// freePort returns a free port, which the system gives to nobody else until rank
// 0, which may take seconds to import PyTorch, listens on it. A connection to it,
// closed on the listening side first, keeps it: that side is remembered for a
// minute or so.
func freePort(host string) (port int, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("ddp: %w", err)
		}
	}()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return 0, err
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return 0, err
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		return 0, err
	}
	far.Close()
	if _, err := io.Copy(io.Discard, near); err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, nil
}

func loopbackInterface() (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("ddp: %w", err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			return i.Name, nil
		}
	}
	return "", errors.New("ddp: no loopback interface")
}

// prefixer writes whole lines, each behind a prefix.
type prefixer struct {
	out    io.Writer
	mu     *sync.Mutex // of out
	prefix string
	line   []byte
}

func (p *prefixer) Write(b []byte) (int, error) {
	p.line = append(p.line, b...)
	for {
		i := bytes.IndexByte(p.line, '\n')
		if i < 0 {
			return len(b), nil
		}
		p.mu.Lock()
		_, err := fmt.Fprintf(p.out, "%s%s", p.prefix, p.line[:i+1])
		p.mu.Unlock()
		p.line = p.line[i+1:]
		if err != nil {
			return len(b), err
		}
	}
}
