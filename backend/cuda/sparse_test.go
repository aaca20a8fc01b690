package cuda_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// sparsePlan is a sparse all-reduce, the same on all ranks.
type sparsePlan struct {
	d     tensor.DType
	op    backend.ReduceOp
	dims  int // sparse ones, the first of shape
	shape []int
	list  int // tensors of a rank
	most  int // entries of a tensor
	seed  uint64
}

func (p *sparsePlan) String() string {
	return fmt.Sprintf("%v of %d x %v%v with %d sparse dimensions and up to %d entries, input seed %d", p.op, p.list, p.d, p.shape, p.dims, p.most, p.seed)
}

var sparseShapes = []sparsePlan{
	{dims: 1, shape: []int{40}}, {dims: 1, shape: []int{7, 3}}, {dims: 2, shape: []int{5, 9}}, {dims: 2, shape: []int{6, 4, 2, 3}}, {dims: 3, shape: []int{3, 4, 5}},
	{dims: 1, shape: []int{1}}, {dims: 0, shape: []int{3}}, {dims: 1, shape: []int{9, 0}}, {dims: 1, shape: []int{0, 4}}, {dims: 1, shape: []int{300, 16}},
}

// drawSparse draws an all-reduce of tensors of any dtype, in rows up to so many times as long.
func drawSparse(g *rand.Rand, times int) *sparsePlan {
	p := sparseShapes[g.IntN(len(sparseShapes))]
	p.shape = slices.Clone(p.shape)
	if p.dims > 0 && p.shape[0] > 1 {
		p.shape[0] *= 1 + g.IntN(times)
	}
	p.d, p.op, p.list, p.seed = tensor.DTypes()[g.IntN(len(tensor.DTypes()))], backend.Sum(), 1+g.IntN(8)/7, g.Uint64()
	if p.d.IsFloat() && p.d.Size() >= 4 && g.IntN(3) == 0 {
		p.op = backend.Avg()
	}
	n := p.coordinates()
	p.most = []int{0, 1, n / 10, n / 2, 2 * n}[g.IntN(5)]
	return &p
}

func (p *sparsePlan) coordinates() int {
	n := 1
	for _, d := range p.shape[:p.dims] {
		n *= d
	}
	return n
}

