package script

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Result is what one operation gave on one rank.
type Result struct {
	I      int    `json:"i"`
	Op     string `json:"op"`
	Rank   int    `json:"rank"`
	SHA256 string `json:"sha256"` // empty where the rank has no defined output
	Error  string `json:"error,omitempty"`
}

// Run does the operations on g, the default group, and reports each. After the last one all
// ranks meet in a barrier. If a call is refused, Run reports it and continues, because
// nothing was sent. An operation that fails later ends the script with its error.
func Run(ctx context.Context, g *pg.ProcessGroup, lines []Line, report func(Result)) error {
	groups := map[string]*pg.ProcessGroup{"": g}
	for i := range lines {
		l := &lines[i]
		out, err := l.run(ctx, g, groups)
		r := Result{I: i, Op: l.Op, Rank: g.Rank()}
		var failed *work.Error
		switch {
		case err != nil:
			r.Error = err.Error()
		case out != nil:
			r.SHA256, err = digest(out)
			if err != nil {
				return err
			}
		}
		report(r)
		if errors.As(err, &failed) || err != nil && l.Op == "new_group" {
			return fmt.Errorf("script: operation %d: %w", i, err)
		}
	}
	return g.Barrier(ctx)
}

// digest hashes the elements of every tensor in order.
func digest(ts []*tensor.Tensor) (string, error) {
	h := sha256.New()
	for _, t := range ts {
		c, err := t.Contiguous()
		if err != nil {
			return "", err
		}
		h.Write(c.Bytes())
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// call is the state of one line on one rank.
type call struct {
	*Line
	g   *pg.ProcessGroup
	err error
}

// run does one line and returns the rank's defined outputs, nil if it has none.
func (l *Line) run(ctx context.Context, world *pg.ProcessGroup, groups map[string]*pg.ProcessGroup) ([]*tensor.Tensor, error) {
	if l.Op == "new_group" {
		if l.Local && !slices.Contains(l.Ranks, world.Rank()) {
			return nil, nil
		}
		g, err := world.NewGroup(ctx, l.Ranks, pg.GroupOptions{Description: l.Name, Local: l.Local})
		groups[l.Name] = g
		return nil, err
	}
	c := &call{Line: l, g: groups[l.Group]}
	if c.g == nil || !c.g.IsMember() {
		return nil, nil
	}
	w, out := c.issue(ctx)
	if c.err != nil || w == nil {
		return out, c.err
	}
	if err := w.Wait(ctx); err != nil {
		return nil, err
	}
	return out, nil
}

func (c *call) keep(err error) {
	if c.err == nil {
		c.err = err
	}
}

// in returns this rank's input number j.
func (c *call) in(j int, shape ...int) *tensor.Tensor {
	global, err := c.g.GlobalRank(c.g.Rank())
	c.keep(err)
	t, err := c.Input(global, j, shape...)
	c.keep(err)
	return t
}

func (c *call) ins(n int, shape ...int) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, n)
	for j := range ts {
		ts[j] = c.in(j, shape...)
	}
	return ts
}

func (c *call) zero(shape ...int) *tensor.Tensor {
	t, err := tensor.New(c.dtype, shape...)
	c.keep(err)
	return t
}

func (c *call) zeros(n int, shape ...int) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, n)
	for j := range ts {
		ts[j] = c.zero(shape...)
	}
	return ts
}

// times returns the shape with its first dimension n times as large.
func times(shape []int, n int) []int {
	if len(shape) == 0 {
		return []int{n}
	}
	return append([]int{shape[0] * n}, shape[1:]...)
}

func list(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }

// issue starts the line's operation and returns its outputs.
func (c *call) issue(ctx context.Context) (w *work.Work, out []*tensor.Tensor) {
	size, me := c.g.Size(), c.g.Rank()
	groupRank := func(global int) int {
		r, err := c.g.GroupRank(global)
		c.keep(err)
		return r
	}
	do := func(issued *work.Work, err error) {
		w = issued
		c.keep(err)
	}
	switch c.Op {
	case "all_reduce":
		out = list(c.in(0, c.Shape...))
		do(c.g.AllReduce(ctx, out[0], c.op))
	case "all_reduce_coalesced":
		for j, s := range c.Shapes {
			out = append(out, c.in(j, s...))
		}
		do(c.g.AllReduceCoalesced(ctx, out, c.op))
	case "reduce":
		t, root := c.in(0, c.Shape...), groupRank(c.Root)
		do(c.g.Reduce(ctx, t, root, c.op))
		if me == root {
			out = list(t)
		}
	case "broadcast":
		out = list(c.in(0, c.Shape...))
		do(c.g.Broadcast(ctx, out[0], groupRank(c.Root)))
	case "all_gather":
		out = c.zeros(size, c.Shape...)
		do(c.g.AllGather(ctx, out, c.in(0, c.Shape...)))
	case "all_gather_into_tensor":
		out = list(c.zero(times(c.Shape, size)...))
		do(c.g.AllGatherIntoTensor(ctx, out[0], c.in(0, c.Shape...)))
	case "gather":
		root := groupRank(c.Root)
		if me == root {
			out = c.zeros(size, c.Shape...)
		}
		do(c.g.Gather(ctx, out, c.in(0, c.Shape...), root))
	case "scatter":
		var in []*tensor.Tensor
		root := groupRank(c.Root)
		if me == root {
			in = c.ins(size, c.Shape...)
		}
		out = list(c.zero(c.Shape...))
		do(c.g.Scatter(ctx, out[0], in, root))
	case "reduce_scatter":
		out = list(c.zero(c.Shape...))
		do(c.g.ReduceScatter(ctx, out[0], c.ins(size, c.Shape...), c.op))
	case "reduce_scatter_tensor":
		shape := c.Shape
		if len(shape) == 0 {
			shape = []int{1}
		}
		out = list(c.zero(shape...))
		do(c.g.ReduceScatterTensor(ctx, out[0], c.in(0, times(shape, size)...), c.op))
	case "all_to_all":
		out = c.zeros(size, c.Shape...)
		do(c.g.AllToAll(ctx, out, c.ins(size, c.Shape...)))
	case "all_to_all_single":
		do(c.allToAllSingle(ctx, &out))
	case "send_recv", "recv_any":
		switch p := (pg.P2POptions{Tag: c.Tag}); me {
		case groupRank(c.Src):
			do(c.g.Send(ctx, c.in(0, c.Shape...), groupRank(c.Dst), p))
		case groupRank(c.Dst):
			out = list(c.zero(c.Shape...))
			if c.Op == "recv_any" {
				do(c.g.RecvAnySource(ctx, out[0], p))
			} else {
				do(c.g.Recv(ctx, out[0], groupRank(c.Src), p))
			}
		}
	case "barrier":
		do(c.g.BarrierAsync(ctx))
	default:
		c.keep(fmt.Errorf("script: unknown op %q", c.Op))
	}
	return w, out
}

func (c *call) allToAllSingle(ctx context.Context, out *[]*tensor.Tensor) (*work.Work, error) {
	size, me := c.g.Size(), c.g.Rank()
	if c.Splits == nil {
		shape := times(c.Shape, size)
		*out = list(c.zero(shape...))
		return c.g.AllToAllSingle(ctx, (*out)[0], c.in(0, shape...), nil, nil)
	}
	send, recv, sent, received := c.Splits[me], make([]int, size), 0, 0
	for r := range size {
		recv[r] = c.Splits[r][me]
		sent += send[r]
		received += recv[r]
	}
	*out = list(c.zero(received))
	return c.g.AllToAllSingle(ctx, (*out)[0], c.in(0, sent), recv, send)
}
