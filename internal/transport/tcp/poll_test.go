package tcp

import (
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// waiter waits for a request.
type waiter struct{ *transport.Request }

func (w waiter) Finished() bool { return len(w.Done()) > 0 }

// polling is how tests make ranks that poll whatever the number of CPUs.
func polling() Options {
	o := local
	o.Poll = pollFor
	return o
}

// fickle waits for something until it has been asked a number of times.
type fickle struct{ left int }

func (f *fickle) Finished() bool { f.left--; return f.left < 0 }

// restless is a mesh that somebody helps now and then, for a while, until it is closed.
type restless struct {
	*Mesh
	stop chan struct{}
	once sync.Once
	wg   sync.WaitGroup
}

func disturb(m *Mesh, seed uint64, helpers int) *restless {
	r := &restless{Mesh: m, stop: make(chan struct{})}
	for i := range helpers {
		r.wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			pause, w := time.NewTimer(0), new(fickle)
			for {
				select {
				case <-r.stop:
					return
				case <-pause.C:
				}
				w.left = rnd.IntN(50)
				m.PollUntil(w)
				pause.Reset(time.Duration(rnd.IntN(200)) * time.Microsecond)
			}
		})
	}
	return r
}

// Send and Recv post as who has several requests does.
func (r *restless) Send(x *transport.Request) { r.Post(nil, []*transport.Request{x}) }
func (r *restless) Recv(x *transport.Request) { r.Post([]*transport.Request{x}, nil) }

func (r *restless) Close() error {
	err := r.Mesh.Close()
	r.once.Do(func() { close(r.stop) })
	r.wg.Wait()
	return err
}

// Everything that a mesh promises it keeps while readers change all the time.
func TestHelpWhileOthersRead(t *testing.T) {
	t.Parallel()
	rnd := must.Rand(t)
	small := polling()
	small.Eager, small.Window = 512, minWindow
	small.Lanes, small.bulkyBytes, small.pieceBytes = 2, 64<<10, 20000
	transporttest.Run(t, transporttest.Config{
		New: func(t testing.TB, size int) []transport.Mesh {
			out := make([]transport.Mesh, size)
			for i, m := range join(t, size, small) {
				r := disturb(m, rnd.Uint64(), 2)
				t.Cleanup(func() { r.Close() })
				out[i] = r
			}
			return out
		},
		Kill:  kill,
		Sizes: []int{511, 512, 513, copyLimit, copyLimit + 1, readBuffer - headerLen, readBuffer, 512 << 10},
		No:    []transporttest.Feature{transporttest.Allocations}, // TestF34Mesh has them
	})
}

// help polls for r until it has ended, however often that is given up in between.
func waitPolling(t testing.TB, m *Mesh, r *transport.Request) error {
	t.Helper()
	for by := time.Now().Add(patience); len(r.Done()) == 0; {
		require.True(t, time.Now().Before(by), "request does not end")
		m.PollUntil(waiter{r})
	}
	return wait(t, r)
}

// blind reports whether nothing wakes the reader of the connection with a peer.
func blind(m *Mesh, peer int) bool {
	in := m.pairs[peer].in
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.paused
}

// After polling, messages that nobody waits for arrive, and a PING is answered.
func TestReadersComeBack(t *testing.T) {
	if _, ok := join(t, 2, polling())[0].pairs[1].first.conn.(pollable); !ok {
		t.Skip("connections cannot be polled here")
	}
	ms := join(t, 2, polling())
	late := recv(ms[0], 1, 7, make([]byte, 4))
	for i := range 100 {
		r := recv(ms[0], 1, 1, make([]byte, 4))
		send(ms[1], 0, 1, []byte{1, 2, 3, byte(i)})
		require.NoError(t, waitPolling(t, ms[0], r))
		require.EqualValues(t, i, r.Buf[3])
	}
	require.False(t, blind(ms[0], 1), "a request is left")
	send(ms[1], 0, 7, make([]byte, 4))
	require.NoError(t, wait(t, late))

	r := recv(ms[0], 1, 1, make([]byte, 4))
	send(ms[1], 0, 1, make([]byte, 4))
	require.NoError(t, waitPolling(t, ms[0], r))
	require.True(t, ms[1].Diagnose(patience)[0].Answered)
	eventually(t, "a reader", func() bool { return !blind(ms[0], 1) })
	r, s := recv(ms[1], 0, 2, make([]byte, 1<<20)), send(ms[0], 1, 2, make([]byte, 1<<20))
	require.NoError(t, wait(t, r))
	require.NoError(t, wait(t, s))
}

