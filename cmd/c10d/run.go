package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/c10d-go/c10d/internal/launch/agent"
)

func init() {
	register(command{
		name: "run", args: "[--] COMMAND [ARGUMENTS]", summary: "start the ranks of a program on this host, as torchrun does",
		setup: setupRun,
	})
	register(command{
		name: "guard", summary: "kill the process groups named on standard input when it ends", hidden: true,
		setup: func(*flag.FlagSet) func(stdio, []string) (int, error) {
			return func(std stdio, _ []string) (int, error) {
				agent.Guard(std.in)
				return 0, nil
			}
		},
	})
}

// defaults are the flags' defaults from the variables that Kubeflow sets for
// torchrun. What cannot be used is an error unless the flag is given.
type defaults map[string]error

func (d defaults) number(flag, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if low, high, ranged := strings.Cut(text, ":"); ranged && low == high {
		text = low // PET_NNODES of a job that is not elastic
	}
	switch {
	case text == "":
		return otherwise
	case text == "cpu":
		return runtime.NumCPU()
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		d[flag] = usagef("%s=%q is not a number: give -%s", variable, text, flag)
		return otherwise
	}
	return n
}

func setupRun(flags *flag.FlagSet) func(stdio, []string) (int, error) {
	var j agent.Job
	pet := make(defaults)
	flags.IntVar(&j.Procs, "n", pet.number("n", "PET_NPROC_PER_NODE", 1), "start `N` ranks on this node")
	flags.IntVar(&j.Nodes, "nnodes", pet.number("nnodes", "PET_NNODES", 1), "`number` of nodes, each with a c10d run of its own")
	flags.IntVar(&j.NodeRank, "node-rank", pet.number("node-rank", "PET_NODE_RANK", 0), "which `node` this is, from 0")
	flags.StringVar(&j.MasterAddr, "master-addr", os.Getenv("PET_MASTER_ADDR"), "`host` of node 0 (one node: 127.0.0.1)")
	flags.IntVar(&j.MasterPort, "master-port", pet.number("master-port", "PET_MASTER_PORT", 0), "`port` on node 0 (one node: a free one)")
	flags.StringVar(&j.RunID, "run-id", os.Getenv("PET_RDZV_ID"), "the job's `name`, TORCHELASTIC_RUN_ID (default a random one)")
	flags.IntVar(&j.MaxRestarts, "max-restarts", pet.number("max-restarts", "PET_MAX_RESTARTS", 0), "start all ranks again after a failure, up to `N` times")
	flags.DurationVar(&j.Grace, "grace", agent.DefaultGrace, "`time` between a signal and SIGKILL; 0 is none")
	flags.DurationVar(&j.Meeting, "rdzv-timeout", agent.DefaultMeeting, "how `long` to wait for the other nodes")
	flags.BoolVar(&j.NoPrefix, "no-prefix", false, "pass output on as it comes, without the rank's number")
	flags.StringVar(&j.LogDir, "log-dir", "", "write each rank's output to rank<k>.log in `DIR` instead of showing it")
	flags.BoolVar(&j.Tee, "tee", false, "with -log-dir, show the output as well")
	asJSON := flags.Bool("json", false, "print a summary as one JSON line at the end")
	quiet := flags.Bool("q", false, "print no summary of a failure")

	return func(std stdio, args []string) (int, error) {
		flags.Visit(func(f *flag.Flag) { delete(pet, f.Name) })
		for _, err := range pet {
			return 0, err
		}
		if len(args) == 0 {
			return 0, usagef("which command?")
		}
		if j.Tee && j.LogDir == "" {
			return 0, usagef("-tee needs -log-dir")
		}
		if j.Procs < 1 {
			return 0, usagef("-n %d", j.Procs)
		}
		if j.Grace <= 0 {
			j.Grace = -1
		}
		j.Command = args
		j.Stdout, j.Stderr = std.out, std.err
		j.Color = os.Getenv("NO_COLOR") == "" && isTerminal(std.out) && isTerminal(std.err)
		j.Logf = func(format string, args ...any) { fmt.Fprintf(std.err, "c10d run: "+format+"\n", args...) }
		self, err := os.Executable()
		if err != nil {
			return 1, err
		}
		j.Guard = []string{self, "guard"}

		// Two, because the second one matters; more are the same as that.
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, endings()...)
		defer signal.Stop(signals)
		j.Signals = signals

		s, err := agent.Run(context.Background(), j)
		if err != nil {
			return 1, err
		}
		if !s.OK && s.Signal == "" && !*quiet {
			fmt.Fprintf(std.err, "c10d run: %s", s.Report())
		}
		if *asJSON {
			if err := json.NewEncoder(std.out).Encode(s); err != nil {
				return 1, err
			}
		}
		return s.ExitCode, nil
	}
}

// endings are the signals that end the program, without SIGHUP under nohup.
func endings() []os.Signal {
	all := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		all = append(all, syscall.SIGHUP)
	}
	return all
}

// isTerminal reports whether w is one, so that people see colours and files do not.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