// input makes the tensors of a rank, in CPU memory. Some have no entries, some have coordinates several times.
func (p *sparsePlan) input(rank int) (all []*tensor.Tensor, err error) {
	g := rand.New(rand.NewPCG(p.seed, uint64(rank)))
	numbers, err := tensor.New(p.d, 2)
	if err != nil {
		return nil, err
	}
	if err := numbers.SetFloat64(1, 1); err != nil {
		return nil, err
	}
	for range p.list {
		n := g.IntN(p.most + 1)
		if g.IntN(4) == 0 || p.coordinates() == 0 {
			n = 0
		}
		at := make([]int64, p.dims*n)
		for i := range at {
			at[i] = g.Int64N(int64(p.shape[i/n]))
		}
		indices, err := tensor.Of(at, p.dims, n)
		if err != nil {
			return nil, err
		}
		values, err := tensor.New(p.d, append([]int{n}, p.shape[p.dims:]...)...)
		if err != nil {
			return nil, err
		}
		es := p.d.Size()
		for b := values.Bytes(); len(b) > 0; b = b[es:] {
			copy(b, numbers.Bytes()[g.IntN(2)*es:][:es])
		}
		t, err := tensor.Sparse(indices, values, p.shape...)
		if err == nil && g.IntN(2) == 0 {
			t, err = t.Coalesce()
		}
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

// want is what SumSparse makes of all ranks' tensors.
func (p *sparsePlan) want(ranks int) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	var all []*tensor.Tensor
	for r := range ranks {
		own := must.Get(p.input(r))
		sum := must.Get(tensor.SumSparse(own...))
		all = append(all, sum)
	}
	sum := must.Get(tensor.SumSparse(all...))
	red, err := p.op.Reduction(p.d, ranks)
	if err == nil && red.After != nil {
		red.After(sum.Values().Bytes())
	}
	return sum, err
}

// summer is a rank that all-reduces sparse tensors.
type summer struct {
	ctx        context.Context
	d          driver.Driver
	b          *cuda.Backend
	streams    []driver.Stream // of the caller, one a device
	delays     []*delay        // of the streams; nil if they have none
	rank, size int
	own        *rand.Rand // of this rank: where its tensors are, and how it calls
	way        *int       // in which it calls; nil if own draws one
	onCPU      int        // of so many tensors one is in CPU memory; 0 if none is
	close      []interface{ Close() error }
}

// summing is a sparse all-reduce on its way.
type summing struct {
	*sparsePlan
	ts  []*tensor.Tensor
	old []driver.Memory // what the tensors had, on the device of the stream
	s   driver.Stream
	way int // in which the rank has called
	w   *work.Work
}

// memory makes device memory with these bytes, once the stream has come to the copy.
func (x *summer) memory(dev int, b []byte) (_ driver.Memory, err error) {
	defer must.Catch(&err)
	v := must.Get(x.d.Device(dev))
	m := must.Get(v.Alloc(len(b)))
	x.close = append(x.close, m)
	h := must.Get(x.d.AllocHost(len(b)))
	x.close = append(x.close, h)
	driver.HostAccess(x.d, "filling", driver.Writes(h.Ptr(), len(b)))
	copy(h.Bytes(), b)
	s := x.streams[dev]
	return m, cmp.Or(s.Memset(m.Ptr(), poison, len(b)), x.hold(dev), s.Copy(m.Ptr(), h.Ptr(), len(b)))
}

func (x *summer) hold(dev int) error {
	if x.delays == nil {
		return nil
	}
	return x.delays[dev].hold(x.streams[dev], uint64(x.own.IntN(1_000_000)))
}

// onDevice returns a copy of a sparse tensor on a device. With on its memory knows the stream.
func (x *summer) onDevice(c *summing, t *tensor.Tensor, dev int, on bool) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	var parts [2]*tensor.Tensor
	for i, u := range []*tensor.Tensor{t.Indices(), t.Values()} {
		m := must.Get(x.memory(dev, u.Bytes()))
		c.old = append(c.old, m)
		if on {
			m = cuda.OnStream(m, x.streams[dev])
		}
		parts[i] = must.Get(tensor.OnDevice(u.DType(), m, u.Shape()...))
	}
	y, err := tensor.Sparse(parts[0], parts[1], t.Shape()...)
	if err == nil && t.IsCoalesced() {
		err = y.SetSparse(parts[0], parts[1], true)
	}
	return y, err
}

// prepare makes a rank's tensors for an all-reduce.
func (x *summer) prepare(p *sparsePlan) (_ *summing, err error) {
	defer must.Catch(&err)
	c := &summing{sparsePlan: p, way: x.own.IntN(modes)}
	dev := x.rank + x.own.IntN(8)/7
	if x.way != nil {
		c.way, dev = *x.way, x.rank
	}
	if len(x.streams) > 0 {
		dev %= len(x.streams)
		c.s = x.streams[dev]
	}
	own := must.Get(p.input(x.rank))
	for _, t := range own {
		if c.s == nil || x.onCPU > 0 && x.own.IntN(x.onCPU) == 0 {
			c.ts = append(c.ts, t)
			continue
		}
		y := must.Get(x.onDevice(c, t, dev, c.way == byMemory))
		c.ts = append(c.ts, y)
	}
	return c, nil
}

// start issues an all-reduce, in one of the ways of calling.
func (x *summer) start(c *summing) (err error) {
	ctx := x.ctx
	switch {
	case c.s == nil:
	case c.way == beside:
		ctx = cuda.WithStreams(ctx, c.s)
	case c.way == inside:
		ctx = cuda.InStream(ctx, c.s)
	case c.way == alone:
		if err := x.drained(c.s); err != nil {
			return err
		}
	}
	if c.w, err = x.b.AllReduce(ctx, c.ts, backend.AllReduceOptions{Op: c.op}); err == nil && c.way == inside {
		err = c.overwrite() // what the stream does later comes later
	}
	return err
}

func (x *summer) drained(s driver.Stream) (err error) {
	defer must.Catch(&err)
	e := must.Get(s.Record())
	defer e.Release()
	return e.Sync(x.ctx)
}

