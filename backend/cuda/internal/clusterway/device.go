package clusterway

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// deviceJob is a collective of a rank whose cluster has kernels.
type deviceJob struct {
	job
	number uint32 // among the operations with kernels
	comm   *direct.Comm
	dev    int

	inside   driver.Stream // of kernels, and of what brings elements in order
	down, up driver.Stream // of copies to the host, and from there

	bufs   [3]driver.Ptr // of the plan
	chunks []chunk       // by number
	slots  int           // bytes of pinned that are slots
	pinned driver.HostMemory
	temp   driver.Ptr // of steps whose parts differ in length

	// Tensors whose elements are elsewhere than in a buffer. They are moved there before the first step,
	// or back after the last one.
	bring, back []move
}

// chunk is what a chunk of the plan has between clusters.
type chunk struct {
	steps    []int // of the plan
	runs     []run // what they use of the buffers
	slot     int   // where that is in the page-locked memory
	bytes    int
	turn     int
	down, up bool // the steps read it, and write it
}

// run is a range of a buffer, in a chunk's slot from at on.
type run struct {
	buf     plan.Buffer
	off, at int
	n       int
}

// move is a tensor whose elements belong to a place in a buffer.
type move struct {
	t   *tensor.Tensor
	at  driver.Ptr
	own driver.Ptr // where its elements are in order on its own device, if that is another one
}

func newDeviceJob(j job, o *group.Operation) {
	o.Program = &deviceJob{job: j}
	o.Legs = append(group.Legs(group.Both, j.c.Out...), group.Legs(group.Both, j.c.In...)...)
}

// Stage finds a place for everything.
func (p *deviceJob) Stage(o *group.Operation) (err error) {
	g := p.g
	p.o = o
	p.number = g.kernels.Next()
	p.comm, p.dev, p.inside = g.kernels.Kernels()
	if p.down, p.up, err = g.B.Streams(p.dev); err != nil {
		return err
	}
	if err = p.place(); err != nil {
		return err
	}
	p.cut()
	if err = p.temporary(); err != nil {
		return err
	}
	if p.pinned, err = o.Pin(p.slots); err != nil {
		return err
	}
	for i := range o.Legs {
		if err = p.streams(&o.Legs[i]); err != nil {
			return err
		}
	}
	return nil
}

// streams gives the place of a leg the streams that use it.
func (p *deviceJob) streams(l *group.Leg) (err error) {
	at := l.Src
	if at.Dev == p.dev {
		at.Down, at.Up = p.inside, p.up
		return nil
	}
	at.Down, at.Up, err = p.g.B.Streams(at.Dev)
	return err
}

// place finds memory for the plan's buffers: the tensors' own, if their elements are there in order.
func (p *deviceJob) place() (err error) {
	c := &p.c
	written := c.Out
	if c.Op == plan.OpBroadcast {
		written = c.Out[:1]
	}
	at, n, own := place.InOrder(written, p.dev)
	if p.bufs[plan.Out] = at; !own && n > 0 {
		if p.bufs[plan.Out], err = p.o.Scratch(p.dev, n); err != nil {
			return err
		}
	}
	out := p.bufs[plan.Out]
	switch {
	case c.Op == plan.OpReduce && c.Root != p.g.B.Rank:
		// The others' steps write to the buffer, and their tensors stay as they are.
		if p.bufs[plan.Out], err = p.o.Scratch(p.dev, place.Bytes(c.In)); err == nil {
			p.bring = moves(c.In, p.bufs[plan.Out])
		}
		return p.elsewhere(err)
	case (c.Op == plan.OpAllReduce || c.Op == plan.OpReduce) && !own:
		p.bring, p.back = moves(c.Out, out), moves(c.Out, out)
	case c.Op == plan.OpBroadcast:
		if !own && c.Root == p.g.B.Rank {
			p.bring = moves(written, out)
		}
		for i, t := range c.Out {
			if i > 0 || !own && c.Root != p.g.B.Rank {
				p.back = append(p.back, move{t: t, at: out})
			}
		}
	case !own:
		p.back = moves(c.Out, out)
	}
	if len(c.In) > 0 {
		in, m, there := place.InOrder(c.In, p.dev)
		if there && in < at+driver.Ptr(n) && at < in+driver.Ptr(m) && own {
			// The plan allows one to be this rank's part of the other one.
			if n > m {
				there = in == at+driver.Ptr(c.start(p.g.B.Rank, m))
			} else {
				there = at == in+driver.Ptr(c.start(p.g.B.Rank, n))
			}
		}
		if p.bufs[plan.In] = in; !there {
			if p.bufs[plan.In], err = p.o.Scratch(p.dev, m); err != nil {
				return err
			}
			p.bring = append(p.bring, moves(c.In, p.bufs[plan.In])...)
		}
	}
	if p.plan.Scratch > 0 {
		p.bufs[plan.Scratch], err = p.o.Scratch(p.dev, int(p.plan.Scratch))
	}
	return p.elsewhere(err)
}

