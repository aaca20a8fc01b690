package nccl

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Each collective is the calls of NCCL that PyTorch makes for it, because NCCL matches calls by their order.

// collective returns a call of the group's communicator, and NCCL's type of the tensors' elements.
func (b *Backend) collective(ctx context.Context, op work.OpType, timeout time.Duration, d tensor.DType) (call, libnccl.DataType, error) {
	t, err := b.typeOf(op, d)
	return call{ctx: ctx, op: op, timeout: timeout, pair: -1, source: -1}, t, err
}

// with calls f with the operator as the communicator knows it.
func (x *enqueuer) with(r reduction, t libnccl.DataType, f func(op libnccl.RedOp)) {
	if r.scalar == nil {
		f(r.op)
		return
	}
	op := r.op
	x.do("RedOpCreatePreMulSum", func() (res libnccl.Result) {
		op, res = x.b.api.RedOpPreMulSum(r.scalar, t, x.h)
		return res
	})
	if x.err == nil {
		f(op)
		err := x.err
		x.err = nil
		x.do("RedOpDestroy", func() libnccl.Result { return x.b.api.RedOpDestroy(op, x.h) })
		if err != nil {
			x.err = err
		}
	}
}

// one refuses several tensors of one rank.
func (b *Backend) one(op work.OpType, ts []*tensor.Tensor) error {
	if len(ts) > 1 {
		return b.lacks(fmt.Sprintf("%v of %d tensors of a rank", op, len(ts)))
	}
	return nil
}

// Broadcast brings the root's tensor to all ranks.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.args.Broadcast(ts, o); err != nil {
		return nil, err
	}
	if err := b.one(op, ts); err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, op, o.Timeout, ts[0].DType())
	if err != nil {
		return nil, err
	}
	p, n := start(ts[0]), count(ts[0])
	q.out = ts
	q.enqueue = func(x *enqueuer) {
		x.do("Broadcast", func() libnccl.Result { return b.api.Broadcast(p, p, n, t, o.Root, x.h, x.s) })
	}
	return b.issue(q)
}

// AllReduce combines the ranks' tensors.
func (b *Backend) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduce
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if err := b.args.Typed(op, "tensors", dtypeOf(ts[0]), ts); err != nil {
		return nil, err
	}
	if err := b.one(op, ts); err != nil {
		return nil, err
	}
	return b.allReduce(ctx, op, ts, o, func(_ *enqueuer, f func()) { f() })
}

func dtypeOf(t *tensor.Tensor) tensor.DType {
	if t == nil {
		return tensor.Invalid
	}
	return t.DType()
}

// AllReduceCoalesced combines each of several tensors.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	if err := b.args.AllReduceCoalesced(ts); err != nil {
		return nil, err
	}
	return b.allReduce(ctx, work.AllReduceCoalesced, ts, o, (*enqueuer).group)
}

func (b *Backend) allReduce(ctx context.Context, op work.OpType, ts []*tensor.Tensor, o backend.AllReduceOptions, grouped func(*enqueuer, func())) (*work.Work, error) {
	r, err := b.reductionOf(op, o.Op, ts[0].DType())
	if err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, op, o.Timeout, ts[0].DType())
	if err != nil {
		return nil, err
	}
	q.out = slices.Clone(ts)
	q.enqueue = func(x *enqueuer) {
		x.with(r, t, func(op libnccl.RedOp) {
			grouped(x, func() {
				for _, v := range q.out {
					x.do("AllReduce", func() libnccl.Result { return b.api.AllReduce(start(v), start(v), count(v), t, op, x.h, x.s) })
				}
			})
		})
	}
	return b.issue(q)
}

// Reduce combines t into the root's.
func (b *Backend) Reduce(ctx context.Context, v *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	const op = work.Reduce
	if err := b.args.Reduce(v, o); err != nil {
		return nil, err
	}
	r, err := b.reductionOf(op, o.Op, v.DType())
	if err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, op, o.Timeout, v.DType())
	if err != nil {
		return nil, err
	}
	q.out = []*tensor.Tensor{v}
	q.enqueue = func(x *enqueuer) {
		x.with(r, t, func(op libnccl.RedOp) {
			x.do("Reduce", func() libnccl.Result { return b.api.Reduce(start(v), start(v), count(v), t, op, o.Root, x.h, x.s) })
		})
	}
	return b.issue(q)
}

// AllGather gathers the ranks' inputs.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGather(out, in, true); err != nil {
		return nil, err
	}
	return b.allGather(ctx, out, in, o)
}

