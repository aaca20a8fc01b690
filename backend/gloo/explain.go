package gloo

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
)

// Explain says which wire the group has and why, and what its collectives do.
func (b *Backend) Explain() backend.Explanation {
	c := b.connection
	e := backend.Explanation{Backend: Name, Rank: c.rank, Size: c.size, Hosts: c.hosts, Wire: string(WireGloo), Why: c.why, Choices: b.Choices()}
	link := backend.Link{Transport: "tcp", Detail: "as Gloo"}
	if c.TCP != nil {
		e.Wire = string(WireNative)
		link.Detail = ""
	}
	if c.Shared != nil {
		link = backend.Link{Transport: "shm"}
	}
	for r := range c.size {
		if r == c.rank {
			continue
		}
		l := link
		l.Rank = r
		if c.Clusters != nil && c.Clusters.Cluster(r) == c.Clusters.Cluster(c.rank) {
			l.Transport = "shm"
			if c.RankOrder {
				l.Detail = "reductions in rank order over tcp"
			}
		}
		e.Links = append(e.Links, l)
	}
	if l := c.Clusters; l != nil {
		for i := range l.Clusters() {
			part := backend.Cluster{Ranks: slices.Clone(l.Members(i))}
			for _, r := range part.Ranks {
				part.Shares = append(part.Shares, l.Share(r))
			}
			e.Clusters = append(e.Clusters, part)
		}
	}
	return e
}
