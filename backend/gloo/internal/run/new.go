// Package run runs the operations of a gloo group: it queues calls, carries them over the group's route, and ends the
// group when one fails.
//
// From the bottom up:
//
//   - connections.go, session.go, fault.go: the ways to the other ranks, and how a group fails
//   - call.go, operation.go: a call and what is under way for it
//   - progress.go, engine.go, stages.go: an engine carries out one plan, or the stages of one
//   - route*.go: which plan, or which collective of package shm
//   - queue.go, issue.go: the order of the calls, and who runs them
//   - group.go, collectives.go, ...: the operations
//   - waitlog.go, close.go, new.go: what a waiting rank says; the end and the beginning
package run

import (
	"cmp"
	"context"
	"errors"
	"log/slog"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/internal/argcheck"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// New returns the group of a rank that is connected with all others. With an error it closes the connections.
func New(ctx context.Context, o backend.Options, c Connections) (*Group, error) {
	s := &session{
		Connections: c, rank: o.Rank, size: o.Size, native: c.TCP != nil,
		log: Logger(o), onFailure: o.Failed, checks: o.Checks, closed: make(chan struct{}),
	}
	if s.Clusters != nil {
		s.members = s.Clusters.Members(s.Clusters.Cluster(s.rank))
	}
	for _, m := range s.Meshes {
		m.OnDeath(func(f *transport.Fault) { s.dead.CompareAndSwap(nil, f) })
		s.inquiries = append(s.inquiries, ask.New(s.log, s.HostOf, s.checks))
	}
	r, lists, err := s.chooseRoute()
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.watch()
	b := &Group{done: make(chan struct{})}
	b.session, b.route, b.issuer = s, r, work.Issuer{Group: o.Group, Rank: o.Rank, Names: o.Names}
	b.args = argcheck.Checker{Backend: name, Rank: o.Rank, Size: o.Size, Dense: dense}
	b.queued.L = &b.mu
	b.unbegun.Check = b.checkUnbegun
	b.messages.recheck.Check = b.checkMessages
	b.oldest.first = waiting.First(ctx)
	b.oldest.Check = func() { b.tellOfOldest(&b.mu, &b.oldest, b.oldestCollective) }
	b.messages.oldest.first = b.oldest.first
	b.messages.oldest.Check = func() { b.tellOfOldest(&b.messages.mu, &b.messages.oldest, b.messages.oldestLate) }
	b.SetTimeout(o.Timeout)
	for _, m := range s.Meshes {
		m.SetWaiting(b.waitsFor)
	}
	workers := cmp.Or(max(c.Workers, 0), 2*len(s.Meshes))
	if s.inTurn() {
		workers = 1
	}
	for range workers {
		b.engines = append(b.engines, newEngine(s, r, lists))
		b.workers.Go(b.work)
	}
	return b, nil
}

// Logger returns the logger of o. Its lines name the group and this rank.
func Logger(o backend.Options) *slog.Logger { return o.Names.Logger(o.Logger, o.Group, o.Rank) }

// chooseRoute returns the route of a group whose ranks are connected, and that route again if it takes lists.
func (s *session) chooseRoute() (r route, lists listRoute, err error) {
	table := newTable(s)
	switch {
	case !s.native:
		r = newGloo(s)
	case s.Shared != nil:
		shared := &sharedRoute{s.Shared, s.rank}
		r, lists = shared, shared
	case s.Clusters != nil && !s.RankOrder:
		r = newClusters(s)
	case s.Clusters != nil:
		r = reductionsBy{newClusters(s), table} // in clusters they would not be in rank order
	default:
		r = table
	}
	if s.AllReduce != "" {
		r, err = newNamed(s, s.AllReduce, r)
	}
	return r, lists, err
}

// Choices says what the collectives of the group do.
func (b *Group) Choices() (all []backend.Choice) {
	for _, op := range plan.Ops() {
		all = append(all, b.route.explain(op)...)
	}
	sparse := backend.Choice{Op: "all_reduce, sparse", UpTo: -1, Algorithm: "gather", Why: "every rank gets all entries and adds them"}
	return append(all, sparse, b.explainAlloc())
}
