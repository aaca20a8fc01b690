package cluster

import (
	"encoding/binary"
	"sync"

	"github.com/c10d-go/c10d/internal/plan"
)

// Cache keeps the plans of one rank. It may be used from many goroutines.
type Cache struct {
	l     *Layout
	mu    sync.Mutex
	plans map[key]*Plan
	parts int // in all plans
	last  key // of the plan that was asked for last
	same  *Plan
}

// key has everything that a plan of a rank depends on.
type key struct {
	op                 plan.Op
	single, apart      bool
	around             bool
	rank, root         int
	bytes, elem, chunk int64
	lengths            string // Counts, Send and Recv
}

func keyOf(x Call) key {
	return key{x.Op, x.Single, x.Apart, x.Around, x.Rank, x.Root, x.Bytes, max(x.Elem, 1), x.Chunk, lengths(x)}
}

// maxPlans and maxParts bound the cache. Past them it starts over.
const (
	maxPlans = 4096
	maxParts = 1 << 18
)

// NewCache returns an empty cache for plans of a layout.
func NewCache(l *Layout) *Cache { return &Cache{l: l} }

// Plan returns the plan of a call.
func (c *Cache) Plan(x Call) (*Plan, error) {
	k := keyOf(x)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.same != nil && k == c.last {
		return c.same, nil
	}
	if p := c.plans[k]; p != nil {
		c.last, c.same = k, p
		return p, nil
	}
	p, err := c.l.Plan(x)
	if err != nil {
		return nil, err
	}
	n := 1
	for i := range p.Steps {
		n += 1 + len(p.Steps[i].Parts)
	}
	if c.plans == nil || len(c.plans) >= maxPlans || c.parts+n > maxParts {
		c.plans, c.parts = map[key]*Plan{}, 0
	}
	c.plans[k], c.last, c.same = p, k, p
	c.parts += n
	return p, nil
}

func lengths(x Call) string {
	if x.Counts == nil && x.Send == nil {
		return ""
	}
	var b []byte
	add := func(list []int64) {
		b = binary.AppendUvarint(b, uint64(len(list)))
		for _, n := range list {
			b = binary.AppendUvarint(b, uint64(n))
		}
	}
	add(x.Counts)
	for _, list := range x.Send {
		add(list)
	}
	for _, list := range x.Recv {
		add(list)
	}
	return string(b)
}
