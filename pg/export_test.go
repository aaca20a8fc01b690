package pg

import "github.com/c10d-go/c10d/trace"

// Record makes g record its calls in t, and nowhere if t is nil. It returns where they were recorded. The
// goroutine that calls the group calls it.
func Record(g *ProcessGroup, t *trace.Group) (before *trace.Group) {
	e := g.now()
	before, e.traced = e.traced, t
	return before
}

// Open returns how many groups of g's job this rank has open.
func Open(g *ProcessGroup) int {
	w := g.now().world
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.groups)
}

// BesidePyTorch makes g send what PyTorch ranks understand. Every rank calls it.
func BesidePyTorch(g *ProcessGroup) { g.now().world.ours, g.now().world.apart = false, false }

// Torch1 is the store of ranks of PyTorch up to 2.0.
type Torch1 = torch1Store

// MaxObject is maxObject.
const MaxObject = maxObject
