package run

import (
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// clusters is the route of a group whose ranks form several clusters, some of several ranks. It runs
// the plans of package cluster. Inside a cluster collectives go through shared memory. Between
// clusters they go over the mesh, while the ranks go on with steps inside.
type clusters struct {
	layout  *cluster.Layout
	plans   *cluster.Cache
	local   *shm.Group // of this cluster's ranks, nil if there is one alone
	rank    int
	number  int   // of this rank's cluster
	place   int   // of this rank among its cluster's ranks
	members []int // the ranks of this cluster
}

func newClusters(s *session) *clusters {
	c := &clusters{layout: s.Clusters, plans: cluster.NewCache(s.Clusters), local: s.Memory, rank: s.rank, members: s.members}
	c.number, c.place = c.layout.Cluster(s.rank), c.layout.Place(s.rank)
	return c
}

// Tests change these two.
var (
	// singleBytes is the size up to which one rank of a cluster carries its traffic. From there on
	// the ranks share it.
	singleBytes = 64 << 10

	// chunkBytes is the length of the chunks whose stages overlap. Each chunk costs two
	// collectives in memory, which take about 10 us more than their bytes do.
	chunkBytes = 2 << 20
)

// alignBytes is the unit in which broadcasts are cut.
const alignBytes = 64

func (c *clusters) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	return c.run(e, c.whole(plan.OpAllReduce, len(buf), 0, r.Grain), buf, nil, r)
}

func (c *clusters) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	return c.run(e, c.whole(plan.OpReduce, len(buf), root, r.Grain), buf, nil, r)
}

func (c *clusters) overwrites(backend.Reduction) bool { return true }

func (c *clusters) broadcast(e *engine, buf []byte, root int) error {
	return c.run(e, c.whole(plan.OpBroadcast, len(buf), root, alignBytes), buf, nil, backend.Reduction{})
}

func (c *clusters) whole(op plan.Op, bytes, root, elem int) cluster.Call {
	return cluster.Call{Op: op, Root: root, Bytes: int64(bytes), Elem: int64(elem), Chunk: int64(chunkBytes), Single: bytes < singleBytes}
}

func (c *clusters) reduceScatter(e *engine, out, in []byte, counts []int64, _ int, r backend.Reduction) error {
	call := cluster.Call{Op: plan.OpReduceScatter, Bytes: counts[0], Elem: int64(r.Grain)}
	if !even(counts) {
		call.Bytes, call.Counts = 0, counts
	}
	return c.run(e, call, out, in, r)
}

func (c *clusters) allGather(e *engine, out, in []byte) error {
	return e.onSlot(prefixAllGather, func() error {
		return c.run(e, cluster.Call{Op: plan.OpAllGather, Bytes: int64(len(in))}, out, in, backend.Reduction{})
	})
}

func (c *clusters) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error {
		return c.run(e, cluster.Call{Op: plan.OpAllGather, Counts: counts}, out, in, backend.Reduction{})
	})
}

// gather lets the ranks of other clusters than the root's tell each other their lengths, if those may
// differ.
func (c *clusters) gather(e *engine, out, in []byte, root int, counts []int64, alike bool) error {
	call := cluster.Call{Op: plan.OpGather, Root: root, Bytes: int64(len(in))}
	if !alike {
		call.Bytes, call.Counts = 0, counts
		if c.layout.Cluster(root) != c.number && c.local != nil {
			lengths := make([]int64, len(c.members))
			mine := []int64{int64(len(in))}
			if err := e.shared(c.local.AllGather(bytesOf(lengths), bytesOf(mine), e.stop)); err != nil {
				return err
			}
			call.Counts = slices.Clone(counts)
			for i, r := range c.members {
				call.Counts[r] = lengths[i]
			}
		}
	}
	return c.run(e, call, out, in, backend.Reduction{})
}

func (c *clusters) scatter(e *engine, out, in []byte, root int) error {
	return c.run(e, cluster.Call{Op: plan.OpScatter, Root: root, Bytes: int64(len(out))}, out, in, backend.Reduction{})
}

