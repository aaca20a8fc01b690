package gomlx

import (
	"fmt"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/tensors"

	"github.com/c10d-go/c10d/tensor"
)

var dtypesOf = map[dtypes.DType]tensor.DType{
	dtypes.Bool:       tensor.Bool,
	dtypes.Int8:       tensor.Int8,
	dtypes.Int16:      tensor.Int16,
	dtypes.Int32:      tensor.Int32,
	dtypes.Int64:      tensor.Int64,
	dtypes.Uint8:      tensor.Uint8,
	dtypes.Uint16:     tensor.Uint16,
	dtypes.Uint32:     tensor.Uint32,
	dtypes.Uint64:     tensor.Uint64,
	dtypes.Float16:    tensor.Float16,
	dtypes.BFloat16:   tensor.BFloat16,
	dtypes.Float32:    tensor.Float32,
	dtypes.Float64:    tensor.Float64,
	dtypes.Complex64:  tensor.Complex64,
	dtypes.Complex128: tensor.Complex128,
}

func dtypeOf(d dtypes.DType) (tensor.DType, error) {
	t, ok := dtypesOf[d]
	if !ok {
		return tensor.Invalid, fmt.Errorf("a group has no dtype for %s", d)
	}
	return t, nil
}

// isFloat reports whether elements can be averaged.
func isFloat(d dtypes.DType) bool {
	_, err := dtypeOf(d)
	return err == nil && d.IsFloat()
}

// mutate calls f with the elements of a tensor, in one dimension. They may be changed until f returns.
func mutate(t *tensors.Tensor, f func(*tensor.Tensor) error) error {
	dtype, err := dtypeOf(t.DType())
	if err != nil {
		return err
	}
	var failed error
	err = t.MutableBytes(func(b []byte) {
		var x *tensor.Tensor
		if x, failed = tensor.FromBytes(dtype, b, t.Size()); failed == nil {
			failed = f(x)
		}
	})
	if failed != nil {
		return failed
	}
	return err
}
