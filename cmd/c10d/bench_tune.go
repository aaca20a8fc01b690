package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// tuned lists the collectives. Name is the operation of the benchmark that measures one. Blocks says
// that its bytes are those of all ranks' blocks, devices that CUDA tensors have several ways of it.
var tuned = []struct {
	op              plan.Op
	name            string
	blocks, devices bool
}{
	{plan.OpAllReduce, "all_reduce", false, true},
	{plan.OpReduce, "reduce", false, true},
	{plan.OpReduceScatter, "reduce_scatter_tensor", true, true},
	{plan.OpAllGather, "all_gather_into_tensor", true, true},
	{plan.OpBroadcast, "broadcast", false, true},
	{plan.OpGather, "gather", true, true},
	{plan.OpScatter, "scatter", true, true},
	{plan.OpAllToAll, "all_to_all_single", true, true},
}

// tuning is what is tuned: the algorithms of the native wire over TCP, or the ways of devices.
type tuning struct {
	catalog    choice.Catalog
	wire       string // of the rows
	candidates func(op plan.Op, bytes int64) []candidate
	options    func(table string) pg.Options // of a group that has a table
	time       func(r record) float64        // us
	use        string                        // how the table is used
}

// candidate is an algorithm to measure. The chunk is that of a table's rows.
type candidate struct {
	name  string
	chunk int64
}

func (c candidate) String() string { return choice.Name(c.name, c.chunk) }

// tuning returns what the flags ask for. On devices it all-reduces a tensor, so that the ranks find out
// their link.
func (b *bench) tuning(ctx context.Context, g *pg.ProcessGroup, at *gpu) (t tuning, err error) {
	if at == nil {
		return tuning{
			catalog: plan.Lookup, wire: "tcp", use: "gloo.Options.Table or C10D_TABLE",
			candidates: func(op plan.Op, bytes int64) (all []candidate) {
				for _, c := range choice.Candidates(op, bytes) {
					all = append(all, candidate{c.Algorithm.Name, c.Chunk})
				}
				return all
			},
			options: func(table string) pg.Options {
				return pg.Options{Backend: "cpu:" + gloo.Name, BackendOptions: pg.BackendOptions{gloo.Options{Wire: gloo.WireTCP, Tuning: gloo.Tuning{Table: table}}}}
			},
			time: func(r record) float64 { return r.P50 },
		}, nil
	}
	x, err := at.tensor(tensor.Float32, 1)
	if err != nil {
		return t, err
	}
	w, err := g.AllReduce(at.context(ctx), x, pg.Sum())
	if err == nil {
		err = w.Wait(ctx)
	}
	if err = errors.Join(err, at.freeTensors()); err != nil {
		return t, err
	}
	var link ways.Link
	for _, e := range g.Explain() {
		if e.Backend == cuda.Name {
			link = ways.Link(e.DeviceLink)
		}
	}
	return tuning{
		catalog: ways.Catalog, wire: string(link), use: "cuda.Options.Table or C10D_CUDA_TABLE",
		candidates: func(op plan.Op, bytes int64) (all []candidate) {
			for _, w := range ways.Candidates(op, link, bytes) {
				all = append(all, candidate{w.Name, int64(w.Blocks)})
			}
			return all
		},
		options: func(table string) pg.Options {
			o := b.options(at).Options
			for i, own := range o.BackendOptions {
				if own, ok := own.(cuda.Options); ok {
					own.Table = table
					o.BackendOptions[i] = own
				}
			}
			return o
		},
		time: func(r record) float64 { return cmp.Or(r.Queued, r.P50) },
	}, nil
}

