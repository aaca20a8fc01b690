package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// A rank may pass tensors in CPU memory to a collective in which others pass device tensors. They are
// copied to the rank's device first, and back at the end, so the other ranks need not know. A rank
// without a device takes part through the clusters, see package clusterway.

// mixed is what a backend has for tensors in CPU memory.
type mixed struct {
	calls sync.WaitGroup // those that have not given back what they have

	mu     sync.Mutex
	closed bool
	left   bool          // some call had not ended by then
	stream driver.Stream // of the copies
	open   []*shadowed   // that have not ended
	stuck  []*shadowed   // of failed operations: devices may still use their memory
}

// shadowed are the tensors in CPU memory of one call, and their shadows on the device.
type shadowed struct {
	b       *Backend
	work    *work.Work
	results [][2]uint64 // addresses that are written
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

// shadows reports whether the CPU tensors of a call are copied to this rank's device first. They are if the rank
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
	if b.mixed.closed {
		return nil, work.ErrClosed // nobody would close the stream
	}
	dev := b.g.OwnDevice()
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
func (b *Backend) mix(ctx context.Context, op work.OpType, written, result []*tensor.Tensor, lists [][]*tensor.Tensor, f func(ctx context.Context, lists [][]*tensor.Tensor) (*work.Work, error)) (_ *work.Work, err error) {
	if driver.CallCaptured(ctx) {
		return nil, fmt.Errorf("cuda: %v in a capture: %w: a tensor of the call is in CPU memory", op, driver.ErrCapture)
	}
	if err := b.mixed.begin(ctx, lists); err != nil {
		if _, _, admitted := b.g.Admit(ctx, op, 0); admitted != nil {
			err = admitted
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			b.mixed.calls.Done()
		}
	}()
	s := &shadowed{b: b}
	written, result = slices.Clone(written), slices.Clone(result)
	if g := driver.CallStreamsOf(ctx); g != nil && b.g.Missing == nil {
		st, err := b.copies()
		if err != nil {
			return nil, err
		}
		more := *g
		more.Before = append(slices.Clone(g.Before), st)
		ctx = driver.WithCallStreams(ctx, &more)
	}
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
	info := w.Info()
	p.Init(&work.Issuer{Group: info.Group, Rank: info.Rank, Names: info.Names}, info.Op, info.Seq)
	p.RunBy(p)
	if r, err := w.SourceRank(); err == nil {
		p.SetSource(r)
	}
	p.Start()
	if !op.IsP2P() { // no call waits for a message
		s.work, s.results = p.Work(), rangesOf(written)
		b.mixed.mu.Lock()
		b.mixed.open = append(b.mixed.open, s)
		b.mixed.mu.Unlock()
	}
	go func() {
		defer b.mixed.calls.Done()
		err := w.Wait(context.Background())
		if err == nil {
			err = s.back(written)
		}
		if err == nil {
			s.release()
		}
		b.mixed.end(s, err)
		if r, err := w.SourceRank(); err == nil {
			p.SetSource(r)
		}
		p.SetResult(result...)
		p.Complete(err)
	}()
	return p.Work(), nil
}

// begin waits until earlier calls have brought back what this one uses, and notes that it has begun.
func (m *mixed) begin(ctx context.Context, lists [][]*tensor.Tensor) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.await(ctx, lists); err != nil {
		return err
	}
	if m.closed {
		return work.ErrClosed
	}
	m.calls.Add(1)
	return nil
}

// Await waits until earlier collectives have written what a call uses that goes through the host.
func (m *mixed) Await(ctx context.Context, lists ...[]*tensor.Tensor) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.await(ctx, lists)
}

