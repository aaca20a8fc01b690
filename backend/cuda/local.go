package cuda

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Local does operations on tensors of one process, which lie on any number of
// devices: gloo's local collectives. Tensors count from 0, as ranks do. They may
// share devices, and must be contiguous, of one dtype and of one shape.
//
// A call returns at once. The operation comes after the commands that the tensors' streams (OnStream,
// WithStreams) have. Their later commands come after it, without Synchronize. Other streams are ordered
// by the Work's Synchronize.
//
// Methods may be called from many goroutines. Operations on the same memory
// are ordered as they were called. One that fails leaves the others alone. Abort of a Work does nothing.
type Local struct{ g *group.Engine }

// LocalOptions are the options of a Local. The zero value is usable.
type LocalOptions struct {
	// Timeout is the limit of an operation; 0 means backend.DefaultTimeout.
	Timeout time.Duration

	// Pinned is how many bytes of page-locked memory are kept for later operations, Scratch
	// how many of each device's; 0 means 256 MiB. See Options.
	Pinned, Scratch int
}

// NewLocal returns a Local for the devices of d, which it does not close; nil
// means Default.
func NewLocal(d driver.Driver, o LocalOptions) (*Local, error) {
	if o.Pinned < 0 {
		return nil, fmt.Errorf("cuda: LocalOptions.Pinned is %d bytes, want 0 or more", o.Pinned)
	}
	if o.Scratch < 0 {
		return nil, fmt.Errorf("cuda: LocalOptions.Scratch is %d bytes, want 0 or more", o.Scratch)
	}
	if d == nil {
		var err error
		if d, err = Default(); err != nil {
			return nil, fmt.Errorf("cuda: %w", err)
		}
	}
	g, err := group.New(group.Config{
		Size: 1, Alone: true, Group: "local", Timeout: cmp.Or(max(o.Timeout, 0), backend.DefaultTimeout), Driver: d,
		Chunk: defaultChunk, Slots: group.DefaultSlots, Pinned: cmp.Or(o.Pinned, defaultKept), Scratch: cmp.Or(o.Scratch, defaultKept),
	})
	if err != nil {
		return nil, err
	}
	if group.Lacks(d) == nil {
		// Not in an operation, when streams may wait for a word.
		driver.Keep(d, kernels.PTX, kernels.Names()...)
	}
	g.Start()
	return &Local{g}, nil
}

// Close waits until what was issued has ended and frees everything.
func (l *Local) Close() error { return l.g.Shutdown(context.Background()) }

// Broadcast gives every tensor the elements of tensor number root, down a
// binomial tree: n-1 copies from device to device, the longest way through
// ceil(log2 n) of them.
func (l *Local) Broadcast(ctx context.Context, ts []*tensor.Tensor, root int) (*work.Work, error) {
	const op = work.Broadcast
	if err := l.check(op, ts, root); err != nil {
		return nil, err
	}
	return l.fill(ctx, op, ts, root, &group.Operation{Fill: func(q *group.Operation, to group.Commander) error {
		group.Spread(to, placesOf(q), 0, ts[0].ByteLen())
		return nil
	}})
}

// BroadcastFrom gives every tensor the elements of src, which is in CPU memory and
// not used after the call has returned. Tensor number root is the first to have
// them.
func (l *Local) BroadcastFrom(ctx context.Context, src *tensor.Tensor, ts []*tensor.Tensor, root int) (*work.Work, error) {
	const op = work.Broadcast
	if err := l.check(op, ts, root); err != nil {
		return nil, err
	}
	if err := onCPU(op, "source", src, ts); err != nil {
		return nil, err
	}
	n := src.ByteLen()
	return l.fill(ctx, op, ts, root, &group.Operation{Stage: n, Fill: func(q *group.Operation, to group.Commander) error {
		if n == 0 {
			return nil
		}
		staging, all := q.Staging(), placesOf(q)
		driver.HostAccess(l.g.Driver, "staging a source", driver.Writes(staging.Ptr(), n))
		if err := src.Pack(staging.Bytes()[:n]); err != nil {
			return err
		}
		to.Copy(all[0].Up, all[0].At(0), staging.Ptr(), n)
		group.Spread(to, all, 0, n)
		return nil
	}})
}

