package cuda

import (
	"github.com/c10d-go/c10d/internal/registry"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// The operations of dense tensors, besides a barrier.
var (
	rounds = []work.OpType{ // which a ring can do
		work.AllReduce, work.AllReduceCoalesced, work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced,
		work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced,
	}
	staged  = append([]work.OpType{work.Broadcast, work.Reduce}, rounds...) // which clusters can do
	moves   = []work.OpType{work.Gather, work.Scatter, work.AllToAll, work.AllToAllSingle}
	everyOp = append(append([]work.OpType{work.Barrier}, moves...), staged...)
)

// A new work needs a row here, and a file with its way.
func init() {
	add(DirectWork, directPriority, kernelWay{}, tensor.Strided, everyOp...)
	add(RingWork, ringPriority, kernelWay{around: true}, tensor.Strided, rounds...)
	add(ClustersWork, clustersPriority, clustersWay{}, tensor.Strided, staged...)
	add(HostWork, 0, hostWay{}, tensor.Strided, everyOp...)
	add(SparseDirectWork, directPriority, sparseWay{direct: true}, tensor.SparseCOO, work.AllReduce)
	add(SparseWork, 0, sparseWay{}, tensor.SparseCOO, work.AllReduce)
}

// add registers a work for operations on tensors of a layout.
func add(name string, priority int, w way, l tensor.Layout, ops ...work.OpType) {
	var kinds []kind
	for _, op := range ops {
		kinds = append(kinds, kind{op, l})
	}
	if err := works.Add(registry.Work[way]{Name: name, Priority: priority, Do: w}, kinds...); err != nil {
		panic(err)
	}
}

// AllReduceWorks returns the names that Options.AllReduce may have: the works for dense tensors,
// those of the highest priority first.
func AllReduceWorks() (names []string) {
	for _, w := range works.Of(kind{work.AllReduce, tensor.Strided}) {
		names = append(names, w.Name)
	}
	return names
}
