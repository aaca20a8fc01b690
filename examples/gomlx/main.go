// Command gomlx trains a GoMLX model on several ranks, on GoMLX's Go backend, and prints beside it what
// one process computes. It is a module of its own, so that GoMLX's dependencies are not the
// library's.
//
//	cd examples/gomlx
//	go run . -nproc 4                         ranks as goroutines of one process
//	c10d run -n 4 -- go run .                 ranks as processes
//
// The data are scanned digits. Both train with the same images in each batch; on several ranks each rank
// takes its part of the batch. Package integrations/gomlx does what the ranks do together. The
// function fit has it in four lines.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"

	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/integrations/gomlx"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

func main() {
	nproc := flag.Int("nproc", 0, "run `n` ranks in this process; 0 means that a launcher starts the ranks")
	epochs := flag.Int("epochs", 8, "train for `n` epochs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *nproc, *epochs, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, nproc, epochs int, out io.Writer) error {
	if nproc < 0 || nproc > 16 || epochs < 1 {
		return errors.New("gomlx: -nproc must be between 0 and 16, -epochs at least 1")
	}
	if nproc == 0 {
		p, err := gomlx.Init(ctx)
		if err != nil {
			return err
		}
		return errors.Join(rank(ctx, p, epochs, out), p.Close())
	}
	// A group has no global state: all ranks can be in one process.
	st := store.NewHash()
	defer st.Close()
	ranks, ctx := errgroup.WithContext(ctx)
	for r := range nproc {
		ranks.Go(func() error {
			g, err := pg.New(ctx, st, r, nproc)
			if err != nil {
				return err
			}
			p, err := gomlx.New(ctx, g)
			if err == nil {
				err = rank(ctx, p, epochs, out)
			}
			if err == nil {
				err = g.Shutdown(ctx)
			}
			return errors.Join(err, g.Close())
		})
	}
	return ranks.Wait()
}

// report is the last line that rank 0 prints.
type report struct {
	Ranks           int     `json:"ranks"`
	Accuracy        float64 `json:"accuracy"` // on held-out images
	Loss            float64 `json:"loss"`     // mean of the last epoch
	SingleAccuracy  float64 `json:"single_accuracy"`
	SingleLoss      float64 `json:"single_loss"`
	LossDifference  float64 `json:"loss_difference"` // the largest of an epoch, relative to one process
	ParamsIdentical bool    `json:"params_identical"`
	Seconds         float64 `json:"seconds"`
	ImagesPerSecond float64 `json:"images_per_second"`
}

// rank is the program of one rank.
func rank(ctx context.Context, p *gomlx.Parallel, epochs int, out io.Writer) error {
	data, err := dataset.Digits()
	if err != nil {
		return err
	}
	together, err := fit(ctx, p, data, epochs)
	if err != nil {
		return err
	}
	if p.Rank() != 0 {
		return nil
	}
	alone, err := fit(ctx, nil, data, epochs)
	if err != nil {
		return err
	}
	last := epochs - 1
	r := report{
		Ranks:    p.Size(),
		Accuracy: together.accuracy[last], Loss: together.loss[last],
		SingleAccuracy: alone.accuracy[last], SingleLoss: alone.loss[last],
		ParamsIdentical: together.identical, Seconds: together.seconds,
		ImagesPerSecond: float64(epochs*data.Train.Len()) / together.seconds,
	}
	fmt.Fprintf(out, "epoch    %d ranks: loss  accuracy    one process: loss  accuracy\n", p.Size())
	for i := range epochs {
		fmt.Fprintf(out, "%5d %16.6f %8.2f%% %20.6f %8.2f%%\n",
			i+1, together.loss[i], 100*together.accuracy[i], alone.loss[i], 100*alone.accuracy[i])
		r.LossDifference = max(r.LossDifference, math.Abs(together.loss[i]/alone.loss[i]-1))
	}
	return json.NewEncoder(out).Encode(r)
}
