package gloo

import (
	"context"
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/allreduce"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ownPriority is that of the backend's own works, which are not registered.
const ownPriority = 0

// reduceCall is the state of an all-reduce, kept within its operation.
type reduceCall struct {
	allreduce.Call
	host   host
	runner allreduce.Runner // nil for dense
	dense  denseWork
}

// chooseAllReduce makes the work ready that does the call: a registered one whose priority is higher,
// or the backend's own.
func (q *operation) chooseAllReduce() error {
	c, t := &q.reduce, q.reduce.Tensors[0]
	own := t.Device().Type == tensor.CPU
	var cannot []string
	for _, w := range allreduce.Works(t.Device().Type, t.Layout()) {
		if own && w.Priority <= ownPriority {
			break
		}
		err := w.Can(&c.Call)
		if err == nil {
			return q.registered(w)
		}
		if !own {
			cannot = append(cannot, w.Name+": "+err.Error())
		}
	}
	switch {
	case own && t.Layout() == tensor.Strided:
		return q.newDense()
	case own && t.Layout() == tensor.SparseCOO:
		return q.newSparse()
	case cannot != nil:
		return fmt.Errorf("no all-reduce work for %v: %s", t, strings.Join(cannot, "; "))
	}
	return fmt.Errorf("unsupported layout %v on device type %v", t.Layout(), t.Device().Type)
}

// registered makes a registered work ready.
func (q *operation) registered(w allreduce.Work) (err error) {
	if q.reduce.runner, err = w.New(&q.reduce.Call); err != nil {
		return err
	}
	if s, ok := q.reduce.runner.(interface{ Synchronize(work.Stream) error }); ok {
		q.sync = s.Synchronize
	}
	q.run = runAllReduce
	return nil
}

// runAllReduce runs a work that is not dense.
func runAllReduce(e *engine) error {
	call := &e.op.reduce
	call.host.engine = e
	return call.runner.Run(e.ctx)
}

// host is the backend's allreduce.Collectives: its collectives on host memory, under the tag of the one
// operation.
type host struct {
	*session
	op     *operation
	engine *engine // set while the operation runs
}

func (h *host) Rank() int { return h.rank }
func (h *host) Size() int { return h.size }

// AllReduceBytes does not apply r.Before and r.After: a work that joins several
// tensors applies them itself.
func (h *host) AllReduceBytes(_ context.Context, b []byte, d tensor.DType, r backend.Reduction) error {
	if r.Grain == 0 {
		r.Grain = d.Size()
	}
	return h.engine.session.route.allReduce(h.engine, b, r)
}

func (h *host) AllGatherBytes(_ context.Context, out, in []byte) error {
	return h.engine.session.route.allGather(h.engine, out, in)
}

func (h *host) AllGatherVBytes(_ context.Context, out, in []byte, counts []int64) error {
	return h.engine.session.route.allGatherV(h.engine, out, in, counts)
}

func (h *host) mismatch(rank int, err error) error {
	return h.session.mismatch(h.engine.mesh, &h.engine.op.called, rank, err)
}

// denseWork is the all-reduce of strided CPU tensors: this rank's tensors are
// combined first, in order, then the ranks' on the group's route.
type denseWork struct {
	ts  []*tensor.Tensor
	red backend.Reduction
}

// custom is the kind of operators that are functions of the program.
var custom = backend.Custom("", nil).Kind()

func (q *operation) newDense() error {
	ts := q.reduce.Tensors
	red, err := q.reduce.Op.Reduction(ts[0].DType(), q.reduce.host.size)
	if err != nil {
		return err
	}
	q.reduce.dense = denseWork{ts, red}
	q.run, q.needsAll = runDense, ts[0].ByteLen() > 0
	if len(ts) == 1 && red.Before == nil && q.reduce.Op.Kind() != custom {
		q.early = postsSum // nothing changes the operand before it is published
	}
	return nil
}

func runDense(e *engine) error {
	w := &e.op.reduce.dense
	t, buf := w.ts[0], w.ts[0].Bytes()
	packed := buf == nil && t.Len() > 0
	if packed {
		buf = grow(&e.packed, t.ByteLen())
		if err := t.Pack(buf); err != nil {
			return err
		}
	}
	if err := w.combineOwn(buf); err != nil {
		return err
	}
	if err := e.session.route.allReduce(e, buf, w.red); err != nil {
		return err
	}
	after(w.red, buf)
	if packed {
		if err := t.Unpack(buf); err != nil {
			return err
		}
	}
	for _, t := range w.ts[1:] {
		if err := t.Unpack(buf); err != nil {
			return err
		}
	}
	return nil
}

// combineOwn combines this rank's tensors. buf has the bytes of the first one.
func (w *denseWork) combineOwn(buf []byte) error {
	before(w.red, buf)
	for _, t := range w.ts[1:] {
		in, err := t.Contiguous()
		if err != nil {
			return err
		}
		if w.red.Before != nil && in == t {
			if in, err = t.Clone(); err != nil {
				return err
			}
		}
		before(w.red, in.Bytes())
		w.red.Combine(buf, in.Bytes())
	}
	return nil
}
