package trace

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// counter counts what it hears.
type counter struct{ called, ended, failed atomic.Int64 }

func (c *counter) Called(Event) { c.called.Add(1) }
func (c *counter) Ended(e Event) {
	c.ended.Add(1)
	if e.Err() != nil {
		c.failed.Add(1)
	}
}

// TestConcurrentCalls: operations begin, fail and end on many goroutines while others read the ring.
// Whoever reads sees each operation whole. The race detector looks on.
func TestConcurrentCalls(t *testing.T) {
	x := must.Get(tensor.New(tensor.Float32, 3))
	broken := errors.New("broken")
	for _, c := range []struct{ observed, prompt bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
		observed := c.observed
		heard := new(counter)
		o := Options{Entries: 16}
		if observed {
			o.Observers = []Observer{heard}
		}
		r := New(o)
		g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Timeout: time.Minute, Prompt: c.prompt})
		const callers, calls = 4, 1000
		var running sync.WaitGroup
		for range callers {
			running.Go(func() {
				for i := range calls {
					p := work.NewPromise(work.Info{Op: work.AllReduce, Seq: uint64(i) + 1})
					ts := []*tensor.Tensor{x}
					var c Call
					c.Begin(g, &named{name: "gloo"}, work.AllReduce, ts, ts, -1, 0)
					switch i % 4 {
					case 0: // ends at once
						p.Start()
						p.Complete(nil)
						_, _ = c.Issued(p.Work(), nil)
					case 1:
						_, _ = c.Issued(nil, broken)
					case 2: // ends elsewhere, maybe while it is issued
						ended := make(chan struct{})
						go func() {
							defer close(ended)
							p.Start()
							p.Complete(broken)
						}()
						_, _ = c.Issued(p.Work(), nil)
						<-ended
					default:
						_ = c.Blocked(func() error { return nil })
					}
				}
			})
		}
		stop := make(chan struct{})
		var reader sync.WaitGroup
		reader.Go(func() {
			for {
				for _, o := range r.Operations() {
					if o.Group != g || o.In.Elements != 3 || o.Out.Elements != 3 || o.Called.IsZero() || !o.Ended.IsZero() && o.Began.After(o.Ended) || o.Err != nil && o.Ended.IsZero() {
						t.Errorf("half an operation: %+v", o)
						return
					}
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		running.Wait()
		close(stop)
		reader.Wait()
		for _, o := range r.Operations() {
			require.False(t, o.Ended.IsZero(), "%+v", o)
		}
		require.Zero(t, r.Dropped())
		collectives, _ := g.Calls()
		require.Equal(t, uint64(callers*calls*3/4), collectives, "refused calls do not count")
		if observed {
			require.Equal(t, int64(callers*calls), heard.called.Load())
			require.Equal(t, int64(callers*calls), heard.ended.Load())
			require.Equal(t, int64(callers*calls/2), heard.failed.Load())
		}
	}
}

// TestPrompt: a call of a prompt backend is in the ring as soon as the backend has it, with the number and the begin
// that the Work knows. A pending one keeps its place, and Called comes before Ended.
func TestPrompt(t *testing.T) {
	var heard []string
	r := New(Options{Entries: 2, Observers: []Observer{listener{
		called: func(e Event) { heard = append(heard, "called") },
		ended:  func(e Event) { heard = append(heard, "ended") },
	}}})
	g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Timeout: time.Minute, Prompt: true})
	b := &named{name: "gloo"}
	var c Call
	c.Begin(g, b, work.Broadcast, nil, nil, -1, 0)
	require.Empty(t, r.Operations())
	require.Empty(t, heard)
	p := work.NewPromise(work.Info{Op: work.Broadcast, Seq: 7})
	p.Start()
	w := must.Get(c.Issued(p.Work(), nil))
	require.Same(t, p.Work(), w)
	require.Equal(t, []string{"called"}, heard)
	ops := r.Operations()
	require.Len(t, ops, 1)
	require.Equal(t, uint64(7), ops[0].Seq)
	require.Equal(t, work.Origin().Add(w.Began()), ops[0].Began)
	require.False(t, ops[0].Called.After(ops[0].Began))
	require.True(t, ops[0].Ended.IsZero())

	for range 3 {
		var c Call
		c.Begin(g, b, work.Barrier, nil, nil, -1, 0)
		must.Get(c.Issued(work.Completed(work.Info{Op: work.Barrier}, nil), nil))
	}
	var refused Call
	refused.Begin(g, b, work.Barrier, nil, nil, -1, 0)
	require.ErrorIs(t, must.Err(refused.Issued(nil, work.ErrClosed)), work.ErrClosed)
	p.Complete(nil)
	require.Equal(t, []string{"called", "called", "ended", "called", "ended", "called", "ended", "called", "ended", "ended"}, heard)
	ops = r.Operations()
	require.Len(t, ops, 1, "the refused call has taken the other place")
	require.Equal(t, work.Broadcast, ops[0].Op)
	require.False(t, ops[0].Ended.IsZero())
	collectives, _ := g.Calls()
	require.Equal(t, uint64(4), collectives)
}

