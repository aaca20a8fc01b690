package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/work"
)

const (
	// askEvery is how often a rank of a trial asks for newcomers.
	askEvery = 100 * time.Millisecond

	// comeIn is how long a rank may take to come to the next epoch of a trial.
	comeIn = 10 * time.Second
)

var (
	errEnded   = errors.New("the ranks were told to end")
	errPending = errors.New("newcomers wait")
	errUnmade  = errors.New("a sub-group was not made")
)

// stepper is a rank of a Trial. It runs one operation after another on data that no other epoch,
// step and rank has.
type stepper struct {
	*role
	st    store.Store
	g     *pg.ProcessGroup
	out   *json.Encoder
	epoch int64
	who   []int64 // the members' names, by rank
	step  int
	asked time.Time // for newcomers

	done, groups int // operations and sub-groups so far

	panics atomic.Bool
	ended  context.Context // ends with cmdEnd
	mu     sync.Mutex
	cancel context.CancelCauseFunc // of the operations
}

// steps runs a rank of a Trial.
func (r *role) steps() error {
	commands := listen()
	before, err := resources()
	if err != nil {
		return err
	}
	ended, end := context.WithCancelCause(context.Background())
	s := &stepper{role: r, out: json.NewEncoder(os.Stdout), ended: ended}
	go func() {
		for c := range commands {
			switch c {
			case cmdPanic:
				s.panics.Store(true)
			case cmdExit:
				os.Exit(3)
			case cmdCancel:
				s.mu.Lock()
				if s.cancel != nil {
					s.cancel(errCancel)
				}
				s.mu.Unlock()
			case cmdEnd:
				end(errEnded)
			}
		}
		os.Exit(0)
	}()
	last := said{Done: true}
	if err := s.live(); err != nil && !errors.Is(err, errEnded) {
		last = said{Ends: err.Error()}
	}
	last.Epoch = s.epoch
	if last.Left, err = leftBehind(before); err != nil {
		return err
	}
	return s.out.Encode(last)
}

// live takes part in the job until it ends.
func (s *stepper) live() (err error) {
	if s.st, err = openStore(context.Background(), s.Job); err != nil {
		return err
	}
	defer s.st.Close()
	if s.Name < s.Ranks {
		o := s.options()
		o.Timeout = startIn
		if s.g, err = pg.New(context.Background(), s.st, s.Name, s.Ranks, o); err == nil {
			s.g.SetTimeout(s.Timeout)
		}
	} else {
		s.g, err = s.join()
	}
	if err != nil {
		return err
	}
	defer func() {
		if e := s.g.Close(); err == nil {
			err = e
		}
	}()
	for {
		err := s.work()
		if err != errPending && !errors.Is(err, errUnmade) && !errors.As(err, new(*work.Error)) {
			return err
		}
		if err := s.goOn(); err != nil {
			return err
		}
	}
}

func (s *stepper) options() pg.Options {
	return pg.Options{
		Timeout: s.Timeout, Elastic: true, Detail: s.Detail, Backend: "cpu:" + gloo.Name,
		BackendOptions: pg.BackendOptions{gloo.Options{Wire: s.Wire}},
	}
}

// join waits until the group takes this process in. That may take longer than an operation: a rank may
// have stopped.
func (s *stepper) join() (*pg.ProcessGroup, error) {
	ctx, cancel := context.WithTimeout(s.ended, trialLimit)
	defer cancel()
	return pg.Join(ctx, s.st, s.options())
}

// goOn begins the next epoch. A rank that it leaves out joins again.
func (s *stepper) goOn() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*comeIn)
	defer cancel()
	begun := time.Now()
	v, err := s.g.Reconfigure(ctx, pg.ReconfigureOptions{Timeout: comeIn})
	change := Change{Begun: begun, Ended: time.Now()}
	if err == nil {
		s.epoch = int64(v.Epoch)
	} else {
		change.Error = err.Error()
	}
	if e := s.out.Encode(said{Epoch: s.epoch, Change: &change}); e != nil {
		return e
	}
	if !errors.Is(err, pg.ErrEvicted) {
		return err
	}
	if err := s.g.Close(); err != nil {
		return err
	}
	g, err := s.join()
	if err == nil {
		s.g, s.epoch = g, 0 // it is about to hear which
	}
	return err
}

// work runs operations until one fails.
func (s *stepper) work() error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	s.mu.Lock()
	s.cancel = cancel
	s.mu.Unlock()
	names := make([]int64, 2*s.g.Size())
	if err := pg.Wait(s.g.AllGatherIntoTensor(ctx, pg.Slice(names), pg.Slice([]int64{int64(s.Name), s.epoch}))); err != nil {
		return err
	}
	s.who, s.step = nil, 0
	for r := range s.g.Size() {
		s.who = append(s.who, names[2*r])
		s.epoch = max(s.epoch, names[2*r+1])
	}
	for r := range s.who {
		if e := names[2*r+1]; e != 0 && e != s.epoch || slices.Index(s.who, s.who[r]) != r {
			s.wrong("names and epochs are %v", names)
		}
	}
	for ; ; s.step++ {
		if s.panics.Load() {
			panic("a fault of this rank")
		}
		if err := s.operation(ctx); err != nil {
			return err
		}
		s.done++
		if s.step == 0 {
			line := said{Epoch: s.epoch, Members: s.who}
			if s.Soak {
				if err := s.use(&line); err != nil {
					return err
				}
			}
			if err := s.out.Encode(line); err != nil {
				return err
			}
		}
		if err := s.meet(ctx); err != nil {
			return err
		}
	}
}

