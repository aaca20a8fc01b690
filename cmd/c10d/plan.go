package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/c10d-go/c10d/internal/cluster"
)

func init() {
	register(command{
		name: "plan", args: "FILE...", summary: "print plans of collectives of several clusters, which C10D_PLANS has kept",
		setup: setupPlan,
	})
}

func setupPlan(*flag.FlagSet) func(stdio, []string) (int, error) {
	return func(std stdio, args []string) (int, error) {
		if len(args) == 0 {
			return 0, usagef("no plans: give files of a directory that C10D_PLANS has named")
		}
		for _, name := range args {
			f, err := os.Open(name)
			if err != nil {
				return 0, err
			}
			p, err := (*cluster.Layout)(nil).Import(f)
			f.Close()
			if err != nil {
				return 0, fmt.Errorf("%s: %w", name, err)
			}
			fmt.Fprintf(std.out, "# %s: %v of %d bytes, rank %d, steps between clusters %d\n%v", name, p.Call.Op, p.Call.Bytes, p.Call.Rank, p.IDs, p)
		}
		return 0, nil
	}
}
