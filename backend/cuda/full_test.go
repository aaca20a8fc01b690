package cuda_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// fullStream is a stream without room for another command: Record and Wait block
// until the device has done what it was given, as CUDA's do when the stream has some
// 1000 commands.
type fullStream struct {
	driver.Stream
	x *rank
}

func (f fullStream) drain() (err error) {
	defer must.Catch(&err)
	e := must.Get(f.Stream.Record())
	defer e.Release()
	return e.Sync(f.x.ctx)
}

func (f fullStream) Record() (driver.Event, error) {
	if err := f.drain(); err != nil {
		return nil, err
	}
	return f.Stream.Record()
}

func (f fullStream) Wait(e driver.Event) error {
	if err := f.drain(); err != nil {
		return err
	}
	return f.Stream.Wait(e)
}

// TestFullCaller has a caller's stream that is full, and waits for an operation that
// another rank does not call. The operation ends when its time is over. Until then the
// next call, and Synchronize, block in the driver, and nothing else does.
func TestFullCaller(t *testing.T) {
	for _, way := range []string{cuda.DirectWork, cuda.HostWork} {
		for _, blocked := range []string{"call", "Synchronize"} {
			t.Run(way+" "+blocked, virtually(func(t *testing.T) {
				w := newWorld(t, setup{
					size: 2, timeout: patience, sim: sim.Config{Devices: 2, Kernels: simkernels.All()},
					options: cuda.Options{AllReduce: way},
				})
				var buckets [2][2]*bucket
				w.each(func(x *rank, r int) (err error) {
					for i := range buckets[r] {
						buckets[r][i] = must.Get(x.bucket(r))
					}
					v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{buckets[r][0].t}, backend.AllReduceOptions{}))
					return v.Wait(x.ctx)
				})
				x := w.ranks[0]
				full := fullStream{x.caller(0), x}
				ctx := cuda.WithStreams(x.ctx, full)
				x.b.SetTimeout(200 * time.Millisecond)
				v, err := x.b.AllReduce(ctx, []*tensor.Tensor{buckets[0][0].t}, backend.AllReduceOptions{})
				require.NoError(t, err)
				require.NoError(t, v.Synchronize(x.caller(0)))
				ended := make(chan error)
				go func() {
					if blocked == "Synchronize" {
						ended <- v.Synchronize(full)
						return
					}
					v, err := x.b.AllReduce(ctx, []*tensor.Tensor{buckets[0][1].t}, backend.AllReduceOptions{})
					if err == nil {
						err = v.Wait(x.ctx)
					}
					ended <- err
				}()
				must.End(t, "the operation", func() { require.ErrorIs(t, v.Wait(x.ctx), work.ErrTimeout) })
				must.End(t, blocked, func() {
					// The stream goes on before the operation ends, so Synchronize may not know yet.
					if err := <-ended; blocked == "call" {
						require.Error(t, err)
					}
				})
				must.End(t, "Close", func() { require.NoError(t, w.closed()) })
				require.NoError(t, w.m.Settle(w.ctx))
				for _, x := range w.ranks {
					x.free()
				}
				// A ring that was given up orders nothing.
				err = w.m.Close()
				if noLifetime(t, w.m); way == cuda.HostWork {
					require.NoError(t, err)
				}
			}))
		}
	}
}

// TestSynchronizeDoesNotWait orders a stream after an operation whose streams cannot go
// on, while the backend waits for them.
func TestSynchronizeDoesNotWait(t *testing.T) {
	w := newWorld(t, setup{size: 1, sim: sim.Config{Devices: 1}})
	x := w.ranks[0]
	b := must.Get(x.bucket(0))
	other := must.Get(x.bucket(0))
	open := must.Get(x.gate(x.caller(0)))
	require.NoError(t, x.fill(0, b))
	v := must.Get(x.b.Broadcast(x.ctx, []*tensor.Tensor{b.t, other.t}, backend.BroadcastOptions{}))
	must.End(t, "Synchronize", func() {
		for range 200 {
			require.NoError(t, v.Synchronize(x.caller(0)))
			time.Sleep(100 * time.Microsecond) // the finisher comes to wait meanwhile
		}
	})
	require.False(t, v.IsCompleted())
	open()
	require.NoError(t, v.Wait(x.ctx))
	w.end()
}

