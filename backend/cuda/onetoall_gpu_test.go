package cuda_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// tile is how long what tensors are filled with is, over and over: no chunk is.
const tile = 1<<16 + 7

// spreader is a rank with two tensors, on two devices if there are two.
type spreader struct {
	ctx     context.Context
	b       *cuda.Backend
	streams []driver.Stream
	mems    []driver.Memory
	host    driver.HostMemory // two tiles: what goes down and what comes back
	d       driver.Driver
}

func newSpreader(ctx context.Context, d driver.Driver, rank, ranks, room int, st store.Store, host gloo.Options, way string) (_ *spreader, err error) {
	x := &spreader{ctx: ctx, d: d}
	for i := range 2 {
		v, err := d.Device((rank + i) % d.Count())
		if err != nil {
			return nil, err
		}
		s, err := v.NewStream(driver.StreamOptions{Name: fmt.Sprintf("caller %d.%d", rank, i)})
		if err != nil {
			return nil, err
		}
		m, err := v.Alloc(room)
		if err != nil {
			return nil, err
		}
		x.streams, x.mems = append(x.streams, s), append(x.mems, m)
	}
	if x.host, err = d.AllocHost(2 * tile); err != nil {
		return nil, err
	}
	x.b, err = cuda.New(ctx, backend.Options{
		Store: store.Prefix(cmp.Or(way, "any"), st), Rank: rank, Size: ranks, Timeout: patience, Group: cmp.Or(way, "any"),
		Specific: cuda.Options{Driver: d, Broadcast: way, Chunk: 1 << 18, CPUOptions: host},
	})
	return x, err
}

func (x *spreader) close() error {
	var errs []error
	for i := range x.mems {
		errs = append(errs, x.streams[i].Close(), x.mems[i].Close())
	}
	return errors.Join(append(errs, x.host.Close())...)
}

// tiles calls f for the parts of n bytes that are a tile or the rest of one.
func tiles(n int, f func(off, n int) error) error {
	for off := 0; off < n; off += tile {
		if err := f(off, min(tile, n-off)); err != nil {
			return err
		}
	}
	return nil
}

// run broadcasts n bytes that begin at byte at of the memory, from one of the
// root's tensors into memory with other contents.
func (x *spreader) run(root bool, rootRank, rootTensor, at, n int, value byte) (err error) {
	defer must.Catch(&err)
	want := x.host.Bytes()[:tile]
	driver.HostAccess(x.d, "filling", driver.Writes(x.host.Ptr(), tile))
	for i := range want {
		want[i] = byte(i>>8)*31 ^ byte(i) ^ value
	}
	var ts []*tensor.Tensor
	for i, m := range x.mems {
		whole := must.Get(tensor.OnDevice(tensor.Uint8, cuda.OnStream(m, x.streams[i]), m.Len()))
		part, err := whole.Slice(0, at, at+n)
		if err != nil {
			return err
		}
		ts = append(ts, part)
		if root && i == rootTensor {
			err = tiles(n, func(off, k int) error {
				return x.streams[i].Copy(m.Ptr()+driver.Ptr(at+off), x.host.Ptr(), k)
			})
		} else {
			err = x.streams[i].Memset(m.Ptr()+driver.Ptr(at), ^value, n)
		}
		if err != nil {
			return err
		}
	}
	v, err := x.b.Broadcast(x.ctx, ts, backend.BroadcastOptions{Root: rootRank, RootTensor: rootTensor})
	if err != nil {
		return err
	}
	for i, s := range x.streams {
		if err := v.Synchronize(s); err != nil {
			return errors.Join(err, v.Wait(x.ctx))
		}
		err := tiles(n, func(off, k int) error {
			must.Do(s.Copy(x.host.Ptr()+tile, x.mems[i].Ptr()+driver.Ptr(at+off), k))
			e := must.Get(s.Record())
			err := e.Sync(x.ctx)
			e.Release()
			if err != nil {
				return err
			}
			driver.HostAccess(x.d, "comparing", driver.Reads(x.host.Ptr(), 2*tile))
			if got := x.host.Bytes()[tile : tile+k]; !bytes.Equal(got, want[:k]) {
				return fmt.Errorf("bytes from %d of %d in tensor %d are not the root's", off, n, i)
			}
			return nil
		})
		if err != nil {
			return errors.Join(err, v.Wait(x.ctx))
		}
	}
	return v.Wait(x.ctx)
}

// spreadOn broadcasts sizes of bytes in one way between ranks of this process, each
// of which has tensors on two devices.
func spreadOn(t *testing.T, d driver.Driver, way string, ranks int, sizes ...int) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	defer cancel()
	st, f := store.NewHash(), mem.NewFabric()
	defer st.Close()
	xs, errs := make([]*spreader, ranks), make([]error, ranks)
	room := 4
	for _, n := range sizes {
		room = max(room, n+3)
	}
	all := func(do func(r int) error) {
		var wg sync.WaitGroup
		for r := range ranks {
			wg.Go(func() { errs[r] = do(r) })
		}
		wg.Wait()
		for r, err := range errs {
			require.NoError(t, err, "way %q, rank %d of %d", way, r, ranks)
		}
	}
	all(func(r int) (err error) {
		xs[r], err = newSpreader(ctx, d, r, ranks, room, st, join(f), way)
		return err
	})
	all(func(r int) error {
		for i, n := range sizes {
			if err := xs[r].run(r == i%ranks, i%ranks, i%2, i%4, n, byte(17*i+1)); err != nil {
				return fmt.Errorf("%d bytes: %w", n, err)
			}
		}
		return nil
	})
	all(func(r int) error { return xs[r].b.Close() })
	all(func(r int) error { return xs[r].close() })
}

// TestGPUBroadcast broadcasts on GPUs in every way, between as many ranks as there are
// devices and between three.
func TestGPUBroadcast(t *testing.T) {
	d := openGPU(t)
	for _, way := range append(hostWays, cuda.BroadcastDirect) {
		for _, ranks := range []int{max(2, min(d.Count(), 8)), 3} {
			if way == cuda.BroadcastDirect && ranks > d.Count() {
				continue
			}
			spreadOn(t, d, way, ranks, 0, 1, 3, 1000, 1<<18, 1<<20+3, 32<<20+1)
		}
	}
	require.NoError(t, d.Close())
}

// TestGPUF09Beyond2GiB broadcasts 3 GiB between ranks in processes of their own (F-09).
func TestGPUF09Beyond2GiB(t *testing.T) {
	require.NoError(t, openGPU(t).Close())
	runApart(t, "3 GiB", 2, "")
}

// TestSimulatedBroadcastApart is TestGPUF09Beyond2GiB on simulated devices, with less.
func TestSimulatedBroadcastApart(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("simulated devices of several processes are not promised here")
	}
	runApart(t, "3 GiB", 2, t.TempDir())
}

// TestSimulatedBroadcast is TestGPUBroadcast on simulated devices.
func TestSimulatedBroadcast(t *testing.T) {
	for _, way := range append(hostWays, cuda.BroadcastDirect) {
		d := must.Get(sim.Open(sim.Config{Devices: 3, Seed: 1, Kernels: simkernels.All(), NoDelays: true}))
		spreadOn(t, d, way, 3, 0, 1, 3, 1000, 1<<18, 1<<19+3)
		require.NoError(t, d.Close(), "way %q", way)
	}
}
