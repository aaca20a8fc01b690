package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/internal/allreduce"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// HostWork is the name of the all-reduce work that goes through the host, which
// every device and every pair of ranks can do. Its priority is 0.
const HostWork = "host"

// DirectWork is the name of the work with one kernel on each rank. The kernels write into each
// other's memory and wait for each other (decision 24). It is for 2 to 8 ranks on one host, each
// with a device of its own that reaches the others'. Its priority among the all-reduce works is
// 200. Such groups gather, reduce-scatter and broadcast in the same way.
const DirectWork = "direct"

const directPriority = 200

// RingWork is the name of the work with one kernel on each rank, which writes into the memory of the next rank in a
// ring. It is for 2 to 16 ranks on one host, each with a device of its own. A device has to reach the next one only
// (decision 57). Such groups gather and reduce-scatter in the same way. Where all devices reach each other, up to
// 8 ranks take it only if the table of ways or Options.AllReduce asks for it. Its priority among the all-reduce
// works is 150. It was not measured on GPUs.
const RingWork = "ring"

const ringPriority = 150

// works are the works for the tensors of a layout: the backend's own, and those that the program has
// registered.
type works struct {
	own        []ownWork
	registered []allreduce.Work
}

type ownWork struct {
	name     string
	priority int // see allreduce.Work
}

var sparseWorks = []ownWork{{SparseWork, 0}}

var ownWorks = []ownWork{
	{DirectWork, directPriority}, {RingWork, ringPriority}, {ClustersWork, clustersPriority}, {HostWork, 0},
}

func worksFor(l tensor.Layout) (w works) {
	switch l {
	case tensor.Strided:
		w.own = ownWorks
	case tensor.SparseCOO:
		w.own = sparseWorks
	}
	w.registered = allreduce.Works(tensor.CUDA, l)
	return w
}

// next takes the work of the highest priority. R is nil for one of the backend's own. The name is
// empty after the last one.
func (w *works) next() (name string, r *allreduce.Work) {
	switch {
	case len(w.own) > 0 && (len(w.registered) == 0 || w.own[0].priority >= w.registered[0].Priority):
		name, w.own = w.own[0].name, w.own[1:]
	case len(w.registered) > 0:
		name, r, w.registered = w.registered[0].Name, &w.registered[0], w.registered[1:]
	}
	return name, r
}

// AllReduceWorks returns the names that Options.AllReduce may have, the backend's own works for dense tensors and
// registered ones, those of the highest priority first.
func AllReduceWorks() (names []string) {
	w := worksFor(tensor.Strided)
	for name, _ := w.next(); name != ""; name, _ = w.next() {
		names = append(names, name)
	}
	return names
}

// allReduce is an all-reduce for which a work is wanted.
type allReduce struct {
	b     *Backend
	ctx   context.Context
	ts    []*tensor.Tensor
	op    backend.ReduceOp
	print board.Call
	probe bool // for Explain: nothing is connected, and the tensors have no memory

	way  *ways.Range // of the backend's own works, once they were asked
	host *host       // for registered works
}

// findWork returns the work that does the all-reduce. It allocates nothing if no work is registered.
func (a *allReduce) findWork() (name string, r *allreduce.Work, err error) {
	wanted, t := a.b.options.AllReduce, a.ts[0]
	if t.Layout() != tensor.Strided {
		wanted = "" // the option names a work for dense tensors
	}
	w := worksFor(t.Layout())
	for name, r = w.next(); name != ""; name, r = w.next() {
		if wanted != "" && name != wanted {
			continue
		}
		why := a.allows(name, r)
		if why == nil {
			return name, r, nil
		}
		if wanted != "" {
			return "", nil, fmt.Errorf("all-reduce work %q, which Options.AllReduce asks for: %w", name, why)
		}
	}
	if wanted != "" {
		return "", nil, fmt.Errorf("no all-reduce work is called %q for %v", wanted, t)
	}
	if cannot := a.refusals(""); cannot != nil {
		return "", nil, fmt.Errorf("no all-reduce work for %v: %s", t, strings.Join(cannot, "; "))
	}
	return "", nil, fmt.Errorf("unsupported layout %v on device type %v", t.Layout(), t.Device().Type)
}

