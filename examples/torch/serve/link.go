package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Server and trainer meet in a store that the server hosts, because trainers come and go.
// A trainer takes the next number N. The keys are:
//
//	trainers     the number of trainers so far
//	trainer/N    from trainer N: its PyTorch version and its parameters, as JSON
//	answer/N     from the server: "ok", or why it does not accept them
//	group/N      the prefix of the keys of their process group
//	wanted       the number of requests for a set
const (
	keyTrainers = "trainers"
	keyTrainer  = "trainer/"
	keyAnswer   = "answer/"
	keyGroup    = "group/"
	keyWanted   = "wanted"
)

// The group's ranks.
const (
	serverRank = iota
	trainerRank
	groupSize
)

// In the group the trainer broadcasts headers of headerLen int64. The first one is the kind
// of the header. After an update the parameters follow, one broadcast each.
const (
	headerGoodbye = 0
	headerUpdate  = 1 // version, epoch, accuracy in millionths, CRC-32 of the parameters
	headerLen     = 5
)

// between is the longest time between two sets: an epoch may take days. The end of its
// connections shows that a trainer died. If its machine was lost, the next trainer
// replaces it.
const between = 10 * 365 * 24 * time.Hour

// lost is the longest time between taking a number and the announcement. A trainer that
// takes longer is assumed to be dead.
const lost = time.Second

var errNewer = errors.New("serve: another trainer has come")

// announcement describes a trainer.
type announcement struct {
	number     int
	Torch      string      `json:"torch"`
	Parameters []parameter `json:"parameters"`
}

// dialect returns the generation of the trainer's PyTorch. A store hosted by Go does not
// know it.
func (a *announcement) dialect() (store.Dialect, error) {
	major, rest, _ := strings.Cut(a.Torch, ".")
	minor, _, _ := strings.Cut(rest, ".")
	x, err1 := strconv.Atoi(major)
	y, err2 := strconv.Atoi(minor)
	switch {
	case err1 != nil || err2 != nil || x < 1:
		return 0, fmt.Errorf("serve: %q is not a version of PyTorch", a.Torch)
	case x == 1 || x == 2 && y == 0:
		return store.DialectV1, nil
	}
	return store.DialectV2, nil
}

// status is the state of the current trainer.
type status struct {
	State  string    `json:"state"` // waiting, connected, finished or lost
	Number int       `json:"number,omitempty"`
	Torch  string    `json:"torch,omitempty"`
	Since  time.Time `json:"-"`
	Error  string    `json:"error,omitempty"`
}

// link receives the sets of one trainer after the other. A new trainer replaces one that is
// connected.
type link struct {
	store   store.Store
	weights *weights
	timeout time.Duration // of the rendezvous, and of parameters after their header
	log     *slog.Logger

	mu     sync.Mutex
	status status
}

func (l *link) get() status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

func (l *link) set(s status) {
	s.Since = time.Now()
	l.mu.Lock()
	l.status = s
	l.mu.Unlock()
	l.log.Info("trainer "+s.State, "number", s.Number, "torch", s.Torch, "error", s.Error)
}

// want asks the trainer for a set before the epoch is over.
func (l *link) want(ctx context.Context) error {
	_, err := l.store.Add(ctx, keyWanted, 1)
	return err
}