// TestPromptDrops: a call of a prompt backend that finds no place is not recorded, and its end disturbs nobody.
func TestPromptDrops(t *testing.T) {
	r := New(Options{Entries: 1})
	g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: true})
	var promises []*work.Promise
	for range 2 {
		var c Call
		c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
		p := work.NewPromise(work.Info{Op: work.Barrier})
		_, _ = c.Issued(p.Work(), nil)
		promises = append(promises, p)
	}
	require.Equal(t, uint64(1), r.Dropped())
	promises[1].Complete(nil)
	require.True(t, r.Operations()[0].Ended.IsZero())
	promises[0].Complete(nil)
	require.False(t, r.Operations()[0].Ended.IsZero())
}

// TestObserverPanics: an operation ends even if an observer panicked when it was called.
func TestObserverPanics(t *testing.T) {
	ends := 0
	r := New(Options{Entries: 1, Observers: []Observer{listener{called: func(Event) { panic("observer") }, ended: func(Event) { ends++ }}}})
	g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: true})
	var c Call
	c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
	p := work.NewPromise(work.Info{Op: work.Barrier})
	require.PanicsWithValue(t, "observer", func() { _, _ = c.Issued(p.Work(), nil) })
	require.True(t, p.Complete(nil))
	require.Equal(t, 1, ends)
	require.False(t, r.Operations()[0].Ended.IsZero())
}

// TestObserverPanicsBefore: a call that the backend does not get because an observer has panicked leaves nothing.
func TestObserverPanicsBefore(t *testing.T) {
	r := New(Options{Entries: 1, Observers: []Observer{listener{called: func(Event) { panic("observer") }}}})
	g := r.Join(Member{Name: "0", Ranks: []int{0}})
	prompt := r.Join(Member{Name: "1", Ranks: []int{0}, Prompt: true})
	for range 2 {
		var c Call
		require.PanicsWithValue(t, "observer", func() { c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0) })
		c = Call{}
		c.Begin(prompt, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
		require.PanicsWithValue(t, "observer", func() { _, _ = c.Issued(nil, errors.New("refused")) })
	}
	require.Empty(t, r.Operations())
	require.Zero(t, r.Dropped())
	for _, g := range []*Group{g, prompt} {
		calls, _ := g.Calls()
		require.Zero(t, calls)
	}
}

// TestBlockedPanics: an operation whose function panics has failed.
func TestBlockedPanics(t *testing.T) {
	r := New(Options{Entries: 1})
	g := r.Join(Member{Name: "0", Ranks: []int{0}})
	for range 2 {
		var c Call
		c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
		require.Panics(t, func() { _ = c.Blocked(func() error { panic("no") }) })
		require.ErrorIs(t, r.Operations()[0].Err, work.ErrPanicked)
	}
	require.Zero(t, r.Dropped())
}

// TestForeignWork: a backend returns the Work of another group as its own. That group's recorder hears of its end.
func TestForeignWork(t *testing.T) {
	inner, outer := New(), New(Options{Entries: 1})
	for _, ended := range []bool{false, true} {
		p := work.NewPromise(work.Info{Op: work.Barrier})
		if ended {
			p.Complete(nil)
		}
		w := p.Work()
		for _, r := range []*Recorder{inner, outer} {
			var c Call
			c.Begin(r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: true}), &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
			_, _ = c.Issued(w, nil)
		}
		p.Complete(nil)
		all := inner.Operations()
		require.False(t, all[len(all)-1].Ended.IsZero())
		for _, o := range outer.Operations() {
			require.False(t, o.Ended.IsZero())
		}
	}
	require.Zero(t, outer.Dropped())
}