// await is Await. The caller holds m.mu, which is not held while it waits.
func (m *mixed) await(ctx context.Context, lists [][]*tensor.Tensor) error {
	for {
		i := slices.IndexFunc(m.open, func(s *shadowed) bool {
			return !s.work.IsCompleted() && slices.ContainsFunc(lists, func(ts []*tensor.Tensor) bool { return slices.ContainsFunc(ts, s.writes) })
		})
		if i < 0 {
			return nil
		}
		w := m.open[i].work
		m.mu.Unlock()
		w.Wait(ctx) // its error is for whoever waits for the operation
		m.mu.Lock()
		if !w.IsCompleted() {
			return group.Canceled(ctx)
		}
	}
}

// Writes notes a collective through the host that writes tensors in CPU memory.
func (m *mixed) Writes(w *work.Work, results []*tensor.Tensor) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open = slices.DeleteFunc(m.open, func(s *shadowed) bool { return s.work.IsCompleted() })
	m.open = append(m.open, &shadowed{work: w, results: rangesOf(results)})
}

// end notes that a call has ended.
func (m *mixed) end(s *shadowed, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open = slices.DeleteFunc(m.open, func(o *shadowed) bool { return o == s })
	if err != nil {
		m.stuck = append(m.stuck, s)
	}
}

// rangesOf returns the addresses between which the tensors in CPU memory lie.
func rangesOf(ts []*tensor.Tensor) (all [][2]uint64) {
	for _, t := range ts {
		if inCPU(t) {
			from, to := t.Range()
			all = append(all, [2]uint64{from, to})
		}
	}
	return all
}

// writes reports whether the results of a call are copied to where a tensor lies.
func (s *shadowed) writes(t *tensor.Tensor) bool {
	if !inCPU(t) {
		return false
	}
	from, to := t.Range()
	return slices.ContainsFunc(s.results, func(r [2]uint64) bool { return r[0] < to && from < r[1] })
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
	results := make(map[*tensor.Tensor]bool, len(written))
	for _, t := range written {
		results[t] = true
	}
	var at []int
	for i, t := range s.tensors {
		if results[t] && t.Len() > 0 {
			at = append(at, i)
			results[t] = false // in place, the input's shadow comes later, and does not have the result
		}
	}
	for _, i := range at {
		if err := st.Copy(s.pinned[i].Ptr(), s.memory[i].Ptr(), s.tensors[i].ByteLen()); err != nil {
			return err
		}
	}
	if err := s.drained(); err != nil {
		return err
	}
	for _, i := range at {
		n := s.tensors[i].ByteLen()
		driver.HostAccess(s.b.g.Driver, "unpacking a tensor in CPU memory", driver.Reads(s.pinned[i].Ptr(), n))
		if err := s.tensors[i].Unpack(s.pinned[i].Bytes()[:n]); err != nil {
			return err
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

// Before does nothing: the shadows are the call's own.
func (m *mixed) Before(func(driver.Stream, ...driver.Access), []*place.Place) {}

// Abort does nothing: the operations with the shadows end.
func (m *mixed) Abort() {}

// Close waits until what calls with tensors in CPU memory have is given back, or noted as stuck. Their operations
// have ended.
func (m *mixed) Close() error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		m.calls.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-time.After(group.CloseLimit):
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left = true
	return fmt.Errorf("cuda: calls with tensors in CPU memory have not left the device after %v, and their memory stays", group.CloseLimit)
}

// free frees what calls with tensors in CPU memory have left. The group has been closed. Devices that have not left
// its operations may use the memory, which stays then.
func (m *mixed) free(inUse bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	inUse = inUse || m.left
	var errs []error
	if m.stream != nil {
		ctx, cancel := context.WithTimeout(context.Background(), group.CloseLimit)
		defer cancel()
		inUse = inUse || len(m.stuck) > 0 && !group.Drained(ctx, []driver.Stream{m.stream})
		errs = append(errs, m.stream.Close())
	}
	for _, s := range m.stuck {
		if inUse {
			break
		}
		for _, h := range s.pinned {
			errs = append(errs, h.Close())
		}
		for _, d := range s.memory {
			errs = append(errs, d.Close())
		}
	}
	m.stuck, m.stream = nil, nil
	return errors.Join(errs...)
}