// overwrite has the caller's stream use the memory that the tensors had.
func (c *summing) overwrite() error {
	for _, m := range c.old {
		if err := c.s.Memset(m.Ptr(), 0xee, m.Len()); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for an all-reduce.
func (x *summer) wait(c *summing) (err error) {
	if c.s != nil && (c.way == byMemory || c.way == beside) {
		err = c.w.Synchronize(c.s)
	} else {
		err = c.w.Wait(x.ctx)
	}
	if err == nil && c.way != inside {
		err = c.overwrite()
	}
	return err
}

// check compares the outcome, and gives its memory back.
func (x *summer) check(c *summing) error {
	want, err := c.want(x.size)
	if err != nil {
		return err
	}
	for i, t := range c.ts {
		if !t.IsCoalesced() || t.NNZ() != want.NNZ() {
			return fmt.Errorf("tensor %d has %d entries, coalesced %v, want %d", i, t.NNZ(), t.IsCoalesced(), want.NNZ())
		}
		at, err := x.bytes(t.Indices(), c.s)
		if err == nil {
			err = same(at, want.Indices().Bytes())
		}
		if err != nil {
			return fmt.Errorf("coordinates of tensor %d: %w", i, err)
		}
		values, err := x.bytes(t.Values(), c.s)
		if err == nil {
			err = same(values, want.Values().Bytes())
		}
		if err != nil {
			return fmt.Errorf("values of tensor %d: %w", i, err)
		}
	}
	return nil
}

// bytes returns the bytes of part of an outcome, and closes its memory, which others may have next.
func (x *summer) bytes(t *tensor.Tensor, s driver.Stream) (_ []byte, err error) {
	defer must.Catch(&err)
	if t.Device().Type == tensor.CPU {
		return t.Bytes(), nil
	}
	m := t.Memory().(driver.Memory)
	h := must.Get(x.d.AllocHost(m.Len()))
	x.close = append(x.close, h)
	must.Do(cmp.Or(s.Copy(h.Ptr(), m.Ptr(), m.Len()), x.drained(s)))
	driver.HostAccess(x.d, "comparing", driver.Reads(h.Ptr(), h.Len()))
	return slices.Clone(h.Bytes()[:m.Len()]), errors.Join(m.Close(), m.Close())
}

// run does all-reduces of which several are on their way, with dense ones among them. While they are, the caller makes
// no memory and frees none: a real driver may wait for the device.
func (x *summer) run(plans []*sparsePlan) (err error) {
	all := make([]*summing, len(plans))
	dense := make([]*tensor.Tensor, len(plans))
	for i, p := range plans {
		if all[i], err = x.prepare(p); err == nil {
			dense[i], err = x.dense(1 + p.most)
		}
		if err != nil {
			return fmt.Errorf("%v: %w", p, err)
		}
	}
	for i, c := range all {
		if err := x.start(c); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if i%2 == 0 {
			continue
		}
		ctx := x.ctx
		if x.streams != nil {
			ctx = cuda.InStream(ctx, x.streams[x.rank%len(x.streams)])
		}
		if _, err := x.b.AllReduce(ctx, dense[i:i+1], backend.AllReduceOptions{}); err != nil {
			return err
		}
	}
	for _, c := range all {
		if err := x.wait(c); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
	}
	w, err := x.b.Barrier(x.ctx, backend.BarrierOptions{})
	if err == nil {
		err = w.Wait(x.ctx)
	}
	for _, s := range x.streams {
		err = errors.Join(err, x.drained(s))
	}
	for _, c := range all {
		if err == nil {
			if err = x.check(c); err != nil {
				err = fmt.Errorf("%v: %w", c, err)
			}
		}
	}
	for _, c := range slices.Backward(x.close) {
		err = errors.Join(err, c.Close())
	}
	x.close = nil
	return err
}

// dense returns n numbers on the rank's device.
func (x *summer) dense(n int) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	t, err := tensor.New(tensor.Float32, n)
	if err != nil || x.streams == nil {
		return t, err
	}
	return tensor.OnDevice(tensor.Float32, must.Get(x.memory(x.rank%len(x.streams), t.Bytes())), n)
}

func (x *rank) summer(r int, seed uint64) *summer {
	return &summer{ctx: x.ctx, d: x.d, b: x.b, streams: x.stream, rank: r, size: len(x.w.ranks), own: rand.New(rand.NewPCG(seed, uint64(r)))}
}

// sparseWorlds are the groups of so many ranks in which sparse tensors are all-reduced.
func sparseWorlds(size int) map[string]setup {
	host := setup{size: size, sim: sim.Config{Devices: 2}}
	native := setup{size: size, sim: sim.Config{Devices: size}, native: true}
	worlds := map[string]setup{"host": host, "kernels": directly(size), "shared memory": native}
	if size > 1 {
		sizes := []int{1 + (size-1)/2, size / 2}
		worlds["clusters"] = clustered(sizes...)
		cliques := directly(size)
		cliques.sim.Topology.NoPeer = func(a, b int) bool { return a/2 != b/2 }
		worlds["cliques"] = cliques
		some := withoutDevices(directly(size), 0)
		worlds["a rank without a device"] = some
		apart := native
		apart.vary = func(o *cuda.Options, r int) {
			o.CPUOptions = gloo.Options{Sums: gloo.SumsInRankOrder, Cluster: fmt.Sprint(r % 2)}
		}
		worlds["native clusters"] = apart
	}
	return worlds
}

// TestF18Sparse all-reduces random sparse tensors on every kind of group, several at a time. The outcome is that of
// tensor.SumSparse (F-18).
func TestF18Sparse(t *testing.T) {
	inRealTime(t, 4, func(t *testing.T, seed uint64, semantics sim.Semantics) {
		for name, s := range sparseWorlds(1 + int(seed%4)) {
			t.Run(name, func(t *testing.T) {
				g := random(t, seed)
				s.sim.Seed, s.sim.Semantics, s.options.Chunk = seed, semantics, 100+g.IntN(5000)
				w := newWorld(t, s)
				for range 4 {
					var plans []*sparsePlan
					for range 1 + g.IntN(4) {
						plans = append(plans, drawSparse(g, 4))
					}
					own := g.Uint64()
					w.each(func(x *rank, r int) error {
						y := x.summer(r, own)
						y.onCPU = int(seed % 3)
						if name == "a rank without a device" && r == 0 {
							y.streams = nil
						}
						return y.run(plans)
					})
				}
				w.end()
			})
		}
	})
}

// TestSparseMutations leaves out each record, wait and word of a sparse all-reduce; somebody has to notice every one.
func TestSparseMutations(t *testing.T) {
	p := &sparsePlan{d: tensor.Int32, op: backend.Sum(), dims: 1, shape: []int{30, 2}, list: 1, most: 60}
	for r := 0; r < 2; r++ {
		ts := must.Get(p.input(r))
		if ts[0].NNZ() == 0 { // nothing is to be ordered
			p.seed++
			r = -1
		}
	}
	for _, way := range []int{beside, inside} {
		s := setup{size: 2, sim: sim.Config{Devices: 2}, options: cuda.Options{Chunk: 100}}
		tried := leaveOut(t, s, without, func(m sim.Call) bool {
			// All but the first record of a caller's stream with tensors are the test's own. Those at the end of the copies
			// to the host are for callers' streams: the host waits for a word.
			caller := strings.HasSuffix(m.Stream, "caller 0.0") || strings.HasSuffix(m.Stream, "caller 1.1")
			unused := m.Name == "Record" && (!caller || m.K > 0) && (way != inside || !strings.Contains(m.Stream, "down"))
			return slices.Contains([]string{"Record", "Wait", "WaitValue", "WriteValue"}, m.Name) && !unused
		}, func(w *world) error {
			return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
				y := x.summer(r, 1)
				y.way = &way
				return y.run([]*sparsePlan{p})
			})...)
		})
		for _, name := range []string{"Record", "Wait", "WriteValue"} {
			require.NotZero(t, tried[name], "way %d", way)
		}
	}
}