// run follows trainers until ctx ends, or the store fails, which is in this process.
func (l *link) run(ctx context.Context) error {
	l.set(status{State: "waiting"})
	a, err := l.next(ctx, 1)
	for err == nil {
		var newer *announcement
		following, cancel := context.WithCancelCause(ctx)
		came := make(chan struct{})
		go func() {
			defer close(came)
			if newer, err = l.next(ctx, a.number+1); err == nil {
				cancel(errNewer)
			} else {
				cancel(err)
			}
		}()
		s := status{State: "finished", Number: a.number, Torch: a.Torch}
		if failed := l.follow(following, a); failed != nil {
			s.State, s.Error = "lost", failed.Error()
		}
		l.set(s)
		<-came
		cancel(nil)
		a = newer
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// next waits for trainer number n, or a later one if that died before it
// announced itself.
func (l *link) next(ctx context.Context, n int) (*announcement, error) {
	for {
		waiting, cancel := context.WithTimeout(ctx, lost)
		text, err := l.store.Get(waiting, keyTrainer+strconv.Itoa(n))
		cancel()
		if err == nil {
			a := &announcement{number: n}
			if err := json.Unmarshal(text, a); err != nil {
				a.Torch = "" // follow tells the trainer
			}
			return a, nil
		}
		if ctx.Err() != nil || !errors.Is(err, store.ErrTimeout) {
			return nil, err
		}
		taken, err := l.store.Add(ctx, keyTrainers, 0)
		if err != nil {
			return nil, err
		}
		if taken > int64(n) {
			n++
		}
	}
}

// follow takes sets from a trainer until it says goodbye.
func (l *link) follow(ctx context.Context, a *announcement) (err error) {
	n, err := networkOf(a.Parameters)
	dialect, unknown := a.dialect()
	if err = errors.Join(unknown, err); err != nil {
		return errors.Join(err, l.answer(ctx, a, err.Error()))
	}
	if err := l.answer(ctx, a, "ok"); err != nil {
		return err
	}
	g, err := pg.New(ctx, store.Prefix(keyGroup+strconv.Itoa(a.number), l.store), serverRank, groupSize, pg.Options{
		Backend: "gloo", Timeout: l.timeout, Dialect: dialect,
	})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			g.Abort(err)
		}
		g.Close()
	}()
	l.set(status{State: "connected", Number: a.number, Torch: a.Torch})
	header := make([]int64, headerLen)
	for {
		w, err := issue(ctx, g, header, between)
		if err == nil {
			err = w.Wait(ctx)
		}
		switch {
		case err != nil:
			return err
		case header[0] == headerGoodbye:
			return nil
		case header[0] != headerUpdate:
			return fmt.Errorf("serve: trainer %d sent a header of kind %d", a.number, header[0])
		}
		is := label{
			Trainer: a.number, Version: header[1], Epoch: header[2],
			Accuracy: float64(header[3]) / 1e6, CRC32: uint32(header[4]),
		}
		err = l.weights.receive(n, func(parameters []float32) (label, error) {
			if err := receive(ctx, g, n, parameters); err != nil {
				return is, err
			}
			if sum := checksum(parameters); sum != is.CRC32 {
				return is, fmt.Errorf("serve: version %d of trainer %d has checksum %08x, %08x was promised", is.Version, a.number, sum, is.CRC32)
			}
			is.Received = time.Now()
			return is, nil
		})
		if err != nil {
			return err
		}
		l.log.Info("new set", "trainer", a.number, "epoch", is.Epoch, "version", is.Version, "accuracy", is.Accuracy)
	}
}

func (l *link) answer(ctx context.Context, a *announcement, text string) error {
	return l.store.Set(ctx, keyAnswer+strconv.Itoa(a.number), []byte(text))
}

// receive fills parameters from the trainer.
func receive(ctx context.Context, g *pg.ProcessGroup, n network, parameters []float32) error {
	var works []*work.Work
	for _, k := range n.lengths() {
		w, err := issue(ctx, g, parameters[:k], 0)
		if err != nil {
			return err
		}
		works, parameters = append(works, w), parameters[k:]
	}
	return work.WaitAll(ctx, works...)
}

// issue begins a broadcast of the trainer into elements.
func issue[T tensor.Element](ctx context.Context, g *pg.ProcessGroup, elements []T, timeout time.Duration) (*work.Work, error) {
	t, err := tensor.Of(elements, len(elements))
	if err != nil {
		return nil, err
	}
	return g.Broadcast(ctx, []*tensor.Tensor{t}, backend.BroadcastOptions{Root: trainerRank, Timeout: timeout})
}
