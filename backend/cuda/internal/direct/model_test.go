package direct

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testsize"
)

// A model of the protocol. It shows that the protocol is right for any number of ranks, any
// pace of the lanes, and any order in which stores arrive. It follows Kernel in direct.cu
// line by line, but for the looks of who writes straight or reads. A lane computes sums of words. The model of rings has
// the same scheduler.
//
// A seeded scheduler takes one step at a time: of a lane, or the arrival of a store. For a
// while it holds up some lanes and ranks, and some stores until nothing else can go on. Stores
// of a lane arrive in any order, unless they are to the same word. A store that releases
// arrives after the lane's own earlier stores, and after those that the warp's lanes had made
// when they last met in syncWarp. A rank's next kernel starts when its last one has ended
// and all stores of that have arrived.

const (
	free   = 0xffffffff // a word of a free slot
	other  = 0x7fff7fff // what is sent instead
	marked = 0xfffffffe // the first word of a tile with a key
)

// rule is a part of the protocol that a test leaves out.
type rule string

const (
	nothing   rule = ""
	clearing  rule = "a slot is cleared when it has been read"
	crediting rule = "a push waits for credit"
	last      rule = "slots are free up to the tiles before the last call, not those after it"
	releasing rule = "a credit releases the clears before it"
	meeting   rule = "the lanes meet before a credit is given"
	halves    rule = "a channel gives credit every half ring"
	cleaning  rule = "words that look free are changed"
	padding   rule = "a short part is padded"
	stopping  rule = "kernels after a failed one do nothing"
	heading   rule = "tile 0 of a move goes to all peers"
	telling   rule = "tile 0 tells the longest span"
	counting  rule = "tiles that do not travel count"
	opening   rule = "a call goes straight if all ranks are open"
	agreeing  rule = "all channels go straight, or none does"
	fencing   rule = "the end of a straight call comes after its stores"
	ending    rule = "a rank waits for the ends of the others' stores"
	looking   rule = "who writes straight, or reads, looks whether the peer has failed"
	voting    rule = "the lanes tell the end if all of them are well"
	lingering rule = "a rank that has failed waits for what peers have begun"
	beginning rule = "two shots give credit after their first round"
	leaving   rule = "two shots leave less than half a ring without credit"
	greeting  rule = "who gets nothing else of a rank takes tile 0 from it"
	preparing rule = "an operand is there before its rank tells that it may be read"
	holding   rule = "a rank whose operand is read waits until it has been"
	asking    rule = "who has read looks whether the peer has failed"
	marking   rule = "a tile that begins as one with a key gets a key"
	awaiting  rule = "a tile with a key waits for it"
	unmarking rule = "the place of a key is cleared"
	renewing  rule = "a channel gives credit when its count passes a multiple of renewed"
)

// renewed is from how many tiles on a credit is renewed. One that is 2^31 tiles old would seem to be new.
const renewed = 1 << 30

// readRules are those of a root that reads.
var readRules = []rule{opening, preparing, holding, looking, lingering, asking}

// straightRules are those of straight stores.
var straightRules = []rule{opening, fencing, ending, voting, looking, lingering}

// modelCall is one collective: how many tiles each channel has, and whether the last rank's
// part is empty. Or it is a move.
type modelCall struct {
	tiles []int
	parts bool // each rank gets a part of its own
	short bool

	moves [][]int // of a move: the tiles from one rank to another, which are dealt to the channels in turn
	known bool    // all ranks know the longest span of a move
	open  []bool  // ranks that let the others write straight to their memory

	both                   bool // two shots in one launch
	spread                 bool // whose results go straight if all ranks are open
	givers, owners, takers []bool

	keyed bool // tiles may have keys

	// The roots of one-shot calls, -1 if it is another call. Only the root of a reduce gets operands. Only that of a
	// broadcast gives data.
	reduces, broadcasts int
	reads               bool // the root of a reduce of two ranks reads the other one's operand if both are open
}

// fewModelTiles is up to how many tiles a channel go through the rings.
const fewModelTiles = 2

// modelTurn is how many tiles behind the first ones a channel writes straight, before it is the next one's turn.
const modelTurn = 2

// most returns the longest span of a move that a rank knows of.
func (c modelCall) most(rank int) (n int) {
	for from, row := range c.moves {
		for to, tiles := range row {
			if c.known || from == rank || to == rank {
				n = max(n, tiles)
			}
		}
	}
	return n
}

// dealt returns how many of so many tiles a channel has.
func (m *model) dealt(tiles, channel int) int { return max(tiles-channel+m.channels-1, 0) / m.channels }

// moved returns how many tiles of a move a channel has from one rank to another.
func (m *model) moved(c modelCall, channel, from, to int) int {
	return m.dealt(c.moves[from][to], channel)
}

type model struct {
	g                      *rand.Rand
	without                rule
	ranks, channels, depth int
	calls                  []modelCall
	absent                 int // a rank that stays away from the last call but one; -1: none
	abort                  int // steps until all waits are over; -1: never
	mem                    []uint32
	credits, states        int // where they begin; the rings come first
	straight               int // where memory for straight stores begins
	flying                 []*modelStore
	warps                  []*modelWarp
	lanes                  []*modelLane
	flyingOf               []int  // stores of a rank that have not arrived
	failed                 []bool // ranks
	failedIn               []int  // calls
	done                   []int  // calls of a rank that have ended
	expired                bool   // waits are over
	brief                  bool   // ranks that have failed stay for too short a time, and memory stays mapped
	fault                  error
	turns                  int // until others are held up

	number int                  // of calls
	kernel func(l *modelLane)   // what a lane does in a call
	ended  func(rank, call int) // is told of the end of a rank's kernel
}

type modelStore struct {
	at      int
	v       uint32
	lane    *modelLane
	after   []*modelStore
	push    bool
	to      int // the rank whose memory a straight store is to; -1: it is none
	arrived bool
	late    bool // it arrives when nothing else can go on, or much later
}

type modelWarp struct {
	rank, channel int
	lanes         []*modelLane
	waiting       int // lanes in syncWarp
	met           int // how often they have met
	before        []*modelStore
	heard         int    // by lane 0: the tiles of the longest span; -1: the call has failed
	open          bool   // by lane 0: all ranks are
	straight      int    // the last call that went straight, plus one
	key           uint32 // of lane 0, when they last met
	marked        bool
	bad           int  // the last call in which a lane has failed, plus one
	well          bool // none had when they last met, and all were there
}

