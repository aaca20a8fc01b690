package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

//go:embed trainer.py
var trainerPy string

// run trains on this rank, and reports on rank 0. The program is Go on every rank: its
// ranks form a group of their own, in which they agree on a store for each training and
// gather the results. A rank of kind python starts a Python process that trains.
func run(ctx context.Context, c *config, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Timeout: c.timeout}})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			g.Abort(err)
		}
		err = errors.Join(err, g.Close())
	}()
	if c.pyRanks > g.Size() {
		return fmt.Errorf("ddp: -python %d: the job has %d ranks", c.pyRanks, g.Size())
	}
	torch := ""
	if c.pyRanks > 0 {
		if torch, err = torchVersion(ctx, c.python); err != nil {
			return err
		}
	}
	j, err := newJob(c, torch)
	if err != nil {
		return err
	}
	kinds := c.kinds(g.Size())
	results, err := train(ctx, g, c, j, kinds, stderr)
	if err != nil {
		return err
	}
	rep, err := newReport(kinds, results)
	if err != nil {
		return err
	}
	rep.Torch, rep.Seconds = torch, round(time.Since(start).Seconds(), 3)
	if c.compare {
		rep.Compare = map[kind]*comparison{}
	}
	for _, k := range []kind{goRank, pythonRank} {
		if !c.compare || k == pythonRank && torch == "" {
			continue
		}
		for i := range kinds {
			kinds[i] = k
		}
		alone, err := train(ctx, g, c, j, kinds, stderr)
		if err != nil {
			return err
		}
		d, err := difference(results[0], alone[0])
		if err != nil {
			return err
		}
		rep.Compare[k] = &comparison{Accuracy: alone[0].Accuracy, Loss: alone[0].Loss, diff: d}
	}
	if g.Rank() != 0 {
		return nil
	}
	return json.NewEncoder(stdout).Encode(rep)
}

// train runs one training with ranks of the given kinds and returns every rank's result.
func train(ctx context.Context, g *pg.ProcessGroup, c *config, j *job, kinds []kind, stderr io.Writer) (_ []result, err error) {
	stop, err := meet(ctx, g)
	if err != nil {
		return nil, err
	}
	defer stop()
	var r result
	k := kinds[g.Rank()]
	if k == goRank {
		r, err = trainGo(ctx, j, stderr)
	} else {
		r, err = trainPython(ctx, c.python, j, stderr)
	}
	if err != nil {
		return nil, err
	}
	return pg.AllGatherObject(ctx, g, r)
}

// meet hosts a store for one training on rank 0, and tells every rank where it is, by the
// environment. A store serves one training, because PyTorch's keys are the same in each.
func meet(ctx context.Context, g *pg.ProcessGroup) (stop func(), err error) {
	stop = func() {}
	host, port := os.Getenv("MASTER_ADDR"), []int64{0}
	if host == "" {
		return nil, errors.New("ddp: environment variable MASTER_ADDR is not set: start the program with c10d run or torchrun")
	}
	if g.Rank() == 0 {
		listen := ":0"
		if store.IsLoopback(host) {
			listen = net.JoinHostPort(host, "0")
		}
		server, err := tcp.Listen(ctx, listen)
		if err != nil {
			return nil, err
		}
		stop = func() { server.Close() } // the training is over
		port[0] = int64(server.Addr().(*net.TCPAddr).Port)
	}
	if err := pg.Wait(g.Broadcast(ctx, pg.Slice(port), 0)); err != nil {
		stop()
		return nil, err
	}
	set := map[string]string{
		"MASTER_PORT": strconv.FormatInt(port[0], 10), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
	}
	if store.IsLoopback(host) && os.Getenv("GLOO_SOCKET_IFNAME") == "" {
		// A PyTorch rank would look up the host's name, which need not have an address.
		if set["GLOO_SOCKET_IFNAME"], err = loopbackInterface(); err != nil {
			return nil, err
		}
	}
	for name, value := range set {
		if err := os.Setenv(name, value); err != nil {
			return nil, err
		}
	}
	return stop, nil
}

func loopbackInterface() (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("ddp: %w", err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			return i.Name, nil
		}
	}
	return "", errors.New("ddp: no loopback interface")
}

// trainPython trains in a Python process. It gets the job as the first line of its
// standard input, and ends when that ends: when this process does.
func trainPython(ctx context.Context, python string, j *job, stderr io.Writer) (r result, err error) {
	text, err := json.Marshal(j)
	if err != nil {
		return r, fmt.Errorf("ddp: %w", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, python, "-c", trainerPy)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, stderr, time.Second
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return r, fmt.Errorf("ddp: start the Python rank: %w", err)
	}
	_, written := in.Write(append(text, '\n'))
	if err := cmd.Wait(); err != nil {
		return r, fmt.Errorf("ddp: the Python rank: %w", err)
	}
	if err := errors.Join(written, json.Unmarshal(out.Bytes(), &r)); err != nil {
		return r, fmt.Errorf("ddp: result of the Python rank: %w", err)
	}
	return r, nil
}

// torchVersion asks without importing PyTorch, which takes seconds.
func torchVersion(ctx context.Context, python string) (string, error) {
	const ask = `
import importlib.util, os, runpy, sys
spec = importlib.util.find_spec("torch")
if spec is None: sys.exit("no module named torch")
print(runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py"))["__version__"])`
	out, err := exec.CommandContext(ctx, python, "-c", ask).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = errors.New(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return "", fmt.Errorf("ddp: -python-exe %s has no PyTorch: %w", python, err)
	}
	return strings.TrimSpace(string(out)), nil
}
