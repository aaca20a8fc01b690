package ddp

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Bucket is a set of gradients that are reduced together, as a Hook sees it.
// A hook may use it from its call until the Work that it returns has ended.
type Bucket struct {
	d        *DDP
	index    int
	slots    []slot
	contents *tensor.Tensor // one dimension; nil for a sparse gradient
	pending  int            // gradients that are not ready
	work     *work.Work
	dev      Device // nil for CPU memory
	err      error  // of what a hook did, and could not be told

	one     [1]*tensor.Tensor // the buffer, as collectives take it
	undo    []undo
	scratch []*tensor.Tensor // for Cast, by depth
}

// slot is the place of a gradient in a bucket.
type slot struct {
	p    *param
	view *tensor.Tensor // like the parameter
	flat *tensor.Tensor // the same elements as they lie in memory
}

// undo is a step after the end of the Work.
type undo struct {
	f     func(*Bucket) error
	outer *tensor.Tensor // Cast: the buffer before it
}

// makeBuckets assigns places to the trained parameters.
func (d *DDP) makeBuckets(ctx context.Context, assignment [][]int) error {
	buckets := make([]*Bucket, len(assignment))
	before := 0
	if d.shared != nil {
		before = len(d.shared.buffers)
		d.shared.works = make([]*work.Work, len(assignment))
	}
	for i, numbers := range assignment {
		b := &Bucket{d: d, index: i, slots: make([]slot, len(numbers))}
		buckets[i] = b
		total := 0
		for k, n := range numbers {
			b.slots[k].p = d.train[n]
			total += d.train[n].Value.Len()
		}
		if d.train[numbers[0]].sparse() {
			continue
		}
		first := d.train[numbers[0]].Value
		var err error
		b.dev = d.deviceOf(first)
		if b.dev == nil && d.shared != nil {
			b.contents, err = d.shared.alloc(ctx, first.DType(), total)
		} else {
			b.contents, err = d.flat(first, total)
		}
		if err != nil {
			return err
		}
		at := 0
		for k := range b.slots {
			if err := b.place(&b.slots[k], at); err != nil {
				return err
			}
			at += b.slots[k].p.Value.Len()
		}
	}
	for _, b := range buckets {
		for k := range b.slots {
			p := b.slots[k].p
			if d.o.GradientAsBucketView && b.contents != nil && p.bucket != nil {
				if err := b.take(&b.slots[k], &p.bucket.slots[p.slot]); err != nil {
					return err
				}
			}
			p.bucket, p.slot = b, k
		}
	}
	old := d.buckets
	if err := scratchAs(old, buckets); err != nil {
		return err
	}
	d.buckets = buckets
	if d.shared != nil {
		if err := d.shared.replace(before); err != nil {
			return err
		}
	}
	for _, b := range old {
		for _, t := range append(b.scratch, b.contents) {
			if err := d.free(t); err != nil {
				return err
			}
		}
	}
	return nil
}

// scratchAs gives new buckets on devices what a hook has had old ones make for Cast. To make it later, beside
// collectives, could wait for them.
func scratchAs(old, buckets []*Bucket) error {
	made := make(map[tensor.DType][]*tensor.Tensor) // by the dtype of the bucket
	for _, b := range old {
		if b.dev != nil && len(b.scratch) > 0 {
			made[b.contents.DType()] = b.scratch
		}
	}
	for _, b := range buckets {
		if b.dev == nil {
			continue
		}
		for _, like := range made[b.contents.DType()] {
			if like == nil {
				break
			}
			t, err := zeros(b.dev, like.DType(), b.contents.Len())
			if err != nil {
				return err
			}
			b.scratch = append(b.scratch, t)
		}
	}
	return nil
}

// take copies a gradient from its place in another bucket.
func (b *Bucket) take(to, from *slot) error {
	if b.dev != nil {
		return b.copyOn(to.flat, from.flat)
	}
	return to.view.CopyFrom(from.view)
}

// place gives a gradient the part of the bucket that starts at an element. As in c10d it has the
// parameter's strides if these leave no gaps, and row-major order otherwise. Ranks add memory
// element by element, so all must use the same order.
func (b *Bucket) place(s *slot, at int) (err error) {
	v := s.p.Value
	if s.flat, err = b.contents.Slice(0, at, at+v.Len()); err != nil {
		return err
	}
	if !dense(v) {
		s.view, err = s.flat.Reshape(v.Shape()...)
		return err
	}
	s.view, err = b.contents.AsStrided(v.Shape(), v.Strides(), at)
	return err
}

