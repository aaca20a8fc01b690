package work_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var info = work.Info{Op: work.AllReduce, Seq: 7, Group: "0", Rank: 1}

func TestLifeOfASuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := work.NewPromise(info)
		w := p.Work()
		require.False(t, w.IsCompleted())
		require.False(t, w.IsSuccess())
		require.NoError(t, w.Err())
		_, err := w.Result()
		require.ErrorIs(t, err, work.ErrPending)
		_, ok := w.Duration()
		require.False(t, ok)

		p.Start()
		out, err := tensor.New(tensor.Float32, 2)
		require.NoError(t, err)
		go func() {
			time.Sleep(3 * time.Second)
			p.SetResult(out)
			require.True(t, p.Complete(nil))
			require.False(t, p.Complete(errors.New("late")))
		}()
		require.NoError(t, w.Wait(t.Context()))
		synctest.Wait()
		require.True(t, w.IsCompleted())
		require.True(t, w.IsSuccess())
		got, err := w.Result()
		require.NoError(t, err)
		require.Same(t, out, got[0])
		d, ok := w.Duration()
		require.True(t, ok)
		require.InDelta(t, 3*time.Second, d, float64(time.Microsecond))
		require.Equal(t, info, w.Info())
		require.NoError(t, w.Synchronize(nil))
	})
}

func TestFailureNamesOperationAndRank(t *testing.T) {
	p := work.NewPromise(info)
	p.Complete(work.ErrPeerDied)
	err := p.Work().Wait(t.Context())
	require.ErrorIs(t, err, work.ErrPeerDied)
	var e *work.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, info, e.Info)
	require.Equal(t, `work: all_reduce seq 7 on rank 1 of group "0": peer died`, err.Error())
	_, rerr := p.Work().Result()
	require.ErrorIs(t, rerr, work.ErrPeerDied)

	// An error that names its operation already is not wrapped twice.
	q := work.NewPromise(info)
	q.Complete(fmt.Errorf("more: %w", e))
	require.Equal(t, "more: "+e.Error(), q.Work().Err().Error())
}

func TestTimeoutIsANetError(t *testing.T) {
	for _, cause := range []error{work.ErrTimeout, context.DeadlineExceeded} {
		w := work.Completed(info, fmt.Errorf("after 1s: %w", cause))
		var ne net.Error
		require.ErrorAs(t, w.Err(), &ne)
		require.True(t, ne.Timeout())
	}
	var ne net.Error
	require.ErrorAs(t, work.Completed(info, work.ErrClosed).Err(), &ne)
	require.False(t, ne.Timeout())
}

func TestWaitEndsWithItsContextAndTheOperationGoesOn(t *testing.T) {
	p := work.NewPromise(info)
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("bored"))
	err := p.Work().Wait(ctx)
	require.ErrorContains(t, err, "bored")
	require.ErrorContains(t, err, "seq 7")
	require.False(t, p.Work().IsCompleted())
	p.Complete(nil)
	require.NoError(t, p.Work().Wait(ctx), "an operation that has ended wins over a context that has")
}

func TestWaitKeepsTheErrorOfAContextWithACause(t *testing.T) {
	cause := errors.New("the trainer stops")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Nanosecond, cause)
	defer cancel()
	err := work.NewPromise(info).Work().Wait(ctx)
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var ne net.Error
	require.ErrorAs(t, err, &ne)
	require.True(t, ne.Timeout())
}

// ender is an operation whose context is ctx. It ends a while after that.
type ender struct {
	work.Promise
	ctx   context.Context
	takes time.Duration
}

func (e *ender) Abort(error) {}

func (e *ender) EndsWith(ctx context.Context) bool { return ctx.Done() == e.ctx.Done() }

