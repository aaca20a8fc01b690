package directway

import (
	"cmp"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

func length(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.ByteLen()
	}
	return n
}

// bring returns where the elements of tensors are in order on the group's device. That is their
// own place, or the one they have been copied to.
func (c *Call) bring(ts []*tensor.Tensor) (driver.Ptr, error) {
	if at, _, ok := place.InOrder(ts, c.d.Dev); ok {
		return at, nil
	}
	at, err := c.scratch(c.d.Dev, length(ts))
	if err != nil {
		return 0, err
	}
	if done, err := c.list(ts, at, false); done || err != nil {
		return at, err
	}
	to := at
	for _, t := range ts {
		if err := c.move(t, to, true); err != nil {
			return 0, err
		}
		to += driver.Ptr(t.ByteLen())
	}
	return at, nil
}

// putBack is the way back from bring.
func (c *Call) putBack(ts []*tensor.Tensor, at driver.Ptr) error {
	if from, _, ok := place.InOrder(ts, c.d.Dev); ok && from == at {
		return nil
	}
	if done, err := c.list(ts, at, true); done || err != nil {
		return err
	}
	for _, t := range ts {
		if err := c.move(t, at, false); err != nil {
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
