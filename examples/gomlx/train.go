package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/layers/fnn"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train"
	"github.com/gomlx/gomlx/ml/train/loss"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/sampler"
	"github.com/c10d-go/c10d/pg"
)

const batch = 64 // images of all ranks in a step

// report is the line that rank 0 prints.
type report struct {
	Ranks           int     `json:"ranks"`
	Accuracy        float64 `json:"accuracy"` // on held-out images
	Loss            float64 `json:"loss"`     // mean of the last epoch
	ParamsIdentical bool    `json:"params_identical"`
	Seconds         float64 `json:"seconds"`
	ImagesPerSecond float64 `json:"images_per_second"`
}

// trainer is a GoMLX model and what it needs to be trained in a group.
type trainer struct {
	group *pg.ProcessGroup
	data  *dataset.Data
	store *model.Store

	logits    *model.Exec // images -> class scores
	gradients *model.Exec // images, labels, weight -> loss, gradient of each variable
	update    *model.Exec // gradient of each variable -> nothing, but variables change

	flat []float32 // all gradients
}

// logitsGraph is the model: two hidden layers.
func logitsGraph(scope *model.Scope, images *graph.Node) *graph.Node {
	return fnn.New(scope.In("model"), images, 10).NumHiddenLayers(2, 64).Activation(activation.TypeTanh).Done()
}

// gradientsGraph computes weight times the mean loss, and its gradients.
func gradientsGraph(scope *model.Scope, images, labels, weight *graph.Node) []*graph.Node {
	mean := loss.SparseCategoricalCrossEntropyLogits([]*graph.Node{labels}, []*graph.Node{logitsGraph(scope, images)})
	l := graph.Mul(mean, weight)
	return append([]*graph.Node{l}, scope.BuildTrainableVariablesGradientsGraph(l)...)
}

// updateGraph is any optimizer of GoMLX that takes gradients.
func updateGraph(scope *model.Scope, gradients []*graph.Node) {
	for v := range scope.IterVariables() {
		if v.Trainable {
			v.NodeValue(gradients[0].Graph()) // the optimizer looks at variables that the graph uses
		}
	}
	optimizer.Adam().LearningRate(3e-3).Done().(train.OptimizeWithGradients).
		UpdateGraphWithGradients(scope, gradients, gradients[0].DType())
}

func newTrainer(b compute.Backend, g *pg.ProcessGroup, data *dataset.Data) (*trainer, error) {
	t := &trainer{group: g, data: data, store: model.NewStore()}
	// All ranks get rank 0's variables, see broadcast. The seed makes runs repeatable.
	err := t.store.SetRNGStateFromSeed(1)
	if err != nil {
		return nil, err
	}
	if t.logits, err = model.NewExec(b, t.store, logitsGraph); err != nil {
		return nil, err
	}
	if t.gradients, err = model.NewExec(b, t.store, gradientsGraph); err != nil {
		return nil, err
	}
	t.update, err = model.NewExec(b, t.store, updateGraph)
	return t, err
}

// step trains on this rank's part of a global batch and returns weight times its mean loss.
func (t *trainer) step(ctx context.Context, images, labels *tensors.Tensor, weight float32) (float64, error) {
	out, err := t.gradients.Call(images, labels, weight)
	if err != nil {
		return 0, err
	}
	l := tensors.ToScalar[float32](out[0])
	gradients := out[1:]

	if err := t.allReduce(ctx, gradients); err != nil { // the only difference to one rank
		return 0, err
	}

	args := make([]any, len(gradients))
	for i, g := range gradients {
		args[i] = g
	}
	_, err = t.update.Call(args...)
	return float64(l), err
}

// allReduce replaces the gradients by their average over the ranks.
func (t *trainer) allReduce(ctx context.Context, gradients []*tensors.Tensor) error {
	t.flat = t.flat[:0]
	for _, g := range gradients {
		if err := tensors.ConstFlatData(g, func(flat []float32) { t.flat = append(t.flat, flat...) }); err != nil {
			return err
		}
	}
	if err := pg.AllReduceSlice(ctx, t.group, t.flat, backend.Avg()); err != nil {
		return err
	}
	from := t.flat
	for _, g := range gradients {
		n := g.Shape().Size()
		if err := tensors.AssignFlatData(g, from[:n]); err != nil {
			return err
		}
		from = from[n:]
	}
	return nil
}

