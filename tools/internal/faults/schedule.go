package faults

import (
	"math/rand/v2"
	"time"

	"github.com/c10d-go/c10d/internal/script"
)

// layouts are the hosts of the ranks of random cases, by wire. On shared memory with several hosts,
// collectives go in two levels. Two hosts cannot tell a broken link from a dead host, so there are
// three where a fault is one of the network.
var layouts = []struct {
	wire    Wire
	network bool
	hosts   []int
}{
	{Memory, false, []int{0, 0}}, {Memory, false, []int{0, 0, 0}}, {Memory, false, []int{0, 0, 0, 0, 0}},
	{Memory, false, []int{0, 0, 1, 1}}, {Memory, false, []int{0, 1, 0, 1}}, {Memory, false, []int{0, 0, 0, 1}},
	{Memory, true, []int{0, 0, 1, 2}}, {Memory, true, []int{0, 1, 2, 2}}, {Memory, true, []int{0, 0, 1, 1, 2}},
	{TCP, false, []int{0, 1}}, {TCP, true, []int{0, 1, 2}}, {TCP, true, []int{0, 1, 2, 3}}, {TCP, true, []int{0, 1, 2, 3, 4}},
	{Gloo, false, []int{0, 1}}, {Gloo, true, []int{0, 1, 2}}, {Gloo, true, []int{0, 1, 2, 3}}, {Gloo, true, []int{0, 1, 2, 3, 4}},
}

// MostHosts is how many hosts a random case has at most.
const MostHosts = 5

// Random draws a case on a wire. One seed always gives the same case.
func Random(w Wire, seed uint64) Case {
	r := rand.New(rand.NewPCG(seed, 0))
	faults := []Fault{Kill, Stop, Panic, Exit, Cancel, Cut, SlowRank, SlowLink}
	c := Case{Wire: w, Op: "random", Fault: faults[r.IntN(len(faults))], Detail: r.IntN(3) == 0}
	for c.Hosts == nil {
		if l := layouts[r.IntN(len(layouts))]; l.wire == w && (l.network || !c.Fault.onNetwork()) {
			c.Hosts = l.hosts
		}
	}
	size := len(c.Hosts)
	c.Victim, c.Other = r.IntN(size), r.IntN(size)
	for c.Hosts[c.Victim] == c.Hosts[c.Other] && c.Fault.onNetwork() {
		c.Other = r.IntN(size)
	}
	c.After = time.Duration(r.IntN(400_000)) * time.Microsecond
	elements := []int{1, 7, 1000, 70001, 300001}
	if c.Fault.isSlow() {
		elements = []int{1, 1000, 1 << 20}
	}
	ops := []string{"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all_single", "send_recv", "barrier"}
	for i := range 30 {
		l := script.Line{Op: ops[r.IntN(len(ops))], DType: []string{"float32", "int64", "bfloat16"}[r.IntN(3)], Seed: r.IntN(1000)}
		switch n := elements[r.IntN(len(elements))]; l.Op {
		case "barrier":
		case "send_recv":
			l.Shape, l.Src, l.Tag = []int{n}, r.IntN(size), uint32(i)
			l.Dst = (l.Src + 1 + r.IntN(size-1)) % size
		case "all_reduce":
			l.Shape = []int{n}
		default:
			l.Shape, l.Root = []int{n}, r.IntN(size)
		}
		c.Lines = append(c.Lines, l)
	}
	if c.Fault.isSlow() { // every link carries much data
		c.Lines[0] = script.Line{Op: "all_to_all_single", DType: "float32", Shape: []int{1 << 19}}
	}
	c.Lines = reparsed(c.Lines, size)
	return c
}
