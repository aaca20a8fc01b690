package shm

import (
	"math/rand/v2"
	"sync/atomic"
	"syscall"
)

// StartAt makes a group that has done nothing yet look as if it had done p pieces.
func (g *Group) StartAt(p uint32) {
	g.next, g.seen = p, p
	for i := range g.self.slots {
		atomic.StoreUint32(g.self.slots[i].in, p)
	}
}

// Seen returns how many pieces all ranks are known to have published.
func (g *Group) Seen() uint32 { return g.seen }

// Spins reports whether ranks poll before they yield.
func (g *Group) Spins() bool { return g.spinFor > 0 }

// Magic is what a hello begins with.
const Magic = uint64(magic)

// From returns options by which the collectives that read other ranks' memory do so from n bytes on; -1 means never.
func (o Options) From(n int64) Options {
	o.reads = &ReadLimits{n, n, n}
	return o
}

// Tile returns options by which n bytes of each operand are read at a time.
func (o Options) Tile(n int) Options {
	o.tile = n
	return o
}

// SetMapped sets from how many bytes on memory of Alloc is exposed, for a group that runs no
// operation. All ranks call it.
func (g *Group) SetMapped(n int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mapped = uniform(n)
	g.setEarly()
}

// Arena returns options by which each rank has n bytes to allocate, or a little more.
func (o Options) Arena(n int) Options {
	o.arena = n
	return o
}

// Section returns options by which n bytes of a buffer are reduced at a time.
func (o Options) Section(n int) Options {
	o.section = n
	return o
}

// SlowCopies returns options by which copies are as fast as copy on this rank.
func (o Options) SlowCopies() Options {
	o.slowCopies = true
	return o
}

// NoArenas returns options by which this rank fails to map arenas.
func (o Options) NoArenas(why syscall.Errno) Options {
	o.noArenas = arenasFailed(why)
	return o
}

// Reading returns options with which before is called before this rank reads n bytes of the
// memory of process pid. If it returns an error, nothing is read.
func (o Options) Reading(before func(pid, n int) error) Options {
	o.readMemory = func(w *vmReader, p *process, dst []byte, addr uint64) error {
		if err := before(p.pid, len(dst)); err != nil {
			return err
		}
		return w.read(p, dst, addr)
	}
	return o
}

// Taking returns options by which this rank takes process pid for the other ranks' process. If
// pid is 0 it takes the right process and expects another mark.
func (o Options) Taking(pid int) Options {
	o.readMemory = func(w *vmReader, p *process, dst []byte, addr uint64) error {
		other := *p
		if pid == 0 {
			other.mark[0]++
		} else {
			other.pid = pid
		}
		return w.read(&other, dst, addr)
	}
	return o
}

// MarkLen is how many bytes a probe reads.
const MarkLen = len(mark{})

// PretendFar has the mesh take the CPUs of all other ranks for far.
func (m *Mesh) PretendFar() {
	for i := range m.peers {
		m.peers[i].far = 200
	}
}

// NameOutside announces a message of n bytes that begins behind the end of this rank's arena.
func (m *Mesh) NameOutside(peer int, slot uint64, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := &m.peers[peer].w
	w.room(0)
	w.publish(frame{kind: frameFirst, id: 1, slot: slot, total: uint64(n), addr: inArena | uint64(len(m.g.own.mem))})
}

// Group returns the group under the mesh.
func (m *Mesh) Group() *Group { return m.g }

// ScribbleAbort writes something to the word that says which rank aborted this one.
func (g *Group) ScribbleAbort(by uint32) { atomic.StoreUint32(g.self.abort, by) }

// Exposes reports whether the group holds memory that others may read.
func (g *Group) Exposes() bool { return g.exposed != nil }

// Scribble writes something where this rank's calls are.
func (g *Group) Scribble(rng *rand.Rand) {
	for i := range g.self.calls {
		g.self.calls[i] = called{what: [2]uint64{rng.Uint64(), rng.Uint64()}, history: rng.Uint64()}
	}
	atomic.StoreUint64(g.self.last, entered|rng.Uint64N(200))
}

// Die makes the mesh of a rank do nothing more, as if its process had ended.
func (m *Mesh) Die() {
	m.closing.Do(func() { close(m.closed) })
	m.wg.Wait()
}
