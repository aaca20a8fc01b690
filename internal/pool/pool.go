// Package pool keeps page-locked memory and memory of devices for later operations.
package pool

import (
	"errors"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Underway counts the operations of this process that devices may be at. To free memory, or to
// make it, CUDA may wait until a device has nothing to do, and holds a lock of the process
// meanwhile. An operation that waits for another rank may need that lock to go on. So pools free
// nothing while the count is not zero, whichever group the operations are of. An operation that
// has failed counts until its streams have gone on. If they have not when its group is closed, it
// counts for good.
var Underway atomic.Int64

// freeing is held while memory is freed, and frees is set then, so that no operation begins meanwhile.
var (
	freeing sync.Mutex
	frees   atomic.Bool
)

// Begin counts an operation before it gives a device anything to do. It waits for memory that is being freed.
func Begin() {
	Underway.Add(1)
	if frees.Load() {
		freeing.Lock() // who frees has it
		defer freeing.Unlock()
	}
}

// Alone calls f, which frees memory, unless operations are under way besides those of the caller. None begins before f
// has returned. It reports whether it has called f.
func Alone(own int64, f func()) bool {
	if Underway.Load() > own {
		return false
	}
	freeing.Lock()
	defer freeing.Unlock()
	frees.Store(true)
	defer frees.Store(false)
	if Underway.Load() > own { // it has begun, and may not have seen that memory is freed
		return false
	}
	f()
	return true
}

// Pool is memory that operations take turns to use: device memory, or page-locked
// memory on device OnHost. Making it is slow, page-locking some 0.3 ms a MiB.
type Pool[M memory] struct {
	make func(dev, n int) (M, error)
	keep int // bytes of a device that wait for their next use, once the rest can be freed

	mu   sync.Mutex
	idle map[poolKey][]M
	held map[int]int // bytes that are idle, by device
	over bool        // more than keep of some device
	done bool        // Close has been called
}

type memory interface {
	Len() int
	Close() error
}

// poolKey is a device and a length.
type poolKey struct{ dev, bytes int }

const (
	OnHost         = -1
	smallestPooled = 4096
	roughly        = 1 << 20
)

func newPool[M memory](keep int, make func(dev, n int) (M, error)) *Pool[M] {
	return &Pool[M]{make: make, keep: keep, idle: map[poolKey][]M{}, held: map[int]int{}}
}

// NewPinned returns a pool of page-locked memory, NewScratch one of device memory.
func NewPinned(d driver.Driver, keep int) *Pool[driver.HostMemory] {
	return newPool(keep, func(_, n int) (driver.HostMemory, error) { return d.AllocHost(n) })
}

func NewScratch(d driver.Driver, keep int) *Pool[driver.Memory] {
	return newPool(keep, func(dev, n int) (driver.Memory, error) {
		v, err := d.Device(dev)
		if err != nil {
			return nil, err
		}
		return v.Alloc(n)
	})
}

// Bytes returns the length of memory for n bytes, so that operations of nearly one length share memory. It is a
// power of two, or above roughly one of eight lengths between two powers.
func Bytes(n int) int {
	step := 1 << bits.Len(uint(max(n, smallestPooled)-1))
	if n > roughly {
		step /= 16
	}
	return (max(n, 1) + step - 1) / step * step
}

// Get returns at least n bytes. It frees what is more than keep, if it may.
func (p *Pool[M]) Get(dev, n int) (m M, err error) {
	k := poolKey{dev, Bytes(n)}
	p.mu.Lock()
	list := p.idle[k]
	found := len(list) > 0
	if found {
		last := len(list) - 1
		m, list[last] = list[last], m
		p.idle[k] = list[:last]
		p.held[dev] -= m.Len()
	}
	p.mu.Unlock()
	if err = p.Tidy(); err != nil && found {
		p.Put(dev, m)
	}
	if found || err != nil {
		return m, err
	}
	return p.make(dev, k.bytes)
}

// Tidy frees what is more than keep, if it may. An operation that has begun may not, nor may its Get.
func (p *Pool[M]) Tidy() (err error) {
	p.mu.Lock()
	over := p.over
	p.mu.Unlock()
	if !over {
		return nil
	}
	Alone(0, func() {
		p.mu.Lock()
		spare := p.trim(p.keep)
		p.mu.Unlock()
		err = free(spare)
	})
	return err
}

// Put gives memory back that nothing uses any more. It frees nothing before Close, because the caller ends
// operations and others wait for that.
func (p *Pool[M]) Put(dev int, m M) error {
	k := poolKey{dev, m.Len()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return m.Close()
	}
	p.idle[k] = append(p.idle[k], m)
	p.held[dev] += m.Len()
	p.over = p.over || p.held[dev] > p.keep
	return nil
}

// trim takes out what is idle beyond so many bytes a device, the largest first. The
// caller holds p.mu.
func (p *Pool[M]) trim(keep int) (out []M) {
	keys := slices.SortedFunc(maps.Keys(p.idle), func(a, b poolKey) int { return b.bytes - a.bytes })
	for dev := range p.held {
		for _, k := range keys {
			if k.dev != dev {
				continue
			}
			for list := p.idle[k]; len(list) > 0 && p.held[dev] > keep; list = p.idle[k] {
				last := len(list) - 1
				out = append(out, list[last])
				p.held[dev] -= list[last].Len()
				clear(list[last:])
				p.idle[k] = list[:last]
			}
			if len(p.idle[k]) == 0 {
				delete(p.idle, k)
			}
		}
	}
	p.over = false
	return out
}

// Close frees what is idle. What comes back later is freed then.
func (p *Pool[M]) Close() error {
	p.mu.Lock()
	p.done = true
	all := p.trim(0)
	p.mu.Unlock()
	return free(all)
}

func free[M memory](all []M) error {
	var errs []error
	for _, m := range all {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