type modelLane struct {
	m        *model
	w        *modelWarp
	n        int
	call     int // that the lane is in
	mine     []*modelStore
	ready    func() bool // when the lane can go on; nil: always
	next     func() (func() bool, bool)
	stop     func()
	yield    func(func() bool)
	ended    bool
	cur      uint32
	limit    uint32
	returned bool   // from the call
	held     bool   // for a while
	reading  bool   // from another rank, after a look
	heads    int    // tiles before the first one with data
	key      uint32 // of the tile that lane 0 takes
	marked   bool   // that has one
}

const lanesOfWarp = 2

// slotWords are those of a slot: one of each lane, a key, and the word that is replaced by marked.
const slotWords = lanesOfWarp + 2

// mostSteps is up to how many steps for each rank a model takes before it is aborted, where it is.
const mostSteps = 500

// stopped is the panic of a lane whose model has ended.
var stopped = new(int)

// mix is which calls a model makes.
type mix int

const (
	anyCalls  mix = iota
	messages      // of a lane: from rank 0 to rank 1, of lengths that both know
	onlyShots     // in one launch
	onlyReads     // reduces of two ranks whose root may read
)

func newModel(seed uint64, ranks int, without rule) *model {
	return makeModel(seed, ranks, without, anyCalls)
}

func newLane(seed uint64, without rule) *model { return makeModel(seed, 2, without, messages) }

func makeModel(seed uint64, ranks int, without rule, calls mix) *model {
	g := rand.New(rand.NewPCG(seed, uint64(ranks)))
	m := &model{g: g, without: without, ranks: ranks, channels: 1 + g.IntN(2), depth: 4 << g.IntN(3), absent: -1, abort: -1}
	if ranks > 2 {
		m.depth *= 2
	}
	if without == stopping {
		m.absent = g.IntN(ranks)
	}
	if without == looking || without == lingering || without == voting || without == asking {
		m.abort = g.IntN(mostSteps * ranks)
	}
	m.brief = without == asking || without != looking && without != lingering && g.IntN(2) == 0 && calls == onlyReads
	for range 4 + g.IntN(5) {
		c := modelCall{parts: g.IntN(2) == 0}
		c.short = c.parts && g.IntN(2) == 0
		most := []int{1, m.depth / 2, m.depth, 3 * m.depth}[g.IntN(4)]
		straight := slices.Contains(straightRules, without) || without == agreeing
		if without != padding && g.IntN(2) == 0 || without == heading || without == telling || without == counting || straight {
			c = randomMove(g, m.channels, ranks, most)
			c.known = c.known || without == heading
		}
		if calls == messages {
			c = modelCall{parts: true, known: true}
			c.moves = [][]int{{0, g.IntN(most*m.channels + 1)}, {0, 0}}
		}
		if calls == onlyShots || ranks > 2 && c.moves == nil && without != padding && g.IntN(2) == 0 {
			c = modelCall{parts: true, both: true, spread: g.IntN(2) == 0}
			// All_reduces, broadcasts, and reduces whose root has a part or none.
			root, kind := g.IntN(ranks), g.IntN(4)
			for r := range ranks {
				c.givers = append(c.givers, kind != 1 || r == root)
				c.owners = append(c.owners, kind == 0 || kind == 3 || r != root)
				c.takers = append(c.takers, kind == 0 || (kind == 1) == (r != root))
			}
		}
		if calls == onlyReads {
			c = modelCall{}
		}
		c.keyed, c.reduces, c.broadcasts = g.IntN(2) == 0, -1, -1
		if !c.parts {
			switch root := g.IntN(ranks); {
			case g.IntN(3) == 0:
				c.reduces = root
			case ranks > 2 && g.IntN(2) == 0:
				c.broadcasts = root
			}
			if calls == onlyReads {
				c.reduces = g.IntN(ranks)
			}
			c.reads = ranks == 2 && c.reduces >= 0 && (calls == onlyReads || g.IntN(2) == 0)
			c.keyed = c.keyed && !c.reads
		}
		for range m.channels {
			c.tiles = append(c.tiles, g.IntN(most+1))
		}
		closed := g.IntN(2 * ranks) // often none is
		for r := range ranks {
			c.open = append(c.open, r != closed)
		}
		m.calls = append(m.calls, c)
	}
	m.credits = ranks * ranks * m.channels * m.depth * slotWords
	m.states = m.credits + ranks*m.channels*ranks
	m.straight = m.states + ranks*m.channels*2
	m.mem = make([]uint32, m.straight+ranks*ranks*m.channels*3*m.depth*lanesOfWarp)
	for i := range m.credits {
		m.mem[i] = free
	}
	m.setCounts()
	m.start(len(m.calls), (*modelLane).direct, func(r, call int) {
		if !m.failed[r] {
			m.written(r, call)
		}
		m.reuse(r, call)
	})
	return m
}

