package gloo

import (
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

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
		if b.clusters != nil && b.clusters.layout.Cluster(r) == b.clusters.number {
			l.Transport, l.Detail = "shm", explainMessages(b.clusters.local)
			if b.sums == SumsInRankOrder {
				l.Detail = join(l.Detail, "reductions in rank order over tcp")
			}
		}
		e.Links = append(e.Links, l)
	}
	if c := b.clusters; c != nil {
		for i := range c.layout.Clusters() {
			part := backend.Cluster{Ranks: slices.Clone(c.layout.Members(i))}
			for _, r := range part.Ranks {
				part.Shares = append(part.Shares, c.layout.Share(r))
			}
			e.Clusters = append(e.Clusters, part)
		}
	}
	for _, op := range plan.Ops() {
		e.Choices = append(e.Choices, b.route.explain(op)...)
	}
	e.Choices = append(e.Choices, explainSparse()...)
	e.Choices = append(e.Choices, b.explainAlloc())
	return e
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

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}
