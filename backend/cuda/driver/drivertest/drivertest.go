package drivertest

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Config says what to test.
type Config struct {
	// Open returns the driver; it may skip the test where there is none.
	Open func(t *testing.T) driver.Driver

	// Image has the kernels; nil means PTX.
	Image []byte

	// Child returns what another process needs in its environment to open the
	// same devices, as "NAME=value". The process is this test binary, whose
	// TestMain calls the function Child. Nil skips the tests with two processes.
	Child func(t *testing.T, d driver.Driver) []string

	// MaxAllocs is how many allocations of the Go heap a round may have in the steady state. A
	// round is a copy, a kernel, two records, two waits and two releases. Negative: not checked.
	MaxAllocs int

	// Rounds is how often tests repeat what depends on luck; 0 means 1.
	Rounds int
}

// patience bounds what must happen; only a broken driver makes a test wait for it.
const patience = 60 * time.Second

// suite is one subtest with a driver of its own.
type suite struct {
	*testing.T
	Config
	d    driver.Driver
	ctx  context.Context
	used []interface{ Close() error }
}

// Run runs the whole suite as subtests of t.
func Run(t *testing.T, c Config) {
	tests := []struct {
		name string
		run  func(*suite)
	}{
		{"devices", testDevices},
		{"memory", testMemory},
		{"out of memory", testOutOfMemory},
		{"page-locked memory", testHostMemory},
		{"registered memory", testRegister},
		{"borrowed memory", testBorrow},
		{"copies", testCopies},
		{"copies between devices", testPeerCopies},
		{"refused copies", testRefusedCopies},
		{"memset", testMemset},
		{"a stream is in order", testStreamOrder},
		{"streams do not wait for each other", testStreamsIndependent},
		{"closed streams", testStreamClose},
		{"borrowed streams", testBorrowStream},
		{"events", testEvents},
		{"events order streams", testEventOrder},
		{"an event is one point", testEventIsOnePoint},
		{"events between devices", testEventsBetweenDevices},
		{"many events", testManyEvents},
		{"waiting for an event ends with its context", testSyncContext},
		{"words from the host", testWordsFromHost},
		{"words to the host", testWordsToHost},
		{"words between streams", testWordsBetweenStreams},
		{"words between devices", testWordsBetweenDevices},
		{"conditions", testConditions},
		{"refused words", testRefusedWords},
		{"kernels", testKernels},
		{"parameters", testParams},
		{"refused launches", testRefusedLaunches},
		{"modules", testModules},
		{"modules that are kept", testKeep},
		{"kernels of several streams", testKernelStreams},
		{"kernels use page-locked memory", testKernelHost},
		{"kernels see words", testKernelAwait},
		{"peer access", testPeer},
		{"many goroutines", testGoroutines},
		{"a pipeline through the host", testPipeline},
		{"graphs", testGraph},
		{"graphs of several streams", testGraphStreams},
		{"graphs with words", testGraphWords},
		{"captures and other goroutines", testCaptureGoroutines},
		{"refused captures", testRefusedCaptures},
		{"random programs", testRandom},
		{"a turn that does not come", testTurnEnds},
		{"allocations", testAllocs},
		{"handles", testHandles},
		{"memory of another process", testOtherMemory},
		{"words of another process", testOtherWords},
		{"close", testClose},
	}
	if c.Image == nil {
		c.Image = []byte(PTX)
	}
	c.Rounds = max(c.Rounds, 1)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s := &suite{T: t, Config: c, d: c.Open(t), ctx: ctx}
			defer func() {
				for _, u := range slices.Backward(s.used) {
					if err := u.Close(); err != nil {
						t.Errorf("closing: %v", err)
					}
				}
				if err := s.d.Close(); err != nil {
					t.Errorf("closing the driver: %v", err)
				}
			}()
			if s.d.Count() == 0 {
				t.Skip("no device")
			}
			test.run(s)
		})
	}
}

// keep closes c at the end of the test, the last one first.
func (t *suite) keep(c interface{ Close() error }) { t.used = append(t.used, c) }

func (t *suite) device(i int) driver.Device {
	t.Helper()
	v, err := t.d.Device(i)
	require.NoError(t, err)
	return v
}

// two returns two devices, or skips.
func (t *suite) two() (driver.Device, driver.Device) {
	t.Helper()
	if t.d.Count() < 2 {
		t.Skip("one device only")
	}
	return t.device(0), t.device(1)
}

func (t *suite) alloc(v driver.Device, n int) driver.Memory {
	t.Helper()
	m, err := v.Alloc(n)
	require.NoError(t, err)
	t.keep(m)
	return m
}

