package ddp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// This file has the collectives of New and of the rebuilding of buckets. PyTorch's
// DistributedDataParallel (1.13 to 2.x) sends, in order:
//
//  1. all-gather of one int64, the number of trained parameters;
//  2. broadcast of int64s from rank 0: of each trained parameter the sizes,
//     then the strides;
//  3. with init_sync, broadcasts from rank 0 of all parameters (untrained ones
//     too, in definition order), then all buffers (PyTorch 2: unless
//     broadcast_buffers is off), in flat pieces of about 250 MiB;
//  4. before the second reducing forward pass: broadcast from rank 0 of int32s,
//     the trained parameters' numbers in the order of the new buckets and the
//     number of buckets; then of int32s, the buckets' lengths.
//
// Go ranks alone send digests instead of 2, so every rank can say what differs.

func (d *DDP) construct(ctx context.Context) error {
	if err := d.verify(ctx); err != nil {
		return err
	}
	if d.o.NoInitSync {
		return nil
	}
	err := d.syncModel(ctx, 0)
	var w *work.Error
	if d.o.PyTorch && errors.Is(err, work.ErrPeerDied) && errors.As(err, &w) {
		// PyTorch's ranks leave without a message.
		err = fmt.Errorf("%w; rank %d may have left because its parameters' shapes differ from rank 0's", err, w.Peer)
	}
	return err
}

// verify compares the ranks' models.
func (d *DDP) verify(ctx context.Context) error {
	err := d.verifyCounts(ctx)
	verify := d.verifyDigests
	if d.o.PyTorch {
		verify = d.verifyShapes
	} else if foreign := d.refuseForeign(); foreign != nil {
		return foreign // why err, if it is one: another rank has noticed it first
	}
	if err != nil {
		return err
	}
	if err := verify(ctx); err != nil {
		return err
	}
	var bufs []*tensor.Tensor
	for _, b := range d.o.Buffers {
		bufs = append(bufs, b.Value)
	}
	d.buffers = d.newBroadcaster(bufs)
	return nil
}

// syncModel gives every rank the parameters and buffers of one.
func (d *DDP) syncModel(ctx context.Context, root int) error {
	var all []*tensor.Tensor
	for _, p := range d.params {
		all = append(all, p.Value)
	}
	for _, b := range d.o.Buffers {
		all = append(all, b.Value)
	}
	if err := d.newBroadcaster(all).run(ctx, root, false); err != nil {
		return fmt.Errorf("ddp: parameters and buffers from rank %d: %w", root, err)
	}
	return nil
}

func (d *DDP) verifyCounts(ctx context.Context) error {
	counts, err := gather(ctx, d.g, []int64{int64(len(d.train))})
	if err != nil {
		return fmt.Errorf("ddp: numbers of parameters: %w", err)
	}
	for r, c := range counts {
		if c[0] != counts[0][0] {
			return &MismatchError{Rank: 0, Other: r, Index: -1,
				Want: fmt.Sprintf("%d trained parameters", counts[0][0]), Have: fmt.Sprint(c[0])}
		}
	}
	return nil
}

// gather returns every rank's values. All have one length.
func gather[T tensor.Element](ctx context.Context, g Group, mine []T) ([][]T, error) {
	in, err := tensor.Of(mine)
	if err != nil {
		return nil, err
	}
	all := make([][]T, g.Size())
	out := make([]*tensor.Tensor, len(all))
	for r := range all {
		all[r] = make([]T, len(mine))
		if out[r], err = tensor.Of(all[r], len(mine)); err != nil {
			return nil, err
		}
	}
	w, err := g.AllGather(ctx, out, in)
	if err != nil {
		return nil, err
	}
	return all, w.Wait(ctx)
}

// broadcast gives every rank rank 0's values.
func broadcast[T tensor.Element](ctx context.Context, g Group, values []T) error {
	t, err := tensor.Of(values)
	if err != nil {
		return err
	}
	w, err := g.Broadcast(ctx, t, 0)
	if err != nil {
		return err
	}
	return w.Wait(ctx)
}

