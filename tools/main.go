// Command tools has what the developers of this module run:
//
//	go run -C tools . faults                        # docs/faults.md; Linux, root
//	go run -C tools . faults -trials 300            # needs no root
//
// Faults makes ranks, links and stores fail under running operations, and prints whom the other ranks
// blame. -h lists its flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

// stdio has the streams to which a command writes.
type stdio struct{ out, err io.Writer }

const exitUsage = 2

// usageError is an error for which the program exits with exitUsage.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func main() { os.Exit(dispatch(stdio{os.Stdout, os.Stderr}, os.Args[1:])) }

// dispatch runs the command that args name and returns the exit code.
func dispatch(std stdio, args []string) int {
	if len(args) == 0 || args[0] != "faults" {
		fmt.Fprintln(std.err, "tools: the only command is faults; -h after it lists its flags")
		return exitUsage
	}
	fs := flag.NewFlagSet("tools faults", flag.ContinueOnError)
	fs.SetOutput(std.err)
	run := setupFaults(fs)
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
	fmt.Fprintf(std.err, "tools faults: %v\n", err)
	if errors.As(err, new(usageError)) {
		return exitUsage
	}
	return max(code, 1)
}
