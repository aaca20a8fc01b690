package clusterway

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// walk is the host's way through a plan. Ranks of clusters without kernels run the steps inside there too. Of others the
// host has the steps between clusters only, and the devices' streams have the rest.
type walk struct {
	*job
	onDevice bool
	bufs     [3][]byte // on the host
	begun    []bool    // by chunk: its memory may be used

	// Begin, if not nil, waits until a chunk's memory may be used, at the chunk's first step for the host. End, if not
	// nil, is told when the host does not use it any more.
	begin func(step, chunk int) error
	end   func(chunk int)

	awake chan struct{} // the network has ended a chunk
}

// serve runs the plan. Memory returns that of a step between clusters. When it returns nobody uses the memory.
func (w *walk) serve(o *group.Operation, memory func(i int) []byte, ended func(chunk int), blame func(err error) error) error {
	w.begun = make([]bool, w.plan.Chunks)
	err := w.job.begin(o, memory, ended)
	if err == nil {
		err = w.steps(o)
	}
	return w.job.end(blame(err))
}

// onHost is serve for a plan whose buffers are in CPU memory.
func (w *walk) onHost(o *group.Operation) error {
	w.bufs[plan.Scratch] = make([]byte, w.plan.Scratch)
	w.awake = make(chan struct{}, 1)
	memory := func(i int) []byte {
		s := &w.plan.Steps[i]
		return w.bufs[s.Dst][s.Parts[0].Dst:][:s.Parts[0].Len]
	}
	ended := func(int) {
		select {
		case w.awake <- struct{}{}:
		default:
		}
	}
	return w.serve(o, memory, ended, func(err error) error { return err })
}

func (w *walk) steps(o *group.Operation) error {
	last := make([]int, w.plan.Chunks) // the last step of a chunk for the host
	for i := range w.plan.Steps {
		if s := &w.plan.Steps[i]; !w.onDevice || s.Stage == cluster.Between && !s.Finish {
			last[s.Chunk] = i
		}
	}
	for i := range w.plan.Steps {
		s := &w.plan.Steps[i]
		if w.onDevice && (s.Stage != cluster.Between || i != last[s.Chunk]) {
			continue // the devices do it, or the host with the chunk's last step
		}
		if w.begin != nil && !w.begun[s.Chunk] {
			if err := w.begin(i, s.Chunk); err == errNetwork {
				return err
			} else if err != nil {
				return w.at(w.held(i), err)
			}
		}
		w.begun[s.Chunk] = true
		var err error
		switch {
		case s.Finish:
			err = w.await(s.Chunk)
		case s.Stage == cluster.Between:
			err = w.ready(i)
		default:
			err = w.inside(o, s)
		}
		switch {
		case err == errNetwork:
			return err
		case err != nil:
			return w.at(i, err)
		}
		if w.end != nil && last[s.Chunk] == i {
			w.end(s.Chunk)
		}
	}
	<-w.network.Done()
	if w.network.Err() != nil {
		return errNetwork
	}
	return nil
}

// ready has the network do step i. Where the devices do the others, these are all of its chunk up to i.
func (w *walk) ready(i int) error {
	for k := range i + 1 {
		s := &w.plan.Steps[k]
		if k != i && (!w.onDevice || s.Stage != cluster.Between || s.Finish || s.Chunk != w.plan.Steps[i].Chunk) {
			continue
		}
		if w.network.Ready(k) != nil {
			return errNetwork
		}
	}
	return nil
}

// held returns the step of the devices that step i waits for, i if there is none.
func (w *walk) held(i int) int {
	for k := range i {
		if s := &w.plan.Steps[k]; w.onDevice && s.Stage == cluster.Before && s.Chunk == w.plan.Steps[i].Chunk {
			return k
		}
	}
	return i
}

