package shm

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

func newRing(size int, at uint32) (*writer, *reader) {
	b := make([]byte, size)
	words := make([]uint32, 2)
	words[0] = at
	return &writer{data: b, head: &words[0], full: &words[1], tail: at, seen: at},
		&reader{data: b, head: &words[0], full: &words[1], pos: at, told: at}
}

// TestRing sends random frames, some ahead of the reader, past the end of the
// numbers, and wants each to arrive as it was.
func TestRing(t *testing.T) {
	seed := must.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, size := range []int{minRing, maxRing} {
		w, r := newRing(size, -uint32(3*size))
		type sent struct {
			frame
			seed byte
		}
		var under []sent
		stuck := 0
		for n := range 20000 {
			if rng.IntN(2) == 0 {
				f := frame{kind: 1 + rng.Uint32N(3), id: rng.Uint32(), slot: rng.Uint64(), total: rng.Uint64()}
				f.size = rng.Uint32N([]uint32{1, 100, uint32(largest(size)) + 1}[rng.IntN(3)])
				room := w.room(int(f.size))
				if room == nil {
					require.NotEmpty(t, under, "an empty ring has room for every frame")
					stuck++
					continue
				}
				require.Len(t, room, int(f.size))
				for i := range room {
					room[i] = byte(n + i)
				}
				w.publish(f)
				under = append(under, sent{f, byte(n)})
				continue
			}
			f, data, ok := r.next()
			require.Equal(t, len(under) > 0, ok)
			if !ok {
				continue
			}
			require.Equal(t, under[0].frame, f)
			require.Len(t, data, int(f.size))
			for i, v := range data {
				if v != under[0].seed+byte(i) {
					require.FailNow(t, "other bytes", "frame %d, at %d of %d", n, i, len(data))
				}
			}
			r.done(frameSize(int(f.size)))
			under = under[1:]
		}
		require.Positive(t, stuck, "the ring was never full")
	}
}

// TestForeignFrames: what no rank writes is refused and reaches nothing outside the ring.
func TestForeignFrames(t *testing.T) {
	rng := must.Rand(t)
	for range 1000 {
		w, r := newRing(minRing, rng.Uint32()&^(grain-1))
		if rng.IntN(2) == 0 {
			r.pos &^= minRing - 1 // the beginning
		}
		for i := 0; i < len(w.data); i += 4 {
			binary.NativeEndian.PutUint32(w.data[i:], rng.Uint32()>>rng.IntN(32))
		}
		if rng.IntN(2) == 0 {
			binary.NativeEndian.PutUint32(w.data[r.pos&(minRing-1):], framePad)
		}
		for range 100 {
			f, data, ok := r.next()
			if !ok || f.kind == 0 {
				break
			}
			require.Len(t, data, int(f.size))
			r.done(frameSize(int(f.size)))
		}
	}
}

// TestForeignFirstFrame has a first frame with more data than any rank sends in one.
func TestForeignFirstFrame(t *testing.T) {
	words := make([]uint32, 2)
	w := &writer{data: make([]byte, maxRing), head: &words[0], full: &words[1]}
	const n = 200 << 10
	require.NotNil(t, w.room(n))
	w.publish(frame{kind: frameFirst, size: n, slot: 7, total: n})
	m := &Mesh{g: &Group{rank: 0, size: 2}, peers: make([]peer, 2)}
	p := &m.peers[1]
	p.rank, p.r = 1, reader{data: w.data, head: w.head, full: w.full}
	m.receive(p)
	require.NotNil(t, m.found)
	require.Equal(t, transport.FaultProtocol, m.found.Kind)
}

func TestRingSizes(t *testing.T) {
	for ranks := 2; ranks <= MaxRanks; ranks++ {
		n := ringSize(ranks)
		require.Zero(t, n&(n-1))
		require.LessOrEqual(t, max(firstBytes, restBytes), largest(n))
	}
	require.Less(t, int64(memorySize(MaxRanks, maxPiece)), int64(2<<30), "address space of the largest group")
}

func TestClasses(t *testing.T) {
	m := new(Mesh)
	for n := range eager + 1 {
		a := m.getArrival(n)
		require.Len(t, a.data, n)
		require.Less(t, a.class, stashClasses)
		m.putArrival(a)
	}
	require.LessOrEqual(t, m.spare, 3*eager)
}