// tuneAll measures the candidate algorithms at every size and writes the table. Each
// algorithm runs in a group of its own, whose table has only this algorithm.
func (b *bench) tuneAll(ctx context.Context, g *pg.ProcessGroup, at *gpu, d tensor.DType, op pg.ReduceOp, std stdio) error {
	hosts := 1
	for _, e := range g.Explain() {
		hosts = max(hosts, e.Hosts)
	}
	tune, err := b.tuning(ctx, g, at)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "c10d-tune")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var bar *progress
	if g.Rank() == 0 && b.progress {
		bar = &progress{out: std.err, began: time.Now()}
		defer bar.clear()
	}
	var rows []choice.Row
	for _, t := range tuned {
		if !slices.Contains(b.ops, t.name) {
			continue
		}
		// For each candidate algorithm, the sizes to measure.
		var names []string
		bySize := map[string][]choice.Row{}
		seen := map[int64]bool{}
		for _, size := range b.sizesOf(t.name) {
			bytes := int64(size)
			if t.blocks {
				bytes /= int64(g.Size())
			}
			if seen[bytes] {
				continue // blocks of several sizes can have the same bytes
			}
			seen[bytes] = true
			for _, c := range tune.candidates(t.op, int64(size)) {
				if bySize[c.String()] == nil {
					names = append(names, c.String())
				}
				bySize[c.String()] = append(bySize[c.String()], choice.Row{
					Op: t.op, Wire: tune.wire, Ranks: g.Size(), Hosts: hosts, Bytes: bytes, Algorithm: c.name, Chunk: c.chunk, Time: 1,
				})
			}
		}
		for i, name := range names {
			bar.show("%s: %s, %d of %d", t.name, name, i+1, len(names))
			measured, err := b.tuneOne(ctx, g, at, tune, d, op, t.name, t.blocks, bySize[name], filepath.Join(dir, fmt.Sprint(t.name, i)))
			if err != nil {
				return fmt.Errorf("%s by %s: %w", t.name, name, err)
			}
			rows = append(rows, measured...)
		}
	}
	if g.Rank() != 0 {
		return nil
	}
	if len(rows) == 0 {
		return usagef("-tune: there is only one algorithm for -op %s over %s", &b.ops, tune.wire)
	}
	table, err := tune.catalog.NewTable(b.command, machine(g, at), rows)
	if err != nil {
		return err
	}
	f, err := os.Create(b.tune)
	if err != nil {
		_, printed := table.WriteTo(std.out)
		return errors.Join(fmt.Errorf("%w: the table is on standard output instead", err), printed)
	}
	_, err = table.WriteTo(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	fmt.Fprintf(std.out, "%d measurements of %d ranks on %d hosts are in %s: use it with %s\n", len(rows), g.Size(), hosts, b.tune, tune.use)
	return nil
}

// machine describes the machine on which a table was made.
func machine(g *pg.ProcessGroup, at *gpu) string {
	if at != nil {
		return fmt.Sprintf("%d CPUs, %s/%s, rank 0 on %s; %d ranks", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, at.describe(), g.Size())
	}
	host := fmt.Sprintf("%d CPUs, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
	if cc, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil {
		host += ", TCP with " + strings.TrimSpace(string(cc))
	}
	return fmt.Sprintf("%s; %d ranks", host, g.Size())
}

// tuneOne measures one algorithm at the sizes in rows.
func (b *bench) tuneOne(ctx context.Context, g *pg.ProcessGroup, at *gpu, tune tuning, d tensor.DType, op pg.ReduceOp, name string, blocks bool, rows []choice.Row, file string) ([]choice.Row, error) {
	table, err := tune.catalog.NewTable("c10d bench", "one algorithm", rows)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	_, err = table.WriteTo(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	o := tune.options(file)
	o.Timeout = 5 * time.Minute
	one, err := pg.New(ctx, store.Prefix(filepath.Base(file), g.Store()), g.Rank(), g.Size(), o)
	if err != nil {
		return nil, err
	}
	for i := range rows {
		size := int(rows[i].Bytes)
		if blocks {
			size *= g.Size()
		}
		r, err := b.measure(ctx, one, at, name, d, op, size, func(int) {})
		if err != nil {
			one.Abort(err)
			return nil, errors.Join(err, one.Close())
		}
		rows[i].Time = max(time.Duration(tune.time(r)*1e3), 1)
	}
	return rows, one.Close()
}
