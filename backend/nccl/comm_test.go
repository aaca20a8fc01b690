package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/backend/nccl/internal/ncclsim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestColor compares with CPython: abs(hash((0, 1))) % 2**31 and so on.
func TestColor(t *testing.T) {
	require.Equal(t, 2130503744, nccl.Color([]int{0, 1}))
	require.Equal(t, 2003953581, nccl.Color([]int{0, 1, 2, 3}))
	require.Equal(t, 59908776, nccl.Color([]int{0}))
}

func TestRoots(t *testing.T) {
	require.Equal(t, []int{0}, nccl.Roots(128))
	require.Equal(t, []int{0, 65}, nccl.Roots(129))
	require.Equal(t, []int{0, 100, 200}, nccl.Roots(300))
	require.Equal(t, []int{0, 101, 201}, nccl.Roots(301))
}

// TestKeys has the keys of PyTorch: a counter for the group's communicators, and two ranks for a pair's.
func TestKeys(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	w := newWorld(t, setup{size: 3, torch: true, store: st})
	keys := func() []string {
		all := must.Get(st.ListKeys(w.ctx))
		slices.Sort(all)
		return all
	}
	require.Empty(t, keys(), "a group that is not used writes nothing")
	w.each(func(x *rank) error {
		x.wait(x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{}))
		switch x.r {
		case 1:
			x.wait(x.b.Recv(x.context(), x.alloc(tensor.Float32, 1), 2, backend.P2POptions{}))
		case 2:
			x.wait(x.b.Send(x.context(), x.on(floats(1)), 1, backend.P2POptions{}))
		}
		return nil
	})
	require.Equal(t, []string{"0", "1:2"}, keys())
	for _, k := range keys() {
		require.Len(t, must.Get(st.Get(w.ctx, k)), 128)
	}
	w.end()
}

