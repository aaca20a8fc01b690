package gloo

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/transport/tcp"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// fingerprint is what all ranks have to call alike under one number. Where it may differ,
// as the bytes of an all-to-all may, it is left zero. The native wire carries it.
type fingerprint struct {
	op     work.OpType
	with   *backend.ReduceOp // nil if nothing is reduced
	dtype  tensor.DType
	root   int // -1 if there is none
	bytes  int
	sparse bool // the ranks tell each other the rest themselves
}

// kinds has what works alike on the wire, so that ranks may mix it.
var kinds = map[work.OpType]work.OpType{
	work.AllReduceCoalesced:           work.AllReduce,
	work.AllGatherIntoTensor:          work.AllGather,
	work.AllGatherCoalesced:           work.AllGather,
	work.ReduceScatterTensor:          work.ReduceScatter,
	work.ReduceScatterTensorCoalesced: work.ReduceScatter,
	work.AllToAllSingle:               work.AllToAll,
}

// The first word of a tcp.Call has a one, so that it is never zero, the operation, the
// operator plus one, the dtype, whether it is sparse, and the root plus one; the
// second has the bytes.
func (f fingerprint) call() tcp.Call {
	op := f.op
	if kind, ok := kinds[op]; ok {
		op = kind
	}
	w := uint64(1)<<63 | uint64(op)<<52 | uint64(f.dtype)<<36 | uint64(uint32(f.root+1))
	if f.with != nil {
		w |= (uint64(f.with.Kind()) + 1) << 44
	}
	if f.sparse {
		w |= 1 << 35
	}
	return tcp.Call{w, uint64(f.bytes)}
}

// describe shows the call of any rank.
func describe(c tcp.Call) string {
	s := work.OpType(c[0] >> 52).String()
	if k := uint8(c[0] >> 44); k > 0 {
		s += fmt.Sprintf(" (%v)", backend.ReduceKind(k-1))
	}
	dtype := tensor.DType(c[0] >> 36 & 0xff)
	switch {
	case c[0]>>35&1 != 0:
		return s + " of a sparse tensor"
	case dtype != tensor.Invalid && c[1] > 0:
		s += fmt.Sprintf(" of %d bytes of %v", c[1], dtype)
	case dtype != tensor.Invalid:
		s += fmt.Sprintf(" of %v", dtype)
	}
	if root := uint32(c[0]); root > 0 {
		s += fmt.Sprintf(" with root %d", root-1)
	}
	return s
}

// enter lets the native wire compare what this rank calls with what others do. In shared
// memory the ranks compare it there.
func (b *Backend) enter(o *operation) {
	if !b.native || b.shared != nil {
		return
	}
	if m, ok := b.meshFor(o.tag).(*tcp.Mesh); ok {
		m.Enter(o.tag, o.print, uint8(o.Info().Op), o.Info().Seq)
	}
}
