package main

import (
	"context"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/examples/internal/sampler"
)

// reducer makes the gradients of this rank those of all ranks: a *ddp.DDP, or
// alone for a single process.
type reducer interface {
	Begin(ctx context.Context) error
	Ready(param int) error
	Finish(ctx context.Context) error
}

type alone struct{}

func (alone) Begin(context.Context) error  { return nil }
func (alone) Ready(int) error              { return nil }
func (alone) Finish(context.Context) error { return nil }

// trainer is what one rank trains with.
type trainer struct {
	data       *dataset.Data
	model      *mlp.Model
	optimizer  mlp.SGD
	sampler    *sampler.Sampler
	reducer    reducer
	rank, size int

	inputs []float32 // of the images of a step
	labels []uint8
}

func newTrainer(c *config, data *dataset.Data, rank, size int) (*trainer, error) {
	sizes := append([]int{data.Train.Features}, c.hidden...)
	model, err := mlp.New(append(sizes, data.Train.Classes), c.seed)
	if err != nil {
		return nil, err
	}
	s, err := sampler.New(data.Train.Len(), c.batch, rank, size, c.seed)
	if err != nil {
		return nil, err
	}
	share := max(c.batch/size+1, evalBatch)
	return &trainer{
		data: data, model: model, sampler: s, reducer: alone{}, rank: rank, size: size,
		optimizer: mlp.SGD{Rate: float32(c.rate), Momentum: float32(c.momentum)},
		inputs:    make([]float32, share*data.Train.Features),
		labels:    make([]uint8, share),
	}, nil
}

// epoch trains on every image once and returns the summed loss of this rank's
// images in each step. after is called when a step is done, with the loss and
// the number of images of this rank.
func (t *trainer) epoch(ctx context.Context, epoch int, after func(loss float64, images int)) ([]float64, error) {
	t.sampler.SetEpoch(epoch)
	losses := make([]float64, t.sampler.Steps())
	for step := range losses {
		b := t.sampler.Batch(step)
		x, y := t.data.Train.Gather(t.inputs, t.labels, b.Indices)

		if err := t.reducer.Begin(ctx); err != nil {
			return nil, err
		}
		var failed error
		losses[step], _ = t.model.Backward(x, y, b.Scale, func(param int) {
			if failed == nil {
				failed = t.reducer.Ready(param)
			}
		})
		if failed != nil {
			return nil, failed
		}
		if err := t.reducer.Finish(ctx); err != nil {
			return nil, err
		}
		t.optimizer.Step(t.model.Params())
		after(losses[step], len(b.Indices))
	}
	return losses, nil
}

// evalBatch bounds the memory of an evaluation.
const evalBatch = 256

// evaluate returns the summed loss over this rank's share of the held-out
// images, and how many of them the model gets right.
func (t *trainer) evaluate() (loss float64, correct int) {
	var indices []int
	flush := func() {
		l, c := t.model.Forward(t.data.HeldOut.Gather(t.inputs, t.labels, indices))
		loss, correct, indices = loss+l, correct+c, indices[:0]
	}
	for i := t.rank; i < t.data.HeldOut.Len(); i += t.size {
		if indices = append(indices, i); len(indices) == evalBatch {
			flush()
		}
	}
	flush()
	return loss, correct
}

// history is the course of a training. Losses are means over the images of all ranks.
type history struct {
	Steps    []float64 // training loss of each step
	Train    []float64 // training loss of each epoch
	HeldOut  []float64 // loss on the held-out images after each epoch
	Accuracy []float64 // share of the held-out images that are right after each epoch
}

// record adds an epoch from sums over all ranks.
func (h *history) record(t *trainer, losses []float64, heldOutLoss, correct float64) {
	total := 0.
	for step, loss := range losses {
		total += loss
		h.Steps = append(h.Steps, loss/float64(t.sampler.Batch(step).Global))
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
		losses, err := t.epoch(ctx, epoch, func(float64, int) {})
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return nil, nil, err
		}
		loss, correct := t.evaluate()
		h.record(t, losses, loss, float64(correct))
	}
	return t, h, nil
}
