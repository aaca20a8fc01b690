package run

import (
	"context"
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/registry"
	"github.com/c10d-go/c10d/tensor"
)

// reduceWorks are the all-reduce works, by device type and layout. The backend has one for dense tensors and one for sparse
// ones, in CPU memory.
var reduceWorks registry.Table[kind, reduceWork]

type kind struct {
	device tensor.DeviceType
	layout tensor.Layout
}

func (k kind) String() string { return fmt.Sprintf("%v on device type %v", k.layout, k.device) }

// reduceWork is a way to do an all-reduce.
type reduceWork struct {
	// can returns nil if the work does the call, else the reason why not, the same on every rank. It does not
	// communicate. Nil stands for a work that does every call.
	can func(q *operation) error

	// prepare checks the call and makes it ready, in the caller's goroutine. An error means that nothing was sent and
	// no byte changed.
	prepare func(q *operation) error
}

func init() {
	for l, prepare := range map[tensor.Layout]func(*operation) error{
		tensor.Strided:   (*operation).newDense,
		tensor.SparseCOO: (*operation).newSparse,
	} {
		w := registry.Work[reduceWork]{Name: "gloo", Do: reduceWork{prepare: prepare}}
		if err := reduceWorks.Add(w, kind{tensor.CPU, l}); err != nil {
			panic(err)
		}
	}
}

// reduceCall is the state of an all-reduce, kept within its operation.
type reduceCall struct {
	tensors []*tensor.Tensor // at least one; all of one layout, dtype, device and shape
	op      backend.ReduceOp
	host    host
	runner  func(ctx context.Context) error // the host's part, nil for dense tensors
	dense   denseWork
}

// chooseAllReduce makes the work of the highest priority ready that does the call.
func (q *operation) chooseAllReduce() error {
	t := q.reduce.tensors[0]
	k := kind{t.Device().Type, t.Layout()}
	all := reduceWorks.Of(k)
	for i := range all {
		if w := &all[i].Do; w.can == nil || w.can(q) == nil {
			return w.prepare(q)
		}
	}
	if len(all) == 0 {
		return fmt.Errorf("unsupported layout %v", k)
	}
	var not registry.Refusals
	for _, w := range all {
		not.Add(w.Name, w.Do.can(q))
	}
	return fmt.Errorf("no all-reduce work for %v: %s", t, strings.Join(not, "; "))
}

// runAllReduce runs a work that is not dense.
func runAllReduce(e *engine) error {
	call := &e.op.reduce
	call.host.engine = e
	return call.runner(e.ctx)
}

// host is collectives on host memory, under the tag of the one operation. Calls block until done.
type host struct {
	*session
	engine *engine // set while the operation runs
}

// AllGatherBytes copies every rank's in, all of one length, to out in rank order.
func (h *host) AllGatherBytes(_ context.Context, out, in []byte) error {
	return h.engine.route.allGather(h.engine, out, in)
}

func (h *host) mismatch(rank int, err error) error {
	return h.session.mismatch(h.engine.mesh, h.engine.op.Info(), rank, err)
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
	ts := q.reduce.tensors
	red, err := q.reduce.op.Reduction(ts[0].DType(), q.reduce.host.size)
	if err != nil {
		return err
	}
	q.reduce.dense = denseWork{ts, red}
	q.run, q.needsAll = runDense, ts[0].ByteLen() > 0
	if len(ts) == 1 && red.Before == nil && q.reduce.op.Kind() != custom {
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
	if err := e.route.allReduce(e, buf, w.red); err != nil {
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
