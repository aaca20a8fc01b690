package cuda

import (
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
)

// packer has the kernels that bring elements in order on a device, and put them back.
type packer struct {
	module       driver.Module
	pack, unpack driver.Function
	err          error // why there are none
}

// packer returns a device's. The caller holds b.calls.
func (b *engine) packer(dev int) *packer {
	k := b.packers[dev]
	if k == nil {
		k = &packer{}
		if k.err = k.load(b.driver, dev); k.err != nil {
			k.err = errors.Join(fmt.Errorf("the kernels of device %d: %w", dev, k.err), k.close())
		}
		if b.packers == nil {
			b.packers = make(map[int]*packer)
		}
		b.packers[dev] = k
	}
	return k
}

func (k *packer) load(d driver.Driver, dev int) error {
	v, err := d.Device(dev)
	if err != nil {
		return err
	}
	if k.module, err = v.Load(kernels.PTX); err != nil {
		return err
	}
	if k.pack, err = k.module.Function(kernels.Pack); err == nil {
		k.unpack, err = k.module.Function(kernels.Unpack)
	}
	return err
}

func (k *packer) close() (err error) {
	if k.module != nil {
		err = k.module.Close()
		k.module = nil
	}
	return err
}

// lacks returns why a driver has no kernels. One that does not say may have them.
func lacks(d driver.Driver) error {
	// A simulated device has the kernels that it was given.
	if k, ok := d.(interface{ HasKernel(string) bool }); ok && !k.HasKernel(kernels.Copy) {
		return fmt.Errorf("driver %s has no kernel %s", d.Name(), kernels.Copy)
	}
	return nil
}

// packedPlace is a place in memory of the tensor's device, where its elements are in
// order: to the host the tensor is contiguous.
type packedPlace struct {
	*place.Place
	memory      driver.Memory
	kernels     *packer
	read, write bool
}

// stagePacked has the devices bring elements in order that lie in many runs of bytes.
// Few, or any where there are no kernels, are copied one by one.
func (o *operation) stagePacked() error {
	runs, can := 0, lacks(o.b.driver) == nil
	for i := range o.legs {
		o.legs[i].each(func(p *place.Place) { runs += len(p.Holes) })
	}
	if runs <= mostCommands-spareCommands || !can {
		return nil
	}
	for i := range o.legs {
		o.legs[i].each(func(p *place.Place) { can = can && (p.Flat || o.b.packer(p.Dev).err == nil) })
	}
	if !can {
		return nil
	}
	for i := range o.legs {
		l := &o.legs[i]
		if err := o.stageLeg(l); err != nil {
			return err
		}
	}
	return nil
}

func (o *operation) stageLeg(l *leg) error {
	of := func(p *place.Place) (*packedPlace, error) {
		for i := range o.packed {
			if o.packed[i].Of == p {
				return &o.packed[i], nil
			}
		}
		m, err := o.b.scratch.Get(p.Dev, p.T.ByteLen())
		if err != nil {
			return nil, fmt.Errorf("memory for the elements of %v with strides %v in order: %w", p.T, p.T.Strides(), err)
		}
		q := &place.Place{T: p.T, Of: p, Dev: p.Dev, Base: m.Ptr(), Hi: p.T.ByteLen(), Flat: true, Down: p.Down, Up: p.Up}
		o.packed = append(o.packed, packedPlace{Place: q, memory: m, kernels: o.b.packer(p.Dev)})
		return &o.packed[len(o.packed)-1], nil
	}
	if l.src != nil && !l.src.Flat {
		k, err := of(l.src)
		if err != nil {
			return err
		}
		l.src, k.read = k.Place, true
	}
	for i, d := range l.dst {
		if d.Flat {
			continue
		}
		k, err := of(d)
		if err != nil {
			return err
		}
		l.dst[i], k.write = k.Place, true
	}
	return nil
}

// unstage gives back what stagePacked has made, which nothing uses any more.
func (o *operation) unstage() {
	for _, k := range o.packed {
		o.b.scratch.Put(k.Dev, k.memory)
	}
	o.packed = nil
}

// pack has the devices bring elements in order, before they are copied to the host;
// unpack has them put back.
func (o *operation) pack(to commander) {
	for _, k := range o.packed {
		if k.read {
			k.launches(to, k.Down, k.kernels.pack, driver.Writes, driver.Reads)
		}
	}
}

func (o *operation) unpack(to commander) {
	for _, k := range o.packed {
		if k.write {
			k.launches(to, k.Up, k.kernels.unpack, driver.Reads, driver.Writes)
		}
	}
}

func (k *packedPlace) launches(to commander, s driver.Stream, f driver.Function, packed, spread func(driver.Ptr, int) driver.Access) {
	var access []driver.Access
	k.Of.Uses(func(x place.Span) { access = append(access, spread(k.Of.Base+driver.Ptr(x.Off), x.N)) })
	access = append(access, packed(k.Base, k.Hi))
	k.Of.InOrder(k.Base, func(l kernels.Layout, packed, first driver.Ptr, n int) {
		to.launch(s, &driver.Launch{
			Function: f, Grid: kernels.Blocks(n), Block: driver.Dim{X: kernels.Block},
			Args: l.Append(new(driver.Args).Ptr(packed).Ptr(first)), Access: access,
		})
	})
}
