package run

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// fingerprint is what all ranks have to call alike as one collective. What they may call
// differently, as the sizes of an all-to-all, is left zero. The native wires carry it, and compare
// it on every rank.
type fingerprint struct {
	op    work.OpType
	with  *backend.ReduceOp // nil if nothing is reduced
	dtype tensor.DType      // Invalid if there are no tensors
	root  int               // -1 if there is none

	// elements is how many the tensor has that each rank gives or gets: of operations with a block
	// for each rank, how many a block has. A shape of [2 3] is the same as one of [6].
	elements int
	sized    bool // elements counts; else ranks may have different sizes

	// parts is a digest of the lengths of several tensors, or of blocks that are not alike. Then
	// elements is the sum of all. It is 0 if all blocks are alike.
	parts  uint16
	sparse bool // the ranks tell each other the rest themselves
}

// Operations that c10d has no number for.
const (
	opAlloc            work.OpType = 200
	opMonitoredBarrier work.OpType = 201
)

// alike returns the operation that stands for all that work as op does on the wire. Ranks may mix
// them.
func alike(op work.OpType) work.OpType {
	switch op {
	case work.AllReduceCoalesced:
		return work.AllReduce
	case work.AllGatherIntoTensor, work.AllGatherCoalesced:
		return work.AllGather
	case work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced:
		return work.ReduceScatter
	case work.AllToAllSingle:
		return work.AllToAll
	}
	return op
}

// The words of a transport.Call. The first has a one, so that it is never zero, the operation, the
// operator plus one, the dtype, flags, and the root plus one. The second has parts and elements.
const (
	callMarked = 1 << 63
	callSparse = 1 << 35
	callSized  = 1 << 34

	callOpAt, callWithAt, callDTypeAt = 52, 44, 36
	callPartsAt                       = 48
)

func (f fingerprint) call() transport.Call {
	w := callMarked | uint64(alike(f.op))<<callOpAt | uint64(f.dtype)<<callDTypeAt | uint64(uint32(f.root+1))
	if f.with != nil {
		w |= (uint64(f.with.Kind()) + 1) << callWithAt
	}
	if f.sparse {
		w |= callSparse
	}
	if f.sized {
		w |= callSized
	}
	return transport.Call{What: [2]uint64{w, uint64(f.parts)<<callPartsAt | uint64(f.elements)}}
}

// blocks sets elements and parts for a block of so many bytes for each rank.
func (f fingerprint) blocks(counts []int64) fingerprint {
	if !even(counts) {
		return f.parted(counts, 1)
	}
	f.sized, f.elements = true, int(counts[0])/f.dtype.Size()
	return f
}

// parted sets elements and parts for so many times parts of so many bytes.
func (f fingerprint) parted(counts []int64, times int) fingerprint {
	f.sized, f.elements, f.parts = true, times*int(totalOf(counts))/f.dtype.Size(), digestOf(counts)
	return f
}

// digestOf is never zero.
func digestOf(counts []int64) uint16 {
	sum := hash(counts)
	return uint16(sum^sum>>16^sum>>32^sum>>48) | 1
}

// hash is that of the numbers as little-endian words.
func hash[N int | int64](numbers []N) uint64 {
	h := fnv.New64a()
	var b [8]byte
	for _, n := range numbers {
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		h.Write(b[:])
	}
	return h.Sum64()
}

// Describe shows the call of any rank, or any words that one has sent.
func Describe(what [2]uint64) string {
	w := what[0]
	op, dtype := work.OpType(w>>callOpAt), tensor.DType(w>>callDTypeAt)
	s := op.String()
	switch op {
	case opAlloc:
		return "Alloc"
	case opMonitoredBarrier:
		return "monitored_barrier"
	}
	if k := uint8(w >> callWithAt); k > 0 {
		s += fmt.Sprintf("(%v)", backend.ReduceKind(k-1))
	}
	if w&callSparse != 0 {
		return s + " of a sparse tensor"
	}
	if dtype != tensor.Invalid {
		s += fmt.Sprintf(" of %v", dtype)
	}
	if w&callSized != 0 {
		s += fmt.Sprintf("[%d]", what[1]&(1<<callPartsAt-1))
	}
	if parts := what[1] >> callPartsAt; parts != 0 {
		s += fmt.Sprintf(" in parts (digest of their sizes %04x)", parts)
	}
	if root := uint32(w); root > 0 {
		how := "to"
		if op == work.Broadcast || op == work.Scatter {
			how = "from"
		}
		s += fmt.Sprintf(" %s root %d", how, root-1)
	}
	return s
}
