// Package overlaptest draws collectives in place, for the tests of backends: the input and the output of a rank share
// memory. It knows which of them backend.CheckMemory refuses, and what the others do to every element.
package overlaptest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Names are the operations that Draw knows.
var Names = []string{
	"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "scatter",
	"reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single",
}

// width is how many elements a row of a part has.
const width = 2

// Call is one collective. The memory of a rank has a part for each rank, of some rows.
type Call struct {
	Name string

	size, root, rows int
	stride           int  // from one row to the next
	wrong            bool // ranks pass another's part as their own
}

// Draw draws a call of an operation.
func Draw(rng *rand.Rand, name string, size int) *Call {
	return &Call{
		Name: name, size: size, root: rng.IntN(size), rows: []int{1, 3, 200}[rng.IntN(3)],
		stride: []int{width, width + 3}[rng.IntN(2)], wrong: size > 1 && rng.IntN(4) == 0,
	}
}

func (c *Call) rooted() bool { return c.Name == "gather" || c.Name == "scatter" }

func (c *Call) exchanges() bool { return c.Name == "all_to_all" || c.Name == "all_to_all_single" }

// Refused reports whether a rank's call is refused. Then no rank makes one that is not.
func (c *Call) Refused(rank int) bool {
	return c.exchanges() || c.wrong && (!c.rooted() || rank == c.root)
}

// AnyRefused reports whether the call of some rank is refused.
func (c *Call) AnyRefused() bool { return c.Refused(c.root) }

// Before returns a rank's memory before the call.
func (c *Call) Before(rank int) []int32 {
	v := make([]int32, c.size*c.rows*c.stride)
	for i := range v {
		v[i] = int32(100_000*rank + i)
	}
	return v
}

// part calls f for the elements of a part.
func (c *Call) part(part int, f func(at int)) {
	for row := range c.rows {
		for k := range width {
			f((part*c.rows+row)*c.stride + k)
		}
	}
}

// After returns a rank's memory after the call.
func (c *Call) After(rank int) []int32 {
	v := c.Before(rank)
	switch {
	case c.Refused(rank) || c.Name == "gather" && rank != c.root || c.Name == "scatter" && rank == c.root:
	case c.Name == "scatter":
		c.part(rank, func(at int) { v[at] = c.Before(c.root)[at] })
	case c.Name == "gather" || c.Name[:3] == "all":
		for q := range c.size {
			from := c.Before(q)
			c.part(q, func(at int) { v[at] = from[at] })
		}
	default:
		for q := range c.size {
			if from := c.Before(q); q != rank {
				c.part(rank, func(at int) { v[at] += from[at] })
			}
		}
	}
	return v
}

func (c *Call) String() string {
	return fmt.Sprintf("%s of %d ranks, root %d, %d rows, stride %d, refused %v", c.Name, c.size, c.root, c.rows, c.stride, c.AnyRefused())
}

// Run makes a rank's call. The memory is a tensor of one dimension.
func (c *Call) Run(ctx context.Context, b backend.Backend, memory *tensor.Tensor) (*work.Work, error) {
	view := func(part, parts int) *tensor.Tensor {
		t, err := memory.AsStrided([]int{parts * c.rows, width}, []int{c.stride, 1}, part*c.rows*c.stride)
		if err != nil {
			panic(fmt.Sprintf("overlaptest: %v: %v", c, err))
		}
		return t
	}
	whole, own := []*tensor.Tensor{view(0, c.size)}, b.Rank()
	if c.wrong {
		own = (own + 1) % c.size
	}
	var parts []*tensor.Tensor
	for q := range c.size {
		parts = append(parts, view(q, 1))
	}
	mine, at := parts[own:own+1], parts
	if c.rooted() && b.Rank() != c.root {
		at = nil
	}
	switch c.Name {
	case "all_gather":
		return b.AllGather(ctx, parts, mine[0], backend.AllGatherOptions{})
	case "all_gather_into_tensor":
		return b.AllGatherIntoTensor(ctx, whole[0], mine[0], backend.AllGatherOptions{})
	case "all_gather_coalesced":
		return b.AllGatherCoalesced(ctx, slices.Collect(slices.Chunk(parts, 1)), mine, backend.AllGatherOptions{})
	case "all_gather_into_tensor_coalesced":
		return b.AllGatherIntoTensorCoalesced(ctx, whole, mine, backend.AllGatherOptions{})
	case "gather":
		return b.Gather(ctx, at, mine[0], backend.GatherOptions{Root: c.root})
	case "scatter":
		return b.Scatter(ctx, mine[0], at, backend.ScatterOptions{Root: c.root})
	case "reduce_scatter":
		return b.ReduceScatter(ctx, mine[0], parts, backend.ReduceScatterOptions{})
	case "reduce_scatter_tensor":
		return b.ReduceScatterTensor(ctx, mine[0], whole[0], backend.ReduceScatterOptions{})
	case "reduce_scatter_tensor_coalesced":
		return b.ReduceScatterTensorCoalesced(ctx, mine, whole, backend.ReduceScatterOptions{})
	case "all_to_all":
		return b.AllToAll(ctx, parts, parts, backend.AllToAllOptions{})
	}
	return b.AllToAllSingle(ctx, whole[0], whole[0], nil, nil, backend.AllToAllOptions{})
}
