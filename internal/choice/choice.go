package choice

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
)

// Query is a collective for which an algorithm is wanted. All ranks of a group
// must ask the same.
type Query struct {
	Op    plan.Op
	Bytes int64  // as in plan.Call; for blocks that differ, their mean
	Wire  string // what carries the messages; "" is AnyWire
	Ranks int
	Hosts int // number of hosts; 0 means unknown: one rank on each

	RankOrder bool // only algorithms of plan.RankOrder, where Op reduces
}

// Choice is a table's answer.
type Choice struct {
	Algorithm *plan.Algorithm
	Chunk     int64         // for plan.Call
	Time      time.Duration // expected; 0 if nothing was measured
	Why       string        // a line for people
}

// shape describes how ranks are placed on hosts.
type shape uint8

const (
	grid  shape = iota // several hosts, several ranks
	flat               // one rank a host
	local              // one host
	shapes
)

func (s shape) String() string {
	return [...]string{"several hosts with several ranks", "hosts of one rank", "one host"}[s]
}

func shapeOf(ranks, hosts int) shape {
	switch hosts {
	case ranks:
		return flat
	case 1:
		return local
	}
	return grid
}

// place is a key of the index, config a measured group under it.
type place struct {
	op    plan.Op
	wire  string
	shape shape
}

type config struct {
	ranks, hosts int
	series       []series // by name
}

// series has the times of an algorithm.
type series struct {
	algorithm *plan.Algorithm
	chunk     int64
	points    []point // by length
}

type point struct {
	bytes int64
	time  time.Duration
}

func (s *series) is(o series) bool { return s.algorithm == o.algorithm && s.chunk == o.chunk }

// build makes the index of sorted rows.
func (t *Table) build(c Catalog) {
	t.index = make(map[place][]config)
	t.fingerprint = digest(t.rows)
	for _, r := range t.rows {
		at := place{r.Op, r.Wire, shapeOf(r.Ranks, r.Hosts)}
		configs := t.index[at]
		if n := len(configs); n == 0 || configs[n-1].ranks != r.Ranks || configs[n-1].hosts != r.Hosts {
			configs = append(configs, config{ranks: r.Ranks, hosts: r.Hosts})
			t.index[at] = configs
		}
		a, _ := c(r.Op, r.Algorithm) // was checked
		s := series{algorithm: a, chunk: r.Chunk}
		g := &configs[len(configs)-1]
		if n := len(g.series); n == 0 || !g.series[n-1].is(s) {
			g.series = append(g.series, s)
		}
		last := &g.series[len(g.series)-1]
		last.points = append(last.points, point{r.Bytes, r.Time})
	}
}

// serves reports whether an algorithm can serve a query.
func (q *Query) serves(a *plan.Algorithm) bool {
	return !q.RankOrder || !q.Op.Reduces() || a.Order == plan.RankOrder
}

// instead has, for each shape, the shapes whose measurements count for it, the best first.
var instead = [shapes][shapes]shape{
	grid:  {grid, flat, local},
	flat:  {flat, local, grid},
	local: {local, flat, grid},
}

// Choose returns the fastest algorithm that serves the query.
func (t *Table) Choose(q Query) Choice {
	if q.Wire == "" {
		q.Wire = AnyWire
	}
	hosts := q.Hosts
	if hosts == 0 {
		hosts = q.Ranks
	}
	first := shapeOf(q.Ranks, hosts)
	q.Bytes = min(q.Bytes, maxBytes)
	for _, s := range instead[first] {
		for _, wire := range []string{q.Wire, AnyWire} {
			configs := t.index[place{q.Op, wire, s}]
			low, high := around(configs, q.Ranks, hosts)
			if low == nil {
				continue
			}
			if c, ok := q.best(low, high); ok {
				if s != first {
					c.Why += fmt.Sprintf("; nothing was measured on %v", first)
				}
				if wire != q.Wire {
					c.Why += "; nothing was measured over " + q.Wire
				}
				return c
			}
		}
	}
	return q.fallback()
}

// around returns the measured groups next below and above ranks. They are the same if ranks was
// measured or is outside the measured range. Groups are sorted.
func around(configs []config, ranks, hosts int) (low, high *config) {
	for i := range configs {
		c := &configs[i]
		if c.ranks <= ranks && (low == nil || c.ranks > low.ranks || nearer(c, low, ranks, hosts)) {
			low = c
		}
		if c.ranks >= ranks && (high == nil || c.ranks == high.ranks && nearer(c, high, ranks, hosts)) {
			high = c
		}
	}
	if low == nil {
		low = high
	}
	if high == nil {
		high = low
	}
	return low, high
}

// nearer reports whether a's number of hosts is nearer than b's, in proportion, to hosts of
// ranks. a and b have as many ranks.
func nearer(a, b *config, ranks, hosts int) bool {
	far := func(c *config) (larger, smaller int64) {
		x, y := int64(c.hosts)*int64(ranks), int64(hosts)*int64(c.ranks)
		return max(x, y), min(x, y)
	}
	al, as := far(a)
	bl, bs := far(b)
	ah, alow := bits.Mul64(uint64(al), uint64(bs))
	bh, blow := bits.Mul64(uint64(bl), uint64(as))
	return ah < bh || ah == bh && alow < blow
}

