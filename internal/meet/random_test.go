package meet

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/store"
)

var (
	randomSeed = flag.Uint64("random.seed", 0, "`seed` of TestRandomMeetings; 0 means a new one")
	randomRuns = flag.Int("random.runs", 0, "`n` meetings of TestRandomMeetings; 0 means as many as fit the tests' size")
)

var errCrashed = errors.New("the process has crashed")

// flaw is a mistake in the protocol that the checks have to find.
type flaw uint8

const (
	sound     flaw = iota
	noWills        // the store carries out no will
	oneWill        // a rank leaves no will for the turn after its own
	lateWills      // a rank leaves its wills after its entry
)

// process is the store of one process. Each call takes some time, and the process crashes before one of them.
type process struct {
	store.Store
	wills bool // the store notices
	flaw  flaw

	mu    sync.Mutex
	r     *rand.Rand
	calls int // until it crashes; negative: never
	left  map[string]string
	dead  chan struct{}

	came, died time.Time
}

func newProcess(st store.Store, r *rand.Rand, wills bool, calls int) *process {
	return &process{Store: st, wills: wills, r: rand.New(rand.NewPCG(r.Uint64(), 1)), calls: calls, left: make(map[string]string), dead: make(chan struct{})}
}

// step is a call. It returns a context that ends when the process crashes.
func (p *process) step(ctx context.Context) (context.Context, error) {
	p.mu.Lock()
	pause := time.Duration(p.r.IntN(3000)) * time.Microsecond
	if p.calls == 0 {
		p.crash()
	}
	p.calls--
	p.mu.Unlock()
	time.Sleep(pause)
	select {
	case <-p.dead:
		return ctx, errCrashed
	default:
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-p.dead:
		case <-ctx.Done():
		}
		cancel(errCrashed)
	}()
	return ctx, ctx.Err()
}

// crash carries out the wills a moment later. p.mu is held.
func (p *process) crash() {
	close(p.dead)
	p.died = time.Now()
	if !p.wills || p.flaw == noWills || p.flaw == lateWills && time.Since(p.came) < 10*time.Millisecond {
		return
	}
	for key, value := range p.left {
		go func() {
			time.Sleep(time.Millisecond)
			p.Store.CompareSet(context.Background(), key, nil, []byte(value))
		}()
	}
}

func (p *process) SetWill(ctx context.Context, key string, _, desired []byte) error {
	if !p.wills {
		return errors.ErrUnsupported
	}
	if _, err := p.step(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flaw != oneWill || len(p.left) == 0 {
		p.left[key] = string(desired)
	}
	return nil
}

func (p *process) DropWill(ctx context.Context, key string) error {
	if _, err := p.step(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.left, key)
	return nil
}

// stepping makes a call of a process.
func stepping[T any](p *process, ctx context.Context, f func(context.Context) (T, error)) (v T, err error) {
	if ctx, err = p.step(ctx); err != nil {
		return v, err
	}
	if v, err = f(ctx); err == nil {
		select {
		case <-p.dead:
			err = errCrashed // it has not heard the reply
		default:
		}
	}
	return v, err
}

// comes notes when others see the process: it is in the log of a turn, or ends one.
func (p *process) comes(key string) {
	if p.came.IsZero() && (strings.Contains(key, "/log/") || strings.HasSuffix(key, "/end")) {
		p.came = time.Now()
	}
}

func (p *process) Set(ctx context.Context, key string, value []byte) error {
	_, err := stepping(p, ctx, func(ctx context.Context) (int, error) {
		p.comes(key)
		return 0, p.Store.Set(ctx, key, value)
	})
	return err
}

func (p *process) Get(ctx context.Context, key string) ([]byte, error) {
	return stepping(p, ctx, func(ctx context.Context) ([]byte, error) { return p.Store.Get(ctx, key) })
}

func (p *process) Add(ctx context.Context, key string, delta int64) (int64, error) {
	return stepping(p, ctx, func(ctx context.Context) (int64, error) { return p.Store.Add(ctx, key, delta) })
}

func (p *process) CompareSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	return stepping(p, ctx, func(ctx context.Context) ([]byte, error) {
		if expected == nil {
			p.comes(key)
		}
		return p.Store.CompareSet(ctx, key, expected, desired)
	})
}

func (p *process) Check(ctx context.Context, keys ...string) (bool, error) {
	return stepping(p, ctx, func(ctx context.Context) (bool, error) { return p.Store.Check(ctx, keys...) })
}

