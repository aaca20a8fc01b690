package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/simulate"
)

// simulation is the flags of "tools simulate".
type simulation struct {
	job        simulate.Job
	ops        string
	algorithms string
	ranks      rankList
	hosts      int
	perHost    rankList
	begin, end bytesize.Size
	factor     int
	elem, root int
	chunk      bytesize.Size
	eager      bytesize.Size
	json       bool
	table      bool
}

// rate is a flag in bytes a second, such as 12.5G, or bits a second, such as
// 100Gbit, in powers of ten.
type rate float64

func (r *rate) String() string {
	for i, unit := range []string{"G", "M", "K"} {
		if scale := math.Pow(1000, float64(3-i)); float64(*r) >= scale {
			return strconv.FormatFloat(float64(*r)/scale, 'g', -1, 64) + unit
		}
	}
	return strconv.FormatFloat(float64(*r), 'g', -1, 64)
}

func (r *rate) Set(s string) error {
	digits, bits := strings.CutSuffix(s, "bit")
	scale := 1.0
	if n := len(digits); n > 0 {
		if i := strings.IndexByte("KMGT", digits[n-1]&^0x20); i >= 0 {
			digits, scale = digits[:n-1], math.Pow(1000, float64(i+1))
		}
	}
	if bits {
		scale /= 8
	}
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil || !(v >= 0) || v*scale > 1e18 {
		return fmt.Errorf("%q is not a bandwidth such as 12.5G, 400M or 100Gbit", s)
	}
	*r = rate(v * scale)
	return nil
}

// rankList is a flag such as 8,64,512.
type rankList []int

func (l *rankList) String() string {
	var all []string
	for _, n := range *l {
		all = append(all, strconv.Itoa(n))
	}
	return strings.Join(all, ",")
}

func (l *rankList) Set(s string) error {
	*l = nil
	for text := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return fmt.Errorf("%q is not a list of numbers such as 8,64,512", s)
		}
		*l = append(*l, n)
	}
	return nil
}

// modelled is the default network: TCP over 100 Gbit/s Ethernet, and on a host the memory of
// a server with two channels.
var modelled = simulate.Network{
	Latency: 10 * time.Microsecond, Bandwidth: 12.5e9, Overhead: time.Microsecond,
	LocalLatency: 500 * time.Nanosecond, LocalBandwidth: 10e9, Memory: 40e9,
	Reduce: 10e9, Copy: 10e9,
}

func setupSimulate(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	s := simulation{
		job: simulate.Job{Network: modelled}, ops: "all_reduce", ranks: rankList{8, 64, 512},
		perHost: rankList{}, begin: 1 << 10, end: 64 << 20, factor: 256, elem: 4,
	}
	j := &s.job
	fs.StringVar(&s.ops, "op", s.ops, "`operations`, separated by commas: "+strings.Join(opNames(), ", ")+", or all")
	fs.StringVar(&s.algorithms, "algorithm", "", "`algorithms`, separated by commas; empty means all that can be the fastest")
	fs.Var(&s.ranks, "ranks", "`numbers` of ranks, separated by commas")
	fs.IntVar(&s.hosts, "hosts", 0, "spread the ranks over `n` hosts; 0 means by -per-host")
	fs.Var(&s.perHost, "per-host", "`numbers` of ranks on each host, separated by commas, instead of -hosts (default 1)")
	fs.Var(&s.begin, "b", "smallest `size` of a rank's whole buffer in bytes, or with K, M or G, as nccl-tests counts")
	fs.Var(&s.end, "e", "largest `size`")
	fs.IntVar(&s.factor, "f", s.factor, "`factor` from one size to the next")
	fs.IntVar(&s.elem, "elem", s.elem, "`bytes` of an element")
	fs.IntVar(&s.root, "root", 0, "`rank` of the root")
	fs.Var(&s.chunk, "chunk", "`size` of the messages of algorithms that cut data into messages; 0 means their default")
	fs.DurationVar(&j.Latency, "latency", j.Latency, "`duration` until a message's first byte reaches another host")
	fs.Var((*rate)(&j.Bandwidth), "bandwidth", "`bandwidth` of a network interface in bytes a second, each way, with K, M or G; or in bits, as in 100Gbit")
	fs.IntVar(&j.NICs, "nics", 1, "`n` network interfaces on a host")
	fs.DurationVar(&j.Overhead, "overhead", j.Overhead, "CPU `duration` of a message on each side")
	fs.Var(&s.eager, "eager", "largest `size` of a message that leaves before its receive is posted; 0 means any size")
	fs.DurationVar(&j.LocalLatency, "local-latency", j.LocalLatency, "`duration` until a message reaches another rank of the host")
	fs.Var((*rate)(&j.LocalBandwidth), "local-bandwidth", "`bandwidth` of a message on a host in bytes a second")
	fs.Var((*rate)(&j.Memory), "memory", "`bandwidth` of all messages on a host together in bytes a second")
	fs.Var((*rate)(&j.Reduce), "reduce-bandwidth", "`bandwidth` of a reduction on a rank in bytes a second")
	fs.Var((*rate)(&j.Copy), "copy-bandwidth", "`bandwidth` of a copy on a rank in bytes a second")
	fs.IntVar(&j.Count, "stragglers", 0, "`n` ranks are stragglers, see -slow and -late")
	fs.Float64Var(&j.Slow, "slow", 1, "`factor` by which the CPU times of stragglers are longer")
	fs.DurationVar(&j.Late, "late", 0, "`duration` by which stragglers begin later")
	fs.DurationVar(&j.Jitter, "jitter", 0, "longest random `duration` that is added to a message between hosts")
	fs.Uint64Var(&j.Seed, "seed", 0, "`seed` of the random stragglers and jitter")
	fs.BoolVar(&s.json, "json", false, "print one JSON record a line")
	fs.BoolVar(&s.table, "table", false, "print a table that groups choose algorithms from, as c10d bench -tune does for real ranks")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		if s.table {
			return 0, s.makeTable(ctx, std.out, fs)
		}
		return 0, s.run(ctx, std.out)
	}
}

