// Command ddp trains a small neural network on several ranks at once, each on
// its share of the data: the demo of this library, in the way that PyTorch's
// DistributedDataParallel does it.
//
//	go run ./examples/ddp -nproc 4                  four ranks on this machine
//	go run ./examples/ddp -nproc 4 -compare         and is it the same as one process?
//	go run ./examples/ddp -nproc 4 -plot loss.svg   a picture of the training
//	go run ./examples/ddp -nproc 4 -device cuda     the model on GPUs
//	go run ./examples/ddp -nproc 4 -device sim      the same without a GPU
//	c10d run -n 4 -- go run ./examples/ddp          ranks that a launcher started
//
// What is the library's is in rank.go and train.go: joining a group, and the
// four calls that make a training loop a distributed one. The rest is what any
// training program has: flags, a progress bar, checkpoints, a report.
//
// # How far N ranks and one process agree
//
// In exact arithmetic they compute the same: the ranks see together the images
// that one process sees in the same step (package sampler), and the average of
// their gradients is the gradient over all those images. In float32 the sums
// differ in the last bits, because additions are grouped otherwise: one process
// adds up the gradients of 64 images one after the other; four ranks do so for
// 16 images each, and the all-reduce adds the four results in an order that
// depends on where in the bucket an element lies. Each step's difference is
// about the rounding error of float32, 6e-8 of the sum. -compare measures what
// has become of it at the end of the training: with the defaults the vectors of
// all parameters differ by 3e-7 of their length (README.md has more numbers).
// A network with ReLU would not do for this, see package mlp.
//
// # On a device
//
// With -device cuda parameters, gradients, activations, the batch and the
// optimizer's state are in device memory, and the passes are kernels of the
// example's own (package gpumlp). The loop is the same, but its calls enqueue: the
// CPU waits for the loss of each step and for nothing else (engine.go, device.go).
// -device sim runs the same program on GPUs in software. The kernels add up in the
// order of the CPU's loops, so what is said above holds for them too; one rank on
// the simulator computes the bits of one process on the CPU.
//
// Between the ranks there is no difference at all: each of them gets the same
// bits from the all-reduce and takes the same step. params_identical in the
// last line of the output says so, from digests that the ranks exchange.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/examples/internal/plot"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/work"
)

// config is what the flags say.
type config struct {
	nproc    int
	store    string
	redisURL string
	init     string
	backend  string
	device   string
	checkSim bool
	work     string
	timeout  time.Duration

	data       string
	hidden     []int
	epochs     int
	batch      int
	rate       float64
	momentum   float64
	seed       uint64
	bucketKiB  int
	plot       string
	checkpoint string
	resume     bool
	compare    bool
}

func parseFlags(args []string, stderr io.Writer) (*config, error) {
	c := &config{hidden: []int{128, 64}}
	f := flag.NewFlagSet("ddp", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&c.nproc, "nproc", 0, "start `n` ranks on this machine; 0: this process is one rank of a job that a launcher started")
	f.StringVar(&c.store, "store", "tcp", "with -nproc: the `kind` of store that the ranks meet in: tcp, redis or file")
	f.StringVar(&c.redisURL, "redis-url", "redis://127.0.0.1:6379/0", "with -store redis: the server's `URL`")
	f.StringVar(&c.init, "init", "env://", "without -nproc: the `URL` of the store, see pg.Init")
	f.StringVar(&c.backend, "backend", "gloo", "the backend's `name`")
	f.StringVar(&c.device, "device", onCPU, "`device` that has the model and computes: cpu; cuda, one of the machine's GPUs (ranks share them if they are more); sim, a GPU in software, which every rank has for itself")
	f.BoolVar(&c.checkSim, "check", false, "with -device sim: delay operations at random and look for those that lack an order; the ranks fail if there are any")
	f.StringVar(&c.work, "work", "", "with -device: the `work` that averages gradients: device, from device to device; host, by way of the CPUs; empty: device where it can be done")
	f.DurationVar(&c.timeout, "timeout", time.Minute, "the longest `time` that ranks wait for each other")

	f.StringVar(&c.data, "data", "", "a `folder` with the IDX files of MNIST, Fashion-MNIST or the like; empty: the embedded digits")
	f.Func("hidden", "the `sizes` of the hidden layers (default 128,64)", func(s string) error {
		c.hidden = nil
		for _, field := range strings.FieldsFunc(s, func(r rune) bool { return r == ',' }) {
			n, err := strconv.Atoi(field)
			if err != nil || n < 1 || n > 1<<16 {
				return fmt.Errorf("%q is no size of a layer", field)
			}
			c.hidden = append(c.hidden, n)
		}
		return nil
	})
	f.IntVar(&c.epochs, "epochs", 20, "see each image `n` times")
	f.IntVar(&c.batch, "batch", 64, "all ranks together see `n` images in a step")
	f.Float64Var(&c.rate, "lr", 0.1, "the learning `rate`")
	f.Float64Var(&c.momentum, "momentum", 0.9, "the `share` of the last step in the next")
	f.Uint64Var(&c.seed, "seed", 1, "the `seed` of the first parameters and of the order of the images")
	f.IntVar(&c.bucketKiB, "bucket", 16, "the `KiB` of gradients that are sent at once; the library's own default, c10d's 25 MiB, would hold this small model many times over")

	f.StringVar(&c.plot, "plot", "", "draw loss and accuracy into this `file`, .svg or .png")
	f.StringVar(&c.checkpoint, "checkpoint", "", "after each epoch save the training to this `file`")
	f.BoolVar(&c.resume, "resume", false, "go on from the checkpoint")
	f.BoolVar(&c.compare, "compare", false, "afterwards train in a single process, and compare")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	return c, c.check(f.Args())
}

