package cluster_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
)

// on is the function of an operator for int16 elements.
func on(op func(a, b int16) int16) func(dst, src []byte) {
	return func(dst, src []byte) {
		for i := 0; i < len(dst); i += 2 {
			a, b := int16(binary.LittleEndian.Uint16(dst[i:])), int16(binary.LittleEndian.Uint16(src[i:]))
			binary.LittleEndian.PutUint16(dst[i:], uint16(op(a, b)))
		}
	}
}

// operators are c10d's, on elements that wrap.
var operators = map[string]func(dst, src []byte){
	"sum":     on(func(a, b int16) int16 { return a + b }), // and avg, which divides at the end
	"product": on(func(a, b int16) int16 { return a * b }),
	"min":     on(func(a, b int16) int16 { return min(a, b) }),
	"max":     on(func(a, b int16) int16 { return max(a, b) }),
	"band":    on(func(a, b int16) int16 { return a & b }),
	"bor":     on(func(a, b int16) int16 { return a | b }),
	"bxor":    on(func(a, b int16) int16 { return a ^ b }),
}

const elem = 2

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// drawLayout draws one to four clusters of one to eight ranks.
func drawLayout(rng *rand.Rand) *cluster.Layout {
	var at []int
	for c := range 1 + rng.IntN(4) {
		for range 1 + rng.IntN(8) {
			at = append(at, c)
		}
	}
	if rng.IntN(3) == 0 {
		rng.Shuffle(len(at), func(i, j int) { at[i], at[j] = at[j], at[i] })
	}
	members := make([]cluster.Member, len(at))
	mode := rng.IntN(4)
	for r, c := range at {
		m := &members[r]
		m.Host = fmt.Sprint(c)
		switch mode {
		case 1: // several interfaces
			m.NIC = fmt.Sprint(rng.IntN(3))
		case 2: // one
			m.NIC = "eth0"
		case 3:
			m.NIC, m.Speed = fmt.Sprint(r), int64(rng.IntN(4))
		}
	}
	return cluster.Find(members)
}

// example is a collective with the arguments of all ranks: their calls, buffers, and what Out has to
// be in the end; nil where that is open.
type example struct {
	calls           []cluster.Call
	outs, ins, want [][]byte
}

