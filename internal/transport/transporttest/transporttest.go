package transporttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
)

// Feature is something that a mesh may lack.
type Feature int

const (
	// Misuse: a request for a rank that does not exist, or for the own rank, ends with an error
	// and does not change the mesh.
	Misuse Feature = iota
	// Allocations: in the steady state a message allocates nothing.
	Allocations
	// Early: a small send ends before its receive is posted.
	Early
)

// Config says what to test.
type Config struct {
	// New returns the meshes of a group, by rank, all connected.
	New func(t testing.TB, size int) []transport.Mesh

	// Kill makes a rank die as a process does. Nil leaves those tests out.
	Kill func(t testing.TB, ms []transport.Mesh, rank int)

	// Sizes are lengths of messages that matter to the mesh, besides the usual ones.
	Sizes []int

	// No lists what the mesh lacks.
	No []Feature
}

// patience bounds each wait. Only a broken mesh makes a test wait that long.
const patience = 60 * time.Second

type suite struct{ Config }

// Run tests the meshes that c.New makes.
func Run(t *testing.T, c Config) {
	s := suite{c}
	for _, test := range []struct {
		name string
		run  func(*testing.T)
		need []Feature
	}{
		{name: "Sizes", run: s.sizes},
		{name: "Order", run: s.order},
		{name: "Storm", run: s.storm},
		{name: "Any", run: s.any},
		{name: "Misuse", run: s.misuse, need: []Feature{Misuse}},
		{name: "One", run: s.one},
		{name: "LengthsDiffer", run: s.lengthsDiffer},
		{name: "Leave", run: s.leave},
		{name: "LeaveWhileNeeded", run: s.leaveWhileNeeded},
		{name: "Die", run: s.die},
		{name: "DieUnneeded", run: s.dieUnneeded},
		{name: "DieEarly", run: s.dieEarly, need: []Feature{Early}},
		{name: "DieWhileNeeded", run: s.dieWhileNeeded},
		{name: "Abort", run: s.abort},
		{name: "AbortUnderLoad", run: s.abortUnderLoad},
		{name: "Close", run: s.close},
		{name: "Diagnose", run: s.diagnose},
		{name: "Allocations", run: s.allocations, need: []Feature{Allocations}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, f := range test.need {
				if slices.Contains(c.No, f) {
					t.Skip("this mesh does not promise it")
				}
			}
			test.run(t)
		})
	}
}

func (s *suite) group(t testing.TB, size int) []transport.Mesh {
	ms := s.New(t, size)
	require.Len(t, ms, size)
	t.Cleanup(func() { closeAll(t, ms) })
	for r, m := range ms {
		require.Equal(t, r, m.Rank())
		require.Equal(t, size, m.Size())
		require.Nil(t, m.Fault())
	}
	return ms
}

func closeAll(t testing.TB, ms []transport.Mesh) {
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() {
			if err := m.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
}

// Request is a request with a buffer.
func Request(peer int, slot uint64, buf []byte) *transport.Request {
	r := transport.NewRequest()
	r.Peer, r.Slot, r.Buf = peer, slot, buf
	return r
}

// Send posts a message.
func Send(m transport.Mesh, peer int, slot uint64, buf []byte) *transport.Request {
	r := Request(peer, slot, buf)
	m.Send(r)
	return r
}

// Recv posts a receive.
func Recv(m transport.Mesh, peer int, slot uint64, buf []byte) *transport.Request {
	r := Request(peer, slot, buf)
	m.Recv(r)
	return r
}

// RecvAny posts a receive from any rank.
func RecvAny(m transport.Mesh, slot uint64, buf []byte) *transport.Request {
	r := Request(-1, slot, buf)
	m.RecvAny(r)
	return r
}

// Wait returns how r ended. It may be called from any goroutine.
func Wait(t testing.TB, r *transport.Request) error {
	select {
	case <-r.Done():
		return r.Err()
	case <-time.After(patience):
		t.Errorf("a request to or from rank %d on slot %#x does not end", r.Peer, r.Slot)
		return errors.New("no end")
	}
}

// FaultOf returns the fault that r ended with.
func FaultOf(t testing.TB, r *transport.Request) *transport.Fault {
	t.Helper()
	var f *transport.Fault
	require.ErrorAs(t, Wait(t, r), &f)
	return f
}

// Failed waits for the fault of a mesh.
func Failed(t testing.TB, m transport.Mesh) *transport.Fault {
	t.Helper()
	select {
	case <-m.Failed():
		require.NotNil(t, m.Fault())
		return m.Fault()
	case <-time.After(patience):
		require.FailNow(t, "the mesh does not fail")
		return nil
	}
}

// Eventually waits until ok is true.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			require.FailNow(t, what)
		case <-time.After(time.Millisecond):
		}
	}
}

