package cuda

import (
	"context"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// HostWork is the name of the all-reduce work that goes through the host, which
// every device and every pair of ranks can do. It ranks 0 in the registry: a
// better one that is usable comes first.
const HostWork = "host"

func init() {
	err := backend.RegisterAllReduce(backend.AllReduceWork{
		Name: HostWork, Device: tensor.CUDA, Layout: tensor.Strided, New: newHostWork,
	})
	if err != nil {
		panic(err)
	}
}

// choose returns the work that does the call.
func (b *Backend) choose(c *backend.AllReduceCall) (backend.AllReduceWork, error) {
	name := b.options.AllReduce
	if name == "" {
		return backend.ChooseAllReduce(c)
	}
	works := backend.AllReduceWorks(tensor.CUDA, c.Tensors[0].Layout())
	i := slices.IndexFunc(works, func(w backend.AllReduceWork) bool { return w.Name == name })
	if i < 0 {
		return backend.AllReduceWork{}, fmt.Errorf("no all-reduce work is called %q for %v", name, c.Tensors[0])
	}
	if w := works[i]; w.Usable != nil {
		if err := w.Usable(c); err != nil {
			return w, fmt.Errorf("all-reduce work %q, which Options.AllReduce asks for: %w", name, err)
		}
	}
	return works[i], nil
}

// host is what an all-reduce work sees of the backend: the CPU backend's
// collectives, in the order of the group's operations.
type host struct {
	b    *Backend
	ctx  context.Context // of the call; nil for none
	op   *operation
	call backend.AllReduceCall
}

func (h *host) Rank() int { return h.b.rank }
func (h *host) Size() int { return h.b.size }

// AllReduceBytes does not apply r.Before and r.After.
func (h *host) AllReduceBytes(ctx context.Context, b []byte, d tensor.DType, r backend.Reduction) error {
	t, err := tensor.FromBytes(d, b, len(b)/max(d.Size(), 1))
	if err != nil {
		return err
	}
	op := backend.Custom(h.call.Op.String(), func(_ tensor.DType, dst, src []byte) { r.Combine(dst, src) })
	return h.op.wait(h.b.cpu.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: op, Timeout: h.op.left()}))
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
	return h.op.wait(h.b.cpu.AllGatherIntoTensor(ctx, o, i, backend.AllGatherOptions{Timeout: h.op.left()}))
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
	return h.op.wait(h.b.cpu.AllGatherV(ctx, parts, i, backend.AllGatherOptions{Timeout: h.op.left()}))
}

// hostWork is the all-reduce of dense tensors through the host. The backend runs
// it as it runs all its collectives.
type hostWork struct{ op *operation }

func newHostWork(c *backend.AllReduceCall) (backend.AllReduceRunner, error) {
	h, ok := c.Host.(*host)
	if !ok {
		return nil, fmt.Errorf("the work %q runs in backend %q, not with a %T", HostWork, Name, c.Host)
	}
	b, ts := h.b, c.Tensors
	if err := b.typed(work.AllReduce, "tensors", output, ts[0].DType(), ts); err != nil {
		return nil, err
	}
	if err := b.reduction(work.AllReduce, c.Op, ts[0].DType()); err != nil {
		return nil, err
	}
	h.op.legs = legs(both, ts...)
	if h.op.shared = b.sharing(c.Op, ts); h.op.shared != nil {
		return &hostWork{h.op}, nil
	}
	h.op.call = func(q *operation, shadows []*tensor.Tensor) error {
		return q.wait(b.cpu.AllReduce(q.ctx, shadows, backend.AllReduceOptions{Op: c.Op, Timeout: q.left()}))
	}
	return &hostWork{h.op}, nil
}

// Run is for other backends' sake: the one that the work was made for does not
// call it.
func (w *hostWork) Run(context.Context) error { return w.op.run() }
