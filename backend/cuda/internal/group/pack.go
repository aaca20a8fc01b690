package group

import (
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
)

// packedPlace is a place in memory of the tensor's device, where its elements are in
// order: to the host the tensor is contiguous.
type packedPlace struct {
	*place.Place
	kernels     *packer
	read, write bool
}

// stagePacked has the devices bring elements in order that lie in many runs of bytes.
// Few, or any where there are no kernels, are copied one by one.
func (o *Operation) stagePacked() error {
	runs, can := 0, Lacks(o.B.Driver) == nil
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) { runs += len(p.Holes) })
	}
	if runs <= mostCommands-spareCommands || !can {
		return nil
	}
	for i := range o.Legs {
		o.Legs[i].each(func(p *place.Place) { can = can && (p.Flat || o.B.Packer(p.Dev).Err == nil) })
	}
	if !can {
		return nil
	}
	packed := make(map[*place.Place]int) // their numbers in o.packed
	for i := range o.Legs {
		l := &o.Legs[i]
		if err := o.stageLeg(l, packed); err != nil {
			return err
		}
	}
	return nil
}

func (o *Operation) stageLeg(l *Leg, packed map[*place.Place]int) error {
	of := func(p *place.Place) (*packedPlace, error) {
		if i, ok := packed[p]; ok {
			return &o.packed[i], nil
		}
		at, err := o.Scratch(p.Dev, p.T.ByteLen())
		if err != nil {
			return nil, fmt.Errorf("memory for the elements of %v with strides %v in order: %w", p.T, p.T.Strides(), err)
		}
		q := &place.Place{T: p.T, Of: p, Dev: p.Dev, Base: at, Hi: p.T.ByteLen(), Flat: true, Down: p.Down, Up: p.Up}
		packed[p] = len(o.packed)
		o.packed = append(o.packed, packedPlace{Place: q, kernels: o.B.Packer(p.Dev)})
		return &o.packed[len(o.packed)-1], nil
	}
	if l.Src != nil && !l.Src.Flat {
		k, err := of(l.Src)
		if err != nil {
			return err
		}
		l.Src, k.read = k.Place, true
	}
	for i, d := range l.Dst {
		if d.Flat {
			continue
		}
		k, err := of(d)
		if err != nil {
			return err
		}
		l.Dst[i], k.write = k.Place, true
	}
	return nil
}

// Scratch returns memory on a device until the operation has left the devices.
func (o *Operation) Scratch(dev, n int) (driver.Ptr, error) {
	m, err := o.B.Scratch.Get(dev, n)
	if err != nil {
		return 0, err
	}
	o.held = append(o.held, m)
	return m.Ptr(), nil
}

// Pin gets the operation's page-locked memory.
func (o *Operation) Pin(n int) (h driver.HostMemory, err error) {
	o.staging, err = o.B.Pinned.Get(pool.OnHost, n)
	return o.staging, err
}

// unstage gives back what Pin, Scratch and New have returned, which nothing uses any more.
func (o *Operation) unstage() {
	if o.staging != nil {
		o.B.Pinned.Put(pool.OnHost, o.staging)
		o.staging = nil
	}
	for _, m := range append(o.held, o.made...) {
		o.B.Scratch.Put(m.Device().Index, m)
	}
	o.held, o.made, o.packed = nil, nil, nil
}

// Pack has the devices bring elements in order, before they are copied to the host;
// unpack has them put back.
func (o *Operation) pack(to Commander) {
	for _, k := range o.packed {
		if k.read {
			k.kernels.Move(to, k.Down, k.Of, k.Base, true)
		}
	}
}

func (o *Operation) unpack(to Commander) {
	for _, k := range o.packed {
		if k.write {
			k.kernels.Move(to, k.Up, k.Of, k.Base, false)
		}
	}
}

// packer has the kernels that bring elements in order on a device, put them back, and combine them.
type packer struct {
	module       driver.Module
	Pack, Unpack driver.Function
	Err          error // why there are none
}

// Packer returns a device's.
func (b *Engine) Packer(dev int) *packer {
	b.making.Lock()
	defer b.making.Unlock()
	k := b.packers[dev]
	if k == nil {
		k = &packer{}
		if k.Err = k.load(b.Driver, dev); k.Err != nil {
			k.Err = errors.Join(fmt.Errorf("the kernels of device %d: %w", dev, k.Err), k.close())
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
	m, all, err := kernels.Open(v, kernels.PTX, kernels.Pack, kernels.Unpack)
	if err == nil {
		k.module, k.Pack, k.Unpack = m, all[kernels.Pack], all[kernels.Unpack]
	}
	return err
}

// Move has a stream of the packer's device bring the elements of a place in order, to where they are packed, or puts
// them back from there.
func (k *packer) Move(to Commander, s driver.Stream, p *place.Place, packed driver.Ptr, bring bool) {
	f, there, here := k.Unpack, driver.Writes, driver.Reads
	if bring {
		f, there, here = k.Pack, driver.Reads, driver.Writes
	}
	var access []driver.Access
	p.Uses(func(x place.Span) { access = append(access, there(p.Base+driver.Ptr(x.Off), x.N)) })
	access = append(access, here(packed, p.T.ByteLen()))
	p.InOrder(packed, func(l kernels.Layout, packed, spread driver.Ptr, n int) {
		to.Launch(s, &driver.Launch{
			Function: f, Grid: kernels.Blocks(n), Block: driver.Dim{X: kernels.Block},
			Args: l.Append(new(driver.Args).Ptr(packed).Ptr(spread)), Access: access,
		})
	})
}

// Combine returns the launch that combines n elements on the packer's device: those at into and those at from become
// those at into.
func (k *packer) Combine(op backend.ReduceOp, d tensor.DType, into, from driver.Ptr, n int) (*driver.Launch, error) {
	if k.Err != nil {
		return nil, k.Err
	}
	name, number := kernels.Combine(op.Kind(), d)
	f, err := k.module.Function(name)
	if err != nil {
		return nil, err
	}
	bytes := n * d.Size()
	return &driver.Launch{
		Function: f, Grid: kernels.Blocks(bytes), Block: driver.Dim{X: kernels.Block},
		Args:   new(driver.Args).Ptr(into).Ptr(from).Uint64(uint64(n)).Uint32(number),
		Access: []driver.Access{driver.Reads(from, bytes), driver.Writes(into, bytes)},
	}, nil
}

func (k *packer) close() (err error) {
	if k.module != nil {
		err = k.module.Close()
		k.module = nil
	}
	return err
}

// Lacks returns why a driver has no kernels. One that does not say may have them.
func Lacks(d driver.Driver) error {
	// A simulated device has the kernels that it was given.
	if k, ok := d.(interface{ HasKernel(string) bool }); ok && !k.HasKernel(kernels.Copy) {
		return fmt.Errorf("driver %s has no kernel %s", d.Name(), kernels.Copy)
	}
	return nil
}
