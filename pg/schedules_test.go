package pg_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

var (
	schedules     = flag.Int("schedules", 30, "`n` schedules of TestRandomSchedules")
	schedulesSeed = flag.Uint64("schedules.seed", 0, "`seed` of the first schedule; the next ones follow; 0 means a new one")
)

// In a schedule, faults happen to a group of 2 to 16 processes, which are goroutines. They run operations
// and check each result, and reconfigure after each error. Time is virtual.
type schedule struct {
	seed    uint64
	size    int // at the beginning
	wills   bool
	elastic bool
	detail  bool
	events  []scheduled
}

type scheduled struct {
	what  string
	after time.Duration // since the event before
	pick  int           // chooses the process
	long  time.Duration // of a stop
}

const (
	scheduleTimeout = 2 * time.Second      // of operations
	schedulePause   = 5 * time.Millisecond // of a step
	scheduleLimit   = 30 * time.Minute     // after which a process hangs
)

func randomSchedule(seed uint64) schedule {
	r := rand.New(rand.NewPCG(seed, 3))
	s := schedule{seed: seed, size: 2 + r.IntN(15), wills: r.IntN(2) == 0, elastic: r.IntN(2) == 0, detail: r.IntN(5) == 0}
	kinds := []string{"death", "death", "stop", "cancel", "abort", "leave", "newcomer", "newcomer"}
	for range 1 + r.IntN(6) {
		e := scheduled{what: kinds[r.IntN(len(kinds))], pick: r.IntN(1 << 16)}
		if r.IntN(3) > 0 { // else at once: in the middle of the Reconfigure of the event before
			e.after = time.Duration(r.IntN(1000)) * time.Millisecond
		} else {
			e.after = time.Duration(r.IntN(2000)) * time.Microsecond
		}
		if e.what == "stop" {
			e.long = time.Duration(r.IntN(40_000)) * time.Millisecond
			if r.IntN(2) == 0 {
				e.pick = 0 // mostly the one that leads the next decision
			}
		}
		s.events = append(s.events, e)
	}
	return s
}

func (s schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "-schedules 1 -schedules.seed %d: %d ranks, wills %v, elastic %v, DETAIL %v:", s.seed, s.size, s.wills, s.elastic, s.detail)
	for _, e := range s.events {
		fmt.Fprintf(&b, " %v %s", e.after, e.what)
		if e.long > 0 {
			fmt.Fprintf(&b, " for %v", e.long)
		}
	}
	return b.String()
}

// scheduleJob is what the processes of a schedule share.
type scheduleJob struct {
	schedule
	base   store.Store
	fabric *mem.Fabric
	ended  context.Context // the processes are to end

	mu        sync.Mutex
	processes []*process
	views     map[int64][]int64 // by epoch: the processes' names, by rank
	decisions map[string]string // by key: the view
	problems  []string
}

func (x *scheduleJob) problem(format string, args ...any) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.problems = append(x.problems, fmt.Sprintf(format, args...))
}

// viewKey finds the keys of package membership that hold a view. They are written once.
var viewKey = regexp.MustCompile(`^c10d-go/members/.*/view/\d+$`)

// decided notes what a view's key holds.
func (x *scheduleJob) decided(key string, value []byte) {
	if !viewKey.MatchString(key) {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if have, ok := x.decisions[key]; ok && have != string(value) {
		x.problems = append(x.problems, fmt.Sprintf("%s changes from %s to %s", key, have, value))
	}
	x.decisions[key] = string(value)
}

// process is its own Fabric and store, which end when it dies.
type process struct {
	*mem.Fabric
	*processStore
	x    *scheduleJob
	name int64
	g    *pg.ProcessGroup

	mu      sync.Mutex
	dead    bool
	leaves  bool
	joined  map[string]int // networks, and its rank in each
	cancel  context.CancelCauseFunc
	resumed chan struct{} // not nil while it is stopped

	// of its epoch
	epoch int64
	who   []int64
	step  int
}

// Join implements what gloo wants of a Fabric.
func (a *process) Join(name string, rank, size int) (transport.Mesh, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dead {
		return nil, errDead
	}
	m, err := a.Fabric.Join(name, rank, size)
	if err == nil {
		a.joined[name] = rank
	}
	return m, err
}

var (
	errDead      = errors.New("this process is dead")
	errEnded     = errors.New("the schedule has ended")
	errCancelled = errors.New("a fault of this process")
	errNewcomer  = errors.New("a process wants to join")
)

// die ends a process as SIGKILL does. Its wills are carried out if the store has some.
func (a *process) die() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dead {
		return
	}
	a.dead = true
	for name, rank := range a.joined {
		a.Fabric.Kill(name, rank)
	}
	if a.resumed != nil {
		close(a.resumed)
		a.resumed = nil
	}
	a.processStore.die()
}

