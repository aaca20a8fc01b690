package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
)

// python is Debian's, whose torch is 1.13.1.
const python = "/usr/bin/python3"

func needTorch(t *testing.T) {
	t.Helper()
	if err := exec.Command(python, "-c", "import torch").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch': %v", python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch': %v", python, err)
	}
}

// event is a line of trainer.py.
type event struct {
	Event   string
	Address string
	Epoch   int64
	Version uint64
	Servers int
	Probe   []float64
	Why     string
}

// pyTrainer is a running trainer.py.
type pyTrainer struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr bytes.Buffer
	done   chan struct{}

	mu     sync.Mutex
	events []event
	more   chan struct{} // closed and replaced with each event
}

func train(t *testing.T, listen string, args ...string) *pyTrainer {
	t.Helper()
	p := &pyTrainer{t: t, done: make(chan struct{}), more: make(chan struct{})}
	p.cmd = exec.Command(python, append([]string{"trainer.py", "--listen", listen}, args...)...)
	p.cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	p.cmd.Stderr = &p.stderr
	out := must.Get(p.cmd.StdoutPipe())
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		for in := bufio.NewScanner(out); in.Scan(); {
			var e event
			if err := json.Unmarshal(in.Bytes(), &e); err != nil {
				e = event{Event: "garbage", Why: in.Text()}
			}
			p.mu.Lock()
			p.events = append(p.events, e)
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
		}
		p.cmd.Wait()
	}()
	t.Cleanup(func() { p.stop(syscall.SIGKILL) })
	return p
}

func (p *pyTrainer) stop(s syscall.Signal) {
	p.cmd.Process.Signal(s)
	<-p.done
}

// await returns the first event, from the given index on, that is as wanted,
// and the index after it.
func (p *pyTrainer) await(from int, what string, wanted func(event) bool) (event, int) {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		p.mu.Lock()
		events, more := p.events, p.more
		p.mu.Unlock()
		for ; from < len(events); from++ {
			if wanted(events[from]) {
				return events[from], from + 1
			}
		}
		select {
		case <-more:
		case <-p.done:
			p.t.Fatalf("the trainer ended without %s: %v %s", what, p.cmd.ProcessState, p.stderr.String())
		case <-timeout:
			p.t.Fatalf("no %s after %v", what, patience)
		}
	}
}

// published waits for this many updates that a server uses.
func (p *pyTrainer) published(from, updates int) int {
	p.t.Helper()
	for range updates {
		_, from = p.await(from, "an update", func(e event) bool { return e.Event == "published" && e.Servers > 0 })
	}
	return from
}

// load asks for predictions of one image until stop, from several sides.
type load struct {
	wg   sync.WaitGroup
	done chan struct{}

	mu      sync.Mutex
	answers map[string]prediction // one for each trainer, version and outcome
	count   int
	err     error
}

func (s *service) load(image []byte) *load {
	l := &load{done: make(chan struct{}), answers: make(map[string]prediction)}
	for range 3 {
		l.wg.Go(func() {
			for {
				select {
				case <-l.done:
					return
				default:
				}
				var p prediction
				code, text, err := s.ask("POST", "/predict", image, &p)
				if err == nil && code != 200 {
					err = fmt.Errorf("%d: %s", code, text)
				}
				l.mu.Lock()
				l.count++
				if err != nil && l.err == nil {
					l.err = err
				}
				l.answers[fmt.Sprint(p.Set.Trainer, p.Set.Version, p.Probabilities)] = p
				l.mu.Unlock()
			}
		})
	}
	return l
}