func opNames() []string {
	var names []string
	for _, op := range plan.Ops() {
		names = append(names, op.String())
	}
	return names
}

// simulated is one line of results.
type simulated struct {
	System    string  `json:"system"`
	Op        string  `json:"op"`
	Algorithm string  `json:"algorithm"` // with its chunk, if one was asked for
	World     int     `json:"world"`
	Hosts     int     `json:"hosts"`
	Bytes     int64   `json:"bytes"` // as bench counts
	Time      float64 `json:"time_us"`
	First     float64 `json:"first_us"`             // when the first rank had ended
	Formula   float64 `json:"formula_us,omitempty"` // the algorithm's own, if there is one for such hosts
	Ring      float64 `json:"ring_us,omitempty"`    // the ring's, of one rank a host, whatever the algorithm
	Tree      float64 `json:"tree_us,omitempty"`    // the binomial tree's
	BusBW     float64 `json:"busbw_GBps"`
	Messages  int64   `json:"messages"`
	Sent      int64   `json:"sent_bytes"`
	Remote    int64   `json:"remote_bytes"` // between hosts
	LinkMax   int64   `json:"link_max_bytes"`
	LinkMean  float64 `json:"link_mean_bytes"` // out of an interface
	Steps     int64   `json:"steps"`
	Wall      float64 `json:"wall_s"` // what the simulation took

	block int64 // plan.Call's Bytes
	cand  choice.Candidate
	op    plan.Op
}

// check checks the flags and returns the operations.
func (s *simulation) check() ([]plan.Op, error) {
	s.job.Eager = int64(s.eager)
	if s.factor < 2 || s.begin > s.end {
		return nil, usagef("-b %v -e %v -f %d: -b must not exceed -e, and -f must be at least 2", &s.begin, &s.end, s.factor)
	}
	if s.elem < 1 || s.hosts < 0 || s.hosts > 0 && len(s.perHost) > 0 {
		return nil, usagef("-elem %d -hosts %d -per-host %v: -elem must be at least 1, and -hosts excludes -per-host", s.elem, s.hosts, &s.perHost)
	}
	if len(s.perHost) == 0 {
		s.perHost = rankList{1}
	}
	if s.ops == "all" {
		return plan.Ops(), nil
	}
	var ops []plan.Op
	for name := range strings.SplitSeq(s.ops, ",") {
		op, err := plan.ParseOp(name)
		if err != nil {
			return nil, usagef("-op: %v", err)
		}
		ops = append(ops, op)
	}
	return ops, nil
}

// layouts returns the layouts of a number of ranks on hosts.
func (s *simulation) layouts(ranks int) ([]*plan.Layout, error) {
	if s.hosts > ranks {
		return nil, usagef("-hosts %d: more than %d ranks", s.hosts, ranks)
	}
	at := make([]int, ranks)
	if s.hosts > 0 {
		for r := range at {
			at[r] = r * s.hosts / ranks // as even as can be
		}
		return []*plan.Layout{plan.NewLayout(at)}, nil
	}
	var all []*plan.Layout
	for _, n := range s.perHost {
		for r := range at {
			at[r] = r / n
		}
		l := plan.NewLayout(at)
		if !slices.ContainsFunc(all, func(o *plan.Layout) bool { return o.Hosts() == l.Hosts() }) {
			all = append(all, l)
		}
	}
	return all, nil
}

