package detail

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Backend checks every collective over a second group before it runs it. See backend.Backend for
// the rules of use. The call of a collective blocks until all ranks have made theirs.
type Backend struct {
	backend.Backend // the one that does the work
	control         backend.Backend

	issuer work.Issuer
	store  store.Store // under the control group's prefix
	form   form

	checked  chan struct{} // by the first check
	first    sync.Once
	closed   chan struct{} // by Close
	close    sync.Once
	watching sync.WaitGroup

	again sync.Once // the second look at who is a rank of this library
	ours  []bool    // by rank; if there are no others, form.own is set

	last    atomic.Pointer[work.Work] // of the group itself; it has failed if the group has
	issued  atomic.Uint64             // collectives
	counted atomic.Uint64             // operations as PyTorch's gloo counts them
}

// New wraps inner, which is connected. Its options o are inner's with another Store: the one in
// which PyTorch has the control group's keys. The function connect makes
// the control group, whose name and prefix are "pg_wrapper:" and the group's. Every rank of the
// group must call New. If New succeeds, the wrapper owns both groups; otherwise the caller closes
// inner.
func New(ctx context.Context, inner backend.Backend, connect func(context.Context, backend.Options) (backend.Backend, error), o backend.Options) (*Backend, error) {
	b := &Backend{
		Backend: inner, issuer: work.Issuer{Group: o.Group, Rank: o.Rank, Names: o.Names}, form: formIn(o.Store),
		ours: make([]bool, o.Size), checked: make(chan struct{}), closed: make(chan struct{}),
	}
	o.Group = "pg_wrapper:" + o.Group
	o.Store = store.Prefix(o.Group, o.Store)
	o.Checks = true
	b.store = o.Store
	// Before other ranks can be connected to this one.
	if err := o.Store.Set(ctx, mark(o.Rank), []byte("1")); err != nil {
		return nil, fmt.Errorf("detail: %w", err)
	}
	control, err := connect(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("detail: the second group, which the ranks make under TORCH_DISTRIBUTED_DEBUG=DETAIL: %w", err)
	}
	b.control = control
	if err := b.look(ctx); err != nil {
		control.Abort(err)
		return nil, errors.Join(fmt.Errorf("detail: %w", err), control.Close())
	}
	if f, ok := inner.(failing); ok {
		b.watching.Go(func() { b.watch(f) })
	}
	return b, nil
}

// mark is the key by which ranks of this library recognise each other.
func mark(rank int) string { return "c10d-go/" + strconv.Itoa(rank) }