// start makes the lanes.
func (m *model) start(calls int, kernel func(l *modelLane), ended func(rank, call int)) {
	m.number, m.kernel, m.ended = calls, kernel, ended
	m.flyingOf, m.failed, m.failedIn, m.done = make([]int, m.ranks), make([]bool, m.ranks), make([]int, m.ranks), make([]int, m.ranks)
	for r := range m.ranks {
		for c := range m.channels {
			w := &modelWarp{rank: r, channel: c}
			m.warps = append(m.warps, w)
			for n := range lanesOfWarp {
				l := &modelLane{m: m, w: w, n: n}
				w.lanes = append(w.lanes, l)
				m.lanes = append(m.lanes, l)
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
}

// setCounts has the channels begin behind any number of calls of one tile, which give no credit.
func (m *model) setCounts() {
	for c := range m.channels {
		at := m.g.Uint32N(4) * renewed
		if m.without == renewing {
			at = 1<<31 + m.g.Uint32N(1<<31)
		} else if m.g.IntN(2) == 0 {
			at -= m.g.Uint32N(uint32(4 * m.depth))
		}
		for r := range m.ranks {
			m.mem[m.state(r, c)], m.mem[m.state(r, c)+1] = at, at-1
			for p := range m.ranks {
				last := at &^ (renewed - 1)
				credit := last + m.g.Uint32N(at-last+1)
				if m.without == renewing {
					credit = at - 1<<31 - m.g.Uint32N(1<<20) - uint32(m.depth)
				}
				m.mem[m.credit(r, c, p)] = credit
			}
		}
	}
}

// randomMove is one of those that a rank makes: from one rank or to one, between two, between any, or
// of nothing.
func randomMove(g *rand.Rand, channels, ranks, most int) modelCall {
	c := modelCall{parts: true, known: g.IntN(2) == 0}
	shape, one, two := g.IntN(5), g.IntN(ranks), g.IntN(ranks)
	for from := range ranks {
		row := make([]int, ranks)
		for to := range row {
			travels := []bool{from == one, to == one, from == one && to == two, g.IntN(2) == 0, false}[shape]
			if travels && from != to {
				row[to] = g.IntN(most*channels + 1)
			}
		}
		c.moves = append(c.moves, row)
	}
	return c
}

func (m *model) slot(owner, from, channel int, tile uint32, lane int) int {
	return (((owner*m.ranks+from)*m.channels+channel)*m.depth+int(tile)%m.depth)*slotWords + lane
}

// place is where a rank writes a tile straight.
func (m *model) place(owner, from, channel, tile, lane int) int {
	return m.straight + (((owner*m.ranks+from)*m.channels+channel)*3*m.depth+tile)*lanesOfWarp + lane
}

func (m *model) credit(owner, channel, of int) int {
	return m.credits + (owner*m.channels+channel)*m.ranks + of
}
func (m *model) state(rank, channel int) int { return m.states + (rank*m.channels+channel)*2 }

// operand is a rank's word for another one in a tile; now and then it looks like a free one, or tells of a key.
func (m *model) operand(from, to, call, channel, tile, lane int) uint32 {
	if !m.calls[call].parts {
		to = 0
	}
	if m.calls[call].short && to == m.ranks-1 {
		return 0
	}
	x := uint32(from+1)*2654435761 ^ uint32(to*7919+call*104729+channel*1299709+tile*15485863+lane*32452843)
	x ^= x >> 15
	switch x % 5 {
	case 0:
		x = free
	case 1:
		x = marked
	}
	return m.clean(call, x)
}

// clean changes a word that looks like a free one, where there are no keys.
func (m *model) clean(call int, x uint32) uint32 {
	if x == free && m.without != cleaning && !m.calls[call].keyed {
		return other
	}
	return x
}

// run takes steps until all lanes have ended, or something is wrong.
func (m *model) run() error {
	defer func() {
		for _, l := range m.lanes {
			l.stop()
		}
	}()
	for step := 0; m.fault == nil; step++ {
		if step == m.abort {
			m.expired = true
		}
		if m.turns--; m.turns < 0 {
			m.turns = m.g.IntN(300)
			for _, l := range m.lanes {
				l.held = m.g.IntN(8) == 0
			}
			if r := m.g.IntN(2 * m.ranks); r < m.ranks {
				for _, l := range m.lanes {
					l.held = l.held || l.w.rank == r
				}
			}
		}
		if m.move(false) || m.move(true) {
			continue
		}
		stuck := slices.IndexFunc(m.lanes, func(l *modelLane) bool { return !l.ended })
		if stuck < 0 {
			break
		}
		if l := m.lanes[stuck]; m.absent < 0 && m.abort < 0 || m.expired {
			return fmt.Errorf("deadlock: rank %d, channel %d, lane %d in call %d", l.w.rank, l.w.channel, l.n, l.call)
		}
		m.expired = true
	}
	return m.fault
}

// move takes a step. It spares what is held up, unless all may go on.
func (m *model) move(all bool) bool {
	n := len(m.lanes) + len(m.flying)
	first := m.g.IntN(n)
	for i := range n {
		k := (first + i) % n
		if k < len(m.lanes) {
			if l := m.lanes[k]; (all || !l.held) && m.step(l) {
				return true
			}
			continue
		}
		k -= len(m.lanes)
		if s := m.flying[k]; (all || !s.late || m.g.IntN(500) == 0) && m.arrive(k) {
			return true
		}
	}
	return false
}

func (m *model) step(l *modelLane) bool {
	if l.ended || l.ready != nil && !l.ready() {
		return false
	}
	l.ready, _ = l.next()
	return true
}

// arrive brings a store to memory, if it may.
func (m *model) arrive(i int) bool {
	s := m.flying[i]
	for _, a := range s.after {
		if !a.arrived {
			return false
		}
	}
	// A rank that has failed takes nothing any more. What is in its slots does not matter.
	if s.push && m.mem[s.at] != free && !m.failed[s.at/(m.ranks*m.channels*m.depth*slotWords)] {
		m.fault = fmt.Errorf("a push of rank %d in call %d hits a slot that is not free", s.lane.w.rank, s.lane.call)
	}
	if s.to >= 0 && m.done[s.to] > s.lane.call && m.failed[s.to] {
		m.fault = fmt.Errorf("a straight store of rank %d in call %d comes when rank %d has failed and its kernel has ended", s.lane.w.rank, s.lane.call, s.to)
	}
	m.mem[s.at] = s.v
	s.arrived = true
	m.flying[i] = m.flying[len(m.flying)-1]
	m.flying = m.flying[:len(m.flying)-1]
	m.flyingOf[s.lane.w.rank]--
	return true
}

// wait lets others go on until ready, or for a moment. It returns false if the wait is over.
func (l *modelLane) wait(ready func() bool) bool {
	if ready == nil {
		l.yield(nil)
		return true
	}
	m, r := l.m, l.w.rank
	over := func() bool { return m.expired || m.failed[r] }
	l.yield(func() bool { return ready() || over() })
	if ready() {
		return true
	}
	if !m.failed[r] {
		m.failed[r], m.failedIn[r] = true, l.call
	}
	return false
}

func (l *modelLane) load(at int) uint32 {
	for i := len(l.mine) - 1; i >= 0; i-- {
		if s := l.mine[i]; s.at == at && !s.arrived {
			return s.v
		}
	}
	return l.m.mem[at]
}

func (l *modelLane) store(at int, v uint32, push bool, after ...*modelStore) {
	l.storeTo(-1, at, v, push, after...)
}

func (l *modelLane) storeTo(to, at int, v uint32, push bool, after ...*modelStore) {
	keep := l.mine[:0]
	s := &modelStore{at: at, v: v, lane: l, push: push, to: to, after: after, late: l.m.g.IntN(10) == 0}
	for _, x := range l.mine {
		if !x.arrived {
			keep = append(keep, x)
			if x.at == at {
				s.after = append(s.after, x)
			}
		}
	}
	l.mine = append(keep, s)
	l.m.flying = append(l.m.flying, s)
	l.m.flyingOf[l.w.rank]++
	l.wait(nil)
}

// syncWarp is a meeting of the warp's lanes. Those that have returned are not waited for.
func (l *modelLane) syncWarp() {
	w := l.w
	met := w.met
	w.waiting++
	l.yield(func() bool {
		if w.met > met {
			return true
		}
		there := 0
		for _, x := range w.lanes {
			if x.call < l.call || !x.returned {
				there++
			}
		}
		if w.waiting < there {
			return false
		}
		w.met, w.waiting, w.before = w.met+1, 0, nil
		w.key, w.marked = w.lanes[0].key, w.lanes[0].marked
		w.well = l.m.without == voting || w.bad != l.call+1 && there == len(w.lanes)
		for _, x := range w.lanes {
			w.before = append(w.before, x.mine...)
		}
		return true
	})
}

// vote reports to all lanes of a warp whether all of them are well, and there.
func (l *modelLane) vote(ok bool) bool {
	if !ok {
		l.w.bad = l.call + 1
	}
	l.syncWarp()
	return l.w.well
}

func (l *modelLane) run() {
	m, r := l.m, l.w.rank
	for l.call = range m.number {
		l.returned = false
		if r != m.absent || l.call < m.number-2 {
			m.kernel(l)
		}
		l.returned = true
		// The kernel ends with its last lane, and with its stores.
		call := l.call
		l.yield(func() bool {
			if m.done[r] > call {
				return true
			}
			for _, x := range m.lanes {
				if x.w.rank == r && (x.call < call || !x.returned) {
					return false
				}
			}
			if m.flyingOf[r] == 0 {
				m.done[r] = call + 1
				m.ended(r, call)
			}
			return m.done[r] > call
		})
	}
}

// direct is what a lane does in a call.
func (l *modelLane) direct() {
	m, r, ch := l.m, l.w.rank, l.w.channel
	c := m.calls[l.call]
	l.heads = 0
	if c.moves != nil {
		l.mover(c)
		return
	}
	tiles := c.tiles[ch]
	if tiles == 0 {
		return
	}
	if c.both {
		l.both(c, tiles)
		return
	}
	l.cur = l.load(m.state(r, ch))
	prev := l.load(m.state(r, ch) + 1)
	if m.failed[r] && m.without != stopping {
		return
	}
	l.limit = prev + uint32(m.depth)
	if m.without == last {
		l.limit = l.cur + uint32(m.depth)
	}
	if c.reads {
		open, ok := l.meetRoot(c)
		if ok && open {
			ok = l.pull(c)
		}
		if !ok && r != c.reduces && c.open[r] && m.failed[r] && m.without != lingering && !m.brief {
			l.linger()
		}
		if !ok || open {
			return
		}
		l.cur, l.heads = l.cur+1, 1
	}
	if !l.push(0) {
		return
	}
	for i := range tiles {
		if i+1 < tiles && !l.push(i+1) {
			return
		}
		var got, want uint32
		for from := range m.ranks {
			want += m.operand(from, r, l.call, ch, i, l.n)
			if from == r {
				got += m.operand(from, r, l.call, ch, i, l.n)
				continue
			}
			if m.without == padding && c.short && r == m.ranks-1 {
				continue
			}
			if !l.travels(from, r, i) {
				got += m.operand(from, r, l.call, ch, i, l.n)
				continue
			}
			word, ok := l.getSome(from, i, l.words(from, r))
			if !ok {
				return
			}
			if l.n >= l.words(from, r) {
				word = m.operand(from, r, l.call, ch, i, l.n)
			}
			got += word
		}
		if got != want {
			m.fault = fmt.Errorf("rank %d has %#x in call %d, channel %d, tile %d, lane %d, want %#x", r, got, l.call, ch, i, l.n, want)
			return
		}
		l.credits(i)
	}
	l.cur -= uint32(l.heads)
	l.finish(l.heads + tiles)
}

// meetRoot is the first tile of a reduce whose root may read. Open reports whether it does; ok is false if the call has
// failed. The operand is what came before the kernel in its stream, so each channel has stored all of it.
func (l *modelLane) meetRoot(c modelCall) (open, ok bool) {
	m, r := l.m, l.w.rank
	for ch, tiles := range c.tiles {
		for i := 0; r != c.reduces && c.open[r] && i < tiles; i++ {
			l.store(m.place(r, r, ch, i, l.n), m.operand(r, 0, l.call, ch, i, l.n), false)
		}
	}
	l.syncWarp()
	var after []*modelStore
	if m.without != preparing {
		after = append(append(after, l.w.before...), l.mine...)
	}
	if ok = true; l.n == 0 {
		ok = l.head(0, c.open[r], after...) && l.hearOpen(c.open[r])
	}
	ok = l.vote(ok)
	return l.w.open, ok
}

// pull is a reduce whose root reads. The channels take turns, by number. It returns false if the call has failed. The
// model does not change the order of loads.
func (l *modelLane) pull(c modelCall) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	peer, at := 1-r, 0
	if r == c.reduces {
		gone, wrong := l.readTiles(c)
		l.wait(nil)
		gone = gone || m.failed[peer] && m.without != asking
		if gone && !m.failed[r] {
			m.failed[r], m.failedIn[r] = true, l.call
		}
		if !l.vote(!gone) {
			return false
		}
		if wrong != nil {
			m.fault = wrong
			return false
		}
		at = m.slot(peer, r, ch, l.cur+1, 0)
		if l.n == 0 {
			l.store(at, 1, true)
		}
	} else {
		ok := true
		if at = m.slot(r, peer, ch, l.cur+1, 0); l.n == 0 && m.without != holding {
			if ok = l.wait(func() bool { return l.load(at) != free }); ok {
				l.store(at, free, false)
			}
		}
		if !l.vote(ok) {
			return false
		}
	}
	if 2%(m.depth/2) == 0 {
		l.publish(2)
	}
	l.finish(2)
	return true
}

// readTiles reads a channel's tiles until the other rank has failed. It returns what is wrong with the data.
func (l *modelLane) readTiles(c modelCall) (gone bool, wrong error) {
	m, peer, turn := l.m, 1-l.w.rank, 0
	for of, tiles := range c.tiles {
		for i := range tiles {
			if turn++; turn/modelTurn%m.channels != l.w.channel {
				continue
			}
			if m.failed[peer] && m.without != looking {
				return true, wrong
			}
			l.reading = true
			l.wait(nil)
			got, want := m.mem[m.place(peer, peer, of, i, l.n)], m.operand(peer, 0, l.call, of, i, l.n)
			if got != want && wrong == nil {
				wrong = fmt.Errorf("the root reads %#x in call %d, channel %d, tile %d, lane %d, want %#x", got, l.call, of, i, l.n, want)
			}
			if m.failed[peer] && m.done[peer] > l.call && !m.brief {
				m.fault = fmt.Errorf("the root reads channel %d, tile %d, lane %d in call %d, which may have been freed", of, i, l.n, l.call)
			}
			l.reading = false
		}
	}
	return false, wrong
}

// reuse writes other data where the root may have read, when a rank's call has ended.
func (m *model) reuse(r, call int) {
	c := m.calls[call]
	if !c.reads || r == c.reduces {
		return
	}
	for ch, tiles := range c.tiles {
		for i := range tiles * lanesOfWarp {
			m.mem[m.place(r, r, ch, i/lanesOfWarp, i%lanesOfWarp)] = uint32(call)
		}
	}
}

// put gives tile t of the call to a peer: of has the words of the lanes.
func (l *modelLane) put(p, t int, of func(lane int) uint32) { l.putSome(p, t, lanesOfWarp, of) }

// putSome gives the first words of a tile. All words count for its key.
func (l *modelLane) putSome(p, t, words int, of func(lane int) uint32) {
	m, r, ch, key := l.m, l.w.rank, l.w.channel, uint32(0)
	slot := m.slot(p, r, ch, l.cur+uint32(t), 0)
	word, keyed := of(l.n), m.without != marking && of(0) == marked
	for n := range lanesOfWarp {
		keyed = keyed || m.without != cleaning && of(n) == free
	}
	if keyed && m.calls[l.call].keyed {
		for n := 0; n < lanesOfWarp; n++ {
			if of(n)^key == free {
				key, n = key+1, -1
			}
		}
		word ^= key
		if l.n == 0 {
			l.store(slot+lanesOfWarp, key, true)
			l.store(slot+lanesOfWarp+1, word, true)
			word = marked
		}
	}
	if l.n < words {
		l.store(slot+l.n, word, true)
	}
}

// get waits for tile t of a peer, and makes its slot free.
func (l *modelLane) get(p, t int) (word uint32, ok bool) { return l.getSome(p, t, lanesOfWarp) }

// getSome is get for the first words of a tile.
func (l *modelLane) getSome(p, t, words int) (word uint32, ok bool) {
	m, r, ch := l.m, l.w.rank, l.w.channel
	slot := m.slot(r, p, ch, l.cur+uint32(t), 0)
	ok = l.n >= words || l.wait(func() bool { return l.load(slot+l.n) != free })
	word = l.load(slot + l.n)
	if m.calls[l.call].keyed {
		if l.n == 0 {
			l.marked = word == marked
		}
		if ok = l.vote(ok); ok && l.w.marked {
			if l.n == 0 {
				word, ok = l.takeKey(slot + lanesOfWarp)
			}
			ok = l.vote(ok)
			word ^= l.w.key
		}
	}
	if !ok {
		return 0, false
	}
	if m.without != clearing && l.n < words {
		l.store(slot+l.n, free, false)
	}
	return word, true
}

// takeKey waits for a key and the first word that came with it, for lane 0.
func (l *modelLane) takeKey(at int) (first uint32, ok bool) {
	if l.m.without != awaiting && !l.wait(func() bool { return l.load(at) != free && l.load(at+1) != free }) {
		return 0, false
	}
	l.key, first = l.load(at), l.load(at+1)
	if l.m.without != unmarking {
		l.store(at, free, false)
		l.store(at+1, free, false)
	}
	return first, true
}

// credits tells the peers what has been taken, after tile i.
func (l *modelLane) credits(i int) {
	m, c := l.m, l.m.calls[l.call]
	every := m.depth / 2
	if m.ranks == 2 && c.moves == nil && !c.both && c.reduces >= 0 && c.tiles[l.w.channel] > m.depth {
		every = m.depth / 4 // only the root takes operands
	}
	if m.without == halves {
		every = m.depth
	}
	if (i+l.heads+1)%every == 0 {
		l.publish(i + 1)
	}
}

// publish tells the peers how many tiles of a call have been taken.
func (l *modelLane) publish(taken int) {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if m.without != meeting {
		l.syncWarp()
	}
	for p := range m.ranks {
		if p == r || p%lanesOfWarp != l.n {
			continue
		}
		var after []*modelStore
		if m.without != releasing {
			after = append(append(after, l.w.before...), l.mine...)
		}
		l.store(m.credit(p, ch, r), l.cur+uint32(taken), false, after...)
	}
}

// finish ends a call of so many tiles.
func (l *modelLane) finish(tiles int) {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if (l.cur^(l.cur+uint32(tiles)))/renewed != 0 && m.without != renewing {
		l.publish(tiles)
	}
	l.syncWarp()
	if l.n == 0 {
		l.store(m.state(r, ch)+1, l.cur, false)
		l.store(m.state(r, ch), l.cur+uint32(tiles), false)
	}
}

// both is Kernel.both.
func (l *modelLane) both(c modelCall, tiles int) {
	m, r := l.m, l.w.rank
	if l.shots(c, tiles) {
		return
	}
	if m.failed[r] && c.spread && c.open[r] && m.without != lingering {
		l.linger()
	}
}

// shots returns false if the call has failed.
func (l *modelLane) shots(c modelCall, tiles int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	l.cur = l.load(m.state(r, ch))
	l.limit = l.load(m.state(r, ch)+1) + uint32(m.depth)
	if m.without == last {
		l.limit = l.cur + uint32(m.depth)
	}
	if m.failed[r] && m.without != stopping {
		return false
	}
	open, base, each := false, 0, 2
	if c.spread {
		base = 1
		if l.n == 0 && !l.head(0, c.open[r]) || !l.sendOperands(c, 0, 1) {
			return false
		}
		ok := true
		if l.n == 0 {
			ok = l.hearOpen(c.open[r])
		}
		if !l.vote(ok) {
			return false
		}
		if open = l.w.open; open {
			each = 1
		}
	} else if !l.sendOperands(c, 0, 0) || !l.greet(c) {
		return false
	}
	credited := 0
	give := func(taken int) {
		credited = taken
		l.publish(taken)
	}
	every := m.depth / 2
	if m.without == halves {
		every = 2 * m.depth
	}
	for i := range tiles {
		if i+1 < tiles && !l.sendOperands(c, i+1, base+(i+1)*each) {
			return false
		}
		taken := base + i*each + 1
		if c.owners[r] && (!l.combined(c, i, taken-1) || open && !l.writeResult(c, i) || !open && !l.pushResult(c, i, taken)) {
			return false
		}
		if !open && i > 0 && !l.gathered(c, i-1, taken-2) {
			return false
		}
		if open && i+1 == tiles {
			break
		}
		if taken-credited >= every || i == 0 && !open && 2 < tiles && m.without != beginning {
			give(taken)
		}
	}
	count := base + tiles*each
	if open {
		if !l.vote(true) {
			return false
		}
		ok := true
		if l.n == 0 {
			ok = l.tellEnd(count)
		}
		if !l.vote(ok) {
			return false
		}
		count++
		for p := range m.ranks {
			for i := 0; p != r && c.takers[r] && c.owners[p] && i < tiles; i++ {
				if !l.gotResult(p, i, m.mem[m.place(r, p, ch, i, l.n)]) {
					return false
				}
			}
		}
	} else if !l.gathered(c, tiles-1, count-1) {
		return false
	}
	if count-credited >= every && m.without != leaving {
		give(count)
	}
	l.finish(count)
	return true
}

// hearOpen takes tile 0 of the peers, for lane 0.
func (l *modelLane) hearOpen(open bool) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	l.w.open = open
	for p := range m.ranks {
		if p == r {
			continue
		}
		at := m.slot(r, p, ch, l.cur, 0)
		if !l.wait(func() bool { return l.load(at) != free }) {
			return false
		}
		if m.without != opening {
			l.w.open = l.w.open && l.load(at)&1 != 0
		}
		l.store(at, free, false)
	}
	return true
}

// sendOperands gives tile i to the owners, as tile t of the call.
func (l *modelLane) sendOperands(c modelCall, i, t int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if !l.room(t) {
		return false
	}
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		if !c.givers[r] || !c.owners[p] {
			continue
		}
		if m.failed[r] && m.failedIn[r] < l.call {
			m.fault = fmt.Errorf("rank %d pushes in call %d, after it failed in call %d", r, l.call, m.failedIn[r])
			return false
		}
		l.put(p, t, func(lane int) uint32 { return m.operand(r, p, l.call, ch, i, lane) })
	}
	return true
}

