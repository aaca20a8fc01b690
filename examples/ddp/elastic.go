package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// pause makes a step as slow as -step-time says.
var pause = time.Sleep

// elastic is a rank of a training whose ranks come and go. Its state is that of the trainer, and
// results, which every rank has.
type elastic struct {
	rank
	ddp     *ddp.Elastic
	results []float64 // see the constants
	log     io.Writer
}

const (
	images      = iota // that all ranks have trained on
	epochLoss          // sum over the images of this epoch
	trainLoss          // mean of the last epoch
	heldOutLoss        // mean after it
	accuracy           // after it
	identical          // 1 if the ranks have the same parameters at the end
	counted            // how many results there are
)

// runElastic is runRank with -elastic.
func runElastic(ctx context.Context, c *config, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	data, err := dataset.Digits()
	if err != nil {
		return err
	}
	e := &elastic{rank: rank{config: c}, results: make([]float64, counted), log: stderr}
	if e.trainer, err = newTrainer(c, data, 0, 1); err != nil { // before joining: the other ranks wait for this one then
		return err
	}
	params, err := tensors(e.model.Params())
	if err != nil {
		return err
	}
	o := ddp.ElasticOptions{Changed: func(v pg.View) {
		if e.group.Rank() == 0 {
			fmt.Fprintf(stderr, "step %d: %d ranks, members %v\n", e.ddp.Steps(), len(v.IDs), v.IDs)
		}
	}}
	o.BucketCap, o.FirstBucket = c.bucketKiB<<10, c.bucketKiB<<10
	for _, s := range e.optimizer.Velocity(e.model.Params()) {
		t, err := tensor.Of(s)
		if err != nil {
			return err
		}
		o.State = append(o.State, t)
	}
	t, err := tensor.Of(e.results)
	if err != nil {
		return err
	}
	o.State = append(o.State, t)

	with := pg.InitOptions{Options: groupOptions(c, nil), Join: c.join}
	with.Elastic = true
	if e.group, err = pg.Init(ctx, c.init, with); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.group.Close()) }()
	if e.ddp, err = ddp.NewElastic(ctx, e.group, params, o); err != nil {
		return err
	}
	if e.group.Rank() == 0 {
		fmt.Fprintf(stderr, "step %d: the training has begun with %d ranks\n", e.ddp.Steps(), e.group.Size())
	}
	for steps := c.epochs*e.perEpoch() + 1; e.ddp.Steps() < steps; {
		if err := e.ddp.Step(ctx, func(step int) error { return e.step(ctx, step) }); err != nil {
			return err
		}
	}
	if e.group.Rank() != 0 {
		return nil
	}
	e.history = history{
		Train: []float64{e.results[trainLoss]}, HeldOut: []float64{e.results[heldOutLoss]}, Accuracy: []float64{e.results[accuracy]},
	}
	rep := e.report(e.results[identical] == 1, digest(e.model.Params()))
	rep.Buckets, rep.Images = len(e.ddp.Buckets()), int(e.results[images])
	rep.Seconds = round(time.Since(start).Seconds(), 3)
	rep.ImagesPerSecond = math.Round(e.results[images] / rep.Seconds)
	return e.publish(stdout, rep)
}

// perEpoch is the number of steps in an epoch: those of the training, and the evaluation.
func (e *elastic) perEpoch() int { return e.sampler.Steps() + 1 }

// step does one step of the training. Everything before the last collective may be done again,
// with other ranks.
func (e *elastic) step(ctx context.Context, step int) (err error) {
	e.rank.rank, e.size = e.group.Rank(), e.group.Size()
	if e.sampler, err = ddp.NewDistributedSampler(e.data.Train.Len(), e.config.batch, e.rank.rank, e.size, e.config.seed); err != nil {
		return err
	}
	epoch, step := step/e.perEpoch(), step%e.perEpoch()
	switch {
	case epoch == e.config.epochs:
		return e.last(ctx)
	case step == e.sampler.Steps():
		return e.evaluation(ctx, epoch)
	}
	e.sampler.SetEpoch(epoch)
	b := e.sampler.Batch(step)
	inputs, labels := e.engine.batch()
	e.data.Train.Gather(inputs, labels, b.Indices)
	if err := e.ddp.Begin(ctx); err != nil {
		return err
	}
	if err := e.engine.backward(len(b.Indices), b.Scale, e.ddp.Ready); err != nil {
		return err
	}
	loss, _, err := e.engine.result(ctx)
	if err != nil {
		return err
	}
	sums := []float64{float64(len(b.Indices)), loss}
	if err := pg.Wait(e.group.AllReduce(ctx, pg.Slice(sums), pg.Sum())); err != nil {
		return err
	}
	pause(e.config.stepTime)
	if err := e.ddp.Finish(ctx); err != nil {
		return err
	}
	// The step is complete. What follows needs no other rank.
	e.results[images] += sums[0]
	e.results[epochLoss] += sums[1]
	return e.engine.step()
}

// evaluation is the step at the end of an epoch.
func (e *elastic) evaluation(ctx context.Context, epoch int) error {
	loss, correct, err := e.evaluate(ctx)
	if err != nil {
		return err
	}
	sums := []float64{loss, float64(correct)}
	if err := pg.Wait(e.group.AllReduce(ctx, pg.Slice(sums), pg.Sum())); err != nil {
		return err
	}
	n := float64(e.data.HeldOut.Len())
	e.results[heldOutLoss], e.results[accuracy] = sums[0]/n, sums[1]/n
	e.results[trainLoss], e.results[epochLoss] = e.results[epochLoss]/float64(e.data.Train.Len()), 0
	if e.rank.rank == 0 {
		fmt.Fprintf(e.log, "epoch %d/%d  loss %.4f  held-out accuracy %5.2f%%\n",
			epoch+1, e.config.epochs, e.results[trainLoss], 100*e.results[accuracy])
	}
	return nil
}

// last is the last step: the ranks compare their parameters. The barrier lets no rank leave before
// all have what they need.
func (e *elastic) last(ctx context.Context) error {
	same, err := e.sameEverywhere(ctx, digest(e.model.Params()))
	if err != nil {
		return err
	}
	err = e.group.Barrier(ctx)
	if err == nil && same {
		e.results[identical] = 1
	}
	return err
}
