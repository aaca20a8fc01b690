package registered_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/pool"
)

// rank is a rank of a test.
type rank struct {
	v driver.Device
	d driver.Driver
	r *registered.Registry
}

// ranks makes the registries of some ranks, in processes of their own or in one.
func ranks(t *testing.T, n int, apart bool) (all []*rank) {
	t.Helper()
	m, err := sim.New(sim.Config{Devices: n, Seed: uint64(n), Kernels: simkernels.All()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	var pages []*region.Region
	var windows []*window.Window
	for i := range n {
		x := &rank{}
		if i > 0 && !apart {
			x.d = all[0].d
		} else {
			x.d = must.Get(m.Process(fmt.Sprint("process ", i)))
			t.Cleanup(func() { require.NoError(t, x.d.Close()) })
		}
		x.v = must.Get(x.d.Device(i))
		w, err := window.New(t.Context(), window.Options{Driver: x.d, Device: x.v, Rank: i, Ranks: n, Channels: 1, Depth: 8})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		windows = append(windows, w)
		page := must.Get(region.New(registered.Bytes))
		t.Cleanup(func() { require.NoError(t, page.Leave()) })
		pages = append(pages, page)
		all = append(all, x)
	}
	connect(t, windows)
	for i, x := range all {
		x.r = must.Get(registered.New(windows[i], pages, 0))
	}
	// The windows free their memory when all have let go of it.
	t.Cleanup(func() {
		for i, x := range all {
			require.NoError(t, errors.Join(x.r.Close(), windows[i].Detach()))
		}
	})
	return all
}

// connect connects windows with each other.
func connect(t *testing.T, windows []*window.Window) {
	t.Helper()
	var mu sync.Mutex
	met := sync.NewCond(&mu)
	var rounds [][][]byte
	var wait sync.WaitGroup
	errs := make([]error, len(windows))
	for i, w := range windows {
		round := 0
		wait.Go(func() {
			reason, err := w.Connect(t.Context(), func(why error, mine []byte) (error, [][]byte, error) {
				mu.Lock()
				defer mu.Unlock()
				if len(rounds) == round {
					rounds = append(rounds, make([][]byte, len(windows)))
				}
				rounds[round][i] = append([]byte{}, mine...)
				met.Broadcast()
				for slices.ContainsFunc(rounds[round], func(b []byte) bool { return b == nil }) {
					met.Wait()
				}
				round++
				return why, slices.Clone(rounds[round-1]), nil
			})
			errs[i] = cmp.Or(reason, err)
		})
	}
	wait.Wait()
	require.NoError(t, errors.Join(errs...))
}

// look has ranks look until what they have begun is done.
func look(all ...*rank) {
	for quiet := 0; quiet < 5; quiet++ { // a rank may answer what another one has done
		for _, x := range all {
			if x.r.Look(); x.r.Mapping() {
				quiet = 0
				time.Sleep(100 * time.Microsecond)
			}
		}
	}
}

func alloc(t *testing.T, x *rank) driver.Memory {
	t.Helper()
	m := must.Get(x.v.Alloc(1 << 12))
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// TestUse holds that memory is used when all who are to write it have mapped it, and not before.
func TestUse(t *testing.T) {
	for _, apart := range []bool{false, true} {
		all := ranks(t, 3, apart)
		m := alloc(t, all[0])
		use := func(by int) int { return all[0].r.Use(m, by, false).Region }
		require.Zero(t, use(registered.Everyone), "nobody has seen it")
		look(all[1])
		require.NotZero(t, use(1))
		require.Zero(t, use(2))
		require.Zero(t, use(registered.Everyone), "rank 2 has not mapped it")
		look(all[2])
		to := all[0].r.Use(m, registered.Everyone, false)
		require.Equal(t, 1, to.Region)
		require.Equal(t, m.Ptr(), to.At)

		part := must.Get(all[0].v.Borrow(m.Ptr()+256, 256))
		require.Zero(t, all[0].r.Use(part, 1, false).Region)
		look(all...)
		require.Equal(t, 2, all[0].r.Use(part, 1, false).Region, "a part of memory is memory")
		regions, bytes := all[0].r.Mapped()
		require.Equal(t, 2, regions)
		require.EqualValues(t, 1<<12+256, bytes)
	}
}

// others has a test's operations be under way: the caller's own, and another one.
func others(under bool) {
	if under {
		pool.Underway.Add(2)
	} else {
		pool.Underway.Add(-2)
	}
}

// TestFreed: freed memory is withdrawn. Its entry is used again when the others have let go of it. They do
// not while other operations are under way.
func TestFreed(t *testing.T) {
	all := ranks(t, 2, true)
	pool.Underway.Add(1) // the caller's own operation
	defer pool.Underway.Add(-1)
	var held []driver.Memory
	for range window.MostRegions {
		m := alloc(t, all[0])
		held = append(held, m)
		require.Zero(t, all[0].r.Use(m, 1, false).Region)
	}
	look(all...)
	for i, m := range held {
		require.Equal(t, i+1, all[0].r.Use(m, 1, false).Region)
	}
	mapped := func() int {
		n, _ := all[0].r.Mapped()
		return n
	}
	require.NoError(t, held[3].Close())
	next := alloc(t, all[0])
	use := func() int { return all[0].r.Use(next, 1, false).Region }
	others(true)
	look(all...)
	require.Zero(t, use())
	require.Equal(t, window.MostRegions, mapped(), "a kernel may have told of it")
	others(false)
	look(all[0])
	require.Equal(t, window.MostRegions-1, mapped(), "it is withdrawn without a call that needs its entry")
	require.Zero(t, use())
	others(true)
	look(all...)
	require.Zero(t, use())
	look(all...)
	require.Zero(t, use(), "rank 1 still has the old memory")
	others(false)
	look(all...)
	require.Zero(t, use(), "it is posted now")
	look(all...)
	require.Equal(t, 4, use())
}

// TestOldest: the memory that has gone unused for longest makes room for other memory. It does not if a
// graph has it, if operations are under way, or if it was used lately.
func TestOldest(t *testing.T) {
	all := ranks(t, 2, false)
	pool.Underway.Add(1) // the caller's own operation
	defer pool.Underway.Add(-1)
	var held []driver.Memory
	for range window.MostRegions {
		held = append(held, alloc(t, all[0]))
	}
	for _, m := range held {
		all[0].r.Use(m, 1, false)
	}
	look(all...)
	require.NotZero(t, all[0].r.Use(held[0], 1, true).Region, "a graph has it")
	next := alloc(t, all[0])
	use := func() int { return all[0].r.Use(next, 1, false).Region }
	keep := func() {
		for _, m := range slices.Concat(held[1:2], held[3:]) {
			require.NotZero(t, all[0].r.Use(m, 1, false).Region)
		}
	}
	require.Zero(t, use())
	look(all...)
	require.NotZero(t, all[0].r.Use(held[2], 1, false).Region, "it has been used lately")
	others(true)
	for range registered.RestCalls {
		keep()
		require.Zero(t, use())
	}
	look(all...)
	require.NotZero(t, all[0].r.Use(held[2], 1, false).Region)
	others(false)
	for range registered.RestCalls {
		keep()
		require.Zero(t, use())
	}
	look(all...)
	require.Zero(t, use(), "it is posted now")
	look(all...)
	require.Equal(t, 3, use())
	keep()
	require.NotZero(t, all[0].r.Use(held[0], 1, false).Region)
	// The next one has to wait, however long it has been unused.
	require.Zero(t, all[0].r.Use(held[2], 1, false).Region)
	look(all...)
	keep()
}
