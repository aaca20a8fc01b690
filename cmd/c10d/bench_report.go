package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
)

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

	// Of tensors on devices.
	Device string  `json:"device,omitempty"` // cuda or sim; empty is the CPU
	GPUs   int     `json:"gpus,omitempty"`   // how many the ranks have in all
	Work   string  `json:"work,omitempty"`   // what did it: host, device, ...
	Queued float64 `json:"time_us_queued,omitempty"`
	Call   float64 `json:"time_us_call,omitempty"` // from call to return, on average of those in Queued
	Stream string  `json:"stream,omitempty"`       // -stream, if it is not the default

	InPlace bool `json:"in_place,omitempty"` // where the operation has two tensors
	Alloc   bool `json:"alloc,omitempty"`    // the tensors are of Alloc
	Tensors int  `json:"tensors,omitempty"`  // -tensors, if it is not the default
}

// table is the subject of a table.
type table struct {
	op, dtype, device string
	world             int
}

func (r record) table() table { return table{r.Op, r.DType, r.Device, r.World} }

func (t table) String() string {
	return fmt.Sprintf("%s of %s%s, %d ranks", t.op, t.dtype, on(t.device), t.world)
}

// on names a device, and nothing for the CPU.
func on(device string) string {
	if device == "" {
		return ""
	}
	return " on " + device
}

// name is the system that measured, the work that it used, and its kind of memory.
func (r record) name() string {
	name := r.System
	if r.Work != "" {
		name += " " + r.Work
	}
	if r.Alloc {
		name += " alloc"
	}
	return name
}

// records are the fastest records of each case, in the order in which they were added.
type records []record

// sameOp are other systems' names of operations.
var sameOp = map[string]string{
	"allreduce": "all_reduce", "allgather": "all_gather_into_tensor", "alltoall": "all_to_all_single", "sendrecv": "send_recv",
}