// AllGatherV gathers inputs of unequal size.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGather(out, in, false); err != nil {
		return nil, err
	}
	return b.allGather(ctx, out, in, o)
}

// allGather is one all-gather into memory for all parts. Inputs of unequal shape are a broadcast of each rank.
func (b *Backend) allGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	q, t, err := b.collective(ctx, work.AllGather, o.Timeout, in.DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = slices.Clone(out), []*tensor.Tensor{in}
	if slices.ContainsFunc(out, func(v *tensor.Tensor) bool { return !v.SameShape(in) }) {
		q.enqueue = func(x *enqueuer) {
			x.group(func() {
				for r, v := range q.out {
					from := start(v)
					if r == b.rank {
						from = start(in)
					}
					x.do("Broadcast", func() libnccl.Result { return b.api.Broadcast(from, start(v), count(v), t, r, x.h, x.s) })
				}
			})
		}
		return b.issue(q)
	}
	flat, together := joined(out)
	q.enqueue = func(x *enqueuer) {
		if !together {
			flat = x.room(b.size * in.ByteLen())
		}
		x.do("AllGather", func() libnccl.Result { return b.api.AllGather(start(in), flat, count(in), t, x.h, x.s) })
	}
	q.then = func(x *enqueuer) {
		if !together {
			for r, v := range q.out {
				x.copy(start(v), flat+driver.Ptr(r*in.ByteLen()), in.ByteLen())
			}
		}
	}
	return b.issue(q)
}

// AllGatherIntoTensor gathers the ranks' inputs into parts of out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGatherIntoTensor(out, in); err != nil {
		return nil, err
	}
	return b.allGatherInto(ctx, work.AllGatherIntoTensor, []*tensor.Tensor{out}, []*tensor.Tensor{in}, o, func(_ *enqueuer, f func()) { f() })
}

// AllGatherIntoTensorCoalesced does AllGatherIntoTensor for each pair.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if _, err := b.args.AllGatherIntoTensorCoalesced(out, in); err != nil {
		return nil, err
	}
	return b.allGatherInto(ctx, work.AllGatherCoalesced, out, in, o, (*enqueuer).group)
}

func (b *Backend) allGatherInto(ctx context.Context, op work.OpType, out, in []*tensor.Tensor, o backend.AllGatherOptions, grouped func(*enqueuer, func())) (*work.Work, error) {
	q, t, err := b.collective(ctx, op, o.Timeout, in[0].DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = slices.Clone(out), slices.Clone(in)
	q.enqueue = func(x *enqueuer) {
		grouped(x, func() {
			for i, v := range q.in {
				x.do("AllGather", func() libnccl.Result { return b.api.AllGather(start(v), start(q.out[i]), count(v), t, x.h, x.s) })
			}
		})
	}
	return b.issue(q)
}

// AllGatherCoalesced is refused, as by PyTorch's NCCL.
func (b *Backend) AllGatherCoalesced(context.Context, [][]*tensor.Tensor, []*tensor.Tensor, backend.AllGatherOptions) (*work.Work, error) {
	return nil, b.lacks("all_gather_coalesced of lists (AllGatherIntoTensorCoalesced is there)")
}

// Gather gathers the ranks' inputs at the root.
func (b *Backend) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, true)
}

// GatherV is Gather with inputs of unequal size.
func (b *Backend) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, false)
}

func (b *Backend) gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions, even bool) (*work.Work, error) {
	if err := b.args.Gather(out, in, o.Root, even); err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, work.Gather, o.Timeout, in.DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = slices.Clone(out), []*tensor.Tensor{in}
	q.enqueue = func(x *enqueuer) {
		if b.rank != o.Root {
			x.do("Send", func() libnccl.Result { return b.api.Send(start(in), count(in), t, o.Root, x.h, x.s) })
			return
		}
		x.group(func() {
			for r, v := range q.out {
				if r != b.rank {
					x.do("Recv", func() libnccl.Result { return b.api.Recv(start(v), count(v), t, r, x.h, x.s) })
				}
			}
		})
	}
	q.then = func(x *enqueuer) {
		if b.rank == o.Root {
			x.copy(start(q.out[b.rank]), start(in), in.ByteLen())
		}
	}
	return b.issue(q)
}

