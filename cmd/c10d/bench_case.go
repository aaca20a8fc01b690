package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// benchCase is an operation at one size on this rank.
type benchCase struct {
	at        *gpu
	bytes     int // as nccl-tests counts: a rank's whole buffer
	busFactor float64
	steps     float64 // how many times the operation's time passes in one call
	inPlace   bool    // input and output share memory
	issue     func(context.Context) (*work.Work, error)

	dtype  tensor.DType
	period int              // of the numbers of the check
	in     []*tensor.Tensor // for the check: rank's numbers
	out    []*tensor.Tensor // for the check: this many equal parts
	parts  int
	want   func(part int) expected
	own    func(context.Context) error // a check of the case's own, instead
}

// expected has the numbers that the check expects in a part of an output: base, plus slope
// for each further element, from element first of the period on.
type expected struct {
	base, slope float64
	first       int
}

// Input element i of rank r is its base plus i modulo the period.
func baseOf(rank int) float64 { return float64(rank%100 + 1) }

const sparseOp = "sparse_all_reduce"

// coalesced is how many tensors a call of all_reduce_coalesced has: as many as a bucket of a small model.
const coalesced = 8

// inPlaceOps have an input and an output. One of them can be a part of the other.
var inPlaceOps = []string{"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}

func benchOps() []string {
	return []string{
		"all_reduce", "all_reduce_coalesced", sparseOp, "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
		"reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter",
		"send_recv", "recv_any", "barrier",
	}
}

// periods are the possible periods of the check's numbers. The first one whose numbers fit
// the type is used. They have no common factor with the sizes of pieces.
var periods = []int{13, 7, 5, 3, 1}

// reduction returns the numbers that the check expects from a reduction over n ranks, and
// their period. It is not ok if the elements cannot hold them exactly or the operator is
// another one.
func reduction(op pg.ReduceOp, d tensor.DType, n int) (want expected, period int, ok bool) {
	sum, most := 0.0, 0.0
	for r := range n {
		sum += baseOf(r)
		most = max(most, baseOf(r))
	}
	for _, period = range periods {
		above := float64(period - 1)
		highest := sum + float64(n)*above
		switch op.Kind() {
		case pg.Sum().Kind():
			want = expected{base: sum, slope: float64(n)}
		case pg.Avg().Kind():
			want = expected{base: sum / float64(n), slope: 1}
			highest *= 2 // it may be a half
		case pg.Max().Kind():
			want, highest = expected{base: most, slope: 1}, most+above
		case pg.Min().Kind():
			want, highest = expected{base: 1, slope: 1}, most+above
		default:
			return want, period, false
		}
		if highest <= exactTo(d) {
			return want, period, true
		}
	}
	return want, 1, false
}

// tensors makes a tensor with count elements. Every rank makes the same number of tensors.
type tensors func(d tensor.DType, count int) (*tensor.Tensor, error)

func newCase(of tensors, name string, g *pg.ProcessGroup, at *gpu, d tensor.DType, op pg.ReduceOp, size int, inPlace bool, tensors int) (*benchCase, error) {
	n, me := g.Size(), g.Rank()
	var failed error
	mk := func(count int) []*tensor.Tensor {
		t, err := of(d, count)
		failed = errors.Join(failed, err)
		if t == nil {
			t = new(tensor.Tensor)
		}
		return []*tensor.Tensor{t}
	}
	whole := max(size/d.Size(), 1)
	part := max(whole/n, 1)
	shared := float64(n-1) / float64(n)
	byRank := func(part int) expected { return expected{base: baseOf(part), slope: 1} }
	sum, period, known := reduction(op, d, n)
	if !known {
		period = 1
	}
	// The type must hold the inputs exactly.
	for period > 1 && baseOf(min(n, 100)-1)+float64(period) > exactTo(d) {
		period = periods[slices.Index(periods, period)+1]
	}
	reduced := func(int) expected { return sum }
	if !known {
		reduced = nil
	}
	scattered := func(int) expected { return expected{base: sum.base, slope: sum.slope, first: me * part} }
	if !known {
		scattered = nil
	}
	// split cuts a tensor into parts.
	split := func(t *tensor.Tensor, parts int) []*tensor.Tensor {
		cut := make([]*tensor.Tensor, parts)
		for i := range cut {
			var err error
			cut[i], err = t.Slice(0, i*t.Len()/parts, (i+1)*t.Len()/parts)
			failed = errors.Join(failed, err)
		}
		return cut
	}
	// own returns this rank's part of a tensor with one part for each rank.
	own := func(t *tensor.Tensor) []*tensor.Tensor { return split(t, n)[me : me+1] }
	// The factors are those of nccl-tests' PERFORMANCE.md.
	c := &benchCase{at: at, bytes: whole * d.Size(), busFactor: 1, steps: 1, dtype: d, period: period, parts: 1}
	c.inPlace = inPlace && slices.Contains(inPlaceOps, name)
	switch name {
	case "all_reduce", "all_reduce_coalesced":
		c.busFactor = 2 * shared
	case "reduce", "broadcast", "send_recv", "recv_any", sparseOp:
	default:
		c.bytes, c.busFactor = part*n*d.Size(), shared
	}
	switch name {
	case "all_reduce":
		c.in = mk(whole)
		c.out, c.want = c.in, reduced
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.AllReduce(ctx, c.out[0], op)
		}
	case "all_reduce_coalesced":
		c.in = mk(whole)
		c.out, c.want = c.in, reduced
		parts := split(c.in[0], min(whole, tensors))
		slices.Reverse(parts) // so that none begins where the one before it ends
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.AllReduceCoalesced(ctx, parts, op)
		}
	case sparseOp:
		if err := c.sparse(g, d, op); err != nil {
			return nil, err
		}
	case "reduce":
		c.in = mk(whole)
		if me == 0 {
			c.out, c.want = c.in, reduced
		}
		c.issue = func(ctx context.Context) (*work.Work, error) {
			return g.Reduce(ctx, c.in[0], 0, op)
		}
	case "broadcast":
		c.in = mk(whole)
		root := n - 1
		c.out, c.want = c.in, func(int) expected { return byRank(root) }
		c.issue = func(ctx context.Context) (*work.Work, error) {
			root = (root + 1) % n // so that the root cannot run ahead
			return g.Broadcast(ctx, c.in[0], root)
		}
	case "all_gather", "all_gather_into_tensor":
		c.out, c.want, c.parts = mk(part*n), byRank, n
		if c.inPlace {
			c.in = own(c.out[0])
		} else {
			c.in = mk(part)
		}
		parts := split(c.out[0], n)
		c.issue = func(ctx context.Context) (*work.Work, error) {
			if name == "all_gather" {
				return g.AllGather(ctx, parts, c.in[0])
			}
			return g.AllGatherIntoTensor(ctx, c.out[0], c.in[0])
		}
	case "reduce_scatter", "reduce_scatter_tensor":
		c.in, c.want = mk(part*n), scattered
		if c.inPlace {
			c.out = own(c.in[0])
		} else {
			c.out = mk(part)
		}
		parts := split(c.in[0], n)
		c.issue = func(ctx context.Context) (*work.Work, error) {
			if name == "reduce_scatter" {
				return g.ReduceScatter(ctx, c.out[0], parts, op)
			}
			return g.ReduceScatterTensor(ctx, c.out[0], c.in[0], op)
		}
	case "all_to_all", "all_to_all_single":
		c.in, c.out, c.parts = mk(part*n), mk(part*n), n
		c.want = func(p int) expected { return expected{base: baseOf(p), slope: 1, first: me * part} }
		in, out := split(c.in[0], n), split(c.out[0], n)
		c.issue = func(ctx context.Context) (*work.Work, error) {
			if name == "all_to_all" {
				return g.AllToAll(ctx, out, in)
			}
			return g.AllToAllSingle(ctx, c.out[0], c.in[0], nil, nil)
		}
	case "gather", "scatter":
		one, all := mk(part), mk(part*n)
		var parts []*tensor.Tensor
		if me == 0 {
			parts = split(all[0], n)
		}
		if name == "gather" {
			c.in = one
			if me == 0 {
				c.out, c.want, c.parts = all, byRank, n
			}
			c.issue = func(ctx context.Context) (*work.Work, error) {
				return g.Gather(ctx, parts, one[0], 0)
			}
		} else {
			c.in, c.out = all, one
			c.want = func(int) expected { return expected{base: baseOf(0), slope: 1, first: me * part} }
			c.issue = func(ctx context.Context) (*work.Work, error) {
				return g.Scatter(ctx, one[0], parts, 0)
			}
		}
	case "send_recv", "recv_any":
		// A ping-pong between ranks 0 and 1: two messages.
		c.steps = 2
		c.in, c.out, c.want = mk(whole), mk(whole), func(int) expected { return byRank(1 - me) }
		if n < 2 {
			return nil, usagef("%s needs two ranks", name)
		}
		if me > 1 {
			c.out = nil
		}
		recv := func(ctx context.Context, from int) (*work.Work, error) {
			if name == "recv_any" {
				return g.RecvAnySource(ctx, c.out[0])
			}
			return g.Recv(ctx, c.out[0], from)
		}
		c.issue = func(ctx context.Context) (*work.Work, error) {
			switch me {
			case 0:
				if _, err := g.Send(ctx, c.in[0], 1); err != nil {
					return nil, err
				}
				return recv(ctx, 1)
			case 1:
				w, err := recv(ctx, 0)
				if err == nil {
					err = at.order(ctx, w)
				}
				if err != nil {
					return nil, err
				}
				return g.Send(ctx, c.in[0], 0)
			}
			return nil, nil
		}
	case "barrier":
		c.bytes = 0
		var o pg.BarrierOptions
		if at != nil {
			o.Device = tensor.CUDA
		}
		c.issue = func(ctx context.Context) (*work.Work, error) { return g.BarrierAsync(ctx, o) }
	}
	return c, failed
}

