package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
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

// table names the table that has r.
func (r record) table() string {
	device := ""
	if r.Device != "" {
		device = " on " + r.Device
	}
	return fmt.Sprintf("%s of %s%s, %d ranks", r.Op, r.DType, device, r.World)
}

// report prints records as they come, a table for each operation.
type report struct {
	out     io.Writer
	json    bool
	header  []string // lines above the first table
	explain func() []backend.Explanation

	table string
	sum   float64 // of n bus bandwidths
	n     int
}

func (p *report) add(r record) error {
	if r.BusBW > 0 {
		p.sum += r.BusBW
		p.n++
	}
	if p.json {
		return json.NewEncoder(p.out).Encode(r)
	}
	var b strings.Builder
	if t := r.table(); t != p.table {
		if p.table != "" {
			b.WriteByte('\n')
		}
		for _, line := range p.header {
			fmt.Fprintf(&b, "# %s\n", line)
		}
		p.header = nil
		p.table = t
		fmt.Fprintf(&b, "# %s, times in us over iterations of the slowest rank\n", t)
		for _, c := range choicesOf(p.explain(), r.Device, r.Op) {
			fmt.Fprintf(&b, "# %s: %s\n", c.Algorithm, c.Why)
		}
		fmt.Fprintf(&b, "%12s %8s %12s %12s %12s %10s %10s", "bytes", "iters", "p50", "p99", "avg", "algbw GB/s", "busbw GB/s")
		if r.Device != "" {
			fmt.Fprintf(&b, " %12s %10s %8s", "queued", "call", "work")
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%12d %8d %12.2f %12.2f %12.2f %10.3f %10.3f", r.Bytes, r.Iters, r.P50, r.P99, r.Avg, r.AlgBW, r.BusBW)
	if r.Device != "" {
		fmt.Fprintf(&b, " %12.2f %10.2f %8s", r.Queued, r.Call, cmp.Or(r.Work, "-"))
	}
	b.WriteByte('\n')
	_, err := io.WriteString(p.out, b.String())
	return err
}

// end prints the average after the last table, as nccl-tests does.
func (p *report) end() error {
	if p.json || p.n == 0 {
		return nil
	}
	_, err := fmt.Fprintf(p.out, "# average bus bandwidth: %.3f GB/s\n", p.sum/float64(p.n))
	return err
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
