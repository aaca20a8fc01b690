package gloo_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	gloowire "github.com/c10d-go/c10d/internal/transport/wire"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// onEveryWire runs a test over sockets as Gloo does, over our own, in memory, and in groups that
// have both.
func onEveryWire(t *testing.T, run func(t *testing.T, wire gloo.Wire)) {
	for _, wire := range []gloo.Wire{gloo.WireGloo, gloo.WireTCP, gloo.WireNative, onHosts, onOtherHosts} {
		t.Run(string(wire), func(t *testing.T) {
			if wire != gloo.WireGloo && wire != gloo.WireTCP {
				onLinux(t)
			}
			run(t, wire)
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

// TestMessages exchanges random messages between all pairs, beside collectives,
// waited for in any order, from few goroutines and from many.
func TestMessages(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		const size, rounds = 3, 25
		bs := connected(t, gloo.GroupTimeout, same(wire, size)...)
		lengths := func(from, to int) []int {
			rng := rand.New(rand.NewPCG(seed, uint64(from*size+to)))
			ns := make([]int, rounds)
			for i := range ns {
				ns[i] = rng.IntN([]int{1, 50, 10 << 10, 1 << 20}[rng.IntN(4)])
			}
			return ns
		}
		content := func(from, to, i, n int) *tensor.Tensor {
			x, err := tensor.New(tensor.Uint8, n)
			require.NoError(t, err)
			for j, b := 0, x.Bytes(); j < n; j++ {
				b[j] = byte(from + 3*to + 5*i + 7*j)
			}
			return x
		}
		var wg sync.WaitGroup
		for r, b := range bs {
			wg.Go(func() {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				rng := rand.New(rand.NewPCG(seed, uint64(r)))
				type receive struct {
					w         *work.Work
					got, want *tensor.Tensor
				}
				var works []*work.Work
				var recvs []receive
				note := func(w *work.Work, err error) *work.Work {
					if assert.NoError(t, err) {
						works = append(works, w)
					}
					return w
				}
				for i := range rounds {
					for peer := range size {
						if peer == r {
							continue
						}
						c := context.Background()
						if i%3 == 0 {
							c = ctx
						}
						send := func() {
							note(b.Send(c, content(r, peer, i, lengths(r, peer)[i]), peer, backend.P2POptions{Tag: uint32(i % 2)}))
						}
						if i%2 == 0 {
							send()
						}
						n := lengths(peer, r)[i]
						got := content(0, 0, 0, n)
						recvs = append(recvs, receive{note(b.Recv(c, got, peer, backend.P2POptions{Tag: uint32(i % 2)})), got, content(peer, r, i, n)})
						if i%2 != 0 {
							send()
						}
					}
					if i%5 == 4 { // while messages are under way that nobody waits for
						x := vec(1)
						assert.NoError(t, wait(b.AllReduce(ctx, list(x), backend.AllReduceOptions{})))
						assert.Equal(t, vec(size).Bytes(), x.Bytes())
					}
					if i%4 == 3 {
						rng.Shuffle(len(works), func(i, j int) { works[i], works[j] = works[j], works[i] })
						var many sync.WaitGroup
						for _, w := range works {
							if i%8 == 3 {
								many.Go(func() { assert.NoError(t, w.Wait(ctx)) })
							} else {
								assert.NoError(t, w.Wait(context.Background()))
							}
						}
						many.Wait()
						works = works[:0]
					}
				}
				for _, w := range works {
					<-w.Done() // nobody helps
					assert.NoError(t, w.Err())
				}
				for i, m := range recvs {
					assert.True(t, bytes.Equal(m.want.Bytes(), m.got.Bytes()), "rank %d, message %d", r, i)
				}
			})
		}
		gloo.Finish(t, "all ranks", &wg)
	})
}

// TestMessagesIntoViews receives into tensors that are not contiguous, and bools.
func TestMessagesIntoViews(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, gloo.GroupTimeout, same(wire, 2)...)
		x, err := tensor.Of([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
		require.NoError(t, err)
		m, err := x.Transpose(0, 1)
		require.NoError(t, err)
		s, err := bs[0].Send(context.Background(), vec(10, 20, 30, 40, 50, 60), 1, backend.P2POptions{})
		require.NoError(t, err)
		w, err := bs[1].RecvAnySource(context.Background(), m, backend.P2POptions{})
		require.NoError(t, err)
		require.NoError(t, w.Wait(context.Background()))
		require.NoError(t, s.Wait(context.Background()))
		require.Equal(t, vec(10, 30, 50, 20, 40, 60).Bytes(), x.Bytes())
		from, err := w.SourceRank()
		require.NoError(t, err)
		require.Zero(t, from)

		dirty, err := tensor.Of([]uint8{0, 1, 2, 255}, 4)
		require.NoError(t, err)
		clean, err := tensor.New(tensor.Bool, 4)
		require.NoError(t, err)
		s, err = bs[0].Send(context.Background(), dirty, 1, backend.P2POptions{})
		require.NoError(t, err)
		require.NoError(t, wait(bs[1].Recv(context.Background(), clean, 0, backend.P2POptions{})))
		require.NoError(t, s.Wait(context.Background()))
		require.Equal(t, []byte{0, 1, 1, 1}, clean.Bytes())
	})
}

// TestFaultsOfMessages ends messages in every way, waited for and not, and wants the
// same errors on every wire.
func TestFaultsOfMessages(t *testing.T) {
	big := func() *tensor.Tensor {
		x, err := tensor.New(tensor.Float32, 1<<20)
		require.NoError(t, err)
		return x
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
						bs := connected(t, gloo.GroupTimeout, same(wire, 3)...)
						ctx, cancel := context.WithCancelCause(context.Background())
						defer cancel(nil)
						o := backend.P2POptions{}
						if tc.is == work.ErrTimeout {
							o.Timeout = 2 * time.Second
						}
						x := big()
						before := bytes.Repeat([]byte{0xEE}, len(x.Bytes()))
						copy(x.Bytes(), before)
						s, err := bs[2].Send(context.Background(), big(), 1, backend.P2POptions{Timeout: gloo.GroupTimeout})
						require.NoError(t, err)
						w, err := bs[0].Recv(ctx, x, 1, o)
						require.NoError(t, err)
						go func() { <-w.Done() }()
						tc.run(bs[1], cancel)
						end := func(w *work.Work) error {
							if helps {
								return w.Wait(context.Background())
							}
							gloo.Await(t, "a message", w.Done())
							return w.Err()
						}
						err = end(w)
						require.ErrorIs(t, err, tc.is)
						var e *work.Error
						require.ErrorAs(t, err, &e)
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
		bs := connected(t, gloo.GroupTimeout, same(wire, 2)...)
		const n = 1 << 20
		x, err := tensor.New(tensor.Float32, n)
		require.NoError(t, err)
		s, err := bs[0].Send(context.Background(), x, 1, backend.P2POptions{})
		require.NoError(t, err)
		closed := make(chan error)
		go func() { closed <- bs[0].Shutdown(context.Background()) }()
		y, err := tensor.New(tensor.Float32, n)
		require.NoError(t, err)
		require.NoError(t, wait(bs[1].Recv(context.Background(), y, 0, backend.P2POptions{})))
		require.NoError(t, gloo.Await(t, "Close of rank 0", closed))
		require.True(t, s.IsSuccess())
	})
}

