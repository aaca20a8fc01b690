package weights

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestLargeLayouts: a layout takes no memory. One for whose versions the host has none is refused, and so are small buckets.
func TestLargeLayouts(t *testing.T) {
	layoutOf := func(bucket int, size int64) []byte {
		l := &layout{bucket: bucket, params: []Param{{"w", tensor.Uint8, []int{int(size)}}}}
		return frame(kindInit, l.encode())
	}
	for name, c := range map[string]struct {
		init []byte
		want string
	}{
		"memory":        {layoutOf(DefaultBucket, 1<<50), "two versions of 1125899906842624 bytes and their deltas need 2392537302040576 more bytes of memory, and this host has"},
		"small buckets": {layoutOf(1<<10, 15<<30), "buckets of 1024 bytes, want a multiple of 64 from 65536"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			dial(t, f.Addr().String(), ReceiverOptions{Retry: time.Hour})
			f.accept()
			f.send(c.init)
			require.Contains(t, f.read(kindRefuse), c.want)
		})
	}
	t.Run("as the bytes come", func(t *testing.T) {
		was := host
		host = fstest.MapFS{} // has any memory
		t.Cleanup(func() { host = was })
		f := newFake(t)
		r := dial(t, f.Addr().String(), ReceiverOptions{Retry: time.Hour})
		f.accept()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f.send(layoutOf(DefaultBucket, 60<<30), startFrame(1, 0), header{kind: kindFull, length: DefaultBucket}.append(nil), make([]byte, DefaultBucket-1))
		require.Eventually(t, func() bool { return r.Status().Bytes > 2*headerSize }, patience, time.Millisecond)
		runtime.ReadMemStats(&after)
		require.Less(t, int64(after.Sys-before.Sys), int64(128<<20))
	})
}

// TestGrowingParameter: a parameter's memory grows while it comes, and what has come stays.
func TestGrowingParameter(t *testing.T) {
	p := listen(t, PublisherOptions{})
	r := dial(t, p.Addr(), ReceiverOptions{})
	require.NoError(t, p.Await(within(t), 1))
	x := must.Get(tensor.New(tensor.Int32, 24<<20))
	data := must.Get(tensor.Data[int32](x))
	for i := range data {
		data[i] = int32(i)
	}
	params := []Named{{"x", x}}
	for version := uint64(1); version < 4; version++ {
		data[1<<20]++
		must.Get(p.Publish(within(t), version, params))
		requireVersion(t, r, version, params)
	}
}

// TestEscapes: texts from the network show only printable characters.
func TestEscapes(t *testing.T) {
	const bad = "\x1b]0;owned\a\n\xff\u202e"
	plain := func(s string) {
		t.Helper()
		require.Contains(t, s, "?]0;owned??")
		require.NotRegexp(t, "[^ -~\ufffd]", s)
	}
	p := listen(t, PublisherOptions{})
	c := must.Get(net.Dial("tcp", p.Addr()))
	defer c.Close()
	must.Get(c.Write(header{kind: kindHello, count: protocol}.withPayload([]byte(bad))))
	require.NoError(t, p.Await(within(t), 1))
	must.Get(c.Write(frame(kindRefuse, []byte(bad))))
	params := model(t, 1)
	params[0].Name = bad
	for version := uint64(1); ; version++ {
		report := must.Get(p.Publish(within(t), version, params))
		if len(report.Dropped) > 0 {
			plain(report.Dropped[0].Name)
			plain(report.Dropped[0].Err.Error())
			require.ErrorIs(t, report.Dropped[0].Err, errRefused)
			break
		}
	}
	why := errors.New("enough")
	r := dial(t, p.Addr(), ReceiverOptions{Accept: func(params []Param) error { return fmt.Errorf("%w of %s", why, params[0].Name) }})
	require.Eventually(t, func() bool { return errors.Is(r.Status().Err, why) }, patience, time.Millisecond)
	plain(r.Status().Err.Error())
}