// elsewhere gets memory for the elements in order of tensors on other devices.
func (p *deviceJob) elsewhere(err error) error {
	for _, list := range [2][]move{p.bring, p.back} {
		for i := range list {
			if m := &list[i]; err == nil && m.t.Device().Index != p.dev && !m.t.IsContiguous() {
				m.own, err = p.o.Scratch(m.t.Device().Index, m.t.ByteLen())
			}
		}
	}
	return err
}

// moves returns where tensors have their elements in a buffer, one tensor after the other.
func moves(ts []*tensor.Tensor, at driver.Ptr) (all []move) {
	for _, t := range ts {
		if t.ByteLen() > 0 {
			all = append(all, move{t: t, at: at})
			at += driver.Ptr(t.ByteLen())
		}
	}
	return all
}

// cut finds out what the chunks have between clusters, and gives each a slot from its first step to its
// last one.
func (p *deviceJob) cut() {
	p.chunks = make([]chunk, p.plan.Chunks)
	for i := range p.plan.Steps {
		s := &p.plan.Steps[i]
		if s.Stage != cluster.Between || s.Finish {
			continue
		}
		c := &p.chunks[s.Chunk]
		c.steps = append(c.steps, i)
		c.down, c.up = c.down || p.read(s), c.up || p.written(s)
		off, n := int(s.Parts[0].Dst), int(s.Parts[0].Len)
		if k := len(c.runs) - 1; k >= 0 && c.runs[k].buf == s.Dst && c.runs[k].off+c.runs[k].n == off {
			c.runs[k].n += n
		} else {
			c.runs = append(c.runs, run{buf: s.Dst, off: off, at: c.bytes, n: n})
		}
		c.bytes += n
	}
	type slot struct {
		at, n int
		used  bool
	}
	var slots []slot
	take := func(n int) int {
		for i := range slots {
			if x := &slots[i]; !x.used && x.n >= n {
				x.used = true
				return x.at
			}
		}
		slots = append(slots, slot{p.slots, group.Align(n), true})
		p.slots += group.Align(n)
		return slots[len(slots)-1].at
	}
	for i := range p.plan.Steps {
		s := &p.plan.Steps[i]
		c := &p.chunks[s.Chunk]
		switch {
		case len(c.steps) == 0:
		case s.Finish:
			for k := range slots {
				if slots[k].at == c.slot {
					slots[k].used = false
				}
			}
		case i == c.steps[0]:
			c.slot = take(c.bytes)
		}
	}
}

// temporary gets memory for the steps that need it.
func (p *deviceJob) temporary() (err error) {
	n := 0
	for i := range p.plan.Steps {
		if s := &p.plan.Steps[i]; s.Stage != cluster.Between && s.Op == plan.OpReduceScatter && !s.Even && s.Src != s.Dst {
			_, m := span(s, func(x *cluster.Part) int64 { return x.Src })
			n = max(n, m)
		}
	}
	if n > 0 {
		p.temp, err = p.o.Scratch(p.dev, n)
	}
	return err
}

// span returns the bytes between which the parts of a step lie.
func span(s *cluster.Step, at func(*cluster.Part) int64) (lo, n int) {
	first, last := &s.Parts[0], &s.Parts[len(s.Parts)-1]
	return int(at(first)), int(at(last) + last.Len - at(first))
}

// filler adds commands to a batch. It notes the first error.
type filler struct {
	*edges.Batch
	p   *deviceJob
	err error
}

// Launch is for package direct, which uses its launch again.
func (f *filler) Launch(l *driver.Launch) error {
	own := *l
	own.Args = new(driver.Args).Set(l.Args)
	own.Access = append([]driver.Access(nil), l.Access...)
	f.Batch.Launch(f.p.inside, &own)
	return nil
}

