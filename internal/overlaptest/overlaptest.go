// Package overlaptest draws collectives whose tensors may share memory, for the tests of backends. It knows which
// of them backend.CheckMemory refuses, and what the others do to every byte. It does not ask CheckMemory: it looks at
// each element.
package overlaptest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Names are the operations that Draw knows.
var Names = []string{
	"broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather", "all_gather_v", "all_gather_into_tensor",
	"all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "gather_v", "scatter", "reduce_scatter",
	"reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single",
}

// Arenas is how many pieces of memory the tensors of a rank lie in.
const Arenas = 2

// A tensor has rows of width elements. Those that lie side by side are in rows of so many columns.
const (
	columns = 48
	width   = 2
	arena   = 1 << 30 // more than the elements of an arena
)

// Call is one collective, with the tensors of every rank.
type Call struct {
	Name string

	size, root, scale int
	lists             int  // how many tensors a coalesced call has
	length            int  // of an arena
	stacked           bool // tensors with a part for each rank have a dimension for that
	splits            [][]int
	out, in           [][]view // of each rank
	refused           []bool   // which ranks' calls are refused

	once   sync.Once
	before []memory // of each rank
}

// view is a tensor of rows with width elements in an arena.
type view struct {
	arena, offset, rows, stride int
}

// part is a view of some rows.
func (v view) part(from, n int) view { return view{v.arena, v.offset + from*v.stride, n, v.stride} }

// each calls f for the elements, in order.
func (v view) each(f func(i, at int)) {
	for r := range v.rows {
		for c := range width {
			f(r*width+c, v.arena*arena+v.offset+r*v.stride+c)
		}
	}
}

// same reports whether two views are the same elements in the same order.
func (v view) same(o view) bool {
	return v == o || v.rows == o.rows && v.rows <= 1 && v.arena == o.arena && v.offset == o.offset
}

// Draw draws a call of the named operation. All ranks draw the same with the same random numbers.
func Draw(rng *rand.Rand, name string, size int) *Call {
	c := &Call{Name: name, size: size, root: rng.IntN(size), scale: 1, lists: 1, refused: make([]bool, size)}
	switch rng.IntN(10) {
	case 0:
		c.scale = 100
	case 1, 2:
		c.scale = 5000
	}
	if name == "all_gather_coalesced" || name == "all_gather_into_tensor_coalesced" || name == "reduce_scatter_tensor_coalesced" {
		c.lists = 1 + rng.IntN(3)
	}
	length := func() int { return c.scale * rng.IntN(4) }
	n := make([]int, max(size, 3))
	for i := range n {
		n[i] = length()
	}
	if rng.IntN(4) > 0 {
		n[0] = c.scale * (1 + rng.IntN(3))
	}
	for range size { // splits[q][r] go from rank q to rank r
		row := make([]int, size)
		for r := range row {
			row[r] = length()
			if rng.IntN(2) == 0 {
				row[r] = n[0]
			}
		}
		c.splits = append(c.splits, row)
	}
	if name == "all_to_all_single" && rng.IntN(2) == 0 {
		for _, row := range c.splits {
			for r := range row {
				row[r] = n[0]
			}
		}
	}
	c.stacked = rng.IntN(2) == 0
	mode := []int{0, 1, 1, 1, 2, 3}[rng.IntN(6)]
	for r := range size {
		out, in := c.lengths(r, n)
		c.out, c.in = append(c.out, make([]view, len(out))), append(c.in, make([]view, len(in)))
		c.place(rng, mode, r, out, in)
		c.refused[r] = c.refuse(r)
	}
	return c
}

