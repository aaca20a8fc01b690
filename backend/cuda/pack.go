package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
)

// packer has the kernels that bring elements in order on a device, and put them back.
type packer struct {
	module       driver.Module
	pack, unpack driver.Function
	err          error // why there are none
}

// packer returns a device's. The caller holds b.calls.
func (b *Backend) packer(dev int) *packer {
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

// mostRuns is up to how many runs of bytes each one is noted as used. Notes stay in order,
// so they cost more the more there are. Of a tensor with more runs all that lies between
// its first and its last byte counts as used.
const mostRuns = 1 << 14

// uses calls f for what an operation uses of the memory of a tensor's place.
func (p *place) uses(f func(span)) {
	if len(p.holes) > mostRuns {
		f(span{p.lo, p.hi - p.lo})
		return
	}
	p.each(f)
}

// tensor returns the place of the tensor itself.
func (p *place) tensor() *place {
	if p.of != nil {
		return p.of
	}
	return p
}

// inOrder calls f for each kernel that brings n bytes of the elements in order, between
// them and where they are packed.
func (p *place) inOrder(packed driver.Ptr, f func(l kernels.Layout, packed, spread driver.Ptr, n int)) {
	es := p.t.DType().Size()
	shape, strides := slices.Clone(p.t.Shape()), slices.Clone(p.t.Strides())
	first := p.base + driver.Ptr(p.t.Offset()*es)
	if most := 8; es > most {
		// To the kernels an element is several.
		for d := range strides {
			strides[d] *= es / most
		}
		shape, strides, es = append(shape, es/most), append(strides, 1), most
	}
	shape, strides = collapsed(shape, strides)
	outer := max(len(shape)-kernels.MostDims, 0)
	l := kernels.Layout{Size: es, Shape: shape[outer:], Strides: strides[outer:]}
	inner := es
	for _, k := range l.Shape {
		inner *= k
	}
	// A layout of more dimensions than a kernel takes is several.
	index := make([]int, outer)
	for {
		spread := first
		for d, k := range index {
			spread += driver.Ptr(k * strides[d] * es)
		}
		f(l, packed, spread, inner)
		packed += driver.Ptr(inner)
		d := outer - 1
		for ; d >= 0; d-- {
			if index[d]++; index[d] < shape[d] {
				break
			}
			index[d] = 0
		}
		if d < 0 {
			return
		}
	}
}

// collapsed returns shape and strides with as few dimensions as say the same.
func collapsed(shape, strides []int) (s, t []int) {
	for i, n := range shape {
		if n == 1 {
			continue
		}
		if k := len(s) - 1; k >= 0 && t[k] == n*strides[i] {
			s[k], t[k] = s[k]*n, strides[i]
			continue
		}
		s, t = append(s, n), append(t, strides[i])
	}
	return s, t
}

// packedPlace is a place in memory of the tensor's device, where its elements are in
// order: to the host the tensor is contiguous.
type packedPlace struct {
	*place
	memory      driver.Memory
	kernels     *packer
	read, write bool
}

// stagePacked has the devices bring elements in order that lie in many runs of bytes.
// Few, or any where there are no kernels, are copied one by one.
func (o *operation) stagePacked() error {
	runs, can := 0, lacks(o.b.driver) == nil
	for i := range o.legs {
		o.legs[i].each(func(p *place) { runs += len(p.holes) })
	}
	if runs <= mostCommands-spareCommands || !can {
		return nil
	}
	for i := range o.legs {
		o.legs[i].each(func(p *place) { can = can && (p.flat || o.b.packer(p.dev).err == nil) })
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
	of := func(p *place) (*packedPlace, error) {
		for i := range o.packed {
			if o.packed[i].of == p {
				return &o.packed[i], nil
			}
		}
		m, err := o.b.scratch.get(p.dev, p.t.ByteLen())
		if err != nil {
			return nil, fmt.Errorf("memory for the elements of %v with strides %v in order: %w", p.t, p.t.Strides(), err)
		}
		q := &place{t: p.t, of: p, dev: p.dev, base: m.Ptr(), hi: p.t.ByteLen(), flat: true, down: p.down, up: p.up}
		o.packed = append(o.packed, packedPlace{place: q, memory: m, kernels: o.b.packer(p.dev)})
		return &o.packed[len(o.packed)-1], nil
	}
	if l.src != nil && !l.src.flat {
		k, err := of(l.src)
		if err != nil {
			return err
		}
		l.src, k.read = k.place, true
	}
	for i, d := range l.dst {
		if d.flat {
			continue
		}
		k, err := of(d)
		if err != nil {
			return err
		}
		l.dst[i], k.write = k.place, true
	}
	return nil
}

// unstage gives back what stagePacked has made, which nothing uses any more.
func (o *operation) unstage() {
	for _, k := range o.packed {
		o.b.scratch.put(k.dev, k.memory)
	}
	o.packed = nil
}

// pack has the devices bring elements in order, before they are copied to the host;
// unpack has them put back.
func (o *operation) pack(to commander) {
	for _, k := range o.packed {
		if k.read {
			k.launches(to, k.down, k.kernels.pack, driver.Writes, driver.Reads)
		}
	}
}

func (o *operation) unpack(to commander) {
	for _, k := range o.packed {
		if k.write {
			k.launches(to, k.up, k.kernels.unpack, driver.Reads, driver.Writes)
		}
	}
}

func (k *packedPlace) launches(to commander, s driver.Stream, f driver.Function, packed, spread func(driver.Ptr, int) driver.Access) {
	var access []driver.Access
	k.of.uses(func(x span) { access = append(access, spread(k.of.base+driver.Ptr(x.off), x.n)) })
	access = append(access, packed(k.base, k.hi))
	k.of.inOrder(k.base, func(l kernels.Layout, packed, first driver.Ptr, n int) {
		to.launch(s, &driver.Launch{
			Function: f, Grid: kernels.Blocks(n), Block: driver.Dim{X: kernels.Block},
			Args: l.Append(new(driver.Args).Ptr(packed).Ptr(first)), Access: access,
		})
	})
}
