package ddp

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

// refuseForeign ends the group if a rank in it is PyTorch's and Options.PyTorch is not set,
// because the two would now call different operations. The ranks have exchanged the numbers of
// their parameters, so each knows which kind its neighbours are.
func (d *DDP) refuseForeign() error {
	g, ok := d.g.(interface {
		Backend(tensor.DeviceType) (backend.Backend, error)
	})
	if !ok {
		return nil
	}
	b, err := g.Backend(tensor.CPU)
	if err != nil {
		return nil // the next operation says so
	}
	if w, ok := b.(interface{ Unwrap() backend.Backend }); ok {
		b = w.Unwrap()
	}
	f, ok := b.(interface{ Foreign() []int })
	if !ok {
		return nil
	}
	ranks := f.Foreign()
	if len(ranks) == 0 {
		return nil
	}
	err = fmt.Errorf("ddp: rank %d is PyTorch's: set Options.PyTorch on every Go rank", ranks[0])
	if g, ok := d.g.(interface{ Abort(cause error) }); ok {
		g.Abort(err)
	}
	return err
}
