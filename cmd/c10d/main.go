// C10d is the companion program of the module: a launcher, a store server, a
// probe and a benchmark, in one binary.
//
//	c10d COMMAND [FLAGS] [ARGUMENTS]
//
// "c10d help" lists the commands, "c10d help COMMAND" or "c10d COMMAND -h" tells
// a command's flags.
//
// # Running ranks
//
//	c10d run -n 4 -- ./train -epochs 3
//
// starts four ranks of a program on this host with the environment variables of
// torchrun, so that pg.Init(ctx, "env://") or PyTorch's init_process_group finds
// the others. Each line that a rank prints comes out behind its number:
//
//	[rank2] epoch 1: loss 0.31
//
// Standard output and standard error stay apart. -no-prefix passes bytes on as
// they come, -log-dir writes one file a rank instead, -tee does both.
//
// The store that the ranks meet in lives in the launcher. When a rank fails, the
// launcher waits 200 ms for others, and longer while one prints a panic. (The rank that
// ends first is often not the one at fault.) The others get SIGTERM, then, after -grace,
// SIGKILL. A summary then shows of the rank at fault: how and when it ended, its error
// line or panic, its log file, and what it wrote to the file that TORCHELASTIC_ERROR_FILE
// names. One line follows for each other rank that failed. With -max-restarts the ranks are started again, with
// TORCHELASTIC_RESTART_COUNT one higher. SIGINT, SIGTERM and SIGHUP are passed on; a
// second one kills at once. SIGQUIT shows the stacks of all ranks and ends the job.
// Nothing survives the launcher, not even after kill -9.
//
// On several nodes, run it once on each:
//
//	c10d run -n 8 -nnodes 2 -node-rank 0 -master-addr 10.0.0.1 -master-port 29500 -- ./train
//	c10d run -n 8 -nnodes 2 -node-rank 1 -master-addr 10.0.0.1 -master-port 29500 -- ./train
//
// Node 0 needs that port open to the other nodes, and one more that it picks for
// the ranks' store. The variables PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
// PET_MASTER_ADDR, PET_MASTER_PORT, PET_RDZV_ID and PET_MAX_RESTARTS, which
// Kubeflow sets for torchrun, are the flags' defaults. torchrun's spellings with the same
// meaning do as well: --nproc_per_node, --node_rank, --rdzv_endpoint and so on.
//
// With -json, the last line of standard output is the summary as a JSON object.
//
// # Hosting a store
//
//	c10d store -listen :29500 -stats 1m
//
// serves PyTorch's TCPStore until SIGINT or SIGTERM, for ranks that come and go.
// Ranks use it with TORCHELASTIC_USE_AGENT_STORE=True beside MASTER_ADDR and
// MASTER_PORT. With -tls-cert and -tls-key or -token-file only Go ranks can join.
//
// # Looking at a group
//
//	c10d doctor -world 4
//
// starts that many local ranks, or joins a group by the environment or -init, and
// tells which wire and which transport its ranks have to each other and why, which
// algorithm an operation takes up to which size, what two ranks get of the
// link between them, and what could be better. Where there are GPUs it tells their
// driver, what they are, which of them reach each other's memory, and how operations
// on their tensors are done and why; where there are none, why not. -json prints the
// same for programs.
//
// # Trying a cluster
//
//	c10d rank -script ops.jsonl
//
// is one rank of a job, joined by the environment or -init, that runs the
// operations of a file, one JSON object a line, the same on every rank:
//
//	{"op":"all_reduce","dtype":"float32","shape":[3,5],"reduce":"sum","seed":7}
//
// and prints a digest of what each gave. Ranks of PyTorch may be in the job: -torch
// tells which generation where the store cannot.
//
//	c10d bench -world 4 -op all_reduce -e 64M
//
// measures an operation over a range of sizes and prints what nccl-tests
// prints; -json prints records instead. Every element of the results of each size is
// checked once, in outputs that held no numbers before.
//
//	c10d bench -world 4 -device cuda -op all_reduce -e 1G
//
// does so with tensors in the memory of GPUs, which the local ranks take in turn
// (-device cuda:0,1 says which). The time is that of a call, of the rank's stream
// ordered after it by Synchronize, and of waiting for the stream; "queued" is what
// an operation takes when 20 are called before the stream is waited for. -work has
// one work do every all_reduce, where the best usable would have been taken.
// -device sim is GPUs in software: it tries the same way on any machine, and its
// times mean nothing.
//
//	c10d bench -world 8 -tune table.txt
//
// measures the algorithms between which a group chooses over TCP and writes how fast
// each is; groups take the table from gloo.Options.Table or C10D_TABLE. It concerns
// neither shared memory nor GPUs. Run it where the ranks will be: on one host with
// -world, on several with "c10d run -nnodes ... -- c10d bench -tune table.txt".
//
//	c10d bench -load ours.jsonl -beside gloo.jsonl,openmpi.jsonl -bars bars.txt
//
// prints tables of records that there are, with peers' times and the ratios, and
// tells which bars of a file hold. The folder bench has programs that measure peers.
//
//	c10d simulate -op all_reduce -ranks 64,512,4096 -per-host 8 -latency 5us -bandwidth 400Gbit
//
// runs the same algorithms on a model of a network, and prints their times and
// traffic beside the formulas of ring and tree.
//
// # Exit codes
//
//	0    done
//	1    something failed; for run, the launcher itself
//	2    wrong flags or arguments
//
// run otherwise ends with the exit code of the rank at fault, 128 plus the signal's
// number if a signal ended that. If that rank had not ended, or with 0, it is the code
// of the first rank that failed.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// command is a subcommand. A file adds one by registering it in its init.
type command struct {
	name    string
	args    string // what follows the flags, for the usage line
	summary string // one line, no full stop
	hidden  bool   // not for people

	// setup defines the flags and returns what runs once they are parsed. It
	// returns the exit code; an error is printed behind "c10d NAME: ".
	setup func(*flag.FlagSet) func(stdio, []string) (int, error)
}

