//go:build unix

package cluster_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/plan"
)

// TestPlanFifo: a rank does not wait for a FIFO in the place of a plan.
func TestPlanFifo(t *testing.T) {
	dir, l := t.TempDir(), cluster.New([]int{0, 0, 1}, nil)
	call := cluster.Call{Op: plan.OpAllReduce, Bytes: 4000, Elem: 4, Chunk: 1000}
	must.Get(cluster.NewCache(l, dir).Plan(call))
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	require.NoError(t, os.Remove(files[0]))
	require.NoError(t, syscall.Mkfifo(files[0], 0o666))
	_, err = cluster.NewCache(l, dir).Plan(call)
	require.ErrorContains(t, err, "cluster: plan: "+files[0]+" is no regular file")
}