// queue makes n calls on the rank's stream, waits for the stream, and returns the time for
// each call.
func (c *benchCase) queue(ctx context.Context, n int) (each, call time.Duration, err error) {
	works := make([]*work.Work, 0, n)
	start := time.Now()
	for range n {
		begin := time.Now()
		w, err := c.issue(ctx)
		if err != nil {
			return 0, 0, err
		}
		if w == nil {
			continue
		}
		call += time.Since(begin)
		if err := c.at.order(ctx, w); err != nil {
			return 0, 0, err
		}
		works = append(works, w)
	}
	if err := drain(ctx, c.at.stream); err != nil {
		return 0, 0, err
	}
	each = time.Since(start) / time.Duration(n)
	return each, call / time.Duration(n), work.WaitAll(ctx, works...)
}

// The sparse tensor of the benchmark is the gradient of an embedding with this number of
// rows and columns. A rank's entries are random rows, some of them twice.
const sparseRows, sparseColumns = 1 << 20, 64

// sparse prepares the all-reduce of rows of an embedding, c.bytes of them on each rank.
func (c *benchCase) sparse(g *pg.ProcessGroup, d tensor.DType, op pg.ReduceOp) error {
	row := sparseColumns * d.Size()
	n := max(c.bytes/row, 1)
	c.bytes = n * row
	at := func(rank int) []int64 {
		r := rand.New(rand.NewPCG(1, uint64(rank)))
		rows := make([]int64, n)
		for i := range rows {
			rows[i] = r.Int64N(sparseRows)
		}
		return rows
	}
	indices, err := tensor.Of(at(g.Rank()), 1, n)
	if err != nil {
		return err
	}
	values, err := tensor.New(d, n, sparseColumns)
	if err != nil {
		return err
	}
	if err := values.Fill(1); err != nil {
		return err
	}
	t, err := tensor.Sparse(indices, values, sparseRows, sparseColumns)
	if err != nil {
		return err
	}
	list := []*tensor.Tensor{t}
	c.issue = func(ctx context.Context) (*work.Work, error) {
		// The result replaced the entries.
		if err := t.SetSparse(indices, values, false); err != nil {
			return nil, err
		}
		return g.AllReduce(ctx, list[0], op)
	}
	c.own = func(ctx context.Context) error {
		if k := op.Kind(); k != pg.Sum().Kind() {
			return nil // Avg rounds
		}
		w, err := c.issue(ctx)
		if err == nil {
			err = w.Wait(ctx)
		}
		if err != nil {
			return err
		}
		want := map[int64]float64{}
		for r := range g.Size() {
			for _, row := range at(r) {
				want[row]++
			}
		}
		got, err := tensor.Data[int64](t.Indices())
		if err != nil {
			return err
		}
		if len(got) != len(want) {
			return fmt.Errorf("wrong result: %d entries, want %d", len(got), len(want))
		}
		for i, row := range got {
			for _, col := range []int{0, sparseColumns - 1} {
				v, err := t.Values().Float64At(i, col)
				if err != nil {
					return err
				}
				if v != want[row] {
					return fmt.Errorf("wrong result: element [%d %d] is %v, want %v", row, col, v, want[row])
				}
			}
		}
		return nil
	}
	return nil
}

