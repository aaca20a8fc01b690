package main

import (
	"bufio"
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

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
)

func init() {
	register(command{
		name: "rank", args: "-script FILE",
		summary: "run a script of operations as one rank of a job",
		example: "c10d rank -script ops.jsonl",
		setup:   setupRank,
	})
}

// useWire makes a wire the default of this process. The backend of device tensors has other sums, and so other ways, if
// a program gives it options for its CPU backend.
func useWire(name string) error {
	if name == "" {
		return nil
	}
	return os.Setenv("C10D_WIRE", name)
}

// wireDefault describes the default of the flag -wire.
const wireDefault = " (default C10D_WIRE, without that auto)"

// wireOf checks the value of the flag -wire. For an empty one the backend reads C10D_WIRE.
func wireOf(name string) (gloo.Wire, error) {
	if name == "" {
		return "", nil
	}
	return gloo.ParseWire(name)
}

// orInstead adds an alternative to the error of a rank that no launcher has started.
func orInstead(err error, what string) error {
	if errors.Is(err, pg.ErrNoLauncher) {
		return fmt.Errorf("%w; %s", err, what)
	}
	return err
}

// orWorld is orInstead for commands with -world.
func orWorld(err error) error {
	return orInstead(err, "or have this command start 2 ranks here: -world 2")
}

// rankFlags are the flags of "c10d rank".
type rankFlags struct {
	script, url, wire string
	timeout           time.Duration
}

func setupRank(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	var f rankFlags
	fs.StringVar(&f.script, "script", "", "`file` with one JSON object a line, the same on every rank; - is standard input")
	fs.StringVar(&f.url, "init", "env://", "`URL` of the job's store: env://, tcp://, file:// or redis://")
	fs.StringVar(&f.wire, "wire", "", "`wire`: auto, gloo, or, without ranks of PyTorch, native or tcp"+wireDefault)
	fs.DurationVar(&f.timeout, "timeout", time.Minute, "longest `duration` of the rendezvous and of each operation")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		return 0, pg.RecordError(f.run(std))
	}
}

func (f *rankFlags) run(std stdio) error {
	if f.script == "" {
		return usagef("-script is missing: name a file, or - for standard input")
	}
	wire, err := wireOf(f.wire)
	if err != nil {
		return usagef("-wire: %v", err)
	}
	if f.timeout <= 0 {
		return usagef("-timeout %v: must be positive", f.timeout)
	}
	var in io.Reader = std.in
	if f.script != "-" {
		file, err := os.Open(f.script)
		if err != nil {
			return err
		}
		defer file.Close()
		in = file
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	g, err := pg.Init(ctx, f.url, pg.InitOptions{Options: pg.Options{
		Timeout: f.timeout, Backend: "cpu:" + gloo.Name, BackendOptions: pg.BackendOptions{gloo.Options{Wire: wire}},
	}})
	if err != nil {
		return orInstead(err, "or name the others by -init tcp://HOST:PORT?rank=R&world_size=N")
	}
	lines, err := script.Parse(in, g.Size())
	if err != nil {
		g.Abort(err)
		return errors.Join(err, g.Close())
	}
	out := bufio.NewWriter(std.out)
	enc := json.NewEncoder(out)
	err = script.Run(ctx, g, lines, func(r script.Result) {
		// Each line is flushed: readers see the progress of the rank.
		if enc.Encode(r) == nil {
			out.Flush()
		}
	})
	if err != nil {
		// If the script could not be read, the group still works.
		g.Abort(err)
	}
	if closed := g.Shutdown(ctx); err == nil { // a script need not wait for all that it calls
		err = closed
	}
	if err != nil {
		return fmt.Errorf("rank %d of %d: %w", g.Rank(), g.Size(), err)
	}
	return nil
}
