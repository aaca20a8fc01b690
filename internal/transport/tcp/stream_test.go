package tcp

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

// wirePair is two streams and what is between them: frames in their order, and
// pieces that overtake them and each other.
type wirePair struct {
	t      testing.TB
	s      [2]*stream
	frames [2][]sentFrame // by sender
	pieces [2][]sentFrame
	orders uint64
}

type sentFrame struct {
	f    frame
	data []byte
	req  *transport.Request
}

func newWirePair(t testing.TB, eager int, window int64) *wirePair {
	w := &wirePair{t: t}
	for i := range w.s {
		w.s[i] = new(stream)
		w.s[i].init(i, 1-i, eager, window, new(blocks), new(calls))
	}
	return w
}

// take moves what stream i wants to transmit into the wire.
func (w *wirePair) take(i int) {
	s := w.s[i]
	for ; s.frames.len() > 0; s.frames.pop() {
		it := *s.frames.front()
		f := sentFrame{f: it.f}
		if it.req != nil {
			f.data = append([]byte{}, it.req.Buf...)
			it.req.Complete(nil)
		}
		w.frames[i] = append(w.frames[i], f)
	}
	for _, q := range []*fifo[parcel]{&s.pieces, &s.bulk} {
		for q.len() > 0 {
			r, f := cut(q, 700)
			w.pieces[i] = append(w.pieces[i], sentFrame{f, append([]byte{}, r.Buf[f.slot:f.slot+f.length]...), r})
		}
	}
}

// deliver gives the other side the next frame of i, through the bytes that it
// has on the wire.
func (w *wirePair) deliver(i int) *transport.Fault {
	x := w.frames[i][0]
	w.frames[i] = w.frames[i][1:]
	var b [headerLen]byte
	x.f.put(b[:])
	f, err := parseFrame(b[:])
	require.NoError(w.t, err)
	require.Equal(w.t, x.f, f)
	s := w.s[1-i]
	if fault := s.addCredit(f.credit); fault != nil {
		return fault
	}
	w.orders++
	switch f.kind {
	case kEager:
		r, fault := s.onEager(f)
		if fault != nil {
			return fault
		}
		if r != nil {
			copy(r.Buf, x.data)
			s.giveBack(cost(f.length))
			r.Complete(nil)
			return nil
		}
		block := s.blocks.get(int(f.length))
		copy(block, x.data)
		return s.store(f.slot, arrival{length: f.length, block: block, here: true, order: w.orders})
	case kOffer:
		return s.onOffer(f, w.orders)
	case kStart:
		return s.onStart(f)
	case kGrant:
		return s.onGrant(f)
	}
	return nil
}

// land gives the other side piece k of i, unless it has come before its START.
func (w *wirePair) land(i, k int) (bool, *transport.Fault) {
	x := w.pieces[i][k]
	to, ready, fault := w.s[1-i].claim(x.f)
	if fault != nil || !ready {
		return false, fault
	}
	w.pieces[i] = append(w.pieces[i][:k:k], w.pieces[i][k+1:]...)
	copy(to, x.data)
	w.s[1-i].arrived(x.f, nil)
	w.s[i].wrote(x.req, x.f.length)
	return true, nil
}

func (w *wirePair) idle() bool {
	for i := range w.s {
		w.take(i)
		if len(w.frames[i]) > 0 || len(w.pieces[i]) > 0 {
			return false
		}
	}
	return true
}

// TestStreamAlone: while another message is offered or being written, a message goes over another
// connection from bulky bytes on, otherwise from alone bytes on.
func TestStreamAlone(t *testing.T) {
	const bulky, alone = 2000, 3000
	w := newWirePair(t, 500, 4096)
	s := w.s[0]
	s.bulky, s.alone = bulky, alone
	pass := func() {
		for i := range w.s {
			for w.frames[i] = append(w.frames[i], queued(w.s[i])...); len(w.frames[i]) > 0; {
				require.Nil(t, w.deliver(i))
			}
		}
	}
	for name, c := range map[string]struct {
		offered      bool // sends are posted before receives
		lengths      []int
		pieces, bulk int
	}{
		"one":                  {false, []int{bulky}, 1, 0},
		"one, offered":         {true, []int{alone - 1}, 1, 0},
		"one, long":            {false, []int{alone}, 0, 1},
		"one, long, offered":   {true, []int{alone}, 0, 1},
		"several":              {false, []int{bulky, bulky, bulky - 1}, 2, 1},
		"several, offered":     {true, []int{bulky, bulky, bulky - 1}, 1, 2},
		"several, a long one":  {false, []int{alone, bulky, bulky}, 0, 3},
		"several, short":       {true, []int{bulky - 1, bulky - 1}, 2, 0},
		"one, after all these": {false, []int{bulky}, 1, 0},
	} {
		recvs := func() {
			for i, n := range c.lengths {
				require.Nil(t, w.s[1].recv(req(0, uint64(i), make([]byte, n))))
			}
		}
		if !c.offered {
			recvs()
			pass()
			pass()
		}
		for i, n := range c.lengths {
			require.Nil(t, s.send(req(1, uint64(i), make([]byte, n))))
		}
		if c.offered {
			pass()
			recvs()
			pass()
		}
		require.Equal(t, [2]int{c.pieces, c.bulk}, [2]int{s.pieces.len(), s.bulk.len()}, name)
		pass()
		for !w.idle() {
			for i := range w.s {
				for len(w.frames[i]) > 0 {
					require.Nil(t, w.deliver(i))
				}
				for len(w.pieces[i]) > 0 {
					_, fault := w.land(i, 0)
					require.Nil(t, fault)
				}
			}
		}
		require.Zero(t, s.sending, name)
	}
}