// look finds the ranks of this library by their marks. A connected rank has written its mark.
func (b *Backend) look(ctx context.Context) error {
	keys := make([]string, len(b.ours))
	for r := range keys {
		keys[r] = mark(r)
	}
	all, err := b.store.Check(ctx, keys...)
	if err != nil {
		return err
	}
	b.form.own = all
	for r := range keys {
		b.ours[r] = all
		if !all {
			if b.ours[r], err = b.store.Check(ctx, keys[r]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unwrap returns the backend whose operations are checked.
func (b *Backend) Unwrap() backend.Backend { return b.Backend }

// SetTimeout sets the limit of later operations, each with its check.
func (b *Backend) SetTimeout(d time.Duration) {
	b.Backend.SetTimeout(d)
	b.control.SetTimeout(d)
}

// failing is a backend that says when its group has failed, and why.
type failing interface {
	Failed() <-chan struct{}
	Err() error
}

// watch ends the control group when the group itself has failed: a rank that has done its part waits in the check
// of the next operation. There it looks as if the others had not come. It begins with the first check: Err may tell
// the program, which has no group before New has returned.
func (b *Backend) watch(f failing) {
	select {
	case <-b.checked:
	case <-b.closed:
		return
	}
	select {
	case <-f.Failed():
		if err := f.Err(); err != nil && !errors.Is(err, work.ErrClosed) {
			b.control.Abort(err)
		}
	case <-b.closed:
	}
}

// Abort ends all operations and checks with cause, on every rank.
func (b *Backend) Abort(cause error) {
	b.Backend.Abort(cause)
	b.control.Abort(cause)
}

// revoker is a backend that can say why its group has ended. Revoke ends it if this rank's last
// operation was not started because its context had ended.
type revoker interface {
	Revoke()
	Err() error
}

// Revoke ends both groups if this rank's last operation or check was not started because its context had
// ended. The other ranks may wait in it.
func (b *Backend) Revoke() {
	groups := [2]backend.Backend{b.Backend, b.control}
	for i, g := range groups {
		if r, ok := g.(revoker); ok {
			r.Revoke()
			if err := r.Err(); err != nil && !errors.Is(err, work.ErrClosed) {
				groups[1-i].Abort(err)
			}
		}
	}
}

// Shutdown waits for the operations, not for checks: a check that waits for other ranks has issued
// nothing yet.
func (b *Backend) Shutdown(ctx context.Context) error {
	return errors.Join(backend.Shutdown(ctx, b.Backend), b.Close())
}

// Close closes both groups. If one has failed, ranks that wait in the other one are told why. Else they
// would hear that this rank has left.
func (b *Backend) Close() error {
	b.Revoke()
	if w := b.last.Load(); w != nil && w.IsCompleted() && !w.IsSuccess() && !errors.Is(w.Err(), work.ErrClosed) {
		b.control.Abort(w.Err())
	}
	b.close.Do(func() { close(b.closed) })
	b.watching.Wait()
	return errors.Join(b.Backend.Close(), b.control.Close())
}

// call describes a collective.
type call struct {
	op      work.OpType
	timeout time.Duration
	out, in []*tensor.Tensor // that are written, and only read
	tensors []*tensor.Tensor // that PyTorch compares
	more    []*tensor.Tensor // that have to agree as well
	real    bool             // PyTorch's front end turns complex tensors into real ones
	root    int              // 1 more than it is; 0: none
	reduce  *backend.ReduceOp
	counts  int // by how much PyTorch's gloo counts on; 0 means 1
}

// fingerprint describes a call. With own, for ranks of this library alone, it has everything that
// must agree.
func (c *call) fingerprint(own bool) Fingerprint {
	f := Fingerprint{Op: c.op, Tensors: of(c.tensors, c.real), Root: -1, Operator: -1}
	if own {
		f.Tensors = append(f.Tensors, of(c.more, false)...)
		f.Root = c.root - 1
		if c.reduce != nil {
			f.Operator = int(c.reduce.Kind())
		}
	}
	return f
}

// run checks a collective and issues it.
//
// Check and operation together have the operation's timeout.
func (b *Backend) run(ctx context.Context, c call, issue func(context.Context) (*work.Work, error)) (*work.Work, error) {
	if slices.Contains(c.tensors, nil) || slices.Contains(c.more, nil) {
		return issue(ctx) // which refuses it
	}
	if err := backend.CheckMemory(c.op, b.Rank(), c.out, c.in); err != nil {
		return nil, &backend.ArgumentError{Backend: b.Name(), Op: c.op, What: err.Error()}
	}
	ctx = &begun.Context{Context: ctx, Since: time.Now()}
	if err := b.check(ctx, &c); err != nil {
		return nil, err
	}
	w, err := issue(ctx)
	if err == nil {
		b.last.Store(w)
		b.issued.Add(1)
		b.counted.Add(uint64(max(c.counts, 1)))
	}
	return w, err
}

// check returns nil when all ranks' next collectives agree.
func (b *Backend) check(ctx context.Context, c *call) error {
	b.first.Do(func() { close(b.checked) })
	timeout := c.timeout
	info := b.issuer.Info(c.op, b.Seq())
	own := c.fingerprint(false)
	if err := ctx.Err(); err != nil {
		_ = b.control.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}) // is not started; see Revoke
		return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w: %w", work.ErrCanceled, err)}
	}
	if err := b.control.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{Timeout: timeout}); err != nil {
		return b.broken(info, own, err)
	}
	// With a transport that connects lazily, some marks are there only now. If the store is gone,
	// the first look was complete.
	b.again.Do(func() {
		if !b.form.own {
			seen, err := slices.Clone(b.ours), b.look(ctx)
			if err != nil {
				b.ours, b.form.own = seen, false
			}
		}
	})
	own.Seq = b.counted.Load()
	if b.form.own {
		own = c.fingerprint(true)
		own.Seq = b.issued.Load()
	}
	words := own.words(b.form)
	lengths, err := b.gather(ctx, timeout, []int64{int64(len(words))})
	if err != nil {
		return b.broken(info, own, err)
	}
	if slices.ContainsFunc(lengths, func(n []int64) bool { return n[0] != int64(len(words)) }) {
		return b.tellApart(ctx, timeout, info, own, words, lengths)
	}
	all, err := b.gather(ctx, timeout, words)
	if err != nil {
		return b.broken(info, own, err)
	}
	e := &MismatchError{Info: info, Own: own}
	for r, theirs := range all {
		if !slices.Equal(theirs, words) {
			e.add(r, b.read(theirs))
		}
	}
	if len(e.Others) > 0 {
		return e
	}
	return nil
}

// gather returns every rank's numbers. All ranks have the same count.
func (b *Backend) gather(ctx context.Context, timeout time.Duration, mine []int64) ([][]int64, error) {
	all := make([][]int64, b.Size())
	out := make([]*tensor.Tensor, len(all))
	for r := range all {
		all[r] = make([]int64, len(mine))
		out[r] = flat(all[r])
	}
	w, err := b.control.AllGather(ctx, out, flat(mine), backend.AllGatherOptions{Timeout: timeout})
	if err == nil {
		err = w.Wait(ctx)
	}
	return all, err
}

func flat(v []int64) *tensor.Tensor {
	t, err := tensor.Of(v, len(v))
	if err != nil {
		panic(err) // the shape is the length
	}
	return t
}

// longest bounds a fingerprint from another rank.
const longest = 1 << 16

// tell is the tag of fingerprints of unequal length, which only ranks of this library exchange.
const tell = 1<<32 - 1

// tellApart ends a check whose fingerprints have different lengths. PyTorch's ranks stop there.
// Ranks of this library exchange their fingerprints.
func (b *Backend) tellApart(ctx context.Context, timeout time.Duration, info work.Info, own Fingerprint, words []int64, lengths [][]int64) error {
	var works []*work.Work
	theirs := make([][]int64, len(lengths))
	post := func(w *work.Work, err error) error {
		works = append(works, w)
		return err
	}
	o := backend.P2POptions{Tag: tell, Timeout: timeout}
	for r, n := range lengths {
		if n[0] == int64(len(words)) || !b.ours[r] {
			continue
		}
		if len(words) <= longest {
			if err := post(b.control.Send(ctx, flat(words), r, o)); err != nil {
				return b.broken(info, own, err)
			}
		}
		if n[0] > 0 && n[0] <= longest {
			theirs[r] = make([]int64, n[0])
			if err := post(b.control.Recv(ctx, flat(theirs[r]), r, o)); err != nil {
				return b.broken(info, own, err)
			}
		}
	}
	for _, w := range works {
		if err := w.Wait(ctx); err != nil {
			return b.broken(info, own, err)
		}
	}
	e := &MismatchError{Info: info, Own: own}
	for r, n := range lengths {
		switch {
		case n[0] == int64(len(words)):
		case theirs[r] != nil:
			e.add(r, b.read(theirs[r]))
		default:
			e.add(r, Call{What: ofLength(n[0], b.form)})
		}
	}
	return e
}

// read turns a fingerprint from another rank into text.
func (b *Backend) read(words []int64) Call {
	f, err := parse(words, b.form)
	if err != nil {
		return Call{What: err.Error()}
	}
	return Call{Fingerprint: f, Known: true, What: f.String()}
}

// add notes a rank's call.
func (e *MismatchError) add(rank int, c Call) {
	for i, x := range e.Others {
		if x.What == c.What && x.Fingerprint.Seq == c.Fingerprint.Seq && x.Known == c.Known {
			e.Others[i].Ranks = append(e.Others[i].Ranks, rank)
			return
		}
	}
	c.Ranks = []int{rank}
	e.Others = append(e.Others, c)
}

// broken ends the group: it cannot go on without its control group.
func (b *Backend) broken(info work.Info, own Fingerprint, err error) error {
	e := &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("detail: before %v: %w", own, err)}
	var failed *work.Error
	if errors.As(err, &failed) {
		e.Peer = failed.Peer
		e.Err = fmt.Errorf("detail: before %v: %w", own, failed.Err)
	}
	if !errors.Is(err, work.ErrClosed) {
		b.Abort(e)
	}
	return e
}

// p2p counts a send or receive as PyTorch does.
func (b *Backend) p2p(w *work.Work, err error) (*work.Work, error) {
	if err == nil {
		b.last.Store(w)
		b.counted.Add(1)
	}
	return w, err
}
