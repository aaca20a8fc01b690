package directway

import (
	"cmp"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// mostBranches is how many tensors a tree has. The streams have room for its commands.
const mostBranches = 64

// fan gives tensors of the same elements those at at, on the group's device, down group.Spread's tree. A stream of
// each device copies from there, when the stream that wrote the data has done so.
func (c *Call) fan(at driver.Ptr, ts []*tensor.Tensor) error {
	switch len(ts) {
	case 0:
		return nil
	case 1:
		return c.putBack(ts, at)
	}
	n := ts[0].ByteLen()
	for some := range slices.Chunk(ts, mostBranches) {
		all := append(make([]*place.Place, 0, len(some)+1), &place.Place{T: some[0], Dev: c.d.Dev, Base: at, Hi: n, Flat: true})
		for _, t := range some {
			p := place.Of(t)
			if !p.Flat {
				packed, err := c.scratch(p.Dev, n)
				if err != nil {
					return err
				}
				p = &place.Place{T: t, Of: p, Dev: p.Dev, Base: packed, Hi: n, Flat: true}
			}
			all = append(all, p)
		}
		if err := c.among(all, n); err != nil {
			return err
		}
	}
	return nil
}

// among copies n bytes from the first of the places to the others, and puts elements back that are packed there. The
// copies come after what the call's stream has been given, and before what it is given later.
func (c *Call) among(all []*place.Place, n int) (err error) {
	d, b := c.d, c.d.B
	for _, p := range all {
		if p.Of != nil && b.Packer(p.Dev).Err != nil {
			return b.Packer(p.Dev).Err
		}
	}
	fill := func(to group.Commander) {
		group.Spread(to, all, 0, n)
		for _, p := range all {
			if p.Of != nil {
				b.Packer(p.Dev).Move(to, p.Up, p.Of, p.Base, false)
			}
		}
	}
	if !slices.ContainsFunc(all, func(p *place.Place) bool { return p.Dev != d.Dev }) {
		for _, p := range all {
			p.Up = c.stream
		}
		one := sole{c: c}
		fill(&one)
		return one.err
	}
	if c.captured {
		return errCaptureDevice
	}
	// These streams are the operations' that were called before: they get theirs first.
	if err := b.Poll(c.ctx, c.timeout, func() (bool, error) { return b.Fed(), nil }); err != nil {
		return err
	}
	var uses []driver.Access
	for _, p := range all {
		if _, p.Up, err = b.Streams(p.Dev); err != nil {
			return err
		}
		uses = append(uses, driver.Writes(p.Base+driver.Ptr(p.Lo), n))
		if p.Of != nil {
			p.Of.Uses(func(x place.Span) { uses = append(uses, driver.Writes(p.Of.Base+driver.Ptr(x.Off), x.N)) })
		}
	}
	batch := b.Tracker.Batch()
	batch.Before(c.stream, uses...)
	fill(batch)
	batch.After(c.stream, uses...)
	commands := batch.Len()
	p, err := batch.Run()
	if p != nil {
		c.trees = append(c.trees, p)
		if err != nil {
			return cmp.Or(p.Order(c.stream), err)
		}
	}
	for range commands {
		err = cmp.Or(err, c.pace())
	}
	return err
}
