package nccl

import (
	"context"
	"errors"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
)

// Stage implements backend.Stager.
func (b *Backend) Stage(ctx context.Context, ts []*tensor.Tensor) (on []*tensor.Tensor, back func(n int) error, free func() error, err error) {
	at := b.ownDevice()
	dev, err := b.driver.Device(at)
	if err != nil {
		return nil, nil, nil, err
	}
	s, err := dev.NewStream(driver.StreamOptions{Name: "objects"})
	if err != nil {
		return nil, nil, nil, err
	}
	var host []driver.HostMemory
	var made []driver.Memory
	release := func() error {
		errs := []error{s.Close()}
		for i := range made {
			errs = append(errs, b.pinned.Put(pool.OnHost, host[i]), b.scratch.Put(at, made[i]))
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, release())
		}
	}()
	on = make([]*tensor.Tensor, len(ts))
	for i, t := range ts {
		h, err := b.pinned.Get(pool.OnHost, byteLen(t))
		if err != nil {
			return nil, nil, nil, err
		}
		m, err := b.scratch.Get(at, byteLen(t))
		if err != nil {
			return nil, nil, nil, errors.Join(err, b.pinned.Put(pool.OnHost, h))
		}
		host, made = append(host, h), append(made, m)
		if t == nil {
			continue
		}
		if on[i], err = tensor.OnDevice(t.DType(), part{m, t.ByteLen()}, t.Shape()...); err != nil {
			return nil, nil, nil, err
		}
		if t.Len() > 0 {
			driver.HostAccess(b.driver, "objects", driver.Writes(h.Ptr(), t.ByteLen()))
			if err := t.Pack(h.Bytes()[:t.ByteLen()]); err != nil {
				return nil, nil, nil, err
			}
			if err := s.Copy(m.Ptr(), h.Ptr(), t.ByteLen()); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	back = func(n int) error {
		for i, t := range ts[:n] {
			if byteLen(t) > 0 {
				if err := s.Copy(host[i].Ptr(), made[i].Ptr(), t.ByteLen()); err != nil {
					return err
				}
			}
		}
		if err := ended(ctx, s); err != nil {
			return err
		}
		for i, t := range ts[:n] {
			if byteLen(t) > 0 {
				driver.HostAccess(b.driver, "objects", driver.Reads(host[i].Ptr(), t.ByteLen()))
				if err := t.Unpack(host[i].Bytes()[:t.ByteLen()]); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return on, back, release, ended(ctx, s)
}

// part is the first bytes of memory.
type part struct {
	driver.Memory
	bytes int
}

func (p part) Len() int { return p.bytes }

func byteLen(t *tensor.Tensor) int {
	if t == nil {
		return 0
	}
	return t.ByteLen()
}

// ended waits for what a stream has been given.
func ended(ctx context.Context, s driver.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(ctx)
}