// TestWaitWithTheContextOfTheOperation returns what the operation says of its cancellation. It does
// not wait long for that.
func TestWaitWithTheContextOfTheOperation(t *testing.T) {
	for name, tc := range map[string]struct {
		takes, limit time.Duration
		other        bool // another context ends
		want         string
	}{
		"the same":           {takes: time.Millisecond, want: "rank 1 cancelled"},
		"the same, but slow": {takes: time.Minute, want: "stopped waiting, the operation goes on"},
		"its deadline":       {takes: 290 * time.Millisecond, limit: time.Second, want: "rank 1 cancelled"},
		"its deadline, slow": {takes: 310 * time.Millisecond, limit: time.Second, want: "stopped waiting, the operation goes on"},
		"another":            {takes: time.Millisecond, other: true, want: "stopped waiting, the operation goes on"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tc.limit > 0 {
					ctx, cancel = context.WithTimeout(ctx, tc.limit)
					defer cancel()
				} else {
					time.AfterFunc(time.Second, cancel)
				}
				e := &ender{ctx: ctx, takes: tc.takes}
				if tc.other {
					e.ctx = t.Context()
				}
				e.Init(&work.Issuer{Group: info.Group, Rank: info.Rank}, info.Op, info.Seq)
				e.RunBy(e)
				context.AfterFunc(ctx, func() {
					time.Sleep(e.takes)
					e.Complete(errors.New("rank 1 cancelled"))
				})
				begun := time.Now()
				require.ErrorContains(t, e.Work().Wait(ctx), tc.want)
				require.LessOrEqual(t, time.Since(begun), 3*time.Second)
				<-e.Work().Done()
			})
		})
	}
}

func TestThen(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name        string
		first, then error
		want        error
		runs        bool
	}{
		{"both succeed", nil, nil, nil, true},
		{"first fails", work.ErrTimeout, nil, work.ErrTimeout, false},
		{"then fails", nil, boom, boom, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := work.NewPromise(work.Info{Op: work.Recv})
			ran := false
			next := p.Work().Then(func(*work.Work) error { ran = true; return tc.then })
			require.False(t, next.IsCompleted())
			p.SetSource(3)
			p.Complete(tc.first)
			require.ErrorIs(t, next.Wait(t.Context()), tc.want)
			require.Equal(t, tc.runs, ran)
			src, err := next.SourceRank()
			require.NoError(t, err)
			require.Equal(t, 3, src)
		})
	}
}

// F-45: a function follows a Work whether it is given before the end or after, once; an error passes
// over what would have come next.
func TestF45Chains(t *testing.T) {
	boom := errors.New("boom")
	for _, first := range []error{nil, boom} {
		p := work.NewPromise(work.Info{Op: work.Recv})
		var ran atomic.Int32
		then := func(w *work.Work) *work.Work { return w.Then(func(*work.Work) error { ran.Add(1); return nil }) }
		before := then(then(p.Work()))
		p.Complete(first)
		after := then(then(p.Work()))
		for _, w := range []*work.Work{before, after} {
			require.ErrorIs(t, w.Wait(t.Context()), first)
		}
		want := int32(4)
		if first != nil {
			want = 0
		}
		require.Equal(t, want, ran.Load())
	}
}

// TestThenPanics: a function that does not return fails its Work and not the process.
func TestThenPanics(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name string
		f    func()
		is   error
		text string
	}{
		{"an error", func() { panic(boom) }, boom, "panic: boom"},
		{"text", func() { panic("no") }, work.ErrPanicked, "panic: no"},
		{"Goexit", runtime.Goexit, work.ErrExited, "the function called runtime.Goexit"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := work.Completed(info, nil).Then(func(*work.Work) error { tc.f(); return nil })
			err := w.Wait(t.Context())
			require.ErrorIs(t, err, work.ErrPanicked)
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, tc.text)
			var p *work.PanicError
			require.ErrorAs(t, err, &p)
			require.Contains(t, string(p.Stack), "work_test.go")
		})
	}
}

type aborter func(error)

func (a aborter) Abort(cause error) { a(cause) }