// sparseOf returns a sparse tensor with an entry at each of the coordinates in the first dimension, on the rank's device
// or in CPU memory.
func (x *rank) sparseOf(d tensor.DType, device bool, at []int64, shape ...int) (_ *tensor.Tensor, err error) {
	defer must.Catch(&err)
	indices := must.Get(tensor.Of(at, 1, len(at)))
	values := must.Get(tensor.New(d, append([]int{len(at)}, shape[1:]...)...))
	if device {
		dev := x.b.Rank() % x.d.Count()
		var parts [2]*tensor.Tensor
		for i, u := range []*tensor.Tensor{indices, values} {
			y := must.Get(x.vector(u.DType(), dev, u.Bytes()))
			parts[i] = must.Get(y.t.Reshape(u.Shape()...))
		}
		indices, values = parts[0], parts[1]
	}
	return tensor.Sparse(indices, values, shape...)
}

// summed waits for an all-reduce of a sparse tensor, and gives the outcome's memory back.
func (x *rank) summed(t *tensor.Tensor, o backend.AllReduceOptions) error {
	w, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{t}, o)
	if err == nil {
		err = w.Wait(x.ctx)
	}
	if err != nil || t.Device().Type == tensor.CPU {
		return err
	}
	return errors.Join(t.Indices().Memory().(driver.Memory).Close(), t.Values().Memory().(driver.Memory).Close())
}

