package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
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

// Whole and Stream are for package place.
func (m shadowMemory) Whole() driver.Memory { return m.Memory }

func (m shadowMemory) Stream() driver.Stream { return m.stream }

// someOnCPU reports whether some tensor is in CPU memory.
func someOnCPU(lists ...[]*tensor.Tensor) bool {
	return slices.ContainsFunc(lists, func(ts []*tensor.Tensor) bool { return slices.ContainsFunc(ts, inCPU) })
}

// inCPU reports whether a tensor is in CPU memory.
func inCPU(t *tensor.Tensor) bool { return t != nil && t.Device().Type == tensor.CPU }

// shadows reports whether the tensors of a call that are in CPU memory are copied to this rank's device first: it
// does the call there, or has device tensors too. A rank without a device takes part as it is.
func (b *Backend) shadows(onDevice bool, lists ...[]*tensor.Tensor) bool {
	if b.g.Missing != nil || !someOnCPU(lists...) {
		return false
	}
	return onDevice || slices.ContainsFunc(lists, func(ts []*tensor.Tensor) bool {
		return slices.ContainsFunc(ts, func(t *tensor.Tensor) bool { return !inCPU(t) })
	})
}

// shadow returns a list with device tensors in place of those in CPU memory. Their elements are on their way
// there.
func (s *shadowed) shadow(op work.OpType, ts []*tensor.Tensor) ([]*tensor.Tensor, error) {
	all := make([]*tensor.Tensor, len(ts))
	for i, t := range ts {
		all[i] = t
		if !inCPU(t) {
			continue
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

// mix runs a collective with shadows of the tensors in CPU memory: f gets the lists with them. Written are the tensors
// that get a result. The lists are dense, and belong to mix.
func (b *Backend) mix(ctx context.Context, op work.OpType, written, result []*tensor.Tensor, lists [][]*tensor.Tensor, f func(ctx context.Context, lists [][]*tensor.Tensor) (*work.Work, error)) (*work.Work, error) {
	s := &shadowed{b: b}
	written, result = slices.Clone(written), slices.Clone(result)
	if g := place.StreamsOf(ctx); g != nil && b.g.Missing == nil {
		st, err := b.copies()
		if err != nil {
			return nil, err
		}
		more := *g
		more.Before = append(slices.Clone(g.Before), st)
		ctx = context.WithValue(ctx, place.StreamsKey{}, &more)
	}
	var err error
	for i, ts := range lists {
		if err == nil {
			lists[i], err = s.shadow(op, ts)
		}
	}
	var w *work.Work
	if err == nil {
		w, err = f(ctx, lists)
	}
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
