package cluster_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
)

// group runs the plans of all ranks on plain slices, one event after another in an order drawn from
// rng. It refuses plans that could go wrong on a transport: the group must not stop before the end,
// and all ranks of a step must have the same step. Ranges lie inside their buffers. Nobody uses
// memory that a step between clusters still owns.
type group struct {
	l       *cluster.Layout
	rng     *rand.Rand
	combine func(dst, src []byte)
	ranks   []*member
	going   map[int][]*member // by ID: the ranks that have begun a step between clusters
	sent    []int64           // by rank: bytes that it sends to other clusters
	entered map[[2]int]int64  // by cluster and sending cluster: bytes
}

type member struct {
	rank  int
	p     *cluster.Plan
	next  int
	bufs  [3][]byte
	going []*cluster.Step // begun, not ended
	ended map[int]bool    // by ID
}

func (m *member) slice(buf plan.Buffer, off, n int64) []byte { return m.bufs[buf][off : off+n] }

func newGroup(l *cluster.Layout, plans []*cluster.Plan, outs, ins [][]byte, combine func(dst, src []byte), rng *rand.Rand) *group {
	g := &group{
		l: l, rng: rng, combine: combine, going: map[int][]*member{}, sent: make([]int64, l.Ranks()), entered: map[[2]int]int64{},
	}
	for r, p := range plans {
		m := &member{rank: r, p: p, ended: map[int]bool{}}
		m.bufs = [3][]byte{plan.Out: outs[r], plan.In: ins[r], plan.Scratch: bytes.Repeat([]byte{0xa5}, int(p.Scratch))}
		g.ranks = append(g.ranks, m)
	}
	return g
}

func (m *member) errorf(format string, args ...any) error {
	return fmt.Errorf("rank %d, step %d of %d: %s\n%v", m.rank, m.next, len(m.p.Steps), fmt.Sprintf(format, args...), m.p)
}

// run executes the plans to their ends.
func (g *group) run() error {
	for {
		var can []func() error
		ended := true
		for _, m := range g.ranks {
			if m.next == len(m.p.Steps) {
				continue
			}
			ended = false
			s := &m.p.Steps[m.next]
			switch {
			case s.Finish:
				if !slices.ContainsFunc(m.going, func(x *cluster.Step) bool { return x.Chunk == s.Chunk && !m.ended[x.ID] }) {
					can = append(can, func() error {
						m.going = slices.DeleteFunc(m.going, func(x *cluster.Step) bool { return x.Chunk == s.Chunk })
						m.next++
						return nil
					})
				}
			case s.Stage == cluster.Between:
				can = append(can, func() error { return g.begin(m, s) })
			case s.Ranks[0] == m.rank && g.together(s):
				can = append(can, func() error { return g.inside(s) })
			}
		}
		for id, ms := range g.going {
			if s := step(ms[0], id); len(ms) == len(s.Ranks) {
				can = append(can, func() error { return g.between(id, ms) })
			}
		}
		if len(can) == 0 && ended {
			return g.finish()
		}
		if len(can) == 0 {
			err := errors.New("the group stops")
			for _, m := range g.ranks {
				if m.next < len(m.p.Steps) {
					err = errors.Join(err, m.errorf("waits"))
				}
			}
			return err
		}
		if err := can[g.rng.IntN(len(can))](); err != nil {
			return err
		}
	}
}

func (g *group) finish() error {
	for _, m := range g.ranks {
		if len(m.going) > 0 {
			return m.errorf("a step between clusters has not been ended")
		}
	}
	return nil
}

func step(m *member, id int) *cluster.Step {
	return m.going[slices.IndexFunc(m.going, func(s *cluster.Step) bool { return s.ID == id && !m.ended[id] })]
}

// together reports whether all ranks of a step inside have come to it.
func (g *group) together(s *cluster.Step) bool {
	return !slices.ContainsFunc(s.Ranks, func(r int) bool {
		m := g.ranks[r]
		return m.next == len(m.p.Steps) || !slices.Equal(m.p.Steps[m.next].Ranks, s.Ranks) || m.p.Steps[m.next].Stage == cluster.Between
	})
}

func (g *group) begin(m *member, s *cluster.Step) error {
	if m.ended[s.ID] || s.ID < 0 || s.ID >= m.p.IDs || !slices.Contains(s.Ranks, m.rank) {
		return m.errorf("step %d is not this rank's to begin", s.ID)
	}
	for _, p := range s.Parts {
		if err := g.free(m, s.Dst, p.Dst, p.Len, s.Op != plan.OpBroadcast || s.Ranks[s.Root] != m.rank); err != nil {
			return err
		}
		if s.Seal != 0 && m.rank == s.Ranks[s.Root] {
			binary.LittleEndian.PutUint64(m.slice(s.Dst, p.Dst+p.Len-8, 8), s.Seal)
		}
	}
	m.going = append(m.going, s)
	g.going[s.ID] = append(g.going[s.ID], m)
	m.next++
	return nil
}

// free checks that no step between clusters forbids to read a range, or to write it.
func (g *group) free(m *member, buf plan.Buffer, off, n int64, write bool) error {
	if off < 0 || n < 0 || off+n > int64(len(m.bufs[buf])) {
		return m.errorf("%v[%d:%d] is not within %d bytes", buf, off, off+n, len(m.bufs[buf]))
	}
	for _, s := range m.going {
		for _, p := range s.Parts {
			reads := s.Op == plan.OpBroadcast && s.Ranks[s.Root] == m.rank
			if (write || !reads) && n > 0 && p.Len > 0 && s.Dst == buf && off < p.Dst+p.Len && p.Dst < off+n {
				return m.errorf("%v[%d:%d] belongs to step %d between clusters", buf, off, off+n, s.ID)
			}
		}
	}
	return nil
}

