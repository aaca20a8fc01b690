package weights

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime/debug"
	"strings"
)

// host has /proc and /sys.
var host = os.DirFS("/")

// room returns an error if the host has no memory for two copies of l and their deltas. The copies that r has make room.
func (r *Receiver) room(l *layout) error {
	if l.bytes > r.options.MaxBytes {
		return fmt.Errorf("weights: the parameters have %d bytes, at most %d are allowed (ReceiverOptions.MaxBytes)", l.bytes, r.options.MaxBytes)
	}
	active := r.active.size() // it stays until the first of the two is whole
	need := min(l.bytes, math.MaxInt64/4)/8*17 + max(active-l.bytes, 0) - active - r.standby.size()
	left := available(host)
	if need > left {
		debug.FreeOSMemory() // of copies that are no longer used
		left = available(host)
	}
	if need > left {
		return fmt.Errorf("weights: two versions of %d bytes and their deltas need %d more bytes of memory, and this host has %d", l.bytes, need, left)
	}
	return nil
}

// available returns how many bytes the system, the process's cgroups and its own limits leave. Only Linux has limits.
func available(host fs.FS) int64 {
	number := func(file, name string) (n int64) { // after name, which begins a line of a file; -1 if there is none
		text, _ := fs.ReadFile(host, file)
		for line := range strings.Lines(string(text)) {
			rest, is := strings.CutPrefix(line, name)
			if _, err := fmt.Sscan(rest, &n); is && err == nil {
				return n
			}
		}
		return -1
	}
	left := int64(math.MaxInt64)
	limit := func(most, used int64) {
		if most >= 0 {
			left = min(left, max(0, most-used))
		}
	}
	limit(number("proc/meminfo", "MemAvailable:")<<10, 0)
	limit(number("proc/self/limits", "Max address space"), number("proc/self/status", "VmSize:")<<10)
	limit(number("proc/self/limits", "Max data size"), number("proc/self/status", "VmData:")<<10)
	groups, _ := fs.ReadFile(host, "proc/self/cgroup")
	for line := range strings.Lines(string(groups)) { // NUMBER:CONTROLLER:DIRECTORY. Within a container only some directories exist
		_, line, _ = strings.Cut(strings.TrimSpace(line), ":")
		controller, dir, _ := strings.Cut(line, ":")
		for dir = path.Join("sys/fs/cgroup", controller, dir); strings.HasPrefix(dir, "sys/fs/cgroup"); dir = path.Dir(dir) {
			limit(number(dir+"/memory.max", ""), number(dir+"/memory.current", "")-number(dir+"/memory.stat", "inactive_file"))
			limit(number(dir+"/memory.limit_in_bytes", ""), number(dir+"/memory.usage_in_bytes", "")-number(dir+"/memory.stat", "total_inactive_file"))
		}
	}
	return left
}

// size returns the bytes of the parameters for which c has memory.
func (c *copyOf) size() (n int64) {
	if c != nil {
		for _, m := range c.memory {
			n += int64(len(m))
		}
	}
	return n
}

// part returns a bucket's memory. In a first copy a parameter grows as it comes: to 64 MiB, a few buckets, or 4 times what came.
func (c *copyOf) part(b bucket) []byte {
	m := &c.memory[b.param]
	if b.to > len(*m) {
		size := c.layout.sizes[b.param]
		for !c.second && size/4 >= max(b.to, 16<<20) {
			size /= 4
		}
		more := alignedBytes(size)
		largePages(more)
		copy(more, *m)
		*m = more
	}
	return (*m)[b.from:b.to]
}