// await waits for the network's part of a chunk.
func (h *walk) await(chunk int) error {
	for {
		if h.results[chunk].Load() {
			return nil
		}
		select {
		case <-h.awake:
		case <-h.network.Done():
			if h.network.Err() != nil {
				return errNetwork
			}
			if !h.results[chunk].Load() {
				return fmt.Errorf("cuda: the stage between clusters has ended without chunk %d", chunk)
			}
		}
	}
}

// inside runs a step inside the cluster.
func (h *walk) inside(o *group.Operation, s *cluster.Step) error {
	src := func(p *cluster.Part) []byte { return h.bufs[s.Src][p.Src : p.Src+p.Len] }
	dst := func(p *cluster.Part) []byte { return h.bufs[s.Dst][p.Dst : p.Dst+p.Len] }
	if len(s.Ranks) == 1 {
		for i := range s.Parts {
			into(dst(&s.Parts[i]), src(&s.Parts[i]))
		}
		return nil
	}
	g, me := h.g.Inside, h.g.Layout.Place(h.g.B.Rank)
	ctx := context.Background() // the end of the group ends the cluster's
	if s.Op == plan.OpGather {
		return h.g.insideError(h.collect(ctx, o, s, src, dst))
	}
	// Each part is an operation of its own, begun before the first is waited for.
	var all []*work.Work
	var err error
	for i := range s.Parts {
		x := &s.Parts[i]
		var t *tensor.Tensor
		var w *work.Work
		switch s.Op {
		case plan.OpReduceScatter:
			b, d := src(x), h.c.dtype()
			if x.To == me {
				b = into(dst(x), b)
			}
			if t, err = tensor.FromBytes(d, b, len(b)/d.Size()); err == nil {
				w, err = g.Reduce(ctx, t, backend.ReduceOptions{Op: prepared(h.c.Reduce), Root: x.To, Timeout: o.Left()})
			}
		case plan.OpAllGather:
			b := dst(x)
			if x.From == me {
				into(b, src(x))
			}
			if t, err = tensor.Of(b, len(b)); err == nil {
				w, err = g.Broadcast(ctx, []*tensor.Tensor{t}, backend.BroadcastOptions{Root: x.From, Timeout: o.Left()})
			}
		default:
			err = fmt.Errorf("cuda: no way for a %v inside a cluster", s.Op)
		}
		if err != nil {
			return h.g.insideError(err)
		}
		all = append(all, w)
	}
	for _, w := range all {
		err = cmp.Or(err, w.Wait(ctx))
	}
	return h.g.insideError(err)
}

// collect runs a gather inside the cluster.
func (h *walk) collect(ctx context.Context, o *group.Operation, s *cluster.Step, src, dst func(*cluster.Part) []byte) error {
	me := h.g.Layout.Place(h.g.B.Rank)
	var own []byte
	lists := make([][]byte, len(s.Ranks))
	for i := range s.Parts {
		x := &s.Parts[i]
		lists[x.From] = dst(x)
		if x.From == me {
			own = src(x)
		}
	}
	in, err := tensor.Of(own, len(own))
	if err != nil {
		return err
	}
	var out []*tensor.Tensor
	if me == s.Root {
		for _, b := range lists {
			t, err := tensor.Of(b, len(b))
			if err != nil {
				return err
			}
			out = append(out, t)
		}
	}
	w, err := h.g.Inside.GatherV(ctx, out, in, backend.GatherOptions{Root: s.Root, Timeout: o.Left()})
	if err != nil {
		return err
	}
	return w.Wait(ctx)
}

// into copies src to dst, unless it is there: the network may be reading it. It returns dst.
func into(dst, src []byte) []byte {
	if len(dst) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
	return dst
}

// prepared is the operator of operands that Before has been applied to.
func prepared(op backend.ReduceOp) backend.ReduceOp {
	if op.Kind() == backend.PreMulSum(1).Kind() {
		return backend.Sum()
	}
	return inner(op)
}

