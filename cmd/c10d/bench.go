package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func init() {
	register(command{
		name:    "bench",
		summary: "measure an operation over a range of sizes, as nccl-tests does",
		setup:   setupBench,
	})
}

// bench is the flags of "c10d bench".
type bench struct {
	op, dtype, reduce, init string
	beside                  string
	begin, end              byteSize
	factor, iters, warmup   int
	world, repeat           int
	budget                  time.Duration
	json, check             bool
}

// byteSize is a flag such as 64K, 1M or 2G, in powers of two.
type byteSize int

func (b *byteSize) String() string { return sizeName(int(*b)) }

func (b *byteSize) Set(s string) error {
	digits, scale := s, 1
	if n := len(s); n > 0 {
		if i := strings.IndexByte("KMG", s[n-1]&^0x20); i >= 0 {
			digits, scale = s[:n-1], 1<<(10*(i+1))
		}
	}
	v, err := strconv.Atoi(digits)
	if err != nil || v < 0 || v > min(1<<36, math.MaxInt)/scale {
		return fmt.Errorf("%q is not a size such as 4, 64K, 1M or 1G", s)
	}
	*b = byteSize(v * scale)
	return nil
}

func sizeName(n int) string {
	for i, unit := range []string{"G", "M", "K"} {
		if scale := 1 << (30 - 10*i); n >= scale && n%scale == 0 {
			return strconv.Itoa(n/scale) + unit
		}
	}
	return strconv.Itoa(n)
}

func setupBench(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	b := bench{begin: 4, end: 64 << 20}
	fs.StringVar(&b.op, "op", "all_reduce", "`operation`: "+strings.Join(benchOps(), ", "))
	fs.Var(&b.begin, "b", "smallest `size` in bytes, with K, M or G")
	fs.Var(&b.end, "e", "largest `size`")
	fs.IntVar(&b.factor, "f", 4, "`factor` from one size to the next")
	fs.IntVar(&b.iters, "n", 0, "`iterations` of a size; 0 takes what -budget allows")
	fs.IntVar(&b.warmup, "w", 5, "`iterations` before the measurement")
	fs.IntVar(&b.repeat, "repeat", 3, "`times` to measure a size; the best is kept")
	fs.DurationVar(&b.budget, "budget", 500*time.Millisecond, "`time` for one measurement of one size")
	fs.StringVar(&b.dtype, "dtype", "float32", "element `type`")
	fs.StringVar(&b.reduce, "reduce", "sum", "`operator` of reductions")
	fs.IntVar(&b.world, "world", 0, "start this `number` of local ranks; 0 joins by -init")
	fs.StringVar(&b.init, "init", "env://", "where to meet the others: `URL`")
	fs.BoolVar(&b.json, "json", false, "print one JSON record a line")
	fs.StringVar(&b.beside, "beside", "", "`file` of a peer's records, to print with their ratio")
	fs.BoolVar(&b.check, "check", true, "check the results of each size once")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		if !slices.Contains(benchOps(), b.op) {
			return 0, usagef("unknown -op %q (known: %s)", b.op, strings.Join(benchOps(), ", "))
		}
		if b.factor < 2 || b.begin > b.end || b.iters < 0 || b.warmup < 0 || b.repeat < 1 || b.world < 0 {
			return 0, usagef("-b %v -e %v -f %d -n %d -w %d -repeat %d -world %d make no series", &b.begin, &b.end, b.factor, b.iters, b.warmup, b.repeat, b.world)
		}
		if b.world > 0 {
			return b.launch(std, fs)
		}
		return 0, b.run(std.out)
	}
}

// launch starts the ranks on this host.
func (b *bench) launch(std stdio, fs *flag.FlagSet) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	command := []string{self, "bench"}
	fs.Visit(func(f *flag.Flag) {
		if f.Name != "world" {
			command = append(command, "-"+f.Name+"="+f.Value.String())
		}
	})
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	s, err := agent.Run(context.Background(), agent.Job{
		Procs: b.world, Nodes: 1, Command: command, NoPrefix: true, Grace: time.Second,
		Stdout: std.out, Stderr: std.err, Guard: []string{self, "guard"}, Signals: signals,
		Meeting: agent.DefaultMeeting, Logf: func(string, ...any) {},
	})
	if err != nil {
		return 1, err
	}
	if !s.OK && s.Signal == "" {
		fmt.Fprint(std.err, s.Report())
	}
	return s.ExitCode, nil
}