// greet gives tile 0 to the peers that get nothing else, and takes theirs.
func (l *modelLane) greet(c modelCall) bool {
	m, r := l.m, l.w.rank
	nothing := func(from, to int) bool {
		return from != to && !(c.givers[from] && c.owners[to]) && !(c.owners[from] && c.takers[to])
	}
	for p := range m.ranks {
		if nothing(r, p) && m.without != greeting {
			l.put(p, 0, func(int) uint32 { return 1 })
		}
	}
	for p := range m.ranks {
		if nothing(p, r) && m.without != greeting {
			if _, ok := l.get(p, 0); !ok {
				return false
			}
		}
	}
	return true
}

// combined takes the operands of tile i of this rank's part, which are tile t of the call.
func (l *modelLane) combined(c modelCall, i, t int) bool {
	m, r, ch, sum := l.m, l.w.rank, l.w.channel, uint32(0)
	for p := range m.ranks {
		switch {
		case !c.givers[p]:
		case p == r:
			sum += m.operand(r, r, l.call, ch, i, l.n)
		default:
			word, ok := l.get(p, t)
			if !ok {
				return false
			}
			sum += word
		}
	}
	return l.gotResult(r, i, m.clean(l.call, sum))
}

// result is what ranks have of tile i of a part.
func (m *model) result(part, call, channel, tile, lane int) (sum uint32) {
	for p := range m.ranks {
		if m.calls[call].givers[p] {
			sum += m.operand(p, part, call, channel, tile, lane)
		}
	}
	return m.clean(call, sum)
}

