package shm

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel spreads threads over CPUs when they wake up. Polling threads hardly ever sleep, so
// two ranks may stay on one CPU for long while other CPUs are idle. Then every message takes two
// context switches: a small all-reduce takes 17 us instead of 1 us. So each rank publishes the
// CPU on which it last had to wait. If a rank has to wait on the CPU of another one, it moves to
// a free CPU. It need not be waiting for that rank: two ranks that get a broadcast wait for the root.

const (
	// moveEvery bounds how often a rank moves.
	moveEvery = time.Millisecond

	// Words of a segment, behind those of newGroup.
	atCPU   = 16 * line // the CPU plus one
	atMoved = atCPU + 8
)

// moveOffCPU moves this thread to a CPU on which no rank was last seen. It does so only if another rank was last seen on
// this thread's CPU.
func (g *Group) moveOffCPU() {
	var cpu uint32
	_, _, e := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	if e != 0 || cpu >= maxCPUs {
		return
	}
	atomic.StoreUint32(g.cpuOf(g.rank), cpu+1)
	if !g.besideRank(cpu) {
		return
	}
	movedAt := word64(g.mem, g.segmentAt(g.rank)+atMoved)
	now := uint64(time.Now().UnixNano())
	if now-atomic.LoadUint64(movedAt) < uint64(moveEvery) {
		return
	}
	atomic.StoreUint64(movedAt, now)

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
		// It says so first: the rank that gets this CPU then must not follow.
		atomic.StoreUint32(g.cpuOf(g.rank), uint32(i)+1)
		if unix.SchedSetaffinity(0, &one) == nil {
			unix.SchedSetaffinity(0, &may) // which moves it nowhere
		} else {
			atomic.StoreUint32(g.cpuOf(g.rank), cpu+1)
		}
		return
	}
}

// besideRank reports whether another rank was last seen on a CPU.
func (g *Group) besideRank(cpu uint32) bool {
	for r := range g.segs {
		if r != g.rank && atomic.LoadUint32(g.cpuOf(r)) == cpu+1 {
			return true
		}
	}
	return false
}

func (g *Group) segmentAt(rank int) int { return page + rank*segmentSize(g.piece) }

func (g *Group) cpuOf(rank int) *uint32 { return word32(g.mem, g.segmentAt(rank)+atCPU) }
