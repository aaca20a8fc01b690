package group

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// gib is a variable, as sizes of several are no constants everywhere.
var gib = 1 << 30

// TestPieces holds that pieces are all of a tensor, not larger than Options.Chunk where
// there may be that many, and few.
func TestPieces(t *testing.T) {
	b := &Engine{Config: Config{Chunk: 2 << 20}}
	for _, width := range []int{1, 2, 8, 17, 60, 300} {
		for _, size := range []int{1, 2, 8, 16} {
			for _, n := range []int{0, 1, 1000, 1 << 20, 120 << 20, math.MaxInt / 16} {
				grain := b.grain(size, width, n)
				pieces := n / grain
				if n%grain > 0 {
					pieces++
				}
				require.LessOrEqual(t, pieces, PiecesOf(width))
				if bytes := grain * size * width; bytes > b.Chunk && grain > 1 {
					require.Greater(t, n/(grain-1), PiecesOf(width)-1, "%d elements of %d bytes, %d tensors", n, size, width)
				}
			}
		}
		require.LessOrEqual(t, PiecesOf(width)*(width+3), max(mostCommands-spareCommands, DefaultSlots*(width+3)))
	}
	for pieces := 1; pieces <= PiecesOf(1); pieces++ {
		for m := 1; m < 100; m++ {
			at := spreads(pieces, m)
			require.LessOrEqual(t, (pieces+at-1)/at*2*(m-1), max(spreadCommands, 2*(m-1)))
		}
	}
}

// TestCommands enqueues operations of up to 8 GiB on streams that only take notes: none
// is given more than few commands.
func TestCommands(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("memory of this size has no address here")
	}
	d := must.Get(sim.Open(sim.Config{}))
	defer func() { require.NoError(t, d.Close()) }()
	staging := must.Get(d.AllocHost(4096))
	defer staging.Close()
	for _, c := range []struct {
		name      string
		src, dst  int  // tensors that are read, and written
		both      bool // the first is one
		width     int
		role      Route
		broadcast bool
		devices   int
		most      int
	}{
		{"reduce", 1, 0, false, 1, Route{}, false, 1, mostCommands},
		{"all-reduce", 1, 1, true, 1, Route{}, false, 1, mostCommands},
		{"all_gather of 8", 1, 8, false, 8, Route{}, false, 1, mostCommands},
		{"reduce_scatter of 8", 8, 1, false, 8, Route{}, false, 1, mostCommands},
		{"all_gather of 40", 1, 40, false, 40, Route{}, false, 1, mostCommands},
		{"reduce_scatter of 57", 57, 1, false, 57, Route{}, false, 1, mostCommands},
		{"broadcast, root", 1, 0, false, 1, Route{-1, []int{1, 2, 3}}, true, 1, mostCommands},
		{"broadcast, root, 3 tensors", 1, 2, false, 1, Route{-1, []int{1}}, true, 3, mostCommands},
		{"broadcast, alone", 1, 7, false, 1, Route{-1, nil}, true, 4, mostCommands},
		{"broadcast, on the way", 0, 1, false, 1, Route{0, []int{2, 3}}, true, 1, mostCommands},
		{"broadcast, on the way, 2 tensors", 0, 2, false, 1, Route{0, []int{2}}, true, 2, mostCommands},
		{"broadcast, on the way, 8 tensors", 0, 8, false, 1, Route{0, []int{2}}, true, 8, mostCommands},
		{"broadcast, last, 8 tensors of a device", 0, 8, false, 1, Route{0, nil}, true, 1, mostCommands},
		{"broadcast, last, 30 tensors", 0, 30, false, 1, Route{0, nil}, true, 3, mostCommands},
	} {
		for _, total := range []int{1, 1000, 1 << 20, 100 << 20, gib, 8*gib + 5} {
			n := total / 2 / max(c.width, 1)
			tr := edges.New(d)
			b := &Engine{Config: Config{Rank: 1, Size: 4, Chunk: 2 << 20, Slots: 4}, Tracker: tr}
			if c.broadcast && c.role.From < 0 && c.role.To == nil {
				b.Size = 1
			}
			b.line = must.Get(b.newLine())
			must.Get(b.line.relays(tr))
			var streams []*notes
			stream := func(i int) *notes {
				for len(streams) <= i {
					streams = append(streams, &notes{})
				}
				return streams[i]
			}
			next := 0
			at := func() *place.Place {
				ten := must.Get(tensor.OnDevice(tensor.Float16, huge{driver.Ptr(1+next) << 40, 2 * n}, n))
				p := place.Of(ten)
				p.Dev = next % c.devices
				p.Down, p.Up = stream(2*p.Dev), stream(2*p.Dev+1)
				next++
				return p
			}
			o := &Operation{B: b, Ctx: t.Context(), line: b.line, Width: c.width, temporary: new(temporary)}
			if b.Size == 1 {
				var ts []*tensor.Tensor
				var all []*place.Place
				for range c.src + c.dst {
					all = append(all, at())
					ts = append(ts, all[len(all)-1].T)
				}
				o.Within(ts, nil)
				for i := range all {
					o.Legs[i].Dst[0] = all[i]
				}
			} else if c.broadcast {
				l := Leg{N: n, DType: tensor.Float16}
				if c.src > 0 {
					l.Src = at()
				}
				for range c.dst {
					l.Dst = append(l.Dst, at())
				}
				o.Legs = []Leg{l}
				o.Relay = NewOneToAll(c.role, b.Chunks(&l))
			} else if c.both {
				p := at()
				o.Legs = []Leg{{N: n, DType: tensor.Float16, Src: p, Dst: []*place.Place{p}}}
			} else {
				for range c.src {
					o.Legs = append(o.Legs, Leg{N: n, DType: tensor.Float16, Src: at()})
				}
				for range c.dst {
					o.Legs = append(o.Legs, Leg{N: n, DType: tensor.Float16, Dst: []*place.Place{at()}})
				}
			}
			o.layout()
			o.staging = hugeHost{staging}
			require.NoError(t, o.enqueue())
			for i, s := range streams {
				require.LessOrEqual(t, s.commands, c.most, "%s, %d bytes: stream %d", c.name, total, i)
				require.LessOrEqual(t, s.commands, o.commands, "%s, %d bytes: stream %d", c.name, total, i)
			}
			require.EqualValues(t, o.commands, b.queued.Load())
			written := make(map[driver.Ptr]int)
			for _, s := range streams {
				for _, x := range s.copies {
					written[x.dst>>40] += x.n
				}
			}
			for i := range o.Legs {
				for _, p := range o.Legs[i].Dst {
					if b.Size == 1 && i == 0 {
						continue // the source
					}
					require.Equal(t, 2*n, written[p.Base>>40], "%s, %d bytes", c.name, total)
				}
			}
			o.pending.Abort()
			o.pending.Release()
			require.NoError(t, tr.Close())
		}
	}
}

