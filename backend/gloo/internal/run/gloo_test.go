package run_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// over returns the options of a rank that meets the others on f, with one
// mesh for each of interfaces. The first is "/0".
func over(f *mem.Fabric, rank, size, interfaces, workers int) backend.Options {
	return backend.Options{
		Rank: rank, Size: size, Timeout: time.Minute,
		Specific: gloo.Options{
			Interfaces: slices.Repeat([]string{"lo"}, interfaces),
			Fabric:     f,
			Tuning:     gloo.Tuning{Workers: workers},
		},
	}
}

func join(t *testing.T, o backend.Options) *gloo.Backend {
	t.Helper()
	return must.Get(gloo.New(context.Background(), o))
}

// ranks runs f on every rank of a group under virtual time.
func ranks(t *testing.T, f *mem.Fabric, size, interfaces, workers int, do func(t *testing.T, b *gloo.Backend)) {
	t.Helper()
	run.VirtualTime(t, func(t *testing.T) {
		var wg sync.WaitGroup
		for r := range size {
			b := join(t, over(f, r, size, interfaces, workers))
			wg.Go(func() {
				defer func() {
					if t.Failed() {
						b.Abort(errors.New("the test has failed"))
					}
					b.Close()
				}()
				do(t, b)
			})
		}
		wg.Wait()
	})
}

func vec(v ...float32) *tensor.Tensor {
	t, err := tensor.Of(v, len(v))
	if err != nil {
		panic(err)
	}
	return t
}

func list(ts ...*tensor.Tensor) []*tensor.Tensor { return ts }

func wait(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

func barrier(b *gloo.Backend) error {
	return wait(b.Barrier(context.Background(), backend.BarrierOptions{}))
}

func sparse(t *testing.T, rows int, at []int64, v []float32) *tensor.Tensor {
	t.Helper()
	return must.Get(tensor.Sparse(must.Get(tensor.Of(at, 1, len(at))), vec(v...), rows))
}

// TestSlots states the slots of operations as PyTorch ranks use them.
func TestSlots(t *testing.T) {
	ctx := context.Background()
	for _, tc := range []struct {
		name string
		want []uint64 // prefix << 56 | tag << 24, a user's tag as it is
		call func(b *gloo.Backend) error
	}{
		{"all_reduce", []uint64{4 << 56}, func(b *gloo.Backend) error {
			return wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{}))
		}},
		{"all_reduce, sparse", []uint64{2 << 56}, func(b *gloo.Backend) error {
			return wait(b.AllReduce(ctx, list(sparse(t, 3, []int64{1}, []float32{1})), backend.AllReduceOptions{}))
		}},
		{"reduce_scatter", []uint64{4 << 56, 4<<56 | 1<<24}, func(b *gloo.Backend) error {
			return wait(b.ReduceScatter(ctx, vec(0), list(vec(1), vec(2)), backend.ReduceScatterOptions{}))
		}},
		{"broadcast, all_gather", []uint64{2<<56 | 1<<24, 6 << 56}, func(b *gloo.Backend) error {
			if err := wait(b.Broadcast(ctx, list(vec(1)), backend.BroadcastOptions{})); err != nil {
				return err
			}
			return wait(b.AllGather(ctx, list(vec(0), vec(0)), vec(1), backend.AllGatherOptions{}))
		}},
		{"monitored_barrier, barrier", []uint64{7<<56 | 2<<24, 0x80 << 56, 0x80<<56 | 1<<24}, func(b *gloo.Backend) error {
			if err := b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}); err != nil {
				return err
			}
			return barrier(b)
		}},
		{"send", []uint64{9, math.MaxUint32}, func(b *gloo.Backend) error {
			for _, tag := range []uint32{9, math.MaxUint32} {
				post := b.Send
				if b.Rank() == 1 {
					post = b.Recv
				}
				if err := wait(post(ctx, vec(1), 1-b.Rank(), backend.P2POptions{Tag: tag})); err != nil {
					return err
				}
			}
			return nil
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var mu sync.Mutex
			seen := map[uint64]bool{}
			f := mem.NewFabric()
			f.DropIf(func(_ string, _ int, r *transport.Request) bool {
				mu.Lock()
				defer mu.Unlock()
				seen[r.Slot] = true
				return false
			})
			ranks(t, f, 2, 1, 0, func(t *testing.T, b *gloo.Backend) { require.NoError(t, tc.call(b)) })
			var got []uint64
			for s := range seen {
				got = append(got, s)
			}
			slices.Sort(got)
			require.Equal(t, tc.want, got)
		})
	}
}

