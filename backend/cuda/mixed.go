package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// A rank may pass tensors in CPU memory to a collective in which others pass device tensors. They are
// copied to the rank's device first, and back at the end, so the other ranks need not know. A rank
// without a device takes part through the clusters, see package clusterway.

// mixed is what a backend has for tensors in CPU memory.
type mixed struct {
	mu     sync.Mutex
	stream driver.Stream // of the copies
	stuck  []*shadowed   // of failed operations: devices may still use their memory
}

// shadowed are the tensors in CPU memory of one call, and their shadows on the device.
type shadowed struct {
	b       *Backend
	tensors []*tensor.Tensor
	pinned  []driver.HostMemory
	memory  []driver.Memory
	shadows []*tensor.Tensor
}

// shadowMemory is the first bytes of memory, with the stream that uses it.
type shadowMemory struct {
	driver.Memory
	n      int
	stream driver.Stream
}

func (m shadowMemory) Len() int { return m.n }

// Stream is for package place.
func (m shadowMemory) Stream() driver.Stream { return m.stream }

// someOnCPU reports whether some tensor is in CPU memory.
func someOnCPU(lists ...[]*tensor.Tensor) bool {
	for _, ts := range lists {
		for _, t := range ts {
			if t != nil && t.Device().Type == tensor.CPU {
				return true
			}
		}
	}
	return false
}