// insideError gives an error of Inside the ranks of the group.
func (g *Group) insideError(err error) error {
	var of *work.Error
	if !errors.As(err, &of) {
		return err
	}
	at := *of
	if members := g.Layout.Members(g.Layout.Cluster(g.B.Rank)); at.Peer >= 0 && at.Peer < len(members) {
		at.Peer = members[at.Peer]
	}
	return &at
}

// flatJob is an all-reduce, a reduce or a broadcast of device tensors whose elements are in order. Its chunks are
// copied to the host one by one, and back.
type flatJob struct {
	job
	bytes  int // of the buffer
	pinned driver.HostMemory
	chunks []area
}

// area is what a chunk has of the buffer, and its turn of the host.
type area struct{ lo, hi, turn int }

// Stage gets page-locked memory for the whole buffer.
func (p *flatJob) Stage(o *group.Operation) (err error) {
	for i := range o.Legs {
		l := o.Legs[i].Src
		if l.Down, l.Up, err = p.g.B.Streams(l.Dev); err != nil {
			return err
		}
	}
	p.chunks = make([]area, p.plan.Chunks)
	for i := range p.plan.Steps {
		s := &p.plan.Steps[i]
		c := &p.chunks[s.Chunk]
		for j := range s.Parts {
			lo, hi := int(s.Parts[j].Dst), int(s.Parts[j].Dst+s.Parts[j].Len)
			if c.hi == 0 {
				c.lo = lo
			}
			c.lo, c.hi = min(c.lo, lo), max(c.hi, hi)
		}
	}
	p.pinned, err = o.Pin(p.bytes)
	return err
}

// Fill adds the copies.
func (p *flatJob) Fill(o *group.Operation, b *edges.Batch) error {
	root := p.c.Root == p.g.B.Rank
	reads := p.c.Op != plan.OpBroadcast || root
	writes := p.c.Op == plan.OpAllReduce || root == (p.c.Op == plan.OpReduce)
	// each calls f with what a chunk has of each tensor.
	each := func(c *area, f func(at *place.Place, host, own driver.Ptr, n int)) {
		first := 0
		for i := range o.Legs {
			at := o.Legs[i].Src
			lo, hi := max(c.lo, first), min(c.hi, first+at.Hi-at.Lo)
			if lo < hi {
				f(at, p.pinned.Ptr()+driver.Ptr(lo), at.Base+driver.Ptr(at.Lo+lo-first), hi-lo)
			}
			first += at.Hi - at.Lo
		}
	}
	for k := range p.chunks {
		c := &p.chunks[k]
		if c.lo == c.hi {
			continue
		}
		if reads {
			each(c, func(at *place.Place, host, own driver.Ptr, n int) { b.Copy(at.Down, host, own, n) })
		}
		c.turn = b.Host(p.g.B.Turns(), driver.Writes(p.pinned.Ptr()+driver.Ptr(c.lo), c.hi-c.lo))
		if writes {
			each(c, func(at *place.Place, host, own driver.Ptr, n int) { b.Copy(at.Up, own, host, n) })
		}
	}
	return nil
}

// Run does the stages.
func (p *flatJob) Run(o *group.Operation) error {
	buf := p.pinned.Bytes()[:p.bytes]
	h := &walk{job: &p.job, bufs: [3][]byte{plan.Out: buf}}
	h.begin = func(_, k int) error {
		c := &p.chunks[k]
		if err := p.turn(nil, 0, c.turn); err != nil {
			return err
		}
		if p.red.Before != nil {
			p.red.Before(buf[c.lo:c.hi])
		}
		return nil
	}
	h.end = func(k int) {
		c := &p.chunks[k]
		driver.HostAccess(p.g.B.Driver, "the stages on the host", driver.Writes(p.pinned.Ptr()+driver.Ptr(c.lo), c.hi-c.lo))
		o.End(c.turn)
	}
	return h.onHost(o)
}

// Err implements group.Program.
func (p *flatJob) Err() error { return nil }