// TestHostileSparse lets a peer announce more entries than a tensor can have.
func TestHostileSparse(t *testing.T) {
	for _, tc := range []struct {
		name    string
		entries int64
		shape   []int // of which the first dimension is sparse
	}{
		{"negative", -1, []int{3}},
		{"more than there are coordinates", 4, []int{3}},
		{"a product beyond an int64", 1 << 31, []int{10, math.MaxInt / 256}},
		{"enormous", math.MaxInt64, []int{math.MaxInt / 16}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run.VirtualTime(t, func(t *testing.T) {
				f := mem.NewFabric()
				b := join(t, over(f, 0, 2, 1, 0))
				defer b.Close()
				peer := must.Get(f.Join("/0", 1, 2))
				defer peer.Close()

				i := must.Get(tensor.New(tensor.Int64, 1, 0))
				v := must.Get(tensor.New(tensor.Float32, append([]int{0}, tc.shape[1:]...)...))
				x := must.Get(tensor.Sparse(i, v, tc.shape...))
				w := must.Get(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{}))

				var meta [9]int64
				meta[0], meta[8] = int64(tc.shape[0]), tc.entries
				if len(tc.shape) > 1 {
					meta[4] = int64(tc.shape[1])
				}
				packed := must.Get(tensor.Of(meta[:], 9))
				// The two halves of an all-gather's block.
				for _, half := range [][]byte{packed.Bytes()[:36], packed.Bytes()[36:]} {
					in, out := transport.NewRequest(), transport.NewRequest()
					in.Slot, in.Buf = 2<<56, make([]byte, 36)
					out.Slot, out.Buf = 2<<56, half
					peer.Recv(in)
					peer.Send(out)
				}
				err := w.Wait(context.Background())
				require.ErrorIs(t, err, work.ErrMismatch)
				e := must.As[*work.Error](t, err)
				require.Equal(t, 1, e.Peer)
				require.ErrorContains(t, err, fmt.Sprintf("rank 1 announces %d entries", tc.entries))
			})
		})
	}
}

var errBroken = errors.New("no memory")

// breaks is an operator whose all-reduce fails on rank 1, without the wire's having failed.
var breaks = backend.CustomOf("breaks", func(a, b float32) float32 { return a })

func init() {
	err := run.RegisterTestWork(run.TestWork{
		Name: "broken", Device: tensor.CPU, Layout: tensor.Strided, Priority: 1,
		Can: func(_ []*tensor.Tensor, op backend.ReduceOp) error {
			if op != breaks {
				return errors.New("for a test")
			}
			return nil
		},
		New: func(_ []*tensor.Tensor, h run.Host) (func(ctx context.Context) error, error) {
			return func(ctx context.Context) error {
				if h.Rank() == 1 {
					return errBroken
				}
				return h.AllGatherBytes(ctx, make([]byte, 3), make([]byte, 1))
			}, nil
		},
	})
	if err != nil {
		panic(err)
	}
}

