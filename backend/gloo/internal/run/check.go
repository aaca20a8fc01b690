package run

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// name is the backend's.
const name = "gloo"

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: name, Op: op, What: fmt.Sprintf(format, args...)}
}

// dense checks a strided tensor in CPU memory.
func dense(op work.OpType, name string, t *tensor.Tensor) error {
	switch {
	case t == nil:
		return bad(op, "%s is nil", name)
	case t.Layout() != tensor.Strided:
		return bad(op, "only supports dense tensors, %s is %v", name, t)
	case t.Device().Type != tensor.CPU:
		return bad(op, "unsupported device type %v of %s", t.Device().Type, name)
	}
	return nil
}
