package sim

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// capture is what captured streams were given. A lane is the part of one stream, lane 0 that
// of the stream on which the capture was begun.
type capture struct {
	made  *op
	lanes []*stream
	ops   []captured
	ended bool
	bad   string // why there will be no graph
}

// captured is an operation without a place in a queue.
type captured struct {
	lane int
	op   *op
}

func refuse(call string, device int, format string, args ...any) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrCapture}, args...)...)}
}

// BeginCapture begins a capture.
func (s *Stream) BeginCapture() error {
	const call = "BeginCapture"
	c := s.s
	if s.closed.Load() {
		return &driver.Error{Call: call, Device: c.dev.index, Err: driver.ErrClosed}
	}
	if err := c.dev.enter(call); err != nil {
		return err
	}
	made := &op{kind: opAlloc, name: call}
	made.where()
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.cap != nil {
		return refuse(call, c.dev.index, "the stream is part of the capture from %s", c.cap.made.caller())
	}
	c.cap = &capture{made: made, lanes: []*stream{c}}
	return nil
}

// Capturing reports whether the stream is part of a capture; see driver.Capturer.
func (s *Stream) Capturing() bool {
	s.s.d.mu.Lock()
	defer s.s.d.mu.Unlock()
	return s.s.cap != nil
}

// captures reports whether o, which a stream is given, becomes part of a capture; the
// caller holds d.mu.
func (s *stream) captures(o *op) bool {
	return s.cap != nil || o.kind == opWait && o.rec != nil && o.rec.cap != nil
}

// capture adds an operation to a capture, which the stream joins if it waits for an event of
// one. The caller holds d.mu.
func (s *stream) capture(call string, o *op, skip bool) error {
	c := s.cap
	fail := func(why string) error {
		if c != nil {
			c.fail(why)
		}
		return refuse(call, s.dev.index, "%s", why)
	}
	switch {
	case o.kind == opGraph:
		return fail("a graph cannot be launched in a capture")
	case o.raw != nil:
		return fail("raw events are not captured")
	case o.kind == opRecord:
		o.rec.cap = c
	case o.kind != opWait:
	case o.rec.cap == nil:
		return fail("the event was recorded outside of the capture; wait for it before BeginCapture")
	case o.rec.cap.ended:
		return fail("the event is of a capture that has ended; record another one after Graph.Launch")
	case c == nil:
		if o.rec.cap.bad != "" {
			return refuse(call, s.dev.index, "the event's capture has failed: %s", o.rec.cap.bad)
		}
		c = o.rec.cap
		s.cap = c
		c.lanes = append(c.lanes, s)
	case o.rec.cap != c:
		return fail("the event is of another capture")
	}
	if c.bad != "" {
		return refuse(call, s.dev.index, "the capture has failed: %s", c.bad)
	}
	if !skip {
		c.ops = append(c.ops, captured{slices.Index(c.lanes, s), o})
	}
	return nil
}

// fail notes the first reason why there will be no graph; the caller holds d.mu.
func (c *capture) fail(why string) { c.bad = cmp.Or(c.bad, why) }

// end gives the streams back; the caller holds d.mu.
func (c *capture) end() {
	c.ended = true
	for _, l := range c.lanes {
		l.cap = nil
	}
}

// unjoined returns a lane whose work lane 0 does not wait for at its end, 0 if there is none.
func (c *capture) unjoined() int {
	// How many operations of each lane come before what a lane is given next.
	before := make([][]int, len(c.lanes))
	for i := range before {
		before[i] = make([]int, len(c.lanes))
	}
	at := make(map[*record][]int)
	for n, x := range c.ops {
		switch x.op.kind {
		case opRecord:
			at[x.op.rec] = slices.Clone(before[x.lane])
		case opWait:
			for i, k := range at[x.op.rec] {
				before[x.lane][i] = max(before[x.lane][i], k)
			}
		default:
			before[x.lane][x.lane] = n + 1
		}
	}
	for i := range c.lanes {
		if before[0][i] < before[i][i] {
			return i
		}
	}
	return 0
}

