package run_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/work"
)

// circleLimit is the timeout of calls that wait for each other.
const circleLimit = 15 * time.Second

// step is what a rank does that waits: it returns how that ends.
type step func(b *gloo.Backend) error

func sendTo(peer int) step {
	return func(b *gloo.Backend) error {
		return wait(b.Send(context.Background(), zeros(1<<20), peer, backend.P2POptions{Timeout: circleLimit}))
	}
}

func recvFrom(peer int) step {
	return func(b *gloo.Backend) error {
		return wait(b.Recv(context.Background(), zeros(1<<20), peer, backend.P2POptions{Timeout: circleLimit}))
	}
}

func allReduce(b *gloo.Backend) error {
	return wait(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{Timeout: circleLimit}))
}

func barrierOf(b *gloo.Backend) error {
	return wait(b.Barrier(context.Background(), backend.BarrierOptions{Timeout: circleLimit}))
}

// bothWays sends to a rank, then receives from another one, without a wait between.
func bothWays(to, from int) step {
	return func(b *gloo.Backend) (err error) {
		defer must.Catch(&err)
		w := must.Get(b.Send(context.Background(), zeros(1<<20), to, backend.P2POptions{Timeout: circleLimit}))
		must.Do(recvFrom(from)(b))
		return w.Wait(context.Background())
	}
}

// circles are ranks that wait for each other.
var circles = map[string]struct {
	ranks []step
	want  string
}{
	"two send":                 {[]step{sendTo(1), sendTo(0)}, "ranks 0, 1 wait for each other: each is in send to the next"},
	"three send":               {[]step{sendTo(1), sendTo(2), sendTo(0)}, "ranks 0, 1, 2 wait for each other: each is in send to the next"},
	"three send the other way": {[]step{sendTo(2), sendTo(0), sendTo(1)}, "ranks 0, 2, 1 wait for each other: each is in send to the next"},
	"five send":                {[]step{sendTo(1), sendTo(2), sendTo(3), sendTo(4), sendTo(0)}, "ranks 0, 1, 2, 3, 4 wait for each other: each is in send to the next"},
	"two receive":              {[]step{recvFrom(1), recvFrom(0)}, "ranks 0, 1 wait for each other: each is in recv from the next"},
	"four receive":             {[]step{recvFrom(1), recvFrom(2), recvFrom(3), recvFrom(0)}, "ranks 0, 1, 2, 3 wait for each other: each is in recv from the next"},
	"one receives": {
		[]step{sendTo(1), recvFrom(2), sendTo(0)},
		"ranks 0, 1, 2 wait for each other: rank 0 is in send to rank 1, rank 1 is in recv from rank 2, rank 2 is in send to rank 0",
	},
	"others wait": {
		[]step{recvFrom(1), sendTo(1 + 1), sendTo(3), sendTo(1), recvFrom(3)},
		"ranks 1, 2, 3 wait for each other: each is in send to the next",
	},
	"a collective": {
		[]step{allReduce, recvFrom(0)},
		"ranks 0, 1 wait for each other: rank 0 is in all_reduce, rank 1 is in recv from rank 0",
	},
	"a barrier": {
		[]step{sendTo(1), barrierOf},
		"ranks 0, 1 wait for each other: rank 0 is in send to rank 1, rank 1 is in barrier",
	},
	"a collective of three": {
		[]step{allReduce, recvFrom(2), recvFrom(0)},
		"wait for each other: rank 0 is in all_reduce, ",
	},
	"messages both ways": {
		[]step{bothWays(1, 2), bothWays(2, 0), sendTo(1)},
		"ranks 1, 2 wait for each other: each is in send to the next",
	},
}

func checkCircle(t *testing.T, want string, errs []error) {
	t.Helper()
	for r, err := range errs {
		require.ErrorIs(t, err, work.ErrTimeout, "rank %d", r)
		e := must.As[*work.Error](t, err)
		require.Equal(t, -1, e.Peer, "rank %d: %v", r, err)
		require.ErrorContains(t, err, want, "rank %d", r)
	}
}

// TestCircle: ranks that wait for each other are told so, and nobody is blamed.
func TestCircle(t *testing.T) {
	for name, c := range circles {
		t.Run(name, func(t *testing.T) {
			errs := make([]error, len(c.ranks))
			ranks(t, mem.NewFabric(), len(c.ranks), 1, 0, func(t *testing.T, b *gloo.Backend) {
				errs[b.Rank()] = c.ranks[b.Rank()](b)
			})
			checkCircle(t, c.want, errs)
		})
	}
}

// TestCircleOnEveryWire has the same in real time, where the wires wait side by side. Only make nightly has all circles.
func TestCircleOnEveryWire(t *testing.T) {
	some := []string{"three send", "a collective of three"}[:testsize.Of(1, 2, 2)]
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Parallel()
		for name, c := range circles {
			if !slices.Contains(some, name) && !testsize.Long() {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				bs := connected(t, run.GroupTimeout, same(wire, len(c.ranks))...)
				errs := make([]error, len(bs))
				var wg sync.WaitGroup
				for r, b := range bs {
					wg.Go(func() { errs[r] = c.ranks[r](b) })
				}
				run.Finish(t, "ranks that wait for each other", &wg)
				for _, err := range errs {
					if err != nil && tooBusy(t, err.Error()) {
						return
					}
				}
				checkCircle(t, c.want, errs)
			})
		}
	})
}

// A rank whose memory another one has ended blames nobody before that one's reason has had time to come. It
// waits for nobody any more, and so sees no circle.
func TestNoBlameBeforeTheReason(t *testing.T) {
	onLinux(t)
	for _, wire := range []gloo.Wire{gloo.WireNative, onHosts} {
		t.Run(string(wire), func(t *testing.T) {
			bs := connected(t, run.GroupTimeout, same(wire, 4)...)
			bs[0].AbortMemory()
			require.Nil(t, bs[1].Blame(0, time.Hour))
			f := bs[1].Blame(0, -time.Hour) // no reason comes
			require.NotNil(t, f)
			require.Equal(t, 0, f.Rank)
		})
	}
}
