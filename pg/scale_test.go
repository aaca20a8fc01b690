package pg_test

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// TestThousandRanks holds what a rank of a large job costs: goroutines, memory and calls to the store. The ranks of one
// process make groups and sub-groups, run collectives, lose a rank and go on in the next epoch. Times are logged only.
func TestThousandRanks(t *testing.T) {
	const (
		part = 25 // the size of a sub-group
		dead = 5
	)
	size := testsize.Of(100, 1000, 1000)
	j := pgtest.NewJob(size)
	defer j.Close()
	var calls atomic.Int64 // of all ranks to their store
	groups, parts := make([]*pg.ProcessGroup, size), make([]*pg.ProcessGroup, size)
	ctx, begun := t.Context(), time.Now()
	goroutines, heap := runtime.NumGoroutine(), heapInUse()

	// each calls f for every rank at once, and holds what each of them has cost since each began.
	each := func(what string, most float64, f func(r int) error) {
		t.Helper()
		errs := make([]error, size)
		before := calls.Load()
		var wg sync.WaitGroup
		for r := range errs {
			wg.Go(func() {
				defer must.Catch(&errs[r])
				must.Do(f(r))
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...), what)
		perRank := func(n float64) float64 { return n / float64(size) }
		asked := perRank(float64(calls.Load() - before))
		live, kept := perRank(float64(runtime.NumGoroutine()-goroutines)), perRank(float64(heapInUse()-heap))
		t.Logf("%6.1f s  %s: each rank has %.1f goroutines and %.0f KiB, and made %.1f calls to the store",
			time.Since(begun).Seconds(), what, live, kept/1024, asked)
		require.LessOrEqual(t, asked, most, "%s: calls to the store", what)
		require.LessOrEqual(t, live, 12.0, "%s: goroutines", what)
		require.LessOrEqual(t, kept, 512.0*1024, "%s: bytes", what)
	}
	sum := func(g *pg.ProcessGroup, want float64) error {
		got, err := sumOf(g, float32(g.Rank()))
		if err == nil && float64(got) != want {
			err = fmt.Errorf("the ranks of %q add up to %v, want %v", g.Name(), got, want)
		}
		return err
	}
	gauss := func(n int) float64 { return float64(n*(n-1)) / 2 }

	each("groups", 4, func(r int) (err error) {
		o := j.Options()
		o.Timeout, o.Elastic = 10*time.Minute, true
		groups[r], err = pg.New(ctx, pg.CountedStore{Store: j.Store, N: &calls}, r, size, o)
		return err
	})
	defer func() {
		var wg sync.WaitGroup
		for _, g := range groups {
			wg.Go(func() { g.Close() })
		}
		wg.Wait()
	}()
	each("sub-groups", 2, func(r int) (err error) {
		parts[r], err = groups[r].NewSubgroups(ctx, part)
		return err
	})
	each("collectives", 0, func(r int) error {
		must.Do(sum(groups[r], gauss(size)))
		must.Do(sum(parts[r], gauss(part)))
		one := []int64{int64(r)}
		must.Do(pg.Wait(groups[r].Broadcast(ctx, pg.Slice(one), 7)))
		require.EqualValues(t, 7, one[0])
		all := make([]int64, part)
		must.Do(pg.Wait(parts[r].AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice([]int64{int64(r)}))))
		for i, got := range all {
			require.EqualValues(t, r/part*part+i, got)
		}
		return groups[r].Barrier(ctx)
	})
	each("sub-groups closed", 2, func(r int) error { return parts[r].Close() })
	j.Kill(dead)
	each("the next epoch", 15, func(r int) error {
		if r == dead {
			return nil
		}
		must.Do(failed(groups[r], 0, dead))
		v := must.Get(groups[r].Reconfigure(ctx, pg.ReconfigureOptions{Min: size - 1, Timeout: 10 * time.Minute}))
		if len(v.IDs) != size-1 || len(v.Left) != 1 || v.Left[0].ID != dead {
			return fmt.Errorf("rank %d: epoch %d has %d members, and %v have left", r, v.Epoch, len(v.IDs), v.Left)
		}
		return sum(groups[r], gauss(size-1))
	})
	each("groups closed", 4, func(r int) error {
		if err := groups[r].Close(); r != dead {
			return err
		}
		return nil
	})
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+10 }, 20*time.Second, time.Millisecond, "after Close")
}

// heapInUse returns the bytes that the program has in use.
func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}
