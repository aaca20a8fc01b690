package edges_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestEdges holds which orders batches get: "0>2" is an event, "0~2" a word, and
// "->" stands for an earlier batch.
func TestEdges(t *testing.T) {
	type world struct {
		*rig
		s, caller []driver.Stream
		h         *edges.Host
		x, y      driver.Ptr
		p         driver.Ptr // page-locked
	}
	const n = 100
	for name, c := range map[string]struct {
		batches []func(w *world, b *edges.Batch)
		want    string // batches separated by |
	}{
		"no conflict": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Memset(w.s[0], w.x, 1, 50)
			b.Memset(w.s[1], w.x+50, 1, 50)
			b.Copy(w.s[0], w.p, w.x, 50)
			b.Copy(w.s[1], w.p+50, w.x+50, 50)
		}}, ""},
		"two reads": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.p, w.x, 50)
			b.Copy(w.s[1], w.p+50, w.x, 50)
		}}, ""},
		"every kind of hazard": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Memset(w.s[0], w.x, 1, n)
			b.Copy(w.s[1], w.y, w.x, n)     // reads what was written
			b.Memset(w.s[2], w.x, 2, n)     // writes what was read, and so what was written
			b.Memset(w.s[0], w.y+99, 3, 1)  // writes what was written
			b.Memset(w.s[0], w.x, 1, n)     // s2's again
			b.Memset(w.s[0], w.x+5, 1, n-5) // its own
		}}, "0>1 1>2 1>3 2>4"},
		"one event for several": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Memset(w.s[0], w.x, 1, n)
			b.Copy(w.s[1], w.y, w.x, 50)
			b.Copy(w.s[2], w.y+50, w.x, 50)
			b.Copy(w.s[3], w.p, w.x, 50)
			b.Memset(w.s[0], w.x, 1, n)
		}}, "0>1 0>2 0>3 1>4 2>4 3>4"},
		"what follows from others": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Memset(w.s[0], w.x, 1, n)
			b.Copy(w.s[1], w.y, w.x, n)
			b.Copy(w.s[2], w.p, w.y, n)
			b.Memset(w.s[2], w.x, 1, n) // s2 is after s1, and so after s0
			b.Copy(w.s[0], w.y, w.p, n)
		}}, "0>1 1>2 2>4"},
		"the last of a lane is enough": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Memset(w.s[0], w.x, 1, 10)
			b.Memset(w.s[0], w.x+10, 1, 10)
			b.Memset(w.s[0], w.y, 1, 10)
			b.Copy(w.s[1], w.p, w.x, 20)
		}}, "1>3"},
		"before and after": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Before(w.caller[0], driver.Writes(w.x, n))
			b.Before(w.caller[1], driver.Writes(w.y, n)) // not used
			b.Memset(w.s[0], w.x, 1, n)
			b.Copy(w.s[1], w.p, w.x, n)
			b.After(w.caller[0], driver.Reads(w.x, n))
			b.After(w.caller[1], driver.Writes(w.x, n))
		}}, "0>2 2>3 2>4 3>5"},
		"the caller's own stream": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Before(w.caller[0], driver.Writes(w.x, n))
			b.Memset(w.caller[0], w.x, 1, n)
			b.After(w.caller[0], driver.Writes(w.x, n))
		}}, ""},
		"the host": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.p, w.x, 10)
			b.Copy(w.s[0], w.p+10, w.x+10, 10)
			b.Host(w.h, driver.Writes(w.p, 10))
			b.Copy(w.s[1], w.x, w.p, 10)
			b.Host(w.h, driver.Writes(w.p+10, 10))
			b.Copy(w.s[1], w.x+10, w.p+10, 10)
			b.Copy(w.s[0], w.p, w.x, 10)
		}}, "0~2 2~3 1~4 4~5 3>6"},
		"a claim": {[]func(*world, *edges.Batch){
			func(w *world, b *edges.Batch) { b.Memset(w.s[0], w.x, 1, n) },
			func(w *world, b *edges.Batch) {
				b.Before(w.caller[0], driver.Writes(w.x, n))
				b.Claim(w.h, driver.Reads(w.x, n))
			},
			func(w *world, b *edges.Batch) { b.Copy(w.s[1], w.p, w.x, n); b.Memset(w.s[2], w.x, 1, n) },
		}, "|-~1 0~1|-~0 0>1"},
		"from batch to batch": {[]func(*world, *edges.Batch){
			func(w *world, b *edges.Batch) { b.Memset(w.s[0], w.x, 1, n); b.Memset(w.s[0], w.y, 1, n) },
			func(w *world, b *edges.Batch) { b.Copy(w.s[1], w.p, w.x, 10); b.Copy(w.s[1], w.p, w.y, 10) },
			func(w *world, b *edges.Batch) { b.Copy(w.s[0], w.x, w.p, n); b.Memset(w.s[1], w.x, 1, n) },
		}, "|->0|->0 0>1"},
		"what the caller did stays ordered": {[]func(*world, *edges.Batch){
			func(w *world, b *edges.Batch) {
				b.Before(w.caller[0], driver.Writes(w.x, n))
				b.Copy(w.s[0], w.p, w.x, 10)
			},
			func(w *world, b *edges.Batch) { b.Copy(w.s[1], w.p+50, w.x, 10) },
		}, "0>1|->0"},
		"words of others": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.x, w.y, n)
			b.WriteValue(w.s[1], w.p, 1, driver.Writes(w.y, n))                  // they may write y when it was read
			b.WaitValue(w.s[2], w.p+4, 1, driver.AtLeast, driver.Writes(w.y, n)) // they have
			b.Copy(w.s[3], w.x, w.y, n)
		}}, "0>1 2>3 0>3"},
		"a word for others that is waited for here": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.p, w.x, 50)
			b.Signal(w.s[0], w.p+96, 1, driver.Writes(w.p, 50))
			b.Copy(w.s[1], w.y, w.p, 50) // after the word, not only after the copy
			b.Host(w.h, driver.Reads(w.p, 50))
		}}, "1>2 1~3"},
		"a word for others only": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.p, w.x, 50)
			b.WriteValue(w.s[0], w.p+96, 1, driver.Writes(w.p, 50))
			b.Copy(w.s[1], w.y, w.p, 50)
			b.Host(w.h, driver.Reads(w.p, 50))
		}}, "0>2 0~3"},
		"a word of another stream": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.p, w.x, 50)
			b.Signal(w.s[1], w.p+96, 1, driver.Writes(w.p, 50)) // after the copy
			b.Memset(w.s[0], w.p, 1, 50)
		}}, "0>1 1>2"},
		"nothing": {[]func(*world, *edges.Batch){func(w *world, b *edges.Batch) {
			b.Copy(w.s[0], w.x, w.y, 0)
			b.Memset(w.s[1], w.x, 1, 0)
		}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := &world{rig: newRig(t, 1, 0)}
			for i := range 4 {
				w.s = append(w.s, w.stream(0, fmt.Sprint("s", i)))
			}
			w.caller = []driver.Stream{w.stream(0, "c0"), w.stream(0, "c1")}
			w.x, w.y = w.alloc(0, n), w.alloc(0, n)
			h := w.host(n)
			w.p = h.Ptr()
			w.h = must.Get(w.t.Host("h"))
			var batches []string
			var found []string
			w.t.Trace = func(e edges.Edge) {
				from, sign := fmt.Sprint(e.From), ">"
				if e.From < 0 {
					from = "-"
				}
				if e.Host {
					sign = "~"
				}
				found = append(found, fmt.Sprint(from, sign, e.To))
				require.NotEqual(t, e.FromOn, e.On)
			}
			var pendings []*edges.Pending
			for _, f := range c.batches {
				b := w.t.Batch()
				f(w, b)
				ops := b.Len()
				found = nil
				p := must.Get(b.Run())
				pendings = append(pendings, p)
				batches = append(batches, strings.Join(found, " "))
				if name == "words of others" {
					h.Store32(4, 1)
				}
				for i := range ops {
					if p.Begin(w.ctx, i) == nil {
						p.End(i)
					}
				}
			}
			require.Equal(t, c.want, strings.Join(batches, "|"))
			for _, p := range pendings {
				require.NoError(t, p.Sync(w.ctx))
				require.True(t, must.Get(p.Done()))
				p.Release()
			}
			require.NoError(t, w.m.Settle(w.ctx))
			require.NoError(t, w.close())
		})
	}
}

