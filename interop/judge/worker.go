package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// setting is what a worker runs cases with.
type setting struct {
	suite string
	wire  wire
}

// answer is a line of a worker: the first lists the cases, the others say how one ended.
type answer struct {
	Cases []string `json:"cases"`

	Case    string  `json:"case"`
	Status  string  `json:"status"` // pass, fail or skip
	Seconds float64 `json:"seconds"`
	Text    string  `json:"text"`  // why it failed or was skipped
	Texts   []text  `json:"texts"` // of errors that differ
}

// text is the text of an error, and the pattern that PyTorch's test has for it.
type text struct{ Want, Got string }

// worker is a Python process that runs cases.
type worker struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan answer // closed when the process has ended
	says  tail
	list  answer

	stopping sync.Once
}

// start starts a worker and reads its list of cases.
func (j *judge) start(ctx context.Context, s setting) (*worker, error) {
	j.files.Lock()
	j.number++
	texts := filepath.Join(j.dir, "texts."+strconv.Itoa(j.number))
	j.files.Unlock()
	impl := "go"
	if s.wire.gloo {
		impl = "gloo"
	}
	config, err := json.Marshal(map[string]any{
		"suite": s.suite, "impl": impl, "wire": s.wire.is, "library": filepath.Join(j.dir, "libc10dgo.so"), "c10d": filepath.Join(j.dir, "c10d"),
		"tests": append([]string{}, j.tests...), "limit": j.limit.Seconds(), "texts": texts,
	})
	if err != nil {
		return nil, err
	}
	w := &worker{lines: make(chan answer)}
	w.cmd = exec.CommandContext(ctx, j.python[0], append(slices.Clone(j.python[1:]), filepath.Join(j.dir, "judge.py"), string(config))...)
	// The children are in the worker's process group, and end with it.
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	w.cmd.Cancel = func() error { return syscall.Kill(-w.cmd.Process.Pid, syscall.SIGKILL) }
	w.cmd.WaitDelay = 10 * time.Second
	w.cmd.Stderr = &w.says
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := w.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(w.lines)
		r := bufio.NewReader(out)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				return
			}
			var a answer
			if json.Unmarshal(line, &a) == nil {
				w.lines <- a
			}
		}
	}()
	var ok bool
	if w.list, ok = w.answer(5 * time.Minute); !ok {
		w.stop()
		return nil, fmt.Errorf("judge: %s on %s did not start: %s", s.suite, s.wire.name, w.says.String())
	}
	return w, nil
}

// answer returns the worker's next line.
func (w *worker) answer(limit time.Duration) (answer, bool) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case a, ok := <-w.lines:
		return a, ok
	case <-timer.C:
		return answer{}, false
	}
}

// stop kills the worker and its children. Then says is complete.
func (w *worker) stop() {
	w.stopping.Do(func() {
		_ = w.cmd.Cancel() // it may have ended
		for range w.lines {
		}
		_ = w.cmd.Wait() // it was killed
	})
}

// work runs cases one after the other, in as many workers as it takes.
func (j *judge) work(ctx context.Context, s setting, cases []string, done func(answer)) error {
	j.slots <- struct{}{}
	defer func() { <-j.slots }()
	for len(cases) > 0 {
		w, err := j.start(ctx, s)
		if err != nil {
			return err
		}
		cases, err = j.some(w, cases, done)
		w.stop()
		if err := errors.Join(err, context.Cause(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// some runs cases in a worker until one does not end, and returns those that are left.
func (j *judge) some(w *worker, cases []string, done func(answer)) ([]string, error) {
	for i, name := range cases {
		begun := time.Now()
		if _, err := fmt.Fprintln(w.stdin, name); err != nil {
			w.stop()
			return nil, fmt.Errorf("judge: a worker ended between cases, before %s: %w: %s", name, err, w.says.String())
		}
		a, ok := w.answer(3 * j.limit)
		if ok {
			done(a)
			continue
		}
		late := time.Since(begun) >= 3*j.limit
		w.stop()
		why := "its process ended"
		if late {
			why = "it did not end, and was killed"
		}
		done(answer{Case: name, Status: "fail", Seconds: time.Since(begun).Seconds(), Text: why + "\n" + w.says.String()})
		return cases[i+1:], nil
	}
	return nil, nil
}

// tail keeps the last bytes that are written.
type tail struct {
	mu   sync.Mutex
	last []byte
}

func (t *tail) Write(b []byte) (int, error) {
	const keep = 4 << 10
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = append(t.last, b...)
	t.last = t.last[max(0, len(t.last)-keep):]
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.last)
}
