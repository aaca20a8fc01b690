//go:build linux

// Command nccl compares and measures package backend/nccl on GPUs, beside PyTorch:
//
//	CGO_ENABLED=0 go build -o nccl-bars ./bench/nccl
//	./nccl-bars -python python3 -ranks 2
//
// It needs as many GPUs as ranks, and no Go on that machine. In turn it
//
//   - runs random operations in jobs of PyTorch ranks, and in jobs with a Go rank in each place, lazy and eager, and
//     compares the digests of all results on all ranks
//   - splits eager groups into parts, with a Go rank in each place, and compares the colors that NCCL logs
//   - runs random operations among Go ranks, and compares them with backend gloo
//   - times all_reduces of Go ranks and of PyTorch ranks, queued and in a graph
//   - kills, stops, panics and cancels a Go rank in an all_reduce, and times the others' errors
//   - makes and closes groups, and compares the free memory of the device before and after
//
// It prints a line for each, and exits with 1 if one has failed. Flag -only names the parts to run. The environment goes
// to all ranks, for example NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 for NCCL over sockets.
package main

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/internal/freeport"
)

//go:embed rank.py
var pythonRank []byte

// roleVariable makes the program a rank, and names what it does.
const roleVariable = "BARS_TEST_ROLE"

type bars struct {
	python  string
	ranks   int
	ops     int
	seed    uint64
	dir     string
	failed  int
	library string
}

func main() {
	if role := os.Getenv(roleVariable); role != "" {
		if err := runRank(role); err != nil {
			fmt.Println("error", time.Now().UnixMicro(), strings.ReplaceAll(err.Error(), "\n", " "))
			os.Exit(1)
		}
		return
	}
	var b bars
	only := flag.String("only", "compare,split,cpu,time,faults,groups", "`parts` to run")
	flag.StringVar(&b.python, "python", "python3", "Python with PyTorch; empty runs Go ranks alone")
	flag.IntVar(&b.ranks, "ranks", 2, "`number` of ranks, and of GPUs")
	flag.IntVar(&b.ops, "ops", 200, "`number` of random operations in a job")
	flag.Uint64Var(&b.seed, "seed", 1, "`seed` of the operations")
	flag.StringVar(&b.library, "library", "", "`path` of NCCL's library (default that of PyTorch, or the one that nccl finds)")
	flag.Parse()
	if err := b.run(strings.Split(*only, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "nccl:", err)
		os.Exit(2)
	}
	if b.failed > 0 {
		os.Exit(1)
	}
}

func (b *bars) say(ok bool, format string, args ...any) {
	verdict := "holds "
	if !ok {
		verdict = "FAILED"
		b.failed++
	}
	fmt.Println(verdict, fmt.Sprintf(format, args...))
}