// stdio is what a command reads and writes.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

const exitUsage = 2

// usageError is an error for which the program exits with exitUsage.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return usageError{fmt.Sprintf(format, args...)} }

var commands = make(map[string]command)

func register(c command) { commands[c.name] = c }

func init() {
	register(command{
		name: "version", summary: "print the program's version",
		setup: func(*flag.FlagSet) func(stdio, []string) (int, error) {
			return func(std stdio, args []string) (int, error) {
				if len(args) > 0 {
					return 0, usagef("unexpected argument %q", args[0])
				}
				_, err := fmt.Fprintln(std.out, version())
				return 0, err
			}
		},
	})
}

func main() {
	os.Exit(dispatch(stdio{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:]))
}

// dispatch runs the command that args name and returns the exit code.
func dispatch(std stdio, args []string) int {
	if len(args) == 0 {
		usage(std.err)
		return exitUsage
	}
	name, rest := args[0], args[1:]
	switch name {
	case "help", "-h", "-help", "--help":
		if len(rest) == 0 {
			usage(std.out)
			return 0
		}
		name, rest = rest[0], []string{"-h"}
	}
	c, ok := commands[name]
	if !ok {
		fmt.Fprintf(std.err, "c10d: no command %q; see c10d help\n", name)
		return exitUsage
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	run := c.setup(flags)
	code, err := 0, flags.Parse(rest)
	if errors.Is(err, flag.ErrHelp) {
		c.usage(std.out, flags)
		return 0
	}
	if err != nil {
		err = usageError{err.Error()}
	} else {
		code, err = run(std, flags.Args())
	}
	if err == nil {
		return code
	}
	fmt.Fprintf(std.err, "c10d %s: %v\n", name, err)
	if errors.As(err, new(usageError)) {
		fmt.Fprintf(std.err, "see c10d help %s\n", name)
		return exitUsage
	}
	return max(code, 1)
}

func usage(w io.Writer) {
	fmt.Fprint(w, "c10d runs and serves groups of ranks that compute together.\n\nUsage: c10d COMMAND [FLAGS] [ARGUMENTS]\n\nCommands:\n")
	names := []string{"help"}
	for name, c := range commands {
		if !c.hidden {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		summary := commands[name].summary
		if name == "help" {
			summary = "tell about a command: c10d help COMMAND"
		}
		fmt.Fprintf(w, "  %-9s %s\n", name, summary)
	}
}

func (c command) usage(w io.Writer, flags *flag.FlagSet) {
	shown := flag.NewFlagSet(c.name, flag.ContinueOnError)
	hasFlags := false
	flags.VisitAll(func(f *flag.Flag) {
		if f.Usage != hidden {
			shown.Var(f.Value, f.Name, f.Usage)
			shown.Lookup(f.Name).DefValue = f.DefValue
			hasFlags = true
		}
	})
	line := "c10d " + c.name
	if hasFlags {
		line += " [FLAGS]"
	}
	fmt.Fprintf(w, "%s%s\n\nUsage: %s\n", strings.ToUpper(c.summary[:1])+c.summary[1:], ".", strings.TrimSpace(line+" "+c.args))
	if hasFlags {
		fmt.Fprint(w, "\nFlags:\n")
		shown.SetOutput(w)
		shown.PrintDefaults()
	}
}

// version tells the module's version, or the commit that the binary is of.
func version() string {
	v := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		v = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
				v = s.Value
			}
		}
	}
	return fmt.Sprintf("c10d %s %s %s/%s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