// stalling connects receivers that read so many bytes and then nothing more. The function that it returns waits until they
// have read these.
func stalling(t *testing.T, p *Publisher, bytes ...int64) (stalled func()) {
	var reading sync.WaitGroup
	for _, n := range bytes {
		c := must.Get(net.Dial("tcp", p.Addr()))
		t.Cleanup(func() { c.Close() })
		must.Get(c.Write(header{kind: kindHello, count: protocol}.withPayload([]byte("stalling"))))
		reading.Go(func() { io.CopyN(io.Discard, c, n) })
	}
	return func() { must.End(t, "receivers that stall", reading.Wait) }
}

// TestStallsDoNotAddUp: an update waits for the timeout once, however many receivers stall, and wherever.
func TestStallsDoNotAddUp(t *testing.T) {
	const timeout = 10 * time.Second
	publish := func(t *testing.T, p *Publisher, version uint64, params []Named, dropped int, most time.Duration) {
		begun := time.Now()
		report := must.Get(p.Publish(t.Context(), version, params))
		require.Less(t, time.Since(begun), most)
		require.Len(t, report.Dropped, dropped)
		require.Equal(t, 1, report.Receivers)
	}
	x := must.Get(tensor.New(tensor.Uint8, 128<<20))
	small := must.Get(tensor.New(tensor.Uint8, 100))
	params := []Named{{"x", x}}
	t.Run("in an update", func(t *testing.T) {
		t.Parallel()
		p := listen(t, PublisherOptions{Timeout: timeout})
		r := dial(t, p.Addr(), ReceiverOptions{})
		stalling(t, p, 0, 20<<20, 60<<20, 100<<20)
		require.NoError(t, p.Await(within(t), 5))
		publish(t, p, 1, params, 4, 2*timeout)
		requireVersion(t, r, 1, params)
	})
	t.Run("late", func(t *testing.T) {
		t.Parallel()
		p := listen(t, PublisherOptions{Timeout: timeout})
		r := dial(t, p.Addr(), ReceiverOptions{})
		require.NoError(t, p.Await(within(t), 1))
		publish(t, p, 1, params, 0, patience)
		stalling(t, p, 80<<20, 80<<20, 80<<20)() // with the version that newcomers get
		require.NoError(t, p.Await(within(t), 4))
		params := []Named{{"small", small}}
		publish(t, p, 2, params, 3, timeout+timeout/2)
		requireVersion(t, r, 2, params)
	})
}

// TestALowerVersion: a trainer that begins again may publish smaller numbers than before, and then these count. On one
// connection numbers increase.
func TestALowerVersion(t *testing.T) {
	p := must.Get(Listen(within(t), freeport.Loopback(t)))
	defer p.Close()
	r := dial(t, p.Addr(), ReceiverOptions{})
	params := model(t, 1)
	require.NoError(t, p.Await(within(t), 1))
	must.Get(p.Publish(within(t), 5, params))
	require.NoError(t, r.Await(within(t), 4))
	require.NoError(t, p.Close())
	p = must.Get(Listen(within(t), p.Addr()))
	defer p.Close()
	require.NoError(t, p.Await(within(t), 1))
	must.Get(p.Publish(within(t), 3, params))
	requireVersion(t, r, 3, params)
	require.EqualValues(t, 3, r.Status().Version)
	require.ErrorContains(t, r.Await(canceled(), 4), "version 4 has not come from "+p.Addr()+", the receiver has 3")

	f := newFake(t)
	dial(t, f.Addr().String(), ReceiverOptions{Retry: time.Hour})
	f.accept()
	l := &layout{bucket: minBucket, params: []Param{{"w", tensor.Uint8, []int{3}}}}
	f.send(frame(kindInit, l.encode()), startFrame(5, 0), bucketFrame(kindFull, 0, 0, []byte("abc")), finishFrame(5, digestOf([]byte("abc"))))
	f.read(kindAck)
	f.send(frame(kindInit, l.encode()), startFrame(3, 0))
	require.Contains(t, f.read(kindRefuse), "version 3 comes after 5")
}
