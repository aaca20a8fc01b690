package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/script"
)

// options are the program's flags.
type options struct {
	python, label, c10d string
	seed                uint64
	only                string
	quick, short        bool
	log                 io.Writer
}

func main() {
	o := options{log: os.Stderr}
	flag.StringVar(&o.python, "python", "/usr/bin/python3", "`command` that starts a Python with PyTorch; it must see the folder for temporary files")
	flag.StringVar(&o.label, "label", "", "`name` of this PyTorch in tables (default its version)")
	flag.StringVar(&o.c10d, "c10d", "", "`file` of the program c10d (default: built from this checkout)")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64(), "`number` from which the random script is drawn")
	flag.StringVar(&o.only, "run", "", "run only jobs whose name fits this `regexp`")
	flag.BoolVar(&o.quick, "quick", false, "one job of each kind: leave out those that repeat others in other places")
	flag.BoolVar(&o.short, "short", false, "one world of two ranks, and a part of the operations, instead of the matrix")
	file := flag.String("json", "", "write the outcome to this `file`")
	table := flag.Bool("table", false, "print a Markdown table of the outcomes in the files that are the arguments, and run nothing")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := command(ctx, o, *file, *table, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func command(ctx context.Context, o options, file string, table bool, args []string) (bool, error) {
	if table {
		var all []*Outcome
		for _, name := range args {
			text, err := os.ReadFile(name)
			if err != nil {
				return false, err
			}
			x := new(Outcome)
			if err := json.Unmarshal(text, x); err != nil {
				return false, fmt.Errorf("interop: %s: %w", name, err)
			}
			all = append(all, x)
		}
		return true, markdown(os.Stdout, all)
	}
	if len(args) > 0 {
		return false, fmt.Errorf("interop: unexpected argument %q", args[0])
	}
	x, err := run(ctx, o)
	if err != nil {
		return false, err
	}
	if file != "" {
		text, err := json.MarshalIndent(x, "", "\t")
		if err != nil {
			return false, err
		}
		if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
			return false, err
		}
	}
	return len(x.Unexplained) == 0, summary(os.Stdout, x)
}

