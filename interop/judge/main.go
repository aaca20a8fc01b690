package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// options are the program's flags.
type options struct {
	python, label, c10d, library string
	tests, only, wires           string
	parallel                     int
	limit                        time.Duration
	log                          io.Writer
}

func main() {
	o := options{log: os.Stderr}
	flag.StringVar(&o.python, "python", "/usr/bin/python3", "`command` that starts a Python with PyTorch; it must see the folder for temporary files")
	flag.StringVar(&o.label, "label", "", "`name` of this PyTorch in tables (default its version)")
	flag.StringVar(&o.tests, "tests", "", "`folder` test/distributed of this PyTorch's sources, for the tests that are not installed")
	flag.StringVar(&o.only, "run", "", "run only cases whose name, as distributed_test.Distributed.test_barrier, fits this `regexp`")
	flag.StringVar(&o.wires, "wire", "", "run only on these `wires`, with commas: "+strings.Join(wireNames(), ", "))
	flag.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "`n` cases at a time, each of which has three or four processes")
	flag.DurationVar(&o.limit, "timeout", 5*time.Minute, "limit of a case")
	flag.StringVar(&o.c10d, "c10d", "", "`file` of the program c10d (default: built from this checkout)")
	flag.StringVar(&o.library, "library", "", "`file` of the C library (default: built from this checkout; that needs a C compiler)")
	file := flag.String("json", "", "write the outcome to this `file`")
	speed := flag.Bool("speed", false, "measure all_reduce from Python beside gloo, and run no tests")
	table := flag.Bool("table", false, "print a Markdown table of the outcomes in the files that are the arguments, and run nothing")
	page := flag.String("write", "", "with -table: write the table between the lines <!-- judge --> and <!-- judge end --> of this `file`")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "judge runs PyTorch's own tests of process groups against this library. go doc -C interop/judge has examples.\n\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var ok bool
	var err error
	switch {
	case *table:
		ok, err = true, tabulate(flag.Args(), *page)
	case flag.NArg() > 0:
		err = fmt.Errorf("judge: unexpected argument %q", flag.Arg(0))
	default:
		ok, err = command(ctx, o, *speed, *file)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

func command(ctx context.Context, o options, speed bool, file string) (bool, error) {
	j, err := setup(ctx, o)
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(j.dir)
	x := &Outcome{Label: cmp.Or(o.label, j.has.Version), Torch: j.has.Version, Absent: j.has.Absent}
	if speed {
		err = j.speed(ctx, x)
	} else {
		err = j.run(ctx, x)
	}
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
	return x.summary(os.Stdout), nil
}

func tabulate(files []string, page string) error {
	var all []*Outcome
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		x := new(Outcome)
		if err := json.Unmarshal(text, x); err != nil {
			return fmt.Errorf("judge: %s: %w", name, err)
		}
		for i, c := range x.Cases {
			x.Cases[i] = verdict(c)
		}
		all = append(all, x)
	}
	text := markdown(all)
	if page == "" {
		_, err := os.Stdout.WriteString(text)
		return err
	}
	const begin, end = "<!-- judge -->\n", "<!-- judge end -->"
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before, rest, found := strings.Cut(string(old), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return fmt.Errorf("judge: %s lacks the line %q or %q", page, strings.TrimSpace(begin), end)
	}
	return os.WriteFile(page, []byte(before+begin+text+end+after), 0o644)
}

//go:embed judge.py
var judgePy string

//go:embed c10d_go.py
var classPy string

//go:embed speed.py
var speedPy string

// judge has a folder with the programs.
type judge struct {
	options
	dir    string
	python []string
	tests  []string // folders
	wires  []wire
	only   *regexp.Regexp
	begun  time.Time
	has    struct {
		Version string
		Absent  []string // suites
	}
	slots chan struct{} // one for each worker that may run
	alone sync.Mutex    // held by who takes all slots

	files  sync.Mutex // guards what follows, and the outcome
	number int        // of workers so far
}