// Pattern returns bytes that differ between seeds.
func Pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed)
	}
	return b
}

// sizes sends messages of every length both ways, with the receive or the send posted first.
// The buffers lie in larger ones, whose other bytes must not change.
func (s *suite) sizes(t *testing.T) {
	sizes := append([]int{0, 1, 4, 31, 32, 33, 4096, 65535, 65536, 65537, 1 << 20, 5<<20 + 3}, s.Sizes...)
	for _, first := range []string{"receive", "send"} {
		t.Run(first+" first", func(t *testing.T) {
			ms := s.group(t, 2)
			for i, n := range sizes {
				from := i % 2
				out, in := Pattern(n, i), bytes.Repeat([]byte{0xEE}, n+32)
				var a, b *transport.Request
				if first == "receive" {
					b = Recv(ms[1-from], from, 9, in[16:16+n])
					a = Send(ms[from], 1-from, 9, out)
				} else {
					a = Send(ms[from], 1-from, 9, out)
					b = Recv(ms[1-from], from, 9, in[16:16+n])
				}
				require.NoError(t, Wait(t, b), "%d bytes", n)
				require.NoError(t, Wait(t, a), "%d bytes", n)
				require.True(t, bytes.Equal(out, in[16:16+n]), "%d bytes", n)
				around := append(bytes.Clone(in[:16]), in[16+n:]...)
				require.Equal(t, bytes.Repeat([]byte{0xEE}, 32), around, "%d bytes: something around the buffer has changed", n)
			}
		})
	}
}

// order posts many messages of mixed sizes on one slot before it waits for any.
func (s *suite) order(t *testing.T) {
	for _, first := range []int{0, 1} {
		ms := s.group(t, 2)
		rng := rand.New(rand.NewPCG(must.Seed(t), 0))
		lengths := make([]int, 64)
		for i := range lengths {
			lengths[i] = []int{0, rng.IntN(100), rng.IntN(100 << 10), rng.IntN(1 << 20)}[rng.IntN(4)]
		}
		var sends, recvs []*transport.Request
		for turn := range 2 {
			for i, n := range lengths {
				if turn == first {
					sends = append(sends, Send(ms[0], 1, 3, Pattern(n, i)))
				} else {
					recvs = append(recvs, Recv(ms[1], 0, 3, make([]byte, n)))
				}
			}
		}
		for i := range lengths {
			require.NoError(t, Wait(t, recvs[i]))
			require.NoError(t, Wait(t, sends[i]))
			require.True(t, bytes.Equal(sends[i].Buf, recvs[i].Buf), "message %d", i)
		}
	}
}

// storm sends messages between all ranks on few slots, with receives from any rank among them.
// Each message contains its sender and its position among those of its sender, receiver and
// slot.
func (s *suite) storm(t *testing.T) {
	seed := must.Seed(t)
	for _, size := range testsize.Of([]int{2, 3, 5}, []int{2, 3, 5, 9}, []int{2, 3, 4, 5, 6, 7, 8, 9}) {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			s.stormOf(t, size, rand.New(rand.NewPCG(seed, uint64(size))))
		})
	}
}

type flow struct{ from, to, slot int }

