package nccl

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/work"
)

// calls are what NCCL is asked for, by operation.
var calls = []struct {
	op   work.OpType
	call string
	why  string
}{
	{work.AllReduce, "ncclAllReduce", "in place; several tensors of a coalesced call are one group"},
	{work.Broadcast, "ncclBroadcast", "in place"},
	{work.Reduce, "ncclReduce", "in place"},
	{work.AllGather, "ncclAllGather", "copies follow if the outputs do not lie one behind the other; outputs of unequal shape are a group of ncclBroadcast"},
	{work.AllGatherIntoTensor, "ncclAllGather", ""},
	{work.ReduceScatter, "ncclReduceScatter", "after copies if the inputs do not lie one behind the other; inputs of unequal shape are a group of ncclReduce"},
	{work.ReduceScatterTensor, "ncclReduceScatter", ""},
	{work.AllToAll, "ncclSend, ncclRecv", "one group"},
	{work.Gather, "ncclSend, ncclRecv", "one group on the root"},
	{work.Scatter, "ncclSend, ncclRecv", "one group on the root"},
	{work.Barrier, "ncclAllReduce", "of one float32"},
}

// Explain says which NCCL there is, how communicators are made and what an operation calls.
func (b *Backend) Explain() backend.Explanation {
	e := backend.Explanation{Backend: Name, Rank: b.rank, Size: b.size, Wire: Name}
	e.Why = fmt.Sprintf("NCCL %v (%s) chooses the way", b.api.Version(), b.api.Path())
	if b.options.Eager {
		e.Why += "; the communicator was made with the group"
	} else {
		e.Why += "; the first operation makes the communicator"
	}
	if b.control != nil {
		e.Why += "; all ranks are of this library, and tell each other of faults over backend gloo"
	} else if b.besidePyTorch() {
		e.Why += "; PyTorch's ranks may take part, so a fault shows at the timeout, or when their store tells"
	}
	for _, c := range calls {
		e.Choices = append(e.Choices, backend.Choice{Op: c.op.String(), UpTo: -1, Algorithm: c.call, Why: c.why})
	}
	pairs := "on a communicator of the two ranks; a batch is one group on that of all"
	if b.options.Eager {
		pairs = "on the group's communicator with NCCL 2.26 and later, else on one of the two ranks; a batch is one group"
	}
	e.Choices = append(e.Choices, backend.Choice{Op: work.Send.String(), UpTo: -1, Algorithm: "ncclSend", Why: pairs})
	return e
}
