package nccl

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// types are NCCL's types of the dtypes that it moves and combines. A complex number is two real ones.
var types = map[tensor.DType]libnccl.DataType{
	tensor.Int8: libnccl.Int8, tensor.Uint8: libnccl.Uint8, tensor.Bool: libnccl.Uint8, tensor.Int32: libnccl.Int32, tensor.Uint32: libnccl.Uint32,
	tensor.Int64: libnccl.Int64, tensor.Uint64: libnccl.Uint64, tensor.Float16: libnccl.Float16, tensor.Float32: libnccl.Float32,
	tensor.Float64: libnccl.Float64, tensor.BFloat16: libnccl.BFloat16, tensor.Complex64: libnccl.Float32, tensor.Complex128: libnccl.Float64,
	tensor.Float8E4M3: libnccl.Float8E4M3, tensor.Float8E5M2: libnccl.Float8E5M2,
}

func isFloat8(d tensor.DType) bool { return d == tensor.Float8E4M3 || d == tensor.Float8E5M2 }

// typeOf returns the type of a dtype. A version without float8 moves their bytes.
func (b *Backend) typeOf(op work.OpType, d tensor.DType) (libnccl.DataType, error) {
	t, ok := types[d]
	if !ok {
		return 0, b.lacks(fmt.Sprintf("%v of %v", op, d))
	}
	if isFloat8(d) && !b.api.Version().HasFloat8() {
		return libnccl.Uint8, nil
	}
	return t, nil
}

// count returns how many numbers of NCCL's type a tensor has.
func count(t *tensor.Tensor) int {
	if t.DType().IsComplex() {
		return 2 * t.Len()
	}
	return t.Len()
}

// reduction is an operator as NCCL has it.
type reduction struct {
	op     libnccl.RedOp
	scalar []byte // of a PREMUL_SUM
}

// redOps has the operators by backend.ReduceKind.
var redOps = map[backend.ReduceKind]libnccl.RedOp{
	backend.Sum().Kind(): libnccl.Sum, backend.Product().Kind(): libnccl.Prod, backend.Max().Kind(): libnccl.Max, backend.Min().Kind(): libnccl.Min, backend.Avg().Kind(): libnccl.Avg,
	backend.PreMulSum(1).Kind(): libnccl.Sum,
}

// reductionOf maps an operator as PyTorch does: the sum of bools is their maximum as bytes.
func (b *Backend) reductionOf(op work.OpType, r backend.ReduceOp, d tensor.DType) (reduction, error) {
	if _, err := b.args.Reduction(op, r, d); err != nil {
		return reduction{}, err
	}
	n, ok := redOps[r.Kind()]
	if !ok {
		return reduction{}, b.lacks(fmt.Sprintf("%v with operator %v", op, r))
	}
	if isFloat8(d) && !b.api.Version().HasFloat8() {
		return reduction{}, b.lacks(fmt.Sprintf("%v of %v with NCCL %v", op, d, b.api.Version()))
	}
	if d == tensor.Bool && n == libnccl.Sum {
		n = libnccl.Max
	}
	var scalar []byte
	if r.Kind() == backend.PreMulSum(1).Kind() {
		switch f := r.Factor(); types[d] {
		case libnccl.Float64:
			scalar = binary.NativeEndian.AppendUint64(nil, math.Float64bits(f))
		case libnccl.Float32:
			scalar = binary.NativeEndian.AppendUint32(nil, math.Float32bits(float32(f)))
		case libnccl.Float16:
			scalar = binary.NativeEndian.AppendUint16(nil, uint16(tensor.F16From(float32(f))))
		case libnccl.BFloat16:
			if b.besidePyTorch() {
				return reduction{}, &backend.UnsupportedError{Backend: Name, Op: fmt.Sprintf("%v of %v with operator %v beside PyTorch: its ranks pass NCCL a float32 as the factor, "+
					"and NCCL takes its low half for a bfloat16, so the result would be wrong: multiply first, and then sum", op, d, r)}
			}
			scalar = binary.NativeEndian.AppendUint16(nil, uint16(tensor.BF16From(float32(f))))
		default:
			return reduction{}, b.lacks(fmt.Sprintf("%v of %v with operator %v", op, d, r))
		}
	}
	return reduction{n, scalar}, nil
}

// lacks is the error of a call that NCCL has nothing for.
func (b *Backend) lacks(what string) error {
	return &backend.UnsupportedError{Backend: Name, Op: what + ": NCCL has no such thing, backend cuda has (a group of Go ranks takes it with cuda:cuda)"}
}

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: Name, Op: op, What: fmt.Sprintf(format, args...)}
}

// dense checks a tensor: NCCL takes elements that lie one after the other in memory of the rank's device.
func (b *Backend) dense(op work.OpType, name string, t *tensor.Tensor) error {
	switch {
	case t == nil:
		return bad(op, "%s is nil", name)
	case t.Layout() != tensor.Strided:
		return bad(op, "only supports dense tensors, %s is %v; backend cuda sums sparse ones", name, t)
	case t.Device().Type != tensor.CUDA:
		return bad(op, "%s is on %v, want memory of a device: tensors in CPU memory are for backend gloo, or for cuda beside it", name, t.Device())
	case t.Device().Index < 0 || t.Device().Index >= b.driver.Count():
		return bad(op, "%s is on %v, the driver %s has %d devices", name, t.Device(), b.driver.Name(), b.driver.Count())
	case b.dev != nil && t.Device() != b.dev.ID():
		return bad(op, "%s is on %v, this rank's communicator on %v: a rank of an NCCL group has one device", name, t.Device(), b.dev.ID())
	case !t.IsContiguous() && t.Len() > 0:
		return bad(op, "%s is not contiguous, which NCCL needs; backend cuda takes it", name)
	}
	if _, ok := t.Memory().(interface{ Ptr() driver.Ptr }); !ok {
		return bad(op, "%s lies in a %T, want memory of package driver", name, t.Memory())
	}
	return nil
}

// start returns the address of a tensor's first element.
func start(t *tensor.Tensor) driver.Ptr {
	if t.Len() == 0 {
		return 0
	}
	return t.Memory().(interface{ Ptr() driver.Ptr }).Ptr() + driver.Ptr(t.Offset()*t.DType().Size())
}

// joined returns where tensors lie one behind the other, false if they do not.
func joined(ts []*tensor.Tensor) (driver.Ptr, bool) {
	var first, next driver.Ptr
	for _, t := range ts {
		switch p := start(t); {
		case t.Len() == 0:
			continue
		case first == 0:
			first = p
		case p != next:
			return 0, false
		}
		next = start(t) + driver.Ptr(t.ByteLen())
	}
	return first, true
}
