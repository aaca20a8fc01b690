package gloo

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// explainTo is up to which size algorithms are looked up one by one.
const explainTo = 1 << 30

// Explain says which wire the group has and why, and what its collectives do.
func (b *Backend) Explain() backend.Explanation {
	e := backend.Explanation{Backend: Name, Rank: b.rank, Size: b.size, Hosts: b.hosts, Wire: string(WireGloo), Why: b.why}
	link := backend.Link{Transport: "tcp", Detail: "as Gloo"}
	if b.native {
		e.Wire = string(WireNative)
		link.Detail = ""
	}
	if b.shared != nil {
		link = backend.Link{Transport: "shm", Detail: explainMessages(b.shared)}
	}
	for r := range b.size {
		if r == b.rank {
			continue
		}
		l := link
		l.Rank = r
		if b.levels != nil && b.layout.Host(r) == b.levels.host {
			l.Transport, l.Detail = "shm", explainMessages(b.levels.local)
			if b.sums == SumsInRankOrder {
				l.Detail = join(l.Detail, "reductions in rank order over tcp")
			}
		}
		e.Links = append(e.Links, l)
	}
	for _, op := range plan.Ops() {
		e.Choices = append(e.Choices, b.route.explain(op)...)
	}
	e.Choices = append(e.Choices, b.explainSparse()...)
	e.Choices = append(e.Choices, b.explainAlloc())
	return e
}

// always is what a route explains that does the same whatever the size.
func always(op plan.Op, algorithm, why string) []backend.Choice {
	return []backend.Choice{{Op: op.String(), UpTo: -1, Algorithm: algorithm, Why: why}}
}

var glooAlgorithms = map[plan.Op]string{
	plan.OpBroadcast: "binomial", plan.OpAllReduce: "segmented ring", plan.OpReduce: "segmented ring",
	plan.OpAllGather: "ring", plan.OpGather: "direct", plan.OpScatter: "direct",
	plan.OpReduceScatter: "all_reduce", plan.OpAllToAll: "direct", plan.OpBarrier: "dissemination",
}

// limitOf returns from how many bytes on a collective is lent for, -1 for never.
func limitOf(l shm.Limits, op plan.Op) int64 {
	switch op {
	case plan.OpAllReduce:
		return l.AllReduce
	case plan.OpReduce:
		return l.Reduce
	case plan.OpReduceScatter:
		return l.ReduceScatter
	case plan.OpBroadcast:
		return l.Broadcast
	case plan.OpAllGather:
		return l.AllGather
	case plan.OpGather:
		return l.Gather
	case plan.OpScatter:
		return l.Scatter
	case plan.OpAllToAll:
		return l.AllToAll
	}
	return -1
}

// explainMessages says how messages go through memory.
func explainMessages(g *shm.Group) string {
	if why := g.WhyStaged(); why != "" {
		return "two copies: " + why
	}
	if from := g.Limits().Message; from >= 0 {
		return fmt.Sprintf("messages with a single copy from %d bytes on", from)
	}
	return ""
}

// explain looks up every power of two and joins those with one algorithm.
func (t *tableRoute) explain(op plan.Op) []backend.Choice {
	c := func(bytes int64) backend.Choice {
		way := t.b.choose(op, bytes)
		return backend.Choice{Op: op.String(), UpTo: bytes, Algorithm: way.Algorithm.Name, Why: way.Why}
	}
	if op == plan.OpBarrier || op == plan.OpAllToAll {
		return always(op, glooAlgorithms[op], "the only one")
	}
	all := []backend.Choice{c(1)}
	for bytes := int64(2); bytes <= explainTo; bytes *= 2 {
		last := &all[len(all)-1]
		if next := c(bytes); next.Algorithm != last.Algorithm {
			all = append(all, next)
		} else {
			last.UpTo = bytes
		}
	}
	all[len(all)-1].UpTo = -1
	return all
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
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
