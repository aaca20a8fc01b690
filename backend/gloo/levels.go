package gloo

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// levels is the route of a group on several hosts whose ranks share memory on each host. Within a
// host collectives go through memory. Between hosts they go over the mesh. There one rank speaks
// for its host; or, if all hosts have as many ranks, each rank exchanges a share with the ranks of
// its number on the other hosts.
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

// size returns the number of ranks in the group.
func (l *levels) size() (n int) {
	for _, m := range l.members {
		n += len(m)
	}
	return n
}

// leaders returns a rank of each host that speaks for it. On root's host that is root. local is the
// number of this host's leader among the host's ranks.
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

// between runs a collective among one rank of each host. This rank must be one of them.
func (l *levels) between(e *engine, ranks []int, op plan.Op, out, in []byte, c plan.Call, combine func(dst, src []byte)) error {
	c.Rank, c.Size = l.host, len(ranks)
	e.peers = ranks
	defer func() { e.peers = nil }()
	return e.run(e.session.planFor(planKey{op: op, hosts: true}, c, e.session.chooseBetween), out, in, combine)
}

// inside runs a collective in the memory of this host.
func (l *levels) inside(e *engine, run func(g *shm.Group) error) error {
	if l.local == nil {
		return nil
	}
	return e.shared(run(l.local))
}

// wholeBytes is the size from which all ranks of a host talk to other hosts, each about a share.
// For smaller sizes one rank does.
const wholeBytes = 64 << 10

func (l *levels) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	ranks := len(l.members[l.host])
	if l.even && len(buf) >= wholeBytes {
		share := len(buf) / (ranks * r.Grain) * r.Grain
		even, rest := buf[:share*ranks], buf[share*ranks:]
		mine := even[l.index*share : (l.index+1)*share]
		err := l.inside(e, func(g *shm.Group) error { return g.ReduceScatter(mine, even, r.Grain, r.Combine, e.stop) })
		if err == nil {
			err = l.between(e, l.same, plan.OpAllReduce, mine, nil, plan.Call{Bytes: int64(share), Elem: int64(r.Grain)}, r.Combine)
		}
		if err == nil {
			err = l.inside(e, func(g *shm.Group) error { return g.AllGather(even, mine, e.stop) })
		}
		if err != nil || len(rest) == 0 {
			return err
		}
		buf = rest
	}
	if err := l.reduceInside(e, buf, 0, r); err != nil {
		return err
	}
	if l.index == 0 {
		err := l.between(e, l.first, plan.OpAllReduce, buf, nil, plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
		if err != nil {
			return err
		}
	}
	return l.inside(e, func(g *shm.Group) error { return g.Broadcast(buf, 0, e.stop) })
}

// reduceInside leaves the host's sum in the buf of one of its ranks.
func (l *levels) reduceInside(e *engine, buf []byte, leader int, r backend.Reduction) error {
	return l.inside(e, func(g *shm.Group) error {
		var out []byte
		if g.Rank() == leader {
			out = buf
		}
		return g.Reduce(out, buf, leader, r.Grain, r.Combine, e.stop)
	})
}

func (l *levels) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	ranks, rootHost, leader := l.leaders(root)
	if err := l.reduceInside(e, buf, leader, r); err != nil || l.index != leader {
		return err
	}
	return l.between(e, ranks, plan.OpReduce, buf, nil, plan.Call{Root: rootHost, Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
}

func (l *levels) overwrites(backend.Reduction) bool { return true }

func (l *levels) broadcast(e *engine, buf []byte, root int) error {
	ranks, rootHost, leader := l.leaders(root)
	if l.index == leader {
		err := l.between(e, ranks, plan.OpBroadcast, buf, nil, plan.Call{Root: rootHost, Bytes: int64(len(buf))}, nil)
		if err != nil {
			return err
		}
	}
	return l.inside(e, func(g *shm.Group) error { return g.Broadcast(buf, leader, e.stop) })
}

func (l *levels) barrier(e *engine) error {
	if err := l.inside(e, func(g *shm.Group) error { return g.Barrier(e.stop) }); err != nil {
		return err
	}
	if l.index == 0 {
		if err := l.between(e, l.first, plan.OpBarrier, nil, nil, plan.Call{}, nil); err != nil {
			return err
		}
	}
	return l.inside(e, func(g *shm.Group) error { return g.Barrier(e.stop) })
}

func (l *levels) explain(op plan.Op) []backend.Choice {
	one := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: "two levels", Why: "in memory on each host, and one rank a host over tcp"}
	two := func(upTo int64, why string) []backend.Choice {
		other := one
		one.UpTo, other.Why = upTo, why
		return []backend.Choice{one, other}
	}
	switch op {
	case plan.OpAllReduce:
		if l.even {
			return two(wholeBytes-1, "in memory on each host, and each rank a share over tcp")
		}
	case plan.OpReduceScatter:
		one.Why = "added up in memory on each host, of which one sum for each block goes to each other over tcp"
	case plan.OpAllGather:
		one.Why = "each block once to each other host over tcp, and in memory there"
	case plan.OpGather, plan.OpScatter:
		one.Why = "in memory on each host, and one message a host over tcp"
		return two(aggregateRooted, "in memory on the root's host, and a message for each rank of the others over tcp")
	case plan.OpAllToAll:
		one.Why = "in memory on each host, and one message for each pair of hosts over tcp"
		return two(int64(aggregate*l.size()), "in memory within a host, and a message for each pair of ranks over tcp; by what hosts have for each other")
	}
	return []backend.Choice{one}
}

// chooseBetween is choose for a collective among one rank of each host.
func (s *session) chooseBetween(op plan.Op, bytes int64) choice.Choice {
	hosts := len(s.levels.members)
	return s.table.Choose(choice.Query{Op: op, Bytes: bytes, Wire: "tcp", Ranks: hosts, Hosts: hosts})
}
