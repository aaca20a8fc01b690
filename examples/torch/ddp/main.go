// Command ddp is a rank of a job that trains one model with ranks of PyTorch, which run trainer.py:
//
//	export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2
//	RANK=0 python3 trainer.py & RANK=1 go run . & wait
//
// Any rank may be of either kind. README.md tells how closely the two agree.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/examples/internal/mlp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// These are trainer.py's too.
const (
	batch    = 64 // images of a step, on all ranks together
	rate     = 0.1
	momentum = 0.9
	bucket   = 16 << 10 // bytes; with the default of 25 MiB this small model would be one bucket
)

var sizes = []int{64, 128, 64, 10} // of the layers, pixels first

// image returns the number of the image at a place of an epoch.
func image(epoch, place, images int) int { return (389*place + 97*epoch) % images }

func main() {
	epochs := flag.Int("epochs", 10, "train for `n` epochs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := pg.RecordError(run(ctx, *epochs)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, epochs int) (err error) {
	g, err := pg.Init(ctx, "env://")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	t, err := newTrainer(ctx, g)
	if err != nil {
		return err
	}
	for epoch := range epochs {
		loss, accuracy, err := t.epoch(ctx, epoch)
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			fmt.Printf("epoch %d/%d  loss %.4f  held-out accuracy %.2f%%\n", epoch+1, epochs, loss, 100*accuracy)
		}
	}
	if err := t.report(); err != nil {
		return err
	}
	return g.Barrier(ctx) // after Close no other rank may need this one
}

// trainer is the model, the data and the optimizer.
type trainer struct {
	group     *pg.ProcessGroup
	ddp       *ddp.DDP
	data      *dataset.Data
	model     *mlp.Model
	layout    *layout
	centre    *centre
	optimizer mlp.SGD

	inputs    []float32 // of a step
	labels    []uint8
	gradients []byte // SHA-256 of the averages of all steps
}

func newTrainer(ctx context.Context, g *pg.ProcessGroup) (*trainer, error) {
	data, err := dataset.Digits()
	if err != nil {
		return nil, err
	}
	model, err := mlp.New(sizes, uint64(g.Rank())) // rank 0's parameters win
	if err != nil {
		return nil, err
	}
	t := &trainer{group: g, data: data, model: model, optimizer: mlp.SGD{Rate: rate, Momentum: momentum}}
	room := max(batch, data.HeldOut.Len())
	t.inputs, t.labels = make([]float32, room*sizes[0]), make([]uint8, room)
	if t.layout, err = newLayout(model); err != nil {
		return nil, err
	}
	if t.centre, err = newCentre(sizes[0]); err != nil {
		return nil, err
	}
	// With the option PyTorch, DDP does the checks and broadcasts that PyTorch's does.
	t.ddp, err = ddp.New(ctx, g, t.layout.params, ddp.Options{PyTorch: true, Buffers: t.centre.buffers, BucketCap: bucket, FirstBucket: bucket})
	if err != nil {
		return nil, err
	}
	return t, t.layout.adopt()
}

// epoch trains on all images, and returns the mean loss over them and the accuracy on the held-out ones, of all ranks.
func (t *trainer) epoch(ctx context.Context, epoch int) (loss, accuracy float64, err error) {
	total, images := make([]float64, 2), t.data.Train.Len()
	for begin := 0; begin < images; begin += batch {
		loss, err := t.step(ctx, epoch, begin, min(begin+batch, images))
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
	for i := t.group.Rank(); i < t.data.HeldOut.Len(); i += t.group.Size() {
		mine = append(mine, i)
	}
	x, y := t.data.HeldOut.Gather(t.inputs, t.labels, mine)
	t.centre.forward(x, false)
	_, right := t.model.Forward(x, y)
	total[1] = float64(right)
	if err := pg.Wait(t.group.AllReduce(ctx, pg.Slice(total), pg.Sum())); err != nil {
		return 0, 0, err
	}
	return total[0] / float64(images), total[1] / float64(t.data.HeldOut.Len()), nil
}

// step trains on this rank's share of the images at places begin to end, and returns their summed loss.
func (t *trainer) step(ctx context.Context, epoch, begin, end int) (float64, error) {
	rank, ranks := t.group.Rank(), t.group.Size()
	var mine []int
	for place := begin; place < end; place++ {
		if place%ranks == rank {
			mine = append(mine, image(epoch, place, t.data.Train.Len()))
		}
	}
	x, y := t.data.Train.Gather(t.inputs, t.labels, mine)
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
	t.gradients, err = digest(t.gradients, t.layout.grads)
	t.optimizer.Step(t.model.Params())
	return loss, err
}

// report prints what ranks can compare.
func (t *trainer) report() error {
	buffers, err := digest(nil, []*tensor.Tensor{t.centre.buffers[0].Value, t.centre.buffers[1].Value})
	if err != nil {
		return err
	}
	values, err := digest(nil, t.layout.values)
	if err != nil {
		return err
	}
	var buckets []int
	for i, params := range t.ddp.Buckets() {
		buckets = append(buckets, 0)
		for _, p := range params {
			buckets[i] += t.layout.values[p].ByteLen()
		}
	}
	_, err = fmt.Printf("buckets of %v bytes; gradients %.8x, buffers %.8x, parameters %.8x\n", buckets, t.gradients, buffers, values)
	return err
}

// digest returns the SHA-256 of b and the elements of tensors, as PyTorch has them in memory.
func digest(b []byte, ts []*tensor.Tensor) ([]byte, error) {
	for _, t := range ts {
		at := len(b)
		b = append(b, make([]byte, t.ByteLen())...)
		if err := t.Pack(b[at:]); err != nil {
			return nil, err
		}
	}
	sum := sha256.Sum256(b)
	return sum[:], nil
}
