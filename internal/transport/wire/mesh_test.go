package wire

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

func TestSendRecv(t *testing.T) {
	sizes := []int{0, 1, 4, 47, 48, 49, readBuffer - headerLen, readBuffer, readBuffer + 1, gatherBytes + 1, 8<<20 + 3}
	for _, order := range []string{"receive first", "send first"} {
		t.Run(order, func(t *testing.T) {
			ms := group(t, 2)
			for i, n := range sizes {
				out, in := pattern(n, i), make([]byte, n)
				var s, r *transport.Request
				if order == "receive first" {
					r = recv(ms[1], 0, 9, in)
					s = send(ms[0], 1, 9, out)
				} else {
					s = send(ms[0], 1, 9, out)
					eventually(t, "SEND_READY", func() bool { _, n := state(ms[1]); return n == 1 })
					pending(t, s)
					r = recv(ms[1], 0, 9, in)
				}
				require.NoError(t, wait(t, r))
				require.NoError(t, wait(t, s))
				require.True(t, bytes.Equal(out, in), "%d bytes", n)
			}
			for _, m := range ms {
				slots, notices := state(m)
				require.Zero(t, slots)
				require.Zero(t, notices)
			}
		})
	}
}

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed)
	}
	return b
}

func TestRequestsBeforeConnection(t *testing.T) {
	a, b := New(0, 2, Options{}), New(1, 2, Options{})
	defer a.Close()
	defer b.Close()
	in := make([]byte, 5)
	s, r := send(a, 1, 1, []byte("early")), recv(b, 0, 1, in)
	x, y := tcpPair(t)
	require.NoError(t, a.Attach(1, x))
	require.NoError(t, b.Attach(0, y))
	require.NoError(t, wait(t, s))
	require.NoError(t, wait(t, r))
	require.Equal(t, "early", string(in))

	x, y = tcpPair(t)
	defer y.Close()
	require.ErrorContains(t, a.Attach(1, x), "connected already")
}

// A rank of this library that stops before it has said hello counts as one that does not answer.
func TestSilentBeforeHello(t *testing.T) {
	for _, all := range []bool{true, false} {
		m := New(0, 2, Options{Native: all})
		x, y := tcpPair(t)
		require.NoError(t, m.Attach(1, x))
		h := m.Diagnose(time.Millisecond)[1]
		require.Equal(t, all, h.Native)
		require.False(t, h.Answered)
		y.Close()
		m.Close()
	}
}

// Receives from any rank take messages in the order of their announcement,
// and leave alone what a receive from that rank has claimed.
func TestRecvAnyOrder(t *testing.T) {
	ms := group(t, 3)
	in := make([]byte, 1)
	claimed := recv(ms[0], 1, 5, in)
	a := send(ms[1], 0, 5, []byte{1})
	require.NoError(t, wait(t, claimed))
	require.NoError(t, wait(t, a))

	noticed := func(n int) func() bool {
		return func() bool { _, k := state(ms[0]); return k == n }
	}
	b := send(ms[2], 0, 5, []byte{2})
	eventually(t, "first notice", noticed(1))
	c := send(ms[1], 0, 5, []byte{3})
	eventually(t, "second notice", noticed(2))
	for _, want := range []struct{ peer, value int }{{2, 2}, {1, 3}} {
		r := recvAny(ms[0], 5, in)
		require.NoError(t, wait(t, r))
		require.Equal(t, want.peer, r.Peer)
		require.Equal(t, want.value, int(in[0]))
	}
	require.NoError(t, wait(t, b))
	require.NoError(t, wait(t, c))

	late := recvAny(ms[0], 6, in)
	d := send(ms[2], 0, 6, []byte{4})
	require.NoError(t, wait(t, late))
	require.NoError(t, wait(t, d))
	require.Equal(t, 2, late.Peer)
}

