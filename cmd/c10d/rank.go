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
	"github.com/c10d-go/c10d/store"
)

func init() {
	register(command{
		name: "rank", args: "-script FILE",
		summary: "run a script of operations as one rank of a job",
		setup:   setupRank,
	})
}

// rankFlags are the flags of "c10d rank".
type rankFlags struct {
	script, url, wire, torch string
	timeout                  time.Duration
}

func setupRank(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	var f rankFlags
	fs.StringVar(&f.script, "script", "", "`file` with one JSON object a line, the same on every rank; - is standard input")
	fs.StringVar(&f.url, "init", "env://", "where to meet the others: env://, tcp://, file:// or redis:// `URL`")
	fs.StringVar(&f.wire, "wire", "auto", "`wire` to speak: auto, gloo, or for ranks of this library alone native or tcp")
	fs.StringVar(&f.torch, "torch", "auto", "`generation` of PyTorch in the job: 1 (up to 2.0), 2 (2.2 and later), or auto")
	fs.DurationVar(&f.timeout, "timeout", time.Minute, "limit of the rendezvous and of each operation")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		return 0, pg.RecordError(f.run(std))
	}
}

func (f *rankFlags) run(std stdio) error {
	if f.script == "" {
		return usagef("-script is missing")
	}
	wire, err := gloo.ParseWire(f.wire)
	if err != nil {
		return usagef("-wire: %v", err)
	}
	dialects := map[string]store.Dialect{"auto": store.DialectUnknown, "1": store.DialectV1, "2": store.DialectV2}
	dialect, ok := dialects[f.torch]
	if !ok {
		return usagef("unknown -torch %q (1, 2 or auto)", f.torch)
	}
	if f.timeout <= 0 {
		return usagef("-timeout %v is not positive", f.timeout)
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
		Timeout: f.timeout, Dialect: dialect, Backend: "cpu:" + gloo.Name, BackendOptions: map[string]any{gloo.Name: gloo.Options{Wire: wire}},
	}})
	if err != nil {
		return err
	}
	lines, err := script.Parse(in, g.Size())
	if err != nil {
		g.Abort(err)
		return errors.Join(err, g.Close())
	}
	out := bufio.NewWriter(std.out)
	enc := json.NewEncoder(out)
	err = script.Run(ctx, g, lines, func(r script.Result) {
		// A line at a time, so that a test sees how far a rank has come.
		if enc.Encode(r) == nil {
			out.Flush()
		}
	})
	if err != nil {
		// The group may work still, when it was the reading that failed.
		g.Abort(err)
	}
	if closed := g.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("rank %d of %d: %w", g.Rank(), g.Size(), err)
	}
	return nil
}
