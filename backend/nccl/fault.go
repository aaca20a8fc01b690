package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

const (
	// pace is how often the watcher looks while something is pending, asyncPace how often it asks NCCL.
	pace      = 200 * time.Microsecond
	asyncPace = 20 * time.Millisecond

	// leaveGrace is how long an operation may go on without a rank that has closed the group: it may have the data.
	leaveGrace = 300 * time.Millisecond

	// abortLimit is how long NCCL may take to end the kernels of a group that has failed, before the operations end.
	abortLimit = 5 * time.Second

	// dumpKey is by what PyTorch's ranks tell each other that one has failed, and dumpPace how often they look.
	dumpKey  = "exception_dump"
	dumpPace = time.Second

	// Tags of the control group.
	askTag, answerTag = 1, 2
	forever           = 10 * 365 * 24 * time.Hour
)

// askLimit is how long other ranks may take to say how far they are, when an operation has run out of time; a variable for
// tests.
var askLimit = 250 * time.Millisecond

// Err returns what ended the group, nil while it works.
func (b *Backend) Err() error {
	if e := b.fault.Load(); e != nil {
		return *e
	}
	return nil
}

// Abort ends every operation with cause, on every rank of this library.
func (b *Backend) Abort(cause error) {
	b.abortFor(b.issuer.Info(work.Unknown, b.Seq()), cause)
}

// abortFor is Abort because of an operation.
func (b *Backend) abortFor(info work.Info, cause error) {
	if cause == nil {
		cause = work.ErrAborted
	}
	var own *work.Error
	if !errors.As(cause, &own) {
		cause = &work.Error{Info: info, Peer: b.rank, Err: fmt.Errorf("%w: %w", work.ErrAborted, cause)}
	}
	b.fail(cause)
}

// fail ends the group, once, and not when Close has ended it. It returns before the operations have ended.
func (b *Backend) fail(err error) {
	b.failMu.Lock()
	if b.over || !b.fault.CompareAndSwap(nil, &err) {
		b.failMu.Unlock()
		return
	}
	b.failing.Add(1)
	b.failMu.Unlock()
	if b.told != nil && !errors.Is(err, work.ErrClosed) {
		info := b.issuer.Info(work.Unknown, b.Seq())
		var first *work.Error
		if errors.As(err, &first) {
			info = first.Info
		}
		b.told(b.named(info, err))
	}
	b.end(err)
	go func() {
		defer b.failing.Done()
		if b.control != nil && !errors.Is(err, work.ErrClosed) {
			b.control.Abort(b.named(b.issuer.Info(work.Unknown, b.Seq()), err))
		}
		if b.options.DumpPyTorch && b.root != nil && !errors.Is(err, work.ErrClosed) {
			ctx, cancel := context.WithTimeout(context.Background(), dumpPace)
			_ = b.root.Set(ctx, dumpKey, binary.LittleEndian.AppendUint32(nil, uint32(b.global(b.rank))))
			cancel()
		}
		b.mu.Lock()
		comms := slices.Collect(maps.Values(b.comms))
		all := b.pending
		b.pending = nil
		b.mu.Unlock()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			var ending sync.WaitGroup
			for _, c := range comms {
				ending.Go(c.abort)
			}
			ending.Wait()
		}()
		ctx, cancel := context.WithTimeout(context.Background(), abortLimit)
		defer cancel()
		for _, o := range all { // NCCL ends the kernels first, and frees the communicator for a long time after that
			o.leave(ctx)
			o.finish(b.named(o.Info(), err))
		}
		select {
		case <-ended:
		case <-ctx.Done():
		}
	}()
}

// named returns the error of an operation that has failed by err, which may be that of another operation or rank.
func (b *Backend) named(info work.Info, err error) *work.Error {
	var first *work.Error
	if !errors.As(err, &first) {
		return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("nccl: %w", err)}
	}
	switch {
	case first.Info == info:
		return first
	case first.Op == work.Barrier && b.control != nil: // of the control group
		return &work.Error{Info: info, Peer: first.Peer, Err: fmt.Errorf("nccl: %w", first.Err)}
	}
	return &work.Error{Info: info, Peer: first.Peer, Err: fmt.Errorf("nccl: the group has failed: %w", first)}
}

// global returns the rank in the default group.
func (b *Backend) global(rank int) int {
	if n := b.issuer.Names; n != nil && rank < len(n.GlobalRanks) {
		return n.GlobalRanks[rank]
	}
	return rank
}

// hear looks whether the other ranks have told of a fault.
func (b *Backend) hear() {
	if b.control != nil {
		if err := b.control.Err(); err != nil && !errors.Is(err, work.ErrClosed) {
			b.fail(err)
		}
	}
}

// watch looks after operations that are pending.
func (b *Backend) watch() {
	for {
		select {
		case <-b.quit:
			return
		case <-b.wake:
		}
		asked := time.Now()
		for b.look(&asked) {
			time.Sleep(pace)
		}
	}
}

