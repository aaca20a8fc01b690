package shm

import "sync/atomic"

// StartAt makes a group that has done nothing yet look as if it had done p pieces.
func (g *Group) StartAt(p uint32) {
	g.next, g.seen = p, p
	for i := range g.self.slots {
		atomic.StoreUint32(g.self.slots[i].in, p)
		atomic.StoreUint32(g.self.slots[i].reduced, p)
	}
}

// Spins reports whether ranks poll before they yield.
func (g *Group) Spins() bool { return g.spinFor > 0 }
