package driver

import (
	"context"
	"errors"
	"fmt"
)

// Capturer is a Stream whose calls can be captured in a [Graph]. See "Graphs" in the package's
// comment for the rules.
type Capturer interface {
	// BeginCapture begins a capture. Until EndCapture the stream's Copy, Memset, Launch,
	// Record, Wait, WaitValue and WriteValue run nothing. They check their arguments and
	// copy them into the capture.
	BeginCapture() error

	// EndCapture ends the capture that BeginCapture began on this stream, also if it returns
	// an error. It may wait for the device.
	EndCapture() (Graph, error)

	// Capturing reports whether the stream is part of a capture of its Driver. It costs next to
	// nothing while the Driver has none.
	Capturing() bool
}

// Graph is work that was captured.
type Graph interface {
	// Launch enqueues the work on a stream of the device that it was captured on. It comes
	// after what that stream was given before, and after earlier launches of the graph on any
	// stream. What the stream is given later comes after all of the work.
	Launch(s Stream) error

	// Close gives the graph back. Launches that were enqueued still run. It may be called
	// more than once.
	Close() error
}

// Capturing reports whether a stream is a Capturer that is part of a capture.
func Capturing(s Stream) bool {
	c, ok := s.(Capturer)
	return ok && c.Capturing()
}

// CallCaptured reports whether a call with a context is part of a stream that is captured.
func CallCaptured(ctx context.Context) bool {
	c := CallStreamsOf(ctx)
	return c != nil && c.In != nil && Capturing(c.In)
}

// Capture captures what enqueue gives a stream. Where the stream's driver has no graphs the
// error matches errors.ErrUnsupported, and enqueue is not called.
func Capture(s Stream, enqueue func() error) (Graph, error) {
	c, ok := s.(Capturer)
	if !ok {
		return nil, &Error{Call: "Capture", Device: s.Device().Index, Err: fmt.Errorf("%w: the driver has no graphs", errors.ErrUnsupported)}
	}
	if err := c.BeginCapture(); err != nil {
		return nil, err
	}
	err := enqueue()
	g, endErr := c.EndCapture()
	if err == nil {
		return g, endErr
	}
	if g != nil {
		err = errors.Join(err, g.Close())
	}
	return nil, err
}
