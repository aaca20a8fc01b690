package cuda

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// HostWork is the name of the all-reduce work that goes through the host, which
// every device and every pair of ranks can do. Its priority is 0.
const HostWork = "host"

// DirectWork is the name of the work in which one kernel of each rank does everything: the kernels
// write into each other's memory and wait for each other (decision 24). It is for 2 to 8 ranks on
// one host, each with a device of its own that reaches the others'. Its priority among the
// all-reduce works is 200. Such groups gather, reduce-scatter and broadcast in the same way.
const DirectWork = "direct"

const directPriority = 200

// allReduceWork is a work that an all-reduce may take: one of the backend's own or a registered one.
type allReduceWork struct {
	name     string
	priority int // see backend.AllReduceWork

	// can returns why the work cannot do a call; nil stands for a work that can do all. It does not
	// communicate.
	can func(h *host) error

	// meet sets the work up with the other ranks at the first call that can says it can do. An error
	// says why the work cannot do the call after all. Nil stands for a work without a set-up.
	meet func(h *host) error

	// prepare checks the call and makes its operation ready.
	prepare func(h *host) error
}

// ownWorks are the backend's own works, those of the highest priority first.
var ownWorks = []allReduceWork{
	{name: DirectWork, priority: directPriority, can: directCan, meet: directMeet, prepare: prepareDirectWork},
	{name: HostWork, priority: 0, prepare: prepareHostWork},
}

// allReduceWorks returns the works for tensors of a layout, those of the highest priority first.
func allReduceWorks(l tensor.Layout) []allReduceWork {
	var all []allReduceWork
	if l == tensor.Strided {
		all = ownWorks
	}
	registered := backend.AllReduceWorks(tensor.CUDA, l)
	if len(registered) == 0 {
		return all
	}
	all = slices.Clone(all)
	for _, w := range registered {
		all = append(all, allReduceWork{
			name: w.Name, priority: w.Priority,
			can:     func(h *host) error { return w.Can(&h.call) },
			prepare: func(h *host) error { return h.registered(w) },
		})
	}
	slices.SortStableFunc(all, func(a, b allReduceWork) int { return cmp.Compare(b.priority, a.priority) })
	return all
}

// AllReduceWorks returns the names that Options.AllReduce may have, the backend's own works and
// registered ones, those of the highest priority first.
func AllReduceWorks() []string {
	var names []string
	for _, w := range allReduceWorks(tensor.Strided) {
		names = append(names, w.name)
	}
	return names
}

// allows returns nil if the work does the call, else the reason why not.
func (w *allReduceWork) allows(h *host) error {
	if w.can != nil {
		if err := w.can(h); err != nil {
			return err
		}
	}
	if w.meet != nil {
		return w.meet(h)
	}
	return nil
}

// choose returns the work that does the call.
func (b *Backend) choose(h *host) (w allReduceWork, err error) {
	t, name := h.call.Tensors[0], b.options.AllReduce
	works := allReduceWorks(t.Layout())
	if name != "" {
		i := slices.IndexFunc(works, func(w allReduceWork) bool { return w.name == name })
		if i < 0 {
			return w, fmt.Errorf("no all-reduce work is called %q for %v", name, t)
		}
		if err := works[i].allows(h); err != nil {
			return w, fmt.Errorf("all-reduce work %q, which Options.AllReduce asks for: %w", name, err)
		}
		return works[i], nil
	}
	for _, w := range works {
		if w.allows(h) == nil {
			return w, nil
		}
	}
	if cannot := refusals(h, ""); cannot != nil {
		return w, fmt.Errorf("no all-reduce work for %v: %s", t, strings.Join(cannot, "; "))
	}
	return w, fmt.Errorf("unsupported layout %v on device type %v", t.Layout(), t.Device().Type)
}

// refusals returns why the works do not do a call that have a higher priority than the named one.
func refusals(h *host, name string) (cannot []string) {
	for _, w := range allReduceWorks(h.call.Tensors[0].Layout()) {
		if w.name == name {
			break
		}
		if err := w.allows(h); err != nil {
			cannot = append(cannot, w.name+": "+err.Error())
		}
	}
	return cannot
}