func TestMisuse(t *testing.T) {
	ms := group(t, 2)
	b := make([]byte, 1)
	require.ErrorContains(t, wait(t, send(ms[0], 0, 1, b)), "no peer 0")
	require.ErrorContains(t, wait(t, recv(ms[0], 2, 1, b)), "no peer 2")
	require.ErrorContains(t, wait(t, recv(ms[0], -1, 1, b)), "no peer -1")
	require.ErrorContains(t, wait(t, send(ms[0], 1, 0xC1<<56, b)), "reserved")
	require.ErrorContains(t, wait(t, recvAny(ms[0], 0xC1<<56|7, b)), "reserved")
	require.Nil(t, ms[0].Fault())

	one := New(0, 1, Options{})
	require.ErrorContains(t, wait(t, recvAny(one, 1, b)), "group of one")
	require.NoError(t, one.Close())
	require.NoError(t, one.Close())
	require.ErrorIs(t, wait(t, recvAny(one, 1, b)), transport.ErrClosed)
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	ms := group(t, 2)
	small, large := make([]byte, 4), make([]byte, 512<<10)
	in := make([]byte, len(large))
	s, r := transport.NewRequest(), transport.NewRequest()
	slot := uint64(0)
	round := func(any bool, buf []byte) {
		slot++
		s.Peer, s.Slot, s.Buf = 1, slot, buf
		r.Peer, r.Slot, r.Buf = 0, slot, in[:len(buf)]
		if any {
			ms[1].RecvAny(r)
		} else {
			ms[1].Recv(r)
		}
		ms[0].Send(s)
		<-r.Done()
		<-s.Done()
	}
	for name, f := range map[string]func(){
		"small": func() { round(false, small) },
		"large": func() { round(false, large) },
		"any":   func() { round(true, small) },
	} {
		for range 2000 {
			f()
		}
		require.Zero(t, testing.AllocsPerRun(2000, f), name)
	}
	require.NoError(t, r.Err())
}

// Slots are forgotten once they are empty, whichever side came first.
func TestSlotsAreForgotten(t *testing.T) {
	ms := group(t, 2)
	b := make([]byte, 1)
	for slot := range uint64(1000) {
		s := send(ms[0], 1, slot, b)
		require.NoError(t, wait(t, recv(ms[1], 0, slot, b)))
		require.NoError(t, wait(t, s))
	}
	for _, m := range ms {
		slots, notices := state(m)
		require.Zero(t, slots)
		require.Zero(t, notices)
	}
}

func TestDiagnose(t *testing.T) {
	ms := group(t, 3)
	ms[1].SetProgress(7, 5)
	ms[2].SetProgress(9, 8)
	ms[0].SetProgress(4, 3)
	// HELLOs may still be on their way.
	eventually(t, "everybody answers", func() bool {
		for _, h := range ms[0].Diagnose(patience) {
			if !h.Answered {
				return false
			}
		}
		return true
	})
	all := ms[0].Diagnose(patience)
	all[0].Links = nil // its connections with the others
	require.Equal(t, []transport.Health{
		{Rank: 0, Native: true, Answered: true, Issued: 4, Completed: 3, Op: transport.NoOp},
		{Rank: 1, Native: true, Answered: true, Issued: 7, Completed: 5, Op: transport.NoOp},
		{Rank: 2, Native: true, Answered: true, Issued: 9, Completed: 8, Op: transport.NoOp},
	}, all)

	require.NoError(t, ms[2].Close())
	eventually(t, "rank 2 has left", func() bool { return ms[0].Diagnose(patience)[2].Departed })
	h := ms[0].Diagnose(patience)
	require.False(t, h[2].Answered)
	require.True(t, h[1].Answered)

	ms[0].Abort(&transport.Fault{Kind: transport.FaultAborted})
	require.False(t, ms[0].Diagnose(patience)[1].Answered)
}

func BenchmarkPingPong(b *testing.B) {
	for _, n := range []int{4, 64 << 10} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			ms := group(b, 2)
			type side struct{ s, r *transport.Request }
			var sides [2]side
			for i := range sides {
				sides[i] = side{req(1-i, 1, make([]byte, n)), req(1-i, 1, make([]byte, n))}
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				ms[1].Recv(sides[1].r)
				for i := range b.N {
					<-sides[1].r.Done()
					if i+1 < b.N {
						ms[1].Recv(sides[1].r)
					}
					ms[1].Send(sides[1].s)
					<-sides[1].s.Done()
				}
			}()
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				ms[0].Recv(sides[0].r)
				ms[0].Send(sides[0].s)
				<-sides[0].s.Done()
				<-sides[0].r.Done()
			}
			<-done
		})
	}
}

func BenchmarkBandwidth(b *testing.B) {
	const n = 64 << 20
	ms := group(b, 2)
	out, in := req(1, 1, make([]byte, n)), req(0, 1, make([]byte, n))
	b.SetBytes(n)
	b.ReportAllocs()
	for b.Loop() {
		ms[1].Recv(in)
		ms[0].Send(out)
		<-in.Done()
		<-out.Done()
	}
}
