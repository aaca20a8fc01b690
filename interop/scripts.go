package main

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"slices"

	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/tensor"
)

var operators = []string{"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"}

// reduces reports whether an operation has an operator.
func reduces(op string) bool {
	switch op {
	case "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor":
		return true
	}
	return false
}

// cells returns a line for every operation with every dtype and operator. The barrier comes
// first: after a refused operation, PyTorch's barrier may fail on some ranks with the refusal's
// text, while others wait.
func cells() []script.Line {
	all := []script.Line{{Op: "barrier", DType: "float32"}}
	for _, op := range script.Ops() {
		if op == "new_group" || op == "barrier" {
			continue
		}
		rs := []string{""}
		if reduces(op) {
			rs = operators
		}
		for _, r := range rs {
			for _, d := range tensor.DTypes() {
				l := script.Line{Op: op, DType: d.String(), Reduce: r}
				if r == "premul_sum" {
					l.Factor = 0.5
				}
				all = append(all, l)
			}
		}
	}
	return all
}

// author writes the scripts of jobs of one size from the cells that PyTorch accepts.
type author struct {
	version version
	size    int
	taken   []script.Line
	lines   []script.Line
}

func (a *author) add(l script.Line) { a.lines = append(a.lines, l) }

// place gives a cell a shape, and a root, a peer and a tag that change from line to line.
func (a *author) place(l script.Line, shape ...int) script.Line {
	i := len(a.lines)
	if slices.Contains(shape, 0) && emptyRefusal(a.version, l.Op) != "" {
		shape = []int{2, 3}
	}
	l.Shape, l.Seed = shape, i%997
	l.Root, l.Src = i%a.size, i%a.size
	l.Dst = (l.Src + 1 + i/a.size%(a.size-1)) % a.size
	switch l.Op {
	case "send_recv":
		l.Tag = []uint32{0, 5, 1<<31 - 1}[i%3]
	case "recv_any":
		l.Tag = uint32(1000 + i)
	case "all_reduce_coalesced":
		l.Shape, l.Shapes = nil, [][]int{shape, {}, {3, 2}}
	case "all_gather_into_tensor":
		if len(shape) == 0 {
			l.Shape = []int{1} // gloo cuts the output along its first dimension
		}
	}
	return l
}

func floating(l script.Line) bool {
	return slices.Contains(floats, l.DType) || slices.Contains(complexes, l.DType)
}

// small adds every stride-th cell with tensors of no, one and an odd number of
// elements, and fractions where the dtype has them.
func (a *author) small(stride int) {
	for i, c := range a.taken {
		if i%stride != 0 && c.Op != "barrier" {
			continue
		}
		a.add(a.place(c, 0))
		a.add(a.place(c, 1))
		a.add(a.place(c, 7, 149))
		if floating(c) {
			c.Fill = "frac"
			a.add(a.place(c, 1031))
		}
		if c.Op == "all_to_all_single" {
			l := a.place(c)
			l.Splits = make([][]int, a.size)
			for p := range l.Splits {
				for q := range a.size {
					l.Splits[p] = append(l.Splits[p], (p*7+q*3+i)%5)
				}
			}
			a.add(l)
		}
	}
}

// segments adds tensors of several segments: Gloo's ring cuts a tensor into 2P
// of them, and into more when they would be longer than 1 MiB.
func (a *author) segments() {
	bytes := 2*a.size<<20 + 123457
	for _, c := range a.taken {
		d, err := tensor.ParseDType(c.DType)
		if err != nil {
			continue
		}
		n := bytes / d.Size()
		switch c.Op {
		case "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor":
			n /= a.size
		}
		chosen := c.DType == "float32" && (c.Reduce == "" || c.Reduce == "sum")
		if c.Op == "all_reduce" || c.Op == "reduce" {
			chosen = chosen || c.DType == "float16" && c.Reduce == "sum" || c.DType == "bfloat16" && c.Reduce == "max" ||
				c.DType == "int64" && c.Reduce == "min" || c.DType == "int8" && c.Reduce == "product"
		}
		if !chosen {
			continue
		}
		if floating(c) {
			c.Fill = "frac"
		}
		if c.Op != "barrier" {
			a.add(a.place(c, n))
		}
	}
}

func (a *author) takes(op, reduce string) bool {
	return slices.ContainsFunc(a.taken, func(c script.Line) bool {
		return c.Op == op && c.DType == "float32" && c.Reduce == reduce
	})
}

// groups adds sub-groups that overlap, one out of order, one of a single rank,
// and operations in each.
func (a *author) groups() {
	everyone := make([]int, a.size)
	for i := range everyone {
		everyone[i] = a.size - 1 - i
	}
	for _, g := range []script.Line{
		{Name: "all", Ranks: everyone},
		{Name: "ends", Ranks: []int{0, a.size - 1}},
		{Name: "last", Ranks: []int{a.size - 1}},
		{Name: "others", Ranks: everyone[:a.size-1]},
	} {
		g.Op = "new_group"
		a.add(g)
		a.within(g)
		a.add(script.Line{Op: "all_reduce", Shape: []int{33}, Fill: "frac"}) // the default group goes on
	}
}

