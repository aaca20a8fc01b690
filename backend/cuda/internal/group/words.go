package group

import (
	"context"
	"errors"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/internal/pool"
)

// wordsLimit is how long a kernel waits for a word of the host that is on its way. Where such words come, they do in a
// few microseconds. A host that is busy may take longer to write it.
const wordsLimit = 5 * time.Second

var errWords = errors.New("kernels of the device do not see what the host writes while they run")

// SeesWords returns nil if a kernel of a device sees what the host writes meanwhile, as kernels that wait have to. In
// some confidential virtual machines that is not known. It tries it once for each device of a driver, because that needs
// a stream, and each new stream may get the hardware queue of another. Without the kernel for that it returns nil.
func (b *Engine) SeesWords(ctx context.Context, timeout time.Duration, dev int) error {
	k := b.Packer(dev)
	if k.Err != nil {
		return k.Err
	}
	f, err := k.module.Function(kernels.Exchange)
	if err != nil {
		return nil
	}
	v, err := b.Driver.Device(dev)
	if err != nil {
		return err
	}
	return v.SeesWords().Do(func() (err error, known bool) {
		err = b.tryWords(ctx, timeout, v, f)
		return err, err == nil || errors.Is(err, errWords)
	})
}

// tryWords has a kernel wait for a word that the host writes once the kernel runs.
func (b *Engine) tryWords(ctx context.Context, timeout time.Duration, v driver.Device, f driver.Function) (err error) {
	const arrived, release, taken, bytes = 0, 4, 8, 12
	h, err := b.Pinned.Get(pool.OnHost, bytes)
	if err != nil {
		return err
	}
	s, err := v.NewStream(driver.StreamOptions{High: true, Name: "words"})
	if err != nil {
		return errors.Join(err, b.Pinned.Put(pool.OnHost, h))
	}
	for at := 0; at < bytes; at += 4 {
		h.Store32(at, 0)
	}
	at := h.Ptr()
	l := &driver.Launch{
		Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 32}, Access: []driver.Access{driver.Shares(at, bytes)},
		Args: new(driver.Args).Ptr(at).Ptr(at).Ptr(at).Uint64(0).Ptr(at + arrived).Ptr(at + release).Ptr(at + taken).Uint32(1).Uint64(uint64(wordsLimit)),
	}
	// The driver holds up its callers while it compiles a kernel for another rank of the process, which takes longer than
	// wordsLimit. So who writes the word does not call it.
	var ran error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if ran = s.Launch(l); ran != nil {
			return
		}
		var e driver.Event
		if e, ran = s.Record(); ran == nil {
			ran = e.Sync(context.WithoutCancel(ctx))
			e.Release()
		}
	}()
	err = b.Poll(ctx, timeout, func() (bool, error) {
		if h.Load32(arrived) != 0 {
			h.Store32(release, 1)
		}
		select {
		case <-ended:
			return true, ran
		default:
			return false, nil
		}
	})
	switch {
	case err != nil:
		h.Store32(release, 1)
		select {
		case <-ended:
		case <-time.After(2 * wordsLimit):
			return err // the kernel may use the memory
		}
	case h.Load32(taken) == 0:
		err = errWords
	}
	return errors.Join(err, s.Close(), b.Pinned.Put(pool.OnHost, h))
}