// stop stops a process as SIGSTOP does: nothing that it sends arrives, and its store's calls wait.
func (a *process) stop(long time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.dead || a.resumed != nil {
		return
	}
	for name, rank := range a.joined {
		a.Fabric.Freeze(name, rank)
	}
	resumed := make(chan struct{})
	a.resumed = resumed
	a.processStore.hold(resumed)
	time.AfterFunc(long, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.resumed == resumed {
			close(resumed)
			a.resumed = nil
		}
	})
}

// processStore is the store of one process. It implements store.Willer if the schedule says so.
type processStore struct {
	store.Store
	job *scheduleJob

	mu    sync.Mutex
	wills map[string][2][]byte
	held  chan struct{} // closed when a stopped process goes on
}

func (s *processStore) hold(until chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = until
}

// wait waits while the process is stopped.
func (s *processStore) wait() {
	s.mu.Lock()
	held := s.held
	s.mu.Unlock()
	if held != nil {
		<-held
	}
}

func (s *processStore) die() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Store.Close()
	for key, w := range s.wills {
		s.job.base.CompareSet(context.Background(), key, w[0], w[1])
	}
	s.wills = nil
}

func (s *processStore) Set(ctx context.Context, key string, value []byte) error {
	s.wait()
	s.job.decided(key, value)
	return s.Store.Set(ctx, key, value)
}

func (s *processStore) Get(ctx context.Context, key string) ([]byte, error) {
	s.wait()
	return s.Store.Get(ctx, key)
}

func (s *processStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	s.wait()
	return s.Store.Add(ctx, key, delta)
}

func (s *processStore) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	s.wait()
	held, err := s.Store.CompareSet(ctx, key, expected, desired)
	if err == nil && string(desired) != string(expected) {
		s.job.decided(key, held)
	}
	return held, err
}

func (s *processStore) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	s.wait()
	values, err := s.Store.MultiGet(ctx, keys)
	s.wait()
	return values, err
}

func (s *processStore) Wait(ctx context.Context, keys ...string) error {
	s.wait()
	err := s.Store.Wait(ctx, keys...)
	s.wait()
	return err
}

func (s *processStore) SetWill(_ context.Context, key string, expected, desired []byte) error {
	s.wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.wills == nil:
		return fmt.Errorf("a store without wills: %w", errors.ErrUnsupported)
	default:
		s.wills[key] = [2][]byte{slices.Clone(expected), slices.Clone(desired)}
	}
	return nil
}

func (s *processStore) DropWill(_ context.Context, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.wills, key)
	return nil
}

// start makes a process. Those of the beginning have ranks, others join.
func (x *scheduleJob) start(wg *sync.WaitGroup) {
	x.mu.Lock()
	defer x.mu.Unlock()
	own, err := x.base.(store.Cloner).Clone(context.Background())
	if err != nil {
		panic(err) // it is open
	}
	s := &processStore{Store: own, job: x}
	if x.wills {
		s.wills = make(map[string][2][]byte)
	}
	a := &process{Fabric: x.fabric, processStore: s, x: x, name: int64(len(x.processes)), joined: make(map[string]int)}
	x.processes = append(x.processes, a)
	wg.Go(func() {
		err := a.live()
		a.mu.Lock()
		dead := a.dead
		a.mu.Unlock()
		if err != nil && !dead && !errors.Is(err, errEnded) {
			x.problem("process %d, epoch %d, cannot go on: %v", a.name, a.epoch, err)
		}
		a.die() // of a process that has ended
	})
}

