// Command ddp trains a small neural network on several ranks. Each rank has its share of
// the data. It is the demo of this library, and does what PyTorch's
// DistributedDataParallel does.
//
//	c10d run -n 4 -- ./ddp                   four ranks on this machine
//	c10d run -n 4 -- ./ddp -compare          compare with one process
//	c10d run -n 4 -- ./ddp -device cuda      the model on GPUs
//	c10d run -n 4 -- ./ddp -device sim       the same without a GPU
//	c10d run -n 4 -elastic 2:4 -- ./ddp -elastic    go on when ranks are killed
//
// A rank of this program is a process. Any launcher can start it: c10d run, torchrun,
// srun or mpirun.
//
// The files rank.go and train.go use the library: joining a group, and the four calls
// that make a training loop a distributed one. The other files have what any training
// program has: flags, progress, checkpoints, a report.
//
// # How closely N ranks and one process agree
//
// In exact arithmetic they compute the same. In a step the ranks together see the images
// that one process sees (package sampler). The average of their gradients is the gradient
// over all those images. In float32 the sums differ in the last bits, because
// additions are grouped differently: one process adds up the gradients of 64 images, one
// after the other. Four ranks do so for 16 images each, and the all-reduce adds the four
// results. Each step differs by about the rounding error of float32, 6e-8 of the sum.
// -compare measures the difference at the end of the training. With the defaults the
// vectors of all parameters differ by 3e-7 of their length. README.md has more numbers.
// A network with ReLU would differ more, see package mlp.
//
// All ranks have the same bits. Each rank gets the same bits from the all-reduce and
// takes the same step. The ranks exchange digests of their parameters, and
// params_identical in the last line of the output tells the result.
//
// # On a device
//
// With -device cuda parameters, gradients, activations, the batch and the optimizer's
// state are in device memory. The passes are kernels of the example's own (package
// gpumlp). The loop is the same, but its calls enqueue. The CPU waits for the loss of
// each step and for nothing else (engine.go, device.go). -device sim runs the same
// program on GPUs in software. The kernels add up in the order of the CPU's loops, so
// they agree as closely. One rank on the simulator computes the bits of one process on
// the CPU.
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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/pg"
	_ "github.com/c10d-go/c10d/store/redis" // redis:// in -init
	_ "github.com/c10d-go/c10d/trace/debug" // the page of c10d run -debug
)

// config has the values of the flags.
type config struct {
	init     string
	backend  string
	device   string
	checkSim bool
	work     string
	timeout  time.Duration
	elastic  bool
	join     bool
	stepTime time.Duration

	hidden     []int
	epochs     int
	batch      int
	rate       float64
	momentum   float64
	powerRank  int
	seed       uint64
	bucketKiB  int
	checkpoint string
	resume     bool
	compare    bool
}

