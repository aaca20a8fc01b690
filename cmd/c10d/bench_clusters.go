package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// clusterSpec is a flag such as cuda,cuda/cpu,cpu: for each rank its cluster and the kind of its device.
type clusterSpec struct {
	text    string
	of      []int    // a rank's cluster
	kinds   []string // of a rank's device
	devices string   // the kind of those that are no CPUs
}

func (c *clusterSpec) String() string { return c.text }

func (c *clusterSpec) Set(s string) error {
	parsed := clusterSpec{text: s}
	for i, part := range strings.Split(s, "/") {
		for _, kind := range strings.Split(part, ",") {
			if kind != onCPU && kind != onCUDA && kind != onSim {
				return fmt.Errorf("%q in %q is not cpu, cuda or sim", kind, s)
			}
			if kind != onCPU {
				if parsed.devices != "" && parsed.devices != kind {
					return fmt.Errorf("%q has devices of kinds %s and %s", s, parsed.devices, kind)
				}
				parsed.devices = kind
			}
			parsed.of, parsed.kinds = append(parsed.of, i), append(parsed.kinds, kind)
		}
	}
	if parsed.of[len(parsed.of)-1] == 0 {
		return fmt.Errorf("%q is one cluster, want at least two, with a slash between them", s)
	}
	*c = parsed
	return nil
}

// all returns the devices of all ranks.
func (c *clusterSpec) all() devices {
	d := devices{kind: c.devices}
	for _, kind := range c.kinds {
		if kind != onCPU {
			d.index = append(d.index, len(d.index))
		}
	}
	return d
}

// clusterModes are the ways that -clusters compares. All ranks have a group for each.
var clusterModes = []struct{ name, what string }{
	{"overlapped", "through the clusters, in chunks whose stages overlap"},
	{"serial", "through the clusters in one chunk: each stage begins when the one before it has ended"},
	{"flat", "every rank's tensor through its host, and sums in rank order from rank to rank"},
}

// clusterTime is one line of -clusters.
type clusterTime struct {
	Op       string  `json:"op"`
	DType    string  `json:"dtype"`
	Clusters string  `json:"clusters"`
	Size     int     `json:"size"`
	Iters    int     `json:"iters"`
	Overlap  float64 `json:"time_us_overlapped"`
	Serial   float64 `json:"time_us_serial"`
	Flat     float64 `json:"time_us_flat"`
	Call     float64 `json:"time_us_call"` // of the overlapped way: the call, and ordering the caller's stream after it
}

// The bars of -clusters: the overlapped way's time by that of the others, from barFrom bytes on.
const (
	barSerial, barFlat = 0.75, 0.5
	barFrom            = 16 << 20
)

// runClusters measures operations of ranks in several clusters, in all ways by turns.
func (b *bench) runClusters(std stdio) error {
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
	g, err := pg.Init(ctx, b.init, pg.InitOptions{Options: pg.Options{Timeout: 5 * time.Minute, Backend: "cpu:" + gloo.Name}})
	if err != nil {
		return orWorld(err)
	}
	at, err := b.openCluster(ctx, g)
	if err == nil {
		err = b.compareClusters(ctx, g, at, d, op, std)
	}
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, g.Close(), at.free())
}

// openCluster opens this rank's device, nil on the CPU.
func (b *bench) openCluster(ctx context.Context, g *pg.ProcessGroup) (*gpu, error) {
	c := &b.clusters
	if g.Size() != len(c.of) {
		return nil, usagef("-clusters %s is for %d ranks, the job has %d", c, len(c.of), g.Size())
	}
	if c.kinds[g.Rank()] == onCPU {
		return nil, nil
	}
	number := 0
	for _, kind := range c.kinds[:g.Rank()] {
		if kind != onCPU {
			number++
		}
	}
	own := c.all()
	at, err := own.open()
	if err != nil {
		return nil, err
	}
	if err := at.use(number, b.stream); err != nil {
		return nil, errors.Join(err, at.free())
	}
	return at, nil
}

// clusterGroup makes the group of a mode.
func (b *bench) clusterGroup(ctx context.Context, g *pg.ProcessGroup, at *gpu, mode string) (*pg.ProcessGroup, error) {
	own := cuda.Options{Chunk: int(b.chunk), Slots: b.slots, NoDevice: at == nil}
	if at != nil {
		own.Driver = at.driver
	}
	host := gloo.Options{Cluster: strconv.Itoa(b.clusters.of[g.Rank()]), TCP: b.tcp()}
	switch mode {
	case "serial":
		own.Chunk = math.MaxInt32
	case "flat":
		host.Sums = gloo.SumsInRankOrder
	}
	own.CPUOptions = host
	return pg.New(ctx, store.Prefix("bench/"+mode, g.Store()), g.Rank(), g.Size(), pg.Options{
		Timeout: 5 * time.Minute, Backend: cuda.Name, BackendOptions: []backend.SpecificOptions{own},
	})
}

