package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/ddp/checkpoint"
	"github.com/c10d-go/c10d/pg"
)

// state describes a checkpoint: the training and its progress. The checkpoint also has the
// parameters and the optimizer's velocities.
type state struct {
	Sizes    []int
	Batch    int
	Rate     float64
	Momentum float64
	Seed     uint64
	Epoch    int
	History  history
}

func (r *rank) state(epoch int) state {
	c, train := r.config, &r.data.Train
	return state{
		Sizes: slices.Concat([]int{train.Features}, c.hidden, []int{train.Classes}),
		Batch: c.batch, Rate: c.rate, Momentum: c.momentum, Seed: c.seed,
		Epoch: epoch, History: r.history,
	}
}

// numbers returns the parameters and velocities. They are the model's own slices.
func (r *rank) numbers() [][]float32 {
	var out [][]float32
	for _, p := range r.model.Params() {
		out = append(out, p.Value)
	}
	return append(out, r.optimizer.Velocity(r.model.Params())...)
}

// save writes the checkpoint. Rank 0 calls it.
func (r *rank) save(ctx context.Context, epoch int) error {
	if r.config.checkpoint == "" {
		return nil
	}
	if err := r.engine.pull(ctx); err != nil {
		return err
	}
	return checkpoint.Save(r.config.checkpoint, r.state(epoch), r.numbers())
}

// resume returns the epoch to begin with. Rank 0 reads the checkpoint and broadcasts it:
// the file need not be on every machine.
func (r *rank) resume(ctx context.Context) (epoch int, err error) {
	if !r.config.resume {
		return 0, nil
	}
	if r.rank == 0 {
		epoch, err = r.load()
	}
	if err != nil {
		epoch = -1
	}
	at := []int64{int64(epoch)}
	if err := errors.Join(err, pg.Wait(r.group.Broadcast(ctx, pg.Slice(at), 0))); err != nil {
		return 0, err
	}
	if at[0] < 0 {
		return 0, errors.New("ddp: rank 0 has not read the checkpoint: see its error")
	}
	for _, s := range r.numbers() {
		if err := pg.Wait(r.group.Broadcast(ctx, pg.Slice(s), 0)); err != nil {
			return 0, err
		}
	}
	return int(at[0]), nil
}

// load reads the checkpoint into the model, unless it is of another training.
func (r *rank) load() (epoch int, err error) {
	path := r.config.checkpoint
	var was state
	numbers, err := checkpoint.Load(path, &was)
	if err != nil {
		return 0, err
	}
	now := r.state(0)
	for _, c := range []struct {
		flag      string
		was, now  any
		different bool
	}{
		{"-hidden: layers", was.Sizes, now.Sizes, !slices.Equal(was.Sizes, now.Sizes)},
		{"-batch", was.Batch, now.Batch, was.Batch != now.Batch},
		{"-lr", was.Rate, now.Rate, was.Rate != now.Rate},
		{"-momentum", was.Momentum, now.Momentum, was.Momentum != now.Momentum},
		{"-seed", was.Seed, now.Seed, was.Seed != now.Seed},
	} {
		if c.different {
			return 0, fmt.Errorf("ddp: checkpoint %s is of another training: %s is %v there and %v here", path, c.flag, c.was, c.now)
		}
	}
	if was.Epoch < 1 || was.Epoch >= r.config.epochs {
		return 0, fmt.Errorf("ddp: checkpoint %s is after epoch %d; -epochs %d leaves nothing to do", path, was.Epoch, r.config.epochs)
	}
	mine := r.numbers()
	if !slices.EqualFunc(mine, numbers, func(a, b []float32) bool { return len(a) == len(b) }) {
		return 0, fmt.Errorf("ddp: checkpoint %s: its numbers do not match its description", path)
	}
	for i, s := range numbers {
		copy(mine[i], s)
	}
	r.history = was.History
	return was.Epoch, nil
}