// keeper is a driver whose page-locked memory cannot be closed while hold is open, as
// CUDA's cannot while a stream waits for another rank.
type keeper struct {
	driver.Driver
	hold chan struct{}
}

type kept struct {
	driver.HostMemory
	hold chan struct{}
}

func (k *keeper) AllocHost(n int) (driver.HostMemory, error) {
	h, err := k.Driver.AllocHost(n)
	return &kept{h, k.hold}, err
}

func (k *kept) Close() error {
	<-k.hold
	return k.HostMemory.Close()
}

// TestNothingFreedUnderWay has operations end while the stream of a message waits, and no
// memory can be freed. Theirs is more than Options.Pinned keeps.
func TestNothingFreedUnderWay(t *testing.T) {
	hold := make(chan struct{})
	w := newWorld(t, setup{
		size: 2, timeout: patience, sim: sim.Config{Devices: 1},
		vary: func(o *cuda.Options, _ int) {
			o.Driver, o.Pinned, o.AllReduce = &keeper{o.Driver, hold}, 1, cuda.HostWork
		},
	})
	var messages [2]*work.Work
	var opened func()
	must.End(t, "an operation", func() {
		w.each(func(x *rank, r int) error {
			var err error
			b := must.Get(x.bucket(r))
			if r == 0 {
				opened = must.Get(x.gate(x.caller(0)))
				must.Do(x.fill(r, b))
				messages[r], err = x.b.Send(x.ctx, b.t, 1, backend.P2POptions{})
			} else {
				messages[r], err = x.b.Recv(x.ctx, b.t, 0, backend.P2POptions{})
			}
			if err != nil {
				return err
			}
			b = must.Get(x.bucket(r))
			for range 10 {
				must.Do(x.wait(x.b.Reduce(cuda.WithStreams(x.ctx), b.t, backend.ReduceOptions{})))
			}
			return nil
		})
	})
	require.False(t, messages[0].IsCompleted())
	opened()
	close(hold)
	for _, v := range messages {
		require.NoError(t, v.Wait(w.ctx))
	}
	w.end()
}

// TestCloseInterrupts closes a backend while a call of another goroutine cannot return: its
// caller's stream is full, or the other rank does not come to connect.
func TestCloseInterrupts(t *testing.T) {
	for _, how := range []string{"full stream", "connecting"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld(t, setup{
				size: 2, timeout: patience, sim: sim.Config{Devices: 2, Kernels: simkernels.All()},
				options: cuda.Options{AllReduce: map[string]string{"full stream": cuda.HostWork, "connecting": cuda.DirectWork}[how]},
			})
			x := w.ranks[0]
			full := &signaling{fullStream{x.caller(0), x}, make(chan struct{}, 1)}
			b, err := x.bucket(0)
			require.NoError(t, err)
			ended := make(chan error, 1)
			call := func() {
				v, err := x.b.AllReduce(cuda.WithStreams(x.ctx, full), []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
				if err == nil {
					err = v.Wait(x.ctx)
				}
				ended <- err
			}
			if how == "full stream" {
				v := must.Get(x.b.AllReduce(cuda.WithStreams(x.ctx), []*tensor.Tensor{b.t}, backend.AllReduceOptions{}))
				require.NoError(t, v.Synchronize(x.caller(0)))
				go call()
				<-full.recording
			} else {
				go call()
				for !x.b.Meeting() {
					time.Sleep(time.Millisecond)
				}
			}
			must.End(t, "Close", func() { require.NoError(t, x.b.Close()) })
			must.End(t, "the call", func() { require.ErrorIs(t, <-ended, work.ErrClosed) })
			require.NoError(t, w.ranks[1].b.Close())
			for _, x := range w.ranks {
				require.NoError(t, x.cpu.Close())
				x.free()
			}
			require.NoError(t, w.m.Close())
		})
	}
}

// signaling is a fullStream that tells when Record is called.
type signaling struct {
	fullStream
	recording chan struct{}
}

func (s *signaling) Record() (driver.Event, error) {
	s.recording <- struct{}{}
	return s.fullStream.Record()
}
