package ddp_test

import (
	"context"
	"fmt"
	"log"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/work"
)

// ranks runs f as two ranks that have a model of one parameter, whose gradient is grad. It prints what
// the ranks return.
func ranks(f func(ctx context.Context, rank int, d *ddp.DDP, grad []float32) (string, error), o ...ddp.Options) {
	ctx, job := context.Background(), pgtest.NewJob(2)
	defer job.Close()
	said := make([]string, job.Size)
	one := func(rank int) error {
		g, err := job.Join(ctx, rank)
		if err != nil {
			return err
		}
		defer g.Close()
		grad := make([]float32, 1)
		params, err := ddp.Params([][]float32{make([]float32, 1)}, [][]float32{grad})
		if err != nil {
			return err
		}
		d, err := ddp.New(ctx, g, params, o...)
		if err != nil {
			return err
		}
		said[rank], err = f(ctx, rank, d, grad)
		return err
	}
	var wg sync.WaitGroup
	for rank := range said {
		wg.Go(func() {
			if err := one(rank); err != nil {
				log.Print(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(strings.Join(said, "\n"))
}

// oneBatch is an iteration whose backward pass adds g to the gradient.
func oneBatch(ctx context.Context, d *ddp.DDP, grad []float32, g float32) error {
	if err := d.Begin(ctx); err != nil {
		return err
	}
	grad[0] += g
	if err := d.Ready(0); err != nil {
		return err
	}
	return d.Finish(ctx)
}

// A hook that ships with the package: gradients cross the network in bfloat16, with 8 bits.
func ExampleBF16CompressHook() {
	ranks(func(ctx context.Context, rank int, d *ddp.DDP, grad []float32) (string, error) {
		err := oneBatch(ctx, d, grad, 1+1.0/1024)
		return fmt.Sprintf("rank %d: %v", rank, grad), err
	}, ddp.Options{Hook: ddp.BF16CompressHook})
	// Output:
	// rank 0: [1]
	// rank 1: [1]
}

// A hook of the program: the largest gradient of all ranks in place of the average.
func ExampleHook() {
	largest := func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
		return b.Group().AllReduce(ctx, b.Buffer(), pg.Max())
	}
	ranks(func(ctx context.Context, rank int, d *ddp.DDP, grad []float32) (string, error) {
		err := oneBatch(ctx, d, grad, float32(10+rank))
		return fmt.Sprintf("rank %d: %v", rank, grad), err
	}, ddp.Options{Hook: largest})
	// Output:
	// rank 0: [11]
	// rank 1: [11]
}

// Gradients of three batches are added up, and reduced once.
func ExampleDDP_NoSync() {
	ranks(func(ctx context.Context, rank int, d *ddp.DDP, grad []float32) (string, error) {
		err := d.NoSync(func() error {
			for range 2 {
				if err := oneBatch(ctx, d, grad, float32(rank)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return "", err
		}
		before := grad[0]
		err = oneBatch(ctx, d, grad, float32(rank))
		return fmt.Sprintf("rank %d: %v, then the average %v", rank, before, grad[0]), err
	})
	// Output:
	// rank 0: 0, then the average 1.5
	// rank 1: 2, then the average 1.5
}

// Rank 0 has one batch and rank 1 has three. Rank 0 takes part in the last two with zeros.
func ExampleDDP_Join() {
	ranks(func(ctx context.Context, rank int, d *ddp.DDP, grad []float32) (string, error) {
		batches := [][]float32{{4}, {2, 6, 8}}[rank]
		var averages []float32
		err := d.Join(ctx, func() error {
			for _, g := range batches {
				grad[0] = 0
				if err := oneBatch(ctx, d, grad, g); err != nil {
					return err
				}
				averages = append(averages, grad[0])
			}
			return nil
		})
		return fmt.Sprintf("rank %d: %v", rank, averages), err
	})
	// Output:
	// rank 0: [3]
	// rank 1: [3 3 4]
}