// refusals returns why the works do not do the call that have a higher priority than the named one.
func (a *allReduce) refusals(name string) (cannot []string) {
	w := worksFor(a.ts[0].Layout())
	for n, r := w.next(); n != "" && n != name; n, r = w.next() {
		err := a.allows(n, r)
		if err == nil {
			continue
		}
		text := ": " + err.Error()
		if last := len(cannot) - 1; last >= 0 && strings.HasSuffix(cannot[last], text) { // the same reason
			cannot[last] += ", nor " + n
			continue
		}
		cannot = append(cannot, n+text)
	}
	return cannot
}

// allows returns nil if the work does the call, else the reason why not.
func (a *allReduce) allows(name string, r *allreduce.Work) error {
	switch {
	case r != nil:
		if r.Can == nil {
			return nil
		}
		return r.Can(&a.collectives().call)
	case name == DirectWork || name == RingWork:
		return a.allowsKernels(name == RingWork)
	case name == ClustersWork:
		return a.allowsClusters()
	case name == SparseWork:
		return a.allowsSparse()
	}
	if a.way == nil || a.way.Kernels() {
		a.way = a.b.far().Of(plan.OpAllReduce, a.ts[0].ByteLen())
	}
	return nil
}

// allowsKernels returns nil if kernels do the call: round a ring, or with all ranks.
func (a *allReduce) allowsKernels(around bool) error {
	b, d := a.b, a.ts[0].DType()
	err := direct.Supports(a.op, d)
	if err == nil && len(a.ts) > 1 {
		if name, _ := kernels.Combine(a.op.Kind(), d); name == "" {
			err = fmt.Errorf("no kernel for %v of %v", a.op, d)
		}
	}
	bytes := a.ts[0].ByteLen()
	connected := func() error {
		if around {
			return cmp.Or(b.direct.Can(), err, b.direct.Known())
		}
		return cmp.Or(b.direct.CanMesh(), err, b.direct.Mesh())
	}
	if a.probe {
		if err := connected(); err != nil {
			return err
		}
		a.way = b.near().Of(plan.OpAllReduce, bytes)
	} else {
		if err == nil {
			err = b.typed(work.AllReduce, "tensors", d, a.ts) // refused by the next work
		}
		a.way = b.choose(a.ctx, work.AllReduce, a.ts[0], bytes, err, a.print)
		if err := connected(); err != nil {
			return err
		}
	}
	if !a.way.Kernels() || around != (a.way.Name == ways.Ring) {
		return errSlower
	}
	return nil
}

// errSlower is why kernels do not do a call that they could do.
var errSlower = errors.New("the table of ways has a faster one for this size")

// checked checks the tensors and the operator, as the backend's own works do.
func (a *allReduce) checked() error {
	d := a.ts[0].DType()
	if err := a.b.typed(work.AllReduce, "tensors", d, a.ts); err != nil {
		return err
	}
	return a.b.reduction(work.AllReduce, a.op, d)
}

// collectives returns what registered works get.
func (a *allReduce) collectives() *host {
	if a.host == nil {
		h := &host{b: a.b, op: &group.Operation{B: a.b.g, Print: a.print}}
		h.call = allreduce.Call{Tensors: slices.Clone(a.ts), Op: a.op, Collectives: h}
		a.host = h
	}
	return a.host
}

// host is the backend's allreduce.Collectives: those of the CPU backend, in the order of the group's
// operations.
type host struct {
	b    *Backend
	op   *group.Operation
	call allreduce.Call
}

func (h *host) Rank() int { return h.b.g.Rank }
func (h *host) Size() int { return h.b.g.Size }

