package membership

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testsize"
)

var (
	modelSeed = flag.Uint64("model.seed", 0, "`seed` of TestRandomSchedules; 0 means a new one")
	modelDeep = flag.Bool("model.deep", false, "try more small groups in TestEveryOrder: a million states, 7 minutes on a busy CPU")
	modelRuns = flag.Int("model.runs", 0, "`n` schedules of TestRandomSchedules; 0 means as many as fit the tests' size")
)

// A world is a store and the processes that use it. A step is one access to one key by one process, the end of a
// wait, a death, a call that gives up, or a change of a group's connections. After a view, the members of an epoch
// connect: that succeeds when all have come, and fails if one is dead or has gone on. Members of an epoch that works
// notice if one of them is dead or has gone on.
type world struct {
	keys    map[string]string
	arrived map[int]string // by epoch: one digit or letter for each process that has tried to connect
	procs   []proc
	deaths  int   // how many may still happen
	giveUps int   // how many calls may still give up; their members call again
	wills   bool  // the store knows deaths
	cut     [2]ID // two members that cannot connect; they are the same if all can
	expired bool  // a wait has timed out, or a call has given up
	flaw    flaw
	wrong   string // an invariant that does not hold
}

// flaw is a mistake in the protocol that the model has to find.
type flaw uint8

const (
	sound        flaw = iota
	noCompareSet      // the view is written by Set
	noSettle          // suspects are not waited for
	noTakeover        // nobody follows a silent leader
	noLinks           // members do not say with whom they could not connect
	goneForGood       // joiners take members that gave up for dead
)

type phase uint8

const (
	idle phase = iota // has not begun: a late member, a joiner that has not come
	deciding
	connecting
	working
	over // evicted, or too few
	dead
)

type proc struct {
	id       ID
	joiner   bool
	phase    phase
	m        Machine
	call     Call
	got      []string
	left     time.Duration // of the wait under way
	timeouts int           // how many may still happen
	retries  int           // how often it calls again when members are too few
	view     View          // the last that this process was in
	cfg      Config
	err      error
}

func (w *world) clone() *world {
	c := *w
	c.keys, c.arrived, c.procs = maps.Clone(w.keys), maps.Clone(w.arrived), slices.Clone(w.procs)
	for i := range c.procs {
		p := &c.procs[i]
		p.got = slices.Clone(p.got)
		switch m := p.m.(type) {
		case *Member:
			n := *m
			n.votes, n.deaf = slices.Clone(m.votes), slices.Clone(m.deaf)
			n.here, n.pending = slices.Clone(m.here), slices.Clone(m.pending)
			p.m = &n
		case *Joiner:
			n := *m
			p.m = &n
		}
	}
	return &c
}

var seed = maphash.MakeSeed()

// hash is the state's number. Two states with the same number are taken to be the same.
func (w *world) hash() [2]uint64 {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(w.keys)) {
		fmt.Fprintf(&b, "%s=%s;", k, w.keys[k])
	}
	for _, e := range slices.Sorted(maps.Keys(w.arrived)) {
		b.WriteString(w.arrived[e])
		b.WriteByte('|')
	}
	fmt.Fprintf(&b, "%d %d %v", w.deaths, w.giveUps, w.expired)
	for i := range w.procs {
		p := &w.procs[i]
		fmt.Fprintf(&b, "\n%d %d %d %d %d %d %q", p.phase, p.id, p.view.Epoch, p.timeouts, p.retries, p.left, p.got)
		switch m := p.m.(type) {
		case *Member:
			fmt.Fprintf(&b, "M%d %d %d %d %d %v %v %d %v %v %v %v %q %v", m.next, m.step, m.attempt, m.beat, m.waited, m.stale, m.counted, m.joiners, m.unsure, m.pending, m.here, m.deaf, m.lead, m.asked)
			for _, v := range m.votes {
				fmt.Fprint(&b, v.vote != nil, v.gone)
			}
		case *Joiner:
			fmt.Fprintf(&b, "J%d %d %d", m.step, m.epoch, m.dead)
		}
	}
	s := b.String()
	var h maphash.Hash
	h.SetSeed(seed)
	h.WriteString(s)
	first := h.Sum64()
	h.WriteString("again")
	return [2]uint64{first, h.Sum64()}
}

