//go:build unix

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/trace"
)

// TestTraceIsOwn: the file of -o is not written through what another user could have put in its place.
func TestTraceIsOwn(t *testing.T) {
	j, err := trace.Merge([]*trace.File{{
		Name: "rank_0", Groups: map[string][]int{"0": {0}}, Entries: []trace.Entry{{Group: "0", Op: "all_reduce", Collective: 1, Called: time.Unix(1, 0)}},
	}})
	require.NoError(t, err)
	behind, name := filepath.Join(t.TempDir(), "behind"), filepath.Join(t.TempDir(), "job.json")
	require.NoError(t, os.WriteFile(behind, []byte("as it was"), 0o644))
	require.NoError(t, os.Link(behind, name))
	require.NoError(t, writeChrome(name, j))
	require.Equal(t, fs.FileMode(0o600), must.Get(os.Lstat(name)).Mode())
	kept := func() {
		require.Equal(t, "as it was", string(must.Get(os.ReadFile(behind))))
	}
	kept()

	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(behind, link))
	if err := os.Lchown(link, 1, 1); err != nil {
		t.Skip("only root can make links of other users")
	}
	require.ErrorContains(t, writeChrome(link, j), "link belongs to another user: choose a directory of your own")
	kept()
	require.NoError(t, os.Lchown(link, os.Geteuid(), -1))
	require.NoError(t, writeChrome(link, j), "as /dev/stdout is")
	require.Contains(t, string(must.Get(os.ReadFile(behind))), "all_reduce")
}
