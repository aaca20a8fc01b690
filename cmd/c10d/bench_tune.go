package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// tuned lists the collectives with the operation of the benchmark that measures them, and
// whether its bytes are those of all ranks' blocks.
var tuned = []struct {
	op     plan.Op
	name   string
	blocks bool
}{
	{plan.OpAllReduce, "all_reduce", false},
	{plan.OpReduce, "reduce", false},
	{plan.OpReduceScatter, "reduce_scatter_tensor", true},
	{plan.OpAllGather, "all_gather_into_tensor", true},
	{plan.OpBroadcast, "broadcast", false},
	{plan.OpGather, "gather", true},
	{plan.OpScatter, "scatter", true},
}

// tuneAll measures the candidate algorithms at every size and writes the table. Each
// algorithm runs in a group of its own, whose table has only this algorithm.
func (b *bench) tuneAll(ctx context.Context, g *pg.ProcessGroup, d tensor.DType, op backend.ReduceOp, std stdio) error {
	hosts := 1
	for _, e := range g.Explain() {
		hosts = max(hosts, e.Hosts)
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
		for _, size := range b.sizesOf(t.name) {
			bytes := int64(size)
			if t.blocks {
				bytes /= int64(g.Size())
			}
			for _, c := range choice.Candidates(t.op, int64(size), g.Size(), hosts) {
				if bySize[c.String()] == nil {
					names = append(names, c.String())
				}
				bySize[c.String()] = append(bySize[c.String()], choice.Row{
					Op: t.op, Wire: "tcp", Ranks: g.Size(), Hosts: hosts, Bytes: bytes, Algorithm: c.Algorithm.Name, Chunk: c.Chunk, Time: 1,
				})
			}
		}
		for i, name := range names {
			bar.show("%s: %s, %d of %d", t.name, name, i+1, len(names))
			measured, err := b.tuneOne(ctx, g, d, op, t.name, t.blocks, bySize[name], filepath.Join(dir, fmt.Sprint(t.name, i)))
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
		return usagef("-tune: there is only one algorithm for -op %s", &b.ops)
	}
	table, err := choice.NewTable("c10d "+strings.Join(os.Args[1:], " "), machine(g), rows)
	if err != nil {
		return err
	}
	f, err := os.Create(b.tune)
	if err != nil {
		return err
	}
	_, err = table.WriteTo(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	fmt.Fprintf(std.out, "%d measurements of %d ranks on %d hosts are in %s: use it with gloo.Options.Table or C10D_TABLE\n", len(rows), g.Size(), hosts, b.tune)
	return nil
}

// machine describes the machine on which a table was made.
func machine(g *pg.ProcessGroup) string {
	host := fmt.Sprintf("%d CPUs, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
	if cc, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil {
		host += ", TCP with " + strings.TrimSpace(string(cc))
	}
	return fmt.Sprintf("%s; %d ranks", host, g.Size())
}

// tuneOne measures one algorithm at the sizes in rows.
func (b *bench) tuneOne(ctx context.Context, g *pg.ProcessGroup, d tensor.DType, op backend.ReduceOp, name string, blocks bool, rows []choice.Row, file string) ([]choice.Row, error) {
	table, err := choice.NewTable("c10d bench", "one algorithm", rows)
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
	one, err := pg.New(ctx, store.Prefix(filepath.Base(file), g.Store()), g.Rank(), g.Size(), pg.Options{
		Timeout: 5 * time.Minute, Backend: "cpu:" + gloo.Name, BackendOptions: []backend.SpecificOptions{gloo.Options{Wire: gloo.WireTCP, Table: file}},
	})
	if err != nil {
		return nil, err
	}
	for i := range rows {
		size := int(rows[i].Bytes)
		if blocks {
			size *= g.Size()
		}
		r, err := b.measure(ctx, one, nil, name, d, op, size, func(int) {})
		if err != nil {
			one.Abort(err)
			return nil, errors.Join(err, one.Close())
		}
		rows[i].Time = time.Duration(r.P50 * 1e3)
	}
	return rows, one.Close()
}