// lengths returns how many rows the tensors of a rank have.
func (c *Call) lengths(r int, n []int) (out, in []int) {
	all := func(f func(q int) int) (l []int) {
		for q := range c.size {
			l = append(l, f(q))
		}
		return l
	}
	same := func(int) int { return n[0] }
	one := []int{n[0]}
	whole := []int{c.size * n[0]}
	switch c.Name {
	case "broadcast", "all_reduce":
		return []int{n[0], n[0]}, nil
	case "all_reduce_coalesced":
		return n[:3], nil
	case "reduce":
		return one, nil
	case "all_gather":
		return all(same), one
	case "all_gather_v":
		return n[:c.size], n[r : r+1]
	case "all_gather_into_tensor":
		return whole, one
	case "all_gather_coalesced":
		return slices.Repeat(n[:c.lists], c.size), n[:c.lists]
	case "all_gather_into_tensor_coalesced":
		for _, m := range n[:c.lists] {
			out = append(out, c.size*m)
		}
		return out, n[:c.lists]
	case "gather":
		if r == c.root {
			out = all(same)
		}
		return out, one
	case "gather_v":
		if r == c.root {
			out = n[:c.size]
		}
		return out, n[r : r+1]
	case "scatter":
		if r == c.root {
			in = all(same)
		}
		return one, in
	case "reduce_scatter":
		return n[r : r+1], n[:c.size]
	case "reduce_scatter_tensor":
		return one, whole
	case "reduce_scatter_tensor_coalesced":
		in, out = c.lengthsOfTensors(n)
		return out, in
	case "all_to_all":
		return all(func(q int) int { return c.splits[q][r] }), c.splits[r]
	case "all_to_all_single":
		m, k := 0, 0
		for q := range c.size {
			m, k = m+c.splits[q][r], k+c.splits[r][q]
		}
		return []int{m}, []int{k}
	}
	panic("overlaptest: no operation " + c.Name)
}

// lengthsOfTensors returns the rows of tensors for all ranks and of this rank's parts of them.
func (c *Call) lengthsOfTensors(n []int) (wholes, parts []int) {
	for _, m := range n[:c.lists] {
		wholes = append(wholes, c.size*m)
	}
	return wholes, n[:c.lists]
}

// place puts the tensors of a rank somewhere: apart, in place, anywhere, or some where others are.
func (c *Call) place(rng *rand.Rand, mode, r int, out, in []int) {
	next, step := [Arenas]int{}, []int{0, 1, 1, 2}[rng.IntN(4)]
	if c.scale > 100 {
		step = 1 // rows with gaps would take much memory
	}
	apart := func(n int) view {
		a := rng.IntN(Arenas)
		v := view{a, next[a], n, width + max(step-1, 0)} // one after the other, perhaps with gaps
		if step == 0 {
			v.stride = columns // side by side
			next[a] += width
		} else {
			next[a] += n * v.stride
		}
		return v
	}
	anywhere := func(n int) view {
		stride := []int{width, width, width + 1, columns, 1, 0}[rng.IntN(6)]
		return view{rng.IntN(Arenas), rng.IntN([]int{8, 200 * c.scale}[rng.IntN(2)]), n, stride}
	}
	var all []view
	put := func(n int) (v view) {
		switch {
		case mode == 2 && rng.IntN(3) == 0:
			v = anywhere(n)
		case mode == 3 && len(all) > 0 && rng.IntN(4) == 0:
			v = all[rng.IntN(len(all))]
			v.rows = n
		default:
			v = apart(n)
		}
		c.length = max(c.length, v.offset+n*v.stride+width)
		all = append(all, v)
		return v
	}
	short, long, ns, nl := c.in[r], c.out[r], in, out
	if !c.gathers() {
		short, long, ns, nl = long, short, nl, ns
	}
	for i, n := range nl {
		long[i] = put(n)
	}
	for i, n := range ns {
		if short[i] = put(n); mode == 1 && c.partOf(r, i) != nil {
			short[i] = *c.partOf(r, i)
		}
	}
}

// gathers reports whether an input may be a part of an output. Otherwise it is the other way round.
func (c *Call) gathers() bool {
	switch c.Name {
	case "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced":
		return false
	}
	return true
}

// partOf returns what tensor i of a rank is in place: an input that is a part of an output, or the other way
// round. Nil means nothing.
func (c *Call) partOf(r, i int) *view {
	long, n := c.out[r], 0
	if c.gathers() {
		n = len(c.in[r])
	} else {
		long, n = c.in[r], len(c.out[r])
	}
	switch c.Name {
	case "broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_to_all", "all_to_all_single":
		return nil
	}
	if c.hasTensors() {
		k := long[i].rows / c.size
		v := long[i].part(r*k, k)
		return &v
	}
	if len(long) == 0 {
		return nil
	}
	return &long[r*n+i]
}

// hasTensors reports whether the operation has a tensor with parts for all ranks, and not a list.
func (c *Call) hasTensors() bool {
	switch c.Name {
	case "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced":
		return true
	}
	return false
}