// verifyShapes is PyTorch's check. Only the rank with a difference notices it. It ends the group,
// so that the other ranks do not wait for it.
func (d *DDP) verifyShapes(ctx context.Context) error {
	var dims []int64
	for _, p := range d.train {
		for _, n := range slices.Concat(p.Value.Shape(), p.Value.Strides()) {
			dims = append(dims, int64(n))
		}
	}
	theirs := slices.Clone(dims)
	switch err := broadcast(ctx, d.g, theirs); {
	case errors.Is(err, work.ErrMismatch):
		// The list has no header: its length is the only check.
		return fmt.Errorf("%w: their parameters have other numbers of dimensions: %w", ErrModelMismatch, err)
	case err != nil:
		return fmt.Errorf("ddp: parameters' shapes: %w", err)
	}
	at := 0
	for _, p := range d.train {
		n := p.Value.Dims()
		mine, root := dims[at:at+2*n], theirs[at:at+2*n]
		if !slices.Equal(mine, root) {
			err := &MismatchError{Rank: 0, Other: d.g.Rank(), Index: p.index,
				Want: fmt.Sprintf("sizes %v and strides %v", root[:n], root[n:]),
				Have: strings.TrimSpace(fmt.Sprintf("%s with sizes %v and strides %v", p.Name, mine[:n], mine[n:]))}
			if g, ok := d.g.(interface{ Abort(cause error) }); ok {
				g.Abort(err)
			}
			return err
		}
		at += 2 * n
	}
	return nil
}

// describe returns texts that must be equal on all ranks: each trained parameter, then the rest
// of the model, then the options.
func (d *DDP) describe() []string {
	var all []string
	for _, p := range d.train {
		s := describe(p.Value)
		if !p.Value.IsContiguous() {
			s += fmt.Sprintf(" with strides %v", p.Value.Strides())
		}
		if p.sparse() {
			s += fmt.Sprintf(" with a sparse gradient (%d sparse dimensions)", p.Grad.SparseDims())
		}
		all = append(all, s)
	}
	var rest []string
	for _, p := range d.params {
		if p.NoGrad {
			rest = append(rest, p.Name+" "+describe(p.Value))
		}
	}
	for _, b := range d.o.Buffers {
		rest = append(rest, "buffer "+b.Name+" "+describe(b.Value))
	}
	for _, t := range d.state {
		rest = append(rest, "state "+describe(t))
	}
	o := d.o
	return append(all, fmt.Sprintf("%d untrained tensors %v", len(rest), rest),
		fmt.Sprintf("options BucketCap %d, FirstBucket %d, NoInitSync %v, NoBroadcastBuffers %v, FindUnused %v, StaticGraph %v, Hook %v",
			o.BucketCap, o.FirstBucket, o.NoInitSync, o.NoBroadcastBuffers, o.FindUnused, o.StaticGraph, o.Hook != nil))
}

// verifyDigests compares models by a digest of each part. If one differs, the ranks exchange its
// text.
func (d *DDP) verifyDigests(ctx context.Context) error {
	parts := d.describe()
	digests := make([]int64, len(parts))
	for k, s := range parts {
		h := fnv.New64a()
		h.Write([]byte(s))
		digests[k] = int64(h.Sum64())
	}
	all, err := gather(ctx, d.g, digests)
	if err != nil {
		return fmt.Errorf("ddp: digests of the model: %w", err)
	}
	for k := range parts {
		for r := range all {
			if all[r][k] != all[0][k] {
				return d.explain(ctx, parts, k, r)
			}
		}
	}
	return nil
}

// explain makes the error of a part that differs on rank other. All ranks call it together.
func (d *DDP) explain(ctx context.Context, parts []string, part, other int) error {
	e := &MismatchError{Rank: 0, Other: other, Index: -1}
	text := parts[part]
	if part < len(d.train) {
		p := d.train[part]
		e.Index = p.index
		text = strings.TrimSpace(p.Name + " " + text)
	}
	// Long enough for a name and a shape; longer texts are cut.
	room := make([]byte, 512)
	binary.LittleEndian.PutUint16(room, uint16(copy(room[2:], text)))
	all, err := gather(ctx, d.g, room)
	if err != nil {
		return errors.Join(e, err)
	}
	said := func(r int) string {
		n := int(binary.LittleEndian.Uint16(all[r]))
		return strings.ToValidUTF8(string(all[r][2:2+min(n, len(room)-2)]), "?")
	}
	e.Want, e.Have = said(0), said(other)
	return e
}

