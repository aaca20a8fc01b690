package directway

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// fewTensors is up to how many tensors are copied one by one. A copy costs a stream about as much as a
// launch.
const fewTensors = 2

// list brings tensors in order, to a place on the group's device, or puts them back, in a launch for each
// 128 of them. It reports false if it has done nothing: they are few, on other devices, or have holes.
func (c *Call) list(ts []*tensor.Tensor, at driver.Ptr, back bool) (done bool, err error) {
	if len(ts) <= fewTensors {
		return false, nil
	}
	parts, off := make([]kernels.ListPart, 0, len(ts)), 0
	for _, t := range ts {
		n := t.ByteLen()
		if n == 0 {
			continue
		}
		if t.Device().Index != c.d.Dev || !t.IsContiguous() {
			return false, nil
		}
		parts = append(parts, kernels.ListPart{At: place.Start(t), Off: off, N: n})
		off += n
	}
	for len(parts) > 0 {
		n := min(len(parts), kernels.MostParts)
		if err := c.stream.Launch(kernels.ListLaunch(c.d.lister, at, back, parts[:n])); err != nil {
			return true, err
		}
		if err := c.pace(); err != nil {
			return true, err
		}
		parts = parts[n:]
	}
	return true, nil
}
