package cuda

import (
	"errors"
	"math/bits"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// pool is page-locked memory that operations take turns to use. Page-locking is
// slow (about 0.3 ms a MiB) and can stop the device, so what was locked stays so.
type pool struct {
	d    driver.Driver
	keep int // bytes that wait for their next use, at most

	mu   sync.Mutex
	idle [bits.UintSize][]driver.HostMemory // by the logarithm of the length
	held int
}

const smallestPinned = 4096

// class returns the logarithm of the length of memory for n bytes.
func class(n int) int { return bits.Len(uint(max(n, smallestPinned) - 1)) }

// get returns at least n bytes.
func (p *pool) get(n int) (driver.HostMemory, error) {
	c := class(n)
	p.mu.Lock()
	if k := len(p.idle[c]) - 1; k >= 0 {
		h := p.idle[c][k]
		p.idle[c][k] = nil
		p.idle[c] = p.idle[c][:k]
		p.held -= h.Len()
		p.mu.Unlock()
		return h, nil
	}
	p.mu.Unlock()
	return p.d.AllocHost(1 << c)
}

// put gives memory back that nothing uses any more.
func (p *pool) put(h driver.HostMemory) error {
	p.mu.Lock()
	if p.held+h.Len() <= p.keep {
		c := class(h.Len())
		p.idle[c] = append(p.idle[c], h)
		p.held += h.Len()
		p.mu.Unlock()
		return nil
	}
	p.mu.Unlock()
	return h.Close()
}

// close frees what is idle.
func (p *pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keep = 0
	var errs []error
	for c := range p.idle {
		for _, h := range p.idle[c] {
			errs = append(errs, h.Close())
		}
		p.idle[c] = nil
	}
	p.held = 0
	return errors.Join(errs...)
}

// scratch is device memory that operations take turns to use: allocating it stops
// the device.
type scratch struct {
	d    driver.Driver
	keep int // bytes of a device that wait for their next use, at most

	mu   sync.Mutex
	idle map[scratchKey][]driver.Memory
	held map[int]int // by device
}

type scratchKey struct{ dev, class int }

// get returns at least n bytes.
func (p *scratch) get(dev, n int) (driver.Memory, error) {
	k := scratchKey{dev, class(n)}
	p.mu.Lock()
	if list := p.idle[k]; len(list) > 0 {
		m := list[len(list)-1]
		p.idle[k] = list[:len(list)-1]
		p.held[dev] -= m.Len()
		p.mu.Unlock()
		return m, nil
	}
	p.mu.Unlock()
	v, err := p.d.Device(dev)
	if err != nil {
		return nil, err
	}
	return v.Alloc(1 << k.class)
}

// put gives memory back that nothing uses any more.
func (p *scratch) put(m driver.Memory) error {
	k := scratchKey{m.Device().Index, class(m.Len())}
	p.mu.Lock()
	if p.held[k.dev]+m.Len() <= p.keep {
		if p.idle == nil {
			p.idle, p.held = make(map[scratchKey][]driver.Memory), make(map[int]int)
		}
		p.idle[k] = append(p.idle[k], m)
		p.held[k.dev] += m.Len()
		p.mu.Unlock()
		return nil
	}
	p.mu.Unlock()
	return m.Close()
}

// close frees what is idle.
func (p *scratch) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keep = 0
	var errs []error
	for k, list := range p.idle {
		for _, m := range list {
			errs = append(errs, m.Close())
		}
		delete(p.idle, k)
	}
	clear(p.held)
	return errors.Join(errs...)
}