// TestSparseRefused: wrong calls are refused at once, use no number, and the group goes on.
func TestSparseRefused(t *testing.T) {
	for name, s := range map[string]setup{"Gloo's wire": directly(2), "native": {size: 2, sim: sim.Config{Devices: 2}, native: true}} {
		w := newWorld(t, withoutDevices(s, 1))
		w.each(func(x *rank, r int) error {
			of := func(d tensor.DType, at []int64, shape ...int) *tensor.Tensor {
				return must.Get(x.sparseOf(d, r == 0, at, shape...))
			}
			f, i := of(tensor.Float32, []int64{3, 1}, 4), of(tensor.Int32, []int64{3, 1}, 4)
			dense := must.Get(tensor.New(tensor.Float32, 4))
			far := must.Get(tensor.OnDevice(tensor.Int64, elsewhere{7}, 1, 2))
			farValues := must.Get(tensor.OnDevice(tensor.Float32, elsewhere{7}, 2, 2))
			away, err := tensor.Sparse(far, farValues, 4, 2)
			require.NoError(t, err)
			type refused struct {
				what string
				op   backend.ReduceOp
				why  string
				ts   []*tensor.Tensor
			}
			calls := []refused{
				{"operator", backend.Max(), "only works with ReduceOp.SUM", []*tensor.Tensor{f}},
				{"integer mean", backend.Avg(), "avg", []*tensor.Tensor{i}},
				{"dtypes", backend.Sum(), "invalid tensor type at index 1", []*tensor.Tensor{f, i}},
				{"layouts", backend.Sum(), "invalid tensor layout at index 1", []*tensor.Tensor{f, dense}},
				{"device", backend.Sum(), "of tensor 0", []*tensor.Tensor{away}},
			}
			if name != "native" {
				calls = append(calls, refused{"factor", backend.PreMulSum(2), "on the native wire", []*tensor.Tensor{f}})
			}
			for _, c := range calls {
				_, err := x.b.AllReduce(x.ctx, c.ts, backend.AllReduceOptions{Op: c.op})
				require.ErrorIs(t, err, backend.ErrInvalidArgument, c.what)
				require.ErrorContains(t, err, c.why, c.what)
				require.ErrorContains(t, err, "cuda: ", c.what)
			}
			if r == 0 {
				ctx := cuda.InStream(x.ctx, x.stream[0])
				_, err := driver.Capture(x.stream[0], func() error {
					return must.Err(x.b.AllReduce(ctx, []*tensor.Tensor{f}, backend.AllReduceOptions{}))
				})
				require.ErrorIs(t, err, driver.ErrCapture)
				require.ErrorContains(t, err, "how many entries")
			}
			require.Zero(t, x.b.Seq())
			return x.summed(f, backend.AllReduceOptions{})
		})
		w.end()
	}
}

