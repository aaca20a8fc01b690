package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/tools/internal/faults"
)

// faultFlags are the flags of "tools faults".
type faultFlags struct {
	wires, faults, ops, stores string
	ranks                      int
	random, trials             int
	soak, within               time.Duration
	seed                       uint64
	parallel                   int
	python, load               string
	json                       bool
}

func setupFaults(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	var f faultFlags
	fs.StringVar(&f.wires, "wire", "", "only the wires whose `name` contains one of these words; commas separate them")
	fs.StringVar(&f.faults, "fault", "", "only the faults whose `name` contains one of these words")
	fs.StringVar(&f.ops, "op", "", "only these `operations`")
	fs.StringVar(&f.stores, "store", string(faults.TCPStore), "with -trials, only the stores whose `name` contains one of these words; Redis needs redis-server")
	fs.DurationVar(&f.within, "within", 2*time.Second, "with -trials, `limit` of a Reconfigure while no fault comes; 10s more while a process stands still; 0 means none")
	fs.IntVar(&f.ranks, "ranks", faults.LeastRanks, "`n` ranks in the cases of the table, 3 at least")
	fs.IntVar(&f.random, "random", 0, "instead of the table, try `n` random cases on each wire of this library")
	fs.IntVar(&f.trials, "trials", 0, "instead of the table, try `n` jobs on each wire of this library that go on after several random faults; needs neither root nor Linux's namespaces")
	fs.DurationVar(&f.soak, "soak", 0, "instead of the table, run one job on each wire of this library at once, for so `long`, with deaths and returns; needs what -trials needs, and Linux")
	fs.Uint64Var(&f.seed, "seed", rand.Uint64()>>32, "first `seed` of the cases; case i has seed + i")
	fs.IntVar(&f.parallel, "parallel", runtime.NumCPU(), "run `n` cases at a time")
	fs.StringVar(&f.python, "python", "/usr/bin/python3", "interpreter with PyTorch, a `file`; empty leaves PyTorch out")
	fs.StringVar(&f.load, "load", "", "print the tables of a `file` of records, and run nothing")
	fs.BoolVar(&f.json, "json", false, "print one JSON object for each case instead of tables")
	return func(std stdio, args []string) (int, error) {
		if isRole, err := faults.Role(); isRole {
			return 0, err
		}
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		if f.soak < 0 {
			return 0, usagef("-soak %v must not be negative", f.soak)
		}
		if f.random < 0 || f.trials < 0 || f.parallel < 1 {
			return 0, usagef("-random %d, -trials %d and -parallel %d: the first two must not be negative, -parallel must be positive", f.random, f.trials, f.parallel)
		}
		if f.ranks < faults.LeastRanks || f.ranks > mostRanks {
			return 0, usagef("-ranks %d is not within %d to %d", f.ranks, faults.LeastRanks, mostRanks)
		}
		if err := f.checkWords(); err != nil {
			return 0, err
		}
		if f.trials > 0 {
			return f.tryAll(std)
		}
		if f.soak > 0 {
			return f.soakAll(std)
		}
		return f.run(std)
	}
}

// checkWords refuses words that pick nothing.
func (f *faultFlags) checkWords() error {
	for _, x := range []struct {
		flag, list string
		names      []string
	}{
		{"wire", f.wires, texts(faults.Wires)}, {"fault", f.faults, texts(faults.Faults)}, {"op", f.ops, faults.Operations}, {"store", f.stores, texts(faults.StoreKinds)},
	} {
		for word := range strings.SplitSeq(x.list, ",") {
			if !slices.ContainsFunc(x.names, func(name string) bool { return picks(word, name) && (x.flag != "op" || word == "" || word == name) }) {
				return usagef("-%s: %q picks none of: %s", x.flag, word, strings.Join(x.names, ", "))
			}
		}
	}
	return nil
}

func texts[S ~string](all []S) (names []string) {
	for _, s := range all {
		names = append(names, string(s))
	}
	return names
}

// mostRanks is how many hosts have an address in a lab.
const mostRanks = 250

// picks reports whether a list of words picks a name, in letters of any case.
func picks(list, name string) bool {
	name = strings.ToLower(name)
	return list == "" || slices.ContainsFunc(strings.Split(strings.ToLower(list), ","), func(word string) bool { return strings.Contains(name, word) })
}

func (f *faultFlags) cases() (all []faults.Case) {
	wires := slices.DeleteFunc(slices.Clone(faults.Wires), func(w faults.Wire) bool {
		return !picks(f.wires, string(w)) || w == faults.Torch && (f.python == "" || f.random > 0)
	})
	for i := range f.random {
		for _, w := range wires {
			all = append(all, faults.Random(w, f.seed+uint64(i)))
		}
	}
	for _, w := range wires {
		if f.random > 0 {
			break
		}
		for _, c := range faults.CasesOf(w, f.ranks, rand.New(rand.NewPCG(f.seed, 1))) {
			if picks(f.faults, string(c.Fault)) && (f.ops == "" || slices.Contains(strings.Split(f.ops, ","), c.Op)) {
				all = append(all, c)
			}
		}
	}
	return all
}

