package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func init() {
	register(command{
		name:    "bench",
		summary: "measure an operation over a range of sizes, as nccl-tests does",
		example: "c10d bench -world 4 -op all_reduce -b 8 -e 64M",
		groups: []group{
			{"Flags for devices", "device work stream"},
			{"Flags for connections and memory", "wire sums checksum lanes alloc in-place"},
			{"Flags for records", "json tune progress"},
		},
		setup: setupBench,
	})
}

// bench is the flags of "c10d bench".
type bench struct {
	ops                   list
	dtype, reduce, init   string
	wire, sums            string
	checksum              bool
	lanes                 int
	tune                  string
	begin, end            bytesize.Size
	sizes                 sizeList
	factor, iters, warmup int
	world, repeat         int
	budget                time.Duration
	json, check, progress bool
	alloc                 bool

	device    devices
	work      string
	stream    string
	inPlace   bool
	tensors   int
	sumsGiven bool
	command   string // the program with its flags, for a table
}

// list is a flag of several words, with commas between them or given again.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(s string) error {
	for _, word := range strings.Split(s, ",") {
		if word == "" {
			return fmt.Errorf("%q has an empty part", s)
		}
		*l = append(*l, word)
	}
	return nil
}

// sizeList is a flag such as 4,1K,64K.
type sizeList []int

func (l *sizeList) String() string {
	names := make([]string, len(*l))
	for i, n := range *l {
		names[i] = bytesize.Name(n)
	}
	return strings.Join(names, ",")
}

func (l *sizeList) Set(s string) error {
	for _, word := range strings.Split(s, ",") {
		var b bytesize.Size
		if err := b.Set(word); err != nil {
			return err
		}
		*l = append(*l, int(b))
	}
	return nil
}

func setupBench(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	b := bench{begin: 4, end: 64 << 20, device: devices{kind: onCPU}}
	fs.Var(&b.ops, "op", "`operations`, separated by commas: "+strings.Join(benchOps(), ", ")+", or all (default all_reduce)")
	fs.Var(&b.begin, "b", "smallest `size` in bytes, or with K, M or G")
	fs.Var(&b.end, "e", "largest `size`")
	fs.IntVar(&b.factor, "f", 4, "`factor` from one size to the next")
	fs.Var(&b.sizes, "sizes", "`sizes`, separated by commas, instead of -b, -e and -f")
	fs.IntVar(&b.iters, "n", 0, "`n` iterations in a measurement; 0 means as many as fit into -budget")
	fs.IntVar(&b.warmup, "w", 5, "`n` iterations before the measurement")
	fs.IntVar(&b.repeat, "repeat", 3, "`n` measurements of each size, of which the best is kept")
	fs.DurationVar(&b.budget, "budget", 500*time.Millisecond, "`duration` of one measurement of one size")
	fs.StringVar(&b.dtype, "dtype", "float32", "element `type`")
	fs.StringVar(&b.reduce, "reduce", "sum", "`operator` of reductions")
	fs.IntVar(&b.world, "world", 0, "start `n` local ranks; 0 means that this is one rank of a job, see -init")
	fs.StringVar(&b.init, "init", "env://", "`URL` of the job's store: env://, tcp://, file:// or redis://")
	fs.StringVar(&b.wire, "wire", "", "`wire`: auto, gloo, native, or tcp, which is native without shared memory"+wireDefault)
	fs.BoolVar(&b.checksum, "checksum", false, "checksums of messages, on the native wire over TCP")
	fs.IntVar(&b.lanes, "lanes", 0, "`n` further connections to each other rank, for messages from 512K on (1M within a host if one is sent at a time), on the native wire over TCP; 0 means the backend's default, negative none; not with -device")
	fs.StringVar(&b.sums, "sums", "", "`order` of sums: rank-order; empty means the fastest")
	fs.BoolVar(&b.json, "json", false, "print one JSON record a line")
	fs.StringVar(&b.tune, "tune", "", "measure the algorithms of the native wire over TCP, or with -device the ways between devices, and write their times to this `file`")
	fs.BoolVar(&b.check, "check", true, "check every element of the results of each size once")
	fs.Var(&b.device, "device", devicesUsage)
	fs.StringVar(&b.work, "work", "", "with -device: `name` of the implementation of all_reduce: "+strings.Join(cuda.AllReduceWorks(), ", ")+" (default the best usable one)")
	fs.StringVar(&b.stream, "stream", besideStream, "with -device: `order` of calls and a stream: "+besideStream+" it, with waits before and after, as c10d does with async_op=True; "+inStream+" it, as with async_op=False; "+noStream+" waits for each operation")
	fs.IntVar(&b.tensors, "tensors", coalesced, "`n` tensors in a call of all_reduce_coalesced, each of that part of the size")
	fs.BoolVar(&b.inPlace, "in-place", false, "input and output share memory also for operations with two tensors: "+strings.Join(inPlaceOps, ", "))
	fs.BoolVar(&b.alloc, "alloc", false, "tensors of Alloc, in memory that the ranks of a host share; not with -device, and not for "+sparseOp)
	fs.BoolVar(&b.progress, "progress", false, "print progress to standard error (default true if that is a terminal)")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		if err := b.complete(); err != nil {
			return 0, err
		}
		if _, err := tensor.ParseDType(b.dtype); err != nil {
			return 0, usagef("-dtype: %v", err)
		}
		if _, err := backend.ParseReduceOp(b.reduce); err != nil {
			return 0, usagef("-reduce: %v", err)
		}
		given := map[string]bool{}
		b.command = "c10d bench"
		fs.Visit(func(f *flag.Flag) {
			given[f.Name] = true
			if f.Name != "init" && f.Name != "progress" { // the URL of a store may have a password
				b.command += " -" + f.Name + "=" + f.Value.String()
			}
		})
		b.sumsGiven = given["sums"]
		for _, name := range []string{"work", "stream"} {
			if given[name] && b.device.onCPU() {
				return 0, usagef("-%s is for -device cuda or sim", name)
			}
		}
		if !given["progress"] && isTerminal(std.err) {
			b.progress = true
		}
		if b.world > 0 {
			return b.launch(std, fs)
		}
		return 0, b.run(std)
	}
}