// Scatter sends the root's inputs to their ranks.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	if err := b.args.Scatter(out, in, o.Root); err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, work.Scatter, o.Timeout, out.DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = []*tensor.Tensor{out}, slices.Clone(in)
	q.enqueue = func(x *enqueuer) {
		if b.rank != o.Root {
			x.do("Recv", func() libnccl.Result { return b.api.Recv(start(out), count(out), t, o.Root, x.h, x.s) })
			return
		}
		x.group(func() {
			for r, v := range q.in {
				if r != b.rank {
					x.do("Send", func() libnccl.Result { return b.api.Send(start(v), count(v), t, r, x.h, x.s) })
				}
			}
		})
	}
	q.then = func(x *enqueuer) {
		if b.rank == o.Root {
			x.copy(start(out), start(q.in[b.rank]), out.ByteLen())
		}
	}
	return b.issue(q)
}

// ReduceScatter combines input i of all ranks into rank i's output. Inputs of unequal shape are a reduce to each rank.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	const op = work.ReduceScatter
	if err := b.args.ReduceScatter(out, in); err != nil {
		return nil, err
	}
	r, err := b.reductionOf(op, o.Op, out.DType())
	if err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, op, o.Timeout, out.DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = []*tensor.Tensor{out}, slices.Clone(in)
	uneven := slices.ContainsFunc(in, func(v *tensor.Tensor) bool { return !v.SameShape(out) })
	flat, together := joined(in)
	q.enqueue = func(x *enqueuer) {
		if !uneven && !together {
			flat = x.room(b.size * out.ByteLen())
			for i, v := range q.in {
				x.copy(flat+driver.Ptr(i*out.ByteLen()), start(v), v.ByteLen())
			}
		}
		x.with(r, t, func(op libnccl.RedOp) {
			if !uneven {
				x.do("ReduceScatter", func() libnccl.Result { return b.api.ReduceScatter(flat, start(out), count(out), t, op, x.h, x.s) })
				return
			}
			x.group(func() {
				for i, v := range q.in {
					to := start(v)
					if i == b.rank {
						to = start(out)
					}
					x.do("Reduce", func() libnccl.Result { return b.api.Reduce(start(v), to, count(v), t, op, i, x.h, x.s) })
				}
			})
		})
	}
	return b.issue(q)
}

// ReduceScatterTensor combines part i of all ranks' inputs into rank i's output.
func (b *Backend) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatter(ctx, work.ReduceScatterTensor, []*tensor.Tensor{out}, []*tensor.Tensor{in}, o, func(_ *enqueuer, f func()) { f() })
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair.
func (b *Backend) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatter(ctx, work.ReduceScatterTensorCoalesced, out, in, o, (*enqueuer).group)
}

func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, out, in []*tensor.Tensor, o backend.ReduceScatterOptions, grouped func(*enqueuer, func())) (*work.Work, error) {
	if err := b.args.ReduceScatterTensors(op, out, in); err != nil {
		return nil, err
	}
	r, err := b.reductionOf(op, o.Op, out[0].DType())
	if err != nil {
		return nil, err
	}
	q, t, err := b.collective(ctx, op, o.Timeout, out[0].DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in = slices.Clone(out), slices.Clone(in)
	q.enqueue = func(x *enqueuer) {
		x.with(r, t, func(op libnccl.RedOp) {
			grouped(x, func() {
				for i, v := range q.out {
					x.do("ReduceScatter", func() libnccl.Result { return b.api.ReduceScatter(start(q.in[i]), start(v), count(v), t, op, x.h, x.s) })
				}
			})
		})
	}
	return b.issue(q)
}

// AllToAll sends in[j] to rank j.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	if err := b.args.AllToAll(out, in); err != nil {
		return nil, err
	}
	return b.allToAll(ctx, work.AllToAll, slices.Clone(out), slices.Clone(in), nil, o)
}

// AllToAllSingle sends part j of in to rank j.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	outs, ins, err := b.args.AllToAllParts(out, in, outSplits, inSplits)
	if err != nil {
		return nil, err
	}
	return b.allToAll(ctx, work.AllToAllSingle, outs, ins, []*tensor.Tensor{out}, o)
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, out, in, result []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	q, t, err := b.collective(ctx, op, o.Timeout, in[0].DType())
	if err != nil {
		return nil, err
	}
	q.out, q.in, q.result = out, in, result
	q.enqueue = func(x *enqueuer) {
		x.group(func() {
			for r := range b.size {
				if n := count(in[r]); n > 0 {
					x.do("Send", func() libnccl.Result { return b.api.Send(start(in[r]), n, t, r, x.h, x.s) })
				}
				if n := count(out[r]); n > 0 {
					x.do("Recv", func() libnccl.Result { return b.api.Recv(start(out[r]), n, t, r, x.h, x.s) })
				}
			}
		})
	}
	return b.issue(q)
}

