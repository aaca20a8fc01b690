package hostmem

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// TestAvailable: the memory that a process may take is what the system, its cgroups and its own limits leave.
func TestAvailable(t *testing.T) {
	files := func(pairs ...string) fstest.MapFS {
		all := fstest.MapFS{"proc/meminfo": {Data: []byte("MemTotal: 90 kB\nMemAvailable:   64 kB\n")}}
		for i := 0; i < len(pairs); i += 2 {
			all[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
		}
		return all
	}
	for name, c := range map[string]struct {
		host fstest.MapFS
		want int64
	}{
		"no Linux": {fstest.MapFS{}, 1<<63 - 1},
		"system":   {files(), 64 << 10},
		"cgroup":   {files("proc/self/cgroup", "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max", "max\n", "sys/fs/cgroup/a/memory.max", "5000\n", "sys/fs/cgroup/a/memory.current", "3000\n", "sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 400\n"), 2400},
		"cgroup 1 of a container": {files("proc/self/cgroup", "3:cpu:/x\n2:memory:/docker/1\n", "sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes", "6000\n",
			"sys/fs/cgroup/memory/memory.stat", "inactive_file 9000\ntotal_inactive_file 10\n"), 0},
		"ulimit -v":  {files("proc/self/limits", "Max address space         20480                unlimited            bytes\n", "proc/self/status", "VmSize:\t    12 kB\n"), 8 << 10},
		"no ulimits": {files("proc/self/limits", "Max address space         unlimited            unlimited            bytes\n", "proc/self/status", "VmSize:\t    12 kB\n"), 64 << 10},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, Available(c.host)) })
	}
}