func (t *suite) host(n int) driver.HostMemory {
	t.Helper()
	h, err := t.d.AllocHost(n)
	require.NoError(t, err)
	t.keep(h)
	return h
}

func (t *suite) stream(v driver.Device) driver.Stream {
	t.Helper()
	s, err := v.NewStream()
	require.NoError(t, err)
	t.keep(s)
	return s
}

func (t *suite) function(v driver.Device, name string) driver.Function {
	t.Helper()
	m, err := v.Load(t.Image)
	require.NoError(t, err)
	t.keep(m)
	f, err := m.Function(name)
	require.NoError(t, err)
	return f
}

// finish waits until everything on the streams has ended.
func (t *suite) finish(streams ...driver.Stream) {
	t.Helper()
	for _, s := range streams {
		e, err := s.Record()
		require.NoError(t, err)
		err = e.Sync(t.ctx)
		e.Release()
		require.NoError(t, err)
	}
}

// after makes s wait for all commands of the other stream.
func (t *suite) after(s, other driver.Stream) {
	t.Helper()
	e, err := other.Record()
	require.NoError(t, err)
	defer e.Release()
	require.NoError(t, s.Wait(e))
}

// gate holds a stream until it is opened.
type gate struct {
	h  driver.HostMemory
	at int
}

// gates returns n gates, each in a line of memory of its own. Those that are
// still closed at the end of the test are opened then.
func (t *suite) gates(n int) []gate {
	h := t.host(64 * n)
	g := make([]gate, n)
	for i := range g {
		g[i] = gate{h, 64 * i}
	}
	t.keep(opener(g))
	return g
}

type opener []gate

func (o opener) Close() error {
	for _, g := range o {
		g.open()
	}
	return nil
}

func (g gate) hold(t *suite, s driver.Stream) {
	t.Helper()
	require.NoError(t, s.WaitValue(g.h.Ptr()+driver.Ptr(g.at), 1, driver.Equal))
}

func (g gate) open() { g.h.Store32(g.at, 1) }

// put copies b to device memory and waits.
func (t *suite) put(s driver.Stream, dst driver.Ptr, b []byte) {
	t.Helper()
	h := t.host(len(b))
	copy(h.Bytes(), b)
	require.NoError(t, s.Copy(dst, h.Ptr(), len(b)))
	t.finish(s)
}

// get copies n bytes from device memory and waits.
func (t *suite) get(s driver.Stream, src driver.Ptr, n int) []byte {
	t.Helper()
	h := t.host(n)
	require.NoError(t, s.Copy(h.Ptr(), src, n))
	t.finish(s)
	return slices.Clone(h.Bytes())
}

// pattern returns n bytes that tell their places.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

func words(v ...uint32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.NativeEndian.AppendUint32(b, x)
	}
	return b
}

// repeat returns n words of one value.
func repeat(v uint32, n int) []byte { return words(slices.Repeat([]uint32{v}, n)...) }

// refused asserts that err is an *Error of a call, and that it matches a sentinel.
func (t *suite) refused(err error, call string, want error) {
	t.Helper()
	require.Error(t, err)
	require.ErrorIs(t, err, want)
	var e *driver.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, call, e.Call, "%v", err)
	require.Contains(t, err.Error(), "driver: "+call)
}

// launch launches a kernel over n elements.
func (t *suite) launch(s driver.Stream, f driver.Function, args *driver.Args, access ...driver.Access) {
	t.Helper()
	require.NoError(t, s.Launch(&driver.Launch{
		Function: f, Grid: driver.Dim{X: 4}, Block: driver.Dim{X: 128}, Args: args, Access: access,
	}))
}

func (t *suite) fill(s driver.Stream, f driver.Function, dst driver.Ptr, v uint32, n int) {
	t.Helper()
	t.launch(s, f, new(driver.Args).Ptr(dst).Uint32(v).Uint32(uint32(n)), driver.Writes(dst, 4*n))
}

func (t *suite) add(s driver.Stream, f driver.Function, dst, src driver.Ptr, n int) {
	t.Helper()
	t.launch(s, f, new(driver.Args).Ptr(dst).Ptr(src).Uint32(uint32(n)), driver.Writes(dst, 4*n), driver.Reads(src, 4*n))
}

// done asserts that an event passes.
func (t *suite) passes(e driver.Event) {
	t.Helper()
	require.NoError(t, e.Sync(t.ctx))
	ok, err := e.Done()
	require.NoError(t, err)
	require.True(t, ok)
}

// pending asserts that an event has not passed.
func (t *suite) pending(e driver.Event) {
	t.Helper()
	ok, err := e.Done()
	require.NoError(t, err)
	require.False(t, ok)
}

// each runs f in n goroutines and returns the errors.
func each(n int, f func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