// broadcastChunk is the most bytes of the model in one broadcast: c10d's 250 MiB.
const broadcastChunk = 250 << 20

// broadcaster sends a list of tensors in flat pieces, c10d's coalesced broadcast.
type broadcaster struct {
	d      *DDP
	chunks []chunk
}

type chunk struct {
	d       *DDP
	dev     Device // nil for CPU memory
	hold    bool   // received elements stay in flat until deliver
	members []*tensor.Tensor
	flat    *tensor.Tensor   // nil until it is needed
	parts   []*tensor.Tensor // of flat, one for each member; on a device
	work    *work.Work
}

func (d *DDP) newBroadcaster(ts []*tensor.Tensor) *broadcaster {
	items := make([]item, len(ts))
	for i, t := range ts {
		items[i] = item{number: i, bytes: t.ByteLen(), dtype: t.DType(), device: t.Device()}
	}
	b := &broadcaster{d: d}
	for _, numbers := range assign(items, []int{broadcastChunk}, true) {
		p := chunk{d: d, dev: d.deviceOf(ts[numbers[0]])}
		for _, n := range numbers {
			p.members = append(p.members, ts[n])
		}
		b.chunks = append(b.chunks, p)
	}
	return b
}

// run broadcasts from root, at most two pieces at a time, as c10d, to bound memory. With keep it
// keeps the flat tensors for the next run.
func (b *broadcaster) run(ctx context.Context, root int, keep bool) error {
	g := b.d.g
	const inFlight = 2
	for i := range len(b.chunks) + inFlight {
		if k := i - inFlight; k >= 0 && k < len(b.chunks) {
			if err := b.chunks[k].finish(ctx, g.Rank() != root); err != nil {
				return err
			}
			if !keep {
				if err := b.chunks[k].drop(); err != nil {
					return err
				}
			}
		}
		if i < len(b.chunks) {
			if err := b.chunks[i].start(ctx, g, root); err != nil {
				return err
			}
		}
	}
	return nil
}

// direct reports whether the chunk has one contiguous member, which can be sent without a copy.
func (p *chunk) direct() bool {
	return !p.hold && len(p.members) == 1 && p.members[0].IsContiguous()
}

// drop frees the flat tensor.
func (p *chunk) drop() error {
	flat := p.flat
	p.flat, p.parts = nil, nil
	if p.dev == nil || p.direct() {
		return nil
	}
	return p.d.free(flat)
}

func (p *chunk) start(ctx context.Context, g Group, root int) (err error) {
	if p.flat == nil {
		n := 0
		for _, t := range p.members {
			n += t.Len()
		}
		if p.direct() {
			p.flat, err = p.members[0].Reshape(n)
		} else {
			p.flat, err = p.d.flat(p.members[0], n)
		}
		if err != nil {
			return err
		}
	}
	if p.dev != nil {
		ctx = p.dev.Context(ctx)
	}
	if !p.direct() && g.Rank() == root {
		if p.dev != nil {
			err = p.eachOn(func(member, part *tensor.Tensor) error { return p.dev.Copy(part, member) })
		} else {
			err = p.each((*tensor.Tensor).Pack)
		}
		if err != nil {
			return err
		}
	}
	p.work, err = g.Broadcast(ctx, p.flat, root)
	return err
}

func (p *chunk) finish(ctx context.Context, unpack bool) error {
	var err error
	if p.dev != nil {
		err = p.d.after(p.dev, p.work, func(err error) error { return fmt.Errorf("ddp: broadcast of the model: %w", err) })
	} else {
		err = p.work.Wait(ctx)
	}
	if err != nil {
		return err
	}
	p.work = nil
	if p.direct() || p.hold || !unpack {
		return nil
	}
	return p.deliver()
}