// Barrier sums one number, as PyTorch does. The Work ends when the device has done it.
func (b *Backend) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	q, t, err := b.collective(ctx, work.Barrier, o.Timeout, tensor.Float32)
	if err != nil {
		return nil, err
	}
	q.enqueue = func(x *enqueuer) {
		if b.word == nil {
			if b.word, x.err = x.c.dev.Alloc(types[tensor.Float32].Size()); x.err == nil {
				x.err = x.s.Memset(b.word.Ptr(), 0, b.word.Len())
			}
		}
		x.do("AllReduce", func() libnccl.Result { return b.api.AllReduce(b.word.Ptr(), b.word.Ptr(), 1, t, libnccl.Sum, x.h, x.s) })
	}
	return b.issue(q)
}

// MonitoredBarrier is refused, as by PyTorch's NCCL.
func (b *Backend) MonitoredBarrier(context.Context, backend.MonitoredBarrierOptions) error {
	return b.lacks("monitored_barrier")
}

// Send sends t to a rank.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	return b.message(ctx, work.Send, backend.P2P{Send: t, Peer: dst, P2POptions: o})
}

// Recv receives into t from a rank.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	return b.message(ctx, work.Recv, backend.P2P{Recv: t, Peer: src, P2POptions: o})
}

// RecvAnySource is refused.
func (b *Backend) RecvAnySource(context.Context, *tensor.Tensor, backend.P2POptions) (*work.Work, error) {
	return nil, b.lacks("receiving from any rank")
}

// message is a single message. The two ranks have a communicator of their own for it, but in eager groups of PyTorch 2.7
// and later, whose version of NCCL tells.
func (b *Backend) message(ctx context.Context, op work.OpType, m backend.P2P) (*work.Work, error) {
	if m.Peer == b.rank {
		return nil, bad(op, "rank %d and itself: NCCL needs the send and the receive in one batch (BatchISendIRecv)", m.Peer)
	}
	q, err := b.messages(ctx, op, []backend.P2P{m})
	if err != nil {
		return nil, err
	}
	if m.Recv != nil {
		q.source = m.Peer
	}
	if !b.options.Eager || b.api.Version() < libnccl.TorchPairsVersion {
		q.pair = m.Peer
	}
	return b.issue(q)
}

// Batch does messages at the same time, on the group's communicator. All ranks have to come to its first call.
func (b *Backend) Batch(ctx context.Context, ms []backend.P2P) (*work.Work, error) {
	q, err := b.messages(ctx, work.Coalesced, ms)
	if err != nil {
		return nil, err
	}
	return b.issue(q)
}

// messages checks messages and returns their call.
func (b *Backend) messages(ctx context.Context, op work.OpType, ms []backend.P2P) (call, error) {
	ms = slices.Clone(ms)
	q := call{ctx: ctx, op: op, pair: -1, source: -1}
	kinds := make([]libnccl.DataType, len(ms))
	for i, m := range ms {
		t := m.Send
		if t == nil {
			t = m.Recv
		}
		if err := b.dense(op, "tensor", t); err != nil {
			return q, err
		}
		switch {
		case m.Peer < 0 || m.Peer >= b.size:
			return q, bad(op, "invalid rank: %d (the group has %d ranks)", m.Peer, b.size)
		case m.Tag != 0:
			return q, b.lacks(fmt.Sprintf("%v with tag %d", op, m.Tag))
		}
		var err error
		if kinds[i], err = b.typeOf(op, t.DType()); err != nil {
			return q, err
		}
		q.timeout = max(q.timeout, m.Timeout)
		if m.Send != nil {
			q.in = append(q.in, t)
		} else {
			q.out = append(q.out, t)
		}
	}
	if err := b.args.Overlap(op, q.out, q.in); err != nil {
		return q, err
	}
	q.enqueue = func(x *enqueuer) {
		all := func() {
			for i, m := range ms {
				peer := m.Peer
				if x.pair {
					peer = 1 - x.c.rank
				}
				if m.Send != nil {
					x.do("Send", func() libnccl.Result { return b.api.Send(start(m.Send), count(m.Send), kinds[i], peer, x.h, x.s) })
				} else {
					x.do("Recv", func() libnccl.Result { return b.api.Recv(start(m.Recv), count(m.Recv), kinds[i], peer, x.h, x.s) })
				}
			}
		}
		if op == work.Coalesced {
			x.group(all)
		} else {
			all()
		}
	}
	return q, nil
}
