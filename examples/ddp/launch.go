package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/store/tcp"
)

// grace is how long ranks may go on after the first of them has failed. The
// library tells survivors of a dead rank within two seconds.
const grace = 5 * time.Second

// lifeline is set for a rank whose standard input is a pipe from its launcher.
// The pipe ends when the launcher does, however it does, on every system.
const lifeline = "C10D_DEMO_LIFELINE"

// launch runs this program c.nproc times, as the ranks of one job, and waits
// for them: a small torchrun. The launcher hosts the store, so that it outlives
// every rank.
func launch(ctx context.Context, c *config, args []string) error {
	if c.device == onCUDA {
		if err := haveGPU(); err != nil {
			return err
		}
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("ddp: %w", err)
	}
	runID := fmt.Sprintf("ddp-%d-%d", os.Getpid(), time.Now().UnixNano())
	env := append(os.Environ(),
		lifeline+"=1", "TORCHELASTIC_RUN_ID="+runID, "TORCHELASTIC_RESTART_COUNT=0",
		"WORLD_SIZE="+strconv.Itoa(c.nproc), "LOCAL_WORLD_SIZE="+strconv.Itoa(c.nproc))
	init := "env://"
	switch c.store {
	case "tcp":
		server, err := tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{})
		if err != nil {
			return err
		}
		defer server.Close()
		host, port, err := net.SplitHostPort(server.Addr().String())
		if err != nil {
			return err
		}
		env = append(env, "MASTER_ADDR="+host, "MASTER_PORT="+port, "TORCHELASTIC_USE_AGENT_STORE=True")
	case "redis":
		init = c.redisURL
	case "file":
		dir, err := os.MkdirTemp("", "c10d-ddp-")
		if err != nil {
			return fmt.Errorf("ddp: %w", err)
		}
		defer os.RemoveAll(dir)
		init = (&url.URL{Scheme: "file", Path: filepath.ToSlash(filepath.Join(dir, "store"))}).String()
	}
	if c.device == onSim && runtime.GOOS != "windows" {
		dir, err := os.MkdirTemp("", "c10d-ddp-sim-")
		if err != nil {
			return fmt.Errorf("ddp: %w", err)
		}
		defer os.RemoveAll(dir)
		env = append(env, simHost+"="+dir)
	}
	if c.store != "tcp" {
		env = append(env, "MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_USE_AGENT_STORE=")
	}
	args = append(args[:len(args):len(args)], "-nproc=0", "-init="+init)

	var stderr sync.Mutex
	job := new(job)
	ends := make(chan end)
	for rank := range c.nproc {
		cmd := exec.Command(program, args...)
		cmd.Env = append(env[:len(env):len(env)], "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank))
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr // rank 0 draws on the terminal itself
		if rank > 0 {
			prefixed := &prefixer{out: os.Stderr, mu: &stderr, prefix: fmt.Sprintf("[rank %d] ", rank)}
			cmd.Stdout, cmd.Stderr = prefixed, prefixed
		}
		// What a rank started must not keep Wait from returning.
		cmd.WaitDelay = time.Second
		line, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			job.stop()
			job.kill()
			for range job.ranks {
				<-ends
			}
			return fmt.Errorf("ddp: start rank %d: %w", rank, err)
		}
		job.ranks = append(job.ranks, &child{cmd: cmd, lifeline: line})
		go func() {
			err := cmd.Wait()
			ends <- end{rank, err}
		}()
	}
	return job.wait(ctx, ends)
}

// job is the ranks that this process started.
type job struct{ ranks []*child }

type child struct {
	cmd      *exec.Cmd
	lifeline io.Closer
	killed   bool // by the launcher
	end      *end
}

type end struct {
	rank int
	err  error
}

// stop asks every rank to end, by the end of its standard input.
func (j *job) stop() {
	for _, c := range j.ranks {
		c.lifeline.Close()
	}
}

func (j *job) kill() {
	for _, c := range j.ranks {
		if c.end == nil {
			c.killed = true
			// The error says that it has ended already.
			_ = c.cmd.Process.Kill()
		}
	}
}

// wait waits for all ranks. Once one has failed or ctx has ended, the others
// have the grace period to end too.
func (j *job) wait(ctx context.Context, ends <-chan end) error {
	cancelled := ctx.Done()
	var deadline <-chan time.Time
	failing := false
	for range j.ranks {
		for got := false; !got; {
			select {
			case e := <-ends:
				j.ranks[e.rank].end, got = &e, true
				if e.err != nil && !failing {
					failing, deadline = true, time.After(grace)
				}
			case <-cancelled:
				cancelled = nil
				j.stop()
				if !failing {
					failing, deadline = true, time.After(grace)
				}
			case <-deadline:
				j.kill()
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("ddp: interrupted: %w", err)
	}
	return j.verdict()
}

// verdict names the ranks at fault: those that failed for a reason of their
// own; if there are none, those that had to be killed; and only then the ranks
// that failed because of another.
func (j *job) verdict() error {
	var own, hung, peer []string
	for rank, c := range j.ranks {
		if c.end == nil || c.end.err == nil {
			continue
		}
		text := fmt.Sprintf("rank %d: %v", rank, c.end.err)
		var exit *exec.ExitError
		switch {
		case c.killed:
			hung = append(hung, fmt.Sprintf("rank %d did not end by itself and was killed", rank))
		case errors.As(c.end.err, &exit) && exit.ExitCode() == exitPeer:
			peer = append(peer, text)
		default:
			own = append(own, text)
		}
	}
	for _, at := range [][]string{own, hung, peer} {
		if len(at) > 0 {
			return fmt.Errorf("ddp: %s (of %d ranks)", strings.Join(at, "; "), len(j.ranks))
		}
	}
	return nil
}

// followLauncher returns a context that ends when the launcher does, if one of
// this program's started this rank. A rank that does not end then is ended.
func followLauncher(ctx context.Context) (context.Context, context.CancelFunc) {
	if os.Getenv(lifeline) == "" {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the pipe, whatever the error
		cancel()
		time.AfterFunc(grace, func() { os.Exit(exitOrphaned) })
	}()
	return ctx, cancel
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