// dense reports whether the elements, none of which overlap, lie without gaps.
func dense(t *tensor.Tensor) bool {
	reach := 1
	for i, s := range t.Strides() {
		if s < 0 {
			return false
		}
		reach += (t.Dim(i) - 1) * s
	}
	return reach == t.Len()
}

// fill copies a gradient into its place, divided unless a hook does that.
func (b *Bucket) fill(p *param, divisor int) error {
	switch {
	case b.contents == nil:
		return b.fillSparse(p, divisor)
	case b.dev != nil:
		return b.fillOn(p)
	}
	s := &b.slots[p.slot]
	hooked := b.d.o.Hook != nil
	switch {
	case !p.touched:
		clear(s.flat.Bytes())
	case b.d.o.GradientAsBucketView:
		if !hooked {
			divide(s.flat, s.flat, divisor)
		}
	case hooked:
		return s.view.CopyFrom(p.grad)
	case s.view.IsContiguous() && p.grad.IsContiguous():
		scale(s.flat, p.grad, divisor)
	default:
		if err := s.view.CopyFrom(p.grad); err != nil {
			return err
		}
		scale(s.flat, s.flat, divisor)
	}
	return nil
}

// fillSparse makes the bucket's tensor: the gradient's entries, or none.
func (b *Bucket) fillSparse(p *param, divisor int) error {
	grad := p.grad
	indices, values := grad.Indices(), grad.Values()
	if !p.touched {
		shape := values.Shape()
		shape[0] = 0
		var err error
		if indices, err = tensor.New(tensor.Int64, grad.SparseDims(), 0); err != nil {
			return err
		}
		if values, err = tensor.New(grad.DType(), shape...); err != nil {
			return err
		}
	} else {
		var err error
		if values, err = values.Clone(); err != nil {
			return err
		}
		if b.d.o.Hook == nil {
			divide(values, values, divisor)
		}
	}
	t, err := tensor.Sparse(indices, values, grad.Shape()...)
	b.one[0] = t
	return err
}

// launch starts the reduction of a bucket whose gradients are all ready.
func (b *Bucket) launch(ctx context.Context) (err error) {
	if b.contents != nil {
		b.one[0] = b.contents
	}
	b.undo, b.err = b.undo[:0], nil
	op := pg.Sum()
	if b.dev != nil {
		ctx = b.context(ctx)
		op = b.d.average()
	}
	if hook := b.d.o.Hook; hook != nil {
		if b.work, err = hook(ctx, b); err == nil {
			err = b.err
		}
	} else {
		b.work, err = b.AllReduce(ctx, op)
		if s := b.d.shared; s != nil {
			s.works[b.index] = b.work
		}
	}
	if err != nil {
		return b.wrap(err)
	}
	return nil
}

// wait waits for the reduction and runs the steps that hooks have added.
func (b *Bucket) wait(ctx context.Context) error {
	if b.work != nil {
		var err error
		if b.dev != nil {
			err = b.d.after(b.dev, b.work, b.wrap)
		} else {
			err = b.work.Wait(ctx)
		}
		if err != nil {
			return err
		}
		b.work = nil
	}
	for k := len(b.undo) - 1; k >= 0; k-- {
		u := b.undo[k]
		if u.f != nil {
			if err := u.f(b); err != nil {
				return err
			}
			continue
		}
		if err := b.convert(u.outer, b.one[0]); err != nil {
			return err
		}
		b.one[0] = u.outer
	}
	b.undo = b.undo[:0]
	result := b.one[0]
	if b.contents == nil || result == b.contents {
		return nil
	}
	if result.DType() != b.contents.DType() || result.Len() != b.contents.Len() {
		return fmt.Errorf("ddp: the hook's result is %v, expected %v", result, b.contents)
	}
	if b.dev != nil {
		return b.copyOn(b.contents, result)
	}
	return result.Pack(b.contents.Bytes())
}

// write copies the reduced gradients to the trainer's tensors.
func (b *Bucket) write() error {
	for k := range b.slots {
		s := &b.slots[k]
		p := s.p
		switch {
		case p.unused && (b.contents == nil || !b.d.o.GradientAsBucketView):
		case b.contents == nil:
			if err := p.grad.SetSparse(b.one[0].Indices(), b.one[0].Values(), b.one[0].IsCoalesced()); err != nil {
				return p.wrap(err)
			}
		case b.d.o.GradientAsBucketView:
		case p.grad == nil:
			return p.errorf("was used on another rank only, and there is no Grad for the result")
		case b.dev != nil:
			if err := b.copyOn(p.grad, s.flat); err != nil {
				return p.wrap(err)
			}
		default:
			if err := p.grad.CopyFrom(s.view); err != nil {
				return p.wrap(err)
			}
		}
	}
	if b.contents == nil {
		b.one[0] = nil
	}
	return nil
}