func parseFlags(args []string, stderr io.Writer) (*config, error) {
	c := &config{hidden: []int{128, 64}}
	f := flag.NewFlagSet("ddp", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&c.init, "init", "env://", "`URL` of the job's store: env://, tcp://, redis:// or file://, see pg.Init")
	f.StringVar(&c.backend, "backend", "gloo", "`name` of the backend")
	f.StringVar(&c.device, "device", onCPU, "`kind` of device that has the model: cpu, cuda (a GPU of this machine) or sim (a GPU in software)")
	f.BoolVar(&c.checkSim, "check", false, "with -device sim: delay operations at random, and fail if two uses of memory have no order")
	f.StringVar(&c.work, "work", "", "with -device: `work` that averages gradients: direct (from device to device), clusters, or host (through CPU memory); empty means the first of these that can")
	f.DurationVar(&c.timeout, "timeout", time.Minute, "longest `duration` that ranks wait for each other")

	f.BoolVar(&c.elastic, "elastic", false, "go on without ranks that are lost, and take in new ones; c10d run needs -elastic, too")
	f.BoolVar(&c.join, "join", false, "with -elastic: join a training that is running. Ranks that c10d run starts again do that by themselves")
	f.DurationVar(&c.stepTime, "step-time", 0, "with -elastic: `duration` of a pause in each step, to have time to kill ranks")

	f.Func("hidden", "`sizes` of the hidden layers, separated by commas (default 128,64)", func(s string) error {
		c.hidden = nil
		for _, field := range strings.FieldsFunc(s, func(r rune) bool { return r == ',' }) {
			n, err := strconv.Atoi(field)
			if err != nil || n < 1 || n > 1<<16 {
				return fmt.Errorf("%q is not a number of neurons between 1 and 65536", field)
			}
			c.hidden = append(c.hidden, n)
		}
		return nil
	})
	f.IntVar(&c.epochs, "epochs", 20, "train for `n` epochs")
	f.IntVar(&c.batch, "batch", 64, "`n` images in a step, of all ranks together")
	f.Float64Var(&c.rate, "lr", 0.1, "learning `rate`")
	f.Float64Var(&c.momentum, "momentum", 0.9, "momentum `factor` of the optimizer")
	f.IntVar(&c.powerRank, "powersgd", 0, "send gradients as PowerSGD matrices of rank `n`; 0 sends them whole")
	f.Uint64Var(&c.seed, "seed", 1, "`seed` of the first parameters and of the order of the images")
	f.IntVar(&c.bucketKiB, "bucket", 16, "size of a gradient bucket in `KiB`; with c10d's default of 25 MiB this small model would be one bucket")

	f.StringVar(&c.checkpoint, "checkpoint", "", "save the training to this `file` after each epoch")
	f.BoolVar(&c.resume, "resume", false, "continue from the checkpoint")
	f.BoolVar(&c.compare, "compare", false, "train again in a single process afterwards, and compare")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	return c, c.check(f.Args())
}

func (c *config) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("ddp: unexpected argument %q", rest[0])
	case c.device != onCPU && c.device != onSim && c.device != onCUDA:
		return fmt.Errorf("ddp: -device %q: must be cpu, sim or cuda", c.device)
	case c.device != onCPU && strings.Contains(c.backend, ":"):
		return fmt.Errorf("ddp: -backend %q: with -device %s it must be the name of a backend for CPU tensors", c.backend, c.device)
	case c.work != "" && !slices.Contains(cuda.AllReduceWorks(), c.work):
		return fmt.Errorf("ddp: -work %q: must be one of %s", c.work, strings.Join(cuda.AllReduceWorks(), ", "))
	case c.work != "" && c.device == onCPU:
		return errors.New("ddp: -work needs -device sim or cuda")
	case c.checkSim && c.device != onSim:
		return errors.New("ddp: -check needs -device sim")
	case c.epochs < 1:
		return fmt.Errorf("ddp: -epochs %d: must be at least 1", c.epochs)
	case c.powerRank < 0 || c.powerRank > 0 && (c.device != onCPU || c.elastic || c.compare || c.checkpoint != ""):
		return fmt.Errorf("ddp: -powersgd %d: must not be negative, and does not work with -device, -elastic, -compare and -checkpoint", c.powerRank)
	case c.batch < 1 || c.batch > 1<<20:
		return fmt.Errorf("ddp: -batch %d must be between 1 and %d", c.batch, 1<<20)
	case c.bucketKiB < 1 || c.bucketKiB > 1<<20:
		return fmt.Errorf("ddp: -bucket %d must be between 1 and %d", c.bucketKiB, 1<<20)
	case c.timeout <= 0:
		return fmt.Errorf("ddp: -timeout %v: must be positive", c.timeout)
	case c.elastic && (c.device != onCPU || c.checkpoint != "" || c.compare):
		return errors.New("ddp: -elastic does not work with -device, -checkpoint and -compare")
	case !c.elastic && (c.join || c.stepTime != 0):
		return errors.New("ddp: -join and -step-time need -elastic")
	case c.resume && c.checkpoint == "":
		return errors.New("ddp: -resume needs -checkpoint")
	}
	return nil
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
	run := runRank
	if c.elastic {
		run = runElastic
	}
	if err := pg.RecordError(run(ctx, c, os.Stdout, os.Stderr)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