// TestSparseMismatch lets rank 1 of 3 make another call than the others. All ranks hear of both calls.
func TestSparseMismatch(t *testing.T) {
	type call struct {
		text string
		do   func(x *rank, device bool) error
	}
	sum := func(text string, op backend.ReduceOp, d tensor.DType, shape ...int) call {
		return call{text, func(x *rank, device bool) error {
			u, err := x.sparseOf(d, device, []int64{2, 1, 2}, shape...)
			if err == nil {
				err = x.summed(u, backend.AllReduceOptions{Op: op})
			}
			return err
		}}
	}
	usual := sum("all_reduce (sum) of a sparse tensor of 12 elements of float32", backend.Sum(), tensor.Float32, 4, 3)
	for _, c := range []struct {
		name       string
		usual, odd call
	}{
		{"dense", usual, call{"all_reduce (sum) of 12 elements of float32", func(x *rank, _ bool) error {
			y, err := x.vector(tensor.Float32, x.b.Rank(), make([]byte, 48))
			if err != nil {
				return err
			}
			return must.Err(x.run(y.t))
		}}},
		{"dtype", usual, sum("all_reduce (sum) of a sparse tensor of 12 elements of int32", backend.Sum(), tensor.Int32, 4, 3)},
		{"operator", usual, sum("all_reduce (avg) of a sparse tensor of 12 elements of float32", backend.Avg(), tensor.Float32, 4, 3)},
		{"elements", usual, sum("all_reduce (sum) of a sparse tensor of 20 elements of float32", backend.Sum(), tensor.Float32, 5, 4)},
		{"shape", sum("[4 ", backend.Sum(), tensor.Float32, 4, 3), sum("[6 ", backend.Sum(), tensor.Float32, 6, 2)},
	} {
		for name, s := range map[string]setup{"kernels": directly(3), "native": {size: 3, sim: sim.Config{Devices: 3}, native: true}} {
			for _, device := range []bool{true, false} {
				run := func(t *testing.T) {
					s := s
					s.timeout, s.sim.Quiet = patience, true
					w := newWorld(t, s)
					for r, err := range runEach(w, func(x *rank, r int, _ chan struct{}) error {
						if r == 1 {
							return c.odd.do(x, true)
						}
						return c.usual.do(x, device || r == 0)
					}) {
						require.ErrorIs(t, err, work.ErrMismatch, "rank %d", r)
						require.ErrorContains(t, err, c.usual.text, "rank %d", r)
						require.ErrorContains(t, err, c.odd.text, "rank %d", r)
						named(t, err, r, 0)
					}
					w.drop(t)
				}
				if !s.native {
					run = virtually(run)
				}
				t.Run(fmt.Sprintf("%s/%s/all on devices %v", c.name, name, device), run)
			}
		}
	}
}

// TestSparseOutside: coordinates that are outside of the shape are an error of the operation, on all ranks.
func TestSparseOutside(t *testing.T) {
	s := directly(2)
	s.timeout, s.sim.Quiet = patience, true
	w := newWorld(t, s)
	for r, err := range runEach(w, func(x *rank, r int, _ chan struct{}) error {
		y := must.Get(x.sparseOf(tensor.Float32, true, []int64{0, int64(3 + r)}, 4))
		return x.summed(y, backend.AllReduceOptions{})
	}) {
		named(t, err, r, 0)
		require.ErrorContains(t, err, "index 4 of entry 1 is outside dimension 0 of size 4")
	}
	w.drop(t)
}

// TestSparseFailedCalls lets each call to the driver that a sparse all-reduce makes fail in turn: every rank gets an
// error or a result, nothing is left, and no stream waits for ever.
func TestSparseFailedCalls(t *testing.T) {
	for name, s := range map[string]setup{"host": {size: 2, sim: sim.Config{Devices: 2}}, "direct": directly(2)} {
		t.Run(name, func(t *testing.T) { failSparseCalls(t, s) })
	}
}

func failSparseCalls(t *testing.T, s setup) {
	s.timeout, s.options.Chunk, s.sim.Quiet = patience, 100, true
	ts := make([]*tensor.Tensor, s.size)
	fresh := func(t *testing.T, k int) *world {
		s.sim.Seed, s.sim.Semantics = uint64(k), sim.Semantics(k%2)
		w := newWorld(t, s)
		w.each(func(x *rank, r int) error {
			if s.sim.Kernels != nil {
				must.Do(x.meetDirectly(r))
			}
			ts[r] = must.Get(x.sparseOf(tensor.Float64, true, []int64{5, 3, 30, 3}, 40, 9))
			return nil
		})
		return w
	}
	failInTurn(t, 1, 21, "all_reduce", fresh, nil, func(x *rank, r int) error {
		err := x.ended(x.b.AllReduce(x.ctx, ts[r:r+1], backend.AllReduceOptions{}))
		if err == nil || ts[r].IsCoalesced() { // or the error came after the sum
			require.Equal(t, 3, ts[r].NNZ())
			require.NoError(t, errors.Join(ts[r].Indices().Memory().(driver.Memory).Close(), ts[r].Values().Memory().(driver.Memory).Close()))
		}
		return err
	}, func(w *world, failed sim.Call, errs []error) {
		require.ErrorIs(t, errors.Join(errs...), errInjected, "%v", failed)
		w.drop(t)
	})
}