// variables calls f with the elements of each trained variable.
func (t *trainer) variables(f func(elements []float32) error) error {
	for v := range t.store.IterVariables() {
		if !v.Trainable {
			continue
		}
		value, err := v.Value()
		if err != nil {
			return err
		}
		var failed error
		if err := tensors.MutableFlatData(value, func(flat []float32) { failed = f(flat) }); err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// broadcast gives every rank the variables of rank 0.
func (t *trainer) broadcast(ctx context.Context) error {
	return t.variables(func(elements []float32) error { return pg.BroadcastSlice(ctx, t.group, elements, 0) })
}

// identical reports whether the variables are the same on all ranks.
func (t *trainer) identical(ctx context.Context) (bool, error) {
	var values [][]float32
	if err := t.variables(func(e []float32) error { values = append(values, append([]float32(nil), e...)); return nil }); err != nil {
		return false, err
	}
	mine := digest(values)
	all, err := pg.AllGatherSlice(ctx, t.group, []int64{mine})
	return !slices.ContainsFunc(all, func(d int64) bool { return d != mine }), err
}

// correct returns how many held-out images the model gets right.
func (t *trainer) correct() (int, error) {
	set := &t.data.HeldOut
	scores, err := t.logits.Call1(tensors.FromFlatDataAndDimensions(set.Inputs, set.Len(), set.Features))
	if err != nil {
		return 0, err
	}
	n := 0
	err = tensors.ConstFlatData(scores, func(flat []float32) {
		for i, label := range set.Labels {
			scores := flat[i*set.Classes : (i+1)*set.Classes]
			if slices.Index(scores, slices.Max(scores)) == int(label) {
				n++
			}
		}
	})
	return n, err
}

// trainRank is the program of one rank.
func trainRank(ctx context.Context, g *pg.ProcessGroup, epochs int, out io.Writer) error {
	data, err := dataset.Digits()
	if err != nil {
		return err
	}
	b, err := gobackend.New("")
	if err != nil {
		return err
	}
	defer b.Finalize()
	t, err := newTrainer(b, g, data)
	if err != nil {
		return err
	}
	if _, err := t.correct(); err != nil { // the first use creates the variables
		return err
	}
	if err := t.broadcast(ctx); err != nil {
		return err
	}
	s, err := sampler.New(data.Train.Len(), batch, g.Rank(), g.Size(), 1)
	if err != nil {
		return err
	}
	start := time.Now()
	var mean float64
	for epoch := range epochs {
		if mean, err = t.epoch(ctx, s, epoch); err != nil {
			return err
		}
		if g.Rank() == 0 {
			n, err := t.correct()
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "epoch %d/%d  loss %.4f  held-out accuracy %.2f%%\n", epoch+1, epochs, mean, 100*float64(n)/float64(data.HeldOut.Len()))
		}
	}
	seconds := time.Since(start).Seconds()
	same, err := t.identical(ctx)
	if err != nil {
		return err
	}
	// After Close no other rank may need this one.
	w, err := g.Barrier(ctx, backend.BarrierOptions{})
	if err == nil {
		err = w.Wait(ctx)
	}
	if err != nil {
		return err
	}
	if g.Rank() != 0 {
		return nil
	}
	n, err := t.correct()
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(report{
		Ranks: g.Size(), Accuracy: float64(n) / float64(data.HeldOut.Len()), Loss: mean, ParamsIdentical: same,
		Seconds: seconds, ImagesPerSecond: float64(epochs*data.Train.Len()) / seconds,
	})
}

// epoch trains on every image once and returns the mean loss over all ranks' images.
func (t *trainer) epoch(ctx context.Context, s *sampler.Sampler, epoch int) (float64, error) {
	set := &t.data.Train
	inputs, labels := make([]float32, batch*set.Features), make([]uint8, batch)
	s.SetEpoch(epoch)
	sum := 0.
	for step := range s.Steps() {
		part := s.Batch(step)
		x, y := set.Gather(inputs, labels, part.Indices)
		classes := make([]int32, len(y))
		for i, label := range y {
			classes[i] = int32(label)
		}
		// The average over the ranks is the mean over the global batch if each rank has a
		// weight in proportion to its part. Equal parts have weight 1.
		weight := part.Scale * float32(len(y))
		l, err := t.step(ctx,
			tensors.FromFlatDataAndDimensions(x, len(y), set.Features),
			tensors.FromFlatDataAndDimensions(classes, len(y), 1), weight)
		if err != nil {
			return 0, err
		}
		sum += l / float64(part.Scale) // the summed loss of this rank's images
	}
	total := []float64{sum}
	err := pg.AllReduceSlice(ctx, t.group, total, backend.Sum())
	return total[0] / float64(set.Len()), err
}
