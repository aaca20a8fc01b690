package group

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/internal/ring"
	"github.com/c10d-go/c10d/work"
)

// Fifo is a queue between goroutines.
type Fifo[T any] struct {
	cond   sync.Cond
	list   ring.Queue[*T]
	closed bool
	ready  atomic.Bool // take would not wait
}

func (q *Fifo[T]) Init(mu *sync.Mutex) { q.cond.L = mu }

// Linger polls for a while, so that the next item finds its goroutine awake.
func (q *Fifo[T]) linger(limit time.Duration) { hostshm.PollFor(limit, q.ready.Load) }

// Put, take and close need the mutex. take returns nil when the queue is closed
// and empty.
func (q *Fifo[T]) Put(o *T) {
	q.list.Put(o)
	q.ready.Store(true)
	q.cond.Signal()
}

func (q *Fifo[T]) Take() *T {
	for q.list.Len() == 0 && !q.closed {
		q.cond.Wait()
	}
	if q.list.Len() == 0 {
		return nil
	}
	o := q.list.Take()
	q.ready.Store(q.list.Len() > 0 || q.closed)
	return o
}

func (q *Fifo[T]) Close() {
	q.closed = true
	q.ready.Store(true)
	q.cond.Broadcast()
}

// last notes that a collective is the last one. The caller holds b.calls.
func (b *Engine) last(o *Operation) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if o.Info().Op == work.Barrier {
		o.before = b.Last
	}
	if o.Relay != nil {
		o.Relay.tag = OwnTags | o.line.broadcasts<<1
		o.line.broadcasts = (o.line.broadcasts + 1) & (1<<30 - 1)
	}
	b.Last = o.Work()
}
