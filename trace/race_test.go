package trace

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	x, err := tensor.New(tensor.Float32, 3)
	require.NoError(t, err)
	broken := errors.New("broken")
	for _, observed := range []bool{false, true} {
		heard := new(counter)
		o := Options{Entries: 16}
		if observed {
			o.Observers = []Observer{heard}
		}
		r := New(o)
		g := r.Join(Member{Name: "0", Ranks: []int{0, 1}, Timeout: time.Minute})
		const callers, calls = 4, 1000
		var running sync.WaitGroup
		for range callers {
			running.Go(func() {
				for i := range calls {
					p := work.NewPromise(work.Info{Op: work.AllReduce, Seq: uint64(i) + 1})
					ts := []*tensor.Tensor{x}
					c := g.Begin("gloo", work.AllReduce, ts, ts, -1, 0)
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
