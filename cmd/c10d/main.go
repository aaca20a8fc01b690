// C10d is the companion program of the module: a launcher, a store server, a benchmark and
// diagnostic tools, in one binary.
//
//	c10d COMMAND [FLAGS] [ARGUMENTS]
//
// "c10d help" lists the commands. "c10d help COMMAND" lists a command's flags.
//
// # Running ranks
//
//	c10d run -n 4 -- ./train -epochs 3
//
// starts four ranks of a program on this host. They have the environment variables of
// torchrun, so pg.Init(ctx, "env://") and PyTorch's init_process_group find the other
// ranks. Each line that a rank prints begins with its number:
//
//	[rank2] epoch 1: loss 0.31
//
// Standard output and standard error stay separate. -no-prefix passes bytes on unchanged,
// -log-dir writes one file for each rank instead, -tee does both.
//
// The launcher hosts the store in which the ranks meet. When a rank fails, the launcher waits 200
// ms for other ranks, and longer while one prints a panic. Often the rank at fault does not end
// first. The other ranks get SIGTERM and, after -grace, SIGKILL. Then a summary describes the
// rank at fault:
//
//   - how and when it ended
//   - its error line or panic
//   - its log file
//   - what it wrote to the file that TORCHELASTIC_ERROR_FILE names
//
// One line follows for each other rank that failed. With -max-restarts the ranks start
// again, with TORCHELASTIC_RESTART_COUNT one higher. The launcher passes SIGINT, SIGTERM
// and SIGHUP on; a second one kills the ranks. SIGQUIT shows the stacks of all ranks and
// ends the job. No rank survives the launcher, not even after kill -9. With -json, the
// last line of standard output is the summary as a JSON object.
//
// On several nodes, run it once on each:
//
//	c10d run -n 8 -nnodes 2 -node-rank 0 -master-addr 10.0.0.1 -master-port 29500 -- ./train
//	c10d run -n 8 -nnodes 2 -node-rank 1 -master-addr 10.0.0.1 -master-port 29500 -- ./train
//
// The other nodes must reach two ports of node 0: this one, and one that node 0 picks for
// the ranks' store. The variables that Kubeflow sets for torchrun (PET_NNODES,
// PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_RDZV_ID,
// PET_MAX_RESTARTS) are the defaults of the flags. torchrun's spellings of the flags work
// as well: --nproc_per_node, --node_rank, --rdzv_endpoint and so on.
//
// # Hosting a store
//
//	c10d store -listen :29500 -stats 1m
//
// serves PyTorch's TCPStore until SIGINT or SIGTERM. Ranks may come and go. A rank uses it
// with MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE=True. With -tls-cert and
// -tls-key only Go ranks can join.
//
// # Security
//
//	c10d run -tls -n 4 -- ./train
//	c10d certs -secret job.secret
//	c10d certs -dir certs -n 16 -hosts node1,node2,10.0.0.1
//
// The first command protects all connections of a job on one host with TLS 1.3. The second one makes
// a secret that the hosts of a job share: copy it to each and give -tls-secret job.secret to c10d run.
// The third one makes an authority, and a certificate for each rank and for the launchers: give
// -tls-dir certs. docs/security.md compares them. Only Go ranks speak TLS.
//
// # Looking at a group
//
//	c10d doctor -world 4
//
// starts four local ranks, or joins a group by the environment or -init. It prints the
// wire and the transport between the ranks with the reasons, the algorithm of each
// operation by size, the time and bandwidth between two ranks, and advice. For GPUs it
// prints the driver, the devices, which of them reach each other's memory, and how
// operations on their tensors run. Without GPUs it prints why there are none. -json prints
// the same as JSON.
//
// # Trying a cluster
//
//	c10d rank -script ops.jsonl
//
// is one rank of a job, found by the environment or -init. It runs the operations of a
// file, which is the same on every rank and has one JSON object a line:
//
//	{"op":"all_reduce","dtype":"float32","shape":[3,5],"reduce":"sum","seed":7}
//
// It prints a digest of each result. Ranks of PyTorch may be in the job.
//
// # Measuring
//
//	c10d bench -world 4 -op all_reduce -e 64M
//
// measures an operation over a range of sizes and prints the columns of nccl-tests; -json
// prints records instead. Every element of the results of each size is checked once.
//
//	c10d bench -world 4 -device cuda -op all_reduce -e 1G
//
// measures tensors in the memory of GPUs. Local rank r has GPU r modulo their number
// (-device cuda:0,1 chooses some). The time includes the call, the wait of the rank's
// stream for the operation, and the wait for the stream. For the column
// "queued" the rank makes 20 calls and waits once; it has the time of one. "call" has how long
// such a call took to return. -stream in makes calls part of the stream, as async_op=False
// does in c10d. -work chooses how every all_reduce is done.
//
// -device sim simulates GPUs: its results are checked, its times
// mean nothing.
//
//	c10d bench -world 8 -tune table.txt
//
// measures the algorithms that a group can choose over TCP, and writes their times.
// Groups read the table from gloo.Options.Table or C10D_TABLE. It does not concern shared
// memory. Run it where the ranks will be: on one host with -world, on several
// with "c10d run -nnodes ... -- c10d bench -tune table.txt". With -device cuda it measures the
// ways between GPUs; groups read that table from cuda.Options.Table or C10D_CUDA_TABLE.
//
// # Finding the late rank
//
//	C10D_TRACE=/tmp/job/rank_ c10d run -n 4 -- ./train
//	c10d trace -o job.json /tmp/job/rank*
//
// The first command makes each rank write its last operations to a file, when one fails or when the
// rank gets SIGUSR1. The second one merges these files, and those of PyTorch's flight recorder. It
// prints the collectives that have not ended, and for each the ranks that it lacks. It prints the ranks that called last,
// and sends and receives of Go ranks that have not ended. job.json is for ui.perfetto.dev. -json prints the same as JSON.
//
// # The program itself
//
// "c10d --version" prints the module's version or the commit, the release of Go and the
// platform.
//
// # Exit codes
//
//	0    done
//	1    something failed; for run, the launcher itself
//	2    wrong flags or arguments
//
// run otherwise ends with the exit code of the rank at fault, or 128 plus the number of the
// signal that ended it. If that rank has not ended, or ended with 0, the exit code is that
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

	_ "github.com/c10d-go/c10d/store/redis" // URLs of -init
)

