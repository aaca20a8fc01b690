package wire

import (
	"bytes"
	"math"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come at once.
const patience = time.Minute

// What the conformance suite has of requests.
var (
	req, send, recv, recvAny = transporttest.Request, transporttest.Send, transporttest.Recv, transporttest.RecvAny
	wait, failed, faultOf    = transporttest.Wait, transporttest.Failed, transporttest.FaultOf
	eventually, pattern      = transporttest.Eventually, transporttest.Pattern
)

// patient are limits for peers that read, however slow the machine is.
var patient = mesh.Limits{Close: patience, Step: patience}

// tcpPair returns both ends of a loopback connection.
func tcpPair(t testing.TB) (net.Conn, net.Conn) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return must.Get(net.Dial("tcp", l.Addr().String())), must.Get(l.Accept())
}

// group returns the meshes of a whole group over loopback.
func group(t testing.TB, size int) []*Mesh { return changed(t, size, func(*Mesh) {}) }

// changed is group with meshes that a function changes before they are connected.
func changed(t testing.TB, size int, change func(m *Mesh)) []*Mesh {
	ms := make([]*Mesh, size)
	for i := range ms {
		ms[i] = New(i, size, Options{})
		change(ms[i])
		m := ms[i]
		t.Cleanup(func() { m.Close() })
	}
	for i := range ms {
		for j := range i {
			a, b := tcpPair(t)
			require.NoError(t, ms[i].Attach(j, a))
			require.NoError(t, ms[j].Attach(i, b))
		}
	}
	return ms
}

// alone returns rank 0 of two and the bare connection that its peer has.
func alone(t testing.TB) (*Mesh, net.Conn) {
	m := New(0, 2, Options{})
	a, b := tcpPair(t)
	require.NoError(t, m.Attach(1, a))
	t.Cleanup(func() { b.Close(); m.Close() })
	return m, b
}

// pending asserts that r has not ended.
func pending(t testing.TB, r *transport.Request) {
	t.Helper()
	select {
	case <-r.Done():
		require.FailNow(t, "request has ended", "%v", r.Err())
	default:
	}
}

// state returns how many slots and notices m holds.
func state(m *Mesh) (slots, notices int) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, p := range m.pairs {
		if p != nil {
			slots += len(p.slots)
			notices += p.notices
		}
	}
	return slots + m.AnySlots(), notices
}

// TestGrows: a receive with Grows takes memory for what has come, not for what was announced.
func TestGrows(t *testing.T) {
	grows := func(m *Mesh, n int) *transport.Request {
		r := req(1, 7, nil)
		r.Grows = n
		m.Recv(r)
		return r
	}
	for _, n := range []int{1, growBytes, growBytes + 1, 5*growBytes + 3} {
		ms := group(t, 2)
		message := make([]byte, n)
		for i := range message {
			message[i] = byte(i ^ i>>8)
		}
		r := grows(ms[0], n)
		require.NoError(t, wait(t, send(ms[1], 0, 7, message)))
		require.NoError(t, wait(t, r))
		require.True(t, bytes.Equal(message, r.Buf))
	}
	ms := group(t, 2)
	r := grows(ms[0], 3)
	send(ms[1], 0, 7, make([]byte, 4))
	require.ErrorContains(t, wait(t, r), "sent 4 bytes on slot 0x7 where 3 were expected")

	m, peer := alone(t)
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	const n = math.MaxInt - 100
	r = grows(m, n)
	put(t, peer, note(opSendReady, 7, n), data(7, n), make([]byte, growBytes+1))
	peer.Close()
	require.Equal(t, transport.FaultPeerDied, faultOf(t, r).Kind)
	runtime.ReadMemStats(&now)
	require.Less(t, now.TotalAlloc-before.TotalAlloc, uint64(16*growBytes))
}