// Reduce combines all tensors into tensor number root; the others keep theirs.
// Elements are combined in pairs of neighbours, pairs of these and so on:
// ((x0 x1) (x2 x3)) ((x4 x5) x6), whatever the root. Kernels on the devices do that, or
// the host where they cannot, with the same bits.
func (l *Local) Reduce(ctx context.Context, ts []*tensor.Tensor, root int, op backend.ReduceOp) (*work.Work, error) {
	if err := l.check(work.Reduce, ts, root); err != nil {
		return nil, err
	}
	return l.reduce(ctx, work.Reduce, ts, op, root)
}

// AllReduce combines all tensors, in Reduce's order, and gives each the result.
func (l *Local) AllReduce(ctx context.Context, ts []*tensor.Tensor, op backend.ReduceOp) (*work.Work, error) {
	if err := l.check(work.AllReduce, ts, 0); err != nil {
		return nil, err
	}
	return l.reduce(ctx, work.AllReduce, ts, op, 0)
}

// ReduceTo combines all tensors into dst, which is in CPU memory. Nobody else may use dst until
// the Work has ended. The tensors stay as they are. The host combines, in Reduce's order.
func (l *Local) ReduceTo(ctx context.Context, dst *tensor.Tensor, ts []*tensor.Tensor, op backend.ReduceOp) (*work.Work, error) {
	const kind = work.Reduce
	if err := l.check(kind, ts, 0); err != nil {
		return nil, err
	}
	if err := onCPU(kind, "destination", dst, ts); err != nil {
		return nil, err
	}
	if err := overlap(kind, 0, []*tensor.Tensor{dst}, ts); err != nil {
		return nil, err
	}
	red, err := op.Reduction(ts[0].DType(), len(ts))
	if err != nil {
		return nil, bad(kind, "%v", err)
	}
	return l.issue(ctx, kind, &group.Operation{Whole: true, Legs: group.Legs(group.From, ts...), Call: func(_ *group.Operation, h []*tensor.Tensor) error {
		combineOnHost(red, h)
		return dst.Unpack(h[0].Bytes())
	}}, dst)
}

// reduce combines tensors that have been checked, and gives the result to one or to all.
func (l *Local) reduce(ctx context.Context, kind work.OpType, ts []*tensor.Tensor, op backend.ReduceOp, root int) (*work.Work, error) {
	red, err := op.Reduction(ts[0].DType(), len(ts))
	if err != nil {
		return nil, bad(kind, "%v", err)
	}
	all := kind == work.AllReduce
	if l.hasKernels(op, red, ts) {
		return l.fill(ctx, kind, ts, 0, &group.Operation{Fill: func(q *group.Operation, to group.Commander) error {
			return combineOnDevices(q, to, op, root, all)
		}})
	}
	ts = slices.Clone(ts)
	q := &group.Operation{Width: len(ts), Legs: group.Legs(group.From, ts...), Call: func(_ *group.Operation, h []*tensor.Tensor) error {
		combineOnHost(red, h)
		return nil
	}}
	for i := range q.Legs {
		if all || i == root {
			q.Legs[0].Dst = append(q.Legs[0].Dst, q.Legs[i].Src)
		}
	}
	return l.issue(ctx, kind, q, ts...)
}

// hasKernels reports whether the tensors' devices can combine them.
func (l *Local) hasKernels(op backend.ReduceOp, red backend.Reduction, ts []*tensor.Tensor) bool {
	if kernels.Step(op.Kind(), ts[0].DType()) == "" || red.Before != nil || red.After != nil || group.Lacks(l.g.Driver) != nil {
		return false
	}
	l.g.Calls.Lock()
	defer l.g.Calls.Unlock()
	return !slices.ContainsFunc(ts, func(t *tensor.Tensor) bool { return l.g.Packer(t.Device().Index).Err != nil })
}

// fill issues an operation whose Fill has all tensors as places, the root's first.
func (l *Local) fill(ctx context.Context, op work.OpType, ts []*tensor.Tensor, root int, q *group.Operation) (*work.Work, error) {
	q.Whole, q.Legs = true, group.Legs(group.To, slices.Concat(ts[root:], ts[:root])...)
	return l.issue(ctx, op, q, slices.Clone(ts)...)
}