// newWorld has members of epoch 0 and joiners. suspects are whom each member suspects at first.
func newWorld(members, joiners int, suspects map[int][]ID, min int) *world {
	w := &world{keys: make(map[string]string), arrived: make(map[int]string)}
	for i := range members {
		w.procs = append(w.procs, proc{id: ID(i), view: First(members), cfg: Config{Suspects: suspects[i], Min: min}})
	}
	for range joiners {
		w.procs = append(w.procs, proc{id: -1, joiner: true, cfg: Config{Min: min}})
	}
	return w
}

func (w *world) begin(p *proc, suspects []ID) {
	if p.joiner && p.id < 0 {
		p.m = NewJoiner(w.first())
	} else {
		cfg := p.cfg
		cfg.Self, cfg.Base, cfg.Suspects = p.id, p.view, append(slices.Clone(cfg.Suspects), suspects...)
		if p.phase == connecting && w.severed(p) && w.flaw != noLinks && slices.Contains(w.cut[:], p.id) {
			cfg.Lacks = slices.DeleteFunc(slices.Clone(w.cut[:]), func(id ID) bool { return id == p.id })
		}
		p.cfg.Suspects = nil
		cfg.Patience = 4 * DefaultBeat
		m := NewMember(cfg)
		if w.flaw == noSettle {
			m.cfg.Settle = 0
		}
		p.m = m
	}
	p.phase = deciding
	w.advance(p, Reply{})
}

func (w *world) first() int { return w.procs[0].view.First }

// advance gives a reply to a process's machine.
func (w *world) advance(p *proc, r Reply) {
	p.got = nil
	p.call = p.m.Next(r)
	p.left = p.call.Limit
	if p.call.Op != Done {
		return
	}
	var v View
	switch m := p.m.(type) {
	case *Member:
		v, p.err = m.Result()
	case *Joiner:
		p.id, v, p.err = m.Result()
	}
	p.m = nil
	if p.err != nil {
		p.phase = over
		if p.retries > 0 && errors.Is(p.err, ErrTooFew) {
			p.retries--
			p.phase, p.view, p.cfg.Min, p.err = idle, v, 1, nil
		}
		return
	}
	if !v.Has(p.id) || encode(v) != w.keys[viewKey(v.Epoch)] || v.Epoch <= p.view.Epoch {
		w.fail("member %d has a view %+v of its own", p.id, v)
	}
	p.phase, p.view = connecting, v
	w.arrived[v.Epoch] += mark(p.id)
}

// severed reports whether all members of p's epoch have come, and two of them cannot connect.
func (w *world) severed(p *proc) bool {
	return w.cut[0] != w.cut[1] && p.view.Has(w.cut[0]) && p.view.Has(w.cut[1]) && w.came(p)
}

func mark(id ID) string { return string(rune('A' + int(id))) }

func (w *world) fail(format string, args ...any) {
	if w.wrong == "" {
		w.wrong = fmt.Sprintf(format, args...)
	}
}

// find returns the process of a member, nil if no process has got that id yet.
func (w *world) find(id ID) *proc {
	for i := range w.procs {
		if w.procs[i].id == id {
			return &w.procs[i]
		}
	}
	return nil
}

// broken returns members of p's epoch that are dead, and whether the epoch is at an end.
func (w *world) broken(p *proc) (suspects []ID, end bool) {
	for _, id := range p.view.IDs {
		q := w.find(id)
		switch {
		case q == nil || q.phase == idle:
		case q.phase == dead:
			suspects, end = append(suspects, id), true
		case q.view.Epoch > p.view.Epoch, q.phase == over, q.phase == deciding && q.view.Epoch == p.view.Epoch && q.m != nil && !isJoiner(q.m):
			end = true
		}
	}
	return suspects, end
}

