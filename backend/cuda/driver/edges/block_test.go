package edges_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/internal/must"
)

// full is a stream without room: Record and Wait block until room is closed.
type full struct {
	driver.Stream
	blocked chan struct{} // gets a value when a call blocks
	room    chan struct{}
}

func newFull(s driver.Stream) *full {
	return &full{Stream: s, blocked: make(chan struct{}, 8), room: make(chan struct{})}
}

func (f *full) wait() {
	f.blocked <- struct{}{}
	<-f.room
}

func (f *full) Record() (driver.Event, error) {
	f.wait()
	return f.Stream.Record()
}

func (f *full) Wait(e driver.Event) error {
	f.wait()
	return f.Stream.Wait(e)
}

// TestFullStream runs a batch whose caller's stream has no room. Meanwhile an earlier
// batch, for which that stream waits, can be asked, taken its turn, and aborted.
func TestFullStream(t *testing.T) {
	const n = 64
	r := newRig(t, 1, 1)
	s, caller := r.stream(0, "s"), newFull(r.stream(0, "caller"))
	x, staging := r.alloc(0, n), r.host(n)
	line, err := r.t.Host("host")
	require.NoError(t, err)
	enqueue := func() (*edges.Pending, int) {
		b := r.t.Batch()
		b.Copy(s, staging.Ptr(), x, n)
		turn := b.Host(line, driver.Writes(staging.Ptr(), n))
		b.Copy(s, x, staging.Ptr(), n)
		return must.Get(b.Run()), turn
	}
	r.must(s.Memset(x, 1, n))
	first, turn := enqueue()
	second, _ := enqueue()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := r.t.Batch()
		b.Before(caller, driver.Writes(x, n))
		b.Copy(s, staging.Ptr(), x, n)
		p, err := b.Run()
		if err == nil {
			err = p.Sync(r.ctx)
			p.Release()
		}
		if err != nil {
			t.Error(err)
		}
	}()
	<-caller.blocked
	must.End(t, "an earlier batch", func() {
		r.must(first.Begin(r.ctx, turn))
		first.End(turn)
		r.must(first.Sync(r.ctx))
		done, err := first.Done()
		r.must(err)
		require.True(t, done)
		first.Release()
		second.Abort()
		r.must(second.Sync(r.ctx))
		second.Release()
		r.t.Batch()
	})
	close(caller.room)
	<-ended
	require.NoError(t, r.close())
}

// syncing is a stream whose events tell when Sync begins.
type syncing struct {
	driver.Stream
	begun chan struct{}
}

type syncingEvent struct {
	driver.Event
	begun chan struct{}
}

func (s *syncing) Record() (driver.Event, error) {
	e, err := s.Stream.Record()
	return &syncingEvent{e, s.begun}, err
}

func (e *syncingEvent) Sync(ctx context.Context) error {
	e.begun <- struct{}{}
	return e.Event.Sync(ctx)
}

// unwrapping waits for events of a syncing stream.
type unwrapping struct{ driver.Stream }

func (u unwrapping) Wait(e driver.Event) error {
	return u.Stream.Wait(e.(*syncingEvent).Event)
}

// TestOrderDuringSync orders streams after a batch that somebody waits for. One of the
// streams has no room, which keeps nobody from asking for the batch.
func TestOrderDuringSync(t *testing.T) {
	const n = 64
	r := newRig(t, 1, 1)
	s := &syncing{r.stream(0, "s"), make(chan struct{}, 1)}
	other := r.stream(0, "other")
	busy := newFull(unwrapping{r.stream(0, "busy")})
	x, gate := r.alloc(0, n), r.host(4)
	gate.Store32(0, 0)
	r.must(s.WaitValue(gate.Ptr(), 1, driver.Equal))
	b := r.t.Batch()
	b.Memset(s, x, 1, n)
	p, err := b.Run()
	require.NoError(t, err)
	ended := make(chan error)
	go func() { ended <- p.Sync(r.ctx) }()
	<-s.begun
	must.End(t, "Order", func() { r.must(p.Order(unwrapping{other})) })
	ordered := make(chan error)
	p.Retain()
	go func() {
		err := p.Order(busy)
		p.Release()
		ordered <- err
	}()
	<-busy.blocked
	must.End(t, "Done", func() {
		done, err := p.Done()
		r.must(err)
		require.False(t, done)
	})
	gate.Store32(0, 1)
	require.NoError(t, <-ended)
	p.Release()
	close(busy.room)
	require.NoError(t, <-ordered)
	require.NoError(t, r.close())
}

