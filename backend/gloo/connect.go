package gloo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/rendezvous"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/store"
)

// connect connects a rank with the others of its group. It returns when all are connected, when
// ctx ends or when the group's timeout is over.
func connect(ctx context.Context, o backend.Options, set settings) (*session, error) {
	near := store.LocalAddrOf(o.Store)
	var nat *native
	if set.wire != WireGloo && set.Fabric == nil && o.Size > 1 {
		if set.TCP.Host == "" {
			set.TCP.Host = set.Interfaces[0]
		}
		if set.TCP.Host == "" && near.IsValid() {
			set.TCP.Host = near.String()
		}
		var err error
		if nat, err = newNative(set, o.Rank, o.Size); err != nil {
			return nil, err
		}
		defer nat.close()
		nat.log = logger(o)
	}
	join := set.join
	if join == nil {
		join = func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error) {
			c := rendezvous.Config{
				Store: store.Prefix(fmt.Sprint(index), o.Store), Rank: o.Rank, Size: o.Size,
				Interface: set.Interfaces[index], LocalAddr: near, Timeout: o.Timeout, Generation: generation(o.Dialect),
				Silence: set.TCP.Silence, Logger: logger(o), LastSeen: o.LastSeen, Meeting: o.Meeting,
			}
			if nat != nil && index == 0 {
				record, err := json.Marshal(nat.record)
				if err != nil {
					return nil, err
				}
				c.Native = &rendezvous.Native{Record: record, Connect: nat.connect, Only: set.only}
			}
			return rendezvous.Connect(ctx, c)
		}
	}
	s := &session{rank: o.Rank, size: o.Size, log: logger(o), onFailure: o.Failed, closed: make(chan struct{}), checks: o.Checks}
	for i := range set.Interfaces {
		m, err := join(ctx, o, i)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.meshes = append(s.meshes, m)
		m.OnDeath(func(f *transport.Fault) { s.dead.CompareAndSwap(nil, f) })
		if nat != nil && nat.all != nil {
			break // one mesh is enough
		}
	}
	switch {
	case set.Fabric != nil:
		s.why = "Options.Fabric connects ranks of one process"
	case set.wire == WireGloo:
		s.why = "as asked for"
	case o.Size == 1:
		s.why = "one rank has nobody to talk to"
	default:
		s.why = nat.why
	}
	if nat != nil && nat.all != nil {
		s.native, s.tcp = true, s.meshes[0].(*tcp.Mesh)
		s.table, s.sums = set.table, set.Sums
		s.why = "all ranks have it"
		if set.TCP.TLS != nil {
			s.why += ", and TLS"
		}
		ctx, cancel := context.WithTimeout(ctx, o.Timeout)
		defer cancel()
		if err := s.shareMemory(ctx, nat); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	for range s.meshes {
		s.inquiries = append(s.inquiries, newInquiry(s.log, s.layout, s.checks))
	}
	if err := s.chooseRoute(set.AllReduce); err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.watch()
	return s, nil
}

// shareMemory makes the ranks of each cluster share memory, if they can.
func (s *session) shareMemory(ctx context.Context, nat *native) error {
	layout := nat.layout()
	s.hosts, s.parts = nat.hosts(), layout.Clusters()
	if s.parts < s.size {
		s.layout = plan.NewLayout(layout.Numbers())
	}
	group, err := nat.share(ctx, s.meshes[0], layout)
	switch {
	case errors.Is(err, errApart):
		s.why += "; " + err.Error()
		return nil
	case err != nil:
		return err
	case s.parts == 1:
		s.shared = group
		s.why += ", and share memory"
		direct, err := shm.NewMesh(group, s.meshes[0], shm.MeshOptions{Lazy: true})
		if err != nil {
			return errors.Join(err, group.Close())
		}
		s.direct = direct
	case s.layout != nil:
		s.clusters = newClusters(group, layout, s.rank, nat.plans)
		if group != nil {
			direct, err := newHostMesh(group, s.tcp, s.clusters.members, shm.MeshOptions{Lazy: true})
			if err != nil {
				return errors.Join(err, group.Close())
			}
			s.direct = direct
		}
		s.why += ", and share memory in each cluster"
	}
	return nil
}

func generation(d store.Dialect) rendezvous.Generation {
	switch d {
	case store.DialectV1:
		return rendezvous.G1
	case store.DialectV2:
		return rendezvous.G2
	}
	return rendezvous.Auto
}

// chooseRoute sets the route of a group whose ranks are connected. AllReduce is Options.AllReduce.
func (s *session) chooseRoute(allReduce string) (err error) {
	table := &tableRoute{s}
	switch {
	case !s.native:
		s.route = &glooRoute{s}
	case s.shared != nil:
		shared := &sharedRoute{s.shared, s.rank}
		s.route, s.lists = shared, shared
	case s.clusters != nil && s.sums == SumsFast:
		s.route = s.clusters
	case s.clusters != nil:
		s.route = reductionsBy{s.clusters, table} // in clusters they would not be in rank order
	default:
		s.route = table
	}
	if allReduce != "" {
		s.route, err = newNamed(s, allReduce, s.route)
	}
	return err
}
