// Command ddp trains one model on Python and Go ranks together: the Python
// ranks with torch.nn.parallel.DistributedDataParallel (trainer.py), the Go
// ranks with package ddp (rank.go). Neither kind treats the other in any way.
//
//	go run ./examples/torch/ddp -go 1 -python 2            rank 0 is Python
//	go run ./examples/torch/ddp -go 2 -python 1 -go-first  rank 0 is Go
//	go run ./examples/torch/ddp -compare                   and ranks of one kind alone?
//
// The program started so is the launcher. It writes the data and the schedule
// to a file that all ranks read, starts the ranks, collects what each of them
// reports, and compares. The last line of its output is the result, as JSON.
// README.md says how far the two kinds of ranks agree, and why.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// config is what the flags say.
type config struct {
	job       string
	goRanks   int
	pyRanks   int
	goFirst   bool
	python    string
	store     string
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
	f.StringVar(&c.job, "job", "", "be a Go rank of the job in this `file`: what the launcher does")
	f.IntVar(&c.goRanks, "go", 1, "start `n` Go ranks")
	f.IntVar(&c.pyRanks, "python", 1, "start `n` Python ranks")
	f.BoolVar(&c.goFirst, "go-first", false, "Go ranks come first: rank 0, whose parameters and buffers all get, is Go")
	f.StringVar(&c.python, "python-exe", "python3", "`program` of a Python that has PyTorch")
	f.StringVar(&c.store, "store", "rank0", "`host` of the store that ranks meet in: rank0, go (the launcher) or python (a process besides the ranks)")
	f.IntVar(&c.epochs, "epochs", 10, "see each image `n` times")
	f.IntVar(&c.batch, "batch", 64, "all ranks together see `n` images in a step")
	f.Float64Var(&c.rate, "lr", 0.1, "the learning `rate`")
	f.Float64Var(&c.momentum, "momentum", 0.9, "the `share` of the last step in the next")
	f.Uint64Var(&c.seed, "seed", 1, "the `seed` of rank 0's first parameters and of the order of the images")
	f.IntVar(&c.bucketKiB, "bucket", 16, "the `KiB` of gradients that are sent at once; with the default of 25 MiB this small model would be one bucket")
	f.DurationVar(&c.timeout, "timeout", time.Minute, "the longest `time` that ranks wait for each other")
	f.IntVar(&c.mismatch, "mismatch", -1, "give this `rank` another model, to see what the ranks say")
	f.BoolVar(&c.compare, "compare", false, "afterwards train with as many ranks of each kind alone, and compare")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	return c, c.check(f.Args())
}

func (c *config) check(rest []string) error {
	const maxRanks = 256 // more do not fit a machine
	switch {
	case len(rest) > 0:
		return fmt.Errorf("ddp: unexpected argument %q", rest[0])
	case c.goRanks < 0 || c.pyRanks < 0 || c.goRanks+c.pyRanks < 1 || c.goRanks > maxRanks || c.pyRanks > maxRanks:
		return fmt.Errorf("ddp: %d Go and %d Python ranks: at least one and at most %d of each kind", c.goRanks, c.pyRanks, maxRanks)
	case c.store != "rank0" && c.store != "go" && c.store != "python":
		return fmt.Errorf("ddp: -store %q: there are rank0, go and python", c.store)
	case c.epochs < 1:
		return fmt.Errorf("ddp: -epochs %d", c.epochs)
	case c.batch < 1 || c.batch > 1<<20:
		return fmt.Errorf("ddp: -batch %d is not within 1 and %d", c.batch, 1<<20)
	case c.bucketKiB < 1 || c.bucketKiB > 1<<20:
		return fmt.Errorf("ddp: -bucket %d is not within 1 and %d", c.bucketKiB, 1<<20)
	case c.timeout < time.Second:
		return fmt.Errorf("ddp: -timeout %v is less than a second", c.timeout)
	}
	return nil
}

// ranks returns the kind of each rank.
func (c *config) ranks() []kind {
	var first, second []kind
	for range c.goRanks {
		first = append(first, goRank)
	}
	for range c.pyRanks {
		second = append(second, pythonRank)
	}
	if !c.goFirst {
		first, second = second, first
	}
	return append(first, second...)
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
	if c.job != "" {
		err = runRank(ctx, c.job, os.Stdin, os.Stdout, os.Stderr)
	} else {
		err = run(ctx, c, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run is the launcher.
func run(ctx context.Context, c *config, stdout, stderr io.Writer) error {
	start := time.Now()
	l, err := newLauncher(ctx, c, stderr)
	if err != nil {
		return err
	}
	defer l.close()
	kinds := c.ranks()
	results, err := l.train(ctx, kinds)
	if err != nil {
		return err
	}
	rep, err := newReport(kinds, results)
	if err != nil {
		return err
	}
	rep.Torch, rep.Store = l.job.Torch, c.store
	rep.Seconds = round(time.Since(start).Seconds(), 3)
	if c.compare {
		if err := l.compare(ctx, rep, results[0]); err != nil {
			return err
		}
	}
	return json.NewEncoder(stdout).Encode(rep)
}

// compare trains with ranks of one kind, for each kind.
func (l *launcher) compare(ctx context.Context, rep *report, mixed result) error {
	rep.Compare = map[kind]*comparison{}
	for _, k := range []kind{goRank, pythonRank} {
		if k == pythonRank && l.job.Torch == "" {
			continue
		}
		fmt.Fprintf(l.stderr, "for comparison: %d %s ranks\n", rep.Ranks, k)
		kinds := make([]kind, rep.Ranks)
		for i := range kinds {
			kinds[i] = k
		}
		results, err := l.train(ctx, kinds)
		if err != nil {
			return err
		}
		d, err := difference(mixed, results[0])
		if err != nil {
			return err
		}
		rep.Compare[k] = &comparison{Accuracy: results[0].Accuracy, Loss: results[0].Loss, diff: d}
	}
	return nil
}