// helper runs its operation in the goroutine of whoever waits first.
type helper struct {
	work.Promise
	helped int
}

func (h *helper) Abort(cause error) { h.Complete(cause) }

func (h *helper) Help(context.Context) {
	h.helped++
	h.Complete(nil)
}

func TestWaitHelps(t *testing.T) {
	for name, wait := range map[string]func(*work.Work) error{
		"wait":        func(w *work.Work) error { return w.Wait(t.Context()) },
		"synchronize": func(w *work.Work) error { return w.Synchronize(nil) },
		"then":        func(w *work.Work) error { return w.Then(func(*work.Work) error { return nil }).Wait(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			h := new(helper)
			h.Init(&work.Issuer{Group: info.Group, Rank: info.Rank}, info.Op, info.Seq)
			h.RunBy(h)
			require.NoError(t, wait(h.Work()))
			require.Equal(t, 1, h.helped)
			require.NoError(t, h.Work().Wait(t.Context()))
			require.Equal(t, 1, h.helped, "nothing to help with any more")
			<-h.Work().Done()
		})
	}
}

// poller finds that its operation is done when it is asked for the second time.
type poller struct {
	work.Promise
	asked int
}

func (p *poller) Abort(cause error) { p.Complete(cause) }

func (p *poller) Poll() {
	if p.asked++; p.asked > 1 {
		p.Complete(nil)
	}
}

func TestStatesArePolled(t *testing.T) {
	for name, ended := range map[string]func(*work.Work) bool{
		"completed": (*work.Work).IsCompleted,
		"success":   (*work.Work).IsSuccess,
		"result":    func(w *work.Work) bool { _, err := w.Result(); return err == nil },
		"duration":  func(w *work.Work) bool { _, ok := w.Duration(); return ok },
	} {
		p := new(poller)
		p.Init(&work.Issuer{Group: info.Group, Rank: info.Rank}, info.Op, info.Seq)
		p.RunBy(p)
		require.False(t, ended(p.Work()), name)
		require.NoError(t, p.Work().Err(), name)
		require.True(t, ended(p.Work()), name)
		require.True(t, ended(p.Work()), name)
		require.Equal(t, 2, p.asked, "%s: nothing to ask any more", name)
	}
}

func TestAbortReachesTheBackend(t *testing.T) {
	p := work.NewPromise(info)
	var got error
	p.RunBy(aborter(func(cause error) { got = cause; p.Complete(cause) }))
	then := p.Work().Then(func(*work.Work) error { return nil })
	then.Abort(work.ErrAborted)
	require.Equal(t, work.ErrAborted, got)
	require.ErrorIs(t, then.Wait(t.Context()), work.ErrAborted)
	got = nil
	p.Work().Abort(work.ErrAborted)
	require.NoError(t, got, "nothing to abort any more")
}

func TestSourceRank(t *testing.T) {
	_, err := work.Completed(info, nil).SourceRank()
	require.ErrorContains(t, err, "only a receive")
	p := work.NewPromise(work.Info{Op: work.RecvAnySource})
	_, err = p.Work().SourceRank()
	require.ErrorIs(t, err, work.ErrPending)
	p.Complete(work.ErrTimeout)
	_, err = p.Work().SourceRank()
	require.ErrorIs(t, err, work.ErrTimeout)
}

type stream struct{}

func (stream) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }

type orderer func(work.Stream) error

func (orderer) Abort(error)                 {}
func (o orderer) Order(s work.Stream) error { return o(s) }

func TestSynchronizeUsesTheBackendsOrder(t *testing.T) {
	p := work.NewPromise(info)
	var ordered work.Stream
	p.RunBy(orderer(func(s work.Stream) error { ordered = s; return nil }))
	ended := make(chan error, 1)
	go func() { ended <- p.Work().Synchronize(stream{}) }()
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(20 * time.Second):
		require.Fail(t, "Synchronize waits for the operation")
	}
	require.Equal(t, stream{}, ordered)
	p.Complete(nil)
	require.NoError(t, p.Work().Synchronize(nil))
}

