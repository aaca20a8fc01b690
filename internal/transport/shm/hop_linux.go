package shm

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel spreads threads over CPUs when they wake up. Threads that wait by
// looking hardly ever do, so that two ranks may stay on one CPU for long while
// others are idle, and then every message takes two context switches (17 us instead
// of 1 us for a small all-reduce). So each rank shows on which CPU it last had to
// wait, and one that waits for a rank on its own CPU moves away.

const (
	// hopEvery bounds how often a rank moves.
	hopEvery = time.Millisecond

	// Words of a segment, behind those of newGroup.
	atCPU    = 16 * line // the CPU plus one
	atHopped = atCPU + 8
)

// hop moves this thread to another CPU if owner, for whom it waits, was last seen
// on the same one, and there is one that no rank was seen on.
func (g *Group) hop(owner int) {
	var cpu uint32
	_, _, e := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	if e != 0 || cpu >= maxCPUs {
		return
	}
	atomic.StoreUint32(g.cpuOf(g.rank), cpu+1)
	if atomic.LoadUint32(g.cpuOf(owner)) != cpu+1 {
		return
	}
	hopped := word64(g.mem, g.segmentAt(g.rank)+atHopped)
	now := uint64(time.Now().UnixNano())
	if now-atomic.LoadUint64(hopped) < uint64(hopEvery) {
		return
	}
	atomic.StoreUint64(hopped, now)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var may unix.CPUSet
	if unix.SchedGetaffinity(0, &may) != nil {
		return
	}
	free := may
	for r := range g.segs {
		if at := int(atomic.LoadUint32(g.cpuOf(r))); at > 0 {
			free.Clear(at - 1)
		}
	}
	n := free.Count()
	if n == 0 {
		return
	}
	// Ranks that move at the same time move to different ones.
	for i, k := 0, g.rank%n; i < maxCPUs; i++ {
		if !free.IsSet(i) {
			continue
		}
		if k > 0 {
			k--
			continue
		}
		var one unix.CPUSet
		one.Set(i)
		if unix.SchedSetaffinity(0, &one) == nil {
			unix.SchedSetaffinity(0, &may) // which moves it nowhere
			atomic.StoreUint32(g.cpuOf(g.rank), uint32(i)+1)
		}
		return
	}
}

func (g *Group) segmentAt(rank int) int { return page + rank*segmentSize(g.piece) }

func (g *Group) cpuOf(rank int) *uint32 { return word32(g.mem, g.segmentAt(rank)+atCPU) }
