package libcuda

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
)

// TestGraph holds which functions of CUDA a capture calls, and which it must not: to ask about a
// captured stream or event ends the capture.
func TestGraph(t *testing.T) {
	x := newFixture(t, newFake(2))
	mem := x.alloc(x.v, 100)
	before := must.Get(x.s.Record())
	require.Zero(t, x.f.count("StreamCapturing"), "nothing is captured")
	var inside driver.Event
	g, err := driver.Capture(x.s, func() error {
		require.Zero(t, x.f.count("StreamQuery")+x.f.count("EventQuery"))
		require.NoError(t, x.s.Err())
		inside = must.Get(x.s.Record())
		_, err := inside.Done()
		refused(t, err, "Done", driver.ErrCapture)
		refused(t, inside.Sync(t.Context()), "Sync", driver.ErrCapture)
		require.Zero(t, x.f.count("StreamQuery")+x.f.count("EventQuery"))
		require.True(t, must.Get(before.Done()), "other events are as ever")
		refused(t, x.s.BeginCapture(), "BeginCapture", driver.ErrCapture)
		host := must.Get(x.d.AllocHost(64))
		refused(t, x.s.Copy(host.Ptr(), host.Ptr()+32, 32), "Copy", driver.ErrCapture)
		require.NoError(t, host.Close())
		require.Empty(t, x.f.copies)
		return x.s.Memset(mem.Ptr(), 1, 100)
	})
	require.NoError(t, err)
	require.Equal(t, 1, x.f.count("GraphInstantiate"))
	require.Zero(t, x.f.live["graph"])
	require.Equal(t, uint32(captureRelaxed), x.f.mode)
	refused(t, x.s.Wait(inside), "Wait", driver.ErrCapture)
	inside.Release()
	before.Release()
	again := must.Get(x.s.Record())
	require.True(t, must.Get(again.Done()), "the pool's events are no longer captured")
	again.Release()

	require.NoError(t, g.Launch(x.s))
	refused(t, g.Launch(nil), "GraphLaunch", driver.ErrInvalid)
	far, err := x.device(1).NewStream()
	require.NoError(t, err)
	refused(t, g.Launch(far), "GraphLaunch", driver.ErrInvalid)
	require.NoError(t, x.s.BeginCapture())
	refused(t, g.Launch(x.s), "GraphLaunch", driver.ErrCapture)
	require.Equal(t, 1, x.f.count("GraphLaunch"))
	require.NoError(t, g.Close())
	require.NoError(t, g.Close())
	refused(t, g.Launch(x.s), "GraphLaunch", driver.ErrClosed)
	_, err = far.(driver.Capturer).EndCapture()
	refused(t, err, "EndCapture", driver.ErrCapture)
	require.NoError(t, far.Close())
	x.end(mem) // closes the stream, and with it the capture
	require.Zero(t, x.d.captures.Load())
}

// TestCaptureRefused holds what is said when CUDA cannot capture a call.
func TestCaptureRefused(t *testing.T) {
	x := newFixture(t, newFake(1))
	host, err := x.d.AllocHost(64)
	require.NoError(t, err)
	_, err = driver.Capture(x.s, func() error {
		x.f.at, x.f.with = x.f.calls+2, 900 // after the call for the context
		defer func() { x.f.at = 0 }()
		return x.s.WaitValue(host.Ptr(), 1, driver.AtLeast)
	})
	require.Equal(t, "StreamWaitValue", x.f.failed)
	refused(t, err, "WaitValue", driver.ErrCapture)
	require.EqualError(t, err, "driver: WaitValue on device 0: capture refused: CUDA cannot capture this call (cuStreamWaitValue32 returned 900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)")
	x.end(host)

	var plain struct{ driver.Stream }
	plain.Stream = x.s
	_, err = driver.Capture(plain, func() error { return nil })
	refused(t, err, "Capture", errors.ErrUnsupported)
}
