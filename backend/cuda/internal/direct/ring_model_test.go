package direct

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// A model of the protocol of rings. It follows Ringer in ring.cu line by line. A seeded scheduler takes one step at a
// time, as in the model of the other kernels: of a lane, or the arrival of a store. Stores of a lane arrive in any
// order, unless they are to the same word. A store that releases arrives after the lane's own earlier stores, and
// after those that the warp's lanes had made when they last met. A rank's next kernel starts when its last one has
// ended and all stores of that have arrived.

// The rules of rings, each of which a test leaves out.
const (
	flagging    rule = "a tile is taken when its flag is there"
	numbering   rule = "a flag is the number of the tile"
	following   rule = "a flag comes after its tile"
	gathering   rule = "the lanes meet before a flag is given"
	heeding     rule = "all lanes wait for what lane 0 waits for"
	affording   rule = "a channel has as many slots as there are ranks"
	remembering rule = "a channel counts its tiles from call to call"
	desisting   rule = "kernels after a failed one do nothing"
)

var ringRules = []rule{flagging, numbering, following, gathering, heeding, affording, remembering, desisting}

type ringModel struct {
	g                      *rand.Rand
	without                rule
	ranks, channels, depth int
	calls                  []ringModelCall
	absent                 int // a rank that stays away from the last two calls; -1: none
	mem                    []uint32
	flying                 []*ringStore
	lanes                  []*ringLane
	failed                 []bool
	done                   []int // calls of a rank that have ended
	flyingOf               []int
	expired                bool
	fault                  error
}

type ringModelCall struct {
	combines, gathers bool
	tiles             []int // of each channel
}

type ringStore struct {
	at      int
	v       uint32
	lane    *ringLane
	after   []*ringStore
	arrived bool
	late    bool
}

type ringWarp struct {
	lanes        []*ringLane
	waiting, met int
	before       []*ringStore
	lost         bool // by lane 0
}

type ringLane struct {
	m                *ringModel
	w                *ringWarp
	rank, channel, n int
	call             int
	mine             []*ringStore
	ready            func() bool
	next             func() (func() bool, bool)
	stop             func()
	yield            func(func() bool)
	returned, ended  bool
	held             bool
	t                uint32
}

func newRingModel(seed uint64, ranks int, without rule) *ringModel {
	g := rand.New(rand.NewPCG(seed, uint64(ranks)))
	m := &ringModel{g: g, without: without, ranks: ranks, channels: 1 + g.IntN(2), absent: -1}
	m.depth = window.RingDepth(ranks)
	if without == affording {
		m.depth /= 2
	}
	if without == desisting {
		m.absent = g.IntN(ranks)
	}
	for range 3 + g.IntN(3) {
		shots := 1 + g.IntN(3)
		c := ringModelCall{combines: shots&ringCombines != 0, gathers: shots&ringGathers != 0}
		for range m.channels {
			c.tiles = append(c.tiles, g.IntN(4))
		}
		m.calls = append(m.calls, c)
	}
	m.mem = make([]uint32, ranks*m.each())
	m.failed, m.done, m.flyingOf = make([]bool, ranks), make([]int, ranks), make([]int, ranks)
	for ch := range m.channels {
		// Earlier calls have sent some tiles, or 2^32 of them.
		var at uint32
		if g.IntN(2) == 0 {
			at = []uint32{0, 1 << 31}[g.IntN(2)] - g.Uint32N(8)
		}
		for r := range ranks {
			m.mem[m.state(r, ch)] = at
			for i := at - uint32(m.depth); i != at && at != 0; i++ {
				m.mem[m.flag(r, ch, i)] = i + 1
			}
		}
	}
	for r := range ranks {
		for ch := range m.channels {
			w := &ringWarp{}
			for n := range lanesOfWarp {
				l := &ringLane{m: m, w: w, rank: r, channel: ch, n: n}
				w.lanes, m.lanes = append(w.lanes, l), append(m.lanes, l)
				l.next, l.stop = iter.Pull(func(yield func(func() bool) bool) {
					defer func() {
						if p := recover(); p != nil && p != stopped {
							panic(p)
						}
					}()
					l.yield = func(ready func() bool) {
						if !yield(ready) {
							panic(stopped)
						}
					}
					l.run()
					l.ended = true
				})
			}
		}
	}
	return m
}

// A rank has, for each channel, slots, flags and a count.
func (m *ringModel) each() int { return m.channels * m.eachChannel() }

func (m *ringModel) eachChannel() int { return m.depth*(lanesOfWarp+1) + 1 }