// best returns the fastest algorithm of those measured in both groups.
func (q *Query) best(low, high *config) (Choice, bool) {
	var best, second *series
	var least, next time.Duration
	for i := range low.series {
		s := &low.series[i]
		j := slices.IndexFunc(high.series, s.is)
		if j < 0 || !q.serves(s.algorithm) {
			continue
		}
		t := line(int64(low.ranks), s.at(q.Bytes), int64(high.ranks), high.series[j].at(q.Bytes), int64(q.Ranks))
		switch {
		case best == nil || t < least:
			second, next, best, least = best, least, s, t
		case second == nil || t < next:
			second, next = s, t
		}
	}
	if best == nil {
		return Choice{}, false
	}
	why := fmt.Sprintf("%v of %d bytes, %d ranks: %s takes %v", q.Op, q.Bytes, q.Ranks, Name(best.algorithm.Name, best.chunk), least)
	if second != nil {
		why += fmt.Sprintf(", next is %s with %v", Name(second.algorithm.Name, second.chunk), next)
	}
	switch {
	case low == high && low.ranks != q.Ranks:
		why += fmt.Sprintf(", as measured with %d ranks", low.ranks)
	case low != high:
		why += fmt.Sprintf(", between those measured with %d and %d ranks", low.ranks, high.ranks)
	}
	if q.RankOrder && q.Op.Reduces() {
		why += "; only algorithms that reduce in rank order"
	}
	return Choice{Algorithm: best.algorithm, Chunk: best.chunk, Time: least, Why: why}, true
}

// at returns the time for a length.
func (s *series) at(n int64) time.Duration {
	i, found := slices.BinarySearchFunc(s.points, n, func(p point, n int64) int { return cmp.Compare(p.bytes, n) })
	last := s.points[len(s.points)-1]
	switch {
	case found || i == 0:
		return s.points[i].time
	case i < len(s.points):
		a, b := s.points[i-1], s.points[i]
		return line(a.bytes, a.time, b.bytes, b.time, n)
	case last.bytes == 0:
		return last.time
	}
	return scale(last.time, n, last.bytes)
}

// line returns the height at x of the straight line from (x0, t0) to (x1, t1).
func line(x0 int64, t0 time.Duration, x1 int64, t1 time.Duration, x int64) time.Duration {
	if x0 == x1 || x <= x0 {
		return t0
	}
	if t1 < t0 {
		return t0 - scale(t0-t1, x-x0, x1-x0)
	}
	return t0 + scale(t1-t0, x-x0, x1-x0)
}

// scale returns t*a/b, rounded down, for a and t of at least 0 and b above 0. A result out of
// range becomes the largest duration.
func scale(t time.Duration, a, b int64) time.Duration {
	hi, lo := bits.Mul64(uint64(t), uint64(a))
	if hi >= uint64(b) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(b))
	return time.Duration(min(q, math.MaxInt64))
}

// short is the length up to which a rule chooses algorithms with few rounds, if there is no
// measurement. At 1 GB/s the bytes of such a message take about as long as its latency, 10 us.
const short = 16 << 10

// rules are the algorithms for operations without measurements: for short and for long messages,
// then the same in rank order.
var rules = [...][4]string{
	plan.OpAllReduce:     {"recursive-doubling", "ring", "direct", "two-step"},
	plan.OpReduce:        {"binomial", "halving-gather", "direct", "direct"},
	plan.OpReduceScatter: {"direct", "direct", "direct", "direct"},
	plan.OpAllGather:     {"recursive-doubling", "ring", "", ""},
	plan.OpBroadcast:     {"binomial", "scatter-ring", "", ""},
	plan.OpAllToAll:      {"direct", "direct", "", ""},
	plan.OpGather:        {"direct", "direct", "", ""},
	plan.OpScatter:       {"direct", "direct", "", ""},
	plan.OpBarrier:       {"dissemination", "dissemination", "", ""},
}

func (q *Query) fallback() Choice {
	rule, length := 0, "short"
	if q.Bytes > short {
		rule, length = 1, "long"
	}
	if q.RankOrder && q.Op.Reduces() {
		rule += 2
	}
	a, err := plan.Lookup(q.Op, rules[q.Op][rule])
	if err != nil {
		panic(err) // TestRules
	}
	return Choice{Algorithm: a, Why: fmt.Sprintf("%v of %d bytes, %d ranks: %s is the rule for %s messages; nothing that serves was measured", q.Op, q.Bytes, q.Ranks, a.Name, length)}
}

// Candidate is an algorithm to measure.
type Candidate struct {
	Algorithm *plan.Algorithm
	Chunk     int64
}

func (c Candidate) String() string { return Name(c.Algorithm.Name, c.Chunk) }

// Candidates returns the algorithms to measure for a collective with bytes bytes in a rank's
// longest buffer. It leaves out those that send so much more than the plainest one that no latency makes up for it.
func Candidates(op plan.Op, bytes int64) []Candidate {
	var all []Candidate
	for _, a := range plan.Algorithms(op) {
		if bytes > wasteful && a.String() == "all_reduce direct" {
			continue
		}
		all = append(all, Candidate{Algorithm: a})
		if !a.Chunks {
			continue
		}
		for chunk := int64(16 << 10); chunk < plan.DefaultChunk && chunk < bytes; chunk *= 4 {
			all = append(all, Candidate{a, chunk})
		}
	}
	return all
}

// wasteful is the length above which all_reduce direct is not measured: it sends several times as
// much as other algorithms.
const wasteful = 256 << 10
