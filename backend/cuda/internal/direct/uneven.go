package direct

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// AllGatherV brings src of each rank, of take[r].N bytes, to the spans take of dst. All ranks give the same
// lengths. Src may be this rank's span of dst.
func (c *Comm) AllGatherV(s Launcher, dst, src driver.Ptr, take []Span, form Form) error {
	if form.Ring {
		return c.ringGather(s, dst, src, take, form)
	}
	m := movement{what: "all_gather", dst: dst, src: src, blocks: form.Blocks, into: form.Into}
	if len(take) != c.ranks {
		return fmt.Errorf("direct: all_gather to %d spans, want one for each of %d ranks", len(take), c.ranks)
	}
	copy(m.take[:], take)
	own := take[c.rank]
	for r, x := range take {
		m.most = max(m.most, x.N)
		m.send[r].N = own.N
	}
	if dst+driver.Ptr(own.Off) == src {
		m.take[c.rank].N, m.send[c.rank].N = 0, 0
	}
	return c.some(s, &m, m.most)
}

// ReduceScatterV is ReduceScatter for parts of unequal sizes: of at most part elements, this rank's of
// mine. Part r begins at element r*part of src, which ends after all elements. What comes after the end is
// taken as zeros, and elements beyond a part may be anything. Dst may be this rank's part of src.
func (c *Comm) ReduceScatterV(s Launcher, dst, src driver.Ptr, part, mine, all int, d tensor.DType, op backend.ReduceOp, form Form) error {
	f := c.forms(d)
	r, err := reduction(op, d, c.ranks)
	if err != nil {
		return err
	}
	if mine < 0 || mine > part || all < 0 || all > part*c.ranks {
		return fmt.Errorf("direct: reduce_scatter of %d elements into %d of at most %d", all, mine, part)
	}
	if ok, err := c.begin("reduce_scatter", dst, src, part); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	es := d.Size()
	x := step{
		dst: dst, src: src, part: part * es, srcStep: part * es, srcBytes: all * es, dstBytes: mine * es,
		r: r, f: f.all, blocks: form.Blocks,
	}
	if form.Ring {
		return c.ringScatter(s, x, d)
	}
	return c.enqueue(s, x)
}