func TestManyGoroutinesMayWait(t *testing.T) {
	p := work.NewPromise(info)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			<-p.Work().Done()
			if p.Work().Wait(context.Background()) == nil {
				t.Error("want the error")
			}
		})
	}
	p.Complete(work.ErrAborted)
	wg.Wait()
	require.ErrorIs(t, work.WaitAll(t.Context(), nil, p.Work(), work.Completed(info, nil)), work.ErrAborted)
}

func TestAWorkCostsTwoAllocations(t *testing.T) {
	n := testing.AllocsPerRun(100, func() {
		p := work.NewPromise(info)
		p.Start()
		p.Complete(nil)
		_ = p.Work().Wait(context.Background())
	})
	require.LessOrEqual(t, n, 2.0)
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for op := work.Broadcast; op <= work.ReduceScatterTensorCoalesced; op++ {
		name := op.String()
		require.NotContains(t, name, "op(")
		require.False(t, seen[name], name)
		seen[name] = true
	}
	require.Equal(t, "op(77)", work.OpType(77).String())
	require.True(t, work.Recv.IsP2P())
	require.False(t, work.Barrier.IsP2P())
}

func ExampleWork_Wait() {
	p := work.NewPromise(work.Info{Op: work.Barrier, Seq: 2, Group: "0", Rank: 0})
	go p.Complete(fmt.Errorf("rank 3: %w", work.ErrPeerDied))
	fmt.Println(p.Work().Wait(context.Background()))
	// Output: work: barrier seq 2 on rank 0 of group "0": rank 3: peer died
}

// ends notes what an Observer is told.
type ends struct {
	tokens []uint32
	errs   []error
	began  []bool
}

func (e *ends) Ended(token uint32, seq uint64, began, ended time.Duration, err error) {
	e.tokens, e.errs, e.began = append(e.tokens, token), append(e.errs, err), append(e.began, began > 0 && ended >= began)
}

// TestObserve: an observer is told once, whether the operation ends before or after Observe, and
// before the waiting goroutine goes on.
func TestObserve(t *testing.T) {
	var e ends
	p := work.NewPromise(info)
	p.Work().Observe(&e, 7)
	p.Start()
	require.Empty(t, e.tokens)
	require.True(t, p.Complete(nil))
	p.Complete(errors.New("too late"))

	p = work.NewPromise(info)
	p.Complete(errors.New("not begun"))
	p.Work().Observe(&e, 8)
	require.Equal(t, []uint32{7, 8}, e.tokens)
	require.Equal(t, []bool{true, false}, e.began)
	require.NoError(t, e.errs[0])
	var failed *work.Error
	require.ErrorAs(t, e.errs[1], &failed)
}

// settled is an Observer that counts how often it is asked to settle.
type settled struct {
	ends
	n int
}

func (s *settled) Settle() { s.n++ }

// TestSettle: Wait lets an observer of a failure finish what it does about it, and nothing else does.
func TestSettle(t *testing.T) {
	for _, err := range []error{nil, errors.New("broken")} {
		var before, after settled
		p := work.NewPromise(info)
		p.Work().Observe(&before, 1)
		p.Complete(err)
		require.Zero(t, before.n)
		_ = p.Work().Wait(t.Context())
		q := work.NewPromise(info)
		q.Complete(err)
		q.Work().Observe(&after, 1)
		want := 0
		if err != nil {
			want = 1
		}
		require.Equal(t, want, before.n)
		require.Equal(t, want, after.n)
	}
}

