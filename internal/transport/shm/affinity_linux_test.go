package shm_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/transport/shm"
)

// TestOneOfTwoLeaves: of two ranks on one CPU one moves, and the other one does not follow it.
func TestOneOfTwoLeaves(t *testing.T) {
	var all unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &all))
	if all.Count() < 2 {
		t.Skip("there is one CPU")
	}
	var home, two unix.CPUSet
	for i := 0; two.Count() < 2; i++ {
		if all.IsSet(i) {
			two.Set(i)
			if home.Count() == 0 {
				home.Set(i)
			}
		}
	}
	together := 0
	for range 20 {
		gs := join(t, 2, shm.Options{})
		for r := range gs {
			for i := 0; ; i++ {
				if home.IsSet(i) {
					*gs[0].CPUOf(r) = uint32(i) + 1
					break
				}
			}
		}
		var ranks sync.WaitGroup
		var here atomic.Int32
		for _, g := range gs {
			ranks.Go(func() {
				runtime.LockOSThread() // and ends with it, because of the affinity
				if unix.SchedSetaffinity(0, &home) != nil {
					t.Error("a thread of this process may not choose its CPU")
				}
				unix.SchedSetaffinity(0, &two)
				for here.Add(1); here.Load() < 2; { // not asleep, or the kernel would choose a CPU
				}
				g.MoveOffCPU()
			})
		}
		ranks.Wait()
		if *gs[0].CPUOf(0) == *gs[1].CPUOf(1) {
			together++
		}
	}
	require.Less(t, together, 10, "of 20 pairs")
}

// TestRanksLeaveAForeignCPU: a rank that has to wait moves to a free CPU if any other rank is on its own.
func TestRanksLeaveAForeignCPU(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &all))
	defer unix.SchedSetaffinity(0, &all)
	if all.Count() < 2 {
		t.Skip("there is one CPU")
	}
	home := 0
	for !all.IsSet(home) {
		home++
	}
	g := join(t, 3, shm.Options{})[1]
	for _, beside := range []int{-1, 0, 2} {
		for r := range 3 {
			*g.CPUOf(r) = 0
		}
		if beside >= 0 {
			*g.CPUOf(beside) = uint32(home) + 1
		}
		stays := func() bool {
			var one unix.CPUSet
			one.Set(home)
			require.NoError(t, unix.SchedSetaffinity(0, &one))
			require.NoError(t, unix.SchedSetaffinity(0, &all))
			g.MoveOffCPU()
			return int(*g.CPUOf(1)) == home+1
		}
		// A rank moves once in a millisecond at most. The kernel may move the thread, too.
		for try := 0; stays() != (beside < 0); try++ {
			require.Less(t, try, 1000, "beside rank %d", beside)
			time.Sleep(2 * time.Millisecond)
		}
	}
}