// gotResult reports whether a word of tile i of a part is what it has to be.
func (l *modelLane) gotResult(part, i int, got uint32) bool {
	m, ch := l.m, l.w.channel
	want := m.result(part, l.call, ch, i, l.n)
	if got != want {
		m.fault = fmt.Errorf("rank %d has %#x in call %d, part %d, channel %d, tile %d, lane %d, want %#x", l.w.rank, got, l.call, part, ch, i, l.n, want)
	}
	return got == want
}

// pushResult gives tile i of this rank's part to the takers, as tile t of the call.
func (l *modelLane) pushResult(c modelCall, i, t int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if !l.room(t) {
		return false
	}
	for k := 1; k < m.ranks; k++ {
		if p := (r + k) % m.ranks; c.takers[p] {
			l.put(p, t, func(lane int) uint32 { return m.result(r, l.call, ch, i, lane) })
		}
	}
	return true
}

// gathered takes tile i of the owners' parts, which is tile t of the call.
func (l *modelLane) gathered(c modelCall, i, t int) bool {
	m, r := l.m, l.w.rank
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		if !c.takers[r] || !c.owners[p] {
			continue
		}
		if word, ok := l.get(p, t); !ok || !l.gotResult(p, i, word) {
			return false
		}
	}
	return true
}

