package shm_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/transport/shm"
)

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