// setup checks the flags, and makes a folder with the programs.
func setup(ctx context.Context, o options) (_ *judge, err error) {
	j := &judge{options: o, python: strings.Fields(o.python), begun: time.Now(), slots: make(chan struct{}, max(o.parallel, 1))}
	if len(j.python) == 0 {
		return nil, errors.New("judge: -python is empty")
	}
	if j.only, err = regexp.Compile(o.only); err != nil {
		return nil, fmt.Errorf("judge: -run: %w", err)
	}
	for _, w := range wires {
		if o.wires == "" || slices.Contains(strings.Split(o.wires, ","), w.name) {
			j.wires = append(j.wires, w)
		}
	}
	if o.wires != "" && len(j.wires) != strings.Count(o.wires, ",")+1 {
		return nil, fmt.Errorf("judge: -wire %s: the wires are %s", o.wires, strings.Join(wireNames(), ", "))
	}
	if o.tests != "" {
		for _, sub := range []string{"", "optim", "algorithms"} {
			j.tests = append(j.tests, filepath.Join(o.tests, sub))
		}
	}
	if err := j.ask(ctx); err != nil {
		return nil, err
	}
	if j.dir, err = os.MkdirTemp("", "judge"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(j.dir)
		}
	}()
	for name, text := range map[string]string{"judge.py": judgePy, "c10d_go.py": classPy, "speed.py": speedPy} {
		if err := os.WriteFile(filepath.Join(j.dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	if err := j.program(ctx, o.library, "libc10dgo.so", ".", "CGO_ENABLED=1", "-buildmode=c-shared", "./lib"); err != nil {
		return nil, err
	}
	return j, j.program(ctx, o.c10d, "c10d", "../..", "CGO_ENABLED=0", "./cmd/c10d")
}

// inquiry prints the version of PyTorch, and the suites that it does not have. Its arguments are folders.
const inquiry = `
import importlib.util, json, sys
import torch, torch.distributed
sys.path[:0] = sys.argv[2:]
absent = [s for s in sys.argv[1].split(",") if not importlib.util.find_spec(s)]
print(json.dumps({"version": torch.__version__, "absent": absent}))
`

// ask asks Python what it has.
func (j *judge) ask(ctx context.Context) error {
	var names []string
	for _, s := range suites[1:] {
		names = append(names, s.name)
	}
	args := slices.Concat(j.python[1:], []string{"-c", inquiry, strings.Join(names, ",")}, j.tests)
	cmd := exec.CommandContext(ctx, j.python[0], args...)
	var says bytes.Buffer
	cmd.Stderr = &says
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("judge: no PyTorch at %s (Debian: python3-torch): %w\n%s", j.options.python, err, says.String())
	}
	if err := json.Unmarshal(out, &j.has); err != nil {
		return fmt.Errorf("judge: %s printed %q: %w", j.options.python, out, err)
	}
	return nil
}

// program copies a file to the folder, or builds it there.
func (j *judge) program(ctx context.Context, from, name, in, env string, args ...string) error {
	to := filepath.Join(j.dir, name)
	if from != "" {
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		return os.WriteFile(to, text, 0o755)
	}
	build := exec.CommandContext(ctx, "go", append([]string{"build", "-o", to}, args...)...)
	build.Dir, build.Env = in, append(os.Environ(), env)
	out, err := build.CombinedOutput()
	if err == nil {
		return nil
	}
	if cc, e := exec.CommandContext(ctx, "go", "env", "CC").Output(); e == nil && env == "CGO_ENABLED=1" {
		if _, e := exec.LookPath(strings.TrimSpace(string(cc))); e != nil {
			return fmt.Errorf("judge: the C library needs a C compiler (Debian: gcc), or -library: %w", e)
		}
	}
	return fmt.Errorf("judge: building %s: %w\n%s", name, err, out)
}

func (j *judge) say(format string, args ...any) {
	fmt.Fprintf(j.log, "%6.1f s  %s\n", time.Since(j.begun).Seconds(), fmt.Sprintf(format, args...))
}

func wireNames() []string {
	var names []string
	for _, w := range wires {
		names = append(names, w.name)
	}
	return names
}