// complete checks the flags and fills in defaults that depend on other flags.
func (b *bench) complete() error {
	known := benchOps()
	if !b.device.onCPU() {
		known = slices.DeleteFunc(known, func(op string) bool { return op == sparseOp })
	}
	b.stream = cmp.Or(b.stream, besideStream)
	switch {
	case !slices.Contains([]string{besideStream, inStream, noStream}, b.stream):
		return usagef("-stream is %q, want %s, %s or %s", b.stream, besideStream, inStream, noStream)
	case len(b.ops) == 1 && b.ops[0] == "all":
		b.ops = known
	case len(b.ops) == 0 && b.tune != "":
		for _, t := range tuned {
			if t.devices || b.device.onCPU() {
				b.ops = append(b.ops, t.name)
			}
		}
	case len(b.ops) == 0:
		b.ops = list{"all_reduce"}
	}
	for _, op := range b.ops {
		if !slices.Contains(known, op) {
			if op == sparseOp {
				return usagef("-op %s is for tensors in CPU memory, not for -device %v", op, &b.device)
			}
			return usagef("unknown -op %q%s (known: %s, all)", op, didYouMean(op, known), strings.Join(known, ", "))
		}
	}
	if b.tensors < 1 {
		return usagef("-tensors %d: want at least 1", b.tensors)
	}
	if b.factor < 2 || b.begin > b.end || b.iters < 0 || b.warmup < 0 || b.repeat < 1 || b.world < 0 {
		return usagef("-b %v -e %v -f %d -n %d -w %d -repeat %d -world %d: -b must not exceed -e, -f must be at least 2, -repeat at least 1, and no number negative",
			&b.begin, &b.end, b.factor, b.iters, b.warmup, b.repeat, b.world)
	}
	if _, err := wireOf(b.wire); err != nil {
		return usagef("-wire: %v", err)
	}
	if b.work != "" && !slices.Contains(cuda.AllReduceWorks(), b.work) {
		return usagef("unknown -work %q (known: %s)", b.work, strings.Join(cuda.AllReduceWorks(), ", "))
	}
	if b.alloc && (!b.device.onCPU() || b.tune != "") {
		return usagef("-alloc is for tensors in CPU memory, and not for -tune")
	}
	if b.lanes != 0 && !b.device.onCPU() {
		return usagef("-lanes is for tensors in CPU memory, not for -device")
	}
	if b.tune != "" && b.work != "" {
		return usagef("-tune measures all ways: leave out -work")
	}
	if b.json && b.tune != "" {
		return usagef("-json is for records: -tune prints text")
	}
	return nil
}