func drawExample(rng *rand.Rand, l *cluster.Layout, op plan.Op, combine func(dst, src []byte)) example {
	size := l.Ranks()
	x := example{outs: make([][]byte, size), ins: make([][]byte, size), want: make([][]byte, size)}
	n := []int{0, 1, 2, 7, 60, 840, 1000, 5001}[rng.IntN(8)] * elem
	if op == plan.OpReduceScatter || op >= plan.OpAllGather && op != plan.OpBroadcast {
		n = min(n, 400*elem)
	}
	if op >= plan.OpAllToAll && rng.IntN(4) == 0 {
		n = 3 << 10 * (1 + rng.IntN(4))
	}
	c := cluster.Call{Op: op, Root: rng.IntN(size), Bytes: int64(n), Elem: elem, Chunk: int64([]int{0, 64, 200, 2000}[rng.IntN(4)])}
	if c.Chunk > 0 {
		whole := n
		if op == plan.OpReduceScatter || op == plan.OpAllGather {
			whole *= size
		}
		c.Chunk = max(c.Chunk, int64(whole/(1+rng.IntN(12))))
	}
	if !op.Rooted() {
		c.Root = 0
	}
	c.Single = op <= plan.OpBroadcast && op != plan.OpReduceScatter && op != plan.OpAllGather && rng.IntN(4) == 0
	c.Apart = rng.IntN(3) == 0
	data := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i * 37)
			if i%16 == 0 {
				b[i] = byte(rng.Uint32())
			}
		}
		return b
	}
	reduced := func(of [][]byte) []byte {
		sum := slices.Clone(of[0])
		for _, b := range of[1:] {
			combine(sum, b)
		}
		return sum
	}
	lengths := slices.Repeat([]int64{int64(n)}, size)
	uneven := rng.IntN(2) == 0
	if uneven && (op == plan.OpReduceScatter || op == plan.OpAllGather || op == plan.OpGather) {
		for r := range lengths {
			lengths[r] = int64(rng.IntN(n+3)) / elem * elem
		}
		c.Counts = lengths
	}
	matrix := make([][]int64, size) // what each rank sends to every rank
	for r := range matrix {
		matrix[r] = slices.Repeat([]int64{int64(n)}, size)
		for q := range matrix[r] {
			if uneven {
				matrix[r][q] = int64(rng.IntN(n + 3))
			}
		}
	}
	total := 0
	for _, k := range lengths {
		total += int(k)
	}
	for r := range size {
		x.calls = append(x.calls, c)
		x.calls[r].Rank = r
		switch op {
		case plan.OpAllReduce, plan.OpReduce, plan.OpBroadcast:
			x.outs[r] = data(n)
		case plan.OpReduceScatter:
			x.ins[r], x.outs[r] = data(total), data(int(lengths[r]))
		case plan.OpAllGather, plan.OpGather:
			x.ins[r] = data(int(lengths[r]))
			if op == plan.OpAllGather || r == c.Root {
				x.outs[r] = data(total)
			}
		case plan.OpScatter:
			x.outs[r] = data(n)
			if r == c.Root {
				x.ins[r] = data(n * size)
			}
		case plan.OpAllToAll:
			var in, out int64
			for q := range size {
				in += matrix[r][q]
				out += matrix[q][r]
			}
			x.ins[r], x.outs[r] = data(int(in)), data(int(out))
			if uneven {
				for _, q := range l.Members(l.Cluster(r)) {
					x.calls[r].Send = append(x.calls[r].Send, matrix[q])
					column := make([]int64, size)
					for p := range column {
						column[p] = matrix[p][q]
					}
					x.calls[r].Recv = append(x.calls[r].Recv, column)
				}
			}
		}
	}
	start := make([]int64, size+1)
	for r, k := range lengths {
		start[r+1] = start[r] + k
	}
	var sum []byte
	switch op {
	case plan.OpAllReduce, plan.OpReduce:
		sum = reduced(x.outs)
	case plan.OpReduceScatter:
		sum = reduced(x.ins)
	}
	for r := range size {
		switch op {
		case plan.OpAllReduce:
			x.want[r] = sum
		case plan.OpReduce:
			if r == c.Root {
				x.want[r] = sum
			}
		case plan.OpBroadcast:
			x.want[r] = slices.Clone(x.outs[c.Root])
		case plan.OpReduceScatter:
			x.want[r] = sum[start[r]:start[r+1]]
		case plan.OpAllGather:
			x.want[r] = slices.Concat(x.ins...)
		case plan.OpGather:
			if r == c.Root {
				x.want[r] = slices.Concat(x.ins...)
			}
		case plan.OpScatter:
			x.want[r] = slices.Clone(x.ins[c.Root][r*n : (r+1)*n])
		case plan.OpAllToAll:
			x.want[r] = []byte{}
			for q := range size {
				at := int64(0)
				for _, k := range matrix[q][:r] {
					at += k
				}
				x.want[r] = append(x.want[r], x.ins[q][at:at+matrix[q][r]]...)
			}
		}
	}
	return x
}

// run executes an example, and returns what it cost.
func (x *example) run(t *testing.T, l *cluster.Layout, combine func(dst, src []byte), rng *rand.Rand) *group {
	var plans []*cluster.Plan
	for _, c := range x.calls {
		p := must.Get(l.Plan(c))
		plans = append(plans, p)
	}
	return x.runPlans(t, l, plans, combine, rng)
}

func (x *example) runPlans(t *testing.T, l *cluster.Layout, plans []*cluster.Plan, combine func(dst, src []byte), rng *rand.Rand) *group {
	ins := make([][]byte, len(x.ins))
	for r, in := range x.ins {
		ins[r] = slices.Clone(in)
	}
	g := newGroup(l, plans, x.outs, ins, combine, rng)
	require.NoError(t, g.run(), "%+v", x.calls[0])
	for r, want := range x.want {
		if want != nil {
			require.True(t, bytes.Equal(want, x.outs[r]), "rank %d of %+v", r, x.calls[r])
		}
		require.True(t, bytes.Equal(x.ins[r], ins[r]), "input of rank %d of %+v", r, x.calls[r])
	}
	return g
}

