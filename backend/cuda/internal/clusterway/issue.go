package clusterway

import (
	"context"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Issue starts a collective. The ranks have met.
func (g *Group) Issue(ctx context.Context, op work.OpType, timeout time.Duration, c *Call, result ...*tensor.Tensor) (*work.Work, error) {
	j := job{g: g, c: *c, elem: c.dtype().Size()}
	var err error
	if c.Op.Reduces() {
		if j.red, err = c.Reduce.Reduction(c.dtype(), g.B.Size); err != nil {
			return nil, err
		}
	}
	if j.plan, err = g.planned(c, j.elem); err != nil {
		return nil, err
	}
	o := &group.Operation{Print: c.Print, Later: j.plan.Chunks > 1}
	switch {
	case g.why == nil && c.supported() == nil:
		newDeviceJob(j, o)
	case j.flat():
		all := append(c.Out[:len(c.Out):len(c.Out)], c.In...)
		o.Legs = append(group.Legs(group.Both, c.Out...), group.Legs(group.From, c.In...)...)
		o.Program = &flatJob{job: j, bytes: place.Bytes(all)}
	default:
		newHostJob(j, o)
	}
	return g.B.Issue(ctx, op, timeout, o, result...)
}