// TestTurns ends turns out of order, and aborts.
func TestTurns(t *testing.T) {
	r := newRig(t, 1, 1)
	s, x, h := r.stream(0, "s"), r.alloc(0, 100), r.host(100)
	line := must.Get(r.t.Host("worker"))
	batch := func() (*edges.Pending, []int) {
		b := r.t.Batch()
		var turns []int
		for i := range 3 {
			at := driver.Ptr(10 * i)
			b.Copy(s, h.Ptr()+at, x+at, 10)
		}
		for i := range 3 {
			at := driver.Ptr(10 * i)
			turns = append(turns, b.Host(line, driver.Writes(h.Ptr()+at, 10)))
			b.Copy(s, x+at, h.Ptr()+at, 10)
		}
		return must.Get(b.Run()), turns
	}
	p, turns := batch()
	for _, i := range []int{1, 0, 2} {
		require.NoError(t, p.Begin(r.ctx, turns[i]))
	}
	p.End(turns[2])
	p.End(turns[1])
	p.End(turns[1])
	stuck := must.As[*sim.Stuck](t, r.m.Quiesce(r.ctx), "the first turn has not ended")
	done := must.Get(p.Done())
	require.False(t, done)
	p.End(turns[0])
	require.NoError(t, p.Sync(r.ctx))
	require.Error(t, p.Begin(r.ctx, 12345))
	p.End(12345)
	p.Release()

	// A batch that is aborted does not end the turns of the one before it.
	one, turns1 := batch()
	two, turns2 := batch()
	two.Abort()
	require.ErrorAs(t, r.m.Quiesce(r.ctx), &stuck)
	done = must.Get(one.Done())
	require.False(t, done)
	for _, turn := range turns1 {
		require.NoError(t, one.Begin(r.ctx, turn))
		one.End(turn)
	}
	require.NoError(t, one.Sync(r.ctx))
	require.NoError(t, two.Sync(r.ctx))
	_ = turns2
	one.Release()
	two.Release()

	// A turn that does not come ends with its context, and names who is late.
	held := r.host(4)
	require.NoError(t, s.WaitValue(held.Ptr(), 1, driver.Equal))
	p, turns = batch()
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	err := p.Begin(ctx, turns[0])
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "edges: worker waits for s")
	require.ErrorIs(t, p.Sync(ctx), context.Canceled)
	held.Store32(0, 1)
	p.Abort()
	require.NoError(t, p.Sync(r.ctx))
	p.Release()
	require.NoError(t, r.close())
}

