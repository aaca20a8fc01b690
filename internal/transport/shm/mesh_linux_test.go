package shm_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// fabric makes meshes of ranks in this process, each with a mapping of its own,
// whose faults go through a mem.Fabric.
type fabric struct {
	*mem.Fabric
	names map[transport.Mesh]string
	n     atomic.Int64
}

func newFabric() *fabric {
	return &fabric{Fabric: mem.NewFabric(), names: make(map[transport.Mesh]string)}
}

func (f *fabric) meshes(t testing.TB, size int, o shm.MeshOptions) []transport.Mesh {
	gs := join(t, size, shm.Options{})
	name := fmt.Sprint(f.n.Add(1))
	ms := make([]transport.Mesh, size)
	for r, g := range gs {
		rest := must.Get(f.Join(name, r, size))
		m := must.Get(shm.NewMesh(g, rest, o))
		ms[r] = m
		f.names[m] = name
		t.Cleanup(func() { m.Close() })
	}
	return ms
}

// die lets a rank die: it does nothing more, and the other mesh notices.
func (f *fabric) die(_ testing.TB, ms []transport.Mesh, rank int) {
	ms[rank].(*shm.Mesh).Die()
	f.Kill(f.names[ms[rank]], rank)
}

func TestF34Mesh(t *testing.T) {
	f := newFabric()
	transporttest.Run(t, transporttest.Config{
		New:   func(t testing.TB, size int) []transport.Mesh { return f.meshes(t, size, shm.MeshOptions{}) },
		Kill:  f.die,
		Sizes: []int{8 << 10, 8<<10 + 1, 24 << 10, 24<<10 - 1, 64<<10 - 64, 256 << 10},
	})
}

// TestFarRing: messages to a CPU that is far arrive as they were sent, whatever their length and place in the ring.
func TestFarRing(t *testing.T) {
	seed := must.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	ms := newFabric().lazy(t, 2)
	for _, m := range ms {
		m.PretendFar()
		m.MoveInBackground()
	}
	sent := make([]byte, 300<<10)
	for i := range sent {
		sent[i] = byte(rng.Uint32())
	}
	for i := range 200 {
		at := rng.IntN(1000)
		part := sent[at:][:rng.IntN([]int{100, 20 << 10, 70 << 10, 250 << 10}[rng.IntN(4)])]
		got := make([]byte, len(part))
		r := post(ms[1].Recv, 0, uint64(i), got)
		s := post(ms[0].Send, 1, uint64(i), part)
		ms[0].MoveInBackground()
		ms[1].MoveInBackground()
		<-r.done
		<-s.done
		require.NoError(t, errors.Join(r.Err(), s.Err()))
		require.True(t, bytes.Equal(part, got), "message %d of %d bytes", i, len(part))
	}
}

func (f *fabric) lazy(t testing.TB, size int) []*shm.Mesh {
	ms := make([]*shm.Mesh, size)
	for r, m := range f.meshes(t, size, shm.MeshOptions{Lazy: true}) {
		ms[r] = m.(*shm.Mesh)
	}
	return ms
}

func post(how func(*transport.Request), peer int, slot uint64, buf []byte) *flag {
	f := newFlag()
	f.Peer, f.Slot, f.Buf = peer, slot, buf
	how(&f.Request)
	return f
}

// TestHelp: goroutines that wait move each other's messages, none of them alone.
func TestHelp(t *testing.T) {
	seed := must.Seed(t)
	for _, size := range []int{2, 3, 5} {
		ms := newFabric().lazy(t, size)
		var wg sync.WaitGroup
		for _, m := range ms {
			for peer := range size {
				for slot := range uint64(3) {
					if peer == m.Rank() {
						continue
					}
					wg.Go(func() {
						a, b := uint64(m.Rank()), uint64(peer)
						rng := rand.New(rand.NewPCG(seed, min(a, b)<<32|max(a, b)<<16|slot)) // the same on both sides
						for i := range testsize.Of(10, 20, 60) {
							n := rng.IntN([]int{1, 100, 20 << 10, 1 << 20}[rng.IntN(4)])
							out, in := input(seed, i, m.Rank(), n), make([]byte, n)
							var s, r *flag
							if i%2 == 0 {
								s = post(m.Send, peer, slot, out)
							}
							r = post(m.Recv, peer, slot, in)
							if s == nil {
								s = post(m.Send, peer, slot, out)
							}
							for _, f := range []*flag{r, s} {
								if err := f.waitPolling(m); err != nil {
									t.Errorf("message %d: %v", i, err)
									return
								}
							}
							if !bytes.Equal(in, input(seed, i, peer, n)) {
								t.Errorf("message %d of %d bytes is another", i, n)
								return
							}
						}
					})
				}
			}
		}
		wg.Wait()
	}
}