// queued takes the frames that a stream has queued.
func queued(s *stream) (frames []sentFrame) {
	for ; s.frames.len() > 0; s.frames.pop() {
		frames = append(frames, sentFrame{f: s.frames.front().f})
	}
	return frames
}

// Random sends and receives on both sides, with frames and pieces delivered in
// any order that connections allow: every message meets its receive, no side
// holds more than the window, and nothing is left.
func TestStreamRandom(t *testing.T) {
	rng := must.Rand(t)
	for round := range 60 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			const eager, window = 500, 4096
			w := newWirePair(t, eager, window)
			if rng.IntN(2) == 0 {
				for _, s := range w.s {
					s.bulky = 2000
					s.alone = 2000 + rng.IntN(2000)
				}
			}
			type half struct {
				slot uint64
				n    int
				seed byte
			}
			var todo [2][2][]half // by sender, sends and receives
			for i := range 2 {
				for k := range 300 {
					h := half{uint64(rng.IntN(3)), []int{0, rng.IntN(20), eager, eager + 1, rng.IntN(4000)}[rng.IntN(5)], byte(k)}
					todo[i][0] = append(todo[i][0], h)
					todo[i][1] = append(todo[i][1], h)
				}
			}
			// Receives are posted in another order than sends, but for those on a slot.
			type recv struct {
				r    *transport.Request
				seed byte
			}
			var recvs []recv
			var sends []*transport.Request
			skew := rng.IntN(3)
			for {
				i := rng.IntN(2)
				switch action := rng.IntN(8); {
				case action == 0 && len(todo[i][0]) > 0 && (skew != 1 || len(todo[i][1]) == 0 || rng.IntN(20) == 0):
					h := todo[i][0][0]
					todo[i][0] = todo[i][0][1:]
					r := req(1-i, h.slot, make([]byte, h.n))
					for j := range r.Buf {
						r.Buf[j] = h.seed + byte(j)
					}
					require.Nil(t, w.s[i].send(r))
					sends = append(sends, r)
				case action == 1 && len(todo[i][1]) > 0 && (skew != 2 || len(todo[i][0]) == 0 || rng.IntN(20) == 0):
					h := todo[i][1][0]
					todo[i][1] = todo[i][1][1:]
					r := req(i, h.slot, make([]byte, h.n))
					require.Nil(t, w.s[1-i].recv(r))
					recvs = append(recvs, recv{r, h.seed})
				case action < 5:
					w.take(i)
					if len(w.frames[i]) > 0 {
						require.Nil(t, w.deliver(i))
					}
				default:
					if n := len(w.pieces[i]); n > 0 {
						_, fault := w.land(i, rng.IntN(n))
						require.Nil(t, fault)
					}
				}
				for _, s := range w.s {
					if _, bytes, _ := s.in.Waiting(); bytes > s.used || s.used > s.window {
						t.Fatalf("%d bytes wait, %d are used of %d", bytes, s.used, s.window)
					}
				}
				if len(todo[0][0])+len(todo[0][1])+len(todo[1][0])+len(todo[1][1]) == 0 && w.idle() {
					break
				}
			}
			for k, r := range recvs {
				select {
				case <-r.r.Done():
					require.NoError(t, r.r.Err())
				default:
					t.Fatalf("receive %d of %d bytes on slot %d has not ended", k, len(r.r.Buf), r.r.Slot)
				}
				for j, b := range r.r.Buf {
					if b != r.seed+byte(j) {
						t.Fatalf("byte %d of receive %d is %d, want %d", j, k, b, r.seed+byte(j))
					}
				}
			}
			for k, r := range sends {
				select {
				case <-r.Done():
					require.NoError(t, r.Err())
				default:
					t.Fatalf("send %d has not ended", k)
				}
			}
			for _, s := range w.s {
				require.False(t, s.needsPeer())
				require.Zero(t, s.landed)
				require.Zero(t, s.sending)
				require.Zero(t, s.used)
				require.Equal(t, s.window, s.credit+w.s[1-s.rank].owed)
				v, b, c := s.out.Waiting()
				require.Zero(t, v+int(b)+c+s.offers+s.asked+s.granted)
			}
		})
	}
}