// command is a subcommand. Each file registers its own in an init function.
type command struct {
	name    string
	args    string // what follows the flags, for the usage line
	summary string // one line, no full stop
	example string // a command line
	groups  []group
	hidden  bool // not for people

	// setup defines the flags, and returns a function that runs the command after they are
	// parsed. That function returns the exit code. Its error is printed after "c10d NAME: ".
	setup func(*flag.FlagSet) func(stdio, []string) (int, error)
}

// group is flags that help lists together. Flags in no group come first.
type group struct{ title, flags string }

// stdio has the streams that a command reads and writes.
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
		if len(rest) == 0 || rest[0] == "help" {
			usage(std.out)
			return 0
		}
		name, rest = rest[0], []string{"-h"}
	case "-version", "--version":
		name = "version"
	}
	c, ok := commands[name]
	if !ok {
		fmt.Fprintf(std.err, "c10d: no command %q%s\nsee c10d help\n", name, didYouMean(name, commandNames()))
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
		err = usageError{unknownFlag(err, flags)}
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
	for _, name := range commandNames() {
		fmt.Fprintf(w, "  %-10s %s\n", name, summaryOf(name))
	}
}

// commandNames returns the names of the commands for people, in order.
func commandNames() []string {
	names := []string{"help"}
	for name, c := range commands {
		if !c.hidden {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func summaryOf(name string) string {
	if name == "help" {
		return "list the flags of a command: c10d help COMMAND"
	}
	return commands[name].summary
}

// visible returns the flags that help lists, or those of them that are named.
func visible(flags *flag.FlagSet, names ...string) *flag.FlagSet {
	shown := flag.NewFlagSet(flags.Name(), flag.ContinueOnError)
	flags.VisitAll(func(f *flag.Flag) {
		if f.Usage != hidden && (names == nil || slices.Contains(names, f.Name)) {
			shown.Var(f.Value, f.Name, f.Usage)
			shown.Lookup(f.Name).DefValue = f.DefValue
		}
	})
	return shown
}

func (c command) usage(w io.Writer, flags *flag.FlagSet) {
	grouped := ""
	for _, g := range c.groups {
		grouped += " " + g.flags
	}
	var first []string
	visible(flags).VisitAll(func(f *flag.Flag) {
		if !slices.Contains(strings.Fields(grouped), f.Name) {
			first = append(first, f.Name)
		}
	})
	line := "c10d " + c.name
	if len(first) > 0 {
		line += " [FLAGS]"
	}
	fmt.Fprintf(w, "%s%s\n\nUsage: %s\n", strings.ToUpper(c.summary[:1])+c.summary[1:], ".", strings.TrimSpace(line+" "+c.args))
	if c.example != "" {
		fmt.Fprintf(w, "\nExample: %s\n", c.example)
	}
	for _, g := range append([]group{{"Flags", strings.Join(first, " ")}}, c.groups...) {
		if g.flags == "" {
			continue
		}
		fmt.Fprintf(w, "\n%s:\n", g.title)
		shown := visible(flags, strings.Fields(g.flags)...)
		shown.SetOutput(w)
		shown.PrintDefaults()
	}
}

// version returns the module's version, or the commit from which the binary was built, with the
// release of Go and the platform.
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
