package group

import (
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestRoutes looks at the routes of all ranks together. Every rank but the root gets the
// data once, from a rank that has them.
func TestRoutes(t *testing.T) {
	for size := 1; size <= 33; size++ {
		for root := range size {
			for _, way := range []string{Flat, Tree, Chain} {
				have, edges, depth := map[int]int{root: 0}, 0, 0
				for next := []int{root}; len(next) > 0; {
					r := next[0]
					next = next[1:]
					for _, to := range RouteOf(way, r, size, root).To {
						require.NotContains(t, have, to, "%s, %d ranks, root %d", way, size, root)
						require.Equal(t, r, RouteOf(way, to, size, root).From, "%s, %d ranks, root %d, rank %d", way, size, root, to)
						have[to] = have[r] + 1
						depth = max(depth, have[to])
						next = append(next, to)
						edges++
					}
				}
				require.Len(t, have, size)
				require.Equal(t, size-1, edges)
				require.Equal(t, -1, RouteOf(way, root, size, root).From)
				switch way {
				case Flat:
					require.Equal(t, min(1, size-1), depth)
				case Tree:
					require.LessOrEqual(t, 1<<depth, max(2*size-1, 1), "%d ranks", size)
				case Chain:
					require.Equal(t, size-1, depth)
				}
			}
		}
	}
}

// TestAround is the one place where ranks are taken modulo their number (R15).
func TestAround(t *testing.T) {
	for n := 1; n <= 33; n++ {
		for i := -n; i < 2*n; i++ {
			want := i
			for want < 0 {
				want += n
			}
			for want >= n {
				want -= n
			}
			require.Equal(t, want, Around(i, n), "%d modulo %d", i, n)
		}
	}
}

// TestWays lets the ways race, one message of a rank at a time, and wants the
// fastest, or one that is not far from it.
func TestWays(t *testing.T) {
	for size := 2; size <= 17; size++ {
		for _, chunks := range []int{1, 2, 3, 4, 8, 20, 100} {
			took := map[string]int{}
			for _, way := range []string{Flat, Tree, Chain} {
				took[way] = race(way, size, chunks)
			}
			best := min(took[Flat], took[Tree], took[Chain])
			way := WayOf(size, chunks)
			require.LessOrEqual(t, took[way], best+bitsOf(size), "%d ranks, %d chunks: %s of %v", size, chunks, way, took)
			last := WayUpTo(size, chunks)
			if last < 0 {
				require.Equal(t, way, WayOf(size, math.MaxInt32), "%d ranks, %d chunks", size, chunks)
				continue
			}
			require.Equal(t, way, WayOf(size, last))
			require.NotEqual(t, way, WayOf(size, last+1))
		}
	}
}

func bitsOf(n int) (bits int) {
	for ; n > 1; n = (n + 1) / 2 {
		bits++
	}
	return bits
}

// race returns after how many rounds everybody has every chunk, when a rank can
// receive one and send one in a round.
func race(way string, size, chunks int) int {
	type job struct{ chunk, to int }
	todo := make([][]job, size)
	has := make([]int, size) // chunks, which come in order
	has[0] = chunks
	for r := range size {
		for k := range chunks {
			for _, to := range RouteOf(way, r, size, 0).To {
				todo[r] = append(todo[r], job{k, to})
			}
		}
	}
	for round := 1; ; round++ {
		var arrive []int
		for r := range size {
			if len(todo[r]) > 0 && todo[r][0].chunk < has[r] {
				arrive = append(arrive, todo[r][0].to)
				todo[r] = todo[r][1:]
			}
		}
		for _, r := range arrive {
			has[r]++
		}
		if slices.Min(has) == chunks {
			return round
		}
	}
}

// TestF09Beyond2GiB enqueues a broadcast of 5 GiB on streams that only take notes. On the
// way to the host, from the host, and between the tensors of a rank, the chunks have each
// byte of the tensor once (F-09).
func TestF09Beyond2GiB(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("memory of this size has no address here")
	}
	total := 5<<28 + 3 // elements of 4 bytes
	d := must.Get(sim.Open(sim.Config{}))
	defer func() { require.NoError(t, d.Close()) }()
	for _, rank := range []int{0, 1, 2} {
		tr := edges.New(d)
		b := &Engine{Config: Config{Rank: rank, Size: 3, Chunk: 2 << 20, Slots: 4}, Tracker: tr}
		b.line = must.Get(b.newLine())
		must.Get(b.line.relays(tr))
		var places []*place.Place
		streams := make([]*notes, 3)
		for i := range streams {
			ten := must.Get(tensor.OnDevice(tensor.Float32, huge{driver.Ptr(1+i) << 40, 4 * total}, total))
			streams[i] = &notes{device: i}
			p := place.Of(ten)
			p.Dev, p.Up = i, streams[i]
			places = append(places, p)
		}
		l := Leg{N: total, DType: tensor.Float32, Dst: places}
		down := &notes{}
		if rank == 0 {
			l.Src, l.Dst = places[0], places[1:]
			l.Src.Down = down
		}
		o := &Operation{B: b, line: b.line, Legs: []Leg{l}}
		o.Relay = NewOneToAll(RouteOf(Chain, rank, 3, 0), b.Chunks(&l))
		bytes := o.layout()
		require.Less(t, bytes, 400<<20)
		require.Equal(t, PiecesOf(1), o.pieces)
		require.Len(t, o.Relay.sent, o.pieces)
		staging := must.Get(d.AllocHost(bytes))
		o.staging = staging
		tile := func(s *notes, of func(c copied) driver.Ptr, base driver.Ptr) {
			next := base
			for _, c := range s.copies {
				if p := of(c); p >= base && p < base+driver.Ptr(4*total) {
					require.Equal(t, next, p)
					next += driver.Ptr(c.n)
				}
			}
			require.Equal(t, base+driver.Ptr(4*total), next)
		}
		o.temporary = new(temporary)
		batch := &o.feed
		batch.begin(o, places)
		o.fillOneToAll(batch)
		require.NoError(t, batch.end())
		dst := func(c copied) driver.Ptr { return c.dst }
		src := func(c copied) driver.Ptr { return c.src }
		if rank == 0 {
			tile(down, src, places[0].Base)
		} else {
			tile(streams[0], dst, places[0].Base)
		}
		for _, s := range append(streams, down) {
			for _, c := range s.copies {
				for _, q := range []driver.Ptr{c.dst, c.src} {
					if q < 1<<40 || q >= 1<<42 {
						require.GreaterOrEqual(t, q, staging.Ptr())
						require.LessOrEqual(t, q+driver.Ptr(c.n), staging.Ptr()+driver.Ptr(bytes))
					}
				}
			}
		}
		tile(streams[0], dst, places[2].Base)
		o.pending.Abort()
		require.NoError(t, staging.Close())
		require.NoError(t, tr.Close())
	}
}