// look ends what has ended, and fails the group if something is wrong. It reports whether something is pending.
func (b *Backend) look(asked *time.Time) bool {
	b.hear()
	b.mu.Lock()
	b.pending = slices.DeleteFunc(b.pending, (*operation).isOver)
	all := slices.Clone(b.pending)
	comms := slices.Collect(maps.Values(b.comms))
	b.mu.Unlock()
	if b.Err() != nil || len(all) == 0 {
		return false // fail ends them
	}
	first := map[*comm]*operation{} // a communicator's end in order
	for _, o := range all {
		if first[o.c] != nil {
			continue
		}
		if o.Poll(); !o.isOver() {
			first[o.c] = o
		}
	}
	now := time.Now()
	for _, o := range all {
		switch {
		case o.isOver():
		case o.ctx.Err() != nil:
			b.fail(&work.Error{Info: o.Info(), Peer: b.rank, Err: fmt.Errorf("nccl: %w", canceled(o.ctx))})
		case now.After(o.deadline):
			peer, why := b.blame(o.Info().Seq)
			b.hear() // another rank may have found out first
			b.fail(&work.Error{Info: o.Info(), Peer: peer, Err: fmt.Errorf("nccl: %w after %v%s", work.ErrTimeout, o.limit, why)})
		}
	}
	if r, since := b.firstLeft(); r >= 0 && now.Sub(since) > leaveGrace && len(first) > 0 {
		o := slices.MinFunc(slices.Collect(maps.Values(first)), func(a, b *operation) int { return int(a.Info().Seq) - int(b.Info().Seq) })
		b.fail(&work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("nccl: %s: %w", b.issuer.Names.Rank(r), work.ErrPeerLeft)})
	}
	if now.Sub(*asked) > asyncPace {
		*asked = now
		for _, c := range comms {
			if err := c.polled(); err != nil {
				b.fail(err)
			}
		}
	}
	return true
}

// firstLeft returns a rank that has closed the group, -1 if none has.
func (b *Backend) firstLeft() (rank int, since time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	rank = -1
	for r, at := range b.left {
		if rank < 0 || at.Before(since) {
			rank, since = r, at
		}
	}
	return rank, since
}

// listen answers a rank's questions, and notices its end.
func (b *Backend) listen(peer int) {
	for {
		if err := b.answer(peer); err != nil {
			b.mu.Lock()
			closing := b.closing
			if errors.Is(err, work.ErrPeerLeft) {
				b.left[peer] = time.Now()
			}
			b.mu.Unlock()
			if !closing && !errors.Is(err, work.ErrPeerLeft) && !errors.Is(err, work.ErrClosed) {
				b.hear()
			}
			return
		}
	}
}

// answer tells a rank, once it asks, how many operations this one has issued.
func (b *Backend) answer(peer int) error {
	if err := b.exchange(context.Background(), b.control.Recv, peer, askTag, make([]byte, 1)); err != nil {
		return err
	}
	return b.exchange(context.Background(), b.control.Send, peer, answerTag, binary.LittleEndian.AppendUint64(nil, b.Seq()))
}

// exchange sends or receives bytes in the control group.
func (b *Backend) exchange(ctx context.Context, f func(context.Context, *tensor.Tensor, int, backend.P2POptions) (*work.Work, error), peer int, tag uint32, data []byte) error {
	t, err := tensor.Of(data, len(data))
	if err != nil {
		return err
	}
	w, err := f(context.Background(), t, peer, backend.P2POptions{Tag: tag, Timeout: forever})
	if err != nil {
		return err
	}
	return w.Wait(ctx)
}

// blame asks the other ranks how far they are. It returns the rank at fault for an operation that has not ended, or
// -1, and what their answers show.
func (b *Backend) blame(seq uint64) (peer int, why string) {
	if b.control == nil || b.size == 1 {
		return -1, ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	counts, errs := make([]uint64, b.size), make([]error, b.size)
	var asking sync.WaitGroup
	for r := range b.size {
		if r == b.rank {
			continue
		}
		asking.Go(func() {
			count := make([]byte, 8)
			if errs[r] = b.exchange(ctx, b.control.Send, r, askTag, []byte{1}); errs[r] == nil {
				errs[r] = b.exchange(ctx, b.control.Recv, r, answerTag, count)
			}
			if errs[r] == nil {
				counts[r] = binary.LittleEndian.Uint64(count)
			}
		})
	}
	asking.Wait()
	peer = -1
	for r := range b.size {
		text := ""
		switch {
		case r == b.rank:
		case errs[r] != nil:
			text = "does not answer"
		case counts[r] <= seq:
			text = fmt.Sprintf("has issued %d operations, not this one", counts[r])
		}
		if text != "" {
			if peer < 0 {
				peer = r
			}
			why += fmt.Sprintf("; %s %s", b.issuer.Names.Rank(r), text)
		}
	}
	if why == "" {
		why = "; all ranks answer, and have issued it"
	}
	return peer, why
}

// watchDumps looks whether a rank of PyTorch has failed.
func (b *Backend) watchDumps() {
	t := time.NewTicker(dumpPace)
	defer t.Stop()
	for {
		select {
		case <-b.quit:
			return
		case <-t.C:
		}
		there, err := b.root.Check(b.life, dumpKey)
		if !there || err != nil || b.dumpsKnown {
			continue
		}
		v, err := b.root.Get(b.life, dumpKey)
		if err != nil || len(v) < 4 {
			continue
		}
		global, peer := int(binary.LittleEndian.Uint32(v)), -1
		for r := range b.size {
			if b.global(r) == global {
				peer = r
			}
		}
		if peer != b.rank {
			b.fail(&work.Error{Info: b.issuer.Info(work.Unknown, b.Seq()), Peer: peer, Err: fmt.Errorf("nccl: rank %d of the job says in the store (%s) that it has failed: %w", global, dumpKey, work.ErrAborted)})
		}
		return
	}
}
