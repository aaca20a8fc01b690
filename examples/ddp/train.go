package main

import (
	"context"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
)

// reducer averages the gradients of all ranks. It is a *ddp.DDP, or alone for a single
// process.
type reducer interface {
	Begin(ctx context.Context) error
	Ready(param int) error
	Finish(ctx context.Context) error
}

type alone struct{}

func (alone) Begin(context.Context) error  { return nil }
func (alone) Ready(int) error              { return nil }
func (alone) Finish(context.Context) error { return nil }

// trainer is the model, the data and the optimizer of one rank.
type trainer struct {
	data       *dataset.Data
	model      *mlp.Model
	optimizer  mlp.SGD
	sampler    *ddp.DistributedSampler
	reducer    reducer
	engine     engine
	rank, size int
}

// newTrainer returns a trainer that computes in CPU memory.
func newTrainer(c *config, data *dataset.Data, rank, size int) (*trainer, error) {
	sizes := append([]int{data.Train.Features}, c.hidden...)
	model, err := mlp.New(append(sizes, data.Train.Classes), c.seed)
	if err != nil {
		return nil, err
	}
	s, err := ddp.NewDistributedSampler(data.Train.Len(), c.batch, rank, size, c.seed)
	if err != nil {
		return nil, err
	}
	t := &trainer{
		data: data, model: model, sampler: s, reducer: alone{}, rank: rank, size: size,
		optimizer: mlp.SGD{Rate: float32(c.rate), Momentum: float32(c.momentum)},
	}
	t.engine = newHost(t, t.most(c))
	return t, nil
}

// most returns the largest number of images of a pass.
func (t *trainer) most(c *config) int { return max(c.batch/t.size+1, evalBatch) }

// epoch trains on every image once and returns the summed loss of this rank's
// images in each step.
func (t *trainer) epoch(ctx context.Context, epoch int) ([]float64, error) {
	t.sampler.SetEpoch(epoch)
	losses := make([]float64, t.sampler.Steps())
	for step := range losses {
		var err error
		if losses[step], err = t.trainOn(ctx, t.sampler.Batch(step)); err != nil {
			return nil, err
		}
	}
	return losses, nil
}

// trainOn takes a step with a batch and returns the summed loss of this rank's images.
func (t *trainer) trainOn(ctx context.Context, b ddp.Batch) (float64, error) {
	inputs, labels := t.engine.batch()
	t.data.Train.Gather(inputs, labels, b.Indices)

	if err := t.reducer.Begin(ctx); err != nil {
		return 0, err
	}
	if err := t.engine.backward(len(b.Indices), b.Scale, t.reducer.Ready); err != nil {
		return 0, err
	}
	if err := t.reducer.Finish(ctx); err != nil {
		return 0, err
	}
	if err := t.engine.step(); err != nil {
		return 0, err
	}
	// On a device this is the only wait in a step.
	loss, _, err := t.engine.result(ctx)
	return loss, err
}

// evalBatch limits the memory of an evaluation.
const evalBatch = 256

// evaluate returns the summed loss over this rank's share of the held-out
// images, and how many of them the model gets right.
func (t *trainer) evaluate(ctx context.Context) (loss float64, correct int, err error) {
	var indices []int
	for i := t.rank; err == nil && (i < t.data.HeldOut.Len() || len(indices) > 0); i += t.size {
		if i < t.data.HeldOut.Len() {
			indices = append(indices, i)
			if len(indices) < evalBatch {
				continue
			}
		}
		inputs, labels := t.engine.batch()
		t.data.HeldOut.Gather(inputs, labels, indices)
		if err = t.engine.forward(len(indices)); err != nil {
			break
		}
		var l float64
		var c int
		l, c, err = t.engine.result(ctx)
		loss, correct, indices = loss+l, correct+c, indices[:0]
	}
	return loss, correct, err
}

// history has the results of a training. Losses are means over the images of all ranks.
type history struct {
	Train    []float64 // training loss of each epoch
	HeldOut  []float64 // loss on the held-out images after each epoch
	Accuracy []float64 // share of the held-out images that are right after each epoch
}

// record adds an epoch from sums over all ranks.
func (h *history) record(t *trainer, losses []float64, heldOutLoss, correct float64) {
	total := 0.
	for _, loss := range losses {
		total += loss
	}
	n := float64(t.data.HeldOut.Len())
	h.Train = append(h.Train, total/float64(t.data.Train.Len()))
	h.HeldOut = append(h.HeldOut, heldOutLoss/n)
	h.Accuracy = append(h.Accuracy, correct/n)
}

// trainAlone is the whole training in one process, without a group.
func trainAlone(ctx context.Context, c *config, data *dataset.Data) (*trainer, *history, error) {
	t, err := newTrainer(c, data, 0, 1)
	if err != nil {
		return nil, nil, err
	}
	h := new(history)
	for epoch := range c.epochs {
		losses, err := t.epoch(ctx, epoch)
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return nil, nil, err
		}
		loss, correct, err := t.evaluate(ctx)
		if err != nil {
			return nil, nil, err
		}
		h.record(t, losses, loss, float64(correct))
	}
	return t, h, nil
}
