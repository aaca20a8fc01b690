package direct

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// A model of the protocol of rings, with the scheduler of the model of the other kernels. It follows Ringer in ring.cu
// line by line.

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

// ringModel is a model whose lanes go round a ring. In a lane, cur is the tile that comes next. In a warp, heard is not
// 0 if lane 0 has waited in vain.
type ringModel struct {
	*model
	calls []ringModelCall
}

type ringModelCall struct {
	combines, gathers bool
	tiles             []int // of each channel
}

func newRingModel(seed uint64, ranks int, without rule) *ringModel {
	g := rand.New(rand.NewPCG(seed, uint64(ranks)))
	m := &ringModel{model: &model{g: g, without: without, ranks: ranks, channels: 1 + g.IntN(2), absent: -1, abort: -1}}
	m.depth = window.RingDepth(ranks)
	if without == affording {
		m.depth /= 2
	}
	if without == desisting {
		m.absent = g.IntN(ranks)
	}
	for range 3 + g.IntN(3) {
		shots := 1 + g.IntN(3)
		c := ringModelCall{combines: shots&Combines != 0, gathers: shots&Collects != 0}
		for range m.channels {
			c.tiles = append(c.tiles, g.IntN(4))
		}
		m.calls = append(m.calls, c)
	}
	m.mem = make([]uint32, ranks*m.each())
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
	m.start(len(m.calls), m.around, func(int, int) {})
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

// hear has lane 0 wait for a flag. It returns false to all lanes if the call has failed.
func (m *ringModel) hear(l *modelLane, at int, good func(v uint32) bool) bool {
	if l.n == 0 {
		l.w.heard = 0
		if !l.wait(func() bool { return good(m.mem[at]) }) {
			l.w.heard = -1
		}
	} else if m.without == heeding {
		return true
	}
	if m.without != heeding {
		l.syncWarp()
	}
	return l.w.heard == 0
}

// part is a rank's word of a tile of a part.
func (m *ringModel) part(l *modelLane, rank, part, tile int) uint32 {
	x := uint32(rank+1)*2654435761 ^ uint32(part*7919+l.call*104729+l.w.channel*1299709+tile*15485863+l.n*32452843)
	return x ^ x>>15
}

// around is what a lane does in a call.
func (m *ringModel) around(l *modelLane) {
	ranks, rank, channel, c := m.ranks, l.w.rank, l.w.channel, m.calls[l.call]
	if c.tiles[channel] == 0 || m.failed[rank] && m.without != desisting {
		return
	}
	l.cur = m.mem[m.state(rank, channel)]
	own, last := 0, 0
	if c.combines {
		own = ranks - 1
	}
	if last = own; c.gathers {
		last += ranks - 1
	}
	for i := range c.tiles[channel] {
		for s := range last + 1 {
			part := rank - (s - own)
			if s < own {
				part = rank - (s + 1)
			}
			part = (part + ranks) % ranks
			var v uint32
			if s > 0 {
				var ok bool
				if v, ok = m.take(l); !ok {
					return
				}
			}
			if s <= own {
				v += m.part(l, rank, part, i)
			}
			if s >= own {
				m.check(l, c, part, i, v)
			}
			if s < last {
				m.give(l, v)
			}
		}
	}
	l.syncWarp()
	if l.n == 0 && m.without != remembering {
		l.store(m.state(rank, channel), l.cur, false)
	}
}

// check holds that a tile of the outcome is right.
func (m *ringModel) check(l *modelLane, c ringModelCall, part, i int, got uint32) {
	want := m.part(l, part, part, i)
	for r := range m.ranks {
		if c.combines && r != part {
			want += m.part(l, r, part, i)
		}
	}
	if got != want && m.fault == nil {
		m.fault = fmt.Errorf("rank %d has %#x in call %d, channel %d, tile %d, lane %d of part %d, want %#x",
			l.w.rank, got, l.call, l.w.channel, i, l.n, part, want)
	}
}

func (m *ringModel) give(l *modelLane, v uint32) {
	next, channel := (l.w.rank+1)%m.ranks, l.w.channel
	l.store(m.slot(next, channel, l.cur, l.n), v, false)
	after := slices.Clone(l.mine)
	if m.without != gathering {
		l.syncWarp()
		after = append(after, l.w.before...)
	}
	l.cur++
	if m.without == following {
		after = nil
	}
	if l.n == 0 {
		l.store(m.flag(next, channel, l.cur-1), l.cur, false, after...)
	}
}

func (m *ringModel) take(l *modelLane) (uint32, bool) {
	t, rank, channel := l.cur, l.w.rank, l.w.channel
	good := func(v uint32) bool { return v == t }
	switch m.without {
	case flagging:
		good = func(uint32) bool { return true }
	case numbering:
		good = func(v uint32) bool { return v != 0 }
	}
	if !m.hear(l, m.flag(rank, channel, t-1), good) {
		return 0, false
	}
	l.yield(nil)
	return m.mem[m.slot(rank, channel, t-1, l.n)], true
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
	for _, ranks := range []int{2, 3, 4} {
		rules := ringRules
		if ranks == 2 {
			rules = slices.DeleteFunc(slices.Clone(rules), func(r rule) bool { return r == desisting }) // two ranks wait for each other
		}
		t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
			eachIsNeeded(t, rules, func(seed uint64, without rule) error { return newRingModel(seed, ranks, without).run() })
		})
	}
}
