package libcuda

import (
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func refuse(call string, device int, format string, args ...any) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrCapture}, args...)...)}
}

// captured reports whether the stream is part of a capture, of this Driver or of another library. The
// caller is between begin and end.
func (s *Stream) captured(call string) (bool, error) {
	if !s.mayBeCaptured() {
		return false, nil
	}
	d := s.v.d
	on, r := d.api.StreamCapturing(s.h)
	if on && d.captures.Load() == 0 && !d.foreign.Load() {
		d.foreign.Store(true)
	}
	return on, s.v.fail(call, "cuStreamIsCapturing", r)
}

// mayBeCaptured reports whether CUDA has to be asked. That takes 0.1 us, so streams of the Driver's own do
// so only once there are captures.
func (s *Stream) mayBeCaptured() bool {
	return s.borrowed || s.v.d.captures.Load() > 0 || s.v.d.foreign.Load()
}

// Capturing reports whether the stream is part of a capture; see driver.Capturer.
func (s *Stream) Capturing() bool {
	const call = "Capturing"
	if !s.mayBeCaptured() {
		return false
	}
	before, err := s.begin(call, none)
	if err != nil {
		return false // the next call says why
	}
	defer s.end(before)
	on, err := s.captured(call)
	return on && err == nil
}

// BeginCapture begins a capture.
func (s *Stream) BeginCapture() error {
	const call = "BeginCapture"
	before, err := s.begin(call, none)
	if err != nil {
		return err
	}
	defer s.end(before)
	if on, err := s.captured(call); on || err != nil {
		if err == nil {
			err = refuse(call, s.v.index, "the stream is part of a capture")
		}
		return err
	}
	if r := s.v.d.api.StreamBeginCapture(s.h, captureRelaxed); r != Success {
		return s.v.fail(call, "cuStreamBeginCapture", r)
	}
	s.capturing = true
	s.v.d.captures.Add(1)
	return nil
}

// EndCapture ends the capture.
func (s *Stream) EndCapture() (driver.Graph, error) {
	const call = "EndCapture"
	before, err := s.begin(call, none)
	if err != nil {
		return nil, err
	}
	defer s.end(before)
	if !s.capturing {
		return nil, refuse(call, s.v.index, "BeginCapture was not called on this stream")
	}
	g, err := s.endCapture(call)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// stopCapture ends the capture. The context is current, and the caller holds s.mu.
func (s *Stream) stopCapture() (GraphHandle, Result) {
	s.capturing = false
	s.v.d.captures.Add(-1)
	return s.v.d.api.StreamEndCapture(s.h)
}

// endCapture is stopCapture, and makes the graph ready to be launched.
func (s *Stream) endCapture(call string) (*Graph, error) {
	v, api := s.v, s.v.d.api
	captured, r := s.stopCapture()
	if r != Success {
		return nil, v.fail(call, "cuStreamEndCapture", r)
	}
	exec, r := api.GraphInstantiate(captured)
	if destroyed := api.GraphDestroy(captured); r == Success && destroyed != Success {
		api.GraphExecDestroy(exec)
		return nil, v.fail(call, "cuGraphDestroy", destroyed)
	}
	if r != Success {
		return nil, v.fail(call, "cuGraphInstantiateWithFlags", r)
	}
	g := &Graph{v: v, exec: exec}
	v.d.made(g, "graph")
	return g, nil
}

// Graph is a driver.Graph.
type Graph struct {
	v    *Device
	exec ExecHandle

	mu     sync.Mutex // keeps Close out of Launch
	closed bool
}

// Launch enqueues the work.
func (g *Graph) Launch(st driver.Stream) error {
	const call = "GraphLaunch"
	s, ok := st.(*Stream)
	if !ok || s == nil || s.v != g.v {
		return invalid(call, g.v.index, "the stream is not of the graph's device and driver")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return closedError(call, g.v.index, "graph")
	}
	before, err := s.begin(call, launchGraph)
	if err != nil {
		return err
	}
	defer s.end(before)
	if on, err := s.captured(call); on || err != nil {
		if err == nil {
			err = refuse(call, g.v.index, "the stream is part of a capture")
		}
		return err
	}
	return g.v.fail(call, "cuGraphLaunch", g.v.d.api.GraphLaunch(g.exec, s.h))
}

// Close gives the graph back; CUDA does so after launches that still run.
func (g *Graph) Close() error {
	const call = "Close"
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	v := g.v
	v.d.forget(g)
	if v.lost.Load() != nil || !v.ready.Load() {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	return v.fail(call, "cuGraphExecDestroy", v.d.api.GraphExecDestroy(g.exec))
}

var (
	_ driver.Capturer = (*Stream)(nil)
	_ driver.Graph    = (*Graph)(nil)
)