// newHostJob makes an operation whose tensors are on the host before the first step: all that are not as a
// flatJob needs them. The engine copies device tensors there and back.
func newHostJob(j job, o *group.Operation) {
	c := &j.c
	o.Whole = true
	var devices []*tensor.Tensor
	root := c.Op == plan.OpBroadcast && c.Root == j.g.B.Rank
	for i, list := range [2][]*tensor.Tensor{c.Out, c.In} {
		for k, t := range list {
			if t.Device().Type != tensor.CUDA {
				continue
			}
			devices = append(devices, t)
			switch {
			case i == 1 || root && k == 0:
				o.Legs = append(o.Legs, group.From(t))
			case c.Op == plan.OpAllReduce || c.Op == plan.OpReduce:
				o.Legs = append(o.Legs, group.Both(t))
			default:
				o.Legs = append(o.Legs, group.To(t))
			}
		}
	}
	o.Call = func(q *group.Operation, shadows []*tensor.Tensor) error {
		on := func(list []*tensor.Tensor) []*tensor.Tensor {
			all := make([]*tensor.Tensor, len(list))
			for i, t := range list {
				if all[i] = t; t.Device().Type == tensor.CUDA {
					all[i], shadows = shadows[0], shadows[1:]
				}
			}
			return all
		}
		out := on(c.Out)
		in := on(c.In)
		return j.onHost(q, out, in)
	}
	if len(devices) < len(c.Out)+len(c.In) {
		o.Sync = func(work.Stream) error { return o.Work().Wait(context.Background()) }
	}
}

// onHost runs the plan on tensors in CPU memory.
func (j *job) onHost(o *group.Operation, out, in []*tensor.Tensor) error {
	h := &walk{job: j}
	written := out
	if j.c.Op == plan.OpBroadcast {
		written = out[:1]
	}
	var err error
	reads := j.c.Op == plan.OpAllReduce || j.c.Op == plan.OpReduce || j.c.root(j.g.B.Rank)
	if j.c.Op == plan.OpReduce && len(out) == 0 { // the steps write to the buffer, and the tensor stays as it is
		h.bufs[plan.Out], err = joined(in, true, true)
		in = nil
	} else {
		h.bufs[plan.Out], err = joined(written, reads, false)
	}
	if err != nil {
		return err
	}
	if len(in) > 0 {
		if h.bufs[plan.In], err = joined(in, true, j.red.Before != nil); err != nil {
			return err
		}
	}
	if j.red.Before != nil {
		if len(in) > 0 {
			j.red.Before(h.bufs[plan.In])
		} else {
			j.red.Before(h.bufs[plan.Out])
		}
	}
	if err := h.onHost(o); err != nil {
		return err
	}
	rest := h.bufs[plan.Out]
	for _, t := range written {
		n := t.ByteLen()
		if n > 0 && !(t.IsContiguous() && len(written) == 1) && !j.c.root(j.g.B.Rank) {
			if err := t.Unpack(rest[:n]); err != nil {
				return err
			}
		}
		rest = rest[n:]
	}
	for _, t := range out[len(written):] {
		if err := t.Unpack(h.bufs[plan.Out]); err != nil {
			return err
		}
	}
	return nil
}

// joined returns the elements of tensors, one after the other. It returns a tensor's own memory if that is enough
// and no copy is asked for, else a copy. Read says that the elements are needed.
func joined(ts []*tensor.Tensor, read, clone bool) ([]byte, error) {
	if len(ts) == 1 && ts[0].IsContiguous() && !clone {
		return ts[0].Bytes(), nil
	}
	all := make([]byte, place.Bytes(ts))
	rest := all
	for _, t := range ts {
		if read {
			if err := t.Pack(rest[:t.ByteLen()]); err != nil {
				return nil, err
			}
		}
		rest = rest[t.ByteLen():]
	}
	return all, nil
}