// refuse reports whether the call of a rank is refused.
func (c *Call) refuse(r int) (bad bool) {
	owned, parts := c.owned(r), c.in[r]
	for _, n := range owned {
		bad = bad || n > 1 // two outputs, or an output twice
	}
	if !c.gathers() {
		parts = c.out[r]
	}
	// Elements of an input that are an output in place are fine. All others must be apart from all outputs.
	uses := make([]int, len(owned))
	for _, v := range c.in[r] {
		v.each(func(_, at int) { uses[c.index(at)]++ })
	}
	for i, v := range parts {
		if p := c.partOf(r, i); p != nil && p.same(v) {
			v.each(func(_, at int) { uses[c.index(at)]-- })
		}
	}
	for i, n := range uses {
		bad = bad || n > 0 && owned[i] > 0
	}
	return bad
}

// owned returns how often each element of a rank's arenas is in an output.
func (c *Call) owned(r int) []int {
	owned := make([]int, Arenas*c.length)
	for _, v := range c.out[r] {
		v.each(func(_, at int) { owned[c.index(at)]++ })
	}
	return owned
}

// index numbers the elements of all arenas.
func (c *Call) index(at int) int { return at/arena*c.length + at%arena }

// Refused reports whether the call of a rank is refused, and AnyRefused whether that of some rank is. Then the
// other ranks must not make theirs.
func (c *Call) Refused(r int) bool { return c.refused[r] }

// AnyRefused reports whether the call of some rank is refused.
func (c *Call) AnyRefused() bool { return slices.Contains(c.refused, true) }

// InPlace reports whether an input and an output of some rank share memory.
func (c *Call) InPlace() (found bool) {
	for r := range c.size {
		owned := c.owned(r)
		for _, v := range c.in[r] {
			v.each(func(_, at int) { found = found || owned[c.index(at)] > 0 })
		}
	}
	return found
}

// memory is the arenas of a rank.
type memory [Arenas][]int32

// Before returns the elements of a rank's arenas before the call.
func (c *Call) Before(r int) (m [Arenas][]int32) {
	c.once.Do(func() {
		c.before = make([]memory, c.size)
		for q := range c.before {
			for a := range Arenas {
				all := make([]int32, c.length)
				for i := range all {
					all[i] = int32(q*1_000_003 + a*500_009 + i*7)
				}
				c.before[q][a] = all
			}
		}
	})
	for a := range m {
		m[a] = slices.Clone(c.before[r][a])
	}
	return m
}

// read returns the elements of a view.
func (m *memory) read(v view) (all []int32) {
	v.each(func(_, at int) { all = append(all, m[v.arena][at%arena]) })
	return all
}

func (m *memory) write(v view, from []int32) {
	v.each(func(i, at int) { m[v.arena][at%arena] = from[i] })
}

// After returns the elements of a rank's arenas after the call.
func (c *Call) After(r int) [Arenas][]int32 {
	m, out := memory(c.Before(r)), c.out[r]
	in := func(q int, v view) []int32 { return c.before[q].read(v) }
	sum := func(f func(q int) []int32) (total []int32) {
		for q := range c.size {
			for i, v := range f(q) {
				if q == 0 {
					total = append(total, 0)
				}
				total[i] += v
			}
		}
		return total
	}
	switch c.Name {
	case "broadcast":
		for _, v := range out {
			m.write(v, in(c.root, c.out[c.root][1]))
		}
	case "all_reduce":
		total := sum(func(q int) []int32 {
			a, b := in(q, c.out[q][0]), in(q, c.out[q][1])
			for i := range a {
				a[i] += b[i]
			}
			return a
		})
		for _, v := range out {
			m.write(v, total)
		}
	case "all_reduce_coalesced", "reduce":
		for i, v := range out {
			if c.Name == "all_reduce_coalesced" || r == c.root {
				m.write(v, sum(func(q int) []int32 { return in(q, c.out[q][i]) }))
			}
		}
	case "all_gather", "all_gather_v", "gather", "gather_v":
		for q, v := range out {
			m.write(v, in(q, c.in[q][0]))
		}
	case "all_gather_coalesced":
		for j, v := range out {
			q, i := j/c.lists, j%c.lists
			m.write(v, in(q, c.in[q][i]))
		}
	case "all_gather_into_tensor", "all_gather_into_tensor_coalesced":
		for i, v := range out {
			var all []int32
			for q := range c.size {
				all = append(all, in(q, c.in[q][i])...)
			}
			m.write(v, all)
		}
	case "scatter":
		m.write(out[0], in(c.root, c.in[c.root][r]))
	case "reduce_scatter":
		m.write(out[0], sum(func(q int) []int32 { return in(q, c.in[q][r]) }))
	case "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced":
		for i, v := range out {
			m.write(v, sum(func(q int) []int32 { return in(q, c.in[q][i].part(r*v.rows, v.rows)) }))
		}
	case "all_to_all":
		for q, v := range out {
			m.write(v, in(q, c.in[q][r]))
		}
	case "all_to_all_single":
		var all []int32
		for q := range c.size {
			from := 0
			for _, k := range c.splits[q][:r] {
				from += k
			}
			all = append(all, in(q, c.in[q][0].part(from, c.splits[q][r]))...)
		}
		m.write(out[0], all)
	}
	return m
}

