// Command tools has what the developers of this module run:
//
//	go run -C tools . faults                        # docs/faults.md; Linux, root
//	go run -C tools . faults -trials 300            # needs no root
//	go run -C tools . simulate -op all_reduce -ranks 64,512,4096 -per-host 8
//
// Faults makes ranks, links and stores fail under running operations, and prints whom the other ranks
// blame. Simulate runs the plan of an operation on a model of a network (docs/simulation.md). Each has -h.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

// commands are the subcommands. Each defines its flags, and returns a function that runs it after they
// are parsed and returns the exit code.
var commands = map[string]func(*flag.FlagSet) func(stdio, []string) (int, error){
	"faults":   setupFaults,
	"simulate": setupSimulate,
}

// stdio has the streams to which a command writes.
type stdio struct{ out, err io.Writer }

const exitUsage = 2

// usageError is an error for which the program exits with exitUsage.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func main() { os.Exit(dispatch(stdio{os.Stdout, os.Stderr}, os.Args[1:])) }

// dispatch runs the command that args name and returns the exit code.
func dispatch(std stdio, args []string) int {
	if len(args) == 0 || commands[args[0]] == nil {
		fmt.Fprintln(std.err, "tools: give a command, faults or simulate; -h after it lists its flags")
		return exitUsage
	}
	fs := flag.NewFlagSet("tools "+args[0], flag.ContinueOnError)
	fs.SetOutput(std.err)
	run := commands[args[0]](fs)
	switch err := fs.Parse(args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	}
	code, err := run(std, fs.Args())
	if err == nil {
		return code
	}
	fmt.Fprintf(std.err, "tools %s: %v\n", args[0], err)
	if errors.As(err, new(usageError)) {
		return exitUsage
	}
	return max(code, 1)
}