// inside runs a step of a cluster, at which all its ranks are.
func (g *group) inside(first *cluster.Step) (err error) {
	defer must.Catch(&err)
	var ms []*member
	var steps []*cluster.Step
	for i, r := range first.Ranks {
		m := g.ranks[r]
		s := &m.p.Steps[m.next]
		if s.Op != first.Op || s.Even != first.Even || !slices.Equal(s.Ranks, first.Ranks) || s.Root != first.Root {
			return m.errorf("rank %d does %+v", first.Ranks[0], first)
		}
		for _, p := range s.Parts {
			reads := s.Op == plan.OpReduceScatter || p.From == i
			writes := s.Op == plan.OpAllGather || p.To == i
			if reads {
				must.Do(g.free(m, s.Src, p.Src, p.Len, false))
			}
			if writes {
				same := s.Src == s.Dst && p.Src == p.Dst && s.Op != plan.OpReduceScatter && p.From == i
				must.Do(g.free(m, s.Dst, p.Dst, p.Len, !same))
			}
		}
		ms, steps = append(ms, m), append(steps, s)
	}
	type move struct {
		to   []byte
		data []byte
	}
	var moves []move
	switch first.Op {
	case plan.OpReduceScatter:
		for k, p := range first.Parts {
			var sum []byte
			for i, m := range ms {
				q := steps[i].Parts[k]
				if q.Src != p.Src || q.Len != p.Len || q.To != p.To {
					return m.errorf("part %d differs from that of rank %d", k, ms[0].rank)
				}
				data := m.slice(steps[i].Src, q.Src, q.Len)
				if i == 0 {
					sum = slices.Clone(data)
				} else {
					g.combine(sum, data)
				}
			}
			q := steps[p.To].Parts[k]
			moves = append(moves, move{ms[p.To].slice(steps[p.To].Dst, q.Dst, q.Len), sum})
		}
	case plan.OpAllGather:
		for k, p := range first.Parts {
			q := steps[p.From].Parts[k]
			data := slices.Clone(ms[p.From].slice(steps[p.From].Src, q.Src, q.Len))
			for i, m := range ms {
				to := steps[i].Parts[k]
				if to.From != p.From || to.Len != p.Len {
					return m.errorf("part %d differs from that of rank %d", k, ms[0].rank)
				}
				moves = append(moves, move{m.slice(steps[i].Dst, to.Dst, to.Len), data})
			}
		}
	case plan.OpBarrier:
	default:
		for i, from := range ms {
			for j, to := range ms {
				var gone, come []cluster.Part
				pick := func(s *cluster.Step) (ps []cluster.Part) {
					for _, p := range s.Parts {
						if p.From == i && p.To == j {
							ps = append(ps, p)
						}
					}
					return ps
				}
				gone, come = pick(steps[i]), pick(steps[j])
				if len(gone) != len(come) {
					return to.errorf("%d parts go from place %d to %d, and %d come", len(gone), i, j, len(come))
				}
				for k := range gone {
					if gone[k].Len != come[k].Len {
						return to.errorf("a part of %d bytes goes and one of %d comes", gone[k].Len, come[k].Len)
					}
					data := slices.Clone(from.slice(steps[i].Src, gone[k].Src, gone[k].Len))
					moves = append(moves, move{to.slice(steps[j].Dst, come[k].Dst, come[k].Len), data})
				}
			}
		}
	}
	for _, x := range moves {
		copy(x.to, x.data)
	}
	for _, m := range ms {
		m.next++
	}
	return nil
}

// between runs a step among ranks of different clusters, all of which have begun it.
func (g *group) between(id int, ms []*member) error {
	first := step(ms[0], id)
	slices.SortFunc(ms, func(a, b *member) int { return slices.Index(first.Ranks, a.rank) - slices.Index(first.Ranks, b.rank) })
	var data [][]byte
	for _, m := range ms {
		s := step(m, id)
		if s.Op != first.Op || !slices.Equal(s.Ranks, first.Ranks) || s.Root != first.Root || len(s.Parts) != len(first.Parts) || s.Seal != first.Seal {
			return m.errorf("step %d differs from that of rank %d: %+v and %+v", id, ms[0].rank, s, first)
		}
		for k, p := range s.Parts {
			if p.Len != first.Parts[k].Len {
				return m.errorf("step %d has %d bytes, and %d on rank %d", id, p.Len, first.Parts[k].Len, ms[0].rank)
			}
			data = append(data, m.slice(s.Dst, p.Dst, p.Len))
		}
		for _, x := range s.Messages(m.rank, m.p.Call.Elem, "").Steps {
			if x.Kind == plan.Send {
				to := s.Ranks[x.Peer]
				g.sent[m.rank] += x.Len
				g.entered[[2]int{g.l.Cluster(to), g.l.Cluster(m.rank)}] += x.Len
			}
		}
	}
	if len(data) > 0 {
		var result []byte
		switch first.Op {
		case plan.OpBroadcast:
			result = slices.Clone(data[first.Root])
		default:
			result = slices.Clone(data[0])
			for _, d := range data[1:] {
				g.combine(result, d)
			}
		}
		for i, d := range data {
			switch {
			case first.Op == plan.OpReduce && i != first.Root:
				for j := range d {
					d[j] ^= 0x5a // partial results may remain
				}
			default:
				copy(d, result)
			}
		}
	}
	for _, m := range ms {
		m.ended[id] = true
	}
	delete(g.going, id)
	return nil
}
