package ddp

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/work"
)

// PostLocalSGDHook is PyTorch's post_localSGD_hook. In the first start iterations it averages gradients
// over DDP's group. Later it averages them over local, a smaller group that this rank is in, such as
// the ranks of its host. A PeriodicAverager makes the models equal again. Each DDP needs its own hook.
// Averages over local work in CPU memory only.
func PostLocalSGDHook(local Group, start int) Hook {
	iteration := 0
	return func(ctx context.Context, b *Bucket) (*work.Work, error) {
		global := iteration < start
		if b.IsLast() {
			iteration++
		}
		switch {
		case global:
			return AllReduceHook(ctx, b)
		case b.dev != nil:
			return nil, errDivideOnDevice
		case b.IsSparse():
			divide(b.Buffer().Values(), b.Buffer().Values(), local.Size())
		default:
			divide(b.Buffer(), b.Buffer(), local.Size())
		}
		return local.AllReduce(ctx, b.one[0], pg.Sum())
	}
}

// PeriodicAverager averages parameters over a group from time to time: PyTorch's
// PeriodicModelAverager. NewPeriodicAverager makes one; the zero value is not usable.
type PeriodicAverager struct {
	g              Group
	params         []Param
	period, warmup int
	step           int
}

// NewPeriodicAverager returns an averager of params, contiguous tensors in CPU memory. It averages in
// call number warmup of Average, counted from 0, and in every period-th after that.
func NewPeriodicAverager(g Group, params []Param, period, warmup int) (*PeriodicAverager, error) {
	if period < 1 || warmup < 0 {
		return nil, fmt.Errorf("ddp: PeriodicAverager: period is %d and warmup %d: they must be at least 1 and 0", period, warmup)
	}
	for i, p := range params {
		if err := onHost(p.Value); err != nil {
			return nil, &ParamError{Index: i, Name: p.Name, Err: err}
		}
		if dt := p.Value.DType(); !p.Value.IsContiguous() || !dt.IsFloat() && !dt.IsComplex() {
			return nil, &ParamError{Index: i, Name: p.Name, Err: fmt.Errorf("%v is not contiguous, or cannot be averaged", p.Value)}
		}
	}
	return &PeriodicAverager{g: g, params: params, period: period, warmup: warmup}, nil
}

// Average averages the parameters if it is time. Call it after each step of the optimizer, on every
// rank of the group.
func (a *PeriodicAverager) Average(ctx context.Context) error {
	due := a.step - a.warmup
	a.step++
	if due < 0 || due%a.period != 0 {
		return nil
	}
	works := make([]*work.Work, len(a.params))
	for i, p := range a.params {
		divide(p.Value, p.Value, a.g.Size())
		var err error
		if works[i], err = a.g.AllReduce(ctx, p.Value, pg.Sum()); err != nil {
			return &ParamError{Index: i, Name: p.Name, Err: err}
		}
	}
	for i, w := range works {
		if err := w.Wait(ctx); err != nil {
			return &ParamError{Index: i, Name: a.params[i].Name, Err: err}
		}
	}
	return nil
}
