package tcp

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// openFiles returns how many descriptors this process has.
func openFiles() int {
	all, _ := os.ReadDir("/proc/self/fd")
	return len(all) - 1 // without that of the directory
}

// A rank costs one descriptor for each peer, besides its listener and two for all of them.
func TestDescriptors(t *testing.T) {
	const size = 24
	join(t, 2)[0].Close() // the runtime opens files for the first socket
	before := openFiles()
	ms := join(t, size, polling())
	require.LessOrEqual(t, openFiles()-before, size*(size-1)+size*3)
	require.Greater(t, openFiles()-before, size*(size-1))
	for _, m := range ms {
		require.NoError(t, m.Close())
	}
	require.LessOrEqual(t, openFiles(), before)
}