// Frames that no rank sends are faults, and leave buffers alone.
func TestStreamRefuses(t *testing.T) {
	const eager, window = 1000, 256 << 10
	large := func(s *stream) *transport.Request {
		r := req(1, 5, make([]byte, 2000))
		s.recv(r)
		return r
	}
	for name, f := range map[string]func(s *stream) *transport.Fault{
		"EAGER too large": func(s *stream) *transport.Fault {
			_, f := s.onEager(frame{kind: kEager, length: eager + 1})
			return f
		},
		"EAGER huge": func(s *stream) *transport.Fault {
			_, f := s.onEager(frame{kind: kEager, length: 1<<64 - 1})
			return f
		},
		"EAGER beyond the window": func(s *stream) *transport.Fault {
			for {
				if _, f := s.onEager(frame{kind: kEager, slot: 9, length: eager}); f != nil {
					return f
				}
				if f := s.store(9, arrival{length: eager, block: make([]byte, eager), here: true}); f != nil {
					return f
				}
			}
		},
		"empty EAGERs beyond the window": func(s *stream) *transport.Fault {
			for range window/messageCost + 1 {
				if _, f := s.onEager(frame{kind: kEager, slot: 9}); f != nil {
					return f
				}
				if f := s.store(9, arrival{here: true}); f != nil {
					return f
				}
			}
			return nil
		},
		"OFFERs without end": func(s *stream) *transport.Fault {
			for i := range uint64(maxOffers + 1) {
				if f := s.onOffer(frame{kind: kOffer, slot: i, length: 1 << 60}, i); f != nil {
					return f
				}
			}
			return nil
		},
		"GRANTs without end": func(s *stream) *transport.Fault {
			for i := range uint64(maxGrants + 1) {
				if f := s.onGrant(frame{kind: kGrant, slot: i, length: 1 << 60}); f != nil {
					return f
				}
			}
			return nil
		},
		"small GRANT without an OFFER": func(s *stream) *transport.Fault {
			return s.onGrant(frame{kind: kGrant, slot: 1, length: 10})
		},
		"START without a GRANT": func(s *stream) *transport.Fault {
			return s.onStart(frame{kind: kStart, slot: 5, length: 2000})
		},
		"START with another GRANT": func(s *stream) *transport.Fault {
			large(s)
			return s.onStart(frame{kind: kStart, slot: 5, length: 2000, handle: 1})
		},
		"START for a small receive": func(s *stream) *transport.Fault {
			s.recv(req(1, 5, make([]byte, 10)))
			return s.onStart(frame{kind: kStart, slot: 5, length: 10})
		},
		"credit from nowhere": func(s *stream) *transport.Fault { return s.addCredit(1) },
		"credit huge":         func(s *stream) *transport.Fault { return s.addCredit(1<<64 - 1) },
		"DATA without a GRANT": func(s *stream) *transport.Fault {
			_, _, f := s.claim(frame{kind: kData, handle: 0, length: 1})
			return f
		},
		"DATA for a GRANT that is over": func(s *stream) *transport.Fault {
			r := large(s)
			s.onStart(frame{kind: kStart, slot: 5, length: 2000, handle: uint32(r.Tag)})
			f := frame{kind: kData, handle: uint32(r.Tag), length: 2000}
			s.claim(f)
			s.arrived(f, nil)
			_, _, fault := s.claim(f)
			return fault
		},
		"DATA beyond the end": func(s *stream) *transport.Fault {
			r := large(s)
			s.onStart(frame{kind: kStart, slot: 5, length: 2000, handle: uint32(r.Tag)})
			_, _, f := s.claim(frame{kind: kData, handle: uint32(r.Tag), slot: 1999, length: 2})
			return f
		},
		"DATA at an offset that wraps": func(s *stream) *transport.Fault {
			r := large(s)
			s.onStart(frame{kind: kStart, slot: 5, length: 2000, handle: uint32(r.Tag)})
			_, _, f := s.claim(frame{kind: kData, handle: uint32(r.Tag), slot: 1<<64 - 1, length: 2})
			return f
		},
		"DATA twice": func(s *stream) *transport.Fault {
			r := large(s)
			s.onStart(frame{kind: kStart, slot: 5, length: 2000, handle: uint32(r.Tag)})
			f := frame{kind: kData, handle: uint32(r.Tag), length: 1500}
			s.claim(f)
			s.arrived(f, nil)
			_, _, fault := s.claim(f)
			return fault
		},
	} {
		t.Run(name, func(t *testing.T) {
			var s stream
			s.init(0, 1, eager, window, new(blocks), new(calls))
			fault := f(&s)
			require.NotNil(t, fault)
			require.Equal(t, transport.FaultProtocol, fault.Kind)
			require.Equal(t, 1, fault.Rank)
			require.Equal(t, 0, fault.Reporter)
			require.ErrorContains(t, fault, "tcp: ")
		})
	}
}