func (m *ringModel) slot(rank, ch int, t uint32, lane int) int {
	return rank*m.each() + ch*m.eachChannel() + int(t)%m.depth*lanesOfWarp + lane
}

func (m *ringModel) flag(rank, ch int, t uint32) int {
	return rank*m.each() + ch*m.eachChannel() + m.depth*lanesOfWarp + int(t)%m.depth
}

func (m *ringModel) state(rank, ch int) int { return rank*m.each() + (ch+1)*m.eachChannel() - 1 }

// run takes steps until all lanes have ended, or something is wrong.
func (m *ringModel) run() error {
	defer func() {
		for _, l := range m.lanes {
			l.stop()
		}
	}()
	for turns := 0; m.fault == nil; turns-- {
		if turns <= 0 {
			turns = m.g.IntN(200)
			for _, l := range m.lanes {
				l.held = m.g.IntN(8) == 0
			}
			if slow := m.g.IntN(2 * m.ranks); slow < m.ranks {
				for _, l := range m.lanes {
					l.held = l.held || l.rank == slow
				}
			}
		}
		if m.move(false) || m.move(true) {
			continue
		}
		stuck := slices.IndexFunc(m.lanes, func(l *ringLane) bool { return !l.ended })
		if stuck < 0 {
			break
		}
		if l := m.lanes[stuck]; m.absent < 0 || m.expired {
			return fmt.Errorf("deadlock: rank %d, channel %d, lane %d in call %d", l.rank, l.channel, l.n, l.call)
		}
		m.expired = true
	}
	return m.fault
}

// move takes a step. It spares what is held up, unless all may go on.
func (m *ringModel) move(all bool) bool {
	n := len(m.lanes) + len(m.flying)
	first := m.g.IntN(n)
	for i := range n {
		k := (first + i) % n
		if k < len(m.lanes) {
			if l := m.lanes[k]; !l.ended && (all || !l.held) && (l.ready == nil || l.ready()) {
				l.ready, _ = l.next()
				return true
			}
			continue
		}
		k -= len(m.lanes)
		s := m.flying[k]
		late := s.late && !all && m.g.IntN(300) != 0
		if late || slices.ContainsFunc(s.after, func(a *ringStore) bool { return !a.arrived }) {
			continue
		}
		m.mem[s.at], s.arrived = s.v, true
		m.flying = slices.Delete(m.flying, k, k+1)
		m.flyingOf[s.lane.rank]--
		return true
	}
	return false
}

func (l *ringLane) store(at int, v uint32, after ...*ringStore) {
	s := &ringStore{at: at, v: v, lane: l, after: after, late: l.m.g.IntN(8) == 0}
	l.mine = slices.DeleteFunc(l.mine, func(x *ringStore) bool { return x.arrived })
	for _, x := range l.mine {
		if x.at == at {
			s.after = append(s.after, x)
		}
	}
	l.mine, l.m.flying = append(l.mine, s), append(l.m.flying, s)
	l.m.flyingOf[l.rank]++
	l.yield(nil)
}

// syncWarp is a meeting of the warp's lanes, none of which returns before the others.
func (l *ringLane) syncWarp() {
	w, met := l.w, l.w.met
	w.waiting++
	l.yield(func() bool {
		if w.met == met && w.waiting == len(w.lanes) {
			w.met, w.waiting, w.before = w.met+1, 0, nil
			for _, x := range w.lanes {
				w.before = append(w.before, x.mine...)
			}
		}
		return w.met > met
	})
}

// wait has lane 0 wait for a flag. It returns false to all lanes if the call has failed.
func (l *ringLane) wait(at int, good func(v uint32) bool) bool {
	m, w := l.m, l.w
	if l.n == 0 {
		l.yield(func() bool { return good(m.mem[at]) || m.expired || m.failed[l.rank] })
		w.lost = !good(m.mem[at])
		m.failed[l.rank] = m.failed[l.rank] || w.lost
	} else if m.without == heeding {
		return true
	}
	if m.without != heeding {
		l.syncWarp()
	}
	return !w.lost
}

func (l *ringLane) run() {
	m, r := l.m, l.rank
	for l.call = range m.calls {
		l.returned = false
		if r != m.absent || l.call < len(m.calls)-2 {
			l.kernel(m.calls[l.call])
		}
		l.returned = true
		call := l.call
		l.yield(func() bool {
			if m.done[r] == call && m.flyingOf[r] == 0 && !slices.ContainsFunc(m.lanes, func(x *ringLane) bool {
				return x.rank == r && (x.call < call || !x.returned)
			}) {
				m.done[r]++
			}
			return m.done[r] > call
		})
	}
}