func (b *bars) run(parts []string) (err error) {
	if b.dir, err = os.MkdirTemp("", "nccl-bars"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if err := os.WriteFile(filepath.Join(b.dir, "rank.py"), pythonRank, 0o644); err != nil {
		return err
	}
	if b.library == "" && b.python != "" {
		out, err := exec.Command(b.python, "-c", "import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], 'lib', 'libnccl.so.2'))").Output()
		if err == nil {
			b.library = strings.TrimSpace(string(out))
		}
	}
	path, version, err := nccl.Library(b.library)
	if err != nil {
		return err
	}
	fmt.Printf("NCCL %s, %s, %d ranks, seed %d\n", version, path, b.ranks, b.seed)
	b.library = path
	all := map[string]func() error{"compare": b.compare, "split": b.split, "cpu": b.cpu, "time": b.time, "faults": b.faults, "groups": b.groups}
	for _, p := range parts {
		f := all[p]
		if f == nil {
			return fmt.Errorf("unknown part %q", p)
		}
		if b.python == "" && (p == "compare" || p == "split") {
			continue
		}
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

// rank is a process of a job.
type rank struct {
	cmd   *exec.Cmd
	lines []string
	mu    sync.Mutex
	more  *sync.Cond
	ended bool
	err   error
}

// job starts ranks. Kind returns which are Python's.
func (b *bars) job(role string, python func(r int) bool, env ...string) ([]*rank, error) {
	addr, err := freeport.Reserve()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var all []*rank
	for r := range b.ranks {
		x := &rank{cmd: exec.Command(self)}
		if python(r) {
			x.cmd = exec.Command(b.python, filepath.Join(b.dir, "rank.py"))
		}
		x.more = sync.NewCond(&x.mu)
		n := strconv.Itoa(r)
		x.cmd.Env = append(append(os.Environ(), roleVariable+"="+role, "RANK="+n, "LOCAL_RANK="+n, "WORLD_SIZE="+strconv.Itoa(b.ranks),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port, "C10D_NCCL_LIBRARY="+b.library, "BARS_TEST_DIR="+b.dir), env...)
		x.cmd.Stderr = os.Stderr
		out, err := x.cmd.StdoutPipe()
		if err == nil {
			err = x.cmd.Start()
		}
		if err != nil {
			return all, err
		}
		all = append(all, x)
		go func() {
			in := bufio.NewScanner(out)
			in.Buffer(nil, 1<<20)
			for in.Scan() {
				x.mu.Lock()
				x.lines = append(x.lines, in.Text())
				x.more.Broadcast()
				x.mu.Unlock()
			}
			err := x.cmd.Wait()
			x.mu.Lock()
			x.ended, x.err = true, err
			x.more.Broadcast()
			x.mu.Unlock()
		}()
	}
	return all, nil
}

// limit is far more than a job takes.
const limit = 10 * time.Minute

// await returns the first line with a prefix, "" if the rank ends without one.
func (x *rank) await(prefix string) string {
	t := time.AfterFunc(limit, func() { x.cmd.Process.Kill() })
	defer t.Stop()
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		if i := slices.IndexFunc(x.lines, func(l string) bool { return strings.HasPrefix(l, prefix) }); i >= 0 {
			return x.lines[i]
		}
		if x.ended {
			return ""
		}
		x.more.Wait()
	}
}

// end waits for a rank and returns what it printed.
func (x *rank) end() ([]string, error) {
	x.await("\x00")
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.lines, x.err
}

// ends waits for all ranks and returns their lines. Some time after one has failed the others are killed.
func ends(all []*rank) ([][]string, error) {
	lines := make([][]string, len(all))
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for r, x := range all {
		wg.Go(func() {
			var err error
			if lines[r], err = x.end(); err != nil {
				once.Do(func() {
					first = fmt.Errorf("rank %d: %w (%s)", r, err, strings.Join(lines[r][max(0, len(lines[r])-2):], "; "))
					time.AfterFunc(10*time.Second, func() {
						for _, x := range all {
							x.cmd.Process.Kill()
						}
					})
				})
			}
		})
	}
	wg.Wait()
	return lines, first
}

// op is one operation of a script.
type op struct {
	Op     string `json:"op"`
	DType  string `json:"dtype"`
	Reduce string `json:"reduce"`
	N      int    `json:"n"`
	Root   int    `json:"root"`
	Sizes  []int  `json:"sizes"` // of each rank's part
	Ranks  []int  `json:"ranks"` // of a group
}

var (
	opNames = []string{
		"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_uneven", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_uneven",
		"reduce_scatter_tensor", "all_to_all_single", "gather", "scatter", "send_recv", "batch", "barrier", "group",
	}
	dtypeNames  = []string{"float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"}
	reduceNames = []string{"sum", "max", "min", "product"}
)

// script writes random operations for all ranks.
func (b *bars) script(n int) error {
	r := rand.New(rand.NewPCG(b.seed, 1))
	all := make([]op, n)
	for k := range all {
		o := &all[k]
		*o = op{Op: opNames[r.IntN(len(opNames))], DType: dtypeNames[r.IntN(len(dtypeNames))], Reduce: reduceNames[r.IntN(len(reduceNames))], Root: r.IntN(b.ranks)}
		if strings.HasSuffix(o.DType, "16") || o.DType == "float32" || o.DType == "float64" {
			if x := r.IntN(3); x > 0 {
				o.Reduce = []string{"", "avg", "premul"}[x]
			}
			if o.DType == "bfloat16" && o.Reduce == "premul" {
				o.Reduce = "avg" // backend nccl says why
			}
		}
		o.N = 1 + r.IntN(1<<(1+r.IntN(16)))
		for range b.ranks {
			o.Sizes = append(o.Sizes, 1+r.IntN(9))
		}
		for p := range b.ranks {
			if r.IntN(2) == 0 {
				o.Ranks = append(o.Ranks, p)
			}
		}
		if len(o.Ranks) == 0 {
			o.Ranks = []int{o.Root}
		}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.dir, "script.json"), text, 0o644)
}

// compare runs the same script in jobs of both kinds.
func (b *bars) compare() error {
	if err := b.script(b.ops); err != nil {
		return err
	}
	for _, mode := range []string{"lazy", "eager"} {
		job := func(python func(int) bool) ([][]string, error) {
			all, err := b.job("script", python, "BARS_TEST_MODE="+mode)
			if err != nil {
				return nil, err
			}
			return ends(all)
		}
		want, err := job(func(int) bool { return true })
		if err != nil {
			return fmt.Errorf("PyTorch's ranks alone, %s: %w", mode, err)
		}
		for place := range b.ranks {
			got, err := job(func(r int) bool { return r != place })
			differ, first := 0, ""
			for r := range want {
				for i, line := range want[r] {
					if err == nil && (i >= len(got[r]) || got[r][i] != line) {
						if differ++; first == "" {
							first = fmt.Sprintf("; first on rank %d: %q, want %q", r, append(got[r], "")[min(i, len(got[r]))], line)
						}
					}
				}
			}
			why := ""
			if err != nil {
				why = "; " + err.Error()
			}
			b.say(err == nil && differ == 0 && len(want[0]) >= b.ops, "%s, Go rank in place %d: %d operations on %d ranks, %d results differ%s%s", mode, place, b.ops, b.ranks, differ, first, why)
		}
	}
	return nil
}

// splitLine is what NCCL logs of a split.
var splitLine = regexp.MustCompile(`color -?[0-9]+ key [0-9]+`)

// split compares PyTorch's split_group with pg's SplitRanks: colors, keys and sums of each part.
func (b *bars) split() error {
	job := func(python func(int) bool) (seen []string, err error) {
		log := filepath.Join(b.dir, "nccl.")
		all, err := b.job("split", python, "BARS_TEST_MODE=eager", "NCCL_DEBUG=INFO", "NCCL_DEBUG_FILE="+log+"%p")
		if err != nil {
			return nil, err
		}
		lines, err := ends(all)
		for r, x := range all {
			text, _ := os.ReadFile(log + strconv.Itoa(x.cmd.Process.Pid))
			splits := slices.Compact(splitLine.FindAllString(string(text), -1)) // begun, ended
			seen = append(seen, fmt.Sprintf("rank %d: %s; %s", r, strings.Join(splits, ", "), strings.Join(lines[r], ", ")))
		}
		return seen, err
	}
	want, err := job(func(int) bool { return true })
	b.say(err == nil, "split_group, PyTorch's ranks alone: %v %v", want, err)
	for place := range b.ranks {
		got, err := job(func(r int) bool { return r != place })
		b.say(err == nil && slices.Equal(got, want), "split_group, Go rank in place %d: %v %v", place, got, err)
	}
	return nil
}

func goRanks(int) bool { return false }

// cpu compares Go ranks with backend gloo.
func (b *bars) cpu() error {
	if err := b.script(10 * b.ops); err != nil {
		return err
	}
	all, err := b.job("cpu", goRanks, "BARS_TEST_MODE=lazy")
	if err != nil {
		return err
	}
	lines, err := ends(all)
	b.say(err == nil, "%d operations of Go ranks beside backend gloo: %v %v", 10*b.ops, last(lines[0]), err)
	return nil
}

func last(l []string) string {
	if len(l) == 0 {
		return ""
	}
	return l[len(l)-1]
}

// time prints a row for each size: host and device time of a call, of Go's ranks and of PyTorch's.
func (b *bars) time() error {
	kinds := map[string]func(int) bool{"Go": goRanks}
	if b.python != "" {
		kinds["PyTorch"] = func(int) bool { return true }
	}
	rows := map[string][][3]float64{} // bytes, us of the host, us of a call
	for name, kind := range kinds {
		all, err := b.job("time", kind, "BARS_TEST_MODE=lazy")
		if err != nil {
			return err
		}
		lines, err := ends(all)
		if err != nil {
			b.say(false, "times of %s: %v", name, err)
			continue
		}
		for _, l := range lines[0] {
			var v [3]float64
			var how string
			if n, _ := fmt.Sscanf(l, "time %s %g %g %g", &how, &v[0], &v[1], &v[2]); n == 4 {
				rows[name+" "+how] = append(rows[name+" "+how], v)
			}
		}
	}
	for _, how := range []string{"queued", "graph"} {
		for i, t := range rows["PyTorch "+how] {
			if r := rows["Go "+how]; i < len(r) {
				b.say(r[i][2] <= 1.03*t[2] && (how == "graph" || r[i][1] <= t[1]), "%s all_reduce of %.0f B: %.1f us a call (%.1f on the host), PyTorch %.1f us (%.1f): %.2f of its time",
					how, t[0], r[i][2], r[i][1], t[2], t[1], r[i][2]/t[2])
			}
		}
	}
	return nil
}

// faults has rank 1 fail in an all_reduce.
func (b *bars) faults() error {
	for _, fault := range []string{"kill", "panic", "cancel", "stop"} {
		all, err := b.job("fault", goRanks, "BARS_TEST_FAULT="+fault)
		if err != nil {
			return err
		}
		if all[1].await("ready") == "" {
			_, err := ends(all)
			b.say(false, "%s: rank 1 was not ready: %v", fault, err)
			continue
		}
		time.Sleep(time.Second) // the others are in the all_reduce
		began := time.Now()
		switch fault {
		case "kill":
			all[1].cmd.Process.Kill()
		case "stop":
			all[1].cmd.Process.Signal(syscall.SIGSTOP)
		default:
			all[1].cmd.Process.Signal(syscall.SIGUSR1)
		}
		for r, x := range all {
			if r == 1 {
				continue
			}
			line := x.await("failed")
			var at int64
			var text string
			fmt.Sscanf(line, "failed %d %q", &at, &text)
			after := time.UnixMicro(at).Sub(began)
			most := 500 * time.Millisecond
			if fault == "stop" {
				most += faultTimeout
			}
			b.say(line != "" && after <= most && strings.Contains(text, "rank 1"), "%s: rank %d's error after %v: %s", fault, r, after.Round(time.Millisecond), text)
		}
		for r, x := range all {
			if r == 1 {
				x.cmd.Process.Kill()
				continue
			}
			if again := x.await("again"); again == "" {
				b.say(false, "%s: rank %d cannot go on with another group", fault, r)
			}
		}
		ends(all)
	}
	return nil
}

// faultTimeout is that of the operation that a fault ends.
const faultTimeout = 5 * time.Second

// groups makes and closes 200 groups.
func (b *bars) groups() error {
	all, err := b.job("groups", goRanks, "BARS_TEST_MODE=lazy")
	if err != nil {
		return err
	}
	lines, err := ends(all)
	var before, after float64
	fmt.Sscanf(last(lines[0]), "free %g %g", &before, &after)
	b.say(err == nil && before-after < 64<<20, "200 groups: %.0f MiB of the device were free, then %.0f %v", before/(1<<20), after/(1<<20), err)
	return nil
}