// allToAll lets the ranks of a cluster tell each other their lengths first. They compare those of their own blocks. After
// that each cluster knows the lengths of all blocks between it and another one.
func (c *clusters) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	p, k := len(recv), len(c.members)
	e.lengths = room(e.lengths, 2*p*(k+1))
	mine, all := e.lengths[:2*p], e.lengths[2*p:]
	copy(mine, send)
	copy(mine[p:], recv)
	if c.local == nil {
		copy(all, mine)
	} else if err := e.shared(c.local.AllGather(bytesOf(all), bytesOf(mine), e.stop)); err != nil {
		return err
	}
	if even(all) {
		return c.run(e, cluster.Call{Op: plan.OpAllToAll, Bytes: all[0]}, out, in, backend.Reduction{})
	}
	for i, from := range c.members {
		for j, to := range c.members {
			if sent, expected := all[2*p*i+to], all[2*p*j+p+from]; sent != expected {
				return e.session.mismatch(e.mesh, e.op.Info(), from, fmt.Errorf("rank %d sends %d bytes to rank %d, which expects %d", from, sent, to, expected))
			}
		}
	}
	call := cluster.Call{Op: plan.OpAllToAll, Send: make([][]int64, k), Recv: make([][]int64, k)}
	for i := range k {
		of := slices.Clone(all[2*p*i : 2*p*(i+1)])
		call.Send[i], call.Recv[i] = of[:p], of[p:]
	}
	return c.run(e, call, out, in, backend.Reduction{})
}

func (c *clusters) barrier(e *engine) error {
	return c.run(e, cluster.Call{Op: plan.OpBarrier}, nil, nil, backend.Reduction{})
}

// run runs a collective.
func (c *clusters) run(e *engine, call cluster.Call, out, in []byte, r backend.Reduction) error {
	call.Rank = c.rank
	p, err := c.plans.Plan(call)
	if err != nil {
		return err
	}
	e.cluster = clusterCall{
		plan: p, combine: r.Combine, join: r.Join, meeting: e.meeting,
		bufs: [...][]byte{plan.Out: out, plan.In: in, plan.Scratch: grow(&e.joined, int(p.Scratch))},
	}
	return e.runStages(func(s *cluster.Step) error { return c.inside(e, s) })
}

// inside runs a step inside this rank's cluster.
func (c *clusters) inside(e *engine, s *cluster.Step) error {
	x := &e.cluster
	by := shm.Operator{Elem: int(x.plan.Call.Elem), Combine: x.combine, Join: x.join}
	src := func(p *cluster.Part) []byte { return x.bufs[s.Src][p.Src : p.Src+p.Len] }
	dst := func(p *cluster.Part) []byte { return x.bufs[s.Dst][p.Dst : p.Dst+p.Len] }
	if len(s.Ranks) == 1 {
		for i := range s.Parts {
			copy(dst(&s.Parts[i]), src(&s.Parts[i]))
		}
		return nil
	}
	g, n := c.local, int64(0)
	if len(s.Parts) > 0 {
		n = s.Parts[0].Len
	}
	all := n * int64(len(s.Ranks)) // if they are even
	switch {
	case s.Op == plan.OpBarrier:
		return e.shared(g.Barrier(e.stop))
	case s.Op == plan.OpReduceScatter && s.Even:
		at := s.Parts[0].Src
		return e.shared(g.ReduceScatter(dst(&s.Parts[c.place]), x.bufs[s.Src][at:at+all], by, e.stop))
	case s.Op == plan.OpReduceScatter:
		for i := range s.Parts {
			p := &s.Parts[i]
			var out []byte
			if p.To == c.place {
				out = dst(p)
			}
			if err := e.shared(g.Reduce(out, src(p), p.To, by, e.stop)); err != nil {
				return err
			}
		}
		return nil
	case s.Op == plan.OpAllGather && s.Even:
		at := s.Parts[0].Dst
		return e.shared(g.AllGather(x.bufs[s.Dst][at:at+all], src(&s.Parts[c.place]), e.stop))
	case s.Op == plan.OpAllGather && len(s.Parts) == 1:
		return e.shared(g.Broadcast(dst(&s.Parts[0]), s.Parts[0].From, e.stop))
	case s.Op == plan.OpAllGather:
		e.lengths = room(e.lengths, len(s.Ranks))
		clear(e.lengths)
		var in []byte
		for i := range s.Parts {
			p := &s.Parts[i]
			if e.lengths[p.From] = p.Len; p.From == c.place {
				in = src(p)
			}
		}
		first, last := &s.Parts[0], &s.Parts[len(s.Parts)-1]
		return e.shared(g.AllGatherV(x.bufs[s.Dst][first.Dst:last.Dst+last.Len], in, e.lengths, e.stop))
	case s.Op == plan.OpGather && s.Even:
		var list [][]byte
		if c.place == s.Root {
			list = e.slices(s.Parts, dst)
		}
		return e.shared(g.GatherList(list, src(&s.Parts[c.place]), s.Root, e.stop))
	case s.Op == plan.OpScatter && s.Even:
		var list [][]byte
		if c.place == s.Root {
			list = e.slices(s.Parts, src)
		}
		return e.shared(g.ScatterList(dst(&s.Parts[c.place]), list, s.Root, e.stop))
	}
	return c.exchange(e, s, src, dst)
}