// nested adds groups inside groups: a parent, children that overlap each other and reach beyond
// it, a grandchild, and ranks that are in none. All exist at once and take turns. Every rank
// takes part in making each of them; only members do for local ones. A local group's name depends
// on the number of groups that its members are in, which must be equal.
func (a *author) nested(local bool) {
	last := a.size - 1
	groups := []script.Line{
		{Name: "parent", Ranks: others(a.size, last)},
		{Name: "child", Ranks: []int{0, last - 1}},
		{Name: "overlapping child", Ranks: others(last, 0)},
		{Name: "beyond", Ranks: []int{last - 1, last}},
		{Name: "grandchild", Ranks: []int{last - 1}},
		{Name: "the parent's ranks again", Ranks: others(a.size, last)},
	}
	if local {
		groups = []script.Line{
			{Name: "parent", Ranks: others(a.size, last)},
			{Name: "child", Ranks: others(last, 0)},
			{Name: "grandchild", Ranks: others(last, 0)[1:]},
			{Name: "alone", Ranks: []int{0}},
		}
	}
	for i := range groups {
		groups[i].Op, groups[i].Local = "new_group", local
		a.add(groups[i])
		for _, g := range slices.Backward(groups[:i+1]) {
			a.within(g)
		}
		a.add(script.Line{Op: "all_reduce", Shape: []int{33}, Fill: "frac"})
	}
}

func (a *author) within(g script.Line) {
	first, last := slices.Min(g.Ranks), slices.Max(g.Ranks)
	for _, op := range script.Ops() {
		r := ""
		if reduces(op) {
			r = "sum"
		}
		pair := op == "send_recv" || op == "recv_any"
		if op == "new_group" || !a.takes(op, r) || pair && first == last {
			continue
		}
		l := a.place(script.Line{Op: op, DType: "float32", Reduce: r, Fill: "frac"}, 113)
		l.Group, l.Root, l.Src, l.Dst = g.Name, last, last, first
		a.add(l)
	}
}

// full is the script of the matrix.
func full(v version, taken []script.Line, size int) []script.Line {
	a := &author{version: v, size: size, taken: taken}
	a.small(1)
	a.segments()
	a.groups()
	return a.lines
}

// sample is a shorter script for other environments.
func sample(v version, taken []script.Line, size int) []script.Line {
	a := &author{version: v, size: size, taken: taken}
	a.small(5) // 5 and the numbers of dtypes and operators have no common factor
	a.segments()
	a.groups()
	return a.lines
}

// inGroups is the script of groups in groups.
func inGroups(v version, taken []script.Line, size int, local bool) []script.Line {
	a := &author{version: v, size: size, taken: taken}
	a.nested(local)
	return a.lines
}

// inDetail leaves out lines that fail under TORCH_DISTRIBUTED_DEBUG=DETAIL in PyTorch itself.
// Since 2.1 its fingerprints count sends and receives, so they differ after a message between two
// of more ranks. It also leaves out broadcasts of complex tensors: 2.11 describes them as real,
// 2.6 as complex, and a Go rank cannot know its neighbour's version.
func inDetail(v version, lines []script.Line, size int) []script.Line {
	if v < 201 {
		return lines
	}
	sizes := map[string]int{"": size}
	return slices.DeleteFunc(slices.Clone(lines), func(l script.Line) bool {
		if l.Op == "new_group" {
			sizes[l.Name] = len(l.Ranks)
		}
		if l.Op == "broadcast" && v > 206 && slices.Contains(complexes, l.DType) {
			return true
		}
		return (l.Op == "send_recv" || l.Op == "recv_any") && sizes[l.Group] > 2
	})
}

// random draws n lines.
func random(v version, taken []script.Line, size, n int, seed uint64) []script.Line {
	rng := rand.New(rand.NewPCG(seed, 0))
	a := &author{version: v, size: size, taken: taken}
	groups := []script.Line{{}}
	everyone := make([]int, size)
	for i := range everyone {
		everyone[i] = i
	}
	for len(a.lines) < n {
		if rng.IntN(60) == 0 {
			g := script.Line{Op: "new_group", Name: string(rune('a' + len(groups))), Ranks: rng.Perm(size)[:2+rng.IntN(size-1)]}
			groups = append(groups, g)
			a.add(g)
			continue
		}
		shape := make([]int, rng.IntN(4))
		for i := range shape {
			shape[i] = rng.IntN(24)
		}
		if rng.IntN(10) == 0 {
			shape = []int{rng.IntN(1 << 18)}
		}
		l := a.place(taken[rng.IntN(len(taken))], shape...)
		l.Seed = rng.IntN(1 << 20)
		g := groups[rng.IntN(len(groups))]
		members := g.Ranks
		if g.Op == "" {
			members = everyone
		}
		order := rng.Perm(len(members))
		l.Group, l.Root = g.Name, members[order[0]]
		l.Src, l.Dst = members[order[0]], members[order[1]]
		if floating(l) && rng.IntN(2) == 0 {
			l.Fill = "frac"
		}
		a.add(l)
	}
	return a.lines
}

// text is a script as text.
func text(lines []script.Line) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, l := range lines {
		if err := enc.Encode(l); err != nil {
			panic(err) // a Line has nothing that JSON lacks
		}
	}
	return b.Bytes()
}
