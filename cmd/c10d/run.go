package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/launch/agent"
)

func init() {
	register(command{
		name: "run", args: "[--] COMMAND [ARGUMENTS]", summary: "start the ranks of a program on this host, as torchrun does",
		example: "c10d run -n 4 -- ./train -epochs 3",
		groups: []group{
			{"Flags for several nodes", "nnodes node-rank master-addr master-port run-id rdzv-timeout"},
			{"Flags for output", "no-prefix log-dir tee json q debug debug-token-file"},
			{"Flags for ranks that fail", "max-restarts elastic grace"},
			{"Flags for security", "tls tls-dir tls-secret tls-cert tls-key tls-ca"},
		},
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

// elasticRestarts is the default of -max-restarts with -elastic.
const elasticRestarts = 10

// defaults reads the flags' defaults from the variables that Kubeflow sets for torchrun. It
// has an error for each flag whose variable has a bad value.
type defaults map[string]error

func (d defaults) number(flag, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if low, high, ranged := strings.Cut(text, ":"); ranged && low == high && flag == "nnodes" {
		text = low // of a job that is not elastic
	}
	switch {
	case text == "":
		return otherwise
	case text == "cpu" && flag == "n":
		return runtime.NumCPU()
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		d[flag] = usagef("%s=%q is not a number: give -%s", variable, text, flag)
		return otherwise
	}
	return n
}

// unbracketed returns an IPv6 address without its brackets.
func unbracketed(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		return strings.TrimSuffix(inner, "]")
	}
	return host
}

func setupRun(flags *flag.FlagSet) func(stdio, []string) (int, error) {
	var j agent.Job
	pet := make(defaults)
	j.Procs, j.Nodes = pet.number("n", "PET_NPROC_PER_NODE", 1), pet.number("nnodes", "PET_NNODES", 1)
	flags.Var((*rankCount)(&j.Procs), "n", "start `n` ranks on this node; cpu means one for each CPU")
	flags.Var((*nodeCount)(&j.Nodes), "nnodes", "`n` nodes of the job, each with a c10d run of its own")
	flags.IntVar(&j.NodeRank, "node-rank", pet.number("node-rank", "PET_NODE_RANK", 0), "number `n` of this node, from 0")
	flags.StringVar(&j.MasterAddr, "master-addr", os.Getenv("PET_MASTER_ADDR"), "`host` of node 0 (default 127.0.0.1 for one node)")
	flags.IntVar(&j.MasterPort, "master-port", pet.number("master-port", "PET_MASTER_PORT", 0), "`port` on node 0 (default a free one for one node)")
	flags.StringVar(&j.RunID, "run-id", os.Getenv("PET_RDZV_ID"), "`name` of the job, TORCHELASTIC_RUN_ID, the same on all nodes (default a random one)")
	flags.IntVar(&j.MaxRestarts, "max-restarts", pet.number("max-restarts", "PET_MAX_RESTARTS", 0), "restart all ranks after a failure, at most `n` times, after pauses from 100ms to 30s; with -elastic: start at most n ranks of this node again (default 0, with -elastic 10)")
	flags.Func("elastic", "`min:max` ranks of the job, of all nodes: a rank that fails is started again alone, and the others go on (see docs/elastic.md)", func(s string) (err error) {
		j.Least, j.Most, err = launch.ParseRange(s)
		return err
	})
	flags.DurationVar(&j.Grace, "grace", agent.DefaultGrace, "`duration` from a signal to SIGKILL, and that a node then waits for others; 0 means none")
	flags.DurationVar(&j.Meeting, "rdzv-timeout", agent.DefaultMeeting, "longest `duration` to wait for the other nodes")
	flags.BoolVar(&j.NoPrefix, "no-prefix", false, "pass output on unchanged, without the rank's number")
	flags.StringVar(&j.LogDir, "log-dir", "", "write each rank's output to rank<k>.log in this `directory` instead of showing it; only you can read the files; those of an earlier run are removed")
	flags.BoolVar(&j.Tee, "tee", false, "with -log-dir: show the output as well")
	j.Secrets = credentials.FromEnv(os.Getenv)
	secretFlags(flags, &j.Secrets)
	flags.BoolVar(&j.TLS, "tls", false, "speak TLS 1.3 everywhere, with the files of the other flags, or on one node with a secret made for this run")
	flags.StringVar(&j.SecretsDir, "tls-dir", "", "`directory` of c10d certs: the launcher and each rank have a certificate of their own there")
	flags.StringVar(&j.Debug, "debug", "", "serve a page with the state of all ranks at `host:port` of node 0, such as 127.0.0.1:6060; other addresses than loopback need certificates or a token")
	flags.StringVar(&j.DebugToken, "debug-token-file", os.Getenv(launch.DebugTokenVariable), "`file` with a token that the page asks for, as password ("+launch.DebugTokenVariable+")")
	asJSON := flags.Bool("json", false, "print a summary as a JSON line at the end")
	quiet := flags.Bool("q", false, "print no summary of a failure")

	var meet rendezvous
	ours := torchrunFlags(flags, &meet)

	return func(std stdio, args []string) (int, error) {
		given := make(map[string]bool)
		flags.Visit(func(f *flag.Flag) { given[cmp.Or(ours[f.Name], f.Name)] = true })
		for name, err := range pet {
			if !given[name] {
				return 0, err
			}
		}
		if len(args) == 0 {
			return 0, usagef("no command to run: c10d run -n 2 -- PROGRAM")
		}
		if err := meet.apply(given, &j.MasterAddr, &j.MasterPort, j.Nodes); err != nil {
			return 0, err
		}
		if j.Most > 0 && !given["max-restarts"] && os.Getenv("PET_MAX_RESTARTS") == "" {
			j.MaxRestarts = elasticRestarts
		}
		if j.Tee && j.LogDir == "" {
			return 0, usagef("-tee needs -log-dir")
		}
		if j.Procs < 1 {
			return 0, usagef("-n %d: there must be at least 1 rank", j.Procs)
		}
		if j.Nodes < 1 {
			return 0, usagef("-nnodes %d: there must be at least 1 node", j.Nodes)
		}
		if j.Meeting <= 0 {
			return 0, usagef("-rdzv-timeout %v: it must be positive", j.Meeting)
		}
		if j.MasterAddr != "" {
			host, err := launch.Host("-master-addr", j.MasterAddr)
			if err != nil {
				return 0, usagef("%v", err)
			}
			j.MasterAddr = host
		}
		if _, err := strconv.Atoi(args[0]); err == nil && j.Tee {
			return 0, usagef("-tee takes no value, and no program is called %q", args[0])
		}
		if err := j.CheckSecrets(); err != nil {
			return 0, usagef("%v", err)
		}
		if j.DebugToken != "" && given["debug-token-file"] && j.Debug == "" {
			return 0, usagef("-debug-token-file needs -debug")
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

		// Room for two signals: the second one kills the ranks, further ones change nothing.
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, append(endings(), syscall.SIGQUIT)...)
		defer signal.Stop(signals)
		j.Signals = signals
		if agent.RunsInit() {
			return agent.Init(append([]string{self}, os.Args[1:]...), signals)
		}

		collectEarly()
		s, err := agent.Run(context.Background(), j)
		if err != nil {
			return 1, explainStart(err, args[0])
		}
		if s.Signal == "SIGQUIT" {
			quit()
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

// collectEarly is for programs with stores. These hold little, but strangers can fill them up to their limits, and
// the collector would let garbage double that. So it comes early, which costs such a program little.
func collectEarly() {
	const usual = 100
	if set := debug.SetGCPercent(25); set != usual {
		debug.SetGCPercent(set)
	}
}

// quit does what SIGQUIT does to a Go program: it prints the stacks of all goroutines and
// ends with exit code 2.
func quit() {
	signal.Reset(syscall.SIGQUIT)
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Signal(syscall.SIGQUIT)
	}
	if err == nil {
		select {}
	}
}

// explainStart adds what to do to the error of a command that cannot be started.
func explainStart(err error, command string) error {
	if strings.HasSuffix(command, ".py") && (errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrPermission) || errors.Is(err, syscall.ENOEXEC)) {
		return fmt.Errorf("%w; to run a script name its interpreter: c10d run -n 2 -- python3 %s", err, command)
	}
	if info, e := os.Stat(command); e == nil && errors.Is(err, os.ErrPermission) && info.Mode().IsRegular() && info.Mode()&0o111 == 0 {
		return fmt.Errorf("%w; the file is not executable: chmod +x %s, or name its interpreter", err, command)
	}
	return err
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