// run does everything against one PyTorch.
func run(ctx context.Context, o options) (*Outcome, error) {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, err
	}
	l, x, err := setup(ctx, o)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(l.dir)
	start := time.Now()
	x.Seed = o.seed
	say := func(format string, args ...any) {
		fmt.Fprintf(o.log, "%6.1f s  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	say("PyTorch %s, random script from -seed %d", x.Torch, o.seed)
	taken, err := l.ask(ctx, x)
	if err != nil {
		return nil, err
	}
	say("PyTorch takes %d of %d cells", len(taken), len(x.Cells))
	for _, same := range jobs(l.version, taken, o.seed, o.quick, o.short) {
		var want [][]script.Result
		for i, j := range same {
			if i > 0 && !only.MatchString(j.Name) || !slices.ContainsFunc(same[1:], func(j job) bool { return only.MatchString(j.Name) }) {
				continue
			}
			begun := time.Now()
			if j.IPv6 && os.Getenv("C10D_REQUIRE_SERVICES") != "1" {
				_, leave, err := onlyIPv6(ctx)
				if err != nil {
					x.Skipped = append(x.Skipped, Job{Kind: j.Kind, Name: j.Name, Size: j.Size, Error: err.Error()})
					say("%d ranks, %s: left out, %v", j.Size, j.Name, err)
					continue
				}
				leave()
			}
			got, err := l.run(ctx, j)
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			r := Job{Kind: j.Kind, Name: j.Name, Size: j.Size, Go: j.Go, Lines: len(j.lines), Seconds: time.Since(begun).Seconds()}
			switch {
			case err != nil:
				r.Error = err.Error()
			case i == 0:
				want = got
				if bad := firstError(got); bad != "" {
					r.Error = bad
				}
			default:
				x.compare(&r, j, want, got)
			}
			x.job(r)
			say("%s", r)
			if i == 0 && r.Error != "" {
				break
			}
		}
	}
	for _, r := range append(l.mismatches(ctx, only, o.quick), l.deaths(ctx, only, o.quick)...) {
		x.job(r)
		say("%s", r)
	}
	x.Seconds = time.Since(start).Seconds()
	return x, nil
}

func firstError(all [][]script.Result) string {
	for _, results := range all {
		for _, r := range results {
			if r.Error != "" {
				return fmt.Sprintf("operation %d, %s: %s", r.I, r.Op, r.Error)
			}
		}
	}
	return ""
}

// inquiry prints PyTorch's version and features.
const inquiry = `
import json, sys, torch, torch.distributed as dist
try:
    dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)
    lacks = False
except Exception as e:
    lacks = "without libuv" in str(e)
print(json.dumps({"version": torch.__version__, "python": sys.executable, "lacks_libuv": lacks}))
`

// setup makes a folder with the programs, and asks PyTorch for its version.
func setup(ctx context.Context, o options) (_ *lab, _ *Outcome, err error) {
	l := &lab{python: strings.Fields(o.python)}
	if len(l.python) == 0 {
		return nil, nil, errors.New("interop: -python is empty")
	}
	cmd := exec.CommandContext(ctx, l.python[0], append(slices.Clone(l.python[1:]), "-c", inquiry)...)
	cmd.Stderr = o.log
	answer, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("interop: no PyTorch at %s: %w", o.python, err)
	}
	var who struct {
		Version, Python string
		LacksLibuv      bool `json:"lacks_libuv"`
	}
	if err := json.Unmarshal(answer, &who); err != nil {
		return nil, nil, fmt.Errorf("interop: %s printed %q: %w", o.python, answer, err)
	}
	l.inner, l.noUV = who.Python, who.LacksLibuv
	if l.version, err = parseVersion(who.Version); err != nil {
		return nil, nil, err
	}
	x := &Outcome{Label: o.label, Torch: who.Version}
	if x.Label == "" {
		x.Label = who.Version
	}
	if l.dir, err = os.MkdirTemp("", "interop"); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(l.dir)
		}
	}()
	if err := os.WriteFile(l.rank(), rankPy, 0o644); err != nil {
		return nil, nil, err
	}
	if o.c10d == "" {
		build := exec.CommandContext(ctx, "go", "build", "-o", l.c10d(), "./cmd/c10d")
		build.Dir = ".."                                  // go run -C and go test run in this module's folder
		build.Env = append(os.Environ(), "CGO_ENABLED=0") // it must run in another system
		build.Stdout, build.Stderr = o.log, o.log
		if err := build.Run(); err != nil {
			return nil, nil, fmt.Errorf("interop: building c10d: %w", err)
		}
	} else {
		program, err := os.ReadFile(o.c10d)
		if err != nil {
			return nil, nil, err
		}
		if err := os.WriteFile(l.c10d(), program, 0o755); err != nil {
			return nil, nil, err
		}
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		x.Go = info.GoVersion
	}
	return l, x, nil
}

// ask runs every cell in a group of PyTorch ranks, notes which are refused, and returns the
// others.
func (l *lab) ask(ctx context.Context, x *Outcome) ([]script.Line, error) {
	all := cells()
	a := &author{version: l.version, size: 2}
	for _, c := range all {
		// One seed, so that operators can be told apart by their results.
		c = a.place(c, 4)
		c.Seed = 0
		a.add(c)
	}
	got, err := l.run(ctx, job{Name: "what PyTorch takes", Size: 2, Store: storeRank0, lines: a.lines})
	if err != nil {
		return nil, fmt.Errorf("interop: asking PyTorch what it takes: %w", err)
	}
	sums := map[string]string{} // of reduce_scatter_tensor, by dtype
	for i, c := range all {
		if c.Op == "reduce_scatter_tensor" && c.Reduce == "sum" {
			sums[c.DType] = got[0][i].SHA256
		}
	}
	for _, op := range operations() {
		if why := emptyRefusal(l.version, op); why != "" {
			x.Empty = append(x.Empty, Cell{Op: op, Reason: why})
		}
	}
	var taken []script.Line
	for i, c := range all {
		says, digest := got[0][i].Error, got[0][i].SHA256
		if says == "" {
			says = got[1][i].Error
		}
		cell := Cell{Op: c.Op, DType: c.DType, Reduce: c.Reduce, Reason: refusal(l.version, c), Says: says}
		switch ignores := ignoresOperator(l.version, c); {
		case ignores && digest == sums[c.DType] && digest != "":
		case says == "" && roundsApart(l.version, c) != "":
			cell.Reason = roundsApart(l.version, c)
		case says != "" && cell.Reason == "":
			cell.Reason = says
			x.unexplained("PyTorch refuses %s: %s", cell, says)
		case says == "" && cell.Reason != "":
			x.unexplained("PyTorch takes %s, which was not expected: %s", cell, cell.Reason)
			cell.Reason = ""
			fallthrough
		case says == "":
			taken = append(taken, c)
		}
		x.Cells = append(x.Cells, cell)
	}
	return taken, nil
}