// Fill adds all commands.
func (p *deviceJob) Fill(o *group.Operation, b *edges.Batch) error {
	f := &filler{Batch: b, p: p}
	for i := range p.bring {
		p.move(f, &p.bring[i], true)
	}
	for i := range p.plan.Steps {
		s := &p.plan.Steps[i]
		c := &p.chunks[s.Chunk]
		switch {
		case s.Stage != cluster.Between:
			if err := p.step(f, s); err != nil {
				return p.at(i, err)
			}
		case s.Finish:
			if c.up {
				p.copy(f, c, false)
			}
		case i == c.steps[len(c.steps)-1]:
			if c.down {
				p.copy(f, c, true)
			}
			c.turn = b.Host(p.g.B.Turns(), driver.Writes(p.pinned.Ptr()+driver.Ptr(c.slot), c.bytes))
		}
	}
	for i := range p.back {
		p.move(f, &p.back[i], false)
	}
	return f.err
}

// copy copies what a chunk has between clusters to its slot, or back.
func (p *deviceJob) copy(f *filler, c *chunk, down bool) {
	for _, r := range c.runs {
		slot, buf := p.pinned.Ptr()+driver.Ptr(c.slot+r.at), p.bufs[r.buf]+driver.Ptr(r.off)
		if down {
			f.Copy(p.down, slot, buf, r.n)
		} else {
			f.Copy(p.up, buf, slot, r.n)
		}
	}
}

// step adds the kernels of a step inside the cluster.
func (p *deviceJob) step(f *filler, s *cluster.Step) error {
	src := func(x *cluster.Part) driver.Ptr { return p.bufs[s.Src] + driver.Ptr(x.Src) }
	dst := func(x *cluster.Part) driver.Ptr { return p.bufs[s.Dst] + driver.Ptr(x.Dst) }
	place := p.g.Layout.Place(p.g.B.Rank)
	op, d := inner(p.c.Reduce), p.c.dtype()
	switch {
	case len(s.Ranks) == 1:
		for i := range s.Parts {
			if x := &s.Parts[i]; src(x) != dst(x) {
				f.Copy(p.inside, dst(x), src(x), int(x.Len))
			}
		}
		return nil
	case s.Op == plan.OpReduceScatter && s.Even:
		return p.comm.ReduceScatter(f, dst(&s.Parts[place]), src(&s.Parts[0]), int(s.Parts[0].Len)/d.Size(), d, op, p.g.Form(plan.OpReduceScatter, int(s.Parts[0].Len)))
	case s.Op == plan.OpReduceScatter:
		// All get everything. Such ranges are short, or the ranks' shares of the traffic differ.
		lo, n := span(s, func(x *cluster.Part) int64 { return x.Src })
		from := p.bufs[s.Src] + driver.Ptr(lo)
		to := from
		if s.Src != s.Dst {
			to = p.temp
		}
		if err := p.comm.AllReduce(f, to, from, n/d.Size(), d, op, p.g.Form(plan.OpAllReduce, n)); err != nil || to == from {
			return err
		}
		for i := range s.Parts {
			if x := &s.Parts[i]; x.To == place {
				f.Copy(p.inside, dst(x), to+driver.Ptr(int(x.Src)-lo), int(x.Len))
			}
		}
		return nil
	case s.Op == plan.OpAllGather && s.Even:
		return p.comm.AllGather(f, dst(&s.Parts[0]), src(&s.Parts[place]), int(s.Parts[0].Len), p.g.Form(plan.OpAllGather, int(s.Parts[0].Len)))
	case s.Op == plan.OpAllGather:
		// The bits of all parts, of which each rank has its own and zeros.
		lo, n := span(s, func(x *cluster.Part) int64 { return x.Dst })
		for i := range s.Parts {
			if x := &s.Parts[i]; x.From != place {
				f.Memset(p.inside, dst(x), 0, int(x.Len))
			} else if src(x) != dst(x) {
				f.Copy(p.inside, dst(x), src(x), int(x.Len))
			}
		}
		at := p.bufs[s.Dst] + driver.Ptr(lo)
		bits, es := tensor.Uint8, 1
		if at%8 == 0 && n%8 == 0 {
			bits, es = tensor.Int64, 8
		}
		return p.comm.AllReduce(f, at, at, n/es, bits, backend.BOr(), p.g.Form(plan.OpAllReduce, n))
	case s.Op == plan.OpGather:
		// The root has its own part in place.
		lo, _ := span(s, func(x *cluster.Part) int64 { return x.Dst })
		at, n := p.bufs[s.Dst]+driver.Ptr(lo), 0
		take, from := make([]direct.Span, len(s.Ranks)), at
		for i := range s.Parts {
			switch x := &s.Parts[i]; {
			case place == s.Root && x.From != place:
				take[x.From] = direct.Span{Off: int(x.Dst) - lo, N: int(x.Len)}
			case place != s.Root && x.From == place:
				n, from = int(x.Len), src(x)
			}
		}
		return p.comm.GatherV(f, at, from, n, take, s.Root, direct.Form{})
	}
	return fmt.Errorf("no kernels for a %v inside a cluster", s.Op)
}