func (p *process) Delete(ctx context.Context, key string) (bool, error) {
	return stepping(p, ctx, func(ctx context.Context) (bool, error) { return p.Store.Delete(ctx, key) })
}

func (p *process) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	return stepping(p, ctx, func(ctx context.Context) ([][]byte, error) { return p.Store.MultiGet(ctx, keys) })
}

func (p *process) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	for i, key := range keys { // a PyTorch server has no such call
		if err := p.Set(ctx, key, values[i]); err != nil {
			return err
		}
	}
	return nil
}

// TestRandomMeetings: processes come late, come twice and crash before any of their calls, in a store that notices or does
// not. Then all ranks come again, in the same store.
//
//   - A run has one process of each rank.
//   - All that do not crash come to an end, and if none has a second process or is away, they meet.
//   - A rank that has come in time is called missing by nobody.
//   - The next run meets.
func TestRandomMeetings(t *testing.T) {
	from := *randomSeed
	if from == 0 {
		from = rand.Uint64()
	}
	t.Logf("-random.seed %d", from)
	ends := make(map[string]int)
	for i := range cmp.Or(*randomRuns, testsize.Of(100, 150, 2000)) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(from, uint64(i)))
			st := store.NewHash()
			defer st.Close()
			size, wills := 2+r.IntN(4), r.IntN(2) == 0
			for attempt := range 2 + r.IntN(2) {
				meetAtRandom(t, r, st, size, wills, ends, fmt.Sprintf("meeting %d, attempt %d", i, attempt))
				time.Sleep(time.Second) // wills are carried out
			}
			// Nobody crashes, is away or has a second process.
			var wg sync.WaitGroup
			ids := make([]string, size)
			for rank := range size {
				p := newProcess(st, r, wills, -1)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				wg.Go(func() {
					run, err := New(Config{Store: p, Name: "0", Rank: rank, Size: size, Foreign: foreign(p)}).Meet(ctx)
					if err != nil {
						t.Errorf("meeting %d, the last run: %v", i, err)
					}
					ids[rank] = run.ID
				})
			}
			wg.Wait()
			for _, id := range ids {
				require.Equal(t, ids[0], id, "meeting %d", i)
			}
		})
	}
	t.Log(ends)
	for _, want := range []string{"met", "crashed", "twice", "died", "late"} {
		require.NotZero(t, ends[want], want)
	}
}

func meetAtRandom(t *testing.T, r *rand.Rand, st store.Store, size int, wills bool, ends map[string]int, name string) {
	type member struct {
		rank       int
		p          *process
		late       time.Duration
		begun, end time.Time
		lacks      []int // at its timeout
	}
	var members []*member
	healthy, away, twice := true, -1, false
	for rank := range size {
		if r.IntN(6) == 0 && away < 0 {
			away, healthy = rank, false
			continue
		}
		for n := range 2 {
			if n == 1 && r.IntN(10) > 0 {
				break
			}
			calls := -1
			if r.IntN(4) == 0 {
				calls, healthy = r.IntN(20), false
			}
			twice = twice || n == 1
			late := time.Duration(r.IntN(4)*r.IntN(2000)) * time.Millisecond
			members = append(members, &member{rank: rank, p: newProcess(st, r, wills, calls), late: late})
		}
	}
	var mu sync.Mutex
	runs := make(map[string]map[int]bool)
	var wg sync.WaitGroup
	for _, m := range members {
		wg.Go(func() {
			time.Sleep(m.late)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			m.begun = time.Now()
			run, err := New(Config{Store: m.p, Name: "0", Rank: m.rank, Size: size, Foreign: foreign(m.p)}).Meet(ctx)
			m.end = time.Now()
			mu.Lock()
			defer mu.Unlock()
			var e *Error
			var f *Fault
			switch crashed := m.p.gone(); {
			case err == nil:
				ends["met"]++
				if runs[run.ID] == nil {
					runs[run.ID] = make(map[int]bool)
				}
				if runs[run.ID][m.rank] {
					t.Errorf("%s: two processes of rank %d are in run %s", name, m.rank, run.ID)
				}
				runs[run.ID][m.rank] = true
			case crashed:
				ends["crashed"]++
			case !errors.As(err, &e):
				t.Errorf("%s: %v", name, err)
			case errors.Is(err, ErrTwice):
				ends["twice"]++
				if !twice {
					t.Errorf("%s: rank %d: %v", name, m.rank, err)
				}
			case errors.As(err, &f) && f.Gone:
				ends["died"]++
			case e.Timeout():
				ends["late"]++
				m.lacks = e.Missing
			default:
				t.Errorf("%s: rank %d: %v", name, m.rank, err)
			}
			if healthy && !twice && err != nil {
				t.Errorf("%s: rank %d of a healthy job: %v", name, m.rank, err)
			}
		})
	}
	wg.Wait()
	const moment = 5 * time.Second // an answer takes up to 2 s
	for _, m := range members {
		for _, other := range members {
			waits := !other.p.gone() && other.begun.Before(m.end.Add(-moment)) && other.end.After(m.end.Add(-moment/2))
			if waits && slices.Contains(m.lacks, other.rank) {
				t.Errorf("%s: rank %d calls rank %d missing, which waits", name, m.rank, other.rank)
			}
		}
	}
}