type copied struct {
	dst, src driver.Ptr
	n        int
}

// notes is a stream that does nothing but to note its copies, and how many commands
// it is given.
type notes struct {
	device   int
	copies   []copied
	commands int
}

func (s *notes) note() error {
	s.commands++
	return nil
}

func (s *notes) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA, Index: s.device} }
func (s *notes) Handle() uintptr       { return 0 }
func (s *notes) Copy(dst, src driver.Ptr, n int) error {
	if n <= 0 {
		return fmt.Errorf("a copy of %d bytes", n)
	}
	s.copies = append(s.copies, copied{dst, src, n})
	return s.note()
}
func (s *notes) Memset(driver.Ptr, byte, int) error                   { return s.note() }
func (s *notes) Launch(*driver.Launch) error                          { return s.note() }
func (s *notes) Record() (driver.Event, error)                        { return noted{}, s.note() }
func (s *notes) Wait(driver.Event) error                              { return s.note() }
func (s *notes) WaitValue(driver.Ptr, uint32, driver.Condition) error { return s.note() }
func (s *notes) WriteValue(driver.Ptr, uint32) error                  { return s.note() }
func (s *notes) Err() error                                           { return nil }
func (s *notes) Close() error                                         { return nil }

type noted struct{}

func (noted) Done() (bool, error)        { return true, nil }
func (noted) Sync(context.Context) error { return nil }
func (noted) Release()                   {}

// huge is memory that only has an address.
type huge struct {
	ptr driver.Ptr
	n   int
}

func (h huge) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (h huge) Len() int              { return h.n }
func (h huge) Ptr() driver.Ptr       { return h.ptr }
