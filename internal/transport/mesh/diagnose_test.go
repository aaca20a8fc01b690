package mesh

import (
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

// TestPack: what a PING and a PONG carry arrives, in the units of the wire.
func TestPack(t *testing.T) {
	a := Pong{Links: []transport.Link{
		{Peer: 0, Waits: true, Answered: true, Queued: true, RTT: 640 * time.Microsecond, Rate: 1 << 20},
		{Peer: 9, Silent: 2 * time.Second},
		{Peer: 3, Waits: true, Silent: time.Hour, Rate: 1 << 40},
		{Peer: 4, RTT: 1, Rate: 1},
		{Peer: 5},
		{Peer: 6}, // one too many
	}}
	var got Pong
	require.NoError(t, got.Unpack(a.Pack(), 10))
	require.Equal(t, []transport.Link{
		a.Links[0], a.Links[1],
		{Peer: 3, Waits: true, Silent: 65535 * silentUnit, Rate: 65535 << 10},
		{Peer: 4, RTT: rttUnit, Rate: 1 << 10},
		{Peer: 5},
	}, got.Links)
	a, got = Pong{Links: []transport.Link{
		{Peer: 1, RTT: 640 * time.Microsecond, Rate: 100 << 10, Long: 72 * time.Millisecond},
		{Peer: 2, Silent: 2 * time.Second, Rate: 1 << 40, Long: time.Hour},
		{Peer: 3, Long: 1},
	}}, Pong{}
	require.NoError(t, got.Unpack(a.Pack(), 10))
	require.Equal(t, []transport.Link{
		a.Links[0],
		{Peer: 2, Silent: 2 * time.Second, Rate: 255 << 10, Long: 255 * longUnit},
		{Peer: 3, Long: longUnit},
	}, got.Links)
	for _, bad := range []uint64{10 | linkIs, 1, 1 | linkIs | 1<<31} {
		require.ErrorContains(t, new(Pong).Unpack([MaxLinks]uint64{bad}, 10), "PONG with the link", "%#x", bad)
	}
	for _, p := range []Ping{{7, [2]int{-1, -1}, false}, {8, [2]int{0, 9}, true}} {
		about, deep := p.Pack()
		q, err := UnpackPing(p.Round, about, deep, 10)
		require.NoError(t, err)
		require.Equal(t, p, q)
	}
	for _, bad := range []struct {
		about uint64
		deep  uint32
	}{{0, 2}, {11, 0}, {11 << 32, 1}, {1 << 63, 1}} {
		_, err := UnpackPing(1, bad.about, bad.deep, 10)
		require.ErrorContains(t, err, "PING about", "%+v", bad)
	}
}

// TestUnsure: a rank that gets late answers from all other hosts does not trust the end of a connection. Quick
// answers of its own host change nothing.
func TestUnsure(t *testing.T) {
	const prompt, slow = time.Millisecond, 800 * time.Millisecond
	const untimed = -1 // it was asked, and has answered only earlier questions
	type peer struct {
		near bool
		rtt  time.Duration // 0: it was not asked
	}
	for _, c := range []struct {
		name  string
		peers []peer
		want  bool
	}{
		{"nobody was asked", []peer{{}, {}, {}}, false},
		{"all are late", []peer{{rtt: slow}, {rtt: slow}, {rtt: slow}}, true},
		{"all are a bit late", []peer{{rtt: 37 * time.Millisecond}, {rtt: slow}, {rtt: 84 * time.Millisecond}}, true},
		{"one answers too late", []peer{{rtt: slow}, {rtt: untimed}, {rtt: slow}}, true},
		{"one answers", []peer{{rtt: slow}, {rtt: slow}, {rtt: prompt}}, false},
		{"a rank of this host answers", []peer{{near: true, rtt: prompt}, {rtt: slow}, {rtt: slow}}, true},
		{"one other host is late", []peer{{near: true, rtt: prompt}, {rtt: slow}}, false},
		{"one host, all are late", []peer{{near: true, rtt: slow}, {near: true, rtt: slow}}, true},
		{"one host, one answers", []peer{{near: true, rtt: slow}, {near: true, rtt: prompt}}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Base
			b.Init(0, len(c.peers)+1, Limits{}, func() {})
			for i, x := range c.peers {
				p := &Peer{Rank: i + 1, Native: true, Near: x.near, base: &b}
				if x.rtt != 0 {
					p.askedAt, p.heard = time.Now(), time.Now()
				}
				if x.rtt > 0 {
					p.answers, p.rtts[0] = 1, x.rtt
				}
				b.peers[i+1] = p
			}
			b.Mu.Lock()
			defer b.Mu.Unlock()
			require.Equal(t, c.want, b.peers[1].Unsure(io.EOF))
			require.True(t, b.peers[1].Unsure(syscall.ETIMEDOUT))
		})
	}
}