// TestOrder lets streams wait for a batch afterwards.
func TestOrder(t *testing.T) {
	eachSeed(t, 4, func(t *testing.T, seed uint64) {
		r := newRig(t, 2, seed)
		a, b, caller := r.stream(0, "a"), r.stream(1, "b"), r.stream(0, "caller")
		x, y, out := r.alloc(0, 100), r.alloc(1, 100), r.host(200)
		batch := r.t.Batch()
		batch.Memset(a, x, 1, 100)
		batch.Memset(b, y, 2, 100)
		p := must.Get(batch.Run())
		require.NoError(t, p.Order(caller))
		require.NoError(t, caller.Copy(out.Ptr(), x, 100))
		require.NoError(t, caller.Copy(out.Ptr()+100, y, 100))
		e := must.Get(caller.Record())
		require.NoError(t, e.Sync(r.ctx))
		e.Release()
		require.Equal(t, []byte{1, 2}, out.Bytes()[99:101])
		require.NoError(t, p.Sync(r.ctx))
		require.NoError(t, p.Order(caller))
		p.Release()
		require.NoError(t, r.close())
	})
}

// TestKeepTurns holds that the host's turns of a batch that fails end at once, or when
// Abort is called if they are to be kept.
func TestKeepTurns(t *testing.T) {
	for _, keep := range []bool{false, true} {
		r := newRigOf(t, sim.Config{Devices: 1, Quiet: true})
		down, up, x, h := r.stream(0, "down"), r.stream(0, "up"), r.alloc(0, 10), r.host(10)
		line := must.Get(r.t.Host("host"))
		b := r.t.Batch()
		if keep {
			b.KeepTurns()
		}
		b.Copy(down, h.Ptr(), x, 10)
		b.Host(line, driver.Writes(h.Ptr(), 10))
		b.Copy(up, x, h.Ptr(), 10)
		injected := errors.New("injected")
		r.m.Inject(func(c sim.Call) error {
			if c.Name == "Copy" && c.Stream == "up" {
				return injected
			}
			return nil
		})
		p, err := b.Run()
		require.ErrorIs(t, err, injected)
		require.NotNil(t, p)
		r.m.Inject(nil)
		if keep {
			must.As[*sim.Stuck](t, r.m.Quiesce(r.ctx), "the stream waits for the host")
			p.Abort()
		}
		require.NoError(t, p.Sync(r.ctx))
		p.Release()
		// What follows knows nothing of it.
		b = r.t.Batch()
		b.Memset(down, x, 1, 10)
		r.run(b)
		require.NoError(t, r.close())
	}
}