// TestF22Clusters has tables of what ranks say, and the clusters and shares that follow.
func TestF22Clusters(t *testing.T) {
	const file = "testdata/f22.txt"
	text := must.Get(os.ReadFile(file))
	var golden []string
	for _, block := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
		name, table, _ := strings.Cut(block, "\n")
		t.Run(strings.TrimPrefix(name, "# "), func(t *testing.T) {
			var members []cluster.Member
			var want, got []string
			for _, line := range strings.Split(table, "\n") {
				said, follows, _ := strings.Cut(line, " -> ")
				var m cluster.Member
				_, err := fmt.Sscanf(said, "host=%q cluster=%q device=%q nic=%q speed=%d", &m.Host, &m.Cluster, &m.Device, &m.NIC, &m.Speed)
				require.NoError(t, err, line)
				members, want = append(members, m), append(want, follows)
			}
			l := cluster.Find(members)
			for r := range members {
				got = append(got, fmt.Sprintf("cluster %d place %d share %.3g", l.Cluster(r), l.Place(r), l.Share(r)))
			}
			lines := strings.Split(table, "\n")
			for r := range lines {
				said, _, _ := strings.Cut(lines[r], " -> ")
				lines[r] = said + " -> " + got[r]
			}
			golden = append(golden, name+"\n"+strings.Join(lines, "\n")+"\n")
			if !*update {
				require.Equal(t, strings.Join(want, "\n"), strings.Join(got, "\n"))
			}
		})
	}
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(golden, "\n")), 0o644))
	}
}

// TestF23Plans runs the plans of every collective, operator and number of chunks for clusters drawn
// at random. The results are the collective's, and the inputs stay as they are.
func TestF23Plans(t *testing.T) {
	seed := must.Seed(t)
	for name, combine := range operators {
		for op := plan.OpAllReduce; op <= plan.OpBarrier; op++ {
			if name != "sum" && !op.Reduces() {
				continue
			}
			t.Run(name+" "+op.String(), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(op)))
				for range 20 {
					l := drawLayout(rng)
					x := drawExample(rng, l, op, combine)
					x.run(t, l, combine, rng)
				}
			})
		}
	}
}

// TestF23Coverage counts what enters each cluster: each byte once from each other cluster, whatever
// the number of its ranks. Of an all-reduce it is 2(C-1)/C of the buffer.
func TestF23Coverage(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, sizes := range [][]int{{1, 1}, {8, 8}, {2, 3}, {3, 2, 4}, {4, 4, 4, 4}, {1, 7, 2, 5}} {
		var at []int
		for c, n := range sizes {
			at = append(at, slices.Repeat([]int{c}, n)...)
		}
		l := cluster.New(at, nil)
		clusters := int64(len(sizes))
		const n = 840 * 4 * elem
		for _, chunk := range []int64{0, n / 4} {
			enter := func(op plan.Op) (total int64, into []int64) {
				x := example{outs: make([][]byte, len(at)), ins: make([][]byte, len(at)), want: make([][]byte, len(at))}
				for r := range at {
					c := cluster.Call{Op: op, Rank: r, Bytes: n, Elem: elem, Chunk: chunk}
					x.outs[r], x.ins[r] = make([]byte, n), nil
					switch op {
					case plan.OpReduceScatter:
						x.ins[r] = make([]byte, n*len(at))
					case plan.OpAllGather:
						x.outs[r], x.ins[r] = make([]byte, n*len(at)), make([]byte, n)
					}
					x.calls = append(x.calls, c)
				}
				g := x.run(t, l, operators["sum"], rng)
				into = make([]int64, clusters)
				for k, b := range g.entered {
					total += b
					into[k[0]] += b
				}
				return total, into
			}
			total, _ := enter(plan.OpAllReduce)
			require.Equal(t, 2*(clusters-1)*n, total, "all_reduce, %v", sizes)
			total, _ = enter(plan.OpReduceScatter)
			require.Equal(t, (clusters-1)*n*int64(len(at)), total, "reduce_scatter, %v", sizes)
			_, into := enter(plan.OpBroadcast)
			for c, b := range into {
				if c > 0 {
					require.EqualValues(t, n, b, "broadcast, %v", sizes)
				}
			}
			_, into = enter(plan.OpAllGather)
			for c, b := range into {
				require.EqualValues(t, n*(len(at)-sizes[c]), b, "all_gather, %v", sizes)
			}
		}
	}
}