// live takes part in the job until it ends.
func (a *process) live() (err error) {
	o := pg.Options{
		Timeout: scheduleTimeout, Backend: "cpu:" + gloo.Name, Elastic: a.x.elastic, Detail: a.x.detail,
		BackendOptions: pg.BackendOptions{gloo.Options{Fabric: a}},
	}
	join := func() error {
		ctx, cancel := context.WithTimeout(a.x.ended, scheduleLimit)
		defer cancel()
		g, err := pg.Join(ctx, a.processStore, o)
		a.has(g)
		a.epoch = 0 // it is about to hear which
		return err
	}
	if a.name < int64(a.x.size) {
		var g *pg.ProcessGroup
		g, err = pg.New(context.Background(), a.processStore, int(a.name), a.x.size, o)
		a.has(g)
	} else {
		err = join()
	}
	if err != nil {
		return err
	}
	defer func() {
		if a.g != nil {
			a.g.Close()
		}
	}()
	for {
		err := a.work()
		a.mu.Lock()
		dead, leaves := a.dead, a.leaves
		a.mu.Unlock()
		var operation *work.Error
		switch {
		case dead:
			return errDead
		case leaves:
			return nil
		case err != errNewcomer && !errors.As(err, &operation):
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), scheduleLimit)
		v, err := a.g.Reconfigure(ctx, pg.ReconfigureOptions{Timeout: 10 * time.Second})
		cancel()
		switch {
		case err == nil:
			a.epoch = int64(v.Epoch)
		case errors.Is(err, pg.ErrEvicted):
			a.g.Close()
			a.has(nil)
			if err := join(); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

func (a *process) has(g *pg.ProcessGroup) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.g = g
}

// work runs operations of an epoch until one fails, or all have heard of a newcomer or of the end.
func (a *process) work() (err error) {
	defer must.Catch(&err)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	a.mu.Lock()
	a.cancel = cancel
	a.mu.Unlock()
	names := make([]int64, 2*a.g.Size())
	must.Do(pg.Wait(a.g.AllGatherIntoTensor(ctx, pg.Slice(names), pg.Slice([]int64{a.name, a.epoch}))))
	a.who = nil
	for r := range a.g.Size() {
		a.who = append(a.who, names[2*r])
		a.epoch = max(a.epoch, names[2*r+1])
	}
	a.x.mu.Lock()
	if have, ok := a.x.views[a.epoch]; ok && !slices.Equal(have, a.who) {
		a.x.problems = append(a.x.problems, fmt.Sprintf("epoch %d has two views: %v, and %v on process %d", a.epoch, have, a.who, a.name))
	}
	a.x.views[a.epoch] = a.who
	a.x.mu.Unlock()
	for a.step = 0; ; a.step++ {
		must.Do(a.operation(ctx))
		flags := []int64{1, 0, 0}
		if a.x.ended.Err() != nil {
			flags[1] = 1
		} else if a.g.Rank() == 0 && a.step%4 == 0 {
			n, err := a.g.Pending(ctx)
			if err != nil && ctx.Err() == nil {
				return err
			}
			flags[2] = int64(n)
		}
		must.Do(pg.Wait(a.g.AllReduce(ctx, pg.Slice(flags), pg.Sum())))
		switch {
		case flags[0] != int64(len(a.who)):
			a.x.problem("process %d, epoch %d: %v add up to %d", a.name, a.epoch, a.who, flags[0])
		case flags[1] > 0:
			return errEnded
		case flags[2] > 0:
			return errNewcomer
		}
		a.mu.Lock()
		leaves := a.leaves
		a.mu.Unlock()
		if leaves {
			return nil
		}
		time.Sleep(schedulePause)
	}
}

// value is a process's element i in a step.
func (a *process) value(name int64, i int) int64 {
	return name*1_000_003 + a.epoch*10_007 + int64(a.step)*101 + int64(i)
}

func (a *process) sum(i int) (sum int64) {
	for _, name := range a.who {
		sum += a.value(name, i)
	}
	return sum
}

// operation runs the operation of this step, and checks its result.
func (a *process) operation(ctx context.Context) (err error) {
	defer must.Catch(&err)
	me, size, n := a.g.Rank(), a.g.Size(), 1+a.step%5
	own := func(n int) []int64 {
		v := make([]int64, n)
		for i := range v {
			v[i] = a.value(a.name, i)
		}
		return v
	}
	check := func(got []int64, want func(i int) int64) {
		for i, x := range got {
			if x != want(i) {
				a.x.problem("process %d, epoch %d, step %d: element %d is %d, want %d", a.name, a.epoch, a.step, i, x, want(i))
				return
			}
		}
	}
	switch a.step % 6 {
	case 0:
		v := own(n)
		must.Do(pg.Wait(a.g.AllReduce(ctx, pg.Slice(v), pg.Sum())))
		check(v, a.sum)
	case 1:
		root, v := a.step%size, own(n)
		must.Do(pg.Wait(a.g.Broadcast(ctx, pg.Slice(v), root)))
		check(v, func(i int) int64 { return a.value(a.who[root], i) })
	case 2:
		v := make([]int64, n*size)
		must.Do(pg.Wait(a.g.AllGatherIntoTensor(ctx, pg.Slice(v), pg.Slice(own(n)))))
		check(v, func(i int) int64 { return a.value(a.who[i/n], i%n) })
	case 3:
		v := make([]int64, n)
		must.Do(pg.Wait(a.g.ReduceScatterTensor(ctx, pg.Slice(v), pg.Slice(own(n*size)), pg.Sum())))
		check(v, func(i int) int64 { return a.sum(me*n + i) })
	case 4:
		if size == 1 {
			return nil
		}
		got, from := make([]int64, n), (me+size-1)%size
		out := must.Get(tensor.Of(own(n), n))
		in := must.Get(tensor.Of(got, n))
		sent := must.Get(a.g.Send(ctx, out, (me+1)%size))
		must.Do(wait(a.g.Recv(ctx, in, from)))
		must.Do(sent.Wait(ctx))
		check(got, func(i int) int64 { return a.value(a.who[from], i) })
	case 5:
		return a.g.Barrier(ctx)
	}
	return nil
}

// happen makes an event happen. The last two processes stay.
func (x *scheduleJob) happen(e scheduled, wg *sync.WaitGroup) {
	if e.what == "newcomer" {
		x.start(wg)
		return
	}
	var able []*process
	x.mu.Lock()
	for _, a := range x.processes {
		a.mu.Lock()
		if !a.dead && !a.leaves && a.resumed == nil {
			able = append(able, a)
		}
		a.mu.Unlock()
	}
	x.mu.Unlock()
	if len(able) <= 2 && e.what != "cancel" && e.what != "abort" {
		return
	}
	a := able[e.pick%len(able)]
	switch e.what {
	case "death":
		a.die()
	case "stop":
		a.stop(e.long)
	case "leave":
		a.mu.Lock()
		a.leaves = true
		a.mu.Unlock()
	case "cancel":
		a.mu.Lock()
		if a.cancel != nil {
			a.cancel(errCancelled)
		}
		a.mu.Unlock()
	case "abort":
		a.mu.Lock()
		g := a.g
		a.mu.Unlock()
		if g != nil {
			g.Abort(errCancelled)
		}
	}
}

// run runs a schedule, in a bubble of synctest, and returns what was wrong.
func (s schedule) run() (epochs int, problems []string) {
	ended, end := context.WithCancelCause(context.Background())
	x := &scheduleJob{schedule: s, base: store.NewHash(), fabric: mem.NewFabric(), ended: ended, views: make(map[int64][]int64), decisions: make(map[string]string)}
	defer x.base.Close()
	var wg sync.WaitGroup
	for range s.size {
		x.start(&wg)
	}
	for _, e := range s.events {
		time.Sleep(e.after)
		x.happen(e, &wg)
	}
	time.Sleep(time.Second)
	end(errEnded)
	all := make(chan struct{})
	go func() {
		wg.Wait()
		close(all)
	}()
	select {
	case <-all:
	case <-time.After(2 * scheduleLimit):
		for _, a := range x.processes {
			a.mu.Lock()
			if !a.dead {
				x.problem("process %d hangs in epoch %d", a.name, a.epoch)
			}
			a.mu.Unlock()
			a.die()
		}
		<-all
	}
	return len(x.views), x.problems
}

// TestRandomSchedules runs groups of 2 to 16 ranks in virtual time. Processes die, stop, cancel, leave
// and join at random moments, also while the others reconfigure. Nothing hangs, no epoch has two views,
// no result is wrong, and no goroutine is left.
func TestRandomSchedules(t *testing.T) {
	from := *schedulesSeed
	if from == 0 {
		from = rand.Uint64() >> 32
	}
	t.Logf("-schedules.seed %d", from)
	epochs := 0
	for i := range uint64(*schedules) {
		s := randomSchedule(from + i)
		synctest.Test(t, func(t *testing.T) {
			n, problems := s.run()
			require.Empty(t, problems, "%v", s)
			epochs += n
		})
	}
	t.Logf("%d schedules, %d epochs", *schedules, epochs)
}