func (s *suite) stormOf(t *testing.T, size int, rng *rand.Rand) {
	const slots, messages = 4, 40
	ms := s.group(t, size)
	lengths := make(map[flow][]int)
	for from := range size {
		for to := range size {
			if from == to {
				continue
			}
			for range messages {
				f := flow{from, to, rng.IntN(slots)}
				n := 16 + rng.IntN(64)
				if rng.IntN(16) == 0 {
					n = 16 + rng.IntN(300<<10)
				}
				if f.slot == 0 {
					n = 16 // receives from any rank cannot know a length beforehand
				}
				lengths[f] = append(lengths[f], n)
			}
		}
	}
	var wg sync.WaitGroup
	for f, ns := range lengths {
		batch := 1 + rng.IntN(8)
		wg.Go(func() { stormSend(t, ms[f.from], f, ns, batch) })
		if f.slot != 0 {
			wg.Go(func() { stormRecv(t, ms[f.to], f, ns, batch) })
		}
	}
	for to := range size {
		wg.Go(func() { stormAny(t, ms[to], to, lengths) })
	}
	wg.Wait()
	for _, m := range ms {
		require.Nil(t, m.Fault())
	}
}

func stamp(b []byte, f flow, i int) {
	binary.LittleEndian.PutUint64(b, uint64(f.from)<<32|uint64(f.slot))
	binary.LittleEndian.PutUint64(b[8:], uint64(i))
	copy(b[16:], Pattern(len(b)-16, f.from*31+i))
}

func sound(t testing.TB, r *transport.Request) bool {
	err := Wait(t, r)
	if err != nil {
		t.Errorf("request: %v", err)
	}
	return err == nil
}

func stormSend(t testing.TB, m transport.Mesh, f flow, ns []int, batch int) {
	var open []*transport.Request
	for i, n := range ns {
		b := make([]byte, n)
		stamp(b, f, i)
		open = append(open, Send(m, f.to, uint64(f.slot), b))
		if len(open) == batch {
			if !sound(t, open[0]) {
				return
			}
			open = open[1:]
		}
	}
	for _, r := range open {
		sound(t, r)
	}
}

func stormRecv(t testing.TB, m transport.Mesh, f flow, ns []int, batch int) {
	var open []*transport.Request
	check := func(i int) bool {
		want := make([]byte, ns[i])
		stamp(want, f, i)
		if !sound(t, open[i]) {
			return false
		}
		if !bytes.Equal(want, open[i].Buf) {
			t.Errorf("message %d of %v is another", i, f)
			return false
		}
		return true
	}
	for i, n := range ns {
		open = append(open, Recv(m, f.from, uint64(f.slot), make([]byte, n)))
		if i >= batch && !check(i-batch) {
			return
		}
	}
	for i := max(0, len(ns)-batch); i < len(ns); i++ {
		check(i)
	}
}

func stormAny(t testing.TB, m transport.Mesh, rank int, lengths map[flow][]int) {
	total := 0
	for f, ns := range lengths {
		if f.to == rank && f.slot == 0 {
			total += len(ns)
		}
	}
	next := make(map[int]int)
	var open []*transport.Request
	for i := range total + 3 {
		if i < total {
			open = append(open, RecvAny(m, 0, make([]byte, 16)))
		}
		if i < 3 {
			continue
		}
		r := open[i-3]
		if !sound(t, r) {
			return
		}
		from := int(binary.LittleEndian.Uint64(r.Buf) >> 32)
		if from != r.Peer {
			t.Errorf("Peer is %d, message is from %d", r.Peer, from)
		}
		if got := int(binary.LittleEndian.Uint64(r.Buf[8:])); got != next[from] {
			t.Errorf("message %d from %d, want %d", got, from, next[from])
		}
		next[from]++
	}
}