func (l *Local) issue(ctx context.Context, op work.OpType, q *group.Operation, result ...*tensor.Tensor) (*work.Work, error) {
	q.Returns = true
	return l.g.Issue(ctx, op, 0, q, result...)
}

// placesOf returns the places that fill has given an operation.
func placesOf(q *group.Operation) []*place.Place {
	all := make([]*place.Place, len(q.Legs))
	for i := range q.Legs {
		all[i] = q.Legs[i].Dst[0]
	}
	return all
}

// pairs are the tensors that are combined, one pair after the other, the second into the first.
func pairs(n int) iter.Seq2[int, int] {
	return func(yield func(into, from int) bool) {
		for step := 1; step < n; step *= 2 {
			for i := 0; i+step < n; i += 2 * step {
				if !yield(i, i+step) {
					return
				}
			}
		}
	}
}

// combineOnHost combines a piece of all tensors into the first one's.
func combineOnHost(red backend.Reduction, h []*tensor.Tensor) {
	if red.Before != nil {
		for _, t := range h {
			red.Before(t.Bytes())
		}
	}
	for i, j := range pairs(len(h)) {
		red.Combine(h[i].Bytes(), h[j].Bytes())
	}
	if red.After != nil {
		red.After(h[0].Bytes())
	}
}

// combineOnDevices combines where the first of each pair is. Its device gets a copy of the second, so
// it needs no peer access.
func combineOnDevices(q *group.Operation, to group.Commander, op backend.ReduceOp, root int, all bool) (err error) {
	places := placesOf(q)
	n, d, bytes := places[0].T.Len(), places[0].T.DType(), places[0].T.ByteLen()
	if n == 0 {
		return nil
	}
	value, inbox := make([]driver.Ptr, len(places)), make([]driver.Ptr, len(places))
	for i, p := range places {
		value[i] = p.At(0)
	}
	for i, j := range pairs(len(places)) {
		p := places[i]
		if inbox[i] == 0 {
			if inbox[i], err = q.Scratch(p.Dev, bytes); err != nil {
				return err
			}
		}
		out := value[i]
		if out == p.At(0) && !all && i != root {
			// The tensor keeps what it has.
			if out, err = q.Scratch(p.Dev, bytes); err != nil {
				return err
			}
		}
		launch, err := q.B.Packer(p.Dev).Combine(op, d, out, value[i], inbox[i], n)
		if err != nil {
			return err
		}
		to.Copy(places[j].Up, inbox[i], value[j], bytes)
		to.Launch(p.Up, launch)
		value[i] = out
	}
	if all {
		group.Spread(to, places, 0, bytes)
	} else if at := places[root].At(0); value[0] != at {
		to.Copy(places[0].Up, at, value[0], bytes)
	}
	return nil
}

// check checks the tensors of a call.
func (l *Local) check(op work.OpType, ts []*tensor.Tensor, root int) error {
	if len(ts) == 0 {
		return bad(op, "requires non-empty tensor list")
	}
	if root < 0 || root >= len(ts) {
		return bad(op, "invalid root tensor: %d (there are %d)", root, len(ts))
	}
	for i, t := range ts {
		if err := dense(l.g.Driver, nil, op, fmt.Sprint("tensor ", i), t); err != nil {
			return err
		}
		switch {
		case !t.IsContiguous():
			return bad(op, "tensor %d (%v with strides %v) is not contiguous", i, t, t.Strides())
		case t.DType() != ts[0].DType():
			return bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, ts[0].DType(), t.DType())
		case !t.SameShape(ts[0]):
			return bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		}
	}
	return overlap(op, 0, ts, nil)
}

// onCPU checks a tensor in CPU memory: the source or the destination of an operation on ts.
func onCPU(op work.OpType, what string, t *tensor.Tensor, ts []*tensor.Tensor) error {
	switch {
	case t == nil:
		return bad(op, "the %s is nil", what)
	case t.Device().Type != tensor.CPU || t.Layout() != tensor.Strided:
		return bad(op, "the %s is %v, want a dense tensor in CPU memory", what, t)
	case t.DType() != ts[0].DType() || !t.SameShape(ts[0]):
		return bad(op, "the %s is %v, the tensors are like %v", what, t, ts[0])
	}
	return nil
}