func isJoiner(m Machine) bool { _, ok := m.(*Joiner); return ok }

// steps returns the numbers of the steps that can happen: kind*64 + process.
func (w *world) steps() (all []int) {
	for i := range w.procs {
		p := &w.procs[i]
		if w.can(p) {
			all = append(all, i)
		}
		if p.phase == deciding && p.call.Op == Await && p.call.Limit > 0 && p.timeouts > 0 && !w.exist(p.call.Keys) {
			all = append(all, 64+i)
		}
		if w.deaths > 0 && p.phase != dead && p.phase != over && !(p.joiner && p.phase == idle) {
			all = append(all, 128+i)
		}
		if m, ok := p.m.(*Member); ok && w.giveUps > 0 && m.step != voted {
			all = append(all, 192+i)
		}
	}
	return all
}

func (w *world) exist(keys []string) bool {
	return !slices.ContainsFunc(keys, func(k string) bool { _, ok := w.keys[k]; return !ok })
}

// can reports whether a process can go on without a timeout.
func (w *world) can(p *proc) bool {
	switch p.phase {
	case idle:
		return true
	case deciding:
		return p.call.Op != Await || w.exist(p.call.Keys)
	case connecting:
		_, end := w.broken(p)
		return end || w.came(p)
	case working:
		_, end := w.broken(p)
		return end
	}
	return false
}

func (w *world) came(p *proc) bool {
	return !slices.ContainsFunc(p.view.IDs, func(id ID) bool { return !strings.Contains(w.arrived[p.view.Epoch], mark(id)) })
}

// do takes a step.
func (w *world) do(step int) {
	p := &w.procs[step%64]
	switch step / 64 {
	case 1:
		p.timeouts--
		w.expired = true
		w.advance(p, Reply{Late: true})
		return
	case 2:
		w.deaths--
		w.bequeath(p)
		p.phase, p.m = dead, nil
		return
	case 3:
		w.giveUps--
		w.expired = true
		key, value := p.m.(*Member).Vote()
		if w.keys[key] == value {
			w.put(key, gaveUp)
			if w.flaw == goneForGood {
				w.put(key, gone)
			}
		}
		lead, held := p.m.(*Member).Lead()
		if v, there := w.keys[lead]; there && slices.Contains(held, v) {
			w.put(lead, "")
		}
		p.phase, p.m = idle, nil
		return
	}
	switch p.phase {
	case idle:
		w.begin(p, nil)
	case deciding:
		w.call(p)
	case connecting, working:
		suspects, end := w.broken(p)
		if p.phase == connecting && w.came(p) && !w.severed(p) {
			p.phase = working // even if one is dead by now: it did connect
			delete(w.keys, voteKey(p.view.Epoch, p.id))
			if p.id == p.view.IDs[0] {
				delete(w.keys, leadKey(p.view.Epoch))
			}
		} else if end || w.severed(p) {
			w.begin(p, suspects)
		}
	}
}

// bequeath carries out the will of a member that dies.
func (w *world) bequeath(p *proc) {
	if !w.wills || p.id < 0 {
		return
	}
	key, value := voteKey(p.view.Epoch+1, p.id), ""
	switch m := p.m.(type) {
	case *Joiner:
		key, value = joinKey(p.id), waiting
	case *Member:
		if m.step != voted {
			key, value = m.Vote()
		}
	}
	if w.keys[key] == value {
		w.put(key, gone)
	}
}