// TestALocalFailureEndsTheGroup: the other ranks must not wait for their timeout.
func TestALocalFailureEndsTheGroup(t *testing.T) {
	ranks(t, mem.NewFabric(), 3, 2, 0, func(t *testing.T, b *gloo.Backend) {
		start := time.Now()
		err := wait(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{Op: breaks}))
		require.Less(t, time.Since(start), time.Second)
		if b.Rank() == 1 {
			require.ErrorIs(t, err, errBroken)
		} else {
			require.ErrorIs(t, err, work.ErrAborted)
			e := must.As[*work.Error](t, err)
			require.Equal(t, 1, e.Peer)
		}
	})
}

// TestMonitoredBarrierWithAWrongRank lets a peer say that it is another.
func TestMonitoredBarrierWithAWrongRank(t *testing.T) {
	run.VirtualTime(t, func(t *testing.T) {
		f := mem.NewFabric()
		b, other := join(t, over(f, 0, 3, 1, 0)), join(t, over(f, 2, 3, 1, 0))
		defer b.Close()
		defer other.Close()
		peer := must.Get(f.Join("/0", 1, 3))
		defer peer.Close()
		r := transport.NewRequest()
		r.Slot, r.Buf = run.MonitoredSlot(t.Context(), peer, 0, 0), []byte{2, 0, 0, 0}
		peer.Send(r)
		var wg sync.WaitGroup
		start := time.Now()
		for _, x := range []*gloo.Backend{b, other} {
			wg.Go(func() {
				err := x.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{})
				require.ErrorIs(t, err, work.ErrMismatch)
				e := must.As[*work.Error](t, err)
				require.Equal(t, 1, e.Peer)
			})
		}
		wg.Wait()
		require.Less(t, time.Since(start), time.Second)
	})
}

// TestFaultsReachEveryMesh has operations on both of two meshes when one fails.
func TestFaultsReachEveryMesh(t *testing.T) {
	ranks(t, mem.NewFabric(), 3, 2, 0, func(t *testing.T, b *gloo.Backend) {
		require.NoError(t, barrier(b))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		even := must.Get(b.RecvAnySource(context.Background(), vec(0), backend.P2POptions{Tag: 4}))
		odd := must.Get(b.Recv(ctx, vec(0), (b.Rank()+1)%3, backend.P2POptions{Tag: 5}))
		start := time.Now()
		if b.Rank() == 2 {
			time.Sleep(time.Second)
			cancel()
		}
		for _, w := range []*work.Work{even, odd} {
			err := w.Wait(context.Background())
			require.ErrorIs(t, err, work.ErrCanceled)
			e := must.As[*work.Error](t, err)
			require.Equal(t, 2, e.Peer)
		}
		require.Less(t, time.Since(start), 2*time.Second)
		_, err := b.Barrier(context.Background(), backend.BarrierOptions{})
		require.ErrorIs(t, err, work.ErrCanceled)
	})
}

// TestACancelledOperationInTheQueue cancels one that waits for a worker.
func TestACancelledOperationInTheQueue(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 1, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() == 1 {
			time.Sleep(30 * time.Second)
			require.ErrorIs(t, barrier(b), work.ErrTimeout)
			return
		}
		stuck := must.Get(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{}))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		start := time.Now()
		err := wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{}))
		require.Less(t, time.Since(start), 3*time.Second) // the rank asks the others for one of them
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, work.ErrTimeout)
		require.ErrorIs(t, stuck.Wait(context.Background()), work.ErrTimeout)
	})
}

