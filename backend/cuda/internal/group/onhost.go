package group

import (
	"context"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onHost reports whether the tensors of the operation are in CPU memory. It then has no commands, and its pieces are
// those of the other ranks.
func (o *Operation) onHost() bool { return len(o.Legs) > 0 && o.Legs[0].onHost() }

// awaitHost waits for what writes the operation's tensors in CPU memory. No lock is held.
func (b *Engine) awaitHost(ctx context.Context, op work.OpType, o *Operation) error {
	if b.OnHost == nil || !o.onHost() || ctx.Err() != nil {
		return nil // or the call is refused
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		uses := l.hostDst
		if l.hostSrc != nil {
			uses = append(uses[:len(uses):len(uses)], l.hostSrc)
		}
		if err := b.OnHost.Await(ctx, uses); err != nil {
			if _, _, refused := b.Admit(ctx, op, 0); refused != nil {
				err = refused
			}
			return err
		}
	}
	return nil
}

// writesHost notes what a collective that has been issued writes there.
func (b *Engine) writesHost(o *Operation) {
	if b.OnHost == nil || !o.onHost() {
		return
	}
	for i := range o.Legs {
		if l := &o.Legs[i]; len(l.hostDst) > 0 {
			b.OnHost.Writes(o.Work(), l.hostDst)
		}
	}
}

// runOnHost does the host's part of all pieces. Tensors whose elements are not in order are copied.
func (o *Operation) runOnHost() error {
	all := make([][]byte, len(o.Legs))
	for i := range o.Legs {
		l := &o.Legs[i]
		t := l.hostSrc
		if t == nil {
			t = l.hostDst[0]
		}
		if t.IsContiguous() {
			all[i] = t.Bytes()
			continue
		}
		all[i] = make([]byte, t.ByteLen())
		if l.hostSrc != nil {
			if err := t.Pack(all[i]); err != nil {
				return err
			}
		}
	}
	shadows := make([]*tensor.Tensor, len(o.Legs))
	for k := range o.pieces {
		for i := range o.Legs {
			l := &o.Legs[i]
			lo, hi := o.elements(l, k)
			t, err := tensor.FromBytes(l.DType, all[i][lo*l.size():hi*l.size()], hi-lo)
			if err != nil {
				return err
			}
			shadows[i] = t
		}
		if err := o.Call(o, shadows); err != nil {
			return err
		}
	}
	for i := range o.Legs {
		for k, t := range o.Legs[i].hostDst {
			if k == 0 && o.Legs[i].hostSrc == nil && t.IsContiguous() || t == o.Legs[i].hostSrc && t.IsContiguous() {
				continue // it was written itself
			}
			if err := t.Unpack(all[i]); err != nil {
				return err
			}
		}
	}
	return nil
}