// TestBothSidesLarge: ranks send before they receive, more than the rings hold.
func TestBothSidesLarge(t *testing.T) {
	const size, n = 3, 5 << 20
	ms := newFabric().lazy(t, size)
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() {
			var out, in []*flag
			for peer := range size {
				if peer != m.Rank() {
					out = append(out, post(m.Send, peer, 0, input(1, peer, m.Rank(), n)))
				}
			}
			for peer := range size {
				if peer != m.Rank() {
					in = append(in, post(m.Recv, peer, 0, make([]byte, n)))
				}
			}
			for _, f := range append(out, in...) {
				if err := f.waitPolling(m); err != nil {
					t.Error(err)
					return
				}
			}
			for _, f := range in {
				if !bytes.Equal(f.Buf, input(1, m.Rank(), f.Peer, n)) {
					t.Errorf("rank %d got something else from rank %d", m.Rank(), f.Peer)
				}
			}
		})
	}
	wg.Wait()
}

// TestNobodyHelps: after a kick the mesh's goroutine moves messages, and it comes
// back after somebody else has driven.
func TestNobodyHelps(t *testing.T) {
	ms := newFabric().lazy(t, 2)
	const n = 3 << 20
	for i := range 20 {
		s, r := post(ms[0].Send, 1, 1, input(2, i, 0, n)), post(ms[1].Recv, 0, 1, make([]byte, n))
		ms[0].MoveInBackground()
		ms[1].MoveInBackground()
		// In between each rank helps with a message of another slot.
		var wg sync.WaitGroup
		for me, m := range ms {
			wg.Go(func() {
				out, in := post(m.Send, 1-me, 2, []byte{byte(i)}), post(m.Recv, 1-me, 2, make([]byte, 1))
				if err := in.waitPolling(m); err != nil {
					t.Error(err)
				}
				if err := out.waitPolling(m); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		<-s.done
		<-r.done
		require.NoError(t, r.Err())
		require.True(t, bytes.Equal(s.Buf, r.Buf))
	}
}

// TestFlood: what nobody expects does not pile up at the receiver, and is all
// there in the end, in order.
func TestFlood(t *testing.T) {
	const messages, n = 20_000, 1 << 10
	ms := newFabric().lazy(t, 2)
	sent := make([]*flag, messages)
	want := make([]byte, n)
	for i := range sent {
		b := bytes.Clone(want)
		b[0], b[1], b[2] = byte(i), byte(i>>8), byte(i>>16)
		sent[i] = post(ms[0].Send, 1, 7, b)
	}
	before := inUse()
	// Rank 1 has to look at all of them to find this one.
	last := post(ms[0].Send, 1, 8, []byte("last"))
	r := post(ms[1].Recv, 0, 8, make([]byte, 4))
	ms[0].MoveInBackground()
	require.NoError(t, r.waitPolling(ms[1]))
	require.Equal(t, "last", string(r.Buf))
	require.Less(t, inUse()-before, int64(8<<20), "of %d bytes", messages*n)
	for i := range sent {
		b := make([]byte, n)
		require.NoError(t, post(ms[1].Recv, 0, 7, b).waitPolling(ms[1]))
		require.Equal(t, i, int(b[0])|int(b[1])<<8|int(b[2])<<16)
	}
	for _, f := range append(sent, last) {
		require.NoError(t, f.waitPolling(ms[0]))
	}
}

func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// overAfter stops helping at a time.
type overAfter struct {
	*flag
	end time.Time
}

func (o overAfter) Expired() bool { return time.Now().After(o.end) }

// TestStopPolling: a polling goroutine returns when it is told to, and its message goes on.
func TestStopPolling(t *testing.T) {
	ms := newFabric().lazy(t, 2)
	r := post(ms[0].Recv, 1, 1, make([]byte, 3))
	ms[0].PollUntil(overAfter{r, time.Now().Add(20 * time.Millisecond)}, nil)
	require.False(t, r.Finished())
	done := make(chan struct{})
	close(done)
	ms[0].PollUntil(r, done)
	require.False(t, r.Finished())
	require.NoError(t, post(ms[1].Send, 0, 1, []byte("yes")).waitPolling(ms[1]))
	ms[0].PollOnce()
	require.NoError(t, r.waitPolling(ms[0]))
	require.Equal(t, "yes", string(r.Buf))
}

// TestCloseWhilePolling: polling goroutines return before the memory is unmapped.
func TestCloseWhilePolling(t *testing.T) {
	for i := range 20 {
		ms := newFabric().lazy(t, 2)
		var wg sync.WaitGroup
		for range 3 {
			r := post(ms[0].Recv, 1, 1, make([]byte, 3))
			wg.Go(func() {
				if err := r.waitPolling(ms[0]); err != transport.ErrClosed {
					t.Errorf("%v, want ErrClosed", err)
				}
			})
		}
		if i%2 == 0 {
			runtime.Gosched()
		}
		require.NoError(t, ms[0].Close())
		wg.Wait()
	}
}

// TestGroupEnds: messages end with the group's collectives, though nobody says why.
func TestGroupEnds(t *testing.T) {
	gs := join(t, 2, shm.Options{})
	var ms []*shm.Mesh
	f := mem.NewFabric()
	for r, g := range gs {
		rest := must.Get(f.Join("", r, 2))
		m := must.Get(shm.NewMesh(g, rest, shm.MeshOptions{}))
		t.Cleanup(func() { m.Close() })
		ms = append(ms, m)
		require.ErrorContains(t, must.Err(shm.NewMesh(g, rest, shm.MeshOptions{})), "has a mesh already")
	}
	r := post(ms[0].Recv, 1, 1, make([]byte, 3))
	gs[1].Abort(nil)
	err := r.waitPolling(ms[0])
	fault := must.As[*transport.Fault](t, err)
	require.Equal(t, transport.FaultAborted, fault.Kind)
	require.Equal(t, 1, fault.Rank)
	<-ms[1].Failed()

	rest, err := f.Join("other", 0, 3)
	require.NoError(t, err)
	_, err = shm.NewMesh(gs[0], rest, shm.MeshOptions{})
	require.ErrorContains(t, err, "rank 0 of 2 in memory, rank 0 of 3")
}

// TestSendToWhoHasLeft: a message to a rank that has left ends with that, also when other
// goroutines move messages meanwhile.
func TestSendToWhoHasLeft(t *testing.T) {
	for range 50 {
		ms := newFabric().lazy(t, 2)
		require.NoError(t, ms[1].Close())
		var over atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			for !over.Load() {
				ms[0].PollOnce()
			}
		})
		s := post(ms[0].Send, 1, 1, []byte("hello"))
		err := s.waitPolling(ms[0])
		over.Store(true)
		wg.Wait()
		f := must.As[*transport.Fault](t, err)
		require.Equal(t, transport.FaultPeerLeft, f.Kind)
		require.Equal(t, 1, f.Rank)
		require.NoError(t, ms[0].Close())
	}
}

// TestManyRanks: rings are small where there are many.
func TestManyRanks(t *testing.T) {
	const size, n = 40, 300 << 10
	ms := newFabric().lazy(t, size)
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() {
			to, from := (m.Rank()+1)%size, (m.Rank()+size-1)%size
			s := post(m.Send, to, 0, input(3, 0, m.Rank(), n))
			r := post(m.RecvAny, -1, 0, make([]byte, n))
			for _, f := range []*flag{s, r} {
				if err := f.waitPolling(m); err != nil {
					t.Error(err)
				}
			}
			if r.Peer != from || !bytes.Equal(r.Buf, input(3, 0, from, n)) {
				t.Errorf("rank %d got something else, from rank %d", m.Rank(), r.Peer)
			}
		})
	}
	wg.Wait()
}