// candidates returns the algorithms to run.
func (s *simulation) candidates(op plan.Op, bytes int64, l *plan.Layout) ([]choice.Candidate, error) {
	if s.algorithms == "" {
		var all []choice.Candidate
		for _, c := range choice.Candidates(op, bytes, l.Ranks(), l.Hosts()) {
			if c.Chunk == 0 || s.table && s.chunk == 0 {
				if c.Algorithm.Chunks && s.chunk > 0 {
					c.Chunk = int64(s.chunk)
				}
				all = append(all, c)
			}
		}
		return all, nil
	}
	var all []choice.Candidate
	for name := range strings.SplitSeq(s.algorithms, ",") {
		a, err := plan.Lookup(op, name)
		if err != nil {
			return nil, usagef("-algorithm: %v", err)
		}
		c := choice.Candidate{Algorithm: a}
		if a.Chunks {
			c.Chunk = int64(s.chunk)
		}
		all = append(all, c)
	}
	return all, nil
}

// each runs all cases of the flags.
func (s *simulation) each(ctx context.Context, f func(simulated) error) error {
	ops, err := s.check()
	if err != nil {
		return err
	}
	for _, ranks := range s.ranks {
		if err := s.job.Check(ranks); err != nil {
			return usageError{err}
		}
		if s.root < 0 || s.root >= ranks {
			return usagef("-root %d is not within %d ranks", s.root, ranks)
		}
	}
	for _, op := range ops {
		for _, ranks := range s.ranks {
			layouts, err := s.layouts(ranks)
			if err != nil {
				return err
			}
			for _, l := range layouts {
				if err := s.series(ctx, op, l, f); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// series runs all sizes of an operation.
func (s *simulation) series(ctx context.Context, op plan.Op, l *plan.Layout, f func(simulated) error) error {
	begin, end := int64(s.begin), int64(s.end)
	if op == plan.OpBarrier {
		begin, end = 0, 0
	}
	for size := begin; size <= end; size = max(size*int64(s.factor), 1) {
		block := size
		if op != plan.OpAllReduce && op != plan.OpReduce && op != plan.OpBroadcast {
			block = (size + int64(l.Ranks()) - 1) / int64(l.Ranks())
		}
		block = (block + int64(s.elem) - 1) / int64(s.elem) * int64(s.elem)
		cands, err := s.candidates(op, size, l)
		if err != nil {
			return err
		}
		for _, c := range cands {
			r, err := s.one(ctx, op, c, l, block)
			if err != nil {
				return err
			}
			if err := f(r); err != nil {
				return err
			}
		}
		if size > end/int64(s.factor) {
			break // the product may be no int64
		}
	}
	return nil
}

// one runs one case.
func (s *simulation) one(ctx context.Context, op plan.Op, c choice.Candidate, l *plan.Layout, block int64) (simulated, error) {
	job := s.job
	job.Layout = l
	call := plan.Call{Size: l.Ranks(), Bytes: block, Elem: int64(s.elem), Chunk: c.Chunk}
	if op.Rooted() {
		call.Root = s.root
	}
	start := time.Now()
	got, err := simulate.Run(ctx, job, c.Algorithm, call)
	if err != nil {
		return simulated{}, fmt.Errorf("%v with %d ranks: %w", c.Algorithm, l.Ranks(), err)
	}
	r := simulated{
		System: "tools simulate", Op: op.String(), Algorithm: c.String(), World: l.Ranks(), Hosts: l.Hosts(), Bytes: block,
		Time: micro(got.Time), First: micro(got.First), Messages: got.Messages, Sent: got.Sent, Remote: got.Remote,
		Steps: got.Steps, Wall: time.Since(start).Seconds(),
		block: block, cand: c, op: op,
	}
	p := float64(l.Ranks())
	bus := 1.0
	switch op {
	case plan.OpAllReduce:
		bus = 2 * (p - 1) / p
	case plan.OpReduceScatter, plan.OpAllGather, plan.OpAllToAll, plan.OpGather, plan.OpScatter:
		r.Bytes *= int64(l.Ranks())
		bus = (p - 1) / p
	}
	if r.Time > 0 {
		r.BusBW = float64(r.Bytes) / r.Time / 1e3 * bus
	}
	var out int64
	for _, link := range got.Links {
		out += link.Out
	}
	most := got.Busiest()
	r.LinkMax, r.LinkMean = max(most.Out, most.In), float64(out)/float64(len(got.Links))
	formula := func(name string) float64 {
		if a, err := plan.Lookup(op, name); err == nil {
			if t, ok := simulate.Formula(a, call, job.Network); ok {
				return micro(t)
			}
		}
		return 0
	}
	r.Ring, r.Tree = formula("ring"), formula("binomial")
	if l.PerHost() == 1 {
		r.Formula = formula(c.Algorithm.Name)
	}
	return r, nil
}

func micro(d time.Duration) float64 { return float64(d) / 1e3 }

func (s *simulation) run(ctx context.Context, out io.Writer) error {
	last := ""
	return s.each(ctx, func(r simulated) error {
		if s.json {
			return json.NewEncoder(out).Encode(r)
		}
		if r.Op != last {
			if last != "" {
				fmt.Fprintln(out)
			}
			last = r.Op
			j := &s.job
			fmt.Fprintf(out, "# %s on a model: latency %v, overhead %v, %v B/s an interface; on a host %v, %v B/s; times in us, formulas are those of one rank a host\n",
				r.Op, j.Latency, j.Overhead, (*rate)(&j.Bandwidth), j.LocalLatency, (*rate)(&j.LocalBandwidth))
			fmt.Fprintf(out, "%6s %6s %12s  %-32s %12s %12s %12s %12s %10s %12s %14s\n",
				"ranks", "hosts", "bytes", "algorithm", "time", "formula", "ring", "tree", "busbw GB/s", "messages", "busiest link")
		}
		_, err := fmt.Fprintf(out, "%6d %6d %12d  %-32s %12.1f %12s %12s %12s %10.3f %12d %14d\n",
			r.World, r.Hosts, r.Bytes, r.Algorithm, r.Time, orNone(r.Formula), orNone(r.Ring), orNone(r.Tree), r.BusBW, r.Messages, r.LinkMax)
		return err
	})
}

// orNone writes a formula's time, if there is a formula.
func orNone(us float64) string {
	if us == 0 {
		return "-"
	}
	return strconv.FormatFloat(us, 'f', 1, 64)
}

// makeTable prints a table of the algorithms that are the fastest in some case, among all
// algorithms or among those that reduce in rank order. It has no rows for operations with
// one algorithm.
func (s *simulation) makeTable(ctx context.Context, out io.Writer, fs *flag.FlagSet) error {
	if s.json {
		return usagef("-json excludes -table")
	}
	command := "tools simulate"
	fs.Visit(func(f *flag.Flag) { command += " -" + f.Name + "=" + f.Value.String() })
	var rows []choice.Row
	algorithms := make(map[choice.Row]*plan.Algorithm)
	err := s.each(ctx, func(r simulated) error {
		if len(plan.Algorithms(r.op)) == 1 {
			return nil // nothing to choose
		}
		row := choice.Row{Op: r.op, Ranks: r.World, Hosts: r.Hosts, Bytes: r.block, Algorithm: r.cand.Algorithm.Name, Chunk: r.cand.Chunk}
		if _, again := algorithms[row]; r.Time > 0 && !again {
			algorithms[row] = r.cand.Algorithm
			row.Time = time.Duration(r.Time * 1e3)
			rows = append(rows, row)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return errors.New("there is nothing to choose: no case takes any time and has several algorithms")
	}
	// An algorithm that is the fastest in one case keeps its rows in all cases: groups
	// would estimate a missing time from other rows.
	type entry struct {
		op    plan.Op
		shape int
		name  string
	}
	of := func(r choice.Row) entry {
		shape := 0
		switch r.Hosts {
		case r.Ranks:
			shape = 1
		case 1:
			shape = 2
		}
		return entry{r.Op, shape, choice.Name(r.Algorithm, r.Chunk)}
	}
	keep := make(map[entry]bool)
	for _, wanted := range []func(a *plan.Algorithm) bool{
		func(*plan.Algorithm) bool { return true },
		func(a *plan.Algorithm) bool { return a.Order == plan.RankOrder },
	} {
		best := make(map[choice.Row]choice.Row)
		for _, r := range rows {
			key := r
			key.Time = 0
			if !wanted(algorithms[key]) {
				continue
			}
			key.Algorithm, key.Chunk = "", 0
			if b, ok := best[key]; !ok || r.Time < b.Time {
				best[key] = r
			}
		}
		for _, r := range best {
			keep[of(r)] = true
		}
	}
	rows = slices.DeleteFunc(rows, func(r choice.Row) bool { return !keep[of(r)] })
	j := &s.job
	machine := fmt.Sprintf("a model: latency %v, overhead %v, %v B/s an interface, %d a host; on a host %v, %v B/s, %v B/s together; reduces %v B/s, copies %v B/s",
		j.Latency, j.Overhead, (*rate)(&j.Bandwidth), max(1, j.NICs), j.LocalLatency, (*rate)(&j.LocalBandwidth), (*rate)(&j.Memory), (*rate)(&j.Reduce), (*rate)(&j.Copy))
	t, err := choice.NewTable(command, machine, rows)
	if err != nil {
		return err
	}
	_, err = t.WriteTo(out)
	return err
}