// TestForgottenStreams has batches of streams that come and go. The tracker keeps none
// that is forgotten, and the orders between the others.
func TestForgottenStreams(t *testing.T) {
	const n = 64
	r := newRig(t, 1, 1)
	rng := random(t, 1)
	var streams []driver.Stream
	var buffers []driver.Ptr
	for range 4 {
		buffers = append(buffers, r.alloc(0, n))
		streams = append(streams, r.stream(0, "stream"))
	}
	caller := r.stream(0, "caller")
	for range 300 {
		b := r.t.Batch()
		at := buffers[rng.IntN(len(buffers))]
		if rng.IntN(2) == 0 {
			r.must(caller.Memset(at, 1, n))
			b.Before(caller, driver.Writes(at, n))
		}
		for range 1 + rng.IntN(8) {
			s := streams[rng.IntN(len(streams))]
			b.Copy(s, at, at+n/2, n/2)
			if to := buffers[rng.IntN(len(buffers))]; to != at {
				b.Copy(s, to, at, n)
			}
		}
		b.After(caller, driver.Writes(at, n))
		p := must.Get(b.Run())
		if i := rng.IntN(2 * len(streams)); i < len(streams) {
			e := must.Get(streams[i].Record())
			require.NoError(t, e.Sync(r.ctx))
			e.Release()
			r.t.Forget(streams[i])
			streams[i] = r.stream(0, "stream")
		}
		p.Release()
		require.LessOrEqual(t, edges.Lanes(r.t), len(streams))
	}
	require.NoError(t, r.m.Settle(r.ctx))
	require.NoError(t, r.close())
}

// TestClaim has a host use memory in a claimed turn. The turn comes after earlier uses by a
// caller's stream and by batches, and before later ones.
func TestClaim(t *testing.T) {
	const n = 64
	for _, aborted := range []bool{false, true} {
		r := newRig(t, 1, 1)
		caller, s, own, after := r.stream(0, "caller"), r.stream(0, "s"), r.stream(0, "own"), r.stream(0, "after")
		x, y := r.alloc(0, n), r.alloc(0, n)
		gate, out := r.host(8), r.host(n)
		gate.Store32(0, 0)
		r.must(caller.WaitValue(gate.Ptr(), 1, driver.Equal))
		r.must(caller.Memset(x, 1, n))
		b := r.t.Batch()
		b.Memset(s, y, 2, n)
		first := must.Get(b.Run())
		line := must.Get(r.t.Host("host"))
		b = r.t.Batch()
		b.Before(caller, driver.Writes(x, n))
		turn := b.Claim(line, driver.Writes(x, n), driver.Reads(y, n))
		p := must.Get(b.Run())
		b = r.t.Batch()
		b.Copy(s, y, x, n)
		later := must.Get(b.Run())
		r.must(p.Order(after))
		r.must(after.Copy(out.Ptr(), x, n))
		require.False(t, must.Get(p.Done()))
		ctx, cancel := context.WithCancel(r.ctx)
		cancel()
		require.ErrorIs(t, p.Begin(ctx, turn), context.Canceled, "the caller's stream waits")
		if aborted {
			p.Abort()
			gate.Store32(0, 1)
		} else {
			gate.Store32(0, 1)
			r.must(p.Begin(r.ctx, turn))
			r.must(own.Copy(x, y, n))
			e := must.Get(own.Record())
			r.must(e.Sync(r.ctx))
			e.Release()
			p.End(turn)
		}
		for _, q := range []*edges.Pending{first, p, later} {
			r.must(q.Sync(r.ctx))
			q.Release()
		}
		line.Close()
		require.NoError(t, r.t.Drain(r.ctx))
		require.Equal(t, 1, edges.Lanes(r.t))
		require.NoError(t, r.m.Settle(r.ctx))
		driver.HostAccess(r.d, "comparing", driver.Reads(out.Ptr(), n))
		require.Equal(t, map[bool]byte{false: 2, true: 1}[aborted], out.Bytes()[0])
		require.NoError(t, r.close())
	}
}