// launch starts the ranks on this host.
func (b *bench) launch(std stdio, fs *flag.FlagSet) (int, error) {
	if err := b.device.check(); err != nil {
		return 0, err
	}
	args := []string{"bench"}
	fs.Visit(func(f *flag.Flag) {
		if f.Name != "world" && f.Name != "progress" {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	return runLocal(std, b.world, append(args, fmt.Sprintf("-progress=%t", b.progress)))
}

// types returns the dtype and the operator.
func (b *bench) types() (d tensor.DType, op pg.ReduceOp, err error) {
	if d, err = tensor.ParseDType(b.dtype); err == nil {
		op, err = backend.ParseReduceOp(b.reduce)
	}
	if err != nil {
		err = usagef("%v", err)
	}
	return d, op, err
}

// run joins the group and measures every size.
func (b *bench) run(std stdio) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	d, op, err := b.types()
	if err != nil {
		return err
	}
	at, err := b.device.open()
	if err != nil {
		return err
	}
	if err := useWire(b.wire); err != nil {
		return err
	}
	g, err := pg.Init(ctx, b.init, b.options(at))
	if err != nil {
		return errors.Join(orWorld(err), at.free())
	}
	if err = at.take(ctx, g, b.stream); err == nil && b.tune != "" {
		err = b.tuneAll(ctx, g, at, d, op, std)
	} else if err == nil {
		err = b.series(ctx, g, at, d, op, std)
	}
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, g.Close(), at.free())
}

// options are those of the group that is measured.
func (b *bench) options(at *gpu) pg.InitOptions {
	host := gloo.Options{Wire: gloo.Wire(b.wire), Sums: gloo.Sums(b.sums), Checksum: b.checksum, Tuning: gloo.Tuning{Lanes: b.lanes}}
	o := pg.Options{Timeout: 5 * time.Minute, Backend: at.backends(), BackendOptions: pg.BackendOptions{host}}
	if at != nil {
		own := cuda.Options{Driver: at.driver, AllReduce: b.work}
		if b.sumsGiven {
			own.CPUOptions = host
		}
		o.BackendOptions = append(o.BackendOptions, own)
	}
	return pg.InitOptions{Options: o}
}

// series measures every operation and size, and reports on rank 0.
func (b *bench) series(ctx context.Context, g *pg.ProcessGroup, at *gpu, d tensor.DType, op pg.ReduceOp, std stdio) error {
	all, err := at.gather(ctx, g)
	if err != nil {
		return err
	}
	var rep *report
	var bar *progress
	if g.Rank() == 0 {
		rep = &report{out: std.out, json: b.json, header: all.lines(), explain: g.Explain}
		rep.header = append(rep.header, b.about(g))
		if b.alloc {
			rep.header = append(rep.header, "tensors of Alloc, in "+memoryOf(g.Explain()))
		}
		if b.progress {
			bar = &progress{out: std.err, began: time.Now()}
			defer bar.clear()
		}
	}
	if err := b.connect(ctx, g, at); err != nil {
		return err
	}
	for _, name := range b.ops {
		sizes := b.sizesOf(name)
		for i, size := range sizes {
			r, err := b.measure(ctx, g, at, name, d, op, size, func(round int) {
				bar.show("%s %s, size %d of %d, round %d of %d", name, bytesize.Name(size), i+1, len(sizes), round+1, b.repeat)
			})
			if err != nil {
				return fmt.Errorf("%s of %d bytes: %w", name, size, err)
			}
			if rep != nil {
				r.GPUs = all.count()
				bar.clear()
				if err := rep.add(r); err != nil {
					return err
				}
			}
		}
	}
	if rep != nil {
		return rep.end()
	}
	return nil
}

// about is a line for the head of a table: who measures, and how.
func (b *bench) about(g *pg.ProcessGroup) string {
	text := fmt.Sprintf("ranks: %d", g.Size())
	if e := g.Explain(); len(e) > 0 && e[0].Hosts > 0 {
		text += fmt.Sprintf(", hosts: %d", e[0].Hosts)
	}
	text += fmt.Sprintf(", warm-up iterations: %d, measurements: %d (the best counts)", b.warmup, b.repeat)
	if b.check {
		return text + ", results: every element is checked once"
	}
	return text + ", results: not checked"
}

// connect has the ranks' devices connect, by a collective. Messages do not do that, and would go through the host.
func (b *bench) connect(ctx context.Context, g *pg.ProcessGroup, at *gpu) (err error) {
	if at == nil {
		return nil
	}
	defer func() { err = errors.Join(err, at.freeTensors()) }()
	c, err := newCase(at.tensor, "all_reduce", g, at, tensor.Float32, pg.Sum(), 4, false, b.tensors)
	if err != nil {
		return err
	}
	w, err := c.issue(at.context(ctx))
	if err != nil {
		return err
	}
	return at.finish(ctx, w)
}

// sizesOf lists the sizes of one operation. A barrier has none.
func (b *bench) sizesOf(op string) []int {
	if op == "barrier" {
		return []int{0}
	}
	if len(b.sizes) > 0 {
		return b.sizes
	}
	var sizes []int
	for size := int(b.begin); size <= int(b.end); size = max(size*b.factor, 1) {
		sizes = append(sizes, size)
		if size > int(b.end)/b.factor {
			break // the product may be no int
		}
	}
	return sizes
}

// queued is the number of calls before one wait for the stream, as in nccl-tests.
const queued = 20

// queues is how many such rows are measured; the median counts. In one row alone the first calls after a
// pause weigh as much as all others.
const queues = 11

// measure times one size.
func (b *bench) measure(ctx context.Context, g *pg.ProcessGroup, at *gpu, name string, d tensor.DType, op pg.ReduceOp, size int, round func(int)) (record, error) {
	mk, free := at.tensor, at.freeTensors
	if b.alloc {
		mk, free = allocated(ctx, g)
	}
	c, err := newCase(mk, name, g, at, d, op, size, b.inPlace, b.tensors)
	if err != nil {
		return record{}, err
	}
	calls := at.context(ctx)
	if b.check {
		if err := c.check(calls, g.Rank()); err != nil {
			return record{}, err
		}
	}
	var latest *work.Work
	once := func() error {
		w, err := c.issue(calls)
		if err != nil || w == nil {
			return err
		}
		latest = w
		return at.finish(ctx, w)
	}
	several := func(n int64) (each time.Duration, err error) {
		began := time.Now()
		for i := int64(0); i < n && err == nil; i++ {
			err = once()
		}
		return time.Since(began) / time.Duration(n), err
	}
	each, err := several(int64(max(b.warmup, 1)))
	if err != nil {
		return record{}, err
	}
	iters := []int64{int64(b.iters)}
	if b.iters == 0 {
		// The first calls connect the ranks. Further calls let the kernel find a CPU for
		// each rank, and give the number of calls to measure.
		for _, part := range []struct {
			budget time.Duration
			least  int64
		}{{b.budget / 10, 1}, {b.budget / 5, 1}, {b.budget, 10}} {
			// Every rank needs the same number; rank 0's guess counts.
			iters[0] = min(max(int64(part.budget/max(each, 1)), part.least), 20000)
			if err := pg.Wait(g.Broadcast(ctx, pg.Slice(iters), 0)); err != nil {
				return record{}, err
			}
			if part.budget == b.budget {
				break
			}
			if each, err = several(iters[0]); err != nil {
				return record{}, err
			}
		}
	}
	best := record{
		System: "c10d-go", Version: version(), Op: name, DType: d.String(), Size: size, World: g.Size(), Bytes: c.bytes,
		Iters: int(iters[0]), Repeat: b.repeat, P50: math.Inf(1), Device: at.where(), InPlace: c.inPlace, Alloc: b.alloc,
	}
	if at != nil && b.stream != besideStream {
		best.Stream = b.stream
	}
	if name == "all_reduce_coalesced" && b.tensors != coalesced {
		best.Tensors = b.tensors
	}
	// Explain tells how all_reduce works for float32 sums only.
	allReduce := strings.HasPrefix(name, "all_reduce")
	if how, ok := choiceOf(g.Explain(), at, name, size); ok && (!allReduce || d == tensor.Float32 && op.Kind() == pg.Sum().Kind()) {
		best.Work = how.Algorithm
	}
	if name == "all_reduce" && b.work != "" {
		best.Work = b.work
	}
	worst := 0.0
	for i := range b.repeat {
		round(i)
		if err := g.Barrier(ctx); err != nil {
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
		wall := []int64{int64(last), 0, 0}
		if at.queues() {
			var each, call []time.Duration
			for range queues {
				e, k, err := c.queue(calls, min(queued, int(iters[0])))
				if err != nil {
					return record{}, err
				}
				each, call = append(each, e), append(call, k)
			}
			slices.Sort(each)
			slices.Sort(call)
			wall[1], wall[2] = int64(each[queues/2]), int64(call[queues/2])
		}
		if err := pg.Wait(g.AllReduce(ctx, pg.Slice(stamps), pg.Max())); err != nil {
			return record{}, err
		}
		if err := pg.Wait(g.AllReduce(ctx, pg.Slice(wall), pg.Max())); err != nil {
			return record{}, err
		}
		slices.Sort(stamps)
		p50 := float64(stamps[len(stamps)/2]) / 1e3 / c.steps
		worst = max(worst, p50)
		if p50 < best.P50 {
			best.P50, best.P99 = p50, float64(stamps[len(stamps)*99/100])/1e3/c.steps
			best.Avg = float64(wall[0]) / 1e3 / c.steps / float64(len(stamps))
		}
		if each := float64(wall[1]) / 1e3 / c.steps; each > 0 && (best.Queued == 0 || each < best.Queued) {
			best.Queued = each
		}
		if call := float64(wall[2]) / 1e3 / c.steps; call > 0 && (best.Call == 0 || call < best.Call) {
			best.Call = call
		}
	}
	best.Spread = worst / best.P50
	best.AlgBW = float64(best.Bytes) / best.P50 / 1e3
	best.BusBW = best.AlgBW * c.busFactor
	if latest != nil {
		if err := latest.Wait(ctx); err != nil {
			return record{}, err
		}
	}
	return best, free()
}

// memoryOf describes the memory of tensors of Alloc.
func memoryOf(all []backend.Explanation) string {
	for _, e := range all {
		for _, c := range e.Choices {
			if c.Op == "alloc" {
				return c.Algorithm + ": " + c.Why
			}
		}
	}
	return "ordinary memory"
}

// allocated returns a function that makes tensors with Alloc, and one that frees them all.
func allocated(ctx context.Context, g *pg.ProcessGroup) (mk tensors, free func() error) {
	var all []*tensor.Tensor
	mk = func(d tensor.DType, count int) (*tensor.Tensor, error) {
		t, err := g.Alloc(ctx, d, count)
		if err == nil {
			all = append(all, t)
		}
		return t, err
	}
	return mk, func() error {
		var errs []error
		for _, t := range all {
			errs = append(errs, g.Free(t))
		}
		return errors.Join(errs...)
	}
}
