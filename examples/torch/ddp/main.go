// Command ddp trains one model on Python and Go ranks together: the Python ranks with
// torch.nn.parallel.DistributedDataParallel (trainer.py), the Go ranks with package ddp
// (rank.go).
//
//	c10d run -n 3 -- ./ddp -python 2            ranks 0 and 1 are Python, rank 2 is Go
//	c10d run -n 3 -- ./ddp -python 1 -go-first  rank 2 is Python
//	c10d run -n 2 -- ./ddp -compare             compare with ranks of one kind alone
//
// Each rank decides from its number whether it trains itself or starts Python. The last
// line of rank 0's output is the result, as JSON. README.md tells how closely the two kinds
// of ranks agree.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/pg"
)

// config has the values of the flags.
type config struct {
	pyRanks   int
	goFirst   bool
	python    string
	epochs    int
	batch     int
	rate      float64
	momentum  float64
	seed      uint64
	bucketKiB int
	timeout   time.Duration
	mismatch  int
	compare   bool
}

func parseFlags(args []string, stderr io.Writer) (*config, error) {
	c := new(config)
	f := flag.NewFlagSet("ddp", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&c.pyRanks, "python", 1, "`n` of the ranks are Python")
	f.BoolVar(&c.goFirst, "go-first", false, "Go ranks come first; every rank gets the parameters and buffers of rank 0")
	f.StringVar(&c.python, "python-exe", "python3", "`program` of a Python that has PyTorch")
	f.IntVar(&c.epochs, "epochs", 10, "train for `n` epochs")
	f.IntVar(&c.batch, "batch", 64, "`n` images in a step, of all ranks together")
	f.Float64Var(&c.rate, "lr", 0.1, "learning `rate`")
	f.Float64Var(&c.momentum, "momentum", 0.9, "momentum `factor` of the optimizer")
	f.Uint64Var(&c.seed, "seed", 1, "`seed` of rank 0's first parameters and of the order of the images")
	f.IntVar(&c.bucketKiB, "bucket", 16, "size of a gradient bucket in `KiB`; with the default of 25 MiB this small model would be one bucket")
	f.DurationVar(&c.timeout, "timeout", time.Minute, "longest `duration` that ranks wait for each other")
	f.IntVar(&c.mismatch, "mismatch", -1, "give this `rank` another model, to see what the ranks print; -1 means none")
	f.BoolVar(&c.compare, "compare", false, "train again with ranks of each kind alone, and compare")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	return c, c.check(f.Args())
}

func (c *config) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("ddp: unexpected argument %q", rest[0])
	case c.pyRanks < 0:
		return fmt.Errorf("ddp: -python %d: must not be negative", c.pyRanks)
	case c.epochs < 1:
		return fmt.Errorf("ddp: -epochs %d: must be at least 1", c.epochs)
	case c.batch < 1 || c.batch > 1<<20:
		return fmt.Errorf("ddp: -batch %d must be between 1 and %d", c.batch, 1<<20)
	case c.bucketKiB < 1 || c.bucketKiB > 1<<20:
		return fmt.Errorf("ddp: -bucket %d must be between 1 and %d", c.bucketKiB, 1<<20)
	case c.timeout < time.Second:
		return fmt.Errorf("ddp: -timeout %v is less than a second", c.timeout)
	}
	return nil
}

// kinds returns the kind of each rank.
func (c *config) kinds(ranks int) []kind {
	first, n, second := pythonRank, c.pyRanks, goRank
	if c.goFirst {
		first, n, second = goRank, ranks-c.pyRanks, pythonRank
	}
	return append(slices.Repeat([]kind{first}, n), slices.Repeat([]kind{second}, ranks-n)...)
}

func main() {
	c, err := parseFlags(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := pg.RecordError(run(ctx, c, os.Stdout, os.Stderr)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