// writeResult writes tile i of this rank's part to all takers. It looks before each store. The kernel looks less
// often, and a rank that has failed stays for 5 ms; here it stays until nothing is on its way to it.
func (l *modelLane) writeResult(c modelCall, i int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		if !c.takers[p] {
			continue
		}
		if m.failed[p] && m.without != looking {
			m.failed[r], m.failedIn[r] = true, l.call
			return false
		}
		l.storeTo(p, m.place(p, r, ch, i, l.n), m.result(r, l.call, ch, i, l.n), false)
	}
	return true
}

// linger waits until nothing is on its way to this rank, or from its memory.
func (l *modelLane) linger() {
	l.yield(func() bool {
		return !slices.ContainsFunc(l.m.flying, func(s *modelStore) bool { return s.to == l.w.rank }) &&
			!slices.ContainsFunc(l.m.lanes, func(x *modelLane) bool { return x.reading && x.w.rank != l.w.rank })
	})
}

// mover is Mover in direct.cu.
func (l *modelLane) mover(c modelCall) {
	m, r := l.m, l.w.rank
	if !l.moveTiles(c) && m.failed[r] && c.open[r] && m.without != lingering {
		l.linger()
	}
}

// moveTiles returns false if the call has failed.
func (l *modelLane) moveTiles(c modelCall) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	own := c.most(r)
	l.cur = l.load(m.state(r, ch))
	l.limit = l.load(m.state(r, ch)+1) + uint32(m.depth)
	if m.without == last {
		l.limit = l.cur + uint32(m.depth)
	}
	good := !m.failed[r] || m.without == stopping
	if m.without != heading {
		good = good && (l.n != 0 || l.head(own, c.open[r]))
	}
	good = good && l.give(c, 0)
	if l.n == 0 {
		l.w.heard, l.w.open = own, c.open[r]
		for p := range m.ranks {
			if p == r || !good || m.without == heading {
				continue
			}
			at := m.slot(r, p, ch, l.cur, 0)
			if good = l.wait(func() bool { return l.load(at) != free }); !good {
				break
			}
			told := l.load(at)
			if m.without != telling {
				l.w.heard = max(l.w.heard, int(told>>1))
			}
			if m.without != opening {
				l.w.open = l.w.open && told&1 != 0
			}
			l.store(at, free, false)
		}
		if !good {
			l.w.heard = -1
		}
	}
	l.syncWarp()
	if !good || l.w.heard < 0 {
		return false
	}
	all, long := 1+m.dealt(l.w.heard, ch), l.w.heard > fewModelTiles*m.channels
	if all > 1+3*m.depth {
		m.fault = fmt.Errorf("rank %d hears of %d tiles in move %d, channel %d", r, all, l.call, ch)
		return false
	}
	if m.without == agreeing {
		long = all > 1+fewModelTiles
	}
	if l.w.open && long && m.without != heading {
		if !l.write(c) {
			return false
		}
		l.finish(3)
		return true
	}
	for i := 1; i < all; i++ {
		l.credits(i - 1)
		if !l.give(c, i) || !l.takeTile(c, i) {
			return false
		}
	}
	l.credits(all - 1)
	if m.without == counting {
		all = 1
		for p := range m.ranks {
			all = max(all, 1+m.moved(c, ch, p, r), 1+m.moved(c, ch, r, p))
		}
	}
	l.finish(all)
	return true
}

