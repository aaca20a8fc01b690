package direct

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// AllReduce combines n elements at src of all ranks, to dst.
func (c *Comm) AllReduce(s Launcher, dst, src driver.Ptr, n int, d tensor.DType, op backend.ReduceOp, form Form) error {
	f := c.forms(d)
	r, err := reduction(op, d, c.ranks)
	if err != nil {
		return err
	}
	if ok, err := c.begin("all_reduce", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes := n * d.Size()
	if form.Ring {
		return c.ringReduce(s, dst, src, bytes, r, d, form)
	}
	if c.ranks == 2 && c.Spreads(n, d, op, form) {
		return c.spreadSum(s, dst, src, bytes, r, f.spread, form)
	}
	if !twoShots(bytes, c.ranks, form) {
		return c.enqueue(s, step{
			dst: dst, src: src, part: bytes, srcBytes: bytes, dstBytes: bytes, r: r, f: f.all, blocks: form.Blocks,
		})
	}
	if c.ranks > 2 {
		return c.bothShots(s, dst, src, bytes, r, allRoles(c.ranks), f, form)
	}
	part := partOf(bytes, c.ranks)
	at := part * c.rank
	mine := min(part, bytes-at)
	err = c.enqueue(s, step{
		dst: dst + driver.Ptr(at), src: src, part: part, srcStep: part, srcBytes: bytes, dstBytes: mine, r: r, f: f.all,
		blocks: form.Blocks,
	})
	if err != nil {
		return err
	}
	return c.spread(s, dst, bytes, form)
}

// ReduceScatter combines the ranks' parts of n elements each: src has one for each rank, in
// order, and dst gets this rank's.
func (c *Comm) ReduceScatter(s Launcher, dst, src driver.Ptr, n int, d tensor.DType, op backend.ReduceOp, form Form) error {
	return c.ReduceScatterV(s, dst, src, n, n, n*c.ranks, d, op, form)
}

// AllGather brings n bytes at src of each rank to dst, in the order of the ranks. Src may be
// this rank's part of dst.
func (c *Comm) AllGather(s Launcher, dst, src driver.Ptr, n int, form Form) error {
	if form.Ring {
		var take [window.MostRingRanks]Span
		for r := range c.ranks {
			take[r] = Span{r * n, n}
		}
		return c.ringGather(s, dst, src, take[:c.ranks], form)
	}
	if ok, err := c.begin("all_gather", dst, src, n); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	all := n * c.ranks
	return c.enqueue(s, step{
		dst: dst, src: src, part: n, srcBytes: n, dstStep: n, dstBytes: all, r: none, f: c.gathers.all, kind: Gathers, blocks: form.Blocks,
	})
}

// New makes the collectives of a connected window. It loads kernels, which may wait for the
// device. Its memory is the window's, which has to stay until the Comm is closed.
func New(w *window.Window, o Options) (_ *Comm, err error) {
	rank, ranks := w.Rank()
	if a, b, shared := w.SharedDevice(); shared && !o.shareDevices {
		return nil, fmt.Errorf("direct: ranks %d and %d share a device: kernels that wait for each other need one each", a, b)
	}
	dev := w.Device().ID().Index
	if o.Blocks < 0 || o.Limit < 0 {
		return nil, fmt.Errorf("direct: Options.Blocks %d, Limit %v: none may be negative", o.Blocks, o.Limit)
	}
	if i := w.Device().Info(); i.Major < 8 {
		return nil, fmt.Errorf("direct: device %d has compute capability %d.%d, want 8.0 or later", dev, i.Major, i.Minor)
	}
	o.Blocks, o.Limit = cmp.Or(o.Blocks, 128), cmp.Or(o.Limit, 10*time.Minute)
	o.straight, o.rootReduces = cmp.Or(o.straight, StraightBytes), cmp.Or(o.rootReduces, rootReducesUpTo)
	channels, depth := w.Shape()
	c := &Comm{w: w, o: o, rank: rank, ranks: ranks, channels: channels, shape: ShapeOf}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.openRing(); err != nil {
		return nil, err
	}
	if w.NextOnly() {
		c.setLaunch()
		return c, nil
	}
	if err := c.loadAll(); err != nil {
		return nil, err
	}
	c.setUp(w.Own(), depth, w.Peer, func(r int) int { return r })
	return c, nil
}