// call does the call of a process, one key at a time.
func (w *world) call(p *proc) {
	c := p.call
	key := c.Keys[0]
	switch c.Op {
	case Set:
		for _, key := range c.Keys {
			w.put(key, c.New)
		}
		w.advance(p, Reply{})
	case CompareSet:
		held, ok := w.keys[key]
		switch {
		case w.flaw == noCompareSet && strings.HasPrefix(key, "view/"), ok && held == c.Old, !ok && c.Old == "":
			w.put(key, c.New)
			held = c.New
		case !ok:
			held = c.Old
		}
		w.advance(p, Reply{Values: []string{held}})
	case Add:
		n := int64(0)
		fmt.Sscan(w.keys[key], &n)
		w.put(key, fmt.Sprint(n+c.Delta))
		w.advance(p, Reply{Sum: n + c.Delta})
		if j, ok := p.m.(*Joiner); ok && c.Delta > 0 {
			p.id = j.id
		}
	case Look, Await:
		p.got = append(p.got, w.keys[c.Keys[len(p.got)]])
		if len(p.got) == len(c.Keys) {
			w.advance(p, Reply{Values: p.got})
		}
	}
}

func (w *world) put(key, value string) {
	if old, ok := w.keys[key]; ok && old != value && strings.HasPrefix(key, "view/") {
		w.fail("two views: %s was %s and becomes %s", key, old, value)
	}
	w.keys[key] = value
}

// settle goes on until nothing can happen any more, without deaths, and lets time pass only when all
// wait. It reports whether all have come to an end.
func (w *world) settle() bool {
	for range 20_000 {
		moved := false
		for i := range w.procs {
			if w.can(&w.procs[i]) {
				w.do(i)
				moved = true
			}
		}
		if w.wrong != "" {
			return true
		}
		if !moved && !w.pass() {
			return true
		}
	}
	return false
}

// pass lets the shortest wait time out. It reports whether there is one.
func (w *world) pass() bool {
	var next *proc
	for i := range w.procs {
		p := &w.procs[i]
		leads := true
		if m, ok := p.m.(*Member); ok && w.flaw == noTakeover {
			leads = m.step != following
		}
		if j, ok := p.m.(*Joiner); ok {
			leads = w.wills && w.extinct() || w.exist([]string{viewKey(j.epoch)}) // else it looks for ever
		}
		if p.phase == deciding && p.call.Limit > 0 && leads && (next == nil || p.left < next.left) {
			next = p
		}
	}
	if next == nil {
		return false
	}
	passed := next.left
	for i := range w.procs {
		if p := &w.procs[i]; p.phase == deciding && p.call.Limit > 0 {
			p.left -= passed
		}
	}
	w.advance(next, Reply{Late: true})
	return true
}

// alive reports whether a member lives.
func (w *world) alive() bool {
	return slices.ContainsFunc(w.procs, func(p proc) bool {
		return p.phase != dead && p.phase != over && !(p.joiner && (p.phase == idle || isJoiner(p.m)))
	})
}

// extinct reports whether all that were members are dead.
func (w *world) extinct() bool {
	return !slices.ContainsFunc(w.procs, func(p proc) bool {
		return p.phase != dead && !(p.joiner && (p.phase == idle || isJoiner(p.m) || errors.Is(p.err, ErrNoMembers)))
	})
}

// check says what is wrong with a world that has settled.
func (w *world) check() string {
	if w.wrong != "" {
		return w.wrong
	}
	epoch := -1
	for i := range w.procs {
		p := &w.procs[i]
		switch p.phase {
		case dead:
		case over:
			if errors.Is(p.err, ErrNoMembers) {
				if w.alive() {
					return fmt.Sprintf("joiner %d believes that no member is left", p.id)
				}
			} else if errors.Is(p.err, ErrEvicted) {
				if !w.expired && !p.joiner && (w.cut[0] == w.cut[1] || !slices.Contains(w.cut[:], p.id)) {
					return fmt.Sprintf("member %d lives and voted in time, and is evicted: %v", p.id, p.err)
				}
			} else if !errors.Is(p.err, ErrTooFew) {
				return p.err.Error()
			}
		case working:
			if epoch >= 0 && epoch != p.view.Epoch {
				return fmt.Sprintf("members work in epochs %d and %d", epoch, p.view.Epoch)
			}
			epoch = p.view.Epoch
		case deciding:
			if !p.joiner || !isJoiner(p.m) || w.wills && w.extinct() {
				return fmt.Sprintf("member %d hangs in %+v", p.id, p.call)
			}
		default:
			return fmt.Sprintf("member %d hangs while it connects epoch %d", p.id, p.view.Epoch)
		}
	}
	return ""
}

