package gloo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/hostmesh"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/rendezvous"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/store"
)

// connection is what connect has made, and what Explain says of it.
type connection struct {
	run.Connections
	rank, size int
	hosts      int    // 0 if unknown
	why        string // why the ranks have this wire
}

// connect connects a rank with the others of its group. It returns when all are connected, when
// ctx ends or when the group's timeout is over.
func connect(ctx context.Context, o backend.Options, set settings) (*connection, error) {
	near := store.LocalAddrOf(o.Store)
	var nat *native
	if set.wire != WireGloo && set.Fabric == nil && o.Size > 1 {
		if set.Address == "" {
			set.Address = set.Interfaces[0]
		}
		if set.Address == "" && near.IsValid() {
			set.Address = near.String()
		}
		var err error
		if nat, err = newNative(set, o.Rank, o.Size); err != nil {
			return nil, err
		}
		defer nat.close()
		nat.log = run.Logger(o)
	}
	join := set.join
	if join == nil {
		join = func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error) {
			config := rendezvous.Config{
				Store: store.Prefix(fmt.Sprint(index), o.Store), Rank: o.Rank, Size: o.Size,
				Interface: set.Interfaces[index], LocalAddr: near, Timeout: o.Timeout,
				Silence: set.Silence, Logger: run.Logger(o), LastSeen: o.LastSeen, Meeting: o.Meeting,
			}
			if nat != nil && index == 0 {
				record, err := json.Marshal(nat.record)
				if err != nil {
					return nil, err
				}
				config.Native = &rendezvous.Native{Record: record, Connect: nat.connect, Only: set.only}
			}
			return rendezvous.Connect(ctx, config)
		}
	}
	c := &connection{rank: o.Rank, size: o.Size}
	c.AllReduce, c.Workers = set.AllReduce, set.Workers
	for i := range set.Interfaces {
		m, err := join(ctx, o, i)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.Meshes = append(c.Meshes, m)
		if nat != nil && nat.all != nil {
			break // one mesh is enough
		}
	}
	switch {
	case set.Fabric != nil:
		c.why = "Options.Fabric connects ranks of one process"
	case set.wire == WireGloo:
		c.why = "as asked for"
	case o.Size == 1:
		c.why = "one rank has nobody to talk to"
	default:
		c.why = nat.why
	}
	if nat != nil && nat.all != nil {
		c.TCP = c.Meshes[0].(*tcp.Mesh)
		c.Table, c.RankOrder = set.table, set.Sums == SumsInRankOrder
		c.why = "all ranks have it"
		if set.TLS != nil {
			c.why += ", and TLS"
		}
		ctx, cancel := context.WithTimeout(ctx, o.Timeout)
		defer cancel()
		if err := c.shareMemory(ctx, nat); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	return c, nil
}

// shareMemory makes the ranks of each cluster share memory, if they can.
func (c *connection) shareMemory(ctx context.Context, nat *native) error {
	layout := nat.layout()
	c.hosts, c.Parts = nat.hosts(), layout.Clusters()
	if c.Parts < c.size {
		c.HostOf = layout.Numbers()
	}
	group, err := nat.share(ctx, c.Meshes[0], layout)
	switch {
	case errors.Is(err, errApart):
		c.why += "; " + err.Error()
		return nil
	case err != nil:
		return err
	case c.Parts == 1:
		c.Memory, c.Shared = group, group
		c.why += ", and share memory"
		direct, err := shm.NewMesh(group, c.Meshes[0], shm.MeshOptions{Lazy: true})
		if err != nil {
			return errors.Join(err, group.Close())
		}
		c.Direct = direct
	case c.HostOf != nil:
		c.Memory, c.Clusters = group, layout
		if group != nil {
			direct, err := hostmesh.New(group, c.TCP, layout.Members(layout.Cluster(c.rank)), shm.MeshOptions{Lazy: true})
			if err != nil {
				return errors.Join(err, group.Close())
			}
			c.Direct = direct
		}
		c.why += ", and share memory in each cluster"
	}
	return nil
}