func (p *process) gone() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// crashAt lets a rank crash before one of its calls, while all ranks meet. It returns whether the rank came so far, and what
// is wrong with how the others ended. Then all come again.
//
//   - All others meet, or none.
//   - Those that do not meet name the rank: at once if the store notices, and both had come, else at the timeout.
func crashAt(t *testing.T, seed uint64, size int, wills bool, victim, calls int, flaw flaw) (crashed bool, wrong string) {
	fail := func(format string, args ...any) {
		if wrong == "" {
			wrong = fmt.Sprintf(format, args...)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, uint64(calls)))
		st := store.NewHash()
		defer st.Close()
		for _, crash := range []bool{true, false} {
			processes, errs, took, ids := make([]*process, size), make([]error, size), make([]time.Duration, size), make([]string, size)
			var wg sync.WaitGroup
			for rank := range size {
				p := newProcess(st, r, wills, -1)
				if p.flaw = flaw; crash && rank == victim {
					p.calls = calls
				}
				processes[rank] = p
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
					defer cancel()
					begun := time.Now()
					run, err := New(Config{Store: p, Name: "0", Rank: rank, Size: size, Foreign: foreign(p)}).Meet(ctx)
					errs[rank], took[rank], ids[rank] = err, time.Since(begun), run.ID
				})
			}
			wg.Wait()
			dead := processes[victim].gone()
			crashed = crashed || dead
			noticed := dead && wills && !processes[victim].came.IsZero()
			met := 0
			for rank, err := range errs {
				var e *Error
				var f *Fault
				switch {
				case rank == victim && dead:
					continue
				case err == nil:
					met++
				case !dead || !errors.As(err, &e):
					fail("rank %d: %v", rank, err)
				case errors.As(err, &f) && f.Gone && f.Rank == victim:
				case !e.Timeout() || !slices.Contains(e.Missing, victim) && !slices.Contains(e.Stopped, victim):
					fail("rank %d does not name rank %d: %v", rank, victim, err)
				case noticed && processes[rank].came.Before(processes[victim].died):
					fail("rank %d has waited for %v, although the store noticed that rank %d had died: %v", rank, took[rank], victim, err)
				}
			}
			all := size
			if dead {
				all--
			}
			if met > 0 && met < all {
				fail("%d of %d ranks have met: %v", met, all, errors.Join(errs...))
			}
			for rank, id := range ids {
				if id != "" && id != ids[(victim+1)%size] && !(rank == victim && dead) {
					fail("ranks are in different runs: %q", ids)
				}
			}
			time.Sleep(time.Second) // wills are carried out
		}
	})
	return crashed, wrong
}

// TestCrashAtEachCall: a rank of three crashes before each of its calls.
func TestCrashAtEachCall(t *testing.T) {
	for _, wills := range []bool{true, false} {
		for victim := range 3 {
			calls := 0
			for crashed := true; crashed; calls++ {
				var wrong string
				crashed, wrong = crashAt(t, 1, 3, wills, victim, calls, sound)
				require.Empty(t, wrong, "rank %d crashes before call %d, wills %v", victim, calls, wills)
			}
			t.Logf("wills %v, rank %d: %d calls", wills, victim, calls)
		}
	}
}

// TestTheCrashesFindFlaws: what the checks find is there to be found.
func TestTheCrashesFindFlaws(t *testing.T) {
	for flaw, want := range map[flaw]string{noWills: "although the store noticed", oneWill: "although the store noticed", lateWills: "although the store noticed"} {
		found := ""
		for seed := uint64(0); seed < 20 && !strings.Contains(found, want); seed++ {
			for victim := range 3 {
				for calls := 0; calls < 40 && !strings.Contains(found, want); calls++ {
					_, found = crashAt(t, seed, 3, true, victim, calls, flaw)
				}
			}
		}
		require.Contains(t, found, want, "flaw %d", flaw)
	}
}
