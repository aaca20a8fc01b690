//go:build unix

package ownfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// traps makes a directory with what another user could put in the place of a file, and a file behind the links.
func traps(t *testing.T) (dir, behind string, names []string) {
	dir, behind = t.TempDir(), filepath.Join(t.TempDir(), "behind")
	require.NoError(t, os.WriteFile(behind, []byte("as it was"), 0o666))
	at := func(name string) string {
		names = append(names, name)
		return filepath.Join(dir, name)
	}
	require.NoError(t, os.Symlink(behind, at("link")))
	require.NoError(t, os.Symlink("nowhere", at("dangling")))
	require.NoError(t, os.Link(behind, at("hard link")))
	require.NoError(t, syscall.Mkfifo(at("fifo"), 0o666))
	require.NoError(t, os.WriteFile(at("file"), nil, 0o666))
	t.Cleanup(func() {
		require.Equal(t, "as it was", string(must.Get(os.ReadFile(behind))))
		require.NoFileExists(t, filepath.Join(dir, "nowhere"))
	})
	return dir, behind, names
}

func TestCreate(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir, _, names := traps(t)
	for _, name := range names {
		require.ErrorIs(t, must.Err(Create(filepath.Join(dir, name))), fs.ErrExist, name)
	}
	file := must.Get(Create(filepath.Join(dir, "new")))
	defer file.Close()
	require.Equal(t, fs.FileMode(0o600), must.Get(file.Stat()).Mode())
}

func TestReplace(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir, _, names := traps(t)
	for _, name := range append(names, "new") {
		path := filepath.Join(dir, name)
		require.NoError(t, Replace(path, []byte(name)))
		require.Equal(t, fs.FileMode(0o600), must.Get(os.Lstat(path)).Mode(), name)
		require.Equal(t, name[:3], string(must.Get(Read(path, 3))))
	}
	require.Error(t, Replace(t.TempDir(), nil), "a directory")
	require.Len(t, must.Get(os.ReadDir(dir)), len(names)+1)
}

func TestRead(t *testing.T) {
	dir, behind, _ := traps(t)
	require.NoError(t, os.Symlink("fifo", filepath.Join(dir, "link to fifo")))
	for _, name := range []string{"dangling", "fifo", "link to fifo", "", "none"} {
		require.Error(t, must.Err(Read(filepath.Join(dir, name), 100)), name)
	}
	require.NoError(t, os.Truncate(filepath.Join(dir, "file"), 1<<40))
	text := must.Get(Read(filepath.Join(dir, "file"), 100))
	require.Equal(t, strings.Repeat("\x00", 100), string(text))
	for _, path := range []string{behind, filepath.Join(dir, "link")} {
		text = must.Get(Read(path, 100))
		require.Equal(t, "as it was", string(text))
	}
}

func TestMkdirAll(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir := t.TempDir()
	require.NoError(t, MkdirAll(filepath.Join(dir, "a/b")))
	for _, name := range []string{"a", "a/b"} {
		require.Equal(t, fs.ModeDir|0o700, must.Get(os.Lstat(filepath.Join(dir, name))).Mode())
	}
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("a", link))
	require.NoError(t, MkdirAll(filepath.Join(link, "b")), "an own link")
	if err := os.Lchown(link, 1, 1); err != nil {
		t.Skip("only root can make links of other users")
	}
	for _, path := range []string{link, filepath.Join(link, "b"), filepath.Join(link, "c")} {
		require.EqualError(t, MkdirAll(path), link+" is a link that another user has made: choose a directory of your own")
	}
	require.NoFileExists(t, filepath.Join(dir, "a/c"))
	require.ErrorContains(t, MkdirAll(link+"/../c"), "/link is a link that another user has made")
	require.NoFileExists(t, filepath.Join(dir, "c"))
	require.NoError(t, os.Symlink("link/b", filepath.Join(dir, "own")))
	require.ErrorContains(t, MkdirAll(filepath.Join(dir, "own/c")), "/link is a link that another user has made", "behind an own link")
	t.Chdir(dir)
	require.NoError(t, MkdirAll("d/../a/c"))
	require.EqualError(t, MkdirAll("own"), "link is a link that another user has made: choose a directory of your own")
}

// TestListen: there is no moment in which another user can connect.
func TestListen(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the caller sets the mode")
	}
	defer syscall.Umask(syscall.Umask(0))
	path := filepath.Join(t.TempDir(), "socket")
	l := must.Get(Listen(path))
	defer l.Close()
	require.Equal(t, fs.ModeSocket|0o600, must.Get(os.Lstat(path)).Mode())
}