// TestDroppedCallsCount: ranks are compared by the number of a collective, so those that are not recorded count.
func TestDroppedCallsCount(t *testing.T) {
	r := New(Options{Entries: 1})
	for _, prompt := range []bool{false, true} {
		g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: prompt})
		call := func(op work.OpType) *work.Promise {
			var c Call
			c.Begin(g, &named{name: "gloo"}, op, nil, nil, -1, 0)
			p := work.NewPromise(work.Info{Op: op})
			_, _ = c.Issued(p.Work(), nil)
			return p
		}
		receive := call(work.Recv)
		for range 3 {
			call(work.Barrier).Complete(nil)
		}
		receive.Complete(nil)
		call(work.Barrier).Complete(nil)
		require.Equal(t, uint64(4), r.Operations()[0].Collective, "prompt %v", prompt)
		require.Equal(t, uint64(1), r.Operations()[0].P2P)
	}
}

// TestTook: an operation that ends within its call has taken the time of the call, and was called before it began.
func TestTook(t *testing.T) {
	for _, prompt := range []bool{false, true} {
		r := New()
		g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: prompt})
		var c Call
		c.Begin(g, &named{name: "gloo"}, work.Send, nil, nil, 0, 0)
		for begun := time.Now(); time.Since(begun) < time.Microsecond; { // the backend works
		}
		p := work.NewPromise(work.Info{Op: work.Send})
		p.Complete(nil)
		must.Get(c.Issued(p.Work(), nil))
		o := r.Operations()[0]
		require.GreaterOrEqual(t, o.Ended.Sub(o.Called), time.Microsecond, "prompt %v", prompt)
		require.False(t, o.Began.Before(o.Called))
	}
}

// TestObserverPanicsAtTheEnd: the operation has ended for those who wait, and its place in the ring can be used again.
func TestObserverPanicsAtTheEnd(t *testing.T) {
	for _, prompt := range []bool{false, true} {
		r := New(Options{Entries: 1, Observers: []Observer{listener{called: func(Event) {}, ended: func(Event) { panic("observer") }}}})
		g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: prompt})
		call := func() *Call {
			c := new(Call)
			c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
			return c
		}
		for range 2 {
			p := work.NewPromise(work.Info{Op: work.Barrier})
			w := must.Get(call().Issued(p.Work(), nil))
			require.PanicsWithValue(t, "observer", func() { p.Complete(nil) })
			require.NoError(t, w.Wait(t.Context()))
			require.False(t, r.Operations()[0].Ended.IsZero())
			require.PanicsWithValue(t, "observer", func() { _, _ = call().Issued(nil, errors.New("refused")) })
			require.Empty(t, r.Operations())
		}
		require.Zero(t, r.Dropped())
	}
}

// TestFrames: the first function of a stack is the one that has called package pg, whatever the backend is.
func TestFrames(t *testing.T) {
	b := &named{name: "gloo"}
	for _, prompt := range []bool{false, true} {
		r := New(Options{Stacks: true})
		g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: prompt})
		for _, call := range []func(c *Call){
			func(c *Call) { _, _ = c.Issued(work.Completed(work.Info{Op: work.Barrier}, nil), nil) },
			func(c *Call) { _ = c.Blocked(func() error { return nil }) },
		} {
			var c Call
			c.Begin(g, b, work.Barrier, nil, nil, -1, 0)
			call(&c)
		}
		ops := r.Operations()
		require.Len(t, ops, 2)
		for _, o := range ops {
			require.Contains(t, o.Frames()[0].Function, "trace.TestFrames", "prompt %v", prompt)
		}
	}
}

// TestEndedBeforeItBegan: an operation that ends before it began took no time.
func TestEndedBeforeItBegan(t *testing.T) {
	for _, prompt := range []bool{false, true} {
		var took time.Duration
		r := New(Options{Observers: []Observer{listener{called: func(Event) {}, ended: func(e Event) { took = e.Took() }}}})
		g := r.Join(Member{Name: "0", Ranks: []int{0}, Prompt: prompt})
		var c Call
		c.Begin(g, &named{name: "gloo"}, work.Barrier, nil, nil, -1, 0)
		p := work.NewPromise(work.Info{Op: work.Barrier})
		p.Complete(nil)
		must.Get(c.Issued(p.Work(), nil))
		require.GreaterOrEqual(t, took, time.Duration(0))
	}
}

// listener is an observer made of functions.
type listener struct{ called, ended func(Event) }

func (l listener) Called(e Event) { l.called(e) }
func (l listener) Ended(e Event)  { l.ended(e) }
