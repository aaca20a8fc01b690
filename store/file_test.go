package store_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

// needFileLocks skips where File cannot work.
func needFileLocks(t testing.TB) {
	s, err := store.NewFile(filepath.Join(t.TempDir(), "probe"), 1)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("%s: %v", runtime.GOOS, err)
	}
	require.NoError(t, err)
	require.NoError(t, s.Close())
}

func openFile(t testing.TB, path string, worldSize int) *store.File {
	t.Helper()
	s := must.Get(store.NewFile(path, worldSize))
	t.Cleanup(func() { s.Close() })
	return s
}

func TestFile(t *testing.T) {
	needFileLocks(t)
	t.Parallel()
	var mu sync.Mutex
	paths := make(map[store.Store]string)
	open := func(t *testing.T, path string) store.Store {
		mu.Lock()
		defer mu.Unlock()
		s := openFile(t, path, 0)
		paths[s] = path
		return s
	}
	for name, peer := range map[string]func(*testing.T, store.Store) store.Store{
		"two handles": func(t *testing.T, s store.Store) store.Store { return open(t, paths[s]) },
		"one handle":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, storetest.Config{
				New:  func(t *testing.T) store.Store { return open(t, filepath.Join(t.TempDir(), "store")) },
				Peer: peer,
				No:   []storetest.Feature{storetest.Queues, storetest.Wills},
			})
		})
	}
}

// TestFileBytes holds what each call appends against what PyTorch 2.6.0 and
// 2.11.0 append.
func TestFileBytes(t *testing.T) {
	needFileLocks(t)
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "store")
	var first, second *store.File
	read := 0
	for _, step := range []struct {
		name string
		do   func() error
		want string
	}{
		{"constructor", func() (err error) { first, err = store.NewFile(path, 2); return err },
			"\x09\x00\x00\x00refcount/\x01\x00\x00\x001"},
		{"set", func() error { return first.Set(ctx, "k", []byte("v1")) },
			"\x02\x00\x00\x00/k\x02\x00\x00\x00v1"},
		{"set again", func() error { return first.Set(ctx, "k", []byte("v2")) },
			"\x02\x00\x00\x00/k\x02\x00\x00\x00v2"},
		{"get", func() error { _, err := first.Get(ctx, "k"); return err }, ""},
		{"add", func() error { _, err := first.Add(ctx, "n", 5); return err },
			"\x02\x00\x00\x00/n\x01\x00\x00\x005"},
		{"add less", func() error { _, err := first.Add(ctx, "n", -2); return err },
			"\x02\x00\x00\x00/n\x01\x00\x00\x003"},
		{"compare set", func() error { _, err := first.CompareSet(ctx, "c", nil, []byte("x")); return err },
			"\x02\x00\x00\x00/c\x01\x00\x00\x00x"},
		{"compare set in vain", func() error { _, err := first.CompareSet(ctx, "c", []byte("no"), []byte("y")); return err }, ""},
		{"delete", func() error { _, err := first.Delete(ctx, "k"); return err },
			"\x03\x00\x00\x00-/k\x00\x00\x00\x00"},
		{"delete a missing key", func() error { _, err := first.Delete(ctx, "nosuch"); return err },
			"\x08\x00\x00\x00-/nosuch\x00\x00\x00\x00"},
		{"number of keys", func() error {
			n, err := first.NumKeys(ctx)
			require.EqualValues(t, 3, n)
			return err
		}, ""},
		{"append", func() error { return first.Append(ctx, "ap", []byte("q")) },
			"\x03\x00\x00\x00/ap\x01\x00\x00\x00q"},
		{"second constructor", func() (err error) { second, err = store.NewFile(path, 2); return err },
			"\x09\x00\x00\x00refcount/\x01\x00\x00\x002"},
		{"first closed", func() error { return first.Close() },
			"\x08\x00\x00\x00cleanup/\x01\x00\x00\x001\x09\x00\x00\x00refcount/\x01\x00\x00\x001"},
	} {
		require.NoError(t, step.do(), step.name)
		all := must.Get(os.ReadFile(path))
		require.Equal(t, step.want, string(all[read:]), step.name)
		read = len(all)
	}
	require.NoError(t, second.Close())
	require.NoFileExists(t, path)
}