// TestMessagesAllocateTheirWork and nothing else, in memory.
func TestMessagesAllocateTheirWork(t *testing.T) {
	onLinux(t)
	for _, wires := range [][]gloo.Wire{same(gloo.WireNative, 2), same(onHosts, 3)} {
		testMessagesAllocate(t, connected(t, gloo.GroupTimeout, wires...)[:2])
	}
}

func testMessagesAllocate(t *testing.T, bs []*gloo.Backend) {
	ctx := context.Background()
	for _, n := range []int{1, 64 << 10} {
		const runs = 300
		var out, in [2]*tensor.Tensor
		for r := range bs {
			var err error
			out[r], err = tensor.New(tensor.Uint8, n)
			require.NoError(t, err)
			in[r], err = tensor.New(tensor.Uint8, n)
			require.NoError(t, err)
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
		gloo.Await(t, "rank 1", other)
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
		inTime(t, "a rank", wg.Wait)
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
	go func() { slot <- gloo.MonitoredSlot(t.Context(), m, 6, 1) }()
	ready := make([]byte, 48) // SEND_READY of 4 bytes on slot 6
	ready[0], ready[8], ready[16], ready[32] = 48, 2, 6, 4
	_, err := far.Write(ready)
	require.NoError(t, err)
	require.EqualValues(t, 6, <-slot)

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	silent := gloowire.New(0, 2, gloowire.Options{})
	defer silent.Close()
	require.EqualValues(t, 6, gloo.MonitoredSlot(ended, silent, 6, 1), "nobody knows")
}
