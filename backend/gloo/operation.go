package gloo

import (
	"context"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// called is what a collective and a message know of their call.
type called struct {
	*future
	ctx        context.Context
	timeout    time.Duration
	call       uint64 // which collective this is, counted from 0
	tag        uint32
	collective bool
}

// until returns when the time of an operation is over that began to wait at since.
func (o *called) until(since time.Time) time.Time {
	if c, ok := o.ctx.(*begun.Context); ok {
		since = c.Since
	}
	until := since.Add(o.timeout)
	if d, ok := o.ctx.Deadline(); ok && d.Before(until) {
		return d
	}
	return until
}

// operation is a collective on its way.
type operation struct {
	called
	prefix   uint8 // Gloo's number of the collective, in the slot
	needsAll bool  // it cannot succeed before every rank has called it
	afterAll bool  // no rank begins it before its earlier collectives have ended
	early    early
	queued   bool // in the queue
	brief    bool // see briefBytes
	alone    bool // no collective was under way when it was called
	print    transport.Call
	issued   time.Time   // when, if it is large
	streak   int         // how many before it were waited for at once
	unwatch  func() bool // stops watching ctx on behalf of the queue; may be nil
	run      func(e *engine) error
	sync     func(work.Stream) error // orders a stream after the result; may be nil
	result   []*tensor.Tensor

	*arguments // nil unless spare has made the operation
}

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
	backend *Backend
	op      *operation // nil once it has ended; under backend.mu
	room    [1]*tensor.Tensor
}

// ordered is a future that orders streams after its result.
type ordered struct {
	*future
	sync func(work.Stream) error
}

// Order implements work.Promise's RunBy.
func (o *ordered) Order(s work.Stream) error { return o.sync(s) }

// Gloo's numbers of the collectives.
const (
	prefixGather    = 1
	prefixAllGather = 2
	prefixReduce    = 3
	prefixAllReduce = 4
	prefixScatter   = 5
	prefixBroadcast = 6
	prefixBarrier   = 7
	prefixAllToAll  = 8

	// prefixMonitored is this library's own; see Backend.monitoredSlot.
	prefixMonitored = 0x80
)

// hasRoot reports whether one rank gives or gets all data of the operation.
func (o *operation) hasRoot() bool {
	switch o.prefix {
	case prefixGather, prefixReduce, prefixScatter, prefixBroadcast:
		return true
	}
	return false
}

// slotOf is Gloo's number of a collective's messages: prefix, tag, step (always 0).
func slotOf(prefix uint8, tag uint32) uint64 { return uint64(prefix)<<56 | uint64(tag)<<24 }