// operand is a rank's word of a tile of a part.
func (l *ringLane) operand(rank, part, tile int) uint32 {
	x := uint32(rank+1)*2654435761 ^ uint32(part*7919+l.call*104729+l.channel*1299709+tile*15485863+l.n*32452843)
	return x ^ x>>15
}

func (l *ringLane) kernel(c ringModelCall) {
	m, ranks := l.m, l.m.ranks
	if c.tiles[l.channel] == 0 || m.failed[l.rank] && m.without != desisting {
		return
	}
	l.t = m.mem[m.state(l.rank, l.channel)]
	own, last := 0, 0
	if c.combines {
		own = ranks - 1
	}
	if last = own; c.gathers {
		last += ranks - 1
	}
	for i := range c.tiles[l.channel] {
		for s := range last + 1 {
			part := l.rank - (s - own)
			if s < own {
				part = l.rank - (s + 1)
			}
			part = (part + ranks) % ranks
			var v uint32
			if s > 0 {
				var ok bool
				if v, ok = l.take(); !ok {
					return
				}
			}
			if s <= own {
				v += l.operand(l.rank, part, i)
			}
			if s >= own {
				l.check(c, part, i, v)
			}
			if s < last {
				l.give(v)
			}
		}
	}
	l.syncWarp()
	if l.n == 0 && m.without != remembering {
		l.store(m.state(l.rank, l.channel), l.t)
	}
}

// check holds that a tile of the outcome is right.
func (l *ringLane) check(c ringModelCall, part, i int, got uint32) {
	want := l.operand(part, part, i)
	for r := range l.m.ranks {
		if c.combines && r != part {
			want += l.operand(r, part, i)
		}
	}
	if got != want && l.m.fault == nil {
		l.m.fault = fmt.Errorf("rank %d has %#x in call %d, channel %d, tile %d, lane %d of part %d, want %#x",
			l.rank, got, l.call, l.channel, i, l.n, part, want)
	}
}

func (l *ringLane) give(v uint32) {
	m, next := l.m, (l.rank+1)%l.m.ranks
	l.store(m.slot(next, l.channel, l.t, l.n), v)
	after := slices.Clone(l.mine)
	if m.without != gathering {
		l.syncWarp()
		after = append(after, l.w.before...)
	}
	l.t++
	if m.without == following {
		after = nil
	}
	if l.n == 0 {
		l.store(m.flag(next, l.channel, l.t-1), l.t, after...)
	}
}

func (l *ringLane) take() (uint32, bool) {
	m, t := l.m, l.t
	good := func(v uint32) bool { return v == t }
	switch m.without {
	case flagging:
		good = func(uint32) bool { return true }
	case numbering:
		good = func(v uint32) bool { return v != 0 }
	}
	if !l.wait(m.flag(l.rank, l.channel, t-1), good) {
		return 0, false
	}
	l.yield(nil)
	return m.mem[m.slot(l.rank, l.channel, t-1, l.n)], true
}

// TestRingModel holds that the protocol of rings is right, with ranks of any pace and stores that overtake each
// other. A rank may stay away from a call.
func TestRingModel(t *testing.T) {
	for _, ranks := range []int{2, 3, 4, 6} {
		for seed := range uint64(50) {
			require.NoError(t, newRingModel(seed, ranks, nothing).run(), "%d ranks, seed %d", ranks, seed)
			m := newRingModel(seed, ranks, nothing)
			m.absent = int(seed) % ranks
			require.NoError(t, m.run(), "a rank stays away, %d ranks, seed %d", ranks, seed)
		}
	}
}

// TestRingModelRules holds that each flag and each other rule is needed: without it some seed goes wrong.
func TestRingModelRules(t *testing.T) {
	for _, without := range ringRules {
		t.Run(string(without), func(t *testing.T) {
			groups := []int{2, 3, 4}
			if without == desisting {
				groups = groups[1:] // two ranks wait for each other
			}
			for _, ranks := range groups {
				found := false
				for seed := uint64(0); seed < 2000 && !found; seed++ {
					if err := newRingModel(seed, ranks, without).run(); err != nil {
						found = true
						t.Logf("%d ranks, seed %d: %v", ranks, seed, err)
					}
				}
				require.True(t, found, "%d ranks: nothing went wrong", ranks)
			}
		})
	}
}