// explore tries all orders of steps from w. It returns the number of states and the first mistake.
func explore(w *world) (states int, wrong string) {
	seen := map[[2]uint64]bool{w.hash(): true}
	stack := []*world{w}
	for len(stack) > 0 {
		w := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		states++
		fair := w.clone()
		if !fair.settle() {
			return states, "it never ends"
		}
		if wrong := fair.check(); wrong != "" {
			return states, wrong
		}
		for _, s := range w.steps() {
			next := w.clone()
			next.do(s)
			if h := next.hash(); !seen[h] {
				seen[h] = true
				stack = append(stack, next)
			}
		}
	}
	return states, ""
}

type smallWorld struct {
	name                               string
	members, joiners                   int
	suspects                           map[int][]ID
	min                                int
	deaths, timeouts, giveUps, retries int
	wills, deep                        bool
	cut                                [2]ID
}

var smallWorlds = []smallWorld{
	{name: "2 members, 1 death", members: 2, deaths: 1, timeouts: 3},
	{name: "2 members, 1 death with a will", members: 2, deaths: 1, timeouts: 1, wills: true},
	{name: "2 members that suspect each other", members: 2, suspects: map[int][]ID{0: {1}, 1: {0}}, timeouts: 3},
	{name: "2 members, 1 of them gives up and calls again", members: 2, giveUps: 1, timeouts: 1},
	{name: "2 members, at least 2, call again", members: 2, min: 2, deaths: 1, timeouts: 1, retries: 1},
	{name: "1 member, 1 joiner, 1 death", members: 1, joiners: 1, deaths: 1, timeouts: 1},
	{name: "2 members, 1 joiner", members: 2, joiners: 1, timeouts: 0},
	{name: "3 members, a wrong suspect", members: 3, suspects: map[int][]ID{0: {2}}},
	{name: "3 members, 1 death", members: 3, deaths: 1},

	{name: "1 member, 1 joiner, 1 death with a will", members: 1, joiners: 1, deaths: 1, timeouts: 2, wills: true},
	{name: "1 member that gives up, 1 joiner", members: 1, joiners: 1, giveUps: 1, timeouts: 2, wills: true},
	{name: "3 members, a broken link", members: 3, cut: [2]ID{0, 2}},
	{name: "2 members, a broken link, 1 death", members: 2, deaths: 1, timeouts: 1, cut: [2]ID{0, 1}},

	{name: "2 members, 2 joiners", members: 2, joiners: 2, deep: true},
	{name: "2 members, 1 joiner, 1 death", members: 2, joiners: 1, deaths: 1, timeouts: 1, deep: true},
	{name: "3 members, 2 deaths", members: 3, deaths: 2, timeouts: 1, deep: true},
	{name: "3 members, 1 gives up", members: 3, giveUps: 1, suspects: map[int][]ID{0: {2}}, deep: true},
	{name: "4 members, 1 death with a will", members: 4, deaths: 1, wills: true, deep: true},
}

func (s smallWorld) world() *world {
	w := newWorld(s.members, s.joiners, s.suspects, s.min)
	w.deaths, w.giveUps, w.wills, w.cut = s.deaths, s.giveUps, s.wills, s.cut
	for i := range w.procs {
		w.procs[i].timeouts, w.procs[i].retries = s.timeouts, s.retries
	}
	return w
}