// balance is the most bytes that a rank of a cluster sends, in terms of their mean, of the worst
// cluster.
func balance(l *cluster.Layout, sent []int64) float64 {
	worst := 1.0
	for c := range l.Clusters() {
		var sum, most int64
		for _, r := range l.Members(c) {
			sum += sent[r]
			most = max(most, sent[r])
		}
		if sum > 0 {
			worst = max(worst, float64(most)*float64(len(l.Members(c)))/float64(sum))
		}
	}
	return worst
}

// TestF24Balance: the ranks of a cluster share its traffic evenly, if the clusters are of unlike size
// too, and in proportion to their links.
func TestF24Balance(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	allReduce := func(l *cluster.Layout, single bool) *group {
		x := example{outs: make([][]byte, l.Ranks()), ins: make([][]byte, l.Ranks()), want: make([][]byte, l.Ranks())}
		for r := range l.Ranks() {
			x.outs[r] = make([]byte, 84000)
			x.calls = append(x.calls, cluster.Call{Op: plan.OpAllReduce, Rank: r, Bytes: 84000, Elem: elem, Chunk: 20000, Single: single})
		}
		return x.run(t, l, operators["sum"], rng)
	}
	for _, sizes := range [][]int{{3, 2}, {2, 2}, {5, 7}, {3, 2, 4}} {
		var at []int
		for c, n := range sizes {
			at = append(at, slices.Repeat([]int{c}, n)...)
		}
		l := cluster.New(at, nil)
		fine, coarse := balance(l, allReduce(l, false).sent), balance(l, allReduce(l, true).sent)
		t.Logf("%v: %.3f, and %.3f with one rank for each cluster", sizes, fine, coarse)
		require.LessOrEqual(t, fine, coarse)
		require.Less(t, fine, 1.02)
	}
	l := cluster.New([]int{0, 0, 1, 1, 1}, []int64{3, 1, 1, 2, 1})
	sent := allReduce(l, false).sent
	require.InDelta(t, 3, float64(sent[0])/float64(sent[1]), 0.05)
	require.InDelta(t, 2, float64(sent[3])/float64(sent[2]), 0.05)
}

// TestF25NoNeutralElements: no step needs an element that leaves others as they are, so each
// operator works. (TestF23Plans has all of them; here are products and averages with values that
// zeros would spoil.)
func TestF25NoNeutralElements(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		l := drawLayout(rng)
		x := drawExample(rng, l, plan.OpAllReduce, operators["product"])
		for r := range x.outs {
			for i := 0; i < len(x.outs[r]); i += 2 {
				binary.LittleEndian.PutUint16(x.outs[r][i:], uint16(2*r+3))
			}
		}
		for r, want := range x.want {
			p := int16(1)
			for q := range x.outs {
				p *= int16(2*q + 3)
			}
			for i := 0; i < len(want); i += 2 {
				binary.LittleEndian.PutUint16(x.want[r][i:], uint16(p))
			}
		}
		x.run(t, l, operators["product"], rng)
	}
}

// TestF26Overlap: in the pipeline of three clusters, with equal times of all stages, the stages of
// different chunks overlap. It takes at most 0.7 of the time of stages one after the other. This is
// in virtual time: a cluster does one step inside at a time, and a link carries one step at a time.
func TestF26Overlap(t *testing.T) {
	l := cluster.New([]int{0, 0, 1, 1, 2, 2}, nil)
	const chunks = 16
	p := must.Get(l.Plan(cluster.Call{Op: plan.OpAllReduce, Bytes: 1 << 20, Elem: 4, Chunk: 1 << 20 / chunks}))
	const stage = 1000.0 / chunks // of one chunk
	sequential, now, link := 0.0, 0.0, 0.0
	ends := map[int]float64{} // when the network has done a chunk
	last := 0.0
	for i := range p.Steps {
		switch s := &p.Steps[i]; {
		case s.Finish:
			now = max(now, ends[s.Chunk])
		case s.Op == plan.OpAllReduce:
			part := float64(s.Parts[0].Len) * 2 / (1 << 20 / chunks) * stage
			link = max(link, now) + part
			ends[s.Chunk] = link
			sequential += part
		default:
			n := 0.0
			for _, x := range s.Parts {
				n += float64(x.Len)
			}
			part := n / (1 << 20 / chunks) * stage
			now += part
			sequential += part
			last = now
		}
	}
	t.Logf("%.0f of %.0f: %.3f", last, sequential, last/sequential)
	require.LessOrEqual(t, last, 0.7*sequential)
}

