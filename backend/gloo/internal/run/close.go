package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// closeWithin is how long Close waits for operations that it has ended. They end at once, but for
// those inside a function of the program, such as a custom operator.
var closeWithin = 500 * time.Millisecond // a variable for tests

// Close frees everything within about a second, whatever is pending. While this process has to wait
// for a CPU, its goodbyes may take up to ten seconds. Operations of this rank that
// have not ended fail with work.ErrClosed.
//
// On the native wires Close and Shutdown return how the ranks' collectives differ, if they do and no
// operation has returned it. If a rank's last collective did not need all ranks, it waits up to
// 300 ms for those that have not called it. A rank that calls it later gets the error alone.
//
// If no collective is open, Close says goodbye: the other ranks can finish what does not need this
// one. If a collective is open, the group ends on all ranks, and this rank is to blame.
//
// Close cannot end an operation inside a function of the program, such as a custom operator. It
// then returns an error that names the operation. Its memory is freed when the function returns.
func (b *Group) Close() error {
	b.mu.Lock()
	if b.closing {
		b.mu.Unlock()
		<-b.done
		return nil
	}
	b.closing = true
	b.unbegun.Stop()
	b.queued.Broadcast()
	open := works(b.inflight.All())
	gaveUp := b.givenUp()
	b.mu.Unlock()
	defer close(b.done)

	why := transport.Fault{Kind: transport.FaultPeerLeft, Rank: b.rank, Reporter: b.rank, Op: transport.NoOp}
	switch {
	case len(open) > 0:
		why.Err = &blame.Departure{Words: "it called Close with " + named(open) + " open"}
	case gaveUp != nil && b.fault() == nil:
		why = *gaveUp
	}
	cause := why.Err
	if f := b.Meshes[0].Fault(); cause == nil && f != nil {
		cause = f
	}
	if why.Err != nil {
		b.end(why)
	}
	if g := b.Memory; g != nil && cause != nil {
		g.Abort(cause) // before the others see there that this rank has left
	}
	if why.Err != nil {
		b.mu.Lock()
		b.stopped = true // after the fault, of which queued operations would make another one
		b.mu.Unlock()
	}
	if late := unfinished(open, closeWithin); len(late) > 0 {
		go b.free(open)
		return fmt.Errorf("gloo: Close: %s has not returned from a function of the program", named(late))
	}
	var differ error
	if why.Err == nil {
		differ = b.compareCalls()
	}
	return errors.Join(differ, b.free(nil))
}

// free frees everything once these operations have ended.
func (b *Group) free(open []*work.Work) error {
	for _, w := range open {
		<-w.Done()
	}
	b.stopTelling()
	err := b.session.close()
	b.p2p.Wait() // sends and receives, which have ended with the session
	b.workers.Wait()
	b.mu.Lock()
	b.engines = nil // a recorder may keep the backend for long, but not their memory
	b.mu.Unlock()
	return err
}

// Shutdown waits until all issued operations have ended, then closes the backend. If ctx ends
// first, Close ends the rest, and the error wraps that of ctx. New operations are refused from the
// start.
func (b *Group) Shutdown(ctx context.Context) error {
	b.mu.Lock()
	b.draining = true
	open := works(b.inflight.All())
	b.mu.Unlock()
	messages := make(chan struct{})
	go func() {
		b.p2p.Wait()
		close(messages)
	}()
	for _, w := range open {
		w.Wait(ctx) // its error is for whoever waits for the operation
	}
	select {
	case <-messages:
		if ctx.Err() == nil || len(unfinished(open, 0)) == 0 {
			return b.Close()
		}
	case <-ctx.Done():
	}
	cut := "sends or receives"
	if late := unfinished(open, 0); len(late) > 0 {
		cut = named(late)
	}
	return errors.Join(fmt.Errorf("gloo: Shutdown gave up waiting for %s: %w", cut, blame.Canceled(ctx)), b.Close())
}

// unfinished returns those operations that have not ended after so long. Time for which this process had no CPU
// does not count.
func unfinished(ws []*work.Work, limit time.Duration) (late []*work.Work) {
	if len(ws) == 0 {
		return nil
	}
	ctx, cancel := cputime.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, w := range ws {
		select {
		case <-w.Done():
		case <-ctx.Done():
		}
		if !w.IsCompleted() {
			late = append(late, w)
		}
	}
	return late
}

// named is "all_reduce seq 3", or "2 operations (the first is all_reduce seq 3)".
func named(ws []*work.Work) string {
	first := fmt.Sprintf("%v seq %d", ws[0].Info().Op, ws[0].Info().Seq)
	if len(ws) == 1 {
		return first
	}
	return fmt.Sprintf("%d operations (the first is %s)", len(ws), first)
}

// compareWithin is how long Close waits for ranks that have not called what this rank has called. Time for which this process
// waits for a CPU does not count.
const compareWithin = 300 * time.Millisecond

// compareCalls returns how this rank's calls differ from those of the others, if no operation of this
// rank has returned it, before the group closes. A rank that only sent, as the root of a
// broadcast, may not have heard from the others: it waits for them.
func (b *Group) compareCalls() error {
	b.mu.Lock()
	heard := b.agreed == b.calls
	last := b.issuer.Info(b.last.op, b.last.seq)
	b.mu.Unlock()
	if b.fault() == nil && !heard && b.native {
		ctx, cancel := cputime.WithTimeout(context.Background(), compareWithin)
		defer cancel()
		switch {
		case b.Shared != nil:
			if err := b.inMemory(b.Meshes[0], last, b.Shared.CompareCalls(ctx)); errors.Is(err, work.ErrMismatch) {
				return err
			}
		case b.TCP != nil:
			b.TCP.CompareCalls(ctx)
		}
	}
	// A fault without an operation is of a backend above, which returns it.
	if f := b.fault(); f != nil && f.Kind == transport.FaultMismatch && f.Op != transport.NoOp && !b.mismatchTold.Load() {
		return b.faultError(last, f)
	}
	return nil
}