// TestAfterFailure: a batch fails half-way. The next batch still comes after all that the failed one has
// enqueued. It also comes after what the operations that were not enqueued would have waited for.
func TestAfterFailure(t *testing.T) {
	for name, c := range map[string]struct {
		late bool // what fails is the call after the one that would have given the order
		last func(b *edges.Batch, s driver.Stream, x, y driver.Ptr)
	}{
		"it lacks a wait":        {false, func(b *edges.Batch, s driver.Stream, x, y driver.Ptr) { b.Copy(s, y, x, 10) }},
		"it lacks a write":       {false, func(b *edges.Batch, s driver.Stream, x, y driver.Ptr) { b.Memset(s, x, 2, 10) }},
		"it lacks what it reads": {true, func(b *edges.Batch, s driver.Stream, x, y driver.Ptr) { b.Copy(s, y, x, 10) }},
	} {
		for _, batches := range []int{1, 2} {
			t.Run(fmt.Sprint(name, " ", batches), func(t *testing.T) {
				r := newRig(t, 1, 0)
				first, second := r.stream(0, "first"), r.stream(0, "second")
				x, y, z, u := r.alloc(0, 10), r.alloc(0, 10), r.alloc(0, 10), r.alloc(0, 10)
				var all []*edges.Pending
				b := r.t.Batch()
				b.Memset(first, x, 1, 10)
				if batches == 2 {
					p := must.Get(b.Run())
					all, b = append(all, p), r.t.Batch()
				}
				if !c.late {
					b.Memset(first, u, 1, 10)
				}
				c.last(b, second, x, y)
				injected := errors.New("injected")
				r.m.Inject(func(k sim.Call) error {
					if c.late && k.Stream == "second" || k.Stream == "first" && k.Name == "Memset" && (batches == 2 || k.N > 0) {
						return injected
					}
					return nil
				})
				p, err := b.Run()
				require.ErrorIs(t, err, injected)
				r.m.Inject(nil)
				if p != nil {
					all = append(all, p)
				}
				b = r.t.Batch()
				b.Copy(second, z, x, 10)
				p = must.Get(b.Run())
				for _, p := range append(all, p) {
					require.NoError(t, p.Sync(r.ctx))
					p.Release()
				}
				require.NoError(t, r.close())
			})
		}
	}
}

// TestManyHosts holds that a batch costs little for each of thousands of messages that wait.
func TestManyHosts(t *testing.T) {
	const n = 1000
	tr := edges.New(nobody{})
	var all []*edges.Pending
	for i := range n {
		h := must.Get(tr.Host("message"))
		b := tr.Batch()
		b.Claim(h, driver.Writes(driver.Ptr(1<<30+64*i), 64))
		p := must.Get(b.Run())
		all = append(all, p)
	}
	s := &nothing{id: 1}
	b := tr.Batch()
	b.Memset(s, 1<<20, 0, 64)
	p := must.Get(b.Run())
	p.Release()
	require.Less(t, edges.Clocks(b), 10*n)
	for _, p := range all {
		p.End(0)
		p.Release()
	}
	require.NoError(t, tr.Close())
}

// TestStreams holds that a borrowed stream is the stream itself, and that a
// forgotten one is not used any more.
func TestStreams(t *testing.T) {
	r := newRig(t, 1, 0)
	var found []edges.Edge
	r.t.Trace = func(e edges.Edge) { found = append(found, e) }
	s, x := r.stream(0, "s"), r.alloc(0, 10)
	borrowed := must.Get(r.devices[0].BorrowStream(s.Handle()))
	b := r.t.Batch()
	b.Memset(s, x, 1, 10)
	b.Memset(borrowed, x, 1, 10)
	r.run(b)
	require.Empty(t, found)

	short := must.Get(r.devices[0].NewStream())
	b = r.t.Batch()
	b.Memset(short, x, 1, 10)
	p := must.Get(b.Run())
	require.NoError(t, p.Sync(r.ctx))
	p.Release()
	r.t.Forget(short)
	require.NoError(t, short.Close())
	b = r.t.Batch()
	b.Memset(s, x, 1, 10)
	r.run(b)
	require.NoError(t, r.close())
}

