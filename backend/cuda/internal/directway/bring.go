package directway

import (
	"cmp"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// bring returns where the elements of tensors are in order on the group's device. That is their
// own place, or the one they have been copied to.
func (c *Call) bring(ts []*tensor.Tensor) (driver.Ptr, error) {
	if at, _, ok := place.InOrder(ts, c.d.Dev); ok {
		return at, nil
	}
	at, err := c.scratch(c.d.Dev, place.Bytes(ts))
	if err != nil {
		return 0, err
	}
	return at, c.moveAll(ts, at, true)
}

// putBack is the way back from bring.
func (c *Call) putBack(ts []*tensor.Tensor, at driver.Ptr) error {
	if from, _, ok := place.InOrder(ts, c.d.Dev); ok && from == at {
		return nil
	}
	return c.moveAll(ts, at, false)
}

// moveAll brings tensors in order, to a place on the group's device, or puts them back.
func (c *Call) moveAll(ts []*tensor.Tensor, at driver.Ptr, bring bool) error {
	if done, err := c.list(ts, at, !bring); done || err != nil {
		return err
	}
	for _, t := range ts {
		if err := c.move(t, at, bring); err != nil {
			return err
		}
		at += driver.Ptr(t.ByteLen())
	}
	return nil
}

// move brings the elements of a tensor to a place on the group's device, or from there.
func (c *Call) move(t *tensor.Tensor, at driver.Ptr, bring bool) error {
	n := t.ByteLen()
	if n == 0 {
		return nil
	}
	dev, flat, s := t.Device().Index, t.IsContiguous(), c.stream
	if dev == c.d.Dev {
		switch {
		case !flat:
			return c.pack(s, t, at, bring)
		case bring:
			return c.copy(s, at, place.Start(t), n)
		}
		return c.copy(s, place.Start(t), at, n)
	}
	// By the tensor's device: what other devices fetch waits in one queue, see package driver.
	other, err := c.otherStream(dev)
	if err != nil {
		return err
	}
	own := place.Start(t)
	if !flat {
		if own, err = c.scratch(dev, n); err != nil {
			return err
		}
	}
	if bring {
		if err = follow(other, s); err == nil && !flat {
			err = c.pack(other, t, own, true)
		}
		if err == nil {
			err = c.copy(other, at, own, n)
		}
		if err = cmp.Or(err, follow(s, other)); err == nil {
			err = cmp.Or(c.pace(), c.pace()) // the streams' events and waits
		}
		return err
	}
	if err = c.copy(s, own, at, n); err != nil || flat {
		return err
	}
	if err = follow(other, s); err == nil {
		err = c.pack(other, t, own, false)
	}
	return cmp.Or(err, follow(s, other))
}

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
		if err := cmp.Or(c.stream.Launch(kernels.ListLaunch(c.d.lister, at, back, parts[:n])), c.pace()); err != nil {
			return true, err
		}
		parts = parts[n:]
	}
	return true, nil
}