// TestSparseExplained: Explain names the work, also where all dense all-reduces have to go another way.
func TestSparseExplained(t *testing.T) {
	s := directly(2)
	s.options.AllReduce = cuda.DirectWork
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error {
		all := x.b.Explain().Choices
		c := all[slices.IndexFunc(all, func(c backend.Choice) bool { return c.Op == "all_reduce, sparse" })]
		require.Equal(t, cuda.SparseWork, c.Algorithm)
		require.Contains(t, c.Why, "page-locked memory")
		require.Contains(t, c.Why, "not "+cuda.SparseDirectWork+": whether the devices reach each other")
		require.NotContains(t, c.Why, "Options.AllReduce")
		y := must.Get(x.sparseOf(tensor.Float32, true, []int64{0, 3}, 4))
		must.Do(x.summed(y, backend.AllReduceOptions{}))
		all = x.b.Explain().Choices
		c = all[slices.IndexFunc(all, func(c backend.Choice) bool { return c.Op == "all_reduce, sparse" })]
		require.Equal(t, cuda.SparseDirectWork, c.Algorithm)
		require.Contains(t, c.Why, "each device adds its entries")
		return nil
	})
	w.end()
}

// TestSparseDirect all-reduces random sparse tensors from device to device: with and without dense calls and messages
// among them, of all lengths, so that the memory that others read has to grow. Some tensors are in CPU memory, or on
// another device.
func TestSparseDirect(t *testing.T) {
	eachSeed(t, 2, func(t *testing.T, seed uint64, semantics sim.Semantics) {
		size := 2 + int(seed%3)
		s := directly(size)
		s.sim.Seed, s.sim.Semantics = seed, semantics
		w := newWorld(t, s)
		w.each((*rank).meetDirectly) // on the devices of the same number
		g := random(t, seed)
		for round := range 3 {
			var plans []*sparsePlan
			for range 3 {
				p := drawSparse(g, 1+8*round)
				p.op = backend.Sum()
				plans = append(plans, p)
			}
			if round > 0 { // some MiB of each rank
				plans = append(plans, &sparsePlan{
					d: tensor.Float64, op: backend.Sum(), dims: 2, shape: []int{200, 100, 40 * round}, list: 1, most: 8000, seed: g.Uint64(),
				})
			}
			own := g.Uint64()
			w.each(func(x *rank, r int) error {
				y := x.summer(r, own)
				y.onCPU = round * 2
				return y.run(plans)
			})
		}
		for _, x := range w.ranks {
			c := x.b.Explain().Choices
			require.True(t, slices.ContainsFunc(c, func(c backend.Choice) bool { return c.Algorithm == cuda.SparseDirectWork }), "%v", c)
		}
		w.end()
	})
}

// TestSparseMemory: memory that is given back is used again, so that later calls make none. An outcome can be summed
// again, and closed after the group.
func TestSparseMemory(t *testing.T) { onVirtualTime(t, testSparseMemory) }

func testSparseMemory(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 2, NoDelays: true}, options: cuda.Options{Chunk: 100}})
	first := make([]*tensor.Tensor, 2)
	w.each(func(x *rank, r int) (err error) {
		first[r], err = x.sparseOf(tensor.Float32, true, []int64{int64(r), 3}, 4, 500)
		return err
	})
	last := make([]*tensor.Tensor, 2)
	var before sim.Stats
	for round := range 2 {
		w.each(func(x *rank, r int) error {
			for range 10 {
				u := must.Get(tensor.Sparse(first[r].Indices(), first[r].Values(), 4, 500))
				must.Get(x.run(u))
				old := []*tensor.Tensor{u.Indices(), u.Values()}
				must.Get(x.run(u))
				require.Equal(t, 3, u.NNZ())
				if last[r] != nil {
					old = append(old, last[r].Indices(), last[r].Values())
				}
				for _, part := range old {
					must.Do(part.Memory().(driver.Memory).Close())
				}
				last[r] = u
			}
			return nil
		})
		s := w.m.Stats()
		if round == 1 {
			require.Equal(t, before.MadeMemories, s.MadeMemories)
			require.Equal(t, before.MadeHosts, s.MadeHosts)
			require.Equal(t, before.MadeStreams, s.MadeStreams)
		}
		before = s
	}
	w.each(func(x *rank, r int) error {
		must.Do(errors.Join(x.b.Close(), x.cpu.Close()))
		return errors.Join(last[r].Indices().Memory().(driver.Memory).Close(), last[r].Values().Memory().(driver.Memory).Close())
	})
	for _, x := range w.ranks {
		x.free()
	}
	require.NoError(t, w.m.Close())
}

