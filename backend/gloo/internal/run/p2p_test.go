package run_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	gloowire "github.com/c10d-go/c10d/internal/transport/wire"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onEveryWire runs a test over sockets as Gloo does, over our own, in memory, and in groups that
// have both.
func onEveryWire(t *testing.T, do func(t *testing.T, wire gloo.Wire)) {
	for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP, gloo.WireNative, onHosts, onOtherHosts} {
		t.Run(string(wire), func(t *testing.T) {
			if wire != gloo.WireGloo && wire != gloo.WireTCP {
				onLinux(t)
			}
			do(t, wire)
		})
	}
}

func same(wire gloo.Wire, n int) []gloo.Wire {
	ws := make([]gloo.Wire, n)
	for i := range ws {
		ws[i] = wire
	}
	return ws
}

// TestMessagesIntoViews receives into tensors that are not contiguous, and bools.
func TestMessagesIntoViews(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, run.GroupTimeout, same(wire, 2)...)
		x := must.Get(tensor.Of([]float32{1, 2, 3, 4, 5, 6}, 2, 3))
		m := must.Get(x.Transpose(0, 1))
		s := must.Get(bs[0].Send(context.Background(), vec(10, 20, 30, 40, 50, 60), 1, backend.P2POptions{}))
		w := must.Get(bs[1].RecvAnySource(context.Background(), m, backend.P2POptions{}))
		require.NoError(t, w.Wait(context.Background()))
		require.NoError(t, s.Wait(context.Background()))
		require.Equal(t, vec(10, 30, 50, 20, 40, 60).Bytes(), x.Bytes())
		require.Zero(t, must.Get(w.SourceRank()))

		dirty := must.Get(tensor.Of([]uint8{0, 1, 2, 255}, 4))
		clean := must.Get(tensor.New(tensor.Bool, 4))
		s = must.Get(bs[0].Send(context.Background(), dirty, 1, backend.P2POptions{}))
		require.NoError(t, wait(bs[1].Recv(context.Background(), clean, 0, backend.P2POptions{})))
		require.NoError(t, s.Wait(context.Background()))
		require.Equal(t, []byte{0, 1, 1, 1}, clean.Bytes())
	})
}

// TestFaultsOfMessages ends messages in every way, waited for and not, and wants the
// same errors on every wire.
func TestFaultsOfMessages(t *testing.T) {
	big := func() *tensor.Tensor {
		return must.Get(tensor.New(tensor.Float32, 1<<20))
	}
	for _, tc := range []struct {
		name string
		is   error
		peer int
		text string
		// Rank 0 receives from rank 1, rank 2 sends to it. This is what rank 1 does,
		// and cancel ends the context of rank 0.
		run func(b *gloo.Backend, cancel func(error))
	}{
		{"timeout", work.ErrTimeout, 1, "did not send or receive what was expected", func(*gloo.Backend, func(error)) {}},
		{"cancelled", work.ErrCanceled, 0, "enough", func(_ *gloo.Backend, cancel func(error)) {
			time.AfterFunc(10*time.Millisecond, func() { cancel(errors.New("enough")) })
		}},
		{"aborted", work.ErrAborted, 1, "aborted the group", func(b *gloo.Backend, _ func(error)) { b.Abort(errors.New("of no use")) }},
		{"left", work.ErrPeerLeft, 1, "left the group", func(b *gloo.Backend, _ func(error)) { assert.NoError(t, b.Close()) }},
		{"another size", work.ErrMismatch, 1, "ranks disagree on", func(b *gloo.Backend, _ func(error)) {
			w, err := b.Send(context.Background(), vec(1), 0, backend.P2POptions{})
			if assert.NoError(t, err) {
				w.Wait(context.Background())
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
				t.Parallel()
				for _, helps := range []bool{true, false} {
					t.Run(fmt.Sprintf("helps %v", helps), func(t *testing.T) {
						t.Parallel()
						bs := connected(t, run.GroupTimeout, same(wire, 3)...)
						ctx, cancel := context.WithCancelCause(context.Background())
						defer cancel(nil)
						o := backend.P2POptions{}
						if tc.is == work.ErrTimeout {
							o.Timeout = 2 * time.Second
						}
						x := big()
						before := bytes.Repeat([]byte{0xEE}, len(x.Bytes()))
						copy(x.Bytes(), before)
						s, err := bs[2].Send(context.Background(), big(), 1, backend.P2POptions{Timeout: run.GroupTimeout})
						require.NoError(t, err)
						w := must.Get(bs[0].Recv(ctx, x, 1, o))
						go func() { <-w.Done() }()
						tc.run(bs[1], cancel)
						end := func(w *work.Work) error {
							if helps {
								return w.Wait(context.Background())
							}
							must.Receive(t, "a message", w.Done())
							return w.Err()
						}
						err = end(w)
						require.ErrorIs(t, err, tc.is)
						e := must.As[*work.Error](t, err)
						settled := wire == gloo.WireNative || wire == onHosts || tc.is != work.ErrMismatch // else whoever notices first
						if settled && !tooBusy(t, err.Error()) {
							require.Equal(t, tc.peer, e.Peer, "%v", err)
							require.ErrorContains(t, err, tc.text)
						}
						require.Error(t, end(s), "rank 2 hears of it")
						require.True(t, bytes.Equal(before, x.Bytes()), "bytes were written")
						_, err = bs[0].Send(context.Background(), x, 1, backend.P2POptions{})
						require.Error(t, err, "the group has ended")
					})
				}
			})
		})
	}
}

