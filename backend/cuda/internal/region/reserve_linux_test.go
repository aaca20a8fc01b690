package region

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestReserve makes regions in a cgroup that is near its limit: the system would end the process.
func TestReserve(t *testing.T) {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	was := host
	host = fstest.MapFS{
		"proc/self/cgroup": file("0::/job\n"), "sys/fs/cgroup/job/memory.max": file("8388608\n"), "sys/fs/cgroup/job/memory.current": file("4194304\n"),
		"sys/fs/cgroup/job/memory.stat": file("inactive_file 0\n"),
	}
	defer func() { host = was }()
	_, err := New(4 << 20)
	require.ErrorContains(t, err, "4194304 bytes of shared memory: the system, a limit of the process or its cgroup leaves 4194304 bytes")
	for _, n := range []int{2 << 20, PageSize} {
		require.NoError(t, must.Get(New(n)).Leave())
	}
}