func (b *bench) compareClusters(ctx context.Context, g *pg.ProcessGroup, at *gpu, d tensor.DType, op backend.ReduceOp, std stdio) (err error) {
	groups := make([]*pg.ProcessGroup, len(clusterModes))
	for i, m := range clusterModes {
		if groups[i], err = b.clusterGroup(ctx, g, at, m.name); err != nil {
			return fmt.Errorf("group of the %s way: %w", m.name, err)
		}
		defer func() {
			if err != nil {
				groups[i].Abort(err)
			}
			err = errors.Join(err, groups[i].Close())
		}()
	}
	where := onCPU
	if at != nil {
		where = at.describe()
	}
	all, err := pg.AllGatherObject(ctx, g, where, pg.JSON[string]{})
	if err != nil {
		return err
	}
	first := g.Rank() == 0 && !b.json
	if first {
		for r, x := range all {
			fmt.Fprintf(std.out, "# rank %d in cluster %d: %s\n", r, b.clusters.of[r], x)
		}
		for _, m := range clusterModes {
			fmt.Fprintf(std.out, "# %s: %s\n", m.name, m.what)
		}
	}
	for _, name := range b.ops {
		if first {
			fmt.Fprintf(std.out, "# %s of %v, %d ranks in clusters %s, medians in us of the slowest rank\n", name, d, g.Size(), &b.clusters)
			fmt.Fprintf(std.out, "%12s %6s %11s %11s %7s %11s %7s %9s\n", "bytes", "iters", "overlapped", "serial", "ratio", "flat", "ratio", "call")
		}
		holds := true
		for _, size := range b.sizesOf(name) {
			r, err := b.clusterSize(ctx, g, groups, at, name, d, op, size)
			if err != nil {
				return fmt.Errorf("%s of %d bytes: %w", name, size, err)
			}
			bySerial, byFlat := r.Overlap/r.Serial, r.Overlap/r.Flat
			if size >= barFrom {
				holds = holds && bySerial <= barSerial && byFlat <= barFlat
			}
			switch {
			case first:
				fmt.Fprintf(std.out, "%12d %6d %11.1f %11.1f %7.2f %11.1f %7.2f %9.1f\n", r.Size, r.Iters, r.Overlap, r.Serial, bySerial, r.Flat, byFlat, r.Call)
			case g.Rank() == 0:
				if err := json.NewEncoder(std.out).Encode(r); err != nil {
					return err
				}
			}
		}
		if first && slices.ContainsFunc(b.sizesOf(name), func(n int) bool { return n >= barFrom }) {
			fmt.Fprintf(std.out, "# from %s on: <= %.2f of serial and <= %.2f of flat: %s\n", bytesize.Name(barFrom), barSerial, barFlat, map[bool]string{true: "holds", false: "does not hold"}[holds])
		}
	}
	return nil
}

// clusterSize measures one size in all ways by turns. It returns, for each, the least median of -repeat
// measurements.
func (b *bench) clusterSize(ctx context.Context, g *pg.ProcessGroup, groups []*pg.ProcessGroup, at *gpu, name string, d tensor.DType, op backend.ReduceOp, size int) (clusterTime, error) {
	calls := at.context(ctx)
	cases := make([]*benchCase, len(groups))
	for i, one := range groups {
		c, err := newCase(at.tensor, name, one, at, d, op, size, b.inPlace, b.tensors)
		if err == nil && b.check {
			err = c.check(calls, g.Rank())
		}
		if err != nil {
			return clusterTime{}, fmt.Errorf("%s way: %w", clusterModes[i].name, err)
		}
		cases[i] = c
	}
	// The slowest way decides how many iterations fit.
	var slowest time.Duration
	for _, c := range cases {
		for range max(b.warmup, 1) {
			each, _, err := c.once(ctx, calls)
			if err != nil {
				return clusterTime{}, err
			}
			slowest = max(slowest, each)
		}
	}
	iters := []int64{int64(b.iters)}
	if b.iters == 0 {
		iters[0] = min(max(int64(b.budget/max(slowest, 1)), 5), 1000)
		if err := pg.BroadcastSlice(ctx, g, iters, 0); err != nil {
			return clusterTime{}, err
		}
	}
	best := []float64{math.Inf(1), math.Inf(1), math.Inf(1)}
	call := math.Inf(1)
	for range b.repeat {
		for i, c := range cases {
			// Total and blocked times of every iteration, of the slowest rank.
			times := make([]int64, 2*iters[0])
			for k := range iters[0] {
				if err := pg.AllReduceSlice(ctx, g, []int64{0}, backend.Sum()); err != nil { // all begin together
					return clusterTime{}, err
				}
				each, blocked, err := c.once(ctx, calls)
				if err != nil {
					return clusterTime{}, err
				}
				times[k] = int64(each)
				if at != nil {
					times[iters[0]+k] = int64(blocked)
				}
			}
			if err := pg.AllReduceSlice(ctx, g, times, backend.Max()); err != nil {
				return clusterTime{}, err
			}
			median := func(ns []int64) float64 {
				slices.Sort(ns)
				return float64(ns[len(ns)/2]) / 1e3
			}
			best[i] = min(best[i], median(times[:iters[0]]))
			if i == 0 {
				call = min(call, median(times[iters[0]:]))
			}
		}
	}
	return clusterTime{
		Op: name, DType: d.String(), Clusters: b.clusters.text, Size: cases[0].bytes, Iters: int(iters[0]),
		Overlap: best[0], Serial: best[1], Flat: best[2], Call: call,
	}, at.freeTensors()
}

// once makes one call and waits for its end. Blocked is how long the caller's goroutine needed until it could do
// something else.
func (c *benchCase) once(ctx, calls context.Context) (each, blocked time.Duration, err error) {
	start := time.Now()
	w, err := c.issue(calls)
	if err != nil || w == nil {
		return 0, 0, err
	}
	if c.at.queues() {
		if err := c.at.order(ctx, w); err != nil {
			return 0, 0, err
		}
		blocked = time.Since(start)
	}
	if err := c.at.finish(ctx, w); err != nil {
		return 0, 0, err
	}
	each = time.Since(start)
	return each, blocked, w.Wait(ctx) // the Work ends a moment after the stream
}
