package work

import "fmt"

// OpType is a kind of operation. The numbers are c10d's.
type OpType uint8

// The kinds of operation.
const (
	Broadcast                    OpType = 0
	AllReduce                    OpType = 1
	AllReduceCoalesced           OpType = 2
	Reduce                       OpType = 3
	AllGather                    OpType = 4
	AllGatherIntoTensor          OpType = 5 // c10d: _ALLGATHER_BASE
	AllGatherCoalesced           OpType = 6
	Gather                       OpType = 7
	Scatter                      OpType = 8
	ReduceScatter                OpType = 9
	AllToAllSingle               OpType = 10 // c10d: ALLTOALL_BASE
	AllToAll                     OpType = 11
	Send                         OpType = 12
	Recv                         OpType = 13
	RecvAnySource                OpType = 14
	Barrier                      OpType = 15
	ReduceScatterTensor          OpType = 16 // c10d: _REDUCE_SCATTER_BASE
	Coalesced                    OpType = 17
	AllReduceSparse              OpType = 18
	ReduceScatterTensorCoalesced OpType = 19
	Unknown                      OpType = 100
)

// String returns the name that PyTorch's Python functions have.
func (t OpType) String() string {
	switch t {
	case Broadcast:
		return "broadcast"
	case AllReduce:
		return "all_reduce"
	case AllReduceCoalesced:
		return "all_reduce_coalesced"
	case Reduce:
		return "reduce"
	case AllGather:
		return "all_gather"
	case AllGatherIntoTensor:
		return "all_gather_into_tensor"
	case AllGatherCoalesced:
		return "all_gather_coalesced"
	case Gather:
		return "gather"
	case Scatter:
		return "scatter"
	case ReduceScatter:
		return "reduce_scatter"
	case AllToAllSingle:
		return "all_to_all_single"
	case AllToAll:
		return "all_to_all"
	case Send:
		return "send"
	case Recv:
		return "recv"
	case RecvAnySource:
		return "recv_any_source"
	case Barrier:
		return "barrier"
	case ReduceScatterTensor:
		return "reduce_scatter_tensor"
	case Coalesced:
		return "coalesced"
	case AllReduceSparse:
		return "all_reduce_sparse"
	case ReduceScatterTensorCoalesced:
		return "reduce_scatter_tensor_coalesced"
	case Unknown:
		return "unknown"
	}
	return fmt.Sprintf("op(%d)", uint8(t))
}

// IsP2P reports whether the operation concerns two ranks only.
func (t OpType) IsP2P() bool { return t == Send || t == Recv || t == RecvAnySource }
