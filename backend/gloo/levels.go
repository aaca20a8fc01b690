package gloo

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/transport/shm"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

// levels are the two levels of a group whose ranks share memory on each of
// several hosts. Inside a host, collectives go through memory; between hosts, over the
// mesh, one rank a host or, where hosts have as many ranks, each rank with those of
// its number on the others.
type levels struct {
	local   *shm.Group // of this host's ranks, nil if there is one alone
	host    int        // this rank's host
	members [][]int    // by host: its ranks, ascending
	index   int        // which of its host's ranks this one is
	even    bool       // all hosts have as many
	first   []int      // each host's first rank
	same    []int      // each host's rank number index, if even
}

func newLevels(local *shm.Group, layout *plan.Layout, rank int) *levels {
	l := &levels{local: local, host: layout.Host(rank), even: true}
	for h := range layout.Hosts() {
		m := layout.Members(h)
		l.members = append(l.members, m)
		l.first = append(l.first, m[0])
		l.even = l.even && len(m) == len(l.members[0])
	}
	l.index = slices.Index(l.members[l.host], rank)
	if l.even {
		for _, m := range l.members {
			l.same = append(l.same, m[l.index])
		}
	}
	return l
}

// leaders are the ranks that speak for their hosts when root speaks for its own, and the
// number of this host's among its ranks.
func (l *levels) leaders(root int) (ranks []int, rootHost, local int) {
	ranks = l.first
	for h, m := range l.members {
		if i := slices.Index(m, root); i > 0 {
			ranks = slices.Clone(ranks)
			ranks[h], rootHost = root, h
			if h == l.host {
				local = i
			}
		} else if i == 0 {
			rootHost = h
		}
	}
	return ranks, rootHost, local
}

// between runs a collective among one rank a host, of which this must be one.
func (e *engine) between(ranks []int, op plan.Op, out, in []byte, c plan.Call, combine func(dst, src []byte)) error {
	b := e.backend
	c.Rank, c.Size = b.levels.host, len(ranks)
	bytes := c.Bytes
	for _, n := range c.Counts {
		bytes += n / int64(len(c.Counts))
	}
	e.peers = ranks
	defer func() { e.peers = nil }()
	planned := func() *plan.Plan {
		way := b.chooseBetween(op, bytes)
		c.Chunk = way.Chunk
		return way.Algorithm.Plan(c)
	}
	if c.Counts != nil {
		return e.run(planned(), out, in, combine)
	}
	return e.run(b.planner.get(planKey{op, c.Root, bytes, c.Elem, true}, planned), out, in, combine)
}

// chooseBetween is choose for one rank a host.
func (b *Backend) chooseBetween(op plan.Op, bytes int64) choice.Choice {
	hosts := len(b.levels.members)
	return b.table.Choose(choice.Query{Op: op, Bytes: bytes, Wire: "tcp", Ranks: hosts, Hosts: hosts})
}

// inside runs a collective in the memory of this host.
func (e *engine) inside(run func(g *shm.Group) error) error {
	l := e.backend.levels
	if l.local == nil {
		return nil
	}
	return e.shared(run(l.local))
}

// wholeBytes is from how many bytes on all ranks of a host talk to other hosts,
// each about its share, rather than one for all.
const wholeBytes = 64 << 10

func (e *engine) allReduceLevels(buf []byte, r backend.Reduction) error {
	l := e.backend.levels
	ranks := len(l.members[l.host])
	if l.even && len(buf) >= wholeBytes {
		share := len(buf) / (ranks * r.Grain) * r.Grain
		even, rest := buf[:share*ranks], buf[share*ranks:]
		mine := even[l.index*share : (l.index+1)*share]
		err := e.inside(func(g *shm.Group) error { return g.ReduceScatter(mine, even, r.Grain, r.Combine, e.stop) })
		if err == nil {
			err = e.between(l.same, plan.OpAllReduce, mine, nil, plan.Call{Bytes: int64(share), Elem: int64(r.Grain)}, r.Combine)
		}
		if err == nil {
			err = e.inside(func(g *shm.Group) error { return g.AllGather(even, mine, e.stop) })
		}
		if err != nil || len(rest) == 0 {
			return err
		}
		buf = rest
	}
	if err := e.reduceInside(buf, 0, r); err != nil {
		return err
	}
	if l.index == 0 {
		err := e.between(l.first, plan.OpAllReduce, buf, nil, plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
		if err != nil {
			return err
		}
	}
	return e.inside(func(g *shm.Group) error { return g.Broadcast(buf, 0, e.stop) })
}

// reduceInside leaves a host's sum in the buf of one of its ranks.
func (e *engine) reduceInside(buf []byte, leader int, r backend.Reduction) error {
	return e.inside(func(g *shm.Group) error {
		var out []byte
		if g.Rank() == leader {
			out = buf
		}
		return g.Reduce(out, buf, leader, r.Grain, r.Combine, e.stop)
	})
}

func (e *engine) reduceLevels(buf []byte, root int, r backend.Reduction) error {
	l := e.backend.levels
	ranks, rootHost, leader := l.leaders(root)
	if err := e.reduceInside(buf, leader, r); err != nil || l.index != leader {
		return err
	}
	return e.between(ranks, plan.OpReduce, buf, nil, plan.Call{Root: rootHost, Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
}

func (e *engine) broadcastLevels(buf []byte, root int) error {
	l := e.backend.levels
	ranks, rootHost, leader := l.leaders(root)
	if l.index == leader {
		err := e.between(ranks, plan.OpBroadcast, buf, nil, plan.Call{Root: rootHost, Bytes: int64(len(buf))}, nil)
		if err != nil {
			return err
		}
	}
	return e.inside(func(g *shm.Group) error { return g.Broadcast(buf, leader, e.stop) })
}

func (e *engine) barrierLevels() error {
	l := e.backend.levels
	if err := e.inside(func(g *shm.Group) error { return g.Barrier(e.stop) }); err != nil {
		return err
	}
	if l.index == 0 {
		if err := e.between(l.first, plan.OpBarrier, nil, nil, plan.Call{}, nil); err != nil {
			return err
		}
	}
	return e.inside(func(g *shm.Group) error { return g.Barrier(e.stop) })
}
