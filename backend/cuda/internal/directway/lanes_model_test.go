package directway_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// A model of the kernels of a group's messages and collectives: when one starts, and when it can end. A
// rank posts messages and collectives in an order of its own; only those of a lane, and the collectives,
// have the same on all ranks. A kernel starts when it is the first of its stream and there is room on the
// device. It ends when the kernels of all ranks that take part have started. The first collective connects
// the ranks, and messages before it go through the host.

// laneRule is a part that a test leaves out.
type laneRule string

const (
	allRules  laneRule = ""
	ownStream laneRule = "each lane has a stream"
	ownRoom   laneRule = "there is room for the kernels of all lanes and of a collective"
	counted   laneRule = "both ranks change from the host to the lane at the same message"
)

// posting is a message or a collective (src -1): number n of its lane, or of the collectives.
type posting struct{ src, dst, n int }

type laneModel struct {
	g       *rand.Rand
	without laneRule
	ranks   int
	orders  [][]posting
	// Kernels, and messages on hosts, by rank. What has the same key follows each other.
	queues  []map[[2]int][]posting
	running []map[posting]bool
	hosts   []map[posting]bool
	posted  []int
	linked  []bool            // the rank has posted the first collective
	hosted  map[[2]int]int    // up to which message a pair goes through the host
	sides   [2]map[[2]int]int // how many each side has posted before it connected
	started map[posting]int   // how many ranks take part in it
}

func newLaneModel(seed uint64, ranks int, without laneRule) *laneModel {
	m := &laneModel{g: rand.New(rand.NewPCG(seed, uint64(ranks))), without: without, ranks: ranks, hosted: make(map[[2]int]int), started: make(map[posting]int)}
	m.sides = [2]map[[2]int]int{make(map[[2]int]int), make(map[[2]int]int)}
	lanes := make(map[[2]int]int)
	for src := range ranks {
		for dst := range ranks {
			if src != dst {
				lanes[[2]int{src, dst}] = m.g.IntN(4)
			}
		}
	}
	for r := range ranks {
		left := map[[2]int]int{{-1, -1}: 3}
		for src := range ranks {
			for dst := range ranks {
				if (src == r) != (dst == r) {
					left[[2]int{src, dst}] = lanes[[2]int{src, dst}]
				}
			}
		}
		next := make(map[[2]int]int)
		var order []posting
		for {
			var keys [][2]int
			for src := -1; src < ranks; src++ {
				for dst := -1; dst < ranks; dst++ {
					if k := [2]int{src, dst}; left[k] > next[k] {
						keys = append(keys, k)
					}
				}
			}
			if len(keys) == 0 {
				break
			}
			k := keys[m.g.IntN(len(keys))]
			order = append(order, posting{k[0], k[1], next[k]})
			next[k]++
		}
		m.orders = append(m.orders, order)
		m.queues, m.running, m.hosts = append(m.queues, make(map[[2]int][]posting)), append(m.running, make(map[posting]bool)), append(m.hosts, make(map[posting]bool))
	}
	m.posted, m.linked = make([]int, ranks), make([]bool, ranks)
	return m
}

// connected reports whether all ranks have come to the first collective.
func (m *laneModel) connected() bool {
	for _, ok := range m.linked {
		if !ok {
			return false
		}
	}
	return true
}

// post is what a rank's next call does. It returns false if that waits for the others to connect.
func (m *laneModel) post(r int) bool {
	p := m.orders[r][m.posted[r]]
	pair := [2]int{p.src, p.dst}
	key := pair
	switch {
	case p.src < 0:
		m.linked[r] = true
		if !m.connected() {
			return false // the first collective connects
		}
		if p.n == 0 && len(m.hosted) == 0 {
			for k := range m.sides[0] {
				m.hosted[k] = max(m.sides[0][k], m.sides[1][k])
			}
			for k := range m.sides[1] {
				m.hosted[k] = max(m.sides[0][k], m.sides[1][k])
			}
		}
	case !m.connected():
		side := 0
		if p.dst == r {
			side = 1
		}
		m.sides[side][pair]++
		m.hosts[r][p] = true
		m.posted[r]++
		return true
	default:
		if m.without != counted && p.n < m.hosted[pair] {
			m.hosts[r][p] = true
			m.posted[r]++
			return true
		}
		if m.without == ownStream {
			key = [2]int{0, 0}
		}
	}
	m.queues[r][key] = append(m.queues[r][key], p)
	m.posted[r]++
	return true
}

// step lets one thing happen; false if nothing can.
func (m *laneModel) step() bool {
	first := m.g.IntN(m.ranks)
	for i := range m.ranks {
		r := (first + i) % m.ranks
		if m.g.IntN(2) == 0 && m.posted[r] < len(m.orders[r]) && m.post(r) {
			return true
		}
		for _, key := range m.keys(r) {
			if q := m.queues[r][key]; len(q) > 0 && m.run(r, key, q[0]) {
				return true
			}
		}
		for _, p := range m.orders[r] {
			if other := p.src + p.dst - r; m.hosts[r][p] && m.hosts[other][p] {
				delete(m.hosts[r], p)
				delete(m.hosts[other], p)
				return true
			}
		}
	}
	for r := range m.ranks {
		if m.posted[r] < len(m.orders[r]) && m.post(r) {
			return true
		}
	}
	return false
}

// keys returns the keys that a rank's queues may have.
func (m *laneModel) keys(r int) [][2]int {
	all := [][2]int{{-1, -1}, {0, 0}}
	for p := range m.ranks {
		if p != r {
			all = append(all, [2]int{r, p}, [2]int{p, r})
		}
	}
	return all
}

// run starts a kernel or ends it.
func (m *laneModel) run(r int, key [2]int, p posting) bool {
	room := 1 + 2*(m.ranks-1)
	if m.without == ownRoom {
		room = 1
	}
	if !m.running[r][p] {
		if len(m.running[r]) == room {
			return false
		}
		m.running[r][p] = true
		m.started[p]++
		return true
	}
	want := 2
	if p.src < 0 {
		want = m.ranks
	}
	if m.started[p] < want {
		return false
	}
	delete(m.running[r], p)
	m.queues[r][key] = m.queues[r][key][1:]
	return true
}

func (m *laneModel) ends() error {
	for m.step() {
	}
	for r := range m.ranks {
		if m.posted[r] < len(m.orders[r]) {
			return fmt.Errorf("rank %d waits with %v", r, m.orders[r][m.posted[r]])
		}
		for _, q := range m.queues[r] {
			if len(q) > 0 {
				return fmt.Errorf("rank %d waits in the kernel of %v", r, q[0])
			}
		}
		for p := range m.hosts[r] {
			return fmt.Errorf("rank %d waits at the host in %v", r, p)
		}
	}
	return nil
}

// TestModelLanes holds that messages and collectives end in whatever order the ranks post them, and that
// each rule is needed.
func TestModelLanes(t *testing.T) {
	for _, ranks := range []int{2, 4, 8} {
		for seed := range uint64(200) {
			require.NoError(t, newLaneModel(seed, ranks, allRules).ends(), "%d ranks, seed %d", ranks, seed)
		}
		for _, without := range []laneRule{ownStream, ownRoom, counted} {
			t.Run(fmt.Sprintf("%d ranks, without: %s", ranks, without), func(t *testing.T) {
				for seed := range uint64(200) {
					if err := newLaneModel(seed, ranks, without).ends(); err != nil {
						t.Logf("seed %d: %v", seed, err)
						return
					}
				}
				t.Fatal("everything ended")
			})
		}
	}
}