// alike checks a list with tensors in CPU memory: all are dense and of one dtype and shape. The first of them are
// outputs.
func (b *Backend) alike(op work.OpType, outputs int, ts []*tensor.Tensor) error {
	for i, t := range ts {
		switch {
		case t == nil:
			return bad(op, "tensor %d is nil", i)
		case t.DType() != ts[0].DType():
			return bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, ts[0].DType(), t.DType())
		case !t.SameShape(ts[0]):
			return bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		case t.Device().Type == tensor.CPU && i < outputs && t.HasOverlap():
			return bad(op, "elements of tensor %d (%v with strides %v) overlap in memory", i, t, t.Strides())
		case t.Device().Type != tensor.CPU:
			if err := b.dense(op, fmt.Sprint("tensor ", i), output, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// takes returns how a collective with tensors in CPU memory goes. With a nil Work and no error the caller goes on
// with shadows of them.
func (b *Backend) takes(ctx context.Context, op work.OpType, timeout time.Duration, c *clusterway.Call, alone func(q *group.Operation) (*work.Work, error), result ...*tensor.Tensor) (*work.Work, error) {
	for _, t := range slices.Concat(c.Out, c.In) {
		if t.Layout() != tensor.Strided {
			return nil, bad(op, "only supports dense tensors, a tensor in CPU memory is %v", t)
		}
	}
	registered := ""
	if op == work.AllReduce && b.clusters != nil {
		registered = (&allReduce{b: b, ctx: ctx, ts: c.Out, op: c.Reduce, print: c.Print}).beforeClusters()
	}
	switch {
	case registered == "" && b.isBetween(ctx, op, c) && b.clusters.Why() != nil:
		return b.clusters.Issue(ctx, op, timeout, c, result...)
	case b.g.Missing == nil:
		return nil, nil
	case registered != "":
		return nil, bad(op, "tensors are in CPU memory, this rank has no device, and the registered work %q comes before %q: ask for %[2]q by Options.AllReduce", registered, ClustersWork)
	case errors.Is(b.flat, errOneCluster): // no rank has a device
		return b.g.Issue(ctx, op, timeout, &group.Operation{Print: c.Print, Call: func(q *group.Operation, _ []*tensor.Tensor) error { return q.Wait(alone(q)) }}, result...)
	}
	if _, _, err := b.g.Admit(ctx, op, 0); err != nil {
		return nil, err // why the collective does not go through the clusters
	}
	return nil, bad(op, "tensors are in CPU memory, and this rank has no device to which they could be copied: %v", cmp.Or(b.flat, b.g.Missing))
}

// shadow returns a list with device tensors in place of those in CPU memory. Their elements are on their way
// there.
func (s *shadowed) shadow(op work.OpType, ts []*tensor.Tensor) ([]*tensor.Tensor, error) {
	all := make([]*tensor.Tensor, len(ts))
	for i, t := range ts {
		all[i] = t
		if t == nil || t.Device().Type != tensor.CPU {
			continue
		}
		if t.Layout() != tensor.Strided {
			return nil, bad(op, "tensor %d (%v) is in CPU memory and not dense", i, t)
		}
		u, err := s.copyOf(t)
		if err != nil {
			return nil, fmt.Errorf("cuda: %v: memory on a device for tensor %d, which is in CPU memory: %w", op, i, err)
		}
		all[i] = u
	}
	return all, nil
}

// copyOf starts to copy a tensor to the device.
func (s *shadowed) copyOf(t *tensor.Tensor) (*tensor.Tensor, error) {
	g := s.b.g
	if g.Missing != nil {
		return nil, g.Missing
	}
	st, err := s.b.copies()
	if err != nil {
		return nil, err
	}
	n := t.ByteLen()
	h, err := g.Pinned.Get(pool.OnHost, n)
	if err != nil {
		return nil, err
	}
	s.pinned = append(s.pinned, h)
	m, err := g.Scratch.Get(st.Device().Index, n)
	if err != nil {
		return nil, err
	}
	s.memory = append(s.memory, m)
	driver.HostAccess(g.Driver, "packing a tensor in CPU memory", driver.Writes(h.Ptr(), n))
	if err := t.Pack(h.Bytes()[:n]); err != nil {
		return nil, err
	}
	if n > 0 {
		if err := st.Copy(m.Ptr(), h.Ptr(), n); err != nil {
			return nil, err
		}
	}
	u, err := tensor.OnDevice(t.DType(), shadowMemory{m, n, st}, t.Shape()...)
	if err == nil {
		s.tensors, s.shadows = append(s.tensors, t), append(s.shadows, u)
	}
	return u, err
}

// copies returns the stream of the copies.
func (b *Backend) copies() (driver.Stream, error) {
	b.mixed.mu.Lock()
	defer b.mixed.mu.Unlock()
	if b.mixed.stream != nil {
		return b.mixed.stream, nil
	}
	dev := b.g.Rank % max(b.g.Driver.Count(), 1)
	if b.direct.Open.Load() != nil {
		dev = b.direct.Dev
	}
	v, err := b.g.Driver.Device(dev)
	if err != nil {
		return nil, err
	}
	b.mixed.stream, err = v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d mixed", b.g.Rank)})
	return b.mixed.stream, err
}

// mix runs a collective with shadows of the tensors in CPU memory. Written are those that get a result.
func (b *Backend) mix(ctx context.Context, written []*tensor.Tensor, f func(ctx context.Context, s *shadowed) (*work.Work, error)) (*work.Work, error) {
	s := &shadowed{b: b}
	if g := place.StreamsOf(ctx); g != nil && b.g.Missing == nil {
		st, err := b.copies()
		if err != nil {
			return nil, err
		}
		ctx = context.WithValue(ctx, place.StreamsKey{}, &place.CallStreams{Before: append(slices.Clone(g.Before), st), In: g.In})
	}
	w, err := f(ctx, s)
	if err != nil {
		drained := s.drained()
		if drained == nil {
			s.release()
		}
		return nil, errors.Join(err, drained)
	}
	p := &mixedWork{inner: w}
	p.Init(w.Info())
	p.RunBy(p)
	p.Start()
	go func() {
		err := w.Wait(context.Background())
		if err == nil {
			err = s.back(written)
		}
		if err != nil {
			b.mixed.mu.Lock()
			b.mixed.stuck = append(b.mixed.stuck, s)
			b.mixed.mu.Unlock()
		} else {
			s.release()
		}
		result, _ := w.Result()
		for i, t := range result {
			if k := slices.Index(s.shadows, t); k >= 0 {
				result[i] = s.tensors[k]
			}
		}
		p.SetResult(result...)
		p.Complete(err)
	}()
	return p.Work(), nil
}

// mixedWork is a collective with shadows.
type mixedWork struct {
	work.Promise
	inner *work.Work
}

// Abort ends the group because of this operation.
func (m *mixedWork) Abort(cause error) { m.inner.Abort(cause) }

// Order waits for the operation: some of its outcome is in CPU memory.
func (m *mixedWork) Order(work.Stream) error { return m.Work().Wait(context.Background()) }

// back copies the results to the tensors in CPU memory.
func (s *shadowed) back(written []*tensor.Tensor) error {
	st, err := s.b.copies()
	if err != nil {
		return err
	}
	for i, t := range s.tensors {
		if n := t.ByteLen(); n > 0 && slices.Contains(written, t) {
			if err := st.Copy(s.pinned[i].Ptr(), s.memory[i].Ptr(), n); err != nil {
				return err
			}
		}
	}
	if err := s.drained(); err != nil {
		return err
	}
	for i, t := range s.tensors {
		if n := t.ByteLen(); n > 0 && slices.Contains(written, t) {
			driver.HostAccess(s.b.g.Driver, "unpacking a tensor in CPU memory", driver.Reads(s.pinned[i].Ptr(), n))
			if err := t.Unpack(s.pinned[i].Bytes()[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// drained waits for the copies.
func (s *shadowed) drained() error {
	if len(s.memory) == 0 {
		return nil
	}
	st, err := s.b.copies()
	if err != nil {
		return err
	}
	e, err := st.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(context.Background())
}

// release gives the memory back.
func (s *shadowed) release() {
	for _, h := range s.pinned {
		s.b.g.Pinned.Put(pool.OnHost, h)
	}
	for _, m := range s.memory {
		s.b.g.Scratch.Put(m.Device().Index, m)
	}
	s.pinned, s.memory = nil, nil
}

// close frees what calls with tensors in CPU memory have left. The group has been closed, and no device works
// for it.
func (m *mixed) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, s := range m.stuck {
		for _, h := range s.pinned {
			errs = append(errs, h.Close())
		}
		for _, d := range s.memory {
			errs = append(errs, d.Close())
		}
	}
	if m.stream != nil {
		errs = append(errs, m.stream.Close())
	}
	m.stuck, m.stream = nil, nil
	return errors.Join(errs...)
}

// The collectives that take tensors in CPU memory.

func (b *Backend) mixedAllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions, print board.Call) (*work.Work, error) {
	const op = work.AllReduce
	if err := b.reduction(op, o.Op, ts[0].DType()); err != nil {
		return nil, err
	}
	w, err := b.takes(ctx, op, o.Timeout, &clusterway.Call{Op: plan.OpAllReduce, Reduce: o.Op, Out: ts, Print: print}, func(q *group.Operation) (*work.Work, error) {
		return b.g.CPU.AllReduce(q.Ctx, ts, backend.AllReduceOptions{Op: o.Op, Timeout: q.Left()})
	}, ts...)
	if w != nil || err != nil {
		return w, err
	}
	return b.mix(ctx, ts, func(ctx context.Context, s *shadowed) (*work.Work, error) {
		us, err := s.shadow(op, ts)
		if err != nil {
			return nil, err
		}
		return b.AllReduce(ctx, us, o)
	})
}

func (b *Backend) mixedBroadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions, print board.Call) (*work.Work, error) {
	const op = work.Broadcast
	w, err := b.takes(ctx, op, o.Timeout, broadcastCall(ts, o, print), func(q *group.Operation) (*work.Work, error) {
		return b.g.CPU.Broadcast(q.Ctx, ts, backend.BroadcastOptions{Root: o.Root, RootTensor: o.RootTensor, Timeout: q.Left()})
	}, ts...)
	if w != nil || err != nil {
		return w, err
	}
	return b.mix(ctx, ts, func(ctx context.Context, s *shadowed) (*work.Work, error) {
		us, err := s.shadow(op, ts)
		if err != nil {
			return nil, err
		}
		return b.Broadcast(ctx, us, o)
	})
}

// mixedAllGather gathers in to out, by f.
func (b *Backend) mixedAllGather(ctx context.Context, op work.OpType, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	print := board.Call{DType: in.DType(), N: total(out), Root: -1}
	c := &clusterway.Call{Op: plan.OpAllGather, Out: out, In: []*tensor.Tensor{in}, Print: print}
	w, err := b.takes(ctx, op, o.Timeout, c, func(q *group.Operation) (*work.Work, error) {
		return b.g.CPU.AllGather(q.Ctx, out, in, backend.AllGatherOptions{Timeout: q.Left()})
	}, out...)
	if w != nil || err != nil {
		return w, err
	}
	return b.mix(ctx, out, func(ctx context.Context, s *shadowed) (*work.Work, error) {
		us, err := s.shadow(op, append(slices.Clone(out), in))
		if err != nil {
			return nil, err
		}
		return b.AllGather(ctx, us[:len(out)], us[len(out)], o)
	})
}
