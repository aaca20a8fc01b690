// Command gomlx trains a GoMLX model on several ranks, on GoMLX's Go backend.
// It is a module of its own, so that GoMLX's dependencies are not the library's.
//
//	cd examples/gomlx
//	go run . -nproc 2                         ranks as goroutines of one process
//	c10d run -n 2 -- go run .                 ranks as processes
//
// GoMLX computes gradients and applies an optimizer within one graph. To train on several
// ranks, cut the graph at the gradients (trainer.step):
//
//  1. One graph returns the gradients to Go.
//  2. Go averages them over the ranks.
//  3. A second graph takes them as input and updates the variables.
//
// The rest is the same as on one rank, except that every rank begins with the variables of
// rank 0 and trains on its share of the images.
//
// The gradients are packed into one buffer and reduced by one all-reduce, because GoMLX's
// Go backend returns them all at once. A trainer that gets its gradients one after the
// other should use package ddp, which sends the first ones while others are computed.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"

	"golang.org/x/sync/errgroup"

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
		g, err := pg.Init(ctx, "env://", pg.InitOptions{})
		if err != nil {
			return err
		}
		return errors.Join(trainRank(ctx, g, epochs, out), g.Close())
	}
	// A group has no global state: all ranks can be in one process.
	st := store.NewHash()
	defer st.Close()
	ranks, ctx := errgroup.WithContext(ctx)
	for rank := range nproc {
		ranks.Go(func() error {
			g, err := pg.New(ctx, st, rank, nproc, pg.Options{})
			if err != nil {
				return err
			}
			return errors.Join(trainRank(ctx, g, epochs, out), g.Close())
		})
	}
	return ranks.Wait()
}

// digest returns a number that is equal for equal variables.
func digest(values [][]float32) int64 {
	h := sha256.New()
	for _, v := range values {
		for _, x := range v {
			h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(x)))
		}
	}
	return int64(binary.LittleEndian.Uint64(h.Sum(nil)))
}