// TestSucceeded: it has what an observer is told, of operations that have succeeded only.
func TestSucceeded(t *testing.T) {
	p := work.NewPromise(info)
	p.Start()
	_, _, _, ok := p.Work().Succeeded()
	require.False(t, ok)
	p.Complete(nil)
	seq, began, ended, ok := p.Work().Succeeded()
	require.True(t, ok)
	require.Equal(t, info.Seq, seq)
	require.Equal(t, p.Work().Began(), began)
	took, _ := p.Work().Duration()
	require.Equal(t, began+took, ended)

	p = work.NewPromise(info)
	p.Start()
	p.Complete(errors.New("failed"))
	_, _, _, ok = p.Work().Succeeded()
	require.False(t, ok)
}

// TestWithoutStart: an operation that did not have to wait began when it ended, even if a Start comes late.
func TestWithoutStart(t *testing.T) {
	p := work.NewPromise(info)
	w := p.Work()
	require.Zero(t, w.Began())
	before := time.Since(work.Origin())
	require.True(t, p.Complete(nil))
	began := w.Began()
	require.GreaterOrEqual(t, began, before)
	require.LessOrEqual(t, began, time.Since(work.Origin()))
	for time.Since(work.Origin()) <= began {
		runtime.Gosched()
	}
	p.Start()
	seq, start, end, ok := w.Succeeded()
	require.True(t, ok)
	require.Equal(t, info.Seq, seq)
	require.Equal(t, []time.Duration{began, began, began}, []time.Duration{w.Began(), start, end})
	took, ok := w.Duration()
	require.True(t, ok)
	require.Zero(t, took)

	p = work.NewPromise(info)
	require.True(t, p.Complete(errors.New("failed")))
	require.Zero(t, p.Work().Began())
}

// TestObserveWhileItEnds: an observer is told once, by Complete before the Work shows its end, or by Observe.
func TestObserveWhileItEnds(t *testing.T) {
	for i := range 20000 {
		var e ends
		p := work.NewPromise(info)
		var completing sync.WaitGroup
		completing.Go(func() { p.Complete(nil) })
		p.Work().Observe(&e, 1)
		<-p.Work().Done()
		require.Len(t, e.tokens, 1, "%d", i)
		completing.Wait()
		require.Len(t, e.tokens, 1, "%d", i)
	}
}

// TestDoneWhileItEnds: Done's channel is closed, whichever of Complete and Done comes first.
func TestDoneWhileItEnds(t *testing.T) {
	for range 20000 {
		p := work.NewPromise(info)
		var both sync.WaitGroup
		both.Go(func() { p.Complete(nil) })
		both.Go(func() { <-p.Work().Done() })
		<-p.Work().Done()
		both.Wait()
	}
}

// TestCompleteWaitsForTheFirst: when a later Complete returns, the operation has ended.
func TestCompleteWaitsForTheFirst(t *testing.T) {
	for range 20000 {
		p := work.NewPromise(info)
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				p.Complete(nil)
				if !p.Work().IsCompleted() {
					t.Error("it has not ended")
				}
			})
		}
		both.Wait()
	}
}

// TestEndsWhileOthersLook: Complete, Done and Observe come at the same moment. One Complete counts, every
// Wait returns, and the observer hears of the end once.
func TestEndsWhileOthersLook(t *testing.T) {
	boom := errors.New("boom")
	for range 2000 {
		p := work.NewPromise(info)
		var firsts, told atomic.Int32
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				if p.Complete(boom) {
					firsts.Add(1)
				}
			})
			all.Go(func() {
				<-p.Work().Done()
				require.ErrorIs(t, p.Work().Err(), boom)
			})
			all.Go(func() { require.ErrorIs(t, p.Work().Wait(t.Context()), boom) })
		}
		all.Go(func() { p.Work().Observe(counter{&told}, 1) })
		all.Wait()
		require.EqualValues(t, 1, firsts.Load())
		require.EqualValues(t, 1, told.Load())
	}
}

// counter is an observer that counts the ends it is told of.
type counter struct{ n *atomic.Int32 }

func (c counter) Ended(_ uint32, _ uint64, _, _ time.Duration, err error) {
	if err != nil {
		c.n.Add(1)
	}
}