// TestTheListsOfACallAreCopied changes a list while the operation runs.
func TestTheListsOfACallAreCopied(t *testing.T) {
	ctx := context.Background()
	for name, call := range map[string]func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error){
		"all_reduce": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllReduce(ctx, ts, backend.AllReduceOptions{})
		},
		"all_reduce_coalesced": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllReduceCoalesced(ctx, ts, backend.AllReduceOptions{})
		},
		"broadcast": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, ts, backend.BroadcastOptions{})
		},
		"all_gather": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllGather(ctx, ts, vec(1), backend.AllGatherOptions{})
		},
		"all_gather, unequal": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllGatherV(ctx, ts, vec(1), backend.AllGatherOptions{})
		},
		"all_gather_coalesced": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllGatherCoalesced(ctx, [][]*tensor.Tensor{list(vec(1), vec(1)), list(vec(1), vec(1))}, ts, backend.AllGatherOptions{})
		},
		"gather": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			if b.Rank() != 0 {
				ts = nil
			}
			return b.Gather(ctx, ts, vec(1), backend.GatherOptions{})
		},
		"scatter": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			if b.Rank() != 0 {
				ts = nil
			}
			return b.Scatter(ctx, vec(1), ts, backend.ScatterOptions{})
		},
		"reduce_scatter": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatter(ctx, vec(1), ts, backend.ReduceScatterOptions{})
		},
		"reduce_scatter_tensor_coalesced": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.ReduceScatterTensorCoalesced(ctx, ts, list(vec(1, 1), vec(1, 1)), backend.ReduceScatterOptions{})
		},
		"all_to_all": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllToAll(ctx, ts, list(vec(1), vec(1)), backend.AllToAllOptions{})
		},
		"all_to_all, inputs": func(b *gloo.Backend, ts []*tensor.Tensor) (*work.Work, error) {
			return b.AllToAll(ctx, list(vec(1), vec(1)), ts, backend.AllToAllOptions{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			ranks(t, mem.NewFabric(), 2, 1, 1, func(t *testing.T, b *gloo.Backend) {
				if b.Rank() == 1 {
					time.Sleep(time.Second) // rank 0's operation stays in the queue behind the barrier
				}
				first := must.Get(b.Barrier(ctx, backend.BarrierOptions{}))
				ts := list(vec(1), vec(1))
				w := must.Get(call(b, ts))
				ts[0], ts[1] = nil, nil
				require.NoError(t, first.Wait(ctx))
				require.NoError(t, w.Wait(ctx))
				out := must.Get(w.Result())
				for _, x := range out {
					require.NotNil(t, x)
				}
			})
		})
	}
}

func TestResultOfAllGatherIntoTensorCoalesced(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		out := list(vec(0, 0), vec(0, 0, 0, 0))
		w := must.Get(b.AllGatherIntoTensorCoalesced(context.Background(), out, list(vec(1), vec(2, 3)), backend.AllGatherOptions{}))
		require.NoError(t, w.Wait(context.Background()))
		require.Equal(t, out, must.Get(w.Result()))
	})
}

func TestAGroupOfOne(t *testing.T) {
	ranks(t, mem.NewFabric(), 1, 1, 0, func(t *testing.T, b *gloo.Backend) {
		_, err := b.RecvAnySource(context.Background(), vec(0), backend.P2POptions{})
		require.ErrorIs(t, err, backend.ErrInvalidArgument)
		require.Zero(t, b.Seq())
		require.NoError(t, barrier(b))
	})
}

func TestNegativeTimeoutsMeanNone(t *testing.T) {
	f := mem.NewFabric()
	ranks(t, f, 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		b.SetTimeout(-1)
		if b.Rank() == 1 {
			time.Sleep(time.Second)
		}
		require.NoError(t, barrier(b))
	})
}

// TestBarrierAfterAFastOperation looks for a barrier that ends before an
// earlier operation is seen to have ended.
func TestBarrierAfterAFastOperation(t *testing.T) {
	b := join(t, over(mem.NewFabric(), 0, 1, 1, 0))
	defer b.Close()
	ctx := context.Background()
	for range 20000 {
		first := must.Get(b.Broadcast(ctx, list(vec(1)), backend.BroadcastOptions{}))
		second := must.Get(b.Barrier(ctx, backend.BarrierOptions{}))
		must.Receive(t, "a barrier", second.Done())
		require.True(t, first.IsCompleted())
	}
}

