package c10d_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// Three ranks average their gradients. They are goroutines here; in a job each is a process, and pg.Init takes the
// place of Join.
func Example() {
	job := pgtest.NewJob(3)
	defer job.Close()
	var ranks sync.WaitGroup
	for rank := range job.Size {
		ranks.Go(func() {
			if err := average(context.Background(), job, rank); err != nil {
				fmt.Println(err)
			}
		})
	}
	ranks.Wait()
	// Output: rank 0 of 3: the average is [1 10]
}

func average(ctx context.Context, job *pgtest.Job, rank int) error {
	g, err := job.Join(ctx, rank)
	if err != nil {
		return err
	}
	defer g.Close()
	grad := []float32{float32(g.Rank()), 10}
	if err := pg.Wait(g.AllReduce(ctx, pg.Slice(grad), pg.Avg())); err != nil {
		return err
	}
	if g.Rank() == 0 {
		fmt.Printf("rank %d of %d: the average is %v\n", g.Rank(), g.Size(), grad)
	}
	return g.Barrier(ctx)
}