// TestEager makes communicators with groups: the default one's from an id, the others by splits.
func TestEager(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	var c calls
	w := newWorld(t, setup{size: 3, torch: true, store: st, trace: c.trace, options: nccl.Options{Eager: true}})
	for r := range 3 {
		require.Equal(t, fmt.Sprintf("CommInit %d of 3, 1 ids", r), c.take(r))
	}
	require.Equal(t, []string{"0"}, must.Get(st.ListKeys(w.ctx)))
	ranks := []int{0, 2}
	w.each(func(x *rank) error {
		i := slices.Index(ranks, x.r)
		if i < 0 {
			return x.b.Outside(x.ctx, ranks)
		}
		o := nccl.Options{Eager: true, Driver: x.d}.With(w.lib.API(0))
		sub := must.Get(nccl.New(x.ctx, backend.Options{Store: store.Prefix("sub", st), Rank: i, Size: 2, Group: "sub", Specific: o, Parent: x.b, Ranks: ranks}))
		v := x.on(floats(float32(x.r + 1)))
		x.wait(sub.AllReduce(x.context(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
		require.Equal(t, floats(4).Dump(), x.get(v).Dump())
		if i == 0 { // on the group's communicator
			x.wait(sub.Send(x.context(), v, 1, backend.P2POptions{}))
		} else {
			x.wait(sub.Recv(x.context(), v, 0, backend.P2POptions{}))
		}
		return sub.Close()
	})
	require.Equal(t, "CommSplit color -1 key 1", c.take(1))
	require.Contains(t, c.take(0), fmt.Sprintf("CommSplit color %d key 0; AllReduce", nccl.Color(ranks)))
	require.Contains(t, c.take(2), fmt.Sprintf("CommSplit color %d key 1; AllReduce", nccl.Color(ranks)))
	require.Equal(t, []string{"0"}, must.Get(st.ListKeys(w.ctx)))
	w.end()
}

// TestPartsOfOlderPyTorch: which colors it gives the parts of split_group is not known.
func TestPartsOfOlderPyTorch(t *testing.T) {
	w := newWorld(t, setup{size: 2, torch: true, options: nccl.Options{Eager: true}})
	w.each(func(x *rank) error {
		o := nccl.Options{Eager: true, Driver: x.d}.With(w.lib.API(22705))
		_, err := nccl.New(x.ctx, backend.Options{Size: 1, Group: "sub", Specific: o, Parent: x.b, Ranks: []int{x.r}, Parts: true})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "PyTorch before 2.11, to which NCCL 2.27.5 belongs")
		return nil
	})
	w.end()
}

// TestScalable has more ranks than meet at one root. They share a device of NCCL's stand-in each.
func TestScalable(t *testing.T) {
	const size = 130
	var c calls
	m := must.Get(sim.New(sim.Config{Devices: 64}))
	lib := must.Get(ncclsim.New(m))
	lib.Trace = c.trace
	server := must.Get(tcp.Listen(context.Background(), "127.0.0.1:0", tcp.ServerOptions{}))
	defer server.Close()
	ctx, cancel := context.WithCancel(context.Background())
	var ranks sync.WaitGroup
	errs := make([]error, size)
	drivers := make([]*sim.Driver, size)
	for r := range size {
		drivers[r] = must.Get(m.Process(fmt.Sprint(r)))
	}
	for r := range size {
		ranks.Go(func() {
			st := must.Get(tcp.New(ctx, server.Addr().String(), tcp.Options{}))
			defer st.Close()
			o := nccl.Options{Eager: true, Driver: drivers[r], Device: tensor.Device{Type: tensor.CUDA, Index: r % 64}}.With(lib.API(0))
			_, errs[r] = nccl.New(ctx, backend.Options{Store: st, Rank: r, Size: size, Group: "g", Specific: o})
		})
	}
	ranks.Wait()
	cancel()
	// A device has three ranks: NCCL refuses that, after it has got all ids.
	for _, err := range errs {
		require.ErrorContains(t, err, "Duplicate GPU")
	}
	st := must.Get(tcp.New(context.Background(), server.Addr().String(), tcp.Options{}))
	defer st.Close()
	keys := must.Get(st.ListKeys(context.Background()))
	slices.Sort(keys)
	require.Equal(t, []string{"UniqueNCCLID:0", "UniqueNCCLID:1"}, keys)
	require.Contains(t, c.take(1), "CommInit 129 of 130, 2 ids")
	require.Empty(t, lib.Violations())
	require.NoError(t, m.Close())
}

// pair makes two ranks by hand.
func pair(t *testing.T, f func(r int, lib *ncclsim.Library, o *nccl.Options, bo *backend.Options)) (errs [2]error, end func()) {
	m := must.Get(sim.New(sim.Config{Devices: 2}))
	lib := must.Get(ncclsim.New(m))
	st := store.NewHash()
	fabric := mem.NewFabric()
	var ranks sync.WaitGroup
	var made [2]*nccl.Backend
	for r := range 2 {
		d := must.Get(m.Process(fmt.Sprint(r)))
		ranks.Go(func() {
			o := nccl.Options{Eager: true, Driver: d, Device: tensor.Device{Type: tensor.CUDA, Index: r}, Control: gloo.Options{Fabric: fabric}}.With(lib.API(0))
			bo := backend.Options{Store: st, Rank: r, Size: 2, Group: "g"}
			f(r, lib, &o, &bo)
			bo.Specific = o
			made[r], errs[r] = nccl.New(context.Background(), bo)
		})
	}
	ranks.Wait()
	return errs, func() {
		var ending sync.WaitGroup
		for _, b := range made {
			if b != nil {
				ending.Go(func() { b.Close() })
			}
		}
		ending.Wait()
		lib.Close()
		require.Eventually(t, func() bool { return lib.Open() == 0 }, patience, time.Millisecond)
		require.Empty(t, lib.Violations())
		require.NoError(t, m.Close())
		st.Close()
	}
}

// TestVersions: among ranks of this library the error names both, before NCCL refuses them.
func TestVersions(t *testing.T) {
	errs, end := pair(t, func(r int, _ *ncclsim.Library, o *nccl.Options, bo *backend.Options) { bo.Meeting = alone{} })
	require.NoError(t, errors.Join(errs[:]...))
	end()
	errs, end = pair(t, func(r int, lib *ncclsim.Library, o *nccl.Options, bo *backend.Options) {
		if r == 1 {
			*o = o.With(lib.API(22105))
		}
		bo.Meeting = alone{}
	})
	require.ErrorContains(t, errs[0], "rank 0 has NCCL 2.28.9 (simulated), rank 1 NCCL 2.21.5: all ranks need the same")
	require.ErrorContains(t, errs[1], "rank 1 has NCCL 2.21.5 (simulated), rank 0 NCCL 2.28.9: all ranks need the same")
	end()
}

// TestCancelInit ends the making of a communicator whose other rank does not come.
func TestCancelInit(t *testing.T) {
	w := newWorld(t, setup{size: 2, torch: true})
	x := w.ranks[0]
	for name, make := range map[string]func() (context.Context, func(), time.Duration){
		"cancel": func() (context.Context, func(), time.Duration) {
			ctx, cancel := context.WithCancel(x.context())
			return ctx, cancel, 0
		},
	} {
		ctx, cancel, limit := make()
		t.Run(name, func(t *testing.T) {
			done := must.Get(x.dev.NewStream(driver.StreamOptions{}))
			defer done.Close()
			var ended sync.WaitGroup
			var got *work.Work
			var err error
			ended.Go(func() {
				got, err = x.b.AllReduce(ctx, []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{Timeout: limit})
			})
			require.Eventually(t, func() bool { ok, _ := w.store.Check(w.ctx, "0"); return ok }, patience, time.Millisecond)
			cancel()
			ended.Wait()
			require.NoError(t, err)
			require.ErrorIs(t, got.Err(), work.ErrCanceled)
			require.ErrorContains(t, got.Err(), "all_reduce seq 0 on rank 0")
		})
	}
	w.end()
}

// TestInitTimeout: the operation's time counts for the ranks' meeting too.
func TestInitTimeout(t *testing.T) {
	w := newWorld(t, setup{size: 2, torch: true})
	x := w.ranks[1]
	got := must.Get(x.b.AllReduce(x.context(), []*tensor.Tensor{x.on(floats(1))}, backend.AllReduceOptions{Timeout: 50 * time.Millisecond}))
	require.ErrorIs(t, got.Wait(w.ctx), work.ErrTimeout)
	require.ErrorContains(t, got.Err(), `waiting for the id of rank 0 under key "0"`)
	require.ErrorIs(t, must.Err(x.b.Barrier(w.ctx, backend.BarrierOptions{})), work.ErrTimeout, "later calls say why")
	w.end()
}

// TestLibraryIsMissing names what to do.
func TestLibraryIsMissing(t *testing.T) {
	_, err := nccl.New(context.Background(), backend.Options{Size: 1, Specific: nccl.Options{Library: "/nowhere/libnccl.so.2"}})
	require.ErrorIs(t, err, nccl.ErrNoLibrary)
	require.True(t, strings.HasPrefix(err.Error(), "nccl: NCCL's library cannot be loaded"), err)
}