// meet returns errEnded or errPending on all ranks if one has heard so.
func (s *stepper) meet(ctx context.Context) error {
	flags := []int64{1, 0, 0}
	if s.ended.Err() != nil {
		flags[1] = 1
	} else if time.Since(s.asked) > askEvery {
		s.asked = time.Now()
		n, err := s.g.Pending(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		flags[2] = int64(n)
	}
	if err := pg.Wait(s.g.AllReduce(ctx, pg.Slice(flags), pg.Sum())); err != nil {
		return err
	}
	switch {
	case flags[0] != int64(len(s.who)):
		s.wrong("%d ranks add up to %d", len(s.who), flags[0])
	case flags[1] > 0:
		return errEnded
	case flags[2] > 0:
		return errPending
	}
	return nil
}

// value is element i of a rank's data in this step.
func (s *stepper) value(name int64, i int) int64 {
	return name*1_000_003 + s.epoch*10_007 + int64(s.step)*101 + int64(i)
}

func (s *stepper) sum(i int) (sum int64) {
	for _, name := range s.who {
		sum += s.value(name, i)
	}
	return sum
}

// operation runs the operation of this step, and checks its result.
func (s *stepper) operation(ctx context.Context) error {
	me, size := s.g.Rank(), s.g.Size()
	n := []int{1, 1000, 40000}[s.step/len(kinds)%3]
	own := func(n int) []int64 {
		v := make([]int64, n)
		for i := range v {
			v[i] = s.value(s.who[me], i)
		}
		return v
	}
	check := func(op string, got []int64, want func(i int) int64) {
		for i, x := range got {
			if x != want(i) {
				s.wrong("%s of %d: element %d is %d, want %d", op, len(got), i, x, want(i))
				return
			}
		}
	}
	op := kinds[s.step%len(kinds)]
	switch op {
	case "all_reduce":
		v := own(n)
		if err := pg.Wait(s.g.AllReduce(ctx, pg.Slice(v), pg.Sum())); err != nil {
			return err
		}
		check(op, v, s.sum)
	case "broadcast":
		root, v := s.step%size, own(n)
		if err := pg.Wait(s.g.Broadcast(ctx, pg.Slice(v), root)); err != nil {
			return err
		}
		check(op, v, func(i int) int64 { return s.value(s.who[root], i) })
	case "all_gather":
		v := make([]int64, n*size)
		if err := pg.Wait(s.g.AllGatherIntoTensor(ctx, pg.Slice(v), pg.Slice(own(n)))); err != nil {
			return err
		}
		check(op, v, func(i int) int64 { return s.value(s.who[i/n], i%n) })
	case "reduce_scatter":
		v := make([]int64, n)
		if err := pg.Wait(s.g.ReduceScatterTensor(ctx, pg.Slice(v), pg.Slice(own(n*size)), pg.Sum())); err != nil {
			return err
		}
		check(op, v, func(i int) int64 { return s.sum(me*n + i) })
	case "all_to_all":
		v := make([]int64, n*size)
		if err := pg.Wait(s.g.AllToAllSingle(ctx, pg.Slice(v), pg.Slice(own(n*size)), nil, nil)); err != nil {
			return err
		}
		check(op, v, func(i int) int64 { return s.value(s.who[i/n], me*n+i%n) })
	case "send_recv":
		if size == 1 {
			return nil
		}
		v, from := make([]int64, n), (me+size-1)%size
		sent, err := s.g.Send(ctx, pg.Slice(own(n)), (me+1)%size)
		if err != nil {
			return err
		}
		if err := pg.Wait(s.g.Recv(ctx, pg.Slice(v), from)); err != nil {
			return err
		}
		if err := sent.Wait(ctx); err != nil {
			return err
		}
		check(op, v, func(i int) int64 { return s.value(s.who[from], i) })
	case "barrier":
		return s.g.Barrier(ctx)
	case "group":
		return s.subgroup(ctx, n, check)
	}
	return nil
}

// subgroup makes a group without one rank, sums there, and closes it.
func (s *stepper) subgroup(ctx context.Context, n int, check func(string, []int64, func(int) int64)) (err error) {
	var members []int
	for r := range s.who {
		if len(s.who) == 1 || r != s.step%len(s.who) {
			members = append(members, r)
		}
	}
	g, err := s.g.NewGroup(ctx, members)
	if err != nil {
		return fmt.Errorf("%w: %w", errUnmade, err)
	}
	defer func() {
		if e := g.Close(); err == nil {
			err = e
		}
	}()
	s.groups++
	if !g.IsMember() {
		return nil
	}
	v := make([]int64, n)
	for i := range v {
		v[i] = s.value(s.who[s.g.Rank()], i)
	}
	if err := pg.Wait(g.AllReduce(ctx, pg.Slice(v), pg.Sum())); err != nil {
		return err
	}
	check("all_reduce in a sub-group", v, func(i int) (sum int64) {
		for _, r := range members {
			sum += s.value(s.who[r], i)
		}
		return sum
	})
	return nil
}

// kinds are the operations of a stepper.
var kinds = []string{"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier", "group"}

func (s *stepper) wrong(format string, args ...any) {
	s.out.Encode(said{Epoch: s.epoch, Wrong: fmt.Sprintf(format, args...)})
}
