package ddp

import (
	"fmt"

	"github.com/c10d-go/c10d/tensor"
)

// Params returns one-dimensional parameters over slices, without a copy: grads[i] has the gradient of
// values[i]. Names are the positions. Make a Param yourself for one that needs a shape or a name.
func Params[T tensor.Element](values, grads [][]T) ([]Param, error) {
	if len(values) != len(grads) {
		return nil, fmt.Errorf("ddp: Params: %d values and %d gradients", len(values), len(grads))
	}
	params := make([]Param, len(values))
	for i, v := range values {
		if len(v) != len(grads[i]) {
			return nil, fmt.Errorf("ddp: Params: parameter %d has %d elements, its gradient %d", i, len(v), len(grads[i]))
		}
		value, err := tensor.Of(v)
		if err != nil {
			return nil, err
		}
		grad, err := tensor.Of(grads[i])
		if err != nil {
			return nil, err
		}
		params[i] = Param{Name: fmt.Sprint(i), Value: value, Grad: grad}
	}
	return params, nil
}
