package main

import (
	"context"
	"math/rand"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	mldata "github.com/gomlx/gomlx/ml/dataset"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/fnn"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/metric"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/integrations/gomlx"
)

const batch = 64 // images of all ranks in a step

// logits is the model: two hidden layers.
func logits(scope *model.Scope, images *graph.Node) *graph.Node {
	return fnn.New(scope.In("model"), images, 10).NumHiddenLayers(2, 64).Activation(activation.TypeTanh).Done()
}

// history is how a training went.
type history struct {
	loss, accuracy []float64 // of each epoch: the mean of the steps, and on held-out images
	identical      bool      // the ranks' variables at the end
	seconds        float64
}

// fit trains the model on the ranks of p, or in this process alone if p is nil, until ctx ends.
func fit(ctx context.Context, p *gomlx.Parallel, data *dataset.Data, epochs int) (h history, err error) {
	b, err := gobackend.New("")
	if err != nil {
		return h, err
	}
	defer b.Finalize()
	images, err := inMemory(b, &data.Train)
	if err != nil {
		return h, err
	}
	heldOut, err := inMemory(b, &data.HeldOut)
	if err != nil {
		return h, err
	}
	images.Shuffle().WithRand(rand.New(rand.NewSource(1)))
	store := model.NewStore()
	if err := store.SetRNGStateFromSeed(1); err != nil {
		return h, err
	}

	opt, input := optimizer.Adam().LearningRate(3e-3).Done(), train.Dataset(images)
	if p != nil {
		opt, input = p.Optimizer(opt), p.Split(images)
	}
	trainer := train.NewTrainer(b, store, logits, loss.SparseCategoricalCrossEntropyLogits, opt,
		nil, []metric.Interface{metric.NewSparseCategoricalAccuracy("accuracy", "#acc")})
	newLoop, eval := train.NewLoop, trainer.Eval
	if p != nil {
		newLoop = p.NewLoop
		eval = func(ds train.Dataset) ([]*tensors.Tensor, error) { return p.Eval(trainer, ds) }
	}
	loop := newLoop(trainer)

	sum, steps := 0., 0
	loop.OnStep("loss", 0, func(_ *train.Loop, metrics []*tensors.Tensor) error {
		sum += float64(tensors.ToScalar[float32](metrics[0]))
		steps++
		return context.Cause(ctx)
	})
	start := time.Now()
	for range epochs {
		sum, steps = 0, 0
		if _, err := loop.RunEpochs(input, 1); err != nil {
			return h, err
		}
		h.loss = append(h.loss, sum/float64(steps))
		metrics, err := eval(heldOut)
		if err != nil {
			return h, err
		}
		h.accuracy = append(h.accuracy, float64(tensors.ToScalar[float32](metrics[1])))
	}
	h.seconds = time.Since(start).Seconds()
	if p != nil {
		h.identical, err = p.Identical(store)
	}
	return h, err
}

// inMemory returns images in batches.
func inMemory(b compute.Backend, set *dataset.Set) (*mldata.InMemoryDataset, error) {
	labels := make([]int32, set.Len())
	for i, label := range set.Labels {
		labels[i] = int32(label)
	}
	ds, err := mldata.InMemoryFromData(b, "digits",
		[]any{tensors.FromFlatDataAndDimensions(set.Inputs, set.Len(), set.Features)},
		[]any{tensors.FromFlatDataAndDimensions(labels, set.Len(), 1)})
	if err != nil {
		return nil, err
	}
	return ds.BatchSize(batch, false), nil
}
