// Package region has memory that processes of a host share, without a name in any file system.
package region

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Region is memory that processes of a host share. It holds words that order streams of
// neighbours, the calls that ranks compare, or the operands of an all-reduce. The host
// writes it without asking a driver, so a stream goes on whatever the driver is busy with.
//
// Ranks of one process have one mapping, and page-lock it once for each driver.
type Region struct {
	*SharedMemory
	key  string // under which it is in regions
	uses int    // guarded by regions

	mu     sync.Mutex // of locked; page-locking may take long
	locked map[driver.Driver]*lockedRegion
}

// PageSize is the bytes of a region of words.
const PageSize = 4096

// NameLen is the length of a region's name.
const NameLen = 32

// SharedMemory is such memory as the system gives it. The name is for others to
// open it, until forget is called.
type SharedMemory struct {
	Bytes         []byte
	Name          string
	forget, unmap func() error // nil if there is nothing to do
}

// Before is called before the system is asked for something for a region of n bytes; a
// variable for tests of systems that refuse it.
var Before = func(call string, n int) error { return nil }

type lockedRegion struct {
	memory driver.HostMemory
	uses   int
}

var regions struct {
	sync.Mutex
	by map[string]*Region
}

// New makes a region of n bytes. Others open it by its name.
func New(n int) (*Region, error) {
	var id [16]byte
	rand.Read(id[:])
	m, err := createShared(hex.EncodeToString(id[:]), n)
	if err != nil {
		return nil, err
	}
	regions.Lock()
	defer regions.Unlock()
	return addRegion(m, m.Name), nil
}

// addRegion notes a region; the caller holds regions.
func addRegion(m *SharedMemory, key string) *Region {
	r := &Region{SharedMemory: m, key: key, uses: 1, locked: make(map[driver.Driver]*lockedRegion)}
	if regions.by == nil {
		regions.by = make(map[string]*Region)
	}
	regions.by[key] = r
	return r
}

// OwnProcess reports whether a region of this process is used as such; a variable for
// tests of several processes in one.
var OwnProcess = true

// Passes reports whether other processes can open a region. Tests of one process on virtual time change it: while a
// goroutine waits for other processes, virtual time does not pass.
var Passes = true

// Open opens a region of n bytes. An empty name stands for a rank that has none.
func Open(name string, n int) (*Region, error) {
	if name == "" {
		return nil, errors.New("there is none")
	}
	regions.Lock()
	defer regions.Unlock()
	if r := regions.by[name]; r != nil && OwnProcess {
		if len(r.Bytes) != n {
			return nil, fmt.Errorf("shared memory has %d bytes, want %d", len(r.Bytes), n)
		}
		r.uses++
		return r, nil
	}
	m, err := openShared(name, n)
	if err != nil {
		return nil, err
	}
	if OwnProcess {
		return addRegion(m, name), nil
	}
	return &Region{SharedMemory: m, uses: 1, locked: make(map[driver.Driver]*lockedRegion)}, nil
}

// Alone reports whether no other rank of this process has the region.
func (r *Region) Alone() bool {
	regions.Lock()
	defer regions.Unlock()
	return r.uses == 1
}

// Hide takes the region's name away, when all who may open it have.
func (r *Region) Hide() error {
	regions.Lock()
	defer regions.Unlock()
	if r.forget == nil {
		return nil
	}
	f := r.forget
	r.forget = nil
	return f()
}

// Lock page-locks the region for a driver.
func (r *Region) Lock(d driver.Driver) (driver.HostMemory, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.locked[d]
	if l == nil {
		m, err := d.RegisterHost(r.Bytes)
		if err != nil {
			return nil, err
		}
		l = &lockedRegion{memory: m}
		r.locked[d] = l
	}
	l.uses++
	return l.memory, nil
}

func (r *Region) Unlock(d driver.Driver) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.locked[d]
	if l.uses--; l.uses > 0 {
		return nil
	}
	delete(r.locked, d)
	return l.memory.Close()
}

// Unmap gives the memory back; a variable for tests of programs that use it for too
// long.
var Unmap = func(m *SharedMemory) error {
	if m.unmap == nil {
		return nil
	}
	return m.unmap()
}

// Leave ends one use, the last one with the memory.
func (r *Region) Leave() error {
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
	return errors.Join(err, Unmap(r.SharedMemory))
}

// Word returns a word of the region.
func (r *Region) Word(at int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.Bytes[at])) }