func TestASecondCloseWaitsForTheFirst(t *testing.T) {
	run.VirtualTime(t, func(t *testing.T) {
		leave := make(chan struct{})
		b := join(t, backend.Options{Size: 1, Specific: gloo.Options{Fabric: slowFabric{mem.NewFabric(), leave}}})
		go b.Close()
		synctest.Wait()
		second := make(chan error, 1)
		go func() { second <- b.Close() }()
		synctest.Wait()
		require.Empty(t, second)
		close(leave)
		require.NoError(t, <-second)
	})
}

type slowFabric struct {
	*mem.Fabric
	leave chan struct{}
}

func (f slowFabric) Join(name string, rank, size int) (transport.Mesh, error) {
	m, err := f.Fabric.Join(name, rank, size)
	return slowClose{m, f.leave}, err
}

type slowClose struct {
	transport.Mesh
	leave chan struct{}
}

func (m slowClose) Close() error {
	<-m.leave
	return m.Mesh.Close()
}

func TestAReceiveKnowsItsSource(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() == 1 {
			time.Sleep(time.Second)
			require.NoError(t, wait(b.Send(context.Background(), vec(1), 0, backend.P2POptions{})))
			return
		}
		w := must.Get(b.Recv(context.Background(), vec(0), 1, backend.P2POptions{}))
		src, err := w.SourceRank()
		require.NoError(t, err, "from the start")
		require.Equal(t, 1, src)
		require.NoError(t, w.Wait(context.Background()))
	})
}

// TestSeveralTagsOverThreeMeshes runs operations of several tags, which
// change the mesh in their midst.
func TestSeveralTagsOverThreeMeshes(t *testing.T) {
	ranks(t, mem.NewFabric(), 4, 3, 0, func(t *testing.T, b *gloo.Backend) {
		ctx, r := context.Background(), float32(b.Rank())
		var works []*work.Work
		outs := make([]*tensor.Tensor, 20)
		for i := range outs {
			outs[i] = vec(0)
			w := must.Get(b.ReduceScatter(ctx, outs[i], list(vec(r), vec(r+1), vec(r+2), vec(r+float32(i))), backend.ReduceScatterOptions{}))
			w2 := must.Get(b.Barrier(ctx, backend.BarrierOptions{}))
			works = append(works, w, w2)
		}
		require.NoError(t, work.WaitAll(ctx, works...))
		require.NoError(t, b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}))
		for i, x := range outs {
			v := must.Get(x.Float64At(0))
			add := float64(b.Rank())
			if b.Rank() == 3 {
				add = float64(i)
			}
			require.Equal(t, 6+4*add, v)
		}
	})
}

// TestComplexTensorsAreCutAsRealOnes wants the bits that the parts give as a
// real tensor, because PyTorch hands those to Gloo. With fractions, the bits
// tell where the ring cuts.
func TestComplexTensorsAreCutAsRealOnes(t *testing.T) {
	ctx := context.Background()
	for _, size := range []int{2, 3, 5} {
		ranks(t, mem.NewFabric(), size, 1, 1, func(t *testing.T, b *gloo.Backend) {
			for _, n := range []int{1, 7, 1031} {
				parts := make([]float32, 2*n)
				numbers := make([]complex64, n)
				for i := range parts {
					parts[i] = float32((i*7+b.Rank()*13)%17-8) / 7
				}
				for i := range numbers {
					numbers[i] = complex(parts[2*i], parts[2*i+1])
				}
				whole := must.Get(tensor.Of(numbers, n))
				want := must.Get(tensor.Of(parts, 2*n))
				require.NoError(t, wait(b.AllReduce(ctx, list(want), backend.AllReduceOptions{})))
				require.NoError(t, wait(b.AllReduce(ctx, list(whole), backend.AllReduceOptions{})))
				require.Equal(t, want.Bytes(), whole.Bytes(), "%d numbers on %d ranks", n, size)
			}
		})
	}
}
