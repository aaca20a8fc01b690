package ways

import (
	"bytes"
	_ "embed" // the default table
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

// Link is what the ranks of a group have between their devices. It is the wire of a table's rows.
type Link string

// The links.
const (
	Peers      Link = "peers"      // each rank has a device of its own, which reaches all others
	Neighbours Link = "neighbours" // each rank has a device of its own, which reaches the next one's in a ring
	Shared     Link = "shared"     // ranks of one host, of which some share a device
	Host       Link = "host"       // ranks of one host whose devices do not reach each other
	Hosts      Link = "hosts"      // ranks on several hosts
)

// Links are all links.
var Links = []Link{Peers, Neighbours, Shared, Host, Hosts}

// The names of the ways.
const (
	OneShot    = "one-shot"    // one kernel a rank: each rank sends everything to all others
	TwoShot    = "two-shot"    // ranks combine or get a part each, and pass it on: a kernel a rank, or two for an all_reduce of two ranks
	Direct     = "direct"      // one kernel a rank, for operations that have no second form
	Ring       = "ring"        // one kernel a rank, which writes to the next rank in a ring
	HostShared = "host-shared" // through page-locked memory that the ranks of a host share
	HostWork   = "host"        // through page-locked memory and the CPU backend
	Flat       = "flat"        // through the hosts: the root sends to every rank
	Tree       = "tree"        // through the hosts: a binomial tree of ranks
	Chain      = "chain"       // through the hosts: each rank sends to the next one
)

// Way is how an operation is done.
type Way struct {
	Name   string
	Blocks int // the most blocks that a kernel takes; 0 means as many as the group has
}

func (w Way) String() string { return choice.Name(w.Name, int64(w.Blocks)) }

// Kernels reports whether kernels do the operation, which write into other ranks' memory.
func (w Way) Kernels() bool {
	return w.Name == OneShot || w.Name == TwoShot || w.Name == Direct || w.Name == Ring
}

// catalog has the ways of each operation. What a table calls the chunk of an algorithm is a way's
// number of blocks.
var catalog = []plan.Algorithm{
	{Op: plan.OpAllReduce, Name: OneShot, Chunks: true},
	{Op: plan.OpAllReduce, Name: TwoShot, Chunks: true},
	{Op: plan.OpAllReduce, Name: Ring, Chunks: true},
	{Op: plan.OpAllReduce, Name: HostShared},
	{Op: plan.OpAllReduce, Name: HostWork},
	{Op: plan.OpReduceScatter, Name: Direct, Chunks: true},
	{Op: plan.OpReduceScatter, Name: Ring, Chunks: true},
	{Op: plan.OpReduceScatter, Name: HostWork},
	{Op: plan.OpAllGather, Name: Direct, Chunks: true},
	{Op: plan.OpAllGather, Name: Ring, Chunks: true},
	{Op: plan.OpAllGather, Name: HostWork},
	{Op: plan.OpBroadcast, Name: OneShot, Chunks: true},
	{Op: plan.OpBroadcast, Name: TwoShot, Chunks: true},
	{Op: plan.OpBroadcast, Name: Flat},
	{Op: plan.OpBroadcast, Name: Tree},
	{Op: plan.OpBroadcast, Name: Chain},
	{Op: plan.OpBroadcast, Name: HostWork},
	{Op: plan.OpReduce, Name: OneShot, Chunks: true},
	{Op: plan.OpReduce, Name: TwoShot, Chunks: true},
	{Op: plan.OpReduce, Name: HostWork},
	{Op: plan.OpGather, Name: Direct, Chunks: true},
	{Op: plan.OpGather, Name: HostWork},
	{Op: plan.OpScatter, Name: Direct, Chunks: true},
	{Op: plan.OpScatter, Name: HostWork},
	{Op: plan.OpAllToAll, Name: Direct, Chunks: true},
	{Op: plan.OpAllToAll, Name: HostWork},
}

// ops is the number of operations that a table may have.
const ops = plan.OpScatter + 1

// UnknownBytes is the size for Of where a rank does not know the others' sizes. All ranks must choose
// alike.
const UnknownBytes = 1 << 20

// Catalog finds the ways for a table.
var Catalog choice.Catalog = func(op plan.Op, name string) (*plan.Algorithm, error) {
	var known []string
	for i := range catalog {
		a := &catalog[i]
		if a.Op != op {
			continue
		}
		if a.Name == name {
			return a, nil
		}
		known = append(known, a.Name)
	}
	return nil, fmt.Errorf("ways: no way %q of %v on CUDA devices (known: %s)", name, op, strings.Join(known, ", "))
}

//go:embed default.table
var defaultText []byte

// Default returns the table in the program.
var Default = sync.OnceValue(func() *choice.Table {
	t, err := Catalog.Parse(bytes.NewReader(defaultText))
	if err != nil {
		panic("ways: the default table: " + err.Error())
	}
	return t
})

// Names returns the ways that an operation can take over a link.
func Names(op plan.Op, l Link) (names []string) {
	for i := range catalog {
		a := &catalog[i]
		kernels := Way{Name: a.Name}.Kernels()
		near := l == Peers || l == Neighbours && a.Name == Ring
		if a.Op == op && (near || !kernels) && (l != Hosts || a.Name != HostShared) {
			names = append(names, a.Name)
		}
	}
	return names
}

// Candidates returns the ways to measure for a number of bytes: several numbers of blocks where
// kernels would take more than the fewest of them.
func Candidates(op plan.Op, l Link, bytes int64) (all []Way) {
	names := Names(op, l)
	if len(names) < 2 {
		return nil // nothing to choose
	}
	for _, name := range names {
		w := Way{Name: name}
		all = append(all, w)
		for blocks := 16; w.Kernels() && bytes >= 64<<10 && blocks <= 64; blocks *= 2 {
			all = append(all, Way{name, blocks})
		}
	}
	return all
}

// Range is the way of an operation for a range of sizes.
type Range struct {
	UpTo int64 // bytes; the ranges of an operation are in order, and the last one has no end
	Way
	Why string
}

// Ways has the ways of a group's operations. It is immutable.
type Ways struct{ ranges [ops][]Range }

// Group describes a group for New.
type Group struct {
	Link  Link
	Ranks int

	// Allowed reports whether an operation may take a way. Nil means that it may take all that
	// the link has.
	Allowed func(op plan.Op, name string) bool
}

// New returns the ways of a group. They depend on nothing but the table and the group.
func New(t *choice.Table, g Group) *Ways {
	var w Ways
	for op := range ops {
		if len(Names(op, g.Link)) > 0 {
			w.ranges[op] = g.measured(t, op)
			if w.ranges[op] == nil {
				w.ranges[op] = g.rule(op)
			}
		}
	}
	return &w
}

// Of returns the way of an operation of so many bytes: of the buffer, or of one rank's block. It
// allocates nothing.
func (w *Ways) Of(op plan.Op, bytes int) *Range {
	all := w.ranges[op]
	for i := range all {
		if int64(bytes) <= all[i].UpTo {
			return &all[i]
		}
	}
	panic(fmt.Sprintf("ways: no way of %v", op))
}

// Ranges returns the ways of an operation by size.
func (w *Ways) Ranges(op plan.Op) []Range { return slices.Clone(w.ranges[op]) }

// Has reports whether an operation of some size takes the named way.
func (w *Ways) Has(op plan.Op, name string) bool {
	return slices.ContainsFunc(w.ranges[op], func(r Range) bool { return r.Name == name })
}

func (g *Group) allows(op plan.Op, name string) bool {
	return slices.Contains(Names(op, g.Link), name) && (g.Allowed == nil || g.Allowed(op, name))
}

// measured returns the fastest ways of an operation. A row fits if it has this number of ranks, this
// link or any, and a way that is allowed. The result is nil if no row fits.
func (g *Group) measured(t *choice.Table, op plan.Op) (all []Range) {
	hosts := 1
	if g.Link == Hosts {
		hosts = 0 // any number
	}
	rows := slices.DeleteFunc(t.Rows(), func(r choice.Row) bool {
		return r.Op != op || r.Ranks != g.Ranks || hosts == 1 && r.Hosts != 1 ||
			r.Wire != string(g.Link) && r.Wire != choice.AnyWire || !g.allows(op, r.Algorithm)
	})
	if len(rows) == 0 {
		return nil
	}
	some, err := Catalog.NewTable(t.Command(), t.Machine(), rows)
	if err != nil {
		panic(err) // they are rows of a table
	}
	at := func(bytes int64) Range {
		c := some.Choose(choice.Query{Op: op, Wire: string(g.Link), Ranks: g.Ranks, Hosts: hosts, Bytes: bytes})
		return Range{Way: Way{c.Algorithm.Name, int(min(c.Chunk, math.MaxInt32))}, Why: c.Why}
	}
	// Between two measured sizes all times are straight lines: a way that is the fastest at both
	// is so between them.
	points := []int64{0}
	for _, r := range rows {
		points = append(points, r.Bytes)
	}
	slices.Sort(points)
	points = slices.Compact(points)
	points = append(points, 2*points[len(points)-1]+1)
	first := at(0)
	all = []Range{first}
	var split func(lo, hi int64, a, b Range)
	split = func(lo, hi int64, a, b Range) {
		switch {
		case a.Way == b.Way:
		case hi-lo == 1:
			all[len(all)-1].UpTo = lo
			all = append(all, b)
		default:
			mid := lo + (hi-lo)/2
			m := at(mid)
			split(lo, mid, a, m)
			split(mid, hi, m, b)
		}
	}
	for i, p := range points[1:] {
		last := at(p)
		split(points[i], p, first, last)
		first = last
	}
	all[len(all)-1].UpTo = math.MaxInt64
	return all
}

// OneShotUpTo is the most bytes of an operation that is one-shot if nothing was measured with so
// many ranks. With 2 ranks the two forms send as many bytes. With more, one-shot sends more bytes and
// two-shot takes one step more. On 4 H100 with package direct's BenchmarkShapes, us one-shot and two-shot:
//
//	bytes     all_reduce    broadcast    reduce
//	64 KiB    4.0   6.4     4.0   6.6    3.6   6.4
//	256 KiB   5.9   7.0     5.1   7.0    4.6   7.0
//	1 MiB     12.8  9.4     12.1  8.6    9.4   8.7
//
// 8 ranks were not measured. By a step of 1.05 us and links of 366 GB/s the forms are equal at 64 KiB there.
func OneShotUpTo(ranks int) int64 {
	switch {
	case ranks <= 2:
		return math.MaxInt64
	case ranks > 4:
		return 64 << 10
	}
	return 256 << 10
}

// rule returns the ways of an operation for which nothing was measured.
func (g *Group) rule(op plan.Op) []Range {
	const why = "nothing was measured with %d ranks over link %q: %s"
	last := Range{UpTo: math.MaxInt64}
	set := func(r *Range, name, because string) {
		r.Name, r.Why = name, fmt.Sprintf(why, g.Ranks, g.Link, because)
	}
	switch limit := OneShotUpTo(g.Ranks); {
	case g.allows(op, OneShot) && limit == last.UpTo:
		set(&last, OneShot, "both forms send as many bytes")
	case g.allows(op, OneShot) && g.allows(op, TwoShot):
		first := Range{UpTo: limit}
		set(&first, OneShot, "the rule for short operations")
		set(&last, TwoShot, "the rule for long operations")
		return []Range{first, last}
	default:
		// The first in the catalog. A broadcast through the hosts chooses by the number of chunks.
		names := slices.DeleteFunc(Names(op, g.Link), func(name string) bool { return !g.allows(op, name) })
		if len(names) == 0 || op == plan.OpBroadcast && len(names) > 1 {
			last.Why = fmt.Sprintf(why, g.Ranks, g.Link, "the number of chunks decides")
			break
		}
		set(&last, names[0], "the rule")
	}
	return []Range{last}
}