// exchange moves parts among the ranks of this cluster. What goes from one rank to another is packed
// if it lies apart.
func (c *clusters) exchange(e *engine, s *cluster.Step, src, dst func(p *cluster.Part) []byte) error {
	k, packed := len(s.Ranks), 0
	for i := range s.Parts {
		packed += int(s.Parts[i].Len)
	}
	free := grow(&e.blocks, 2*packed)
	lists := [2][][]byte{room(e.lists[0], k), room(e.lists[1], k)}
	e.lists = lists
	// each calls f with the parts to rank number j, or from it.
	each := func(out bool, j int, f func(p *cluster.Part)) {
		for i := range s.Parts {
			if p := &s.Parts[i]; out && p.From == c.place && p.To == j || !out && p.To == c.place && p.From == j {
				f(p)
			}
		}
	}
	for j := range k {
		for way, out := range []bool{false, true} {
			parts, n := 0, 0
			var one []byte
			each(out, j, func(p *cluster.Part) {
				if parts, n = parts+1, n+int(p.Len); out {
					one = src(p)
				} else {
					one = dst(p)
				}
			})
			if parts > 1 {
				one, free = free[:n:n], free[n:]
				if rest := one; out {
					each(out, j, func(p *cluster.Part) { rest = rest[copy(rest, src(p)):] })
				}
			}
			lists[way][j] = one
		}
	}
	if err := e.shared(c.local.AllToAllV(lists[0], lists[1], e.stop)); err != nil {
		return err
	}
	for j, from := range lists[0] {
		parts := 0
		each(false, j, func(*cluster.Part) { parts++ })
		if parts > 1 {
			each(false, j, func(p *cluster.Part) { from = from[copy(dst(p), from):] })
		}
	}
	return nil
}

func (c *clusters) explain(op plan.Op) []backend.Choice {
	one := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: "clusters", Why: "in memory inside clusters, and one rank of each over tcp"}
	two := func(upTo int64, why string) []backend.Choice {
		other := one
		one.UpTo, other.Why = upTo, why
		return []backend.Choice{one, other}
	}
	switch op {
	case plan.OpAllReduce, plan.OpReduce, plan.OpBroadcast:
		return two(int64(singleBytes-1), fmt.Sprintf("in memory inside clusters, and each rank a share over tcp, in chunks of about %d bytes whose stages overlap", chunkBytes))
	case plan.OpReduceScatter:
		one.Why = "added up in memory inside clusters, and one sum for each block to each other cluster over tcp"
	case plan.OpAllGather:
		one.Why = "each block once to each other cluster over tcp, and in memory there"
	case plan.OpGather, plan.OpScatter:
		one.Why = "in memory inside clusters, and one message for each over tcp"
		return two(cluster.TogetherRooted, "in memory inside the root's cluster, and a message for each rank of the others over tcp")
	case plan.OpAllToAll:
		one.Why = "in memory inside clusters, and one message for each pair of clusters over tcp"
		return two(int64(cluster.Together*c.layout.Ranks()), "in memory inside a cluster, and a message for each pair of ranks over tcp; by what clusters have for each other")
	}
	return []backend.Choice{one}
}
