package run

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// sharedRoute is for groups whose ranks all share memory: package shm has the collectives.
type sharedRoute struct {
	group *shm.Group
	rank  int
}

// operator returns r for collectives in memory.
func operator(r backend.Reduction) shm.Operator {
	return shm.Operator{Elem: r.Grain, Combine: r.Combine, Join: r.Join}
}

func (s *sharedRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	return e.shared(s.group.AllReduce(buf, operator(r), e.stop))
}

func (s *sharedRoute) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	var out []byte
	if s.rank == root {
		out = buf
	}
	return e.shared(s.group.Reduce(out, buf, root, operator(r), e.stop))
}

func (s *sharedRoute) overwrites(backend.Reduction) bool { return false }

func (s *sharedRoute) reduceScatter(e *engine, out, in []byte, counts []int64, _ int, r backend.Reduction) error {
	if even(counts) {
		return e.shared(s.group.ReduceScatter(out, in, operator(r), e.stop))
	}
	for root, n := range counts {
		var mine []byte
		if root == s.rank {
			mine = out
		}
		if err := e.shared(s.group.Reduce(mine, in[:n], root, operator(r), e.stop)); err != nil {
			return err
		}
		in = in[n:]
	}
	return nil
}

func (s *sharedRoute) broadcast(e *engine, buf []byte, root int) error {
	return e.shared(s.group.Broadcast(buf, root, e.stop))
}

func (s *sharedRoute) allGather(e *engine, out, in []byte) error {
	return e.shared(s.group.AllGather(out, in, e.stop))
}

func (s *sharedRoute) allGatherList(e *engine, out [][]byte, in []byte) error {
	return e.shared(s.group.AllGatherList(out, in, e.stop))
}

func (s *sharedRoute) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.shared(s.group.AllGatherV(out, in, counts, e.stop))
}

func (s *sharedRoute) gather(e *engine, out, in []byte, root int, counts []int64, even bool) error {
	if even {
		return e.shared(s.group.Gather(out, in, root, e.stop))
	}
	to, from := make([][]byte, s.group.Size()), make([][]byte, s.group.Size())
	to[root] = in
	if s.rank == root {
		from = split(out, counts)
	}
	return e.shared(s.group.AllToAllV(from, to, e.stop))
}

func (s *sharedRoute) gatherList(e *engine, out [][]byte, in []byte, root int) error {
	return e.shared(s.group.GatherList(out, in, root, e.stop))
}

func (s *sharedRoute) scatter(e *engine, out, in []byte, root int) error {
	return e.shared(s.group.Scatter(out, in, root, e.stop))
}

func (s *sharedRoute) scatterList(e *engine, out []byte, in [][]byte, root int) error {
	return e.shared(s.group.ScatterList(out, in, root, e.stop))
}

func (s *sharedRoute) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	return s.allToAllList(e, split(out, recv), split(in, send))
}

func (s *sharedRoute) allToAllList(e *engine, out, in [][]byte) error {
	return e.shared(s.group.AllToAllV(out, in, e.stop))
}

func (s *sharedRoute) barrier(e *engine) error { return e.shared(s.group.Barrier(e.stop)) }

func (s *sharedRoute) explain(op plan.Op) []backend.Choice {
	c := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: "staged", Why: "a copy into the memory that the ranks share, and one out of it"}
	var all []backend.Choice
	switch {
	case op == plan.OpBarrier:
		c.Algorithm, c.Why = "flat", "each rank sets a word that the others see"
	case op == plan.OpAllReduce, op == plan.OpReduce:
		c.UpTo, c.Algorithm, c.Why = int64(s.group.OneShot()), "one-shot", "each rank that needs the result reads all operands in the shared memory and reduces them"
		all = append(all, c)
		c.UpTo = -1
		fallthrough
	case op.Reduces():
		c.Algorithm, c.Why = "shares", "each rank reads a share of all operands in the shared memory and reduces it"
	case op == plan.OpAllGather || op == plan.OpAllToAll || op == plan.OpScatter:
		return s.explainRead(op, c)
	}
	return append(all, c)
}

// explainRead is explain for collectives that can read other processes' memory.
func (s *sharedRoute) explainRead(op plan.Op, staged backend.Choice) []backend.Choice {
	l := s.group.ReadLimits()
	from := map[plan.Op]int64{plan.OpAllGather: l.AllGather, plan.OpAllToAll: l.AllToAll, plan.OpScatter: l.Scatter}[op]
	if why := s.group.WhyStaged(); why != "" {
		staged.Why += "; one copy is impossible: " + why
	}
	if from < 0 {
		return []backend.Choice{staged}
	}
	read := staged
	staged.UpTo = from - 1
	read.Algorithm, read.Why = "single copy", "read straight from the other processes' memory (process_vm_readv)"
	return []backend.Choice{staged, read}
}