// loadRecords reads files of one JSON record a line. Records of a case that a
// system does not support have no time and are left out.
func loadRecords(files []string) (records, error) {
	var all records
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		dec := json.NewDecoder(f)
		for err == nil {
			var r record
			if err = dec.Decode(&r); err != nil || r.P50 <= 0 {
				continue
			}
			if ours := sameOp[r.Op]; ours != "" {
				r.Op = ours
			}
			all.keep(r)
		}
		f.Close()
		if err != io.EOF {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return all, nil
}

// keep adds r, or puts it in place of a slower one of the same case.
func (rs *records) keep(r record) {
	for i, have := range *rs {
		if have.name() == r.name() && have.table() == r.table() && have.Size == r.Size && have.InPlace == r.InPlace && have.Tensors == r.Tensors {
			if r.P50 < have.P50 {
				(*rs)[i] = r
			}
			return
		}
	}
	*rs = append(*rs, r)
}

// of returns the records of one table.
func (rs records) of(t table) records {
	var some records
	for _, r := range rs {
		if r.table() == t {
			some = append(some, r)
		}
	}
	return some
}

// systems returns the names of the records, in their order.
func (rs records) systems() []string {
	var names []string
	for _, r := range rs {
		if !slices.Contains(names, r.name()) {
			names = append(names, r.name())
		}
	}
	return names
}

// at returns a system's record of a size.
func (rs records) at(system string, size int) (record, bool) {
	i := slices.IndexFunc(rs, func(r record) bool { return r.name() == system && r.Size == size })
	if i < 0 {
		return record{}, false
	}
	return rs[i], true
}

// report prints records as they come, a table for each operation.
type report struct {
	out   io.Writer
	json  bool
	peers records

	header  []string                     // lines above the first table
	explain func() []backend.Explanation // of the group; nil if unknown

	ours    records
	table   table
	beside  records
	systems []string // of the peers in it
}

func (p *report) add(r record) error {
	p.ours.keep(r)
	if p.json {
		return json.NewEncoder(p.out).Encode(r)
	}
	var b strings.Builder
	if t := r.table(); t != p.table {
		if p.table.op != "" {
			b.WriteByte('\n')
		}
		for _, line := range p.header {
			fmt.Fprintf(&b, "# %s\n", line)
		}
		p.header = nil
		p.table = t
		p.beside = p.peers.of(t)
		p.systems = p.beside.systems()
		fmt.Fprintf(&b, "# %v, times in us over iterations of the slowest rank\n", t)
		if p.explain != nil {
			for _, c := range choicesOf(p.explain(), r.Device, r.Op) {
				fmt.Fprintf(&b, "# %s: %s\n", c.Algorithm, c.Why)
			}
		}
		fmt.Fprintf(&b, "%12s %8s %12s %12s %12s %10s %10s", "bytes", "iters", "p50", "p99", "avg", "algbw GB/s", "busbw GB/s")
		if r.Device != "" {
			fmt.Fprintf(&b, " %12s %10s %8s", "queued", "call", "work")
		}
		for _, system := range p.systems {
			fmt.Fprintf(&b, " %*s %8s", width(system), system, "ratio")
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%12d %8d %12.2f %12.2f %12.2f %10.3f %10.3f", r.Bytes, r.Iters, r.P50, r.P99, r.Avg, r.AlgBW, r.BusBW)
	if r.Device != "" {
		fmt.Fprintf(&b, " %12.2f %10.2f %8s", r.Queued, r.Call, cmp.Or(r.Work, "-"))
	}
	for _, system := range p.systems {
		if peer, ok := p.beside.at(system, r.Size); ok {
			fmt.Fprintf(&b, " %*.2f %7.2fx", width(system), peer.P50, peer.P50/r.P50)
		} else {
			fmt.Fprintf(&b, " %*s %8s", width(system), "-", "-")
		}
	}
	b.WriteByte('\n')
	_, err := io.WriteString(p.out, b.String())
	return err
}

// end prints the average after the last table, as nccl-tests does.
func (p *report) end() error {
	sum, n := 0.0, 0.0
	for _, r := range p.ours {
		if r.BusBW > 0 {
			sum, n = sum+r.BusBW, n+1
		}
	}
	if p.json || n == 0 {
		return nil
	}
	_, err := fmt.Fprintf(p.out, "# average bus bandwidth: %.3f GB/s\n", sum/n)
	return err
}

func width(system string) int { return max(12, len(system)) }

// report is -load.
func (b *bench) report(std stdio) error {
	ours, err := loadRecords(b.load)
	if err != nil {
		return err
	}
	peers, err := loadRecords(b.beside)
	if err != nil {
		return err
	}
	rep := &report{out: std.out, json: b.json, peers: peers}
	for _, op := range b.ops {
		for _, first := range ours {
			if first.Op != op || len(rep.ours.of(first.table())) > 0 {
				continue
			}
			of := ours.of(first.table())
			slices.SortStableFunc(of, func(x, y record) int { return x.Size - y.Size })
			for _, r := range of {
				if err := rep.add(r); err != nil {
					return err
				}
			}
		}
	}
	if len(rep.ours) == 0 {
		return fmt.Errorf("%v: no record of %v", b.load, b.ops)
	}
	if b.bars != "" {
		return b.reportBars(std, ours, peers)
	}
	return nil
}

// progress is a line on a terminal that shows the state of a long run. Nil shows nothing.
type progress struct {
	out         io.Writer
	began, last time.Time
	shown       int // characters
}

// A run of less than quiet shows no progress. The line changes at intervals of refreshed.
const (
	quiet     = time.Second
	refreshed = 200 * time.Millisecond
)

func (p *progress) show(format string, args ...any) {
	if p == nil || time.Since(p.began) < quiet || time.Since(p.last) < refreshed {
		return
	}
	p.last = time.Now()
	p.write(fmt.Sprintf("%v  ", time.Since(p.began).Round(time.Second)) + fmt.Sprintf(format, args...))
}

// write leaves the cursor at the beginning of the line, so that the next row of the table
// replaces it.
func (p *progress) write(line string) {
	fmt.Fprintf(p.out, "\r%-*s\r", p.shown, line)
	p.shown = len(line)
}

func (p *progress) clear() {
	if p != nil && p.shown > 0 {
		p.write("")
	}
}
