package shm

import (
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0
	futexWake = 1
)

// sleepOn sleeps until another goroutine or process wakes w, for at most limit, unless *w is no
// longer now. The futex is not private: processes share the word.
func sleepOn(w *uint32, now uint32, limit time.Duration) {
	t := unix.NsecToTimespec(int64(limit))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWait, uintptr(now), uintptr(unsafe.Pointer(&t)), 0, 0)
}

// wake wakes all that sleep on w.
func wake(w *uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWake, math.MaxInt32, 0, 0, 0)
}

// yield lets other threads of this CPU run, unknown to the Go scheduler. It returns at once if
// there is none.
func yield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

func unmap(mem []byte) error { return unix.Munmap(mem) }

// usable sets the bits of the CPUs that this thread may run on.
func usable(mask []byte) error {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return err
	}
	for i := range 8 * len(mask) {
		if set.IsSet(i) {
			mask[i/8] |= 1 << (i % 8)
		}
	}
	return nil
}

// quota returns how many CPUs' worth of time the control group grants this process, maxCPUs if
// it sets no limit.
func quota() int {
	n := maxCPUs
	text, _ := os.ReadFile("/proc/self/cgroup")
	for _, l := range strings.Split(string(text), "\n") {
		dir, ok := strings.CutPrefix(l, "0::/")
		if !ok {
			continue
		}
		for dir = path.Clean("/" + dir); ; dir = path.Dir(dir) {
			max, _ := os.ReadFile(path.Join("/sys/fs/cgroup", dir, "cpu.max"))
			n = min(n, cpusOf(string(max)))
			if dir == "/" {
				break
			}
		}
	}
	return n
}

// cpusOf reads a control group's cpu.max: microseconds of CPU time, or max, and a period. Half
// a CPU counts as one.
func cpusOf(max string) int {
	f := strings.Fields(max)
	if len(f) != 2 {
		return maxCPUs
	}
	time, err := strconv.ParseUint(f[0], 10, 32)
	period, err2 := strconv.ParseUint(f[1], 10, 32)
	if err != nil || err2 != nil || period == 0 {
		return maxCPUs
	}
	return int(min((time+period-1)/period, maxCPUs))
}
