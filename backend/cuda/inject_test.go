package cuda_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/work"
)

// leaveOut runs a program, and then again without each of the calls in turn that take picks. Somebody has to notice each
// that is missing. Without is without or withoutCall. The result is how many calls of each name were left out.
func leaveOut(t *testing.T, s setup, without func(*testing.T, setup, sim.Call, func(*world) error) error,
	take func(c sim.Call) bool, run func(w *world) error) map[string]int {
	t.Helper()
	s.timeout, s.sim.Seed = patience, 3
	var calls []sim.Call
	onVirtualTime(t, func(t *testing.T) {
		var mu sync.Mutex
		w := newWorld(t, s)
		w.m.Skip(func(c sim.Call) bool {
			mu.Lock()
			defer mu.Unlock()
			if take(c) {
				calls = append(calls, c)
			}
			return false
		})
		require.NoError(t, run(w))
		w.m.Skip(nil)
		w.end()
	})
	tried := map[string]int{}
	s.sim.Quiet, s.timeout = true, 300*time.Millisecond
	for _, m := range calls {
		tried[m.Name]++
		// A stream that waits for a word may see a later one, and be in order by luck: not in every run.
		var err error
		for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
			s.sim.Seed = seed
			onVirtualTime(t, func(t *testing.T) { err = without(t, s, m, run) })
		}
		require.Error(t, err, "nobody noticed that %v, number %d of them there, was left out", m, m.K)
	}
	t.Log("left out, each of them missed:", tried)
	return tried
}

// errInjected is what calls fail with in failInTurn.
var errInjected = errors.New("injected")

// failInTurn lets each call to the driver fail in turn that issue makes on a new world, or every so manieth. It ends when
// there are no more calls, of which there must be at least so many. Errors of ranks name the operation, unless op is "".
// check gets all of them. It closes the world.
func failInTurn(t *testing.T, every, least int, op string, world func(t *testing.T, k int) *world, counts func(c sim.Call) bool,
	issue func(x *rank, r int) error, check func(w *world, failed sim.Call, errs []error)) {
	t.Helper()
	for k, more := 0, true; more; k += every {
		onVirtualTime(t, func(t *testing.T) { more = failOne(t, k, least, op, world(t, k), counts, issue, check) })
	}
}

// failOne lets call k fail, in failInTurn. It returns false if there was no such call.
func failOne(t *testing.T, k, least int, op string, w *world, counts func(c sim.Call) bool,
	issue func(x *rank, r int) error, check func(w *world, failed sim.Call, errs []error)) bool {
	var mu sync.Mutex
	var failed sim.Call
	n := 0
	w.m.Inject(func(c sim.Call) error {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(c.Stream, "caller") || counts != nil && !counts(c) {
			return nil // the test's own
		}
		if n++; n-1 != k {
			return nil
		}
		failed = c
		return errInjected
	})
	seq := w.ranks[0].b.Seq()
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error { return issue(x, r) })
	w.m.Inject(nil)
	if failed.Name == "" {
		require.NoError(t, errors.Join(errs...))
		w.end()
		require.GreaterOrEqual(t, k, least)
		t.Logf("calls up to number %d failed in turn", k)
		return false
	}
	for r, err := range errs {
		if err != nil && op != "" {
			e := must.As[*work.Error](t, err, "%v: rank %d", failed, r)
			require.Equal(t, op, e.Op.String(), "%v", failed)
			require.Equal(t, work.Info{Op: e.Op, Seq: seq, Group: "g", Rank: r}, e.Info, "%v", failed)
		}
	}
	check(w, failed, errs)
	return true
}

// ended waits for a call. The others have been called too, so an error of the call aborts the group.
func (x *rank) ended(v *work.Work, err error) error {
	if err != nil {
		x.b.Abort(err)
	}
	return x.wait(v, err)
}

// closeInOrder closes everything after a failure. The checker may have found what was enqueued and not done, and races.
func (w *world) closeInOrder(t *testing.T, failed sim.Call) {
	for _, err := range runEach(w, func(x *rank, _ int, _ chan struct{}) error { return x.b.Close() }) {
		require.NoError(t, err, failed)
	}
	for _, x := range w.ranks {
		require.NoError(t, x.cpu.Close())
	}
	require.NoError(t, w.m.Settle(w.ctx), failed)
	for _, x := range w.ranks {
		x.free()
	}
	w.m.Close()
	for _, f := range w.m.Findings() {
		var unused *sim.Unused
		var race *sim.Race
		require.True(t, errors.As(f, &unused) || errors.As(f, &race), "%v: %v", failed, f)
	}
}
