// Package hostmem tells how much memory a process may still take.
package hostmem

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
)

// Host has /proc and /sys.
var Host = os.DirFS("/")

// Available returns how many bytes the system, the process's cgroups and its own limits leave. Only Linux has limits.
func Available(host fs.FS) int64 {
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