// any: receives from any rank take messages that have come or come later, small and large. They
// leave messages alone that belong to a receive from one rank.
func (s *suite) any(t *testing.T) {
	for _, n := range []int{0, 8, 1 << 20} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ms := s.group(t, 3)
			claimed := Recv(ms[0], 1, 5, make([]byte, n))
			a := Send(ms[1], 0, 5, Pattern(n, 1))
			require.NoError(t, Wait(t, claimed))
			require.NoError(t, Wait(t, a))
			require.True(t, bytes.Equal(a.Buf, claimed.Buf))

			// Both orders, from either rank.
			for _, from := range []int{2, 1} {
				late := RecvAny(ms[0], 6, make([]byte, n))
				b := Send(ms[from], 0, 6, Pattern(n, from))
				require.NoError(t, Wait(t, late))
				require.NoError(t, Wait(t, b))
				require.Equal(t, from, late.Peer)
				require.True(t, bytes.Equal(b.Buf, late.Buf))

				b = Send(ms[from], 0, 7, Pattern(n, from+9))
				early := RecvAny(ms[0], 7, make([]byte, n))
				require.NoError(t, Wait(t, early))
				require.NoError(t, Wait(t, b))
				require.Equal(t, from, early.Peer)
				require.True(t, bytes.Equal(b.Buf, early.Buf))

				// A younger receive from that rank comes first.
				late = RecvAny(ms[0], 8, make([]byte, n))
				named := Recv(ms[0], from, 8, make([]byte, n))
				b = Send(ms[from], 0, 8, Pattern(n, from+5))
				require.NoError(t, Wait(t, named))
				require.NoError(t, Wait(t, b))
				require.True(t, bytes.Equal(b.Buf, named.Buf))
				b = Send(ms[3-from], 0, 8, Pattern(n, from+7))
				require.NoError(t, Wait(t, late))
				require.NoError(t, Wait(t, b))
				require.Equal(t, 3-from, late.Peer)
				require.True(t, bytes.Equal(b.Buf, late.Buf))
			}
		})
	}
}

func (s *suite) misuse(t *testing.T) {
	ms := s.group(t, 2)
	b := make([]byte, 1)
	for _, r := range []*transport.Request{
		Send(ms[0], 0, 1, b), Recv(ms[0], 0, 1, b),
		Send(ms[0], 2, 1, b), Recv(ms[0], 2, 1, b),
		Send(ms[0], -1, 1, b), Recv(ms[0], -1, 1, b),
	} {
		require.ErrorContains(t, Wait(t, r), fmt.Sprintf("no peer %d", r.Peer))
	}
	require.Nil(t, ms[0].Fault())
	in := Recv(ms[1], 0, 1, make([]byte, 1))
	require.NoError(t, Wait(t, Send(ms[0], 1, 1, []byte{7})))
	require.NoError(t, Wait(t, in))
	require.Equal(t, []byte{7}, in.Buf)
}

func (s *suite) one(t *testing.T) {
	m := s.group(t, 1)[0]
	h := m.Diagnose(time.Second)
	require.Len(t, h, 1)
	require.True(t, h[0].Answered)
	r := RecvAny(m, 1, make([]byte, 1))
	require.NoError(t, m.Close())
	require.Error(t, Wait(t, r))
	require.ErrorIs(t, Wait(t, RecvAny(m, 1, nil)), transport.ErrClosed)
}

// lengthsDiffer: the receiver ends with a *SizeError, nothing is written outside its buffer,
// and the group ends on both sides with a mismatch.
func (s *suite) lengthsDiffer(t *testing.T) {
	const large = 1 << 20
	for _, c := range []struct{ sent, wanted int }{
		{5, 4}, {4, 5}, {0, 4}, {4, 0}, {100 << 10, 4}, {4, 100 << 10}, {large, large + 1}, {large + 1, large}, {large, 3}, {3, large},
	} {
		for _, first := range []string{"send", "receive", "any"} {
			t.Run(fmt.Sprintf("%d for %d, %s first", c.sent, c.wanted, first), func(t *testing.T) {
				ms := s.group(t, 2)
				in := bytes.Repeat([]byte{0xEE}, c.wanted+64)
				var r *transport.Request
				switch first {
				case "receive":
					r = Recv(ms[1], 0, 5, in[:c.wanted])
				case "any":
					r = RecvAny(ms[1], 5, in[:c.wanted])
				}
				o := Send(ms[0], 1, 5, Pattern(c.sent, 1))
				if first == "send" {
					r = Recv(ms[1], 0, 5, in[:c.wanted])
				}
				require.Equal(t, transport.FaultMismatch, FaultOf(t, r).Kind)
				for _, m := range ms {
					f := Failed(t, m)
					require.Equal(t, transport.FaultMismatch, f.Kind)
					require.Contains(t, []int{0, 1}, f.Rank)
				}
				Wait(t, o)
				require.Equal(t, bytes.Repeat([]byte{0xEE}, len(in)), in, "bytes were written")
			})
		}
	}
}