// move brings the elements of a tensor to their place in a buffer, or back.
func (p *deviceJob) move(f *filler, m *move, bring bool) {
	n, own := m.t.ByteLen(), m.own
	copyBetween := func(s driver.Stream, own driver.Ptr) {
		if bring {
			f.Copy(s, m.at, own, n)
		} else {
			f.Copy(s, own, m.at, n)
		}
	}
	at := place.Of(m.t)
	switch {
	case at.Flat:
		copyBetween(p.inside, place.Start(m.t))
		return
	case at.Dev == p.dev:
		p.pack(f, p.inside, at, m.at, bring)
		return
	}
	s, _, err := p.g.B.Streams(at.Dev)
	if err != nil {
		f.err = cmp.Or(f.err, err)
		return
	}
	if bring {
		p.pack(f, s, at, own, true)
	}
	copyBetween(p.inside, own)
	if !bring {
		p.pack(f, s, at, own, false)
	}
}

// pack brings the elements of a place in order, or puts them back, on their device.
func (p *deviceJob) pack(f *filler, s driver.Stream, at *place.Place, packed driver.Ptr, bring bool) {
	k := p.g.B.Packer(at.Dev)
	if k.Err != nil {
		f.err = cmp.Or(f.err, k.Err)
		return
	}
	k.Move(f.Batch, s, at, packed, bring)
}

// Run serves the network.
func (p *deviceJob) Run(o *group.Operation) error {
	memory := func(i int) []byte {
		s := &p.plan.Steps[i]
		c := &p.chunks[s.Chunk]
		at := c.slot
		for _, k := range c.steps {
			if k == i {
				break
			}
			at += int(p.plan.Steps[k].Parts[0].Len)
		}
		return p.pinned.Bytes()[at:][:s.Parts[0].Len]
	}
	w := &walk{job: &p.job, onDevice: true, begin: func(i, k int) error { return p.turn(p.lost, i, p.chunks[k].turn) }}
	ended := func(k int) {
		c := &p.chunks[k]
		driver.HostAccess(p.g.B.Driver, "the network", driver.Writes(p.pinned.Ptr()+driver.Ptr(c.slot), c.bytes))
		o.End(c.turn)
	}
	return w.serve(o, memory, ended, p.blame)
}

// lost returns why the kernels will not come to an end.
func (p *deviceJob) lost() error {
	if err := p.comm.Err(); err != nil {
		return err
	}
	if r, left := p.g.kernels.Left(p.number); left {
		return &work.Error{Info: p.o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w: rank %d closed the group and did not take part", work.ErrPeerLeft, r)}
	}
	return nil
}

// blame says for whom the kernels waited, if the time of the operation is over.
func (p *deviceJob) blame(err error) error {
	var known *work.Error
	if err == nil || !errors.Is(err, work.ErrTimeout) || errors.As(err, &known) || !p.o.Enqueued() {
		return err
	}
	p.g.Abort()
	var stuck *window.Failure
	for end := time.Now().Add(directway.ReportLimit); !errors.As(p.comm.Err(), &stuck); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			return err
		}
	}
	r := p.g.kernels.Of(stuck.Peer)
	return &work.Error{Info: p.o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w; the device of rank %d has not done its part", err, r)}
}

// Err returns why the kernels' results are of no use.
func (p *deviceJob) Err() error {
	if err := p.comm.Err(); err != nil {
		return err
	}
	if r, spoiled := p.g.kernels.Spoiled(p.number); spoiled {
		// The reason, which may be another rank, is on its way between the hosts.
		for end := time.Now().Add(directway.ReportLimit); time.Now().Before(end); time.Sleep(50 * time.Microsecond) {
			if why := cmp.Or(p.g.B.Broken(), p.g.B.CPUErr()); why != nil {
				return why
			}
		}
		return directway.SpoiledBy(p.o.Info(), r)
	}
	return nil
}

// Spoil implements group.Spoiler.
func (p *deviceJob) Spoil() {
	if p.comm != nil {
		p.g.kernels.SpoilFrom(p.number)
	}
}
