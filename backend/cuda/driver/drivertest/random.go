package drivertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
)

// area is memory of a random program, and what should be in it.
type area struct {
	ptr  driver.Ptr
	host driver.HostMemory // nil for device memory
	want []byte
}

// testRandom runs programs of random operations on random streams, and on the host, over common
// memory. Package edges orders them by the memory they use. The outcome must be that of one
// operation after the other.
func testRandom(t *suite) {
	for round := range 3 * t.Rounds {
		t.random(uint64(round))
		if t.Failed() {
			t.Fatalf("seed %d", round)
		}
	}
}

func (t *suite) random(seed uint64) {
	const words, n, batches, length = 1 << 14, 4 << 14, 4, 20
	rng := rand.New(rand.NewPCG(seed, 7))
	// Devices that reach each other; kernels use the memory of all of them.
	devices := []driver.Device{t.device(0)}
	if l, err := t.d.Link(0, t.d.Count()-1); err == nil && l.Peer && t.d.Count() > 1 {
		last := t.d.Count() - 1
		require.NoError(t, t.device(0).EnablePeer(last))
		require.NoError(t, t.device(last).EnablePeer(0))
		devices = append(devices, t.device(last))
		defer func() {
			require.NoError(t, t.device(0).DisablePeer(last))
			require.NoError(t, t.device(last).DisablePeer(0))
		}()
	}
	var adds []driver.Function
	for _, v := range devices {
		adds = append(adds, t.function(v, Add))
	}
	tracker := edges.New(t.d)
	defer func() { require.NoError(t, tracker.Close()) }()
	line, err := tracker.Host("host")
	require.NoError(t, err)
	type lane struct {
		s   driver.Stream
		dev int
	}
	var lanes []lane
	for range 4 {
		i := rng.IntN(len(devices))
		lanes = append(lanes, lane{t.stream(devices[i]), i})
	}
	var all []*area
	for i := range 5 {
		a := &area{want: make([]byte, n)}
		if i < 2 {
			a.host = t.host(n)
			a.ptr = a.host.Ptr()
		} else {
			a.ptr = t.alloc(devices[i%len(devices)], n).Ptr()
		}
		all = append(all, a)
	}
	piece := func() (a *area, at, count int) { // in words
		at = rng.IntN(words)
		return all[rng.IntN(len(all))], at, 1 + rng.IntN(words-at)
	}
	type turn struct {
		p  *edges.Pending
		n  int
		do func()
	}
	turns := make(chan turn, batches*length)
	var worker sync.WaitGroup
	var failed error
	worker.Go(func() {
		for u := range turns {
			if err := u.p.Begin(t.ctx, u.n); err != nil && failed == nil {
				failed = err
			} else if err == nil {
				u.do()
			}
			u.p.End(u.n)
		}
	})
	var pending []*edges.Pending
	for round := range batches {
		b := tracker.Batch()
		if round == 0 {
			for _, a := range all {
				b.Memset(lanes[rng.IntN(len(lanes))].s, a.ptr, 0, n)
			}
		}
		var here []turn
		for range length {
			l := lanes[rng.IntN(len(lanes))]
			a, at, count := piece()
			p := a.ptr + driver.Ptr(4*at)
			switch rng.IntN(4) {
			case 0:
				v := byte(rng.Uint32())
				b.Memset(l.s, p, v, 4*count)
				copy(a.want[4*at:], bytes.Repeat([]byte{v}, 4*count))
			case 1, 2:
				o, from, _ := piece()
				for o == a {
					o, from, _ = piece()
				}
				count = min(count, words-from)
				q := o.ptr + driver.Ptr(4*from)
				if rng.IntN(2) == 0 {
					b.Copy(l.s, p, q, 4*count)
					copy(a.want[4*at:4*(at+count)], o.want[4*from:])
					break
				}
				b.Launch(l.s, &driver.Launch{
					Function: adds[l.dev], Grid: driver.Dim{X: 8}, Block: driver.Dim{X: 128},
					Args:   new(driver.Args).Ptr(p).Ptr(q).Uint32(uint32(count)),
					Access: []driver.Access{driver.Writes(p, 4*count), driver.Reads(q, 4*count)},
				})
				addWords(a.want[4*at:4*(at+count)], o.want[4*from:])
			case 3:
				x, y := all[rng.IntN(2)], all[rng.IntN(2)]
				if x == y {
					break
				}
				here = append(here, turn{n: b.Host(line, driver.Writes(x.ptr, n), driver.Reads(y.ptr, n)), do: func() {
					addWords(x.host.Bytes(), y.host.Bytes())
				}})
				addWords(x.want, y.want)
			}
		}
		p, err := b.Run()
		require.NoError(t, err)
		pending = append(pending, p)
		for _, u := range here {
			u.p = p
			turns <- u
		}
	}
	close(turns)
	worker.Wait()
	require.NoError(t, failed)
	for _, p := range pending {
		require.NoError(t, p.Sync(t.ctx))
		p.Release()
	}
	for i, a := range all {
		if got := t.get(lanes[0].s, a.ptr, n); !bytes.Equal(a.want, got) {
			first := 0
			for first < n && got[first] == a.want[first] {
				first++
			}
			t.Errorf("seed %d: memory %d differs from byte %d on", seed, i, first)
		}
	}
}

// addWords adds the words of src to those of dst.
func addWords(dst, src []byte) {
	for i := 0; i < len(dst); i += 4 {
		binary.NativeEndian.PutUint32(dst[i:], binary.NativeEndian.Uint32(dst[i:])+binary.NativeEndian.Uint32(src[i:]))
	}
}

// testTurnEnds has a host that never gets its turn: the wait ends with its
// context, and giving up lets the stream go on.
func testTurnEnds(t *suite) {
	s := t.stream(t.device(0))
	tracker := edges.New(t.d)
	defer func() { require.NoError(t, tracker.Close()) }()
	line, err := tracker.Host("host")
	require.NoError(t, err)
	g, h, m := t.gates(1), t.host(64), t.alloc(t.device(0), 64)
	t.put(s, m.Ptr(), pattern(64, 1))
	g[0].hold(t, s)
	b := tracker.Batch()
	b.Copy(s, h.Ptr(), m.Ptr(), 64)
	turn := b.Host(line, driver.Writes(h.Ptr(), 64))
	b.Copy(s, m.Ptr(), h.Ptr(), 64)
	p, err := b.Run()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	require.ErrorIs(t, p.Begin(ctx, turn), context.Canceled)
	done, err := p.Done()
	require.NoError(t, err)
	require.False(t, done, fmt.Sprint(turn))
	g[0].open()
	p.Abort()
	require.NoError(t, p.Sync(t.ctx))
	p.Release()
}