// TestShutdownWaitsForMessages: Shutdown of a rank ends once its messages have.
func TestShutdownWaitsForMessages(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, run.GroupTimeout, same(wire, 2)...)
		const n = 1 << 20
		x := must.Get(tensor.New(tensor.Float32, n))
		s := must.Get(bs[0].Send(context.Background(), x, 1, backend.P2POptions{}))
		closed := make(chan error)
		go func() { closed <- bs[0].Shutdown(context.Background()) }()
		y := must.Get(tensor.New(tensor.Float32, n))
		require.NoError(t, wait(bs[1].Recv(context.Background(), y, 0, backend.P2POptions{})))
		require.NoError(t, must.Receive(t, "Close of rank 0", closed))
		require.True(t, s.IsSuccess())
	})
}

// TestMessagesAllocateTheirWork and nothing else, in memory.
func TestMessagesAllocateTheirWork(t *testing.T) {
	onLinux(t)
	for _, wires := range [][]gloo.Wire{same(gloo.WireNative, 2), same(onHosts, 3)} {
		testMessagesAllocate(t, connected(t, run.GroupTimeout, wires...)[:2])
	}
}

func testMessagesAllocate(t *testing.T, bs []*gloo.Backend) {
	ctx := context.Background()
	for _, n := range []int{1, 64 << 10} {
		const runs = 300
		var out, in [2]*tensor.Tensor
		for r := range bs {
			out[r] = must.Get(tensor.New(tensor.Uint8, n))
			in[r] = must.Get(tensor.New(tensor.Uint8, n))
		}
		pingPong := func(b *gloo.Backend) {
			r := b.Rank()
			s, err := b.Send(ctx, out[r], 1-r, backend.P2POptions{})
			if err == nil {
				err = errors.Join(wait(b.Recv(ctx, in[r], 1-r, backend.P2POptions{})), s.Wait(ctx))
			}
			if err != nil {
				panic(err)
			}
		}
		other := make(chan struct{})
		go func() {
			defer close(other)
			for range runs + 1 {
				pingPong(bs[1])
			}
		}()
		// Four works a round; now and then a watcher when the machine is busy.
		require.Less(t, testing.AllocsPerRun(runs, func() { pingPong(bs[0]) }), 5.5)
		must.Receive(t, "rank 1", other)
	}
}

// TestMonitoredBarrierBesideMessages: messages of the program with the tags that PyTorch's monitored
// barrier takes, 0 and 1 in a new group, and that are under way meanwhile.
func TestMonitoredBarrierBesideMessages(t *testing.T) {
	ctx := context.Background()
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		const size = 3
		bs := connected(t, time.Minute, same(wire, size)...)
		var wg sync.WaitGroup
		for r, b := range bs {
			wg.Go(func() {
				var sent []*work.Work
				for peer := range size {
					for tag := range uint32(2) {
						if peer != r {
							w, err := b.Send(ctx, vec(float32(10*r+peer), float32(tag)), peer, backend.P2POptions{Tag: tag})
							assert.NoError(t, err)
							sent = append(sent, w)
						}
					}
				}
				assert.NoError(t, b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}))
				for peer := range size {
					for tag := range uint32(2) {
						if peer != r {
							x := vec(0, 0)
							assert.NoError(t, wait(b.Recv(ctx, x, peer, backend.P2POptions{Tag: tag})))
							assert.Equal(t, vec(float32(10*peer+r), float32(tag)).Bytes(), x.Bytes())
						}
					}
				}
				assert.NoError(t, work.WaitAll(ctx, sent...))
			})
		}
		must.End(t, "a rank", wg.Wait)
	})
}

// TestMonitoredBarrierWithPyTorch uses the slots that PyTorch does with peers that send no HELLO, also
// where those have sent nothing when the barrier begins.
func TestMonitoredBarrierWithPyTorch(t *testing.T) {
	m := gloowire.New(0, 2, gloowire.Options{})
	defer m.Close()
	near, far := net.Pipe()
	defer far.Close()
	require.NoError(t, m.Attach(1, near))
	go io.Copy(io.Discard, far)
	slot := make(chan uint64)
	go func() { slot <- run.MonitoredSlot(t.Context(), m, 6, 1) }()
	ready := make([]byte, 48) // SEND_READY of 4 bytes on slot 6
	ready[0], ready[8], ready[16], ready[32] = 48, 2, 6, 4
	must.Get(far.Write(ready))
	require.EqualValues(t, 6, <-slot)

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	silent := gloowire.New(0, 2, gloowire.Options{})
	defer silent.Close()
	require.EqualValues(t, 6, run.MonitoredSlot(ended, silent, 6, 1), "nobody knows")
}
