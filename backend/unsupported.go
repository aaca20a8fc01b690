package backend

import (
	"context"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Unsupported has every operation of Backend and refuses each. A backend that embeds it needs to
// have only its own operations.
type Unsupported struct {
	Backend string // the name in the errors
}

func (u Unsupported) no(op work.OpType) (*work.Work, error) {
	return nil, &UnsupportedError{Backend: u.Backend, Op: op.String()}
}

func (u Unsupported) Broadcast(context.Context, []*tensor.Tensor, BroadcastOptions) (*work.Work, error) {
	return u.no(work.Broadcast)
}

func (u Unsupported) AllReduce(context.Context, []*tensor.Tensor, AllReduceOptions) (*work.Work, error) {
	return u.no(work.AllReduce)
}

func (u Unsupported) AllReduceCoalesced(context.Context, []*tensor.Tensor, AllReduceOptions) (*work.Work, error) {
	return u.no(work.AllReduceCoalesced)
}

func (u Unsupported) Reduce(context.Context, *tensor.Tensor, ReduceOptions) (*work.Work, error) {
	return u.no(work.Reduce)
}

func (u Unsupported) AllGather(context.Context, []*tensor.Tensor, *tensor.Tensor, AllGatherOptions) (*work.Work, error) {
	return u.no(work.AllGather)
}

func (u Unsupported) AllGatherV(context.Context, []*tensor.Tensor, *tensor.Tensor, AllGatherOptions) (*work.Work, error) {
	return u.no(work.AllGather)
}

func (u Unsupported) AllGatherIntoTensor(context.Context, *tensor.Tensor, *tensor.Tensor, AllGatherOptions) (*work.Work, error) {
	return u.no(work.AllGatherIntoTensor)
}

func (u Unsupported) AllGatherCoalesced(context.Context, [][]*tensor.Tensor, []*tensor.Tensor, AllGatherOptions) (*work.Work, error) {
	return u.no(work.AllGatherCoalesced)
}

func (u Unsupported) AllGatherIntoTensorCoalesced(context.Context, []*tensor.Tensor, []*tensor.Tensor, AllGatherOptions) (*work.Work, error) {
	return u.no(work.AllGatherCoalesced)
}

func (u Unsupported) Gather(context.Context, []*tensor.Tensor, *tensor.Tensor, GatherOptions) (*work.Work, error) {
	return u.no(work.Gather)
}

func (u Unsupported) GatherV(context.Context, []*tensor.Tensor, *tensor.Tensor, GatherOptions) (*work.Work, error) {
	return u.no(work.Gather)
}

func (u Unsupported) Scatter(context.Context, *tensor.Tensor, []*tensor.Tensor, ScatterOptions) (*work.Work, error) {
	return u.no(work.Scatter)
}

func (u Unsupported) ReduceScatter(context.Context, *tensor.Tensor, []*tensor.Tensor, ReduceScatterOptions) (*work.Work, error) {
	return u.no(work.ReduceScatter)
}

func (u Unsupported) ReduceScatterTensor(context.Context, *tensor.Tensor, *tensor.Tensor, ReduceScatterOptions) (*work.Work, error) {
	return u.no(work.ReduceScatterTensor)
}

func (u Unsupported) ReduceScatterTensorCoalesced(context.Context, []*tensor.Tensor, []*tensor.Tensor, ReduceScatterOptions) (*work.Work, error) {
	return u.no(work.ReduceScatterTensorCoalesced)
}

func (u Unsupported) AllToAll(context.Context, []*tensor.Tensor, []*tensor.Tensor, AllToAllOptions) (*work.Work, error) {
	return u.no(work.AllToAll)
}

func (u Unsupported) AllToAllSingle(context.Context, *tensor.Tensor, *tensor.Tensor, []int, []int, AllToAllOptions) (*work.Work, error) {
	return u.no(work.AllToAllSingle)
}

func (u Unsupported) Send(context.Context, *tensor.Tensor, int, P2POptions) (*work.Work, error) {
	return u.no(work.Send)
}

func (u Unsupported) Recv(context.Context, *tensor.Tensor, int, P2POptions) (*work.Work, error) {
	return u.no(work.Recv)
}

func (u Unsupported) RecvAnySource(context.Context, *tensor.Tensor, P2POptions) (*work.Work, error) {
	return u.no(work.RecvAnySource)
}

func (u Unsupported) Barrier(context.Context, BarrierOptions) (*work.Work, error) {
	return u.no(work.Barrier)
}

func (u Unsupported) MonitoredBarrier(context.Context, MonitoredBarrierOptions) error {
	return &UnsupportedError{Backend: u.Backend, Op: "monitored_barrier"}
}