func (b *Bucket) wrap(err error) error {
	e := &BucketError{Bucket: b.index, Indices: b.Params(), Err: err}
	for _, s := range b.slots {
		e.Names = append(e.Names, s.p.Name)
	}
	return e
}

// Index returns the bucket's place in the order in which buckets are reduced.
func (b *Bucket) Index() int { return b.index }

// IsLast reports whether the bucket is the last to be reduced.
func (b *Bucket) IsLast() bool { return b.index == len(b.d.buckets)-1 }

// IsSparse reports whether the bucket is a single sparse gradient.
func (b *Bucket) IsSparse() bool { return b.contents == nil }

// Group returns the group that the gradients are averaged over.
func (b *Bucket) Group() Group { return b.d.g }

// Params returns the indices of the parameters, in the order in which their
// gradients lie in the bucket.
func (b *Bucket) Params() []int {
	out := make([]int, len(b.slots))
	for k, s := range b.slots {
		out[k] = s.p.index
	}
	return out
}

// Values returns the parameters themselves.
func (b *Bucket) Values() []*tensor.Tensor {
	out := make([]*tensor.Tensor, len(b.slots))
	for k, s := range b.slots {
		out[k] = s.p.Value
	}
	return out
}

// Gradients returns the gradients as views of the hook's buffer, each in its parameter's shape;
// nil for a sparse bucket.
func (b *Bucket) Gradients() []*tensor.Tensor {
	if b.contents == nil {
		return nil
	}
	out := make([]*tensor.Tensor, len(b.slots))
	for k, s := range b.slots {
		out[k] = s.view
	}
	return out
}

// Buffer returns the flat tensor of all gradients, or the sparse gradient. It must have the
// result when the Work has ended.
func (b *Bucket) Buffer() *tensor.Tensor { return b.one[0] }

// SetBuffer replaces the buffer by another tensor of its length. After the hooks it must also
// have the buffer's dtype.
func (b *Bucket) SetBuffer(t *tensor.Tensor) { b.one[0] = t }

// After adds a step that runs after the Work has ended. Steps, also Cast's, run in Finish, the
// last added first.
func (b *Bucket) After(f func(*Bucket) error) { b.undo = append(b.undo, undo{f: f}) }

// Cast replaces the buffer by a copy in another dtype and, once the Work has ended, casts the
// result back. A buffer that is sparse, complex or not wider than dtype stays. On a device both are
// commands of the stream; see Device.
func (b *Bucket) Cast(dtype tensor.DType) error {
	outer := b.one[0]
	if !dtype.IsFloat() {
		return fmt.Errorf("ddp: cannot cast gradients to %v", dtype)
	}
	if b.contents == nil || !outer.DType().IsFloat() || outer.DType().Size() <= dtype.Size() {
		return nil
	}
	depth := len(b.undo)
	for len(b.scratch) <= depth {
		b.scratch = append(b.scratch, nil)
	}
	inner := b.scratch[depth]
	if inner == nil || inner.DType() != dtype || inner.Len() != outer.Len() {
		b.scratch[depth] = nil
		if b.dev != nil {
			if err := b.d.free(inner); err != nil {
				return err
			}
		}
		var err error
		if inner, err = zeros(b.dev, dtype, outer.Len()); err != nil {
			return err
		}
		b.scratch[depth] = inner
	}
	if err := b.convert(inner, outer); err != nil {
		return err
	}
	b.one[0] = inner
	b.undo = append(b.undo, undo{outer: outer})
	return nil
}

// convert sets dst = src, rounded to the dtype of dst.
func (b *Bucket) convert(dst, src *tensor.Tensor) error {
	switch {
	case dst.Len() == 0: // such a bucket is not on its device
		return nil
	case b.dev == nil:
		convert(dst, src)
		return nil
	}
	c, ok := b.dev.(caster)
	if !ok {
		return errCastOnDevice
	}
	return c.Cast(dst, src)
}

// Divide divides the buffer by the group's size, in place. It cannot divide a buffer on a device:
// the bucket then fails.
func (b *Bucket) Divide() {
	t := b.one[0]
	if b.dev != nil {
		b.err = errDivideOnDevice
		return
	}
	if b.contents == nil {
		t = t.Values()
	}
	divide(t, t, b.d.g.Size())
}

// AllReduce starts an all-reduce of the buffer in the group.
func (b *Bucket) AllReduce(ctx context.Context, op pg.ReduceOp, o ...pg.CallOptions) (*work.Work, error) {
	return b.d.g.AllReduce(ctx, b.one[0], op, o...)
}