// record is one line of results, in the format that the peers' benchmarks share.
type record struct {
	System  string  `json:"system"`
	Version string  `json:"version"`
	Op      string  `json:"op"`
	DType   string  `json:"dtype"`
	Size    int     `json:"size"`
	World   int     `json:"world"`
	Bytes   int     `json:"bytes"`
	Iters   int     `json:"iters"`
	Repeat  int     `json:"repeat"`
	P50     float64 `json:"time_us_p50"`
	P99     float64 `json:"time_us_p99"`
	Avg     float64 `json:"time_us_avg"`
	Spread  float64 `json:"p50_spread"`
	AlgBW   float64 `json:"algbw_GBps"`
	BusBW   float64 `json:"busbw_GBps"`
}

// run joins the group and measures every size.
func (b *bench) run(out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	d, err := tensor.ParseDType(b.dtype)
	if err != nil {
		return usagef("%v", err)
	}
	op, err := backend.ParseReduceOp(b.reduce)
	if err != nil {
		return usagef("%v", err)
	}
	g, err := pg.Init(ctx, b.init, pg.InitOptions{Options: pg.Options{Timeout: 5 * time.Minute}})
	if err != nil {
		return err
	}
	err = b.series(ctx, g, d, op, out)
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, g.Close())
}

func (b *bench) series(ctx context.Context, g *pg.ProcessGroup, d tensor.DType, op backend.ReduceOp, out io.Writer) error {
	peers, peer, err := b.loadPeers(d, g.Size())
	if err != nil {
		return err
	}
	if g.Rank() == 0 && !b.json {
		fmt.Fprintf(out, "# %s of %v, %d ranks, times in us, p50 over iterations of the slowest rank\n", b.op, d, g.Size())
		fmt.Fprintf(out, "%12s %8s %12s %12s %12s %10s %10s", "bytes", "iters", "p50", "p99", "avg", "algbw GB/s", "busbw GB/s")
		if peers != nil {
			fmt.Fprintf(out, " %12s %8s", peer, "ratio")
		}
		fmt.Fprintln(out)
	}
	for size := int(b.begin); size <= int(b.end); size = max(size*b.factor, 1) {
		r, err := b.measure(ctx, g, d, op, size)
		if err != nil {
			return err
		}
		if g.Rank() != 0 {
			continue
		}
		if b.json {
			if err := json.NewEncoder(out).Encode(r); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintf(out, "%12d %8d %12.1f %12.1f %12.1f %10.3f %10.3f", r.Bytes, r.Iters, r.P50, r.P99, r.Avg, r.AlgBW, r.BusBW)
		if p, ok := peers[size]; ok {
			fmt.Fprintf(out, " %12.1f %7.2fx", p.P50, p.P50/r.P50)
		}
		fmt.Fprintln(out)
	}
	return nil
}

// loadPeers returns a peer's best records of the case by size, and its name.
func (b *bench) loadPeers(d tensor.DType, world int) (map[int]record, string, error) {
	if b.beside == "" {
		return nil, "", nil
	}
	f, err := os.Open(b.beside)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	best, name := make(map[int]record), "peer"
	for dec := json.NewDecoder(f); ; {
		var r record
		if err := dec.Decode(&r); err == io.EOF {
			break
		} else if err != nil {
			return nil, "", fmt.Errorf("%s: %w", b.beside, err)
		}
		if r.Op != b.op || r.DType != d.String() || r.World != world || r.P50 <= 0 {
			continue
		}
		if have, ok := best[r.Size]; !ok || r.P50 < have.P50 {
			best[r.Size], name = r, r.System
		}
	}
	if len(best) == 0 {
		return nil, "", fmt.Errorf("%s has no record of %s of %v with %d ranks", b.beside, b.op, d, world)
	}
	return best, name, nil
}

// measure times one size.
func (b *bench) measure(ctx context.Context, g *pg.ProcessGroup, d tensor.DType, op backend.ReduceOp, size int) (record, error) {
	c, err := newCase(b.op, g, d, op, size)
	if err != nil {
		return record{}, err
	}
	if b.check {
		if err := c.check(ctx, g.Rank(), g.Size()); err != nil {
			return record{}, err
		}
	}
	once := func() error {
		w, err := c.issue(ctx)
		if err != nil || w == nil {
			return err
		}
		return w.Wait(ctx)
	}
	warmed := time.Now()
	for range max(b.warmup, 1) {
		if err := once(); err != nil {
			return record{}, err
		}
	}
	// Every rank needs the same number; rank 0's guess counts.
	iters := []int64{int64(b.iters)}
	if iters[0] == 0 {
		each := time.Since(warmed) / time.Duration(max(b.warmup, 1))
		iters[0] = min(max(int64(b.budget/max(each, 1)), 10), 20000)
	}
	if err := pg.BroadcastSlice(ctx, g, iters, 0); err != nil {
		return record{}, err
	}
	best := record{
		System: "c10d-go", Version: version(), Op: b.op, DType: d.String(), Size: size, World: g.Size(), Bytes: c.bytes,
		Iters: int(iters[0]), Repeat: b.repeat, P50: math.Inf(1),
	}
	worst := 0.0
	for range b.repeat {
		w, err := g.Barrier(ctx, backend.BarrierOptions{})
		if err == nil {
			err = w.Wait(ctx)
		}
		if err != nil {
			return record{}, err
		}
		stamps := make([]int64, iters[0])
		start := time.Now()
		last := time.Duration(0)
		for i := range stamps {
			if err := once(); err != nil {
				return record{}, err
			}
			now := time.Since(start)
			stamps[i], last = int64(now-last), now
		}
		wall := []int64{int64(last)}
		if err := pg.AllReduceSlice(ctx, g, stamps, backend.Max); err != nil {
			return record{}, err
		}
		if err := pg.AllReduceSlice(ctx, g, wall, backend.Max); err != nil {
			return record{}, err
		}
		slices.Sort(stamps)
		p50 := float64(stamps[len(stamps)/2]) / 1e3 / c.steps
		worst = max(worst, p50)
		if p50 < best.P50 {
			best.P50, best.P99 = p50, float64(stamps[len(stamps)*99/100])/1e3/c.steps
			best.Avg = float64(wall[0]) / 1e3 / c.steps / float64(len(stamps))
		}
	}
	best.Spread = worst / best.P50
	best.AlgBW = float64(best.Bytes) / best.P50 / 1e3
	best.BusBW = best.AlgBW * c.busFactor
	return best, nil
}

// benchCase is an operation at one size on this rank.
type benchCase struct {
	bytes     int // as nccl-tests counts: a rank's whole buffer
	busFactor float64
	steps     float64 // how many times the operation's time passes in one call
	issue     func(context.Context) (*work.Work, error)
	in        []*tensor.Tensor // for the check, filled with the rank's number plus one
	out       []*tensor.Tensor // for the check, cut into one part for each rank
	want      func(part int) float64
}

func benchOps() []string {
	return []string{
		"all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor",
		"all_to_all_single", "gather", "scatter", "send_recv", "barrier",
	}
}

func newCase(name string, g *pg.ProcessGroup, d tensor.DType, op backend.ReduceOp, size int) (*benchCase, error) {
	n, me := g.Size(), g.Rank()
	var failed error
	mk := func(count int) []*tensor.Tensor {
		t, err := tensor.New(d, count)
		failed = errors.Join(failed, err)
		return []*tensor.Tensor{t}
	}
	whole := max(size/d.Size(), 1)
	part := max(whole/n, 1)
	shared := float64(n-1) / float64(n)
	byRank := func(part int) float64 { return float64(part + 1) }
	reduced := func(int) float64 {
		switch op.Kind() {
		case backend.Sum.Kind():
			return float64(n*(n+1)) / 2
		case backend.Avg.Kind():
			return float64(n+1) / 2
		case backend.Max.Kind():
			return float64(n)
		case backend.Min.Kind():
			return 1
		}
		return math.NaN() // not checked
	}
	c := &benchCase{bytes: whole * d.Size(), busFactor: 1, steps: 1}
	if name != "all_reduce" && name != "reduce" && name != "broadcast" && name != "send_recv" {
		c.bytes, c.busFactor = part*n*d.Size(), shared
	}
	switch name {
	case "all_reduce":
		c.in = mk(whole)
		c.out, c.want, c.busFactor = c.in, reduced, 2*shared
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.AllReduce(ctx, c.out, backend.AllReduceOptions{Op: op})
		}
	case "reduce":
		c.in = mk(whole)
		if me == 0 {
			c.out, c.want = c.in, reduced
		}
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.Reduce(ctx, c.in[0], backend.ReduceOptions{Op: op})
		}
	case "broadcast":
		c.in = mk(whole)
		root := n - 1
		c.out, c.want = c.in, func(int) float64 { return float64(root + 1) }
		c.issue = func(ctx context.Context) (*work.Work, error) {
			root = (root + 1) % n // so that the root cannot run ahead
			return g.Broadcast(ctx, c.in, backend.BroadcastOptions{Root: root})
		}
	case "all_gather_into_tensor":
		c.in, c.out, c.want = mk(part), mk(part*n), byRank
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.AllGatherIntoTensor(ctx, c.out[0], c.in[0], backend.AllGatherOptions{})
		}
	case "reduce_scatter_tensor":
		c.in, c.out, c.want = mk(part*n), mk(part), reduced
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.ReduceScatterTensor(ctx, c.out[0], c.in[0], backend.ReduceScatterOptions{Op: op})
		}
	case "all_to_all_single":
		c.in, c.out, c.want = mk(part*n), mk(part*n), byRank
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.AllToAllSingle(ctx, c.out[0], c.in[0], nil, nil, backend.AllToAllOptions{})
		}
	case "gather", "scatter":
		one, all := mk(part), mk(part*n)
		parts := make([]*tensor.Tensor, 0, n)
		for r := 0; me == 0 && r < n; r++ {
			t, err := all[0].Slice(0, r*part, (r+1)*part)
			failed = errors.Join(failed, err)
			parts = append(parts, t)
		}
		if name == "gather" {
			c.in = one
			if me == 0 {
				c.out, c.want = all, byRank
			}
			c.issue = func(ctx context.Context) (*work.Work, error) {
				return g.Gather(ctx, parts, one[0], backend.GatherOptions{})
			}
		} else {
			c.in, c.out, c.want = all, one, func(int) float64 { return 1 }
			c.issue = func(ctx context.Context) (*work.Work, error) {
				return g.Scatter(ctx, one[0], parts, backend.ScatterOptions{})
			}
		}
	case "send_recv":
		// A ping-pong between ranks 0 and 1, of which half is one message.
		c.steps = 2
		c.in, c.out, c.want = mk(whole), mk(whole), func(int) float64 { return float64(2 - me) }
		if n < 2 {
			return nil, usagef("send_recv needs two ranks")
		}
		if me > 1 {
			c.out = nil
		}
		c.issue = func(ctx context.Context) (*work.Work, error) {
			switch me {
			case 0:
				if _, err := g.Send(ctx, c.in[0], 1, backend.P2POptions{}); err != nil {
					return nil, err
				}
				return g.Recv(ctx, c.out[0], 1, backend.P2POptions{})
			case 1:
				w, err := g.Recv(ctx, c.out[0], 0, backend.P2POptions{})
				if err == nil {
					err = w.Wait(ctx)
				}
				if err != nil {
					return nil, err
				}
				return g.Send(ctx, c.in[0], 0, backend.P2POptions{})
			}
			return nil, nil
		}
	case "barrier":
		c.bytes = 0
		c.issue = func(ctx context.Context) (*work.Work, error) { return g.Barrier(ctx, backend.BarrierOptions{}) }
	}
	return c, failed
}

// check runs the operation once on known numbers.
func (c *benchCase) check(ctx context.Context, rank, size int) error {
	for _, t := range c.in {
		if err := t.Fill(float64(rank + 1)); err != nil {
			return err
		}
	}
	w, err := c.issue(ctx)
	if err == nil && w != nil {
		err = w.Wait(ctx)
	}
	if err != nil {
		return err
	}
	for _, t := range c.out {
		for i := range t.Len() {
			part := i * size / t.Len()
			got, err := t.Float64At(i)
			if err != nil {
				return err
			}
			if want := c.want(part); got != want && !math.IsNaN(want) {
				return fmt.Errorf("wrong result: element %d is %v, want %v", i, got, want)
			}
		}
	}
	return nil
}