// takeTile takes tile i of a call from the peers that send one.
func (l *modelLane) takeTile(c modelCall, i int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	for p := range m.ranks {
		if i-1 >= m.moved(c, ch, p, r) {
			continue
		}
		if word, ok := l.get(p, i); !ok || !l.got(p, i-1, word) {
			return false
		}
	}
	return true
}

// got reports whether a word of a peer's tile is what it has to be.
func (l *modelLane) got(p, tile int, got uint32) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	want := m.operand(p, r, l.call, ch, tile, l.n)
	if got != want {
		m.fault = fmt.Errorf("rank %d has %#x in move %d, channel %d, tile %d, lane %d, want %#x", r, got, l.call, ch, tile, l.n, want)
	}
	return got == want
}

// write is Mover.straight.
func (l *modelLane) write(c modelCall) bool {
	l.credits(0)
	if !l.vote(l.takeTile(c, 1)) {
		return false
	}
	l.credits(1)
	if !l.vote(l.writeTiles(c)) {
		return false
	}
	ok := true
	if l.n == 0 {
		ok = l.tellEnd(2)
	}
	if !l.vote(ok) {
		return false
	}
	l.w.straight = l.call + 1
	l.credits(2)
	return true
}

// written checks what peers have written straight to a rank, when its call has ended.
func (m *model) written(r, call int) {
	c := m.calls[call]
	for _, l := range m.lanes {
		w := l.w
		if w.rank != r || w.straight != call+1 {
			continue
		}
		for p := range m.ranks {
			for i := 1; i < m.moved(c, w.channel, p, r); i++ {
				want := m.operand(p, r, call, w.channel, i, l.n)
				if got := m.mem[m.place(r, p, w.channel, i, l.n)]; got != want {
					m.fault = fmt.Errorf("rank %d has %#x after move %d, channel %d, tile %d, lane %d, want %#x", r, got, call, w.channel, i, l.n, want)
				}
			}
		}
	}
}

// writeTiles writes a part of what comes after the first tiles of all channels.
func (l *modelLane) writeTiles(c modelCall) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		for tile := m.channels; tile < c.moves[r][p]; tile++ {
			of, i := tile%m.channels, tile/m.channels
			if (tile-m.channels)/modelTurn%m.channels != ch {
				continue
			}
			if m.failed[p] && m.without != looking {
				m.failed[r], m.failedIn[r] = true, l.call
				return false
			}
			l.storeTo(p, m.place(p, r, of, i, l.n), m.operand(r, p, l.call, of, i, l.n), false)
		}
	}
	return true
}

// tellEnd tells the peers, by tile t, that all is there, and waits until they have told. It is for lane 0, when the
// lanes have met.
func (l *modelLane) tellEnd(t int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if !l.room(t) {
		return false
	}
	var after []*modelStore
	if m.without != fencing {
		after = append(append(after, l.w.before...), l.mine...)
	}
	for k := 1; k < m.ranks; k++ {
		l.store(m.slot((r+k)%m.ranks, r, ch, l.cur+uint32(t), 0), 1, true, after...)
	}
	for p := range m.ranks {
		if p == r || m.without == ending {
			continue
		}
		at := m.slot(r, p, ch, l.cur+uint32(t), 0)
		if !l.wait(func() bool { return l.load(at) != free }) {
			return false
		}
		l.store(at, free, false)
	}
	return true
}

// head gives all peers tile 0 of a move: the longest span, and whether the rank is open. It may come after other stores.
func (l *modelLane) head(most int, open bool, after ...*modelStore) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if !l.room(0) {
		return false
	}
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		l.store(m.slot(p, r, ch, l.cur, 0), uint32(most)<<1|flag(open), true, after...)
	}
	return true
}

// give gives tile i of a move to the peers that get one.
func (l *modelLane) give(c modelCall, i int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	waited := false
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		if i >= m.moved(c, ch, r, p) {
			continue
		}
		if !waited && !l.room(i+1) {
			return false
		}
		waited = true
		l.put(p, i+1, func(lane int) uint32 { return m.operand(r, p, l.call, ch, i, lane) })
	}
	return true
}

// room waits until all peers have room for tile i of a call.
func (l *modelLane) room(i int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	t := l.cur + uint32(i)
	if int32(t-l.limit) >= 0 && m.without != crediting {
		ok := l.wait(func() bool {
			least := l.load(m.credit(r, ch, (r+1)%m.ranks))
			for p := range m.ranks {
				if p != r {
					if n := l.load(m.credit(r, ch, p)); int32(n-least) < 0 {
						least = n
					}
				}
			}
			l.limit = least + uint32(m.depth)
			return int32(t-l.limit) < 0
		})
		if !ok {
			return false
		}
	}
	return true
}

// words is how many words of a tile a rank gives to another one: one if the tile only says that the rank has called.
func (l *modelLane) words(from, to int) int {
	c := l.m.calls[l.call]
	if (c.reduces < 0 || c.reduces == to) && (c.broadcasts < 0 || c.broadcasts == from) {
		return lanesOfWarp
	}
	return 1
}

