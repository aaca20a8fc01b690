package cuda

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// region is memory that processes of a host share. It holds words that order streams of
// neighbours, the calls that ranks compare, or the operands of an all-reduce. The host
// writes it without asking a driver, so a stream goes on whatever the driver is busy with.
//
// Ranks of one process have one mapping, and page-lock it once for each driver.
type region struct {
	*sharedMemory
	key  string // under which it is in regions
	uses int    // guarded by regions

	mu     sync.Mutex // of locked; page-locking may take long
	locked map[driver.Driver]*lockedRegion
}

// pageSize is the bytes of a region of words.
const pageSize = 4096

// regionNameLen is the longest name of a region.
const regionNameLen = 64

// sharedMemory is such memory as the system gives it. The name is for others to
// open it, until forget is called.
type sharedMemory struct {
	bytes         []byte
	name          string
	forget, unmap func() error // nil if there is nothing to do
}

// before is called before the system is asked for something for a region of n bytes; a
// variable for tests of systems that refuse it.
var before = func(call string, n int) error { return nil }

type lockedRegion struct {
	memory driver.HostMemory
	uses   int
}

var regions struct {
	sync.Mutex
	by map[string]*region
}

// newRegion makes a region of n bytes. Others open it by its name.
func newRegion(n int) (*region, error) {
	var id [16]byte
	rand.Read(id[:])
	m, err := createShared(hex.EncodeToString(id[:]), n)
	if err != nil {
		return nil, err
	}
	regions.Lock()
	defer regions.Unlock()
	return addRegion(m, m.name), nil
}

// addRegion notes a region; the caller holds regions.
func addRegion(m *sharedMemory, key string) *region {
	r := &region{sharedMemory: m, key: key, uses: 1, locked: make(map[driver.Driver]*lockedRegion)}
	if regions.by == nil {
		regions.by = make(map[string]*region)
	}
	regions.by[key] = r
	return r
}

// ownProcess reports whether a region of this process is used as such; a variable for
// tests of several processes in one.
var ownProcess = true

// openRegion opens a region of n bytes. An empty name stands for a rank that has none.
func openRegion(name string, n int) (*region, error) {
	if name == "" {
		return nil, errors.New("there is none")
	}
	regions.Lock()
	defer regions.Unlock()
	if r := regions.by[name]; r != nil && ownProcess {
		if len(r.bytes) != n {
			return nil, fmt.Errorf("shared memory has %d bytes, want %d", len(r.bytes), n)
		}
		r.uses++
		return r, nil
	}
	m, err := openShared(name, n)
	if err != nil {
		return nil, err
	}
	if ownProcess {
		return addRegion(m, name), nil
	}
	return &region{sharedMemory: m, uses: 1, locked: make(map[driver.Driver]*lockedRegion)}, nil
}

// hide takes the region's name away, when all who may open it have.
func (r *region) hide() error {
	regions.Lock()
	defer regions.Unlock()
	if r.forget == nil {
		return nil
	}
	f := r.forget
	r.forget = nil
	return f()
}

// lock page-locks the region for a driver.
func (r *region) lock(d driver.Driver) (driver.HostMemory, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.locked[d]
	if l == nil {
		m, err := d.RegisterHost(r.bytes)
		if err != nil {
			return nil, err
		}
		l = &lockedRegion{memory: m}
		r.locked[d] = l
	}
	l.uses++
	return l.memory, nil
}

func (r *region) unlock(d driver.Driver) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.locked[d]
	if l.uses--; l.uses > 0 {
		return nil
	}
	delete(r.locked, d)
	return l.memory.Close()
}

// unmap gives the memory back; a variable for tests of programs that use it for too
// long.
var unmap = func(m *sharedMemory) error {
	if m.unmap == nil {
		return nil
	}
	return m.unmap()
}

// leave ends one use, the last one with the memory.
func (r *region) leave() error {
	regions.Lock()
	defer regions.Unlock()
	if r.uses--; r.uses > 0 {
		return nil
	}
	if r.key != "" {
		delete(regions.by, r.key)
	}
	var err error
	if r.forget != nil {
		err = r.forget()
	}
	return errors.Join(err, unmap(r.sharedMemory))
}
