package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// trainGo is a Go rank of the training that the environment names.
func trainGo(ctx context.Context, j *job, stderr io.Writer) (r result, err error) {
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{
		Timeout: time.Duration(j.Timeout * float64(time.Second)),
	}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	t, err := newTrainer(ctx, j, g)
	if err != nil {
		return r, err
	}
	r.Rank, r.Kind = g.Rank(), goRank
	for epoch, order := range j.Orders {
		if r.Loss, r.Accuracy, err = t.epoch(ctx, order); err != nil {
			return r, err
		}
		if g.Rank() == 0 {
			fmt.Fprintf(stderr, "epoch %d/%d  loss %.4f  held-out accuracy %.2f%%\n", epoch+1, len(j.Orders), r.Loss, 100*r.Accuracy)
		}
	}
	if err := t.describe(&r); err != nil {
		return r, err
	}
	// After Close no other rank may need this one.
	return r, g.Barrier(ctx)
}

// trainer is the model, the data and the optimizer of a Go rank.
type trainer struct {
	group     *pg.ProcessGroup
	ddp       *ddp.DDP
	batch     int
	train     dataset.Set
	heldOut   dataset.Set
	model     *mlp.Model
	layout    *layout
	centre    *centre
	buffers   []*tensor.Tensor
	optimizer mlp.SGD

	inputs    []float32 // of a step
	labels    []uint8
	gradients hash.Hash
	scratch   []byte
}

func newTrainer(ctx context.Context, j *job, g *pg.ProcessGroup) (*trainer, error) {
	sizes := slices.Clone(j.Sizes)
	if g.Rank() == j.OddRank {
		sizes[1]++
	}
	model, err := mlp.New(sizes, uint64(1000+g.Rank())) // rank 0's parameters must win
	if err != nil {
		return nil, err
	}
	features, classes := sizes[0], sizes[len(sizes)-1]
	t := &trainer{
		group: g, batch: j.Batch, model: model, gradients: sha256.New(),
		train:     dataset.Set{Features: features, Classes: classes, Inputs: floats(j.Images), Labels: j.Labels},
		heldOut:   dataset.Set{Features: features, Classes: classes, Inputs: floats(j.HeldOutImages), Labels: j.HeldOutLabels},
		centre:    &centre{mean: make([]float32, features), batches: make([]int64, 1)},
		optimizer: mlp.SGD{Rate: float32(j.Rate), Momentum: float32(j.Momentum)},
	}
	room := max(j.Batch, t.heldOut.Len())
	t.inputs, t.labels = make([]float32, room*features), make([]uint8, room)
	if t.layout, err = newLayout(model); err != nil {
		return nil, err
	}
	if err := t.layout.offer(); err != nil {
		return nil, err
	}
	if g.Rank() == 0 && j.OddRank != 0 {
		rest := j.Initial
		for _, p := range t.layout.params {
			rest = rest[copy(p.Value.Bytes(), rest):]
		}
	}
	buffers, err := t.centre.buffers()
	if err != nil {
		return nil, err
	}
	for _, b := range buffers {
		t.buffers = append(t.buffers, b.Value)
	}
	// With the option PyTorch, DDP does the checks and broadcasts that PyTorch's does.
	t.ddp, err = ddp.New(ctx, g, t.layout.params, ddp.Options{
		PyTorch: true, Buffers: buffers, BucketCap: j.BucketKiB << 10, FirstBucket: j.BucketKiB << 10,
	})
	if err != nil {
		return nil, err
	}
	return t, t.layout.adopt()
}

// epoch trains on all images in the given order, and returns the mean loss over
// them and the accuracy on the held-out ones, of all ranks.
func (t *trainer) epoch(ctx context.Context, order []int) (loss, accuracy float64, err error) {
	total := make([]float64, 2)
	for begin := 0; begin < len(order); begin += t.batch {
		end := min(begin+t.batch, len(order))
		loss, err := t.step(ctx, order, begin, end)
		if err != nil {
			return 0, 0, err
		}
		total[0] += loss
	}
	// From here to the next step all ranks have rank 0's buffers.
	if err := t.ddp.Evaluate(ctx); err != nil {
		return 0, 0, err
	}
	var mine []int
	for i := t.group.Rank(); i < t.heldOut.Len(); i += t.group.Size() {
		mine = append(mine, i)
	}
	x, y := t.heldOut.Gather(t.inputs, t.labels, mine)
	t.centre.forward(x, false)
	_, right := t.model.Forward(x, y)
	total[1] = float64(right)
	if err := pg.Wait(t.group.AllReduce(ctx, pg.Slice(total), pg.Sum())); err != nil {
		return 0, 0, err
	}
	return total[0] / float64(len(order)), total[1] / float64(t.heldOut.Len()), nil
}

// step trains on this rank's share of the images at places begin to end of the
// order, and returns their summed loss.
func (t *trainer) step(ctx context.Context, order []int, begin, end int) (float64, error) {
	rank, ranks := t.group.Rank(), t.group.Size()
	var mine []int
	for i := begin; i < end; i++ {
		if i%ranks == rank {
			mine = append(mine, order[i])
		}
	}
	x, y := t.train.Gather(t.inputs, t.labels, mine)
	if err := t.ddp.Begin(ctx); err != nil {
		return 0, err
	}
	t.centre.forward(x, true)
	var failed error
	// The average over the ranks is the gradient of the mean over the global batch.
	scale := float32(ranks) / float32(end-begin)
	loss, _ := t.model.Backward(x, y, scale, func(param int) {
		if failed == nil {
			failed = t.ddp.Ready(param)
		}
	})
	if failed != nil {
		return 0, failed
	}
	if err := t.ddp.Finish(ctx); err != nil {
		return 0, err
	}
	var err error
	if t.scratch, err = pack(t.scratch[:0], t.layout.grads); err != nil {
		return 0, err
	}
	t.gradients.Write(t.scratch)
	t.optimizer.Step(t.model.Params())
	return loss, nil
}

// describe adds the state at the end of the training to the result.
func (t *trainer) describe(r *result) (err error) {
	r.Gradients = hex.EncodeToString(t.gradients.Sum(nil))
	buffers, err := pack(nil, t.buffers)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(buffers)
	r.Buffers = hex.EncodeToString(sum[:])
	for _, bucket := range t.ddp.Buckets() {
		n := 0
		for _, i := range bucket {
			n += t.layout.values[i].ByteLen()
		}
		r.Buckets = append(r.Buckets, n)
	}
	r.Params, err = pack(nil, t.layout.values)
	return err
}