func TestFileLifeCycle(t *testing.T) {
	needFileLocks(t)
	path := filepath.Join(t.TempDir(), "store")
	a, b := openFile(t, path, 3), openFile(t, path, 3)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
	require.FileExists(t, path, "the third has not been there yet")
	require.NoError(t, openFile(t, path, 3).Close())
	require.NoFileExists(t, path)

	require.NoError(t, openFile(t, path, 0).Close())
	require.FileExists(t, path, "nobody knows how many will come")
	require.NoError(t, os.Remove(path))

	a = openFile(t, path, 1)
	require.NoError(t, os.Remove(path))
	require.ErrorIs(t, a.Set(t.Context(), "k", nil), fs.ErrNotExist)
	b = openFile(t, path, 1)
	require.ErrorContains(t, a.Set(t.Context(), "k", nil), "replaced")
	require.NoError(t, b.Close())
	require.NoError(t, a.Close(), "there is nothing left to clean up")

	_, err := store.NewFile(filepath.Join(t.TempDir(), "no", "such", "directory"), 1)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestFileOwner: other users cannot read a store's file, and what they could have put in its place is
// refused, unchanged.
func TestFileOwner(t *testing.T) {
	needFileLocks(t)
	own := filepath.Join(t.TempDir(), "store")
	openFile(t, own, 0)
	info := must.Get(os.Stat(own))
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	before, err := os.ReadFile(own)
	require.NoError(t, err)

	dir := filepath.Join(t.TempDir(), "dir")
	require.NoError(t, os.Mkdir(dir, 0o755))
	path := filepath.Join(dir, "store")
	const foreign = "the file belongs to another user"
	for name, c := range map[string]struct {
		mode   os.FileMode // of the directory
		make   func() error
		theirs bool
		want   string // "" means that it is taken
	}{
		"a link":                        {0o755, func() error { return os.Symlink(own, path) }, false, "the file is a link"},
		"a link to nothing":             {0o755, func() error { return os.Symlink(own+"-new", path) }, false, "the file is a link"},
		"a directory":                   {0o755, func() error { return os.Mkdir(path, 0o700) }, false, "directory"},
		"a FIFO":                        {0o755, func() error { return exec.Command("mkfifo", path).Run() }, false, "is no regular file"},
		"everybody can write":           {0o755, func() error { return write(path, 0o666) }, true, foreign},
		"in such as /tmp":               {os.ModeSticky | 0o777, func() error { return write(path, 0o644) }, true, foreign},
		"in a directory for everybody":  {0o777, func() error { return write(path, 0o644) }, true, foreign},
		"own, in such as /tmp":          {os.ModeSticky | 0o777, func() error { return write(path, 0o644) }, false, ""},
		"of a file system's only owner": {0o755, func() error { return write(path, 0o644) }, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			defer os.RemoveAll(path)
			require.NoError(t, c.make())
			if c.theirs {
				if os.Geteuid() != 0 {
					t.Skip("only root can give files to other users")
				}
				require.NoError(t, os.Chown(path, 4242, -1))
			}
			require.NoError(t, os.Chmod(dir, c.mode))
			s, err := store.NewFile(path, 2)
			if c.want == "" {
				require.NoError(t, err)
				require.NoError(t, s.Close())
				return
			}
			require.ErrorContains(t, err, path)
			if c.mode&os.ModeSticky == 0 || !errors.Is(err, fs.ErrPermission) { // Linux may refuse it, with fs.protected_regular
				require.ErrorContains(t, err, c.want)
			}
			if info, err := os.Stat(path); err == nil && c.theirs {
				require.Zero(t, info.Size())
			}
			require.Equal(t, before, must.Get(os.ReadFile(own)))
			require.NoFileExists(t, own+"-new")
		})
	}
}

func write(path string, mode os.FileMode) error {
	return errors.Join(os.WriteFile(path, nil, 0o600), os.Chmod(path, mode))
}