// leave: a goodbye alone is no fault. Other ranks go on, and get what the leaver has sent.
func (s *suite) leave(t *testing.T) {
	for _, n := range []int{4, 3 << 20} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ms := s.group(t, 3)
			in := make([]byte, n)
			r := Recv(ms[0], 2, 1, in)
			require.NoError(t, Wait(t, Send(ms[2], 0, 1, Pattern(n, 3))))
			require.NoError(t, ms[2].Close())
			require.NoError(t, Wait(t, r))
			require.True(t, bytes.Equal(Pattern(n, 3), in))

			Eventually(t, "goodbye", func() bool { return ms[0].Diagnose(patience)[2].Departed })
			a, b := RecvAny(ms[0], 4, in[:1]), Send(ms[1], 0, 4, []byte{5})
			require.NoError(t, Wait(t, a))
			require.NoError(t, Wait(t, b))
			require.Nil(t, ms[0].Fault())

			f := FaultOf(t, Send(ms[0], 2, 1, in))
			require.Equal(t, transport.FaultPeerLeft, f.Kind)
			require.Equal(t, 2, f.Rank)
			f = Failed(t, ms[1]) // which learns it from rank 0
			require.Equal(t, transport.FaultPeerLeft, f.Kind)
			require.Equal(t, 2, f.Rank)
		})
	}
}