// EndCapture ends the capture.
func (s *Stream) EndCapture() (driver.Graph, error) {
	const call = "EndCapture"
	c, d := s.s, s.s.d
	on := c.dev.index
	if s.closed.Load() {
		return nil, &driver.Error{Call: call, Device: on, Err: driver.ErrClosed}
	}
	made := &op{kind: opAlloc, name: "graph"}
	made.where()
	err := c.dev.enter(call)
	d.mu.Lock()
	cp := c.cap
	if cp == nil || cp.lanes[0] != c {
		d.mu.Unlock()
		return nil, refuse(call, on, "BeginCapture was not called on this stream")
	}
	cp.end()
	d.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case cp.bad != "":
		return nil, refuse(call, on, "the capture has failed: %s", cp.bad)
	}
	if i := cp.unjoined(); i > 0 {
		return nil, refuse(call, on, "stream %s does not wait for the end of what stream %s was given", c.ag.name, cp.lanes[i].ag.name)
	}
	g := &Graph{d: d, dev: c.dev, made: made, ops: cp.ops}
	for _, l := range cp.lanes[1:] {
		g.lanes = append(g.lanes, l.dev.newStream("graph's "+l.ag.name, made))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.graphs == nil {
		d.graphs = make(map[*Graph]bool)
	}
	d.graphs[g] = true
	d.stats.Graphs++
	return g, nil
}

// Graph is a driver.Graph. Lane 0 of the capture runs on the stream of the launch. The others
// run on streams of the graph, so the checker compares their operations as it does those of
// any streams.
type Graph struct {
	d      *Driver
	dev    *Device
	made   *op
	ops    []captured
	lanes  []*stream // but lane 0
	closed atomic.Bool
	last   *record // the end of the last launch; guarded by d.mu
}

// Launch enqueues the work, each operation as a new one.
func (g *Graph) Launch(st driver.Stream) error {
	const call = "GraphLaunch"
	s, ok := st.(*Stream)
	if !ok || s.s.dev != g.dev {
		return invalid(call, g.dev.index, "the stream is not of the graph's device and driver")
	}
	if g.closed.Load() {
		return &driver.Error{Call: call, Device: g.dev.index, Err: fmt.Errorf("%w: the graph", driver.ErrClosed)}
	}
	skip, err := s.enter(call)
	if err != nil {
		return err
	}
	for _, x := range g.ops {
		if x.op.kind == opLaunch && x.op.launch.mod.closed.Load() {
			return &driver.Error{Call: call, Device: g.dev.index, Err: fmt.Errorf("%w: the module of %s, which the graph launches", driver.ErrClosed, x.op.name)}
		}
	}
	at := new(op)
	at.where()
	d := g.d
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case s.s.closed || d.done:
		return &driver.Error{Call: call, Device: g.dev.index, Err: driver.ErrClosed}
	case s.s.cap != nil:
		return s.s.capture(call, &op{kind: opGraph}, skip)
	case skip:
		return nil
	}
	if g.last != nil {
		s.s.push(&op{kind: opWait, rec: g.last, pcs: at.pcs})
	}
	records := make(map[*record]*record)
	for _, x := range g.ops {
		on := s.s
		if x.lane > 0 {
			on = g.lanes[x.lane-1]
		}
		o := *x.op
		switch o.kind {
		case opRecord:
			o.rec = &record{s: on, done: make(chan struct{})}
			records[x.op.rec] = o.rec
		case opWait:
			// Machine.Skip may have left the record out.
			if o.rec = records[x.op.rec]; o.rec == nil {
				continue
			}
		}
		on.push(&o)
	}
	g.last = &record{s: s.s, done: make(chan struct{})}
	s.s.push(&op{kind: opRecord, rec: g.last, pcs: at.pcs})
	return nil
}

// Close gives the graph back.
func (g *Graph) Close() error {
	if g.closed.Swap(true) {
		return nil
	}
	d := g.d
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.graphs, g)
	d.stats.Graphs--
	for _, l := range g.lanes {
		l.end()
	}
	return nil
}

var (
	_ driver.Capturer = (*Stream)(nil)
	_ driver.Graph    = (*Graph)(nil)
)