// hugeHost is page-locked memory that only has an address.
type hugeHost struct{ driver.HostMemory }

func (hugeHost) Ptr() driver.Ptr { return 1 << 30 }

// TestRoom lets an operation wait for those before it, until there is room, its context
// ends, its time is over or the group has failed. Messages do not wait.
func TestRoom(t *testing.T) {
	b := &Engine{line: &line{}}
	ctx, cancel := context.WithCancelCause(t.Context())
	after := func(d time.Duration) *Operation {
		return &Operation{B: b, Ctx: ctx, timeout: d, deadline: time.Now().Add(d), line: b.line}
	}
	o := after(time.Hour)
	o.occupy(int(MostQueued))
	require.NoError(t, o.room())
	o.occupy(1)
	var ended sync.WaitGroup
	ended.Go(func() { b.queued.Add(-1) })
	require.NoError(t, o.room())
	ended.Wait()
	o.occupy(1)
	message := &Operation{B: b, Ctx: ctx, line: &line{}}
	message.occupy(100)
	require.NoError(t, message.room())
	require.EqualValues(t, MostQueued+1, b.queued.Load())
	short := after(time.Millisecond)
	require.ErrorIs(t, short.room(), work.ErrTimeout)
	cause := errors.New("enough")
	cancel(cause)
	require.ErrorIs(t, o.room(), cause)
	b.fault.Store(&cause)
	require.ErrorIs(t, after(time.Hour).room(), cause)
}

// TestDoneAfterFailure: the end of a turn is told although the operation's last command has failed meanwhile. Else the
// line that sends the chunk on would wait for it, and the group would fail only at the operation's timeout.
func TestDoneAfterFailure(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Devices: 1, Quiet: true}))
	tracker := edges.New(d)
	receive, relay := must.Get(tracker.Host("receive")), must.Get(tracker.Host("relay"))
	slot := must.Get(d.AllocHost(10))
	b := tracker.Batch()
	o := &Operation{turns: []hostTurn{{0, b.Host(receive, driver.Writes(slot.Ptr(), 10))}}}
	sendOn := b.Host(relay, driver.Reads(slot.Ptr(), 10))
	o.pending = must.Get(b.Run())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, o.pending.Begin(ctx, o.turns[0].number))
	o.feedErr = errors.New("the last copy failed")
	o.done(&o.turns, 0)
	require.NoError(t, o.pending.Begin(ctx, sendOn))
	o.pending.End(sendOn)
	require.NoError(t, o.pending.Sync(ctx))
	o.pending.Release()
	require.NoError(t, errors.Join(slot.Close(), tracker.Close(), d.Close()))
}