// Polling ends with the mesh, whatever ends it, and with the peer.
func TestHelpEnds(t *testing.T) {
	for name, end := range map[string]func(ms []*Mesh){
		"closed":      func(ms []*Mesh) { ms[0].Close() },
		"aborted":     func(ms []*Mesh) { ms[0].Abort(&transport.Fault{Kind: transport.FaultAborted, Reporter: 0}) },
		"peer dead":   func(ms []*Mesh) { kill(nil, meshes(ms), 1) },
		"peer closed": func(ms []*Mesh) { ms[1].Close() },
		"peer failed": func(ms []*Mesh) { ms[1].Abort(&transport.Fault{Kind: transport.FaultCanceled, Rank: 1, Reporter: 1}) },
	} {
		t.Run(name, func(t *testing.T) {
			o := polling()
			o.Poll = time.Hour
			ms := join(t, 2, o)
			var wg sync.WaitGroup
			for slot := range 3 {
				r := recv(ms[0], 1, uint64(slot), make([]byte, 4))
				wg.Go(func() {
					ms[0].PollUntil(waiter{r})
					if err := wait(t, r); err == nil {
						t.Error("a message from nowhere")
					}
				})
			}
			eventually(t, "who polls", func() bool { return ms[0].pollers.Load() == 3 })
			end(ms)
			wg.Wait()
		})
	}
}

// Polling allocates nothing.
func TestHelpAllocatesNothing(t *testing.T) {
	ms := join(t, 2, polling())
	out, in := req(0, 1, make([]byte, 100)), req(1, 1, make([]byte, 100))
	w := &waiter{in}
	allocs := testing.AllocsPerRun(200, func() {
		ms[0].Recv(in)
		ms[1].Send(out)
		<-out.Done()
		ms[0].PollUntil(w)
		<-in.Done()
	})
	require.Less(t, allocs, 1.0)
}

// TestShare: ranks poll for as much longer as there are more of them than CPUs. They have more
// connections within the host where each has many CPUs.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		given       time.Duration
		ranks, cpus int
		shares      bool
		want        time.Duration
		lanes       int
	}{
		{0, 1, 1, false, pollFor, 0},
		{0, 2, 16, false, pollFor, localLanes},
		{0, 2, 15, false, pollFor, 0},
		{0, 16, 16, false, pollFor, 0},
		{0, 17, 16, true, 2 * pollFor, 0},
		{0, 4, 2, true, 2 * pollFor, 0},
		{0, 8, 1, true, 8 * pollFor, 0},
		{time.Second, 2, 2, false, time.Second, 0},
		{time.Second, 3, 2, true, time.Second, 0},
		{-1, 3, 2, true, -1, 0},
	} {
		m := newMesh(0, c.ranks, Options{Poll: c.given})
		m.setShare(c.ranks, c.cpus)
		require.Equal(t, c.shares, m.sharesCPUs, "%+v", c)
		require.Equal(t, c.want, m.opts.Poll, "%+v", c)
		near, far := between("127.0.0.1", "127.0.0.1"), between("192.0.2.1", "192.0.2.2")
		require.Equal(t, c.lanes, m.lanes(near), "%+v", c)
		require.Equal(t, defaultLanes, m.lanes(far))
		for _, n := range []int{-1, 3} {
			m.opts.Lanes = n
			require.Equal(t, max(n, 0), m.lanes(near))
			require.Equal(t, max(n, 0), m.lanes(far))
		}
	}
}

// between is a connection with these ends.
func between(local, remote string) net.Conn {
	return placed{local: &net.TCPAddr{IP: net.ParseIP(local)}, remote: &net.TCPAddr{IP: net.ParseIP(remote)}}
}

type placed struct {
	net.Conn
	local, remote net.Addr
}

func (p placed) LocalAddr() net.Addr  { return p.local }
func (p placed) RemoteAddr() net.Addr { return p.remote }