// deliver copies from the flat tensor to the members.
func (p *chunk) deliver() error {
	if p.dev != nil {
		return p.eachOn(p.dev.Copy)
	}
	return p.each((*tensor.Tensor).Unpack)
}

// eachOn calls f for the members that have elements, with their parts of the
// flat tensor, on a device.
func (p *chunk) eachOn(f func(member, part *tensor.Tensor) error) error {
	if p.parts == nil {
		at := 0
		for _, t := range p.members {
			part, err := p.flat.Slice(0, at, at+t.Len())
			if err != nil {
				return err
			}
			p.parts = append(p.parts, part)
			at += t.Len()
		}
	}
	for k, t := range p.members {
		if t.Len() == 0 {
			continue
		}
		if err := f(t, p.parts[k]); err != nil {
			return err
		}
	}
	return nil
}

// each copies between the members and the flat tensor.
func (p *chunk) each(copy func(*tensor.Tensor, []byte) error) error {
	b := p.flat.Bytes()
	for _, t := range p.members {
		n := t.ByteLen()
		if err := copy(t, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// rebuild orders the buckets, once, as gradients became ready on rank 0 in the first reducing
// iteration.
func (d *DDP) rebuild(ctx context.Context) error {
	if d.rebuilt || len(d.order) == 0 {
		return nil
	}
	assignment := assign(d.items(d.order), []int{d.o.FirstBucket, d.o.BucketCap}, false)
	numbers := make([]int32, 0, len(d.train)+1)
	for _, b := range assignment {
		for _, n := range b {
			numbers = append(numbers, int32(n))
		}
	}
	if len(numbers) != len(d.train) {
		return fmt.Errorf("ddp: %d of %d gradients were ready in the first iteration", len(numbers), len(d.train))
	}
	numbers = append(numbers, int32(len(assignment)))
	if err := broadcast(ctx, d.g, numbers); err != nil {
		return fmt.Errorf("ddp: order of the rebuilt buckets: %w", err)
	}
	count := int(numbers[len(d.train)])
	if count < 1 || count > len(d.train) {
		return fmt.Errorf("ddp: rank 0 wants %d buckets for %d parameters", count, len(d.train))
	}
	lengths := make([]int32, count)
	for i := range min(count, len(assignment)) {
		lengths[i] = int32(len(assignment[i]))
	}
	if err := broadcast(ctx, d.g, lengths); err != nil {
		return fmt.Errorf("ddp: lengths of the rebuilt buckets: %w", err)
	}
	assignment, err := d.readAssignment(numbers[:len(d.train)], lengths)
	if err != nil {
		return err
	}
	d.rebuilt, d.order = true, nil
	return d.makeBuckets(ctx, assignment)
}

// readAssignment checks the assignment from rank 0.
func (d *DDP) readAssignment(numbers, lengths []int32) ([][]int, error) {
	seen := make([]bool, len(d.train))
	var out [][]int
	for _, n := range lengths {
		if n < 1 || int(n) > len(numbers) {
			return nil, fmt.Errorf("ddp: rank 0 wants buckets of %v parameters", lengths)
		}
		var b []int
		for _, k := range numbers[:n] {
			if k < 0 || int(k) >= len(seen) || seen[k] {
				return nil, fmt.Errorf("ddp: rank 0 puts parameter %d into a bucket, but it does not exist or is in another bucket already", k)
			}
			seen[k] = true
			p, first := d.train[k], d.train[numbers[0]]
			if p.Value.DType() != first.Value.DType() || p.Value.Device() != first.Value.Device() || p.sparse() && n > 1 {
				return nil, fmt.Errorf("ddp: rank 0 wants %s and %s in one bucket", paramName(first.index, first.Name), paramName(p.index, p.Name))
			}
			b = append(b, int(k))
		}
		out = append(out, b)
		numbers = numbers[n:]
	}
	if len(numbers) > 0 {
		return nil, fmt.Errorf("ddp: rank 0 leaves %d parameters without a bucket", len(numbers))
	}
	return out, nil
}