// TestSparseKeeps: a group keeps no more memory of outcomes than Options.Scratch says, once they were given back.
func TestSparseKeeps(t *testing.T) {
	w := newWorld(t, setup{size: 1, sim: sim.Config{Devices: 1}, options: cuda.Options{Scratch: 8 << 10}})
	bytes := func(n int) int64 {
		at := make([]int64, n)
		for i := range at {
			at[i] = int64(i)
		}
		w.each(func(x *rank, r int) error {
			n := len(x.close)
			y, err := x.sparseOf(tensor.Float32, true, at, 1<<16)
			if err == nil {
				err = x.summed(y, backend.AllReduceOptions{})
			}
			for _, c := range x.close[n:] {
				err = errors.Join(err, c.Close())
			}
			x.close = x.close[:n]
			return err
		})
		return w.m.Stats().DeviceBytes
	}
	require.GreaterOrEqual(t, bytes(1<<15), int64((8+4)<<15))
	bytes(1)
	require.LessOrEqual(t, bytes(1), int64(8<<10))
	w.end()
}

// TestSparseMany all-reduces more tensors at a time than a stream gets copies for at once.
func TestSparseMany(t *testing.T) { onVirtualTime(t, testSparseMany) }

func testSparseMany(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 2}, options: cuda.Options{Chunk: 1000}})
	p := &sparsePlan{d: tensor.Int64, op: backend.Sum(), dims: 1, shape: []int{9}, list: 130, most: 10, seed: 4}
	w.each(func(x *rank, r int) error { return x.summer(r, 2).run([]*sparsePlan{p}) })
	w.end()
}

// sparseApart is the name of random sparse all-reduces of ranks in processes of their own.
const sparseApart = "sparse"

// sum all-reduces random sparse tensors.
func (a *apart) sum(t *testing.T) {
	seed := must.Get(strconv.ParseUint(os.Getenv(envSeed), 10, 64))
	calls, times := 2000, 200
	if a.simulated {
		calls, times = 60, 4
	}
	ctx, cancel := context.WithTimeout(t.Context(), operationsLimit(calls))
	defer cancel()
	m := must.Get(newOperator(ctx, a, 1<<20))
	x := &summer{ctx: ctx, d: a.d, b: m.b, rank: a.rank, size: a.size, own: rand.New(rand.NewPCG(seed, 2+uint64(a.rank))), onCPU: 8}
	for i := range a.d.Count() {
		v := must.Get(a.d.Device(i))
		s := must.Get(v.NewStream(driver.StreamOptions{Name: fmt.Sprintf("caller %d.%d", a.rank, i)}))
		d := must.Get(newDelay(a.d, v))
		x.streams, x.delays = append(x.streams, s), append(x.delays, d)
	}
	plan := rand.New(rand.NewPCG(seed, 1))
	for done := 0; done < calls; {
		var list []*sparsePlan
		for range 1 + plan.IntN(4) {
			list, done = append(list, drawSparse(plan, times)), done+1
		}
		require.NoError(t, x.run(list), "call %d and those before it, rank %d, -operation-seed %d", done, a.rank, seed)
	}
	require.NoError(t, m.b.Close())
	for i, s := range x.streams {
		require.NoError(t, errors.Join(s.Close(), x.delays[i].Close()))
	}
	require.NoError(t, errors.Join(m.s.Close(), m.mem.Close(), m.h.Close(), m.delay.Close()))
}

// TestGPUSparse compares 2000 random sparse all-reduces on GPUs with tensor.SumSparse.
func TestGPUSparse(t *testing.T) {
	d := openGPU(t)
	sizes := groupSizes(d)
	require.NoError(t, d.Close())
	sumApart(t, sizes, noDir)
}

// TestSimulatedSparse is TestGPUSparse on simulated devices, with fewer and smaller ones.
func TestSimulatedSparse(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("simulated devices of several processes are not promised here")
	}
	sumApart(t, []int{2, 3}, t.TempDir)
}

func sumApart(t *testing.T, sizes []int, dir func() string) {
	for _, n := range sizes {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			seed := *operationSeed
			if seed == 0 {
				seed = uint64(time.Now().UnixNano())
			}
			t.Logf("repeat with -operation-seed %d", seed)
			t.Setenv(envSeed, strconv.FormatUint(seed, 10))
			runApart(t, sparseApart, n, dir())
		})
	}
}