// AllReduceBytes does not apply r.Before and r.After.
func (h *host) AllReduceBytes(ctx context.Context, b []byte, d tensor.DType, r backend.Reduction) error {
	t, err := tensor.FromBytes(d, b, len(b)/max(d.Size(), 1))
	if err != nil {
		return err
	}
	op := backend.Custom(h.call.Op.String(), func(_ tensor.DType, dst, src []byte) { r.Combine(dst, src) })
	return h.op.Wait(h.b.g.CPU.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: op, Timeout: h.op.Left()}))
}

func (h *host) AllGatherBytes(ctx context.Context, out, in []byte) error {
	o, err := tensor.Of(out, len(out))
	if err != nil {
		return err
	}
	i, err := tensor.Of(in, len(in))
	if err != nil {
		return err
	}
	return h.op.Wait(h.b.g.CPU.AllGatherIntoTensor(ctx, o, i, backend.AllGatherOptions{Timeout: h.op.Left()}))
}

func (h *host) AllGatherVBytes(ctx context.Context, out, in []byte, counts []int64) error {
	parts := make([]*tensor.Tensor, len(counts))
	for r, n := range counts {
		if n < 0 || n > int64(len(out)) {
			return fmt.Errorf("rank %d has %d bytes of an output with %d left", r, n, len(out))
		}
		t, err := tensor.Of(out[:n], int(n))
		if err != nil {
			return err
		}
		parts[r], out = t, out[n:]
	}
	i, err := tensor.Of(in, len(in))
	if err != nil {
		return err
	}
	return h.op.Wait(h.b.g.CPU.AllGatherV(ctx, parts, i, backend.AllGatherOptions{Timeout: h.op.Left()}))
}

// registered makes the operation one of a registered work.
func (h *host) registered(w *allreduce.Work) (*group.Operation, error) {
	runner, err := w.New(&h.call)
	if err != nil {
		return nil, err
	}
	h.op.Call = func(q *group.Operation, _ []*tensor.Tensor) error { return runner.Run(q.Ctx) }
	if s, ok := runner.(interface{ Synchronize(work.Stream) error }); ok {
		h.op.Sync = s.Synchronize
	}
	return h.op, nil
}

// throughHost returns an all-reduce of dense tensors through the host.
func (a *allReduce) throughHost() (*group.Operation, error) {
	b, ts, op := a.b, slices.Clone(a.ts), a.op
	if err := a.checked(); err != nil {
		return nil, err
	}
	if a.within() {
		o := &group.Operation{Print: a.print}
		o.Within(ts, &op)
		return o, nil
	}
	o := &group.Operation{Print: a.print, Legs: group.Legs(group.Both, ts...)}
	if a.way.Name == ways.HostShared {
		o.Shared = b.g.Sharing(op, ts)
	}
	if o.Shared == nil {
		o.Call = func(q *group.Operation, shadows []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.AllReduce(q.Ctx, shadows, backend.AllReduceOptions{Op: op, Timeout: q.Left()}))
		}
	}
	return o, nil
}

// within reports whether the devices of a group of one rank do all of the all-reduce. They do not if the options ask for
// the way through the host.
func (a *allReduce) within() bool {
	if a.b.g.Size > 1 || a.b.options.AllReduce == HostWork || !onDevices(a.ts) {
		return false
	}
	red, err := a.op.Reduction(a.ts[0].DType(), 1)
	return err == nil && red.Before == nil && red.After == nil && (len(a.ts) == 1 || a.b.g.CanCombine(a.op, a.ts[0]))
}

// onDevices reports whether tensors are contiguous and in device memory.
func onDevices(ts []*tensor.Tensor) bool {
	return !slices.ContainsFunc(ts, func(t *tensor.Tensor) bool { return inCPU(t) || !t.IsContiguous() })
}

// byKernels returns an all-reduce by kernels.
func (a *allReduce) byKernels() (*directway.Call, error) {
	if err := a.b.reduction(work.AllReduce, a.op, a.ts[0].DType()); err != nil {
		return nil, err
	}
	return a.b.direct.NewAllReduce(a.ts, a.op, form(a.way.Way)), nil
}