// ends counts how often a request does.
type ends struct {
	n   int
	err error
}

func (e *ends) Ended(r *transport.Request) { e.n, e.err = e.n+1, r.Err() }

// A small message meets a large receive that was posted between its header and its
// bytes: the receive ends once.
func TestReceiveInTheMidstOfAMessage(t *testing.T) {
	s := newWirePair(t, 1000, 1<<20).s[0]
	r, f := s.onEager(frame{kind: kEager, slot: 5, length: 4})
	require.Nil(t, r)
	require.Nil(t, f)
	var e ends
	late := req(1, 5, make([]byte, 2000))
	late.Owner = &e
	require.Nil(t, s.recv(late))
	f = s.store(5, arrival{length: 4, block: make([]byte, 4), here: true})
	require.NotNil(t, f)
	require.Equal(t, transport.FaultMismatch, f.Kind)
	s.end(f)
	require.Equal(t, 1, e.n)
	require.ErrorIs(t, e.err, f)
}

// Receives beyond what a peer may be told of are granted in their order as others
// are met.
func TestGrantsAreBounded(t *testing.T) {
	var s stream
	s.init(0, 1, 0, minWindow, new(blocks), new(calls))
	buf := make([]byte, 1)
	for i := range uint64(maxGrants + 2) {
		require.Nil(t, s.recv(req(1, i, buf)))
	}
	require.Equal(t, maxGrants, s.granted)
	require.Equal(t, maxGrants, s.frames.len())
	for ; s.frames.len() > 0; s.frames.pop() {
	}
	// An offer for one that is not granted yet does not jump the queue.
	require.Nil(t, s.onOffer(frame{kind: kOffer, slot: maxGrants + 1, length: 1}, 1))
	require.Zero(t, s.frames.len())
	require.Nil(t, s.onStart(frame{kind: kStart, slot: 0, length: 1, handle: 0}))
	require.Equal(t, 2, s.frames.len())
	require.EqualValues(t, maxGrants, s.frames.front().f.slot)
}

// Sends beyond what may be announced wait and go out in order.
func TestOffersAreBounded(t *testing.T) {
	var s stream
	s.init(0, 1, 0, minWindow, new(blocks), new(calls))
	buf := make([]byte, 1)
	for i := range uint64(maxOffers + 2) {
		require.Nil(t, s.send(req(1, i, buf)))
	}
	require.Equal(t, maxOffers, s.frames.len())
	for ; s.frames.len() > 0; s.frames.pop() {
	}
	require.Nil(t, s.onGrant(frame{kind: kGrant, slot: 7, length: 1, handle: 3}))
	require.Equal(t, 1, s.frames.len())
	require.EqualValues(t, maxOffers, s.frames.front().f.slot)
	require.Equal(t, 1, s.pieces.len())
}

func TestRing(t *testing.T) {
	var q fifo[int]
	next, want := 0, 0
	rng := must.Rand(t)
	for range 10_000 {
		if rng.IntN(2) == 0 || q.len() == 0 {
			q.push(next)
			next++
			continue
		}
		require.Equal(t, want, *q.front())
		q.pop()
		want++
	}
	require.Equal(t, next-want, q.len())
}

func TestBlocks(t *testing.T) {
	var b blocks
	require.Nil(t, b.get(0))
	for _, n := range []int{1, 63, 64, 65, 1000, 64 << 10} {
		x := b.get(n)
		require.Len(t, x, n)
		b.put(x)
		require.Same(t, &x[0], &b.get(n)[0])
	}
	var all [][]byte
	for range keepBlocks>>16 + 10 {
		all = append(all, b.get(64<<10))
	}
	for _, x := range all {
		b.put(x)
	}
	require.LessOrEqual(t, b.kept, keepBlocks)
}
