package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/work"
)

// comm is a communicator. Its calls block, as PyTorch's do: NCCL starts a thread for each that does not.
type comm struct {
	b          *Backend
	rank, size int
	dev        driver.Device
	stream     driver.Stream // for calls that are part of no other

	handle atomic.Uintptr // 0 before and after its life
	use    sync.Mutex     // held during a call that has the handle; only an abort comes beside it
}

var errAborted = errors.New("the communicator was aborted")

// newComm returns a communicator without a handle.
func (b *Backend) newComm(dev driver.Device, rank, size int) (*comm, error) {
	if _, ok := dev.(driver.Enterer); !ok {
		return nil, fmt.Errorf("nccl: driver %s does not let a thread have a device", b.driver.Name())
	}
	s, err := dev.NewStream(driver.StreamOptions{Name: "nccl"})
	if err != nil {
		return nil, err
	}
	return &comm{b: b, rank: rank, size: size, dev: dev, stream: s}, nil
}

// do runs f on a thread that has the device.
func (c *comm) do(f func() error) error {
	leave, err := c.dev.(driver.Enterer).Enter()
	if err != nil {
		return err
	}
	defer leave()
	return f()
}

// together runs f, which waits for the other ranks, and returns when f does or stop says why not to wait. NCCL cannot
// end such a call. So it stays behind with its thread, and what it makes after all is aborted.
func (c *comm) together(made *comm, stop func() error, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- c.do(f) }()
	for began := time.Now(); ; driver.Pause(began) {
		select {
		case err := <-done:
			return err
		default:
		}
		if err := stop(); err != nil {
			go func() {
				<-done
				made.abort()
			}()
			return err
		}
	}
}

// with calls f with the handle.
func (c *comm) with(f func(h libnccl.Comm) error) error {
	c.use.Lock()
	defer c.use.Unlock()
	h := libnccl.Comm(c.handle.Load())
	if h == 0 {
		return errAborted
	}
	return f(h)
}

// call makes one of NCCL's calls.
func (c *comm) call(name string, f func(h libnccl.Comm) libnccl.Result) error {
	return c.with(func(h libnccl.Comm) error { return libnccl.Check(c.b.api, h, name, f(h)) })
}

// polled returns an error that NCCL has found by itself. It finds none while a call blocks.
func (c *comm) polled() error {
	if !c.use.TryLock() {
		return nil
	}
	defer c.use.Unlock()
	h := libnccl.Comm(c.handle.Load())
	if h == 0 {
		return nil
	}
	state, r := c.b.api.CommAsyncError(h)
	if r == libnccl.Success && state != libnccl.InProgress {
		r = state
	}
	return libnccl.Check(c.b.api, h, "CommGetAsyncError", r)
}

// connect makes the communicator from ids, with the other ranks.
func (c *comm) connect(ids []libnccl.UniqueID, stop func() error) error {
	return c.together(c, stop, func() error {
		h, r := c.b.api.CommInit(ids, c.size, c.rank)
		c.handle.Store(uintptr(h))
		return libnccl.Check(c.b.api, h, "CommInitRank", r)
	})
}

// split makes part, a part of this communicator. Part is nil on a rank that is in none.
func (c *comm) split(color, key int, part *comm, stop func() error) error {
	return c.together(part, stop, func() error {
		return c.call("CommSplit", func(parent libnccl.Comm) libnccl.Result {
			h, r := c.b.api.CommSplit(parent, color, key)
			if part != nil {
				part.handle.Store(uintptr(h))
			}
			return r
		})
	})
}

// patience is how long an abort waits for a call that has not returned. Then it aborts beside it, as NCCL allows: only
// that ends a call which blocks.
const patience = 100 * time.Millisecond

// abort ends the communicator's kernels and calls. Calls after it return errAborted.
func (c *comm) abort() {
	if c == nil {
		return
	}
	locked := c.use.TryLock()
	for began := time.Now(); !locked && time.Since(began) < patience; locked = c.use.TryLock() {
		time.Sleep(time.Millisecond)
	}
	if h := libnccl.Comm(c.handle.Swap(0)); h != 0 {
		if leave, err := c.dev.(driver.Enterer).Enter(); err == nil {
			c.b.api.CommAbort(h)
			leave()
		}
	}
	if locked {
		c.use.Unlock()
	}
}

// finalize ends the communicator together with the other ranks. When limit is over it aborts. It waits for the abort, which
// uses the device: a call that it has ended returns before.
func (c *comm) finalize(limit time.Duration) {
	aborted := make(chan struct{})
	t := time.AfterFunc(limit, func() {
		defer close(aborted)
		c.abort()
	})
	defer func() {
		if !t.Stop() {
			<-aborted
		}
	}()
	err := c.do(func() error {
		err := c.call("CommFinalize", func(h libnccl.Comm) libnccl.Result { return c.b.api.CommFinalize(h) })
		if err != nil {
			return err
		}
		return c.call("CommDestroy", func(h libnccl.Comm) libnccl.Result {
			c.handle.Store(0)
			return c.b.api.CommDestroy(h)
		})
	})
	if err != nil {
		c.abort()
	}
}