// host is the backend's backend.Collectives: those of the CPU backend, in the order of the group's
// operations.
type host struct {
	b    *Backend
	ctx  context.Context // of the call; nil for none
	op   *group.Operation
	call backend.AllReduceCall

	direct *directway.Call // instead of op, once it has been prepared
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

// registered makes the call's operation one of a registered work.
func (h *host) registered(w backend.AllReduceWork) error {
	runner, err := w.New(&h.call)
	if err != nil {
		return err
	}
	h.op.Call = func(q *group.Operation, _ []*tensor.Tensor) error { return runner.Run(q.Ctx) }
	if s, ok := runner.(interface{ Synchronize(work.Stream) error }); ok {
		h.op.Sync = s.Synchronize
	}
	return nil
}

// prepareHostWork makes the call's operation an all-reduce of dense tensors through the host. The
// backend runs it as it runs all its collectives.
func prepareHostWork(h *host) error {
	b, ts, op := h.b, h.call.Tensors, h.call.Op
	if err := b.typed(work.AllReduce, "tensors", output, ts[0].DType(), ts); err != nil {
		return err
	}
	if err := b.reduction(work.AllReduce, op, ts[0].DType()); err != nil {
		return err
	}
	h.op.Legs = group.Legs(group.Both, ts...)
	if h.op.Shared = b.g.Sharing(op, ts); h.op.Shared == nil {
		h.op.Call = func(q *group.Operation, shadows []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.AllReduce(q.Ctx, shadows, backend.AllReduceOptions{Op: op, Timeout: q.Left()}))
		}
	}
	return nil
}

// directCan returns why no direct work can do an all-reduce. The answer is the same on every rank.
func directCan(h *host) error {
	ts, op := h.call.Tensors, h.call.Op
	if err := h.b.direct.Can(); err != nil {
		return err
	}
	if err := direct.Supports(op, ts[0].DType()); err != nil {
		return err
	}
	if len(ts) > 1 && kernels.Step(op.Kind(), ts[0].DType()) == "" {
		return fmt.Errorf("no kernel for %v of %v", op, ts[0].DType())
	}
	if _, probe := ts[0].Memory().(nowhere); probe {
		return nil
	}
	// Wrong calls are refused by the work that comes next.
	return h.b.typed(work.AllReduce, "tensors", output, ts[0].DType(), ts)
}

// directMeet connects the ranks at the first call.
func directMeet(h *host) error {
	t := h.call.Tensors[0]
	if _, probe := t.Memory().(nowhere); probe {
		return h.b.direct.Known()
	}
	return h.b.direct.Ready(h.ctx, work.AllReduce, t.Device().Index, h.op.Print)
}

// prepareDirectWork makes the call's operation a direct one.
func prepareDirectWork(h *host) error {
	b, c, d := h.b, &h.call, h.call.Tensors[0].DType()
	if err := b.typed(work.AllReduce, "tensors", output, d, c.Tensors); err != nil {
		return err
	}
	if err := b.reduction(work.AllReduce, c.Op, d); err != nil {
		return err
	}
	if i, j, ok := place.ShareMemory(c.Tensors); ok {
		return fmt.Errorf("tensors %d and %d share memory", i, j)
	}
	h.direct = b.direct.NewAllReduce(c.Tensors, c.Op)
	return nil
}

// plain reports whether an all-reduce is direct work of a kind that needs no further look: the ranks
// are connected, there is a kernel, and no registered work comes first.
func (b *Backend) plain(ts []*tensor.Tensor, op backend.ReduceOp) bool {
	if b.direct.Open.Load() == nil || len(ts) != 1 || ts[0].Layout() != tensor.Strided || direct.Supports(op, ts[0].DType()) != nil {
		return false
	}
	registered := backend.AllReduceWorks(tensor.CUDA, tensor.Strided)
	return (len(registered) == 0 || registered[0].Priority < directPriority) && b.dense(work.AllReduce, "tensor 0", output, ts[0]) == nil
}