// TestEveryOrder tries all orders of steps of small groups. From each state that can be reached, the
// rest of the run must end, without deaths, and what it ends with is checked.
func TestEveryOrder(t *testing.T) {
	for _, s := range smallWorlds {
		if s.deep && !*modelDeep {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			begun := time.Now()
			states, wrong := explore(s.world())
			t.Logf("%d states in %v", states, time.Since(begun).Round(time.Millisecond))
			require.Empty(t, wrong)
		})
	}
}

// TestTheModelFindsFlaws: what the checks find is there to be found.
func TestTheModelFindsFlaws(t *testing.T) {
	for flaw, c := range map[flaw]struct{ in, want string }{
		noCompareSet: {"2 members, 1 death with a will", "two views"},
		noSettle:     {"2 members that suspect each other", "voted in time, and is evicted"},
		noTakeover:   {"2 members, 1 death", "hangs"},
		noLinks:      {"3 members, a broken link", "never ends"},
		goneForGood:  {"1 member that gives up, 1 joiner", "no member is left"},
	} {
		s := smallWorlds[slices.IndexFunc(smallWorlds, func(s smallWorld) bool { return s.name == c.in })]
		w := s.world()
		w.flaw = flaw
		_, found := explore(w)
		require.Contains(t, found, c.want, "flaw %d", flaw)
	}
}

// TestRandomSchedules runs groups of 2 to 16 members, with joiners, wrong suspects, deaths, timeouts
// and processes that stop for a while, in random orders.
func TestRandomSchedules(t *testing.T) {
	from := *modelSeed
	if from == 0 {
		from = rand.Uint64()
	}
	t.Logf("-model.seed %d", from)
	ends := make(map[string]int)
	for i := range cmp.Or(*modelRuns, testsize.Of(1000, 2000, 30_000)) {
		r := rand.New(rand.NewPCG(from, uint64(i)))
		w := randomWorld(r)
		stopped := make(map[int]int) // until which step
		for n := range 50 + r.IntN(400) {
			steps := slices.DeleteFunc(w.steps(), func(s int) bool { return stopped[s%64] > n })
			if len(steps) == 0 {
				break
			}
			s := steps[r.IntN(len(steps))]
			if r.IntN(50) == 0 {
				stopped[s%64] = n + r.IntN(200)
				continue
			}
			if s >= 128 && r.IntN(20) > 0 {
				continue
			}
			w.do(s)
		}
		require.True(t, w.settle(), "schedule %d never ends", i)
		require.Empty(t, w.check(), "schedule %d", i)
		for _, p := range w.procs {
			switch {
			case p.phase == dead:
				ends["dead"]++
			case p.phase == working:
				ends[fmt.Sprintf("works in epoch %d", p.view.Epoch)]++
			case p.err != nil && errors.Is(p.err, ErrEvicted):
				ends["evicted"]++
			case p.err != nil:
				ends["too few"]++
			default:
				ends["waits to join"]++
			}
		}
	}
	t.Log(ends)
}

func randomWorld(r *rand.Rand) *world {
	size := 2 + r.IntN(15)
	suspects := make(map[int][]ID)
	for i := range size {
		if r.IntN(4) == 0 {
			suspects[i] = []ID{ID(r.IntN(size))}
		}
	}
	w := newWorld(size, r.IntN(4), suspects, r.IntN(size+1))
	w.deaths, w.giveUps, w.wills = r.IntN(size), r.IntN(3), r.IntN(2) == 0
	if r.IntN(4) == 0 {
		w.cut = [2]ID{ID(r.IntN(size)), ID(r.IntN(size))}
	}
	for i := range w.procs {
		w.procs[i].timeouts, w.procs[i].retries = r.IntN(6), r.IntN(3)
		w.procs[i].cfg.Max = r.IntN(2) * r.IntN(size+4)
	}
	return w
}