func (s *suite) leaveWhileNeeded(t *testing.T) {
	for name, post := range map[string]func(m transport.Mesh) *transport.Request{
		"receive":       func(m transport.Mesh) *transport.Request { return Recv(m, 1, 1, make([]byte, 1)) },
		"large receive": func(m transport.Mesh) *transport.Request { return Recv(m, 1, 1, make([]byte, 2<<20)) },
		"large send":    func(m transport.Mesh) *transport.Request { return Send(m, 1, 1, make([]byte, 2<<20)) },
		"any":           func(m transport.Mesh) *transport.Request { return RecvAny(m, 1, make([]byte, 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			ms := s.group(t, 2)
			r := post(ms[0])
			require.NoError(t, ms[1].Close())
			f := FaultOf(t, r)
			require.Equal(t, transport.FaultPeerLeft, f.Kind)
			require.Equal(t, 1, f.Rank)
		})
		t.Run(name+" later", func(t *testing.T) {
			ms := s.group(t, 2)
			require.NoError(t, ms[1].Close())
			Eventually(t, "goodbye", func() bool { return ms[0].Diagnose(patience)[1].Departed })
			require.Nil(t, ms[0].Fault())
			require.Equal(t, transport.FaultPeerLeft, FaultOf(t, post(ms[0])).Kind)
		})
	}
}

// die: all ranks end at once with the number of the dead one, whatever they wait for.
func (s *suite) die(t *testing.T) {
	if s.Kill == nil {
		t.Skip("nobody can be killed here")
	}
	ms := s.group(t, 4)
	rs := []*transport.Request{
		Recv(ms[0], 3, 1, make([]byte, 4)),
		Recv(ms[0], 1, 1, make([]byte, 2<<20)),
		RecvAny(ms[0], 2, make([]byte, 4)),
		Send(ms[0], 2, 3, make([]byte, 2<<20)),
		Send(ms[1], 3, 3, make([]byte, 2<<20)),
		Recv(ms[2], 0, 9, make([]byte, 1)),
	}
	s.kill(t, ms, 3)
	for _, r := range rs {
		f := FaultOf(t, r)
		require.Equal(t, transport.FaultPeerDied, f.Kind)
		require.Equal(t, 3, f.Rank)
	}
	for _, m := range ms[:3] {
		require.Equal(t, 3, Failed(t, m).Rank)
	}
	require.Equal(t, 3, FaultOf(t, Recv(ms[0], 1, 1, nil)).Rank)
}

// dieUnneeded: a death alone is no fault. Other ranks go on, and get what the dead one has sent. A request that
// needs it ends the mesh on all ranks.
func (s *suite) dieUnneeded(t *testing.T) {
	if s.Kill == nil {
		t.Skip("nobody can be killed here")
	}
	for name, post := range needing {
		for _, n := range []int{0, 4, 3 << 20} {
			t.Run(fmt.Sprint(name, " ", n), func(t *testing.T) {
				ms := s.group(t, 3)
				told := make(chan int, 3)
				ms[0].OnDeath(func(f *transport.Fault) { told <- f.Rank })
				in, back := make([]byte, n), make([]byte, n)
				r := Recv(ms[0], 2, 1, in)
				o := Recv(ms[2], 0, 1, back)
				require.NoError(t, Wait(t, Send(ms[2], 0, 1, Pattern(n, 3))))
				require.NoError(t, Wait(t, Send(ms[0], 2, 1, Pattern(n, 4))))
				require.NoError(t, Wait(t, o))
				s.kill(t, ms, 2)
				require.NoError(t, Wait(t, r))
				require.True(t, bytes.Equal(Pattern(n, 3), in))
				for _, m := range ms[:2] {
					Eventually(t, "death", func() bool { h := m.Diagnose(patience)[2]; return h.Died && h.Departed })
				}
				require.Equal(t, 2, <-told)
				ms[0].OnDeath(func(f *transport.Fault) { told <- f.Rank })
				require.Equal(t, 2, <-told, "again")
				a, b := Recv(ms[0], 1, 4, in), Send(ms[1], 0, 4, Pattern(n, 5))
				require.NoError(t, Wait(t, a))
				require.NoError(t, Wait(t, b))
				require.Nil(t, ms[0].Fault())
				require.Nil(t, ms[1].Fault())

				waits := Recv(ms[1], 0, 7, in) // for one that waits for the dead rank
				for _, f := range []*transport.Fault{FaultOf(t, post(ms[0], 2)), FaultOf(t, waits)} {
					require.Equal(t, transport.FaultPeerDied, f.Kind)
					require.Equal(t, 2, f.Rank)
				}
			})
		}
	}
}

// kill kills a rank once it has said hello to all. On Gloo's wire a rank that has said nothing may be PyTorch's, and
// leaves.
func (s *suite) kill(t *testing.T, ms []transport.Mesh, rank int) {
	for r, m := range ms {
		if r != rank {
			Eventually(t, "hello", func() bool { return m.Diagnose(patience)[rank].Native })
		}
	}
	s.Kill(t, ms, rank)
}

// dieEarly: what a rank had sent before it died is received, also if nobody waited for it yet.
func (s *suite) dieEarly(t *testing.T) {
	if s.Kill == nil {
		t.Skip("nobody can be killed here")
	}
	for _, n := range []int{0, 4, 500} {
		for _, any := range []bool{false, true} {
			t.Run(fmt.Sprint(n, " ", any), func(t *testing.T) {
				ms := s.group(t, 3)
				for slot := range uint64(3) {
					require.NoError(t, Wait(t, Send(ms[2], 0, slot, Pattern(n, int(slot)))))
				}
				s.kill(t, ms, 2)
				Eventually(t, "death", func() bool { return ms[0].Diagnose(patience)[2].Died })
				for _, slot := range []uint64{2, 0, 1} {
					in := make([]byte, n)
					r := Request(2, slot, in)
					if any {
						ms[0].RecvAny(r)
					} else {
						ms[0].Recv(r)
					}
					require.NoError(t, Wait(t, r))
					require.Equal(t, 2, r.Peer)
					require.True(t, bytes.Equal(Pattern(n, int(slot)), in))
				}
				require.Nil(t, ms[0].Fault())
				f := FaultOf(t, Recv(ms[0], 2, 1, make([]byte, n)))
				require.Equal(t, transport.FaultPeerDied, f.Kind)
				require.Equal(t, 2, f.Rank)
			})
		}
	}
}

// needing are requests that need a peer.
var needing = map[string]func(m transport.Mesh, peer int) *transport.Request{
	"receive":       func(m transport.Mesh, peer int) *transport.Request { return Recv(m, peer, 11, make([]byte, 1)) },
	"large receive": func(m transport.Mesh, peer int) *transport.Request { return Recv(m, peer, 11, make([]byte, 2<<20)) },
	"send":          func(m transport.Mesh, peer int) *transport.Request { return Send(m, peer, 11, make([]byte, 1)) },
	"large send":    func(m transport.Mesh, peer int) *transport.Request { return Send(m, peer, 11, make([]byte, 2<<20)) },
	"any":           func(m transport.Mesh, peer int) *transport.Request { return RecvAny(m, 11, make([]byte, 1)) },
}

// dieWhileNeeded: a rank that waits for one that dies hears of it, and so does one that waits for that rank.
func (s *suite) dieWhileNeeded(t *testing.T) {
	if s.Kill == nil {
		t.Skip("nobody can be killed here")
	}
	for name, post := range needing {
		if name == "send" {
			continue // it may end at once
		}
		t.Run(name, func(t *testing.T) {
			ms := s.group(t, 3)
			waits := Recv(ms[1], 0, 7, make([]byte, 1))
			r := post(ms[0], 2)
			s.kill(t, ms, 2)
			for _, r := range []*transport.Request{r, waits} {
				f := FaultOf(t, r)
				require.Equal(t, transport.FaultPeerDied, f.Kind)
				require.Equal(t, 2, f.Rank)
			}
		})
	}
}

// abort reaches every rank with its reason in words, and only the first one counts.
func (s *suite) abort(t *testing.T) {
	ms := s.group(t, 4)
	for i := range ms { // ranks may have to hear of each other before they exchange words
		for j := range ms {
			if i != j {
				sent := Send(ms[i], j, 9, []byte("x"))
				require.NoError(t, Wait(t, Recv(ms[j], i, 9, make([]byte, 1))))
				require.NoError(t, Wait(t, sent))
			}
		}
	}
	cause := &transport.Fault{Kind: transport.FaultCanceled, Rank: 1, Reporter: 1, Op: 3, Seq: 42, Err: errors.New("why")}
	near := Recv(ms[1], 0, 1, make([]byte, 4))
	far := Recv(ms[3], 2, 1, make([]byte, 4<<20))
	ms[1].Abort(cause)
	ms[1].Abort(&transport.Fault{Kind: transport.FaultTimeout})
	require.Same(t, cause, FaultOf(t, near))
	require.Same(t, cause, ms[1].Fault())
	for _, f := range []*transport.Fault{FaultOf(t, far), Failed(t, ms[0]), Failed(t, ms[2])} {
		got := *f
		require.EqualError(t, f.Err, "why")
		got.Err = cause.Err
		require.Equal(t, *cause, got)
	}
	require.Same(t, cause, FaultOf(t, Send(ms[1], 0, 1, nil)))
	for _, m := range ms {
		require.NoError(t, m.Close())
		require.NoError(t, m.Close())
	}
	require.Error(t, Wait(t, RecvAny(ms[1], 1, nil)))
}

// abortUnderLoad ends a group in the middle of many messages of all sizes. Every
// request ends, and no buffer is touched after that (the race detector looks).
func (s *suite) abortUnderLoad(t *testing.T) {
	ms := s.group(t, 3)
	var wg sync.WaitGroup
	started := make(chan struct{}, 1<<16)
	for r, m := range ms {
		for peer := range ms {
			if peer == r {
				continue
			}
			for _, n := range []int{1, 10 << 10, 200 << 10, 3 << 20} {
				wg.Go(func() {
					out, in := make([]byte, n), make([]byte, n)
					for {
						a := Send(m, peer, uint64(n), out)
						b := Recv(m, peer, uint64(n), in)
						errA, errB := Wait(t, a), Wait(t, b)
						clear(out)
						clear(in)
						if errA != nil || errB != nil {
							return
						}
						select {
						case started <- struct{}{}:
						default:
						}
					}
				})
			}
		}
	}
	for range 200 {
		<-started
	}
	ms[0].Abort(&transport.Fault{Kind: transport.FaultAborted, Rank: 0, Reporter: 0, Op: 1, Seq: 7})
	wg.Wait()
	for _, m := range ms {
		f := Failed(t, m)
		require.Equal(t, transport.FaultAborted, f.Kind, "%v", f)
		require.Equal(t, 0, f.Rank)
		require.Equal(t, uint64(7), f.Seq)
	}
}

func (s *suite) close(t *testing.T) {
	ms := s.group(t, 2)
	rs := []*transport.Request{
		Recv(ms[0], 1, 1, make([]byte, 4)),
		Recv(ms[0], 1, 2, make([]byte, 4<<20)),
		RecvAny(ms[0], 3, make([]byte, 4)),
	}
	require.NoError(t, ms[0].Close())
	for _, r := range rs {
		require.ErrorIs(t, Wait(t, r), transport.ErrClosed)
	}
	require.ErrorIs(t, Wait(t, Send(ms[0], 1, 1, nil)), transport.ErrClosed)
	require.Nil(t, ms[0].Fault())
	require.NoError(t, ms[0].Close())
}

func (s *suite) diagnose(t *testing.T) {
	ms := s.group(t, 3)
	ms[0].SetProgress(4, 3)
	ms[1].SetProgress(7, 5)
	ms[2].SetProgress(9, 8)
	Eventually(t, "everybody answers", func() bool {
		return !slices.ContainsFunc(ms[0].Diagnose(patience), func(h transport.Health) bool { return !h.Answered })
	})
	all := ms[0].Diagnose(patience)
	all[0].Links = nil // its connections with the others
	require.Equal(t, []transport.Health{
		{Rank: 0, Native: true, Answered: true, Issued: 4, Completed: 3, Op: transport.NoOp},
		{Rank: 1, Native: true, Answered: true, Issued: 7, Completed: 5, Op: transport.NoOp},
		{Rank: 2, Native: true, Answered: true, Issued: 9, Completed: 8, Op: transport.NoOp},
	}, all)
	for range 5 {
		ms[0].Diagnose(patience, 1, 2)
	}
	time.Sleep(100 * time.Millisecond) // a rate is that of a tenth of a second at least
	for _, m := range []transport.Mesh{ms[0], ms[2]} {
		for _, l := range m.Diagnose(patience)[m.Rank()].Links {
			require.Less(t, l.Rate, uint64(32<<10), "rank %d has sent and received no data", m.Rank())
		}
	}
	require.NoError(t, ms[2].Close())
	Eventually(t, "rank 2 has left", func() bool { return ms[0].Diagnose(patience)[2].Departed })
	h := ms[0].Diagnose(patience)
	require.False(t, h[2].Answered)
	require.True(t, h[1].Answered)

	ms[0].Abort(&transport.Fault{Kind: transport.FaultAborted})
	require.False(t, ms[0].Diagnose(patience)[1].Answered)
}

func (s *suite) allocations(t *testing.T) {
	ms := s.group(t, 2)
	large := make([]byte, 3<<20)
	in := make([]byte, len(large))
	a, b := transport.NewRequest(), transport.NewRequest()
	slot := uint64(0)
	round := func(early, any bool, n int) func() {
		return func() {
			slot++
			a.Peer, a.Slot, a.Buf = 1, slot, large[:n]
			b.Peer, b.Slot, b.Buf = 0, slot, in[:n]
			if early {
				ms[0].Send(a)
			}
			if any {
				ms[1].RecvAny(b)
			} else {
				ms[1].Recv(b)
			}
			if !early {
				ms[0].Send(a)
			}
			<-b.Done()
			<-a.Done()
		}
	}
	for _, n := range []int{0, 4, 32 << 10, 200 << 10, len(large)} {
		for _, early := range []bool{false, true} {
			for _, any := range []bool{false, true} {
				f := round(early, any, n)
				runs := testsize.Of(100, 200, 1000)
				if n > 1<<20 {
					runs /= 10
				}
				for range runs {
					f()
				}
				require.Zero(t, testing.AllocsPerRun(runs, f), "%d bytes, send first: %v, from any: %v", n, early, any)
			}
		}
	}
	require.NoError(t, a.Err())
	require.NoError(t, b.Err())
}
