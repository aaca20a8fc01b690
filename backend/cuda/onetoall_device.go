package cuda

import (
	"context"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// chainHops calls f for the steps of a rank in a broadcast of n bytes round a ring
// of size ranks. The rank comes behind so many others, the root behind none. What
// has come from the left is kept and passed on at once, so the first rank after
// the root has its second piece while the next one has its first.
//
// A rank's step needs earlier ones of its left neighbour only, and slots of its
// right one that this has taken: nobody waits in a circle.
func chainHops(behind, size, n, grain int, f func(hop)) {
	for lo := 0; lo < n; {
		hi := n
		if n-lo > grain {
			hi = lo + grain
		}
		f(hop{lo: lo, hi: hi, take: behind > 0, keep: behind > 0, pass: behind < size-1})
		lo = hi
	}
}

// broadcastOnDevices makes q the broadcast of the first tensor of rank root on the
// ring, which ready has found to be there.
func (b *Backend) broadcastOnDevices(q *operation, root int) {
	w := &deviceWork{op: q, ring: b.neighbours.made()}
	l := &q.legs[0]
	if l.src != nil {
		w.places = append(w.places, l.src)
	}
	w.places = append(w.places, l.dst...)
	behind := around(b.rank-root, b.size)
	w.spread = func() { w.broadcast(behind) }
	q.device = w
	q.call = func(q *operation, _ []*tensor.Tensor) error { return w.Run(q.ctx) }
}

// broadcast adds this rank's part of a broadcast: from the left to the first tensor and
// on to the right, piece by piece, and from the first to the others.
func (w *deviceWork) broadcast(behind int) {
	r, first := w.ring, w.places[0]
	n := first.t.ByteLen()
	if n == 0 {
		return
	}
	w.begins = w.places[:1]
	x := w.bring(0)
	w.begins = nil
	chainHops(behind, r.b.size, n, r.chunk, func(h hop) { w.hop(h, x, 1, nil, 1) })
	r.count()
	w.begins = w.places[1:]
	if len(w.op.parts) > 0 && w.err == nil {
		w.op.prologue(w.batch, w.begins...)
	}
	if behind > 0 {
		w.putBack(0, x)
	}
	var flat []*place
	for i, p := range w.places {
		switch {
		case p.flat:
			flat = append(flat, p)
		case i > 0:
			at := w.bring(i)
			w.Copy(r.stream, at, x, n)
			w.putBack(i, at)
		}
	}
	if !first.flat && len(flat) > 0 {
		w.Copy(r.stream, flat[0].at(0), x, n)
	}
	if len(flat) > 1 {
		spread(w, flat, 0, n)
	}
}

// deviceWay returns nil if broadcasts can stay on the devices. The first one makes
// the ring, if no all-reduce has.
func (b *Backend) deviceWay(ctx context.Context, q *operation, ts []*tensor.Tensor) error {
	n := b.neighbours
	if n.why != nil {
		return n.why
	}
	h := &host{b: b, ctx: ctx, op: q}
	h.call.Tensors, h.call.Collectives = ts, h
	return n.ready(h, work.Broadcast)
}

// hasRing returns why broadcasts do not stay on the devices, nil if they do. It asks
// nobody.
func (b *Backend) hasRing() error {
	t, err := tensor.OnDevice(tensor.Float32, nowhere{}, 1)
	if err != nil {
		return err
	}
	return b.deviceWay(context.Background(), &operation{b: b}, []*tensor.Tensor{t})
}