func TestFileDamage(t *testing.T) {
	needFileLocks(t)
	for name, test := range map[string]struct{ tail, want string }{
		"length cut short":    {"\x02\x00", "middle of a record"},
		"key cut short":       {"\x03\x00\x00\x00/k", "middle of a record"},
		"value missing":       {"\x02\x00\x00\x00/k", "middle of a record"},
		"value cut short":     {"\x02\x00\x00\x00/k\xff\xff\xff\x3fx", "middle of a record"},
		"impossible key":      {"\xff\xff\xff\xff/k", "over the store's limit"},
		"impossible value":    {"\x02\x00\x00\x00/k\x01\x00\x00\x40x", "over the store's limit"},
		"not a store at all":  {"\x00\x00\x00\x00\x00\x00\x00\x00", "not a store's file"},
		"damage behind a key": {"\x02\x00\x00\x00/k\x00\x00\x00\x00\x00\x00", "at byte 28"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "store")
			s := openFile(t, path, 1)
			appendTo(t, path, test.tail)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			require.ErrorContains(t, must.Err(s.Get(t.Context(), "k")), test.want)
			require.ErrorContains(t, s.Set(t.Context(), "other", nil), test.want)
			runtime.ReadMemStats(&after)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(512<<20), "the announced length was believed")
			data := must.Get(os.ReadFile(path))
			require.True(t, strings.HasSuffix(string(data), test.tail), "nothing is written behind damage")
			require.ErrorContains(t, s.Close(), test.want)
		})
	}

	path := filepath.Join(t.TempDir(), "store")
	s := openFile(t, path, 1)
	require.NoError(t, os.Truncate(path, 5))
	require.ErrorContains(t, s.Set(t.Context(), "k", nil), "shrank from 18 bytes to 5")
}

func appendTo(t testing.TB, path, data string) {
	t.Helper()
	f := must.Get(os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0))
	defer f.Close()
	must.Get(f.WriteString(data))
}

func TestFileKeepsCounterError(t *testing.T) {
	needFileLocks(t)
	path := filepath.Join(t.TempDir(), "store")
	require.NoError(t, os.WriteFile(path, []byte("\x09\x00\x00\x00refcount/\x01\x00\x00\x00x"), 0o644))
	require.ErrorIs(t, must.Err(store.NewFile(path, 1)), store.ErrNotNumber)
}

// torchFileStore joins a file store, takes part in what the test does, says so
// and leaves when told.
const torchFileStore = `
import sys, torch.distributed as d
path, world, me = sys.argv[1], int(sys.argv[2]), sys.argv[3]
s = d.FileStore(path, world)
s.set("from " + me, "value of " + me)
s.add("arrived", 1)
assert s.get("go") == b"\x00\xffgo", s.get("go")
for i in range(200):
    s.add("n", 1)
s.set("empty", "")
assert s.compare_set("c " + me, "", "new") == b"new"
assert s.delete_key("doomed " + me)
print("ready", flush=True)
sys.stdin.readline()
del s
print("left", flush=True)
`

// torchPython returns the Python interpreter that has PyTorch.
func TestFileWithPyTorch(t *testing.T) {
	needFileLocks(t)
	torchtest.Need(t)
	for _, last := range []string{"go", "python"} {
		t.Run(last+" leaves last", func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			path := filepath.Join(t.TempDir(), "store")
			s := openFile(t, path, 3)

			say := make([]func(), 2)
			hear := make([]func() string, 2)
			for i, me := range []string{"a", "b"} {
				cmd := torchtest.Command(ctx, t, "-c", torchFileStore, path, "3", me)
				cmd.Stderr = os.Stderr
				in := must.Get(cmd.StdinPipe())
				out := must.Get(cmd.StdoutPipe())
				require.NoError(t, cmd.Start())
				t.Cleanup(func() { in.Close(); cmd.Wait() })
				lines := bufio.NewReader(out)
				hear[i] = func() string { l, _ := lines.ReadString('\n'); return strings.TrimSpace(l) }
				say[i] = func() { fmt.Fprintln(in) }
				require.NoError(t, s.Set(ctx, "doomed "+me, []byte("x")))
			}

			values := must.Get(s.MultiGet(ctx, []string{"from a", "from b"}))
			require.Equal(t, []string{"value of a", "value of b"}, []string{string(values[0]), string(values[1])})
			require.NoError(t, s.Set(ctx, "go", []byte("\x00\xffgo")))
			for range 200 {
				must.Get(s.Add(ctx, "n", 1))
			}
			require.Equal(t, "ready", hear[0]())
			require.Equal(t, "ready", hear[1]())
			n := must.Get(s.Get(ctx, "n"))
			require.Equal(t, "600", string(n))
			keys := must.Get(s.ListKeys(ctx))
			require.ElementsMatch(t, []string{"from a", "from b", "arrived", "go", "n", "empty", "c a", "c b"}, keys)

			say[0]()
			require.Equal(t, "left", hear[0]())
			require.FileExists(t, path)
			if last == "go" {
				say[1]()
				require.Equal(t, "left", hear[1]())
				require.FileExists(t, path)
				require.NoError(t, s.Close())
			} else {
				require.NoError(t, s.Close())
				require.FileExists(t, path)
				say[1]()
				require.Equal(t, "left", hear[1]())
			}
			require.NoFileExists(t, path)
		})
	}
}
