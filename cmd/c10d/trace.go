package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/c10d-go/c10d/internal/ownfile"
	"github.com/c10d-go/c10d/trace"
)

func init() {
	register(command{
		name: "trace", args: "DUMP...", summary: "merge the ranks' dumps of their last operations, and say who was late", example: "c10d trace -o job.json /tmp/job/rank*",
		setup: setupTrace,
	})
}

func setupTrace(flags *flag.FlagSet) func(stdio, []string) (int, error) {
	out := flags.String("o", "", "write a trace of all ranks in the last run for ui.perfetto.dev to this `file`")
	torch := flags.String("torch", "", "write the dumps of the last run to this `directory` in the form that PyTorch's torchfrtrace takes, those of PyTorch's Gloo too")
	late := flags.Int("n", 10, "print the `n` latest calls")
	asJSON := flags.Bool("json", false, "print the report as a JSON object, one for each run")
	return func(std stdio, args []string) (int, error) {
		if len(args) == 0 {
			return 0, usagef("no dumps: give the files of all ranks, such as /tmp/job/rank*")
		}
		if *late < 0 {
			return 0, usagef("-n %d: there cannot be fewer than 0 calls", *late)
		}
		var files []*trace.File
		for _, name := range args {
			f, err := trace.ReadFile(name)
			if err != nil {
				return 0, err
			}
			files = append(files, f)
		}
		var jobs []*trace.Job
		for _, run := range trace.Runs(files) {
			j, err := trace.Merge(run)
			if err != nil {
				return 0, err
			}
			jobs = append(jobs, j)
		}
		j := jobs[len(jobs)-1]
		if *out != "" {
			if err := writeChrome(*out, j); err != nil {
				return 0, err
			}
		}
		if *torch != "" {
			if err := j.WriteTorch(*torch); err != nil {
				return 0, err
			}
		}
		e := json.NewEncoder(std.out)
		e.SetIndent("", "  ")
		if len(jobs) > 1 && !*asJSON {
			fmt.Fprintf(std.out, "The dumps are of %d runs, which are not compared.", len(jobs))
			if *out != "" || *torch != "" {
				fmt.Fprint(std.out, " The last one alone is written.")
			}
			fmt.Fprintln(std.out)
		}
		for _, j := range jobs {
			var err error
			switch {
			case *asJSON:
				err = e.Encode(j)
			default:
				if len(jobs) > 1 {
					fmt.Fprintln(std.out)
				}
				err = j.Print(std.out, *late)
			}
			if err != nil {
				return 0, err
			}
		}
		return 0, nil
	}
}

// writeChrome writes a trace to a file. It refuses to replace a dump: "-o /tmp/job/rank_*" names one.
func writeChrome(name string, j *trace.Job) error {
	if _, err := trace.ReadFile(name); err == nil {
		return fmt.Errorf("-o: %s is a rank's dump: name another file for the trace", name)
	}
	var b bytes.Buffer
	if err := j.WriteChrome(&b); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	info, err := os.Lstat(name)
	switch {
	case err != nil || info.Mode().IsRegular():
		return ownfile.Replace(name, b.Bytes())
	case ownfile.Foreign(info):
		return ownfile.Explain(name, errors.New("-o: no file of this user"))
	}
	return os.WriteFile(name, b.Bytes(), 0o600) // such as /dev/stdout
}