// travels reports whether a rank gives tile i of the call to another one.
func (l *modelLane) travels(from, to, i int) bool {
	return l.words(from, to) == lanesOfWarp || i == 0 && l.m.without != greeting
}

// push gives tile i to the peers.
func (l *modelLane) push(i int) bool {
	m, r, ch := l.m, l.w.rank, l.w.channel
	if c := m.calls[l.call]; c.broadcasts >= 0 && c.broadcasts != r && i > 0 {
		return true
	}
	if !l.room(i) {
		return false
	}
	for k := 1; k < m.ranks; k++ {
		p := (r + k) % m.ranks
		if m.without == padding && m.calls[l.call].short && p == m.ranks-1 || !l.travels(r, p, i) {
			continue
		}
		if m.failed[r] && m.failedIn[r] < l.call {
			m.fault = fmt.Errorf("rank %d pushes in call %d, after it failed in call %d", r, l.call, m.failedIn[r])
			return false
		}
		l.putSome(p, i, l.words(r, p), func(lane int) uint32 { return m.operand(r, p, l.call, ch, i, lane) })
	}
	return true
}

// TestModel holds that the protocol is right for 2, 4 and 8 ranks and any sizes.
func TestModel(t *testing.T) {
	for ranks, seeds := range map[int]uint64{2: 400, 3: 200, 4: 200, 8: 200} {
		for seed := range seeds / testsize.Of[uint64](10, 8, 1) {
			require.NoError(t, newModel(seed, ranks, nothing).run(), "%d ranks, seed %d", ranks, seed)
		}
	}
}

// eachIsNeeded holds that without any of some rules a seed goes wrong.
func eachIsNeeded(t *testing.T, rules []rule, run func(seed uint64, without rule) error) {
	for _, without := range rules {
		t.Run(string(without), func(t *testing.T) {
			for seed := range uint64(2000) {
				if err := run(seed, without); err != nil {
					t.Logf("seed %d: %v", seed, err)
					return
				}
			}
			t.Fatal("nothing went wrong")
		})
	}
}

// TestModelLane holds that the protocol is right for messages, and that each rule is needed for them.
func TestModelLane(t *testing.T) {
	for seed := range uint64(400) {
		require.NoError(t, newLane(seed, nothing).run(), "seed %d", seed)
		m := newLane(seed, nothing)
		m.absent = int(seed) % 2
		require.NoError(t, m.run(), "a rank stays away, seed %d", seed)
	}
	eachIsNeeded(t, []rule{clearing, crediting, last, releasing, meeting, halves, cleaning, stopping, heading, marking, awaiting, unmarking, renewing}, func(seed uint64, without rule) error {
		return newLane(seed, without).run()
	})
}

// TestModelTwoShots holds that two shots in one launch are right, and that each rule is needed for them.
func TestModelTwoShots(t *testing.T) {
	for seed := range testsize.Of[uint64](15, 36, 150) {
		ranks := []int{3, 4, 8}[seed%3]
		require.NoError(t, makeModel(seed, ranks, nothing, onlyShots).run(), "%d ranks, seed %d", ranks, seed)
		m := makeModel(seed, ranks, nothing, onlyShots)
		m.absent = int(seed) % ranks
		require.NoError(t, m.run(), "a rank stays away, %d ranks, seed %d", ranks, seed)
		m = makeModel(seed, ranks, nothing, onlyShots)
		m.abort = int(seed*7919) % (mostSteps * ranks)
		require.NoError(t, m.run(), "aborted, %d ranks, seed %d", ranks, seed)
	}
	eachIsNeeded(t, append([]rule{clearing, crediting, last, releasing, meeting, halves, cleaning, stopping, beginning, leaving, greeting, marking, awaiting, unmarking, renewing}, straightRules...), func(seed uint64, without rule) error {
		return makeModel(seed, 3, without, onlyShots).run()
	})
}

// TestModelReads holds that reduces of two ranks are right if the root may read. Each rule is needed.
func TestModelReads(t *testing.T) {
	for seed := range uint64(400) {
		require.NoError(t, makeModel(seed, 2, nothing, onlyReads).run(), "seed %d", seed)
		m := makeModel(seed, 2, nothing, onlyReads)
		m.absent = int(seed) % 2
		require.NoError(t, m.run(), "a rank stays away, seed %d", seed)
		m = makeModel(seed, 2, nothing, onlyReads)
		m.abort = int(seed*7919) % (mostSteps * 2)
		require.NoError(t, m.run(), "aborted, seed %d", seed)
	}
	eachIsNeeded(t, append([]rule{clearing, crediting, last, releasing, meeting, halves, cleaning, stopping, renewing}, readRules...), func(seed uint64, without rule) error {
		return makeModel(seed, 2, without, onlyReads).run()
	})
}

// TestModelAbsent: waits for a rank that stays away end, and ranks that have failed write nothing
// afterwards.
func TestModelAbsent(t *testing.T) {
	for seed := range uint64(100) {
		for _, ranks := range []int{2, 4} {
			m := newModel(seed, ranks, nothing)
			m.absent = int(seed) % ranks
			require.NoError(t, m.run(), "%d ranks, seed %d", ranks, seed)
		}
	}
}

// TestModelAborted holds that nothing comes to a rank whose kernel has failed and ended, whenever the waits end.
func TestModelAborted(t *testing.T) {
	for seed := range testsize.Of[uint64](40, 100, 400) {
		for _, ranks := range []int{2, 4, 8} {
			m := newModel(seed, ranks, nothing)
			m.abort = int(seed*7919) % (mostSteps * ranks)
			require.NoError(t, m.run(), "%d ranks, seed %d", ranks, seed)
		}
	}
}

// TestModelRules holds that each rule is needed: without it some seed goes wrong.
func TestModelRules(t *testing.T) {
	needed := func(rules []rule, groups ...int) {
		for _, ranks := range groups {
			t.Run(fmt.Sprint(ranks, " ranks"), func(t *testing.T) {
				eachIsNeeded(t, rules, func(seed uint64, without rule) error { return newModel(seed, ranks, without).run() })
			})
		}
	}
	needed([]rule{
		clearing, crediting, last, releasing, meeting, halves, cleaning, padding, stopping, heading, marking, awaiting, unmarking, renewing, greeting,
		agreeing, opening, fencing, ending, looking, lingering,
	}, 2, 4)
	// Two ranks know each other's spans, and the peer of a rank that has failed does not matter.
	needed([]rule{telling, counting, voting}, 4, 8)
}
