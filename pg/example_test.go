package pg_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/work"
)

// ranks runs f as each rank of a job in this process and prints what the ranks
// return, in their order. A real job has one process for each rank, which
// begins with pg.Init or pg.New.
func ranks(size int, f func(ctx context.Context, g *pg.ProcessGroup) (string, error)) {
	ctx, j := context.Background(), pgtest.NewJob(size)
	defer j.Close()
	said := make([]string, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			g, err := j.Join(ctx, r)
			if err != nil {
				said[r] = err.Error()
				return
			}
			defer g.Close()
			if said[r], err = f(ctx, g); err != nil {
				said[r] = err.Error()
			}
		})
	}
	wg.Wait()
	fmt.Println(strings.Join(said, "\n"))
}

func ExampleProcessGroup_AllReduce() {
	ranks(3, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		grad := []float32{float32(g.Rank()), 10}
		w, err := g.AllReduce(ctx, pg.Slice(grad), pg.Avg())
		if err != nil {
			return "", err
		}
		if err := w.Wait(ctx); err != nil {
			return "", err
		}
		return fmt.Sprintf("rank %d: %v", g.Rank(), grad), nil
	})
	// Output:
	// rank 0: [1 10]
	// rank 1: [1 10]
	// rank 2: [1 10]
}

func ExampleWait() {
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		loss := []float64{1.5 + float64(g.Rank())}
		err := pg.Wait(g.AllReduce(ctx, pg.Slice(loss), pg.Max()))
		return fmt.Sprint(loss), err
	})
	// Output:
	// [2.5]
	// [2.5]
}

func ExampleWait_errors() {
	ranks(3, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		if g.Rank() == 1 {
			return "rank 1 leaves", nil // g is closed, as if the process had ended
		}
		var failed *work.Error
		switch err := pg.Wait(g.AllReduce(ctx, pg.Slice([]int32{1}), pg.Sum())); {
		case err == nil:
			return "the sum is there", nil
		case errors.Is(err, work.ErrMismatch):
			return "the ranks make different calls: a mistake in the program", nil
		case errors.Is(err, work.ErrCanceled):
			return "a context ended", nil
		case errors.As(err, &failed) && failed.Peer >= 0:
			return fmt.Sprintf("rank %d died, left or stopped: go on without it", failed.Peer), nil
		case errors.Is(err, work.ErrTimeout):
			return "a rank or a link is slow, or broken: all ranks may go on", nil
		default:
			return "", err
		}
	})
	// Output:
	// rank 1 died, left or stopped: go on without it
	// rank 1 leaves
	// rank 1 died, left or stopped: go on without it
}

func ExampleSlice() {
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		layers := [][]float32{{1, 2}, {float32(g.Rank())}}
		var works []*work.Work
		for _, grad := range layers {
			w, err := g.AllReduce(ctx, pg.Slice(grad), pg.Sum())
			if err != nil {
				return "", err
			}
			works = append(works, w)
			// Compute the next gradient while this one is reduced.
		}
		for _, w := range works {
			if err := w.Wait(ctx); err != nil {
				return "", err
			}
		}
		return fmt.Sprint(layers), nil
	})
	// Output:
	// [[2 4] [1]]
	// [[2 4] [1]]
}

func ExampleParts() {
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		var all []int32
		if g.Rank() == 0 {
			all = []int32{1, 2, 3, 4}
		}
		part := make([]int32, 2)
		if err := pg.Wait(g.Scatter(ctx, pg.Slice(part), pg.Parts(all, g.Size()), 0)); err != nil {
			return "", err
		}
		for i := range part {
			part[i] *= 10
		}
		clear(all)
		err := pg.Wait(g.Gather(ctx, pg.Parts(all, g.Size()), pg.Slice(part), 0))
		return fmt.Sprintf("rank %d: %v %v", g.Rank(), part, all), err
	})
	// Output:
	// rank 0: [10 20] [10 20 30 40]
	// rank 1: [30 40] []
}

func ExampleAllGatherObject() {
	type host struct {
		Name  string
		Cores int
	}
	ranks(2, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		mine := host{Name: fmt.Sprintf("node%d", g.Rank()), Cores: 8 << g.Rank()}
		all, err := pg.AllGatherObject(ctx, g, mine)
		return fmt.Sprint(all), err
	})
	// Output:
	// [{node0 8} {node1 16}]
	// [{node0 8} {node1 16}]
}

func ExampleProcessGroup_NewSubgroups() {
	ranks(4, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		pair, err := g.NewSubgroups(ctx, 2)
		if err != nil {
			return "", err
		}
		sum := []int32{int32(g.Rank())}
		err = pg.Wait(pair.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
		return fmt.Sprintf("rank %d is rank %d of %v: %d", g.Rank(), pair.Rank(), pair.Ranks(), sum[0]), err
	})
	// Output:
	// rank 0 is rank 0 of [0 1]: 1
	// rank 1 is rank 1 of [0 1]: 1
	// rank 2 is rank 0 of [2 3]: 5
	// rank 3 is rank 1 of [2 3]: 5
}

func ExampleProcessGroup_MonitoredBarrier() {
	ranks(3, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		if g.Rank() == 2 {
			return "rank 2 does something else", nil
		}
		err := g.MonitoredBarrier(ctx)
		return fmt.Sprintf("rank %d: failed: %v", g.Rank(), err != nil), nil
	})
	// Output:
	// rank 0: failed: true
	// rank 1: failed: true
	// rank 2 does something else
}

func ExampleProcessGroup_Reconfigure() {
	ranks(3, func(ctx context.Context, g *pg.ProcessGroup) (string, error) {
		if g.Rank() == 1 {
			return "rank 1 leaves", nil // g is closed, as if the process had ended
		}
		sum := []int32{1}
		err := pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
		var ended *pg.EpochError
		if !errors.As(err, &ended) {
			return "", err
		}
		v, err := g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 2, SuspectTimeout: 10 * time.Millisecond})
		if err != nil {
			return "", err
		}
		sum[0] = 1 // the step is repeated
		err = pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
		return fmt.Sprintf("epoch %d without rank %d: rank %d of %d, sum %d", v.Epoch, v.Left[0].Rank, g.Rank(), g.Size(), sum[0]), err
	})
	// Output:
	// epoch 1 without rank 1: rank 0 of 2, sum 2
	// rank 1 leaves
	// epoch 1 without rank 1: rank 1 of 2, sum 2
}