// String describes the call for a message of a test.
func (c *Call) String() string {
	s := fmt.Sprintf("%s of %d ranks, root %d, splits %v, refused %v", c.Name, c.size, c.root, c.splits, c.refused)
	for r := range c.size {
		s += fmt.Sprintf("\nrank %d: outputs %v, inputs %v (arena, offset, rows, stride)", r, c.out[r], c.in[r])
	}
	return s
}

// Run makes a rank's call. The arenas are tensors of one dimension.
func (c *Call) Run(ctx context.Context, b backend.Backend, arenas [Arenas]*tensor.Tensor) (*work.Work, error) {
	r := b.Rank()
	tensors := func(vs []view, whole bool) (ts []*tensor.Tensor) {
		for _, v := range vs {
			shape, strides := []int{v.rows, width}, []int{v.stride, 1}
			if k := v.rows / c.size; whole && c.stacked && c.hasTensors() {
				shape, strides = []int{c.size, k, width}, []int{k * v.stride, v.stride, 1}
			}
			t, err := arenas[v.arena].AsStrided(shape, strides, v.offset)
			if err != nil {
				panic(fmt.Sprintf("overlaptest: %v: %v", c, err))
			}
			ts = append(ts, t)
		}
		return ts
	}
	out, in := tensors(c.out[r], c.gathers()), tensors(c.in[r], !c.gathers())
	for i, v := range c.in[r] { // sometimes the tensor itself
		if k := slices.Index(c.out[r], v); k >= 0 && v.offset%4 == 0 && out[k].SameShape(in[i]) {
			in[i] = out[k]
		}
	}
	gather, scatter := backend.GatherOptions{Root: c.root}, backend.ReduceScatterOptions{}
	switch c.Name {
	case "broadcast":
		return b.Broadcast(ctx, out, backend.BroadcastOptions{Root: c.root, RootTensor: 1})
	case "all_reduce":
		return b.AllReduce(ctx, out, backend.AllReduceOptions{})
	case "all_reduce_coalesced":
		return b.AllReduceCoalesced(ctx, out, backend.AllReduceOptions{})
	case "reduce":
		return b.Reduce(ctx, out[0], backend.ReduceOptions{Root: c.root})
	case "all_gather":
		return b.AllGather(ctx, out, in[0], backend.AllGatherOptions{})
	case "all_gather_v":
		return b.AllGatherV(ctx, out, in[0], backend.AllGatherOptions{})
	case "all_gather_into_tensor":
		return b.AllGatherIntoTensor(ctx, out[0], in[0], backend.AllGatherOptions{})
	case "all_gather_coalesced":
		return b.AllGatherCoalesced(ctx, slices.Collect(slices.Chunk(out, c.lists)), in, backend.AllGatherOptions{})
	case "all_gather_into_tensor_coalesced":
		return b.AllGatherIntoTensorCoalesced(ctx, out, in, backend.AllGatherOptions{})
	case "gather":
		return b.Gather(ctx, out, in[0], gather)
	case "gather_v":
		return b.GatherV(ctx, out, in[0], gather)
	case "scatter":
		return b.Scatter(ctx, out[0], in, backend.ScatterOptions{Root: c.root})
	case "reduce_scatter":
		return b.ReduceScatter(ctx, out[0], in, scatter)
	case "reduce_scatter_tensor":
		return b.ReduceScatterTensor(ctx, out[0], in[0], scatter)
	case "reduce_scatter_tensor_coalesced":
		return b.ReduceScatterTensorCoalesced(ctx, out, in, scatter)
	case "all_to_all":
		return b.AllToAll(ctx, out, in, backend.AllToAllOptions{})
	}
	recv := make([]int, c.size)
	for q := range recv {
		recv[q] = c.splits[q][r]
	}
	send := c.splits[r]
	if !slices.ContainsFunc(c.splits, func(row []int) bool { return slices.Max(row) != slices.Min(row) || row[0] != send[0] }) {
		recv, send = nil, nil
	}
	return b.AllToAllSingle(ctx, out[0], in[0], recv, send, backend.AllToAllOptions{})
}
