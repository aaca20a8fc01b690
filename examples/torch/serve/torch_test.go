package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// python is Debian's, whose torch is 1.13.1.
const python = "/usr/bin/python3"

func needTorch(t *testing.T) {
	t.Helper()
	if err := exec.Command(python, "-c", "import torch.distributed").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch.distributed': %v", python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch.distributed': %v", python, err)
	}
}

// event is a line of trainer.py.
type event struct {
	Event   string
	Number  int
	Epoch   int64
	Version int64
	CRC32   uint32
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

func train(t *testing.T, s *service, args ...string) *pyTrainer {
	t.Helper()
	p := &pyTrainer{t: t, done: make(chan struct{}), more: make(chan struct{})}
	p.cmd = exec.Command(python, append([]string{"trainer.py", "--server", s.store.Addr()}, args...)...)
	p.cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
	p.cmd.Stderr = &p.stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
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

func (p *pyTrainer) sent(from, sets int) int {
	p.t.Helper()
	for range sets {
		_, from = p.await(from, "a set", func(e event) bool { return e.Event == "sent" })
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

// TestServe runs it all with PyTorch: sets that come while predictions are
// being asked for, a trainer that is killed and comes back, a set on demand, a
// server that ends and comes back, and a training that is over.
func TestServe(t *testing.T) {
	needTorch(t)
	s, stop := start(t, "127.0.0.1:0")
	checkpoint := filepath.Join(t.TempDir(), "checkpoint")
	endless := []string{"--epochs", "1000000", "--pause", "0.05", "--checkpoint", checkpoint}

	first := train(t, s, endless...)
	first.sent(0, 1) // the server may not have all of it yet
	s.await(t, "a first set", func(o overview) bool { return o.Set != nil })
	// The trainer's probe is the first held-out image.
	var probe picture
	for y := range side {
		probe.Image = append(probe.Image, nil)
		for x := range side {
			probe.Image[y] = append(probe.Image[y], s.web.images.Inputs[y*side+x]*white)
		}
	}
	image, err := json.Marshal(probe)
	require.NoError(t, err)
	l := s.load(image)
	first.sent(1, 8)
	l.await(t, 1)

	first.stop(syscall.SIGKILL)
	o := s.awaitState(t, "lost", 1)
	require.Contains(t, o.Trainer.Error, "rank 1")
	alone := l.total()
	require.Eventually(t, func() bool { return l.total() > alone+50 }, patience, time.Millisecond, "no predictions without a trainer")
	code, _, err := s.ask("GET", "/healthz", nil, nil)
	require.NoError(t, err)
	require.Equal(t, 200, code)
	require.Equal(t, o.Set.label, s.awaitState(t, "lost", 1).Set.label)

	second := train(t, s, endless...)
	resumed, at := second.await(0, "resumption", func(e event) bool { return e.Event == "resumed" })
	require.GreaterOrEqual(t, o.Set.Epoch, resumed.Epoch)
	require.Greater(t, resumed.Epoch, int64(0))
	at = second.sent(at, 5)
	o = s.await(t, "a set of trainer 2", func(o overview) bool { return o.Set.Trainer == 2 })
	require.Greater(t, o.Set.Epoch, resumed.Epoch)
	l.await(t, 2)

	// An epoch has 45 steps: a version between is one that was asked for.
	require.Eventually(t, func() bool {
		code, text, err := s.ask("POST", "/refresh", nil, nil)
		require.NoError(t, err)
		require.Equal(t, 202, code, text)
		var e event
		e, at = second.await(at, "a set", func(e event) bool { return e.Event == "sent" })
		return e.Version%45 != 0
	}, patience, time.Millisecond)

	close(l.done)
	l.wg.Wait()
	require.NoError(t, l.err)
	_, last := l.seen(2)
	second.await(0, "word of the last set", func(e event) bool { return e.Event == "sent" && e.Version >= last })
	checkAnswers(t, l, first, second)

	// The trainer goes on without the server, and finds it again.
	addr := s.store.Addr()
	stop()
	_, at = second.await(at, "loss of the server", func(e event) bool { return e.Event == "lost the server" })
	_, at = second.await(at, "training alone", func(e event) bool { return e.Event == "no server" })
	s, _ = start(t, addr)
	connected, at := second.await(at, "a server", func(e event) bool { return e.Event == "connected" })
	require.Equal(t, 1, connected.Number)
	second.sent(at, 2)
	second.stop(syscall.SIGKILL)
	s.awaitState(t, "lost", 1)

	third := train(t, s, "--epochs", "2")
	<-third.done
	require.True(t, third.cmd.ProcessState.Success(), third.stderr.String())
	o = s.awaitState(t, "finished", 2)
	require.EqualValues(t, 2, o.Set.Epoch)
	require.Greater(t, o.Set.Accuracy, 0.8)
}

func (l *load) total() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// seen returns with how many sets of a trainer predictions were made, and the
// version of the last.
func (l *load) seen(trainer int) (sets int, last int64) {
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
func (l *load) await(t *testing.T, trainer int) {
	t.Helper()
	require.Eventually(t, func() bool {
		sets, _ := l.seen(trainer)
		return sets > 5
	}, patience, time.Millisecond, "predictions with several sets of trainer %d", trainer)
}

// checkAnswers wants every prediction to be the trainer's own for the version
// that it names: with parameters of two versions it would not be.
func checkAnswers(t *testing.T, l *load, trainers ...*pyTrainer) {
	sent := make(map[string]event)
	for i, p := range trainers {
		p.mu.Lock()
		for _, e := range p.events {
			require.NotEqual(t, "garbage", e.Event, e.Why)
			if e.Event == "sent" {
				sent[strconv.Itoa(i+1)+"."+strconv.FormatInt(e.Version, 10)] = e
			}
		}
		p.mu.Unlock()
	}
	seen, unknown := make(map[int]int), make(map[int]int)
	for _, a := range l.answers {
		e, ok := sent[fmt.Sprint(a.Set.Trainer, ".", a.Set.Version)]
		if !ok {
			// Sent, but the trainer was killed before it said so.
			unknown[a.Set.Trainer]++
			continue
		}
		seen[a.Set.Trainer]++
		require.Equal(t, e.CRC32, a.Set.CRC32)
		require.Equal(t, e.Epoch, a.Set.Epoch)
		require.InDeltaSlice(t, e.Probe, a.Probabilities, 1e-5, "version %d of trainer %d", a.Set.Version, a.Set.Trainer)
	}
	for i := range trainers {
		require.LessOrEqual(t, unknown[i+1], 1)
		require.Greater(t, seen[i+1], 3)
	}
	t.Logf("%d predictions with %d and %d versions", l.count, seen[1], seen[2])
}
