package chain

import (
	"context"
	"errors"
	"sync"
)

// Chain is the future of one operation. It has an error and no data: results are in the
// operation's buffers. All methods may be called from many goroutines.
type Chain struct {
	run  func(func()) // where dependants run
	done chan struct{}

	mu      sync.Mutex
	pending int
	errs    []error
	err     error
	ended   bool
	then    []func(error)
	failed  func(error) // called once, at the first error
	cleanup func(error) // called once, at the end
}

func newChain(run func(func())) *Chain { return &Chain{run: run, done: make(chan struct{})} }

// Done is closed when the operation has ended.
func (c *Chain) Done() <-chan struct{} { return c.done }

// Err returns the operation's error, nil while it runs.
func (c *Chain) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Wait waits for the operation's end or ctx's.
func (c *Chain) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return c.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// AndThen makes one of the node's workers run f after the operation, with its error. It may be
// called before or after the end.
func (c *Chain) AndThen(f func(error)) {
	c.mu.Lock()
	if !c.ended {
		c.then = append(c.then, f)
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	c.run(func() { f(c.err) })
}

// Next returns a chain that ends after f. If c fails, f does not run, and the chain has c's
// error.
func (c *Chain) Next(f func() error) *Chain {
	n := newChain(c.run)
	n.hold(1)
	c.AndThen(func(err error) {
		if err == nil {
			err = f()
		}
		n.release(err)
	})
	return n
}

// hold makes the chain wait for n more releases.
func (c *Chain) hold(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending += n
}

// fail notes an error; the chain ends once everything that it waits for has
// been released.
func (c *Chain) fail(err error) {
	c.mu.Lock()
	first := len(c.errs) == 0 && !c.ended
	if !c.ended {
		c.errs = append(c.errs, err)
	}
	failed := c.failed
	c.mu.Unlock()
	if first && failed != nil {
		failed(err)
	}
}

// broken reports whether there has been an error.
func (c *Chain) broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.errs) > 0
}

// release ends one of the chain's waits.
func (c *Chain) release(err error) {
	if err != nil {
		c.fail(err)
	}
	c.mu.Lock()
	if c.pending--; c.pending > 0 {
		c.mu.Unlock()
		return
	}
	c.ended = true
	if len(c.errs) == 1 {
		c.err = c.errs[0]
	} else {
		c.err = errors.Join(c.errs...)
	}
	then, cleanup := c.then, c.cleanup
	c.then, c.cleanup, c.failed, c.errs = nil, nil, nil, nil
	c.mu.Unlock()
	if cleanup != nil {
		cleanup(c.err)
	}
	close(c.done)
	for _, f := range then {
		c.run(func() { f(c.err) })
	}
}