// TestF26EndsInOrder: with Apart, chunks end in the order in which their steps between clusters begin. The host's turns
// of an operation on devices end in the order in which they were given: one that ended before earlier ones would wait for
// them.
func TestF26EndsInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for range 50 {
		l := drawLayout(rng)
		for _, op := range []plan.Op{plan.OpAllReduce, plan.OpReduce, plan.OpBroadcast, plan.OpReduceScatter, plan.OpAllGather} {
			for _, c := range drawExample(rng, l, op, operators["sum"]).calls {
				c.Apart = true
				p := must.Get(l.Plan(c))
				var begin, end []int
				for _, s := range p.Steps {
					switch {
					case s.Finish:
						end = append(end, s.Chunk)
					case s.Stage == cluster.Between && !slices.Contains(begin, s.Chunk):
						begin = append(begin, s.Chunk)
					}
				}
				require.Equal(t, begin, end, "%+v", c)
			}
		}
	}
}

// TestF27Cache: a plan is made once for each different call, from many goroutines, and calls that
// differ in anything have different plans.
func TestF27Cache(t *testing.T) {
	l := cluster.New([]int{0, 0, 1, 1, 1}, nil)
	cache := cluster.NewCache(l)
	var calls []cluster.Call
	for n := range int64(5) {
		calls = append(calls,
			cluster.Call{Op: plan.OpAllReduce, Bytes: 1000 * n, Elem: 4},
			cluster.Call{Op: plan.OpAllReduce, Bytes: 1000 * n, Elem: 4, Chunk: 100},
			cluster.Call{Op: plan.OpBroadcast, Root: int(n), Bytes: 100},
			cluster.Call{Op: plan.OpAllToAll, Send: [][]int64{{1, 2, 3, 4, n}, {1, 2, 3, 4, 5}}, Recv: [][]int64{{1, 1, 3, 4, n}, {2, 2, 3, 4, 5}}},
		)
	}
	plans := make([]*cluster.Plan, len(calls))
	for i, c := range calls {
		p := must.Get(l.Plan(c))
		plans[i] = p
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 250 {
				k := (i*7 + g) % len(calls)
				p, err := cache.Plan(calls[k])
				if err != nil || p.String() != plans[k].String() {
					t.Errorf("%+v: %v, %v", calls[k], p, err)
				}
			}
		})
	}
	wg.Wait()
	require.Same(t, must.Get(cache.Plan(calls[0])), must.Get(cache.Plan(calls[0])))
}

// TestF30Refused has calls for which there is no plan.
func TestF30Refused(t *testing.T) {
	l := cluster.New([]int{0, 0, 1}, nil)
	for want, c := range map[string]cluster.Call{
		"rank 3 in a group of 3":             {Op: plan.OpBarrier, Rank: 3},
		"root -1 in a group of 3":            {Op: plan.OpReduce, Root: -1},
		"root 3 in a group of 3":             {Op: plan.OpGather, Root: 3},
		"no plan for op(77)":                 {Op: 77},
		"-1 bytes":                           {Op: plan.OpBroadcast, Bytes: -1},
		"goes around no ring":                {Op: plan.OpAllReduce, Around: true},
		"no whole number of elements":        {Op: plan.OpAllReduce, Bytes: 5, Elem: 4},
		"2 counts in a group of 3":           {Op: plan.OpAllGather, Counts: []int64{1, 2}},
		"all_reduce takes no counts":         {Op: plan.OpAllReduce, Counts: []int64{1, 2, 3}},
		"block of rank 2":                    {Op: plan.OpReduceScatter, Counts: []int64{4, 4, 2}, Elem: 4},
		"lengths of 1 and 2 ranks":           {Op: plan.OpAllToAll, Send: [][]int64{{1, 1, 1}}, Recv: [][]int64{{1, 1, 1}, {1, 1, 1}}},
		"lengths [1 -1 1] in a group of 3":   {Op: plan.OpAllToAll, Send: [][]int64{{1, -1, 1}, {1, 1, 1}}, Recv: [][]int64{{1, 1, 1}, {1, 1, 1}}},
		"broadcast takes no lengths by pair": {Op: plan.OpBroadcast, Send: [][]int64{{}}},
	} {
		require.ErrorContains(t, must.Err(l.Plan(c)), want)
	}
}