// TestServe runs the example with PyTorch. Updates arrive while clients ask for predictions. The trainer is killed and
// starts again. The server ends and starts again. At last the training is over.
func TestServe(t *testing.T) {
	needTorch(t)
	checkpoint := filepath.Join(t.TempDir(), "checkpoint")
	endless := []string{"--epochs", "1000000", "--pause", "0.05", "--checkpoint", checkpoint}
	first := train(t, freeport.Loopback(t), endless...) // other trainers will have the port
	listening, _ := first.await(0, "an address", func(e event) bool { return e.Event == "listening" })
	s, stop := start(t, listening.Address)
	at := first.published(0, 1)
	// The trainer's probe is the first held-out image.
	held, probe := must.Get(dataset.Digits()).HeldOut, picture{}
	for y := range side {
		probe.Image = append(probe.Image, nil)
		for x := range side {
			probe.Image[y] = append(probe.Image[y], held.Inputs[y*side+x]*white)
		}
	}
	image := must.Get(json.Marshal(probe))
	l := s.load(image)
	first.published(at, 8)
	one := int64(first.cmd.Process.Pid)
	l.await(t, one)

	first.stop(syscall.SIGKILL)
	o := s.awaitState(t, "lost")
	require.NotEmpty(t, o.Trainer.Error)
	require.Equal(t, one, o.Set.Trainer)
	alone := l.total()
	require.Eventually(t, func() bool { return l.total() > alone+50 }, patience, time.Millisecond, "no predictions without a trainer")
	require.Equal(t, o.Set.label, s.awaitState(t, "lost").Set.label)

	second := train(t, listening.Address, endless...)
	resumed, at := second.await(0, "resumption", func(e event) bool { return e.Event == "resumed" })
	require.GreaterOrEqual(t, o.Set.Epoch, resumed.Epoch)
	require.Greater(t, resumed.Epoch, int64(0))
	at = second.published(at, 5)
	two := int64(second.cmd.Process.Pid)
	o = s.await(t, "an update of the second trainer", func(o overview) bool { return o.Set.Trainer == two })
	require.Greater(t, o.Set.Epoch, resumed.Epoch)
	l.await(t, two)
	close(l.done)
	l.wg.Wait()
	require.NoError(t, l.err)
	_, last := l.seen(two)
	second.await(0, "word of the last update", func(e event) bool { return e.Event == "published" && e.Version >= last })
	checkAnswers(t, l, first, second)

	// The trainer goes on without a server. The next one gets the parameters as soon as it connects.
	stop()
	_, at = second.await(at, "training alone", func(e event) bool { return e.Event == "published" && e.Servers == 0 })
	s, _ = start(t, listening.Address)
	second.published(at, 2)
	second.stop(syscall.SIGKILL)
	s.awaitState(t, "lost")

	third := train(t, listening.Address, "--epochs", "40", "--pause", "0.1")
	<-third.done
	require.True(t, third.cmd.ProcessState.Success(), third.stderr.String())
	o = s.awaitState(t, "lost")
	require.EqualValues(t, third.cmd.Process.Pid, o.Set.Trainer)
	require.EqualValues(t, 40, o.Set.Epoch)
	require.Greater(t, o.Set.Accuracy, 0.8)
}

func (l *load) total() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// seen returns with how many sets of a trainer predictions were made, and the
// version of the last.
func (l *load) seen(trainer int64) (sets int, last uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.answers {
		if a.Set.Trainer == trainer {
			sets, last = sets+1, max(last, a.Set.Version)
		}
	}
	return sets, last
}

// await waits until predictions were made with several sets of a trainer.
func (l *load) await(t *testing.T, trainer int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		sets, _ := l.seen(trainer)
		return sets > 5
	}, patience, time.Millisecond, "predictions with several sets of trainer %d", trainer)
}

// checkAnswers wants every prediction to be the trainer's own for the version
// that it names: with parameters of two versions it would not be.
func checkAnswers(t *testing.T, l *load, trainers ...*pyTrainer) {
	published := make(map[string]event)
	for _, p := range trainers {
		p.mu.Lock()
		for _, e := range p.events {
			require.NotEqual(t, "garbage", e.Event, e.Why)
			if e.Event == "published" {
				published[fmt.Sprint(p.cmd.Process.Pid, ".", e.Version)] = e
			}
		}
		p.mu.Unlock()
	}
	seen, unknown := make(map[int64]int), make(map[int64]int)
	for _, a := range l.answers {
		e, ok := published[fmt.Sprint(a.Set.Trainer, ".", a.Set.Version)]
		if !ok {
			// Sent, but the trainer was killed before it said so.
			unknown[a.Set.Trainer]++
			continue
		}
		seen[a.Set.Trainer]++
		require.Equal(t, e.Epoch, a.Set.Epoch)
		require.InDeltaSlice(t, e.Probe, a.Probabilities, 1e-5, "version %d of trainer %d", a.Set.Version, a.Set.Trainer)
	}
	for _, p := range trainers {
		pid := int64(p.cmd.Process.Pid)
		require.LessOrEqual(t, unknown[pid], 1)
		require.Greater(t, seen[pid], 3)
	}
	t.Logf("%d predictions, with versions %v", l.count, seen)
}