func TestRefused(t *testing.T) {
	r := newRig(t, 1, 0)
	s := r.stream(0, "s")
	other := edges.New(r.d)
	line, err := other.Host("other")
	require.NoError(t, err)
	for name, f := range map[string]func(b *edges.Batch){
		"no stream":       func(b *edges.Batch) { b.Memset(nil, 1, 1, 1) },
		"negative":        func(b *edges.Batch) { b.Copy(s, 1, 100, -1) },
		"no mode":         func(b *edges.Batch) { b.After(s, driver.Access{Ptr: 1, Len: 1}) },
		"another tracker": func(b *edges.Batch) { b.Host(line) },
	} {
		b := r.t.Batch()
		f(b)
		p, err := b.Run()
		require.ErrorIs(t, err, driver.ErrInvalid, name)
		require.Nil(t, p)
	}
	b := r.t.Batch()
	b.Launch(s, nil)
	p, err := b.Run()
	require.ErrorIs(t, err, driver.ErrInvalid)
	if p != nil {
		require.NoError(t, p.Sync(r.ctx))
		p.Release()
	}
	require.NoError(t, other.Close())
	require.NoError(t, other.Close())
	require.ErrorIs(t, must.Err(other.Host("late")), driver.ErrClosed)
	require.ErrorIs(t, must.Err(other.Batch().Run()), driver.ErrClosed)
	require.NoError(t, r.close())
}

// nothing is a stream and an event, and nobody a driver, that do nothing: what
// edges cost by themselves.
type nothing struct {
	driver.Stream
	driver.Event
	id uintptr
}

type nobody struct{ driver.Driver }

func (nobody) AllocHost(n int) (driver.HostMemory, error) { return &words{b: make([]byte, n)}, nil }

func (n *nothing) Handle() uintptr                                      { return n.id }
func (n *nothing) Device() tensor.Device                                { return tensor.Device{Type: tensor.CUDA} }
func (n *nothing) Copy(driver.Ptr, driver.Ptr, int) error               { return nil }
func (n *nothing) Memset(driver.Ptr, byte, int) error                   { return nil }
func (n *nothing) Record() (driver.Event, error)                        { return n, nil }
func (n *nothing) Wait(driver.Event) error                              { return nil }
func (n *nothing) WaitValue(driver.Ptr, uint32, driver.Condition) error { return nil }
func (n *nothing) WriteValue(driver.Ptr, uint32) error                  { return nil }
func (n *nothing) Done() (bool, error)                                  { return true, nil }
func (n *nothing) Sync(context.Context) error                           { return nil }
func (n *nothing) Release()                                             {}
func (n *nothing) Close() error                                         { return nil }

type words struct {
	driver.HostMemory
	b []byte
}

func (w *words) Ptr() driver.Ptr              { return 1 << 40 }
func (w *words) Load32(offset int) uint32     { return 1 << 30 }
func (w *words) Store32(offset int, v uint32) { driver.StoreWord(w.b, offset, v) }
func (w *words) Close() error                 { return nil }

// chunks returns a function that runs a host work's batch: chunks of a tensor go
// down, are the host's, and go up.
func chunks(tb testing.TB, n int) func() {
	t := edges.New(nobody{})
	line, err := t.Host("host")
	require.NoError(tb, err)
	caller, down, up := &nothing{id: 1}, &nothing{id: 2}, &nothing{id: 3}
	const size = 1 << 16
	data, slots := driver.Ptr(1<<30), driver.Ptr(1<<20)
	ctx := context.Background()
	return func() {
		b := t.Batch()
		b.Before(caller, driver.Writes(data, n*size))
		for i := range n {
			at, slot := driver.Ptr(i*size), driver.Ptr(i%3*size)
			b.Copy(down, slots+slot, data+at, size)
			b.Host(line, driver.Writes(slots+slot, size))
			b.Copy(up, data+at, slots+slot, size)
		}
		b.After(caller, driver.Writes(data, n*size))
		p, err := b.Run()
		if err != nil {
			tb.Fatal(err)
		}
		for i := range n {
			if err := p.Begin(ctx, 2+3*i); err != nil {
				tb.Fatal(err)
			}
			p.End(2 + 3*i)
		}
		if err := p.Sync(ctx); err != nil {
			tb.Fatal(err)
		}
		p.Release()
	}
}