func (c *config) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("ddp: unexpected argument %q", rest[0])
	case c.nproc < 0 || c.nproc > 1024:
		return fmt.Errorf("ddp: -nproc %d is not within 0 and 1024", c.nproc)
	case c.store != "tcp" && c.store != "redis" && c.store != "file":
		return fmt.Errorf("ddp: -store %q: there are tcp, redis and file", c.store)
	case c.device != onCPU && c.device != onSim && c.device != onCUDA:
		return fmt.Errorf("ddp: -device %q: there are cpu, sim and cuda", c.device)
	case c.device != onCPU && strings.Contains(c.backend, ":"):
		return fmt.Errorf("ddp: -backend %q: with -device %s it is the one for CPU tensors, a name alone", c.backend, c.device)
	case c.work != "" && c.work != cuda.DeviceWork && c.work != cuda.HostWork:
		return fmt.Errorf("ddp: -work %q: there are device and host", c.work)
	case c.work != "" && c.device == onCPU:
		return errors.New("ddp: -work needs -device sim or cuda")
	case c.checkSim && c.device != onSim:
		return errors.New("ddp: -check needs -device sim")
	case c.epochs < 1:
		return fmt.Errorf("ddp: -epochs %d", c.epochs)
	case c.batch < 1 || c.batch > 1<<20:
		return fmt.Errorf("ddp: -batch %d is not within 1 and %d", c.batch, 1<<20)
	case c.bucketKiB < 1 || c.bucketKiB > 1<<20:
		return fmt.Errorf("ddp: -bucket %d is not within 1 and %d", c.bucketKiB, 1<<20)
	case c.timeout <= 0:
		return fmt.Errorf("ddp: -timeout %v", c.timeout)
	case c.resume && c.checkpoint == "":
		return errors.New("ddp: -resume needs -checkpoint")
	case c.plot != "":
		return plot.CheckName(c.plot)
	}
	return nil
}

// Exit codes. A rank that failed because another one did says so, so that the
// launcher can point to the one that is at fault.
const (
	exitFailed   = 1
	exitUsage    = 2
	exitPeer     = 3
	exitOrphaned = 4
)

func main() {
	c, err := parseFlags(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitUsage)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if c.nproc > 0 {
		err = launch(ctx, c, os.Args[1:])
	} else {
		var done context.CancelFunc
		ctx, done = followLauncher(ctx)
		defer done()
		err = pg.RecordError(runRank(ctx, c, os.Stdout, os.Stderr))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitCode(err))
	}
}

func exitCode(err error) int {
	// Peer may be this rank itself: others say so of a rank that waited for a third.
	var failed *work.Error
	if errors.As(err, &failed) && failed.Peer >= 0 || errors.Is(err, errOtherRank) {
		return exitPeer
	}
	return exitFailed
}