// groupComm returns the group's communicator and makes it first if there is none. All ranks come.
func (b *Backend) groupComm(ctx context.Context, dev int, deadline time.Time) (*comm, error) {
	return b.comm(-1, func() (*comm, error) {
		if err := b.bind(dev); err != nil {
			return nil, err
		}
		return b.connect(ctx, deadline, b.rank, b.size, b.collectiveIDs)
	})
}

// pairComm returns the communicator of this rank and another one.
func (b *Backend) pairComm(ctx context.Context, dev, peer int, deadline time.Time) (*comm, error) {
	return b.comm(peer, func() (*comm, error) {
		if err := b.bind(dev); err != nil {
			return nil, err
		}
		rank := 0
		if b.rank > peer {
			rank = 1
		}
		return b.connect(ctx, deadline, rank, 2, func(ctx context.Context) ([]libnccl.UniqueID, error) { return b.pairIDs(ctx, peer) })
	})
}

// comm returns a communicator by its peer, -1 for the group's. The caller holds b.calls.
func (b *Backend) comm(peer int, make func() (*comm, error)) (*comm, error) {
	b.mu.Lock()
	c := b.comms[peer]
	b.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c, err := make()
	if err != nil {
		return nil, err
	}
	return c, b.keep(peer, c)
}

// keep adds a communicator that is connected.
func (b *Backend) keep(peer int, c *comm) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.comms[peer] = c
	return b.Err() // which aborts those that it finds
}

// bind makes a device that of the rank.
func (b *Backend) bind(i int) (err error) {
	if b.dev == nil {
		b.dev, err = b.driver.Device(i)
	}
	return err
}

// connect makes a communicator from ids. It ends with ctx, with the group, and at the deadline.
func (b *Backend) connect(ctx context.Context, deadline time.Time, rank, size int, ids func(context.Context) ([]libnccl.UniqueID, error)) (*comm, error) {
	ctx, cancel := context.WithDeadlineCause(ctx, deadline, work.ErrTimeout)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(b.life, func() { stop(context.Cause(b.life)) })()
	all, err := ids(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", canceled(ctx), err)
		}
		return nil, cmp.Or(b.Err(), err)
	}
	c, err := b.newComm(b.dev, rank, size)
	if err != nil {
		return nil, err
	}
	if err = c.connect(all, b.stopped(ctx)); err != nil {
		c.abort()
		return nil, errors.Join(cmp.Or(b.Err(), err), c.stream.Close())
	}
	return c, nil
}

// stopped returns a function that says why a wait has to end.
func (b *Backend) stopped(ctx context.Context) func() error {
	return func() error {
		b.hear()
		if ctx.Err() != nil {
			return cmp.Or(b.Err(), canceled(ctx))
		}
		return b.Err()
	}
}

// canceled says why a context ended.
func canceled(ctx context.Context) error {
	kind := work.ErrCanceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) || errors.Is(context.Cause(ctx), work.ErrTimeout) {
		kind = work.ErrTimeout
	}
	if cause := context.Cause(ctx); cause != ctx.Err() && cause != kind {
		return fmt.Errorf("%w: %w: %w", kind, ctx.Err(), cause)
	}
	return fmt.Errorf("%w: %w", kind, ctx.Err())
}

// Outside implements backend.Splitter: the part of a rank that is not in a new group, in the split of the group's
// communicator.
func (b *Backend) Outside(ctx context.Context, ranks []int) error {
	return b.splitFor(ctx, libnccl.NoColor, b.rank, nil)
}

// Splits implements backend.Splitter.
func (b *Backend) Splits() bool { return b.options.Eager && b.api.Version().HasSplit() }

// splitFor splits the group's communicator. Part gets the result; nil is for a rank outside.
func (b *Backend) splitFor(ctx context.Context, color, key int, part *comm) error {
	b.calls.Lock()
	defer b.calls.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, b.limit(0), work.ErrTimeout)
	defer cancel()
	b.mu.Lock()
	c := b.comms[-1]
	b.mu.Unlock()
	if err := b.Err(); err != nil {
		return err
	}
	if c == nil {
		return fmt.Errorf("nccl: %s has no communicator to split", b.issuer.Names.Group(b.issuer.Group))
	}
	if err := c.split(color, key, part, b.stopped(ctx)); err != nil {
		b.fail(err)
		return fmt.Errorf("nccl: splitting the communicator of %s: %w", b.issuer.Names.Group(b.issuer.Group), cmp.Or(b.Err(), err))
	}
	return nil
}