// TestAllocs holds that the steady state allocates nothing.
func TestAllocs(t *testing.T) {
	run := chunks(t, 16)
	for range 10 {
		run()
	}
	require.Zero(t, testing.AllocsPerRun(100, run))
}

// TestGoroutines lets many goroutines use one tracker and the same streams, each
// with memory and a host of its own.
func TestGoroutines(t *testing.T) {
	const workers, rounds, n = 6, 20, 64
	r := newRig(t, 2, 3)
	streams := []driver.Stream{r.stream(0, "s0"), r.stream(0, "s1"), r.stream(1, "s2")}
	var group sync.WaitGroup
	errs := make([]error, workers)
	for i := range workers {
		x, h := r.alloc(i%2, n), r.host(n)
		line, err := r.t.Host(fmt.Sprint("host", i))
		require.NoError(t, err)
		group.Go(func() {
			want := byte(0)
			for round := range rounds {
				b := r.t.Batch()
				b.Memset(streams[round%3], x, byte(round), n)
				b.Copy(streams[(round+1)%3], h.Ptr(), x, n)
				turn := b.Host(line, driver.Writes(h.Ptr(), n))
				b.Copy(streams[(round+2)%3], x, h.Ptr(), n)
				last := b.Host(line, driver.Reads(h.Ptr(), n))
				p, err := b.Run()
				if err != nil {
					errs[i] = err
					return
				}
				if errs[i] = p.Begin(r.ctx, turn); errs[i] == nil {
					want = byte(round + i)
					for j := range h.Bytes() {
						h.Bytes()[j] += byte(i)
					}
				}
				p.End(turn)
				if err := p.Begin(r.ctx, last); err != nil {
					errs[i] = err
				}
				p.End(last)
				if err := p.Sync(r.ctx); err != nil {
					errs[i] = err
				}
				p.Release()
				if h.Bytes()[n-1] != want && errs[i] == nil {
					errs[i] = fmt.Errorf("worker %d, round %d: %d, want %d", i, round, h.Bytes()[n-1], want)
				}
				if errs[i] != nil {
					return
				}
			}
		})
	}
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	require.NoError(t, r.close())
}

// TestPast has a batch come after what a stream had been given when it recorded an event, and after nothing later.
func TestPast(t *testing.T) {
	r := newRig(t, 1, 1)
	s, caller, other := r.stream(0, "s"), r.stream(0, "caller"), r.stream(0, "other")
	x, gate := r.alloc(0, 10), r.host(4)
	gate.Store32(0, 0)
	require.NoError(t, caller.Memset(x, 1, 10))
	e := must.Get(caller.Record())
	unused := must.Get(other.Record())
	require.NoError(t, caller.WaitValue(gate.Ptr(), 1, driver.Equal))
	b := r.t.Batch()
	b.Past(caller, e, driver.Writes(x, 10))
	b.Past(other, unused, driver.Writes(x+10, 10)) // Run releases it
	b.Memset(s, x, 2, 10)
	p := must.Get(b.Run())
	require.NoError(t, p.Sync(r.ctx), "it waits for what came after the event")
	p.Release()
	gate.Store32(0, 1)
	must.As[*sim.Unused](t, r.close(), "nobody has waited for it")
}

// TestMark makes a stream wait for work that is enqueued later, or never.
func TestMark(t *testing.T) {
	for _, enqueued := range []bool{true, false} {
		r := newRig(t, 1, 1)
		s, caller, x := r.stream(0, "s"), r.stream(0, "caller"), r.alloc(0, 10)
		for range 100 { // words are used again
			m := must.Get(r.t.Mark())
			require.NoError(t, m.Order(caller))
			require.NoError(t, caller.Memset(x, 1, 10))
			e := must.Get(caller.Record())
			require.False(t, must.Get(e.Done()))
			if enqueued {
				b := r.t.Batch()
				b.Memset(s, x, 2, 10)
				b.Mark(s, m, driver.Writes(x, 10))
				r.run(b)
			}
			m.End()
			require.NoError(t, e.Sync(r.ctx))
			e.Release()
			b := r.t.Batch()
			b.Before(caller, driver.Writes(x, 10))
			b.Memset(s, x, 3, 10)
			b.After(caller, driver.Writes(x, 10))
			r.run(b)
		}
		require.NoError(t, r.t.Drain(r.ctx))
		require.NoError(t, r.close())
	}
}