// check runs the operation once on known numbers and compares every element of the outputs,
// which hold other numbers before.
func (c *benchCase) check(ctx context.Context, rank int) error {
	if c.own != nil {
		return c.own(ctx)
	}
	for _, t := range c.out {
		if err := c.at.poison(ctx, t); err != nil {
			return err
		}
	}
	for _, t := range c.in {
		s, err := newSeries(c.dtype, baseOf(rank), 1, c.period)
		if err != nil {
			return err
		}
		err = c.at.pieces(ctx, t, true, func(b []byte, first int) error {
			s.fill(b, first)
			return nil
		})
		if err != nil {
			return err
		}
	}
	w, err := c.issue(ctx)
	if err == nil && w != nil {
		if err = c.at.finish(ctx, w); err == nil {
			err = w.Wait(ctx)
		}
	}
	if err != nil || c.want == nil {
		return err
	}
	for _, t := range c.out {
		n := t.Len() / c.parts
		for part := range c.parts {
			of, err := t.Slice(0, part*n, (part+1)*n)
			if err != nil {
				return err
			}
			want := c.want(part)
			s, err := newSeries(c.dtype, want.base, want.slope, c.period)
			if err != nil {
				return err
			}
			err = c.at.pieces(ctx, of, false, func(b []byte, first int) error {
				i, got, w, err := s.check(b, want.first+first)
				if err == nil && i >= 0 {
					err = fmt.Errorf("wrong result: element %d is %v, want %v", part*n+first+i, got, w)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}
