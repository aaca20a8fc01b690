package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/script"
)

// promptly is how soon a Go rank must have ended after another was killed. It should be at once,
// but the machine may be busy. It is far below patience, the limit of its operation.
const promptly = 20 * time.Second

// closed matches gloo's error for a connection whose other side has gone.
var closed = regexp.MustCompile(`[Cc]onnection (closed|reset) by peer|Broken pipe`)

// A PyTorch rank that begins to send while its connection ends can miss the end. The operation
// then lasts until its timeout. That happened in one of a hundred runs with PyTorch 1.13 on a
// busy machine: gloo had closed its end of the connection to the dead rank and waited for it to
// send. A Go rank cannot prevent that, so the job runs again.
var (
	errMissed = errors.New("gloo missed the end of a connection")
	missed    = regexp.MustCompile(`Timed out waiting`)
)

// missedTries is how often such a job runs at most.
const missedTries = 4

// gloosPatience is the timeout of PyTorch's operations when a Go rank is killed.
const gloosPatience = 45 * time.Second

// deaths kills a rank in the middle of a script and checks the errors of the others.
func (l *lab) deaths(ctx context.Context, only *regexp.Regexp, quick bool) []Job {
	// Long enough to kill a rank in the middle.
	lines := make([]script.Line, 20000)
	for i := range lines {
		lines[i] = script.Line{Op: "all_reduce", Shape: []int{1000}}
	}
	var all []Job
	for _, d := range []struct {
		kind   string
		name   string
		size   int
		ours   []int
		victim int
		env    []string
		again  bool // not in quick runs
	}{
		{"a PyTorch rank is killed: Go ranks name it at once", "PyTorch rank killed, Go on 0", 2, []int{0}, 1, nil, true},
		{"a PyTorch rank is killed: Go ranks name it at once", "PyTorch rank killed, Go on 0 and 1", 3, []int{0, 1}, 2, nil, false},
		{"a PyTorch rank is killed: Go ranks name it at once", "PyTorch rank killed, Go on 0 and 1, DETAIL", 3, []int{0, 1}, 2, []string{detail}, false},
		{"a Go rank is killed: PyTorch ranks say that the connection was closed", "Go rank killed, PyTorch on 0", 2, []int{1}, 1, nil, false},
		{"a Go rank is killed: PyTorch ranks say that the connection was closed", "Go rank killed, PyTorch on 0, DETAIL", 2, []int{1}, 1, []string{detail}, true},
	} {
		if !only.MatchString(d.name) || quick && d.again {
			continue
		}
		start := time.Now()
		x := Job{Kind: d.kind, Name: d.name, Size: d.size, Go: d.ours, Lines: len(lines)}
		j := job{Size: d.size, Go: d.ours, Store: storeServer, Env: d.env, lines: lines}
		if j.isGo(d.victim) {
			j.Env = append(slices.Clip(j.Env), fmt.Sprint("SCRIPT_TIMEOUT=", gloosPatience.Seconds()))
		}
		err := l.death(ctx, j, d.victim)
		for errors.Is(err, errMissed) && x.Missed+1 < missedTries {
			x.Missed++
			err = l.death(ctx, j, d.victim)
		}
		if err != nil {
			x.Error = err.Error()
		}
		x.Seconds = time.Since(start).Seconds()
		all = append(all, x)
	}
	return all
}

func (l *lab) death(ctx context.Context, j job, victim int) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	g, err := l.start(ctx, j)
	if err != nil {
		return err
	}
	defer g.stop()
	for printed := int64(0); printed == 0; {
		select {
		case <-g.failed:
			_, err := g.results()
			return fmt.Errorf("before anything was killed: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
		info, err := os.Stat(g.out(victim))
		if err != nil {
			return err
		}
		printed = info.Size()
	}
	killed := time.Now()
	if err := g.procs[victim].cmd.Process.Kill(); err != nil {
		return err
	}
	for r, p := range g.procs {
		if r == victim {
			continue
		}
		select {
		case <-p.ended:
		case <-time.After(patience):
			return fmt.Errorf("%s still runs %v after rank %d was killed", p.what, patience, victim)
		}
		took := p.at.Sub(killed)
		said, err := os.ReadFile(g.err(r))
		if err != nil {
			return err
		}
		switch {
		case p.err == nil:
			return fmt.Errorf("%s ended well although rank %d was killed", p.what, victim)
		case !j.isGo(r) && missed.Match(said):
			return fmt.Errorf("%s: %w", p.what, errMissed)
		case !j.isGo(r):
			if !closed.Match(said) {
				return fmt.Errorf("%s does not say that a connection was closed: %s", p.what, tail(g.err(r)))
			}
		case took > promptly:
			return fmt.Errorf("%s ended %v after rank %d was killed", p.what, took, victim)
		case !strings.Contains(string(said), fmt.Sprintf("rank %d", victim)):
			return fmt.Errorf("%s does not name rank %d: %s", p.what, victim, said)
		}
	}
	return nil
}