func (f *faultFlags) run(std stdio) (int, error) {
	if f.load != "" {
		all, err := faults.Load(f.load)
		if err == nil {
			printFaults(std, all)
		}
		return 0, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cases := f.cases()
	if len(cases) == 0 {
		return 0, usagef("no case is left by -wire %q, -fault %q, -op %q, -random %d and -python %q", f.wires, f.faults, f.ops, f.random, f.python)
	}
	fmt.Fprintf(std.err, "%d cases, -seed %d\n", len(cases), f.seed)
	records := make([]*faults.Record, len(cases))
	var mu sync.Mutex
	var failed error
	code, next := 0, 0
	done := func(i int, x *faults.Record, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			code = 1
			fmt.Fprintf(std.err, "case %d: %v: cannot be tried: %v\n", i, &cases[i], err)
			return
		}
		records[i] = x
		if f.json {
			json.NewEncoder(std.out).Encode(x)
		}
		if problems := x.Problems(); len(problems) > 0 && x.Wire != faults.Torch {
			code = 1
			fmt.Fprintf(std.err, "case %d: %v:\n  %s\n%s", i, &cases[i], strings.Join(problems, "\n  "), strings.Join(x.Logs, ""))
		}
	}
	var wg sync.WaitGroup
	for n := range min(f.parallel, len(cases)) {
		wg.Go(func() {
			lab, err := faults.NewLab(fmt.Sprint(n), max(faults.MostHosts, f.ranks))
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
				return
			}
			defer lab.Close()
			lab.Python = f.python
			for ctx.Err() == nil {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= len(cases) {
					return
				}
				x, err := lab.Run(ctx, cases[i])
				done(i, x, err)
			}
		})
	}
	wg.Wait()
	if failed != nil {
		return 0, failed
	}
	var all []faults.Record
	good := 0
	for _, x := range records {
		if x != nil {
			all = append(all, *x)
			if len(x.Problems()) == 0 {
				good++
			}
		}
	}
	if f.random > 0 {
		fmt.Fprintf(std.err, "%d of %d cases without a problem\n", good, len(all))
	} else if !f.json {
		printFaults(std, all)
	}
	return code, ctx.Err()
}

// tryAll runs trials.
func (f *faultFlags) tryAll(std stdio) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var trials []faults.Trial
	for i := range f.trials {
		for _, w := range faults.Wires {
			for _, s := range faults.StoreKinds {
				if w != faults.Torch && picks(f.wires, string(w)) && picks(f.stores, string(s)) {
					t := faults.RandomTrial(w, s, f.seed+uint64(i))
					t.Within = f.within
					trials = append(trials, t)
				}
			}
		}
	}
	if len(trials) == 0 {
		return 0, usagef("no trial is left by -wire %q: PyTorch's ranks do not go on", f.wires)
	}
	fmt.Fprintf(std.err, "%d trials, -seed %d\n", len(trials), f.seed)
	var mu sync.Mutex
	next, tried, good, epochs := 0, 0, 0, 0
	var all []*faults.Outcome
	var wg sync.WaitGroup
	for range min(f.parallel, len(trials)) {
		wg.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= len(trials) {
					return
				}
				t := &trials[i]
				x, err := t.Run(ctx)
				mu.Lock()
				switch {
				case ctx.Err() != nil:
				case err != nil:
					tried++
					fmt.Fprintf(std.err, "trial %v: cannot be tried: %v\n", t, err)
				default:
					tried++
					epochs += x.Epochs
					all = append(all, x)
					if len(x.Problems) == 0 {
						good++
					} else {
						fmt.Fprintf(std.err, "trial %v:\n  %s\n", t, strings.Join(x.Problems, "\n  "))
					}
					if f.json {
						json.NewEncoder(std.out).Encode(x)
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	fmt.Fprintf(std.err, "%d of %d trials without a problem, %d epochs\n", good, tried, epochs)
	if !f.json {
		fmt.Fprint(std.out, faults.ChangesTable(all))
	}
	if good < tried {
		return 1, ctx.Err()
	}
	return 0, ctx.Err()
}

// soakAll runs a job on each wire.
func (f *faultFlags) soakAll(std stdio) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var trials []faults.Trial
	for _, w := range faults.Wires {
		if w != faults.Torch && picks(f.wires, string(w)) {
			trials = append(trials, faults.RandomSoak(w, f.seed, f.soak))
		}
	}
	if len(trials) == 0 {
		return 0, usagef("no soak is left by -wire %q: PyTorch's ranks do not go on", f.wires)
	}
	fmt.Fprintf(std.err, "%d jobs for %v, -seed %d\n", len(trials), f.soak, f.seed)
	all := make([]*faults.Outcome, len(trials))
	errs := make([]error, len(trials))
	var wg sync.WaitGroup
	for i := range trials {
		wg.Go(func() { all[i], errs[i] = trials[i].Run(ctx) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return 1, err
	}
	code := 0
	for _, x := range all {
		for _, p := range append(x.Problems, x.Growth()...) {
			code = 1
			fmt.Fprintf(std.err, "%s: %s\n", x.Wire, p)
		}
		if f.json {
			json.NewEncoder(std.out).Encode(x)
		}
	}
	if !f.json {
		fmt.Fprint(std.out, faults.SoakTable(all))
	}
	return code, nil
}

func printFaults(std stdio, all []faults.Record) {
	fmt.Fprintf(std.out, "%s\n\n%s\n", faults.Table(all), faults.SaysTable(all))
}
