package run

import (
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// operation is a collective on its way.
type operation struct {
	called
	future   *future
	prefix   uint8 // Gloo's number of the collective, in the slot
	needsAll bool  // it cannot succeed before every rank has called it
	afterAll bool  // no rank begins it before its earlier collectives have ended
	early    early
	queued   bool // in the queue
	alone    bool // no collective was under way when it was called
	print    transport.Call
	issued   time.Time   // when, if it is large
	streak   int         // how many before it were waited for at once
	unwatch  func() bool // stops watching ctx on behalf of the queue; may be nil
	run      func(e *engine) error
	result   []*tensor.Tensor

	*arguments // nil unless spare has made the operation
}

// early is what the call of a small collective can do in shared memory before it waits.
type early uint8

const (
	later     early = iota // nothing
	gives                  // all, if a slot is free: the rank only gives args.t, or parts of args.all that are as long
	postsAll               // publish args.t, and all if every rank has published: AllGather
	postsSum               // the same for reduce.dense: AllReduce
	postsNone              // the same for a Barrier
)

// arguments are what an operation needs of its call. They are used again with it.
type arguments struct {
	reduce reduceCall // of an all-reduce
	args   tensorCall // of other collectives
}

// tensorCall is a call of a collective with dense tensors.
type tensorCall struct {
	t       *tensor.Tensor   // the one that this rank gives or gets
	all     []*tensor.Tensor // the others: one with all parts, or one for each rank
	root    int
	lengths []int64 // bytes of each rank's part
	even    bool    // they are equal on all ranks
	red     backend.Reduction
	room    [8]*tensor.Tensor // for all
}

// future is what a caller keeps of an operation. It is apart because the collector has to come
// the more often the larger it is, and stops all ranks when it comes to one.
type future struct {
	work.Promise
	queue *queue
	op    *operation // nil once it has ended; under queue.mu
	room  [1]*tensor.Tensor
}

// spares are operations that have ended, to be used again.
type spares struct{ sync.Pool }

// spare returns an empty operation. One that has ended is used again if nobody else can have it.
func (p *spares) spare() *operation {
	o, ok := p.Get().(*operation)
	if !ok {
		o = &operation{arguments: new(arguments)}
	}
	o.future = new(future)
	return o
}

// recycle keeps o, which has ended, for spare. It keeps only operations that spare has made, without
// a registered work or a watcher of a context: those may still hold the operation.
func (p *spares) recycle(o *operation) {
	a := o.arguments
	if a == nil || a.reduce.runner != nil || o.unwatch != nil {
		return
	}
	if a.reduce.dense.ts != nil {
		a.reduce = reduceCall{}
	} else {
		a.args = tensorCall{lengths: a.args.lengths}
	}
	*o = operation{arguments: a}
	p.Put(o)
}
