//go:build unix

package trace

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestDumpsAreOwn: only this user can read dumps. What is in the place of one is replaced, and not written to.
func TestDumpsAreOwn(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir := filepath.Join(t.TempDir(), "job")
	behind := filepath.Join(t.TempDir(), "behind")
	require.NoError(t, os.WriteFile(behind, []byte("as it was"), 0o666))
	r := ofRun(filepath.Join(dir, "rank_"), Member{Run: firstRun})
	name := must.Get(r.Dump())
	j := must.Get(Merge(read(t, dir, "rank_0")))
	for _, c := range []struct {
		name  string
		write func(name string) error
	}{
		{name, func(string) error { _, err := r.Dump(); return err }},
		{filepath.Join(dir, "torch", "rank_0"), func(name string) error { return j.WriteTorch(filepath.Dir(name)) }},
	} {
		for _, trap := range []func() error{
			func() error { return nil },
			func() error { return os.Symlink(behind, c.name) },
			func() error { return os.Link(behind, c.name) },
			func() error { return syscall.Mkfifo(c.name, 0o666) },
		} {
			_ = os.Remove(c.name)
			require.NoError(t, trap())
			require.NoError(t, c.write(c.name))
			for path, want := range map[string]fs.FileMode{filepath.Dir(c.name): fs.ModeDir | 0o700, c.name: 0o600} {
				require.Equal(t, want, must.Get(os.Lstat(path)).Mode())
			}
		}
	}
	require.Equal(t, "as it was", string(must.Get(os.ReadFile(behind))))
}

// TestForeignDump: a dump of another user gets another name, and is not read for that. A link of another user in the
// path is not followed.
func TestForeignDump(t *testing.T) {
	dir := t.TempDir()
	prefix := filepath.Join(dir, "rank_")
	name := must.Get(ofRun(prefix, Member{Run: firstRun}).Dump())
	if err := os.Chown(name, 1, 1); err != nil {
		t.Skip("only root can make files of other users")
	}
	must.Get(ofRun(prefix, Member{Run: secondRun}).Dump())
	require.Equal(t, secondRun, read(t, dir, "rank_0")[0].Run)
	kept, err := filepath.Glob(filepath.Join(dir, "rank.2*T*"))
	require.NoError(t, err)
	require.Len(t, kept, 1)

	link := filepath.Join(t.TempDir(), "job")
	require.NoError(t, os.Symlink(dir, link))
	require.NoError(t, os.Lchown(link, 1, 1))
	_, err = ofRun(filepath.Join(link, "rank_"), Member{Run: firstRun}).Dump()
	require.ErrorContains(t, err, link+" is a link that another user has made: choose a directory of your own")
	require.Equal(t, secondRun, read(t, dir, "rank_0")[0].Run)
}

// TestReadFile: a file of another user that has the name of a dump takes neither memory nor time.
func TestReadFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "rank_0")
	require.NoError(t, syscall.Mkfifo(name, 0o666))
	_, err := ReadFile(name)
	require.EqualError(t, err, "trace: "+name+" is no regular file")
	require.NoError(t, os.Remove(name))
	require.NoError(t, os.WriteFile(name, nil, 0o666))
	require.NoError(t, os.Truncate(name, 1<<40))
	_, err = ReadFile(name)
	require.EqualError(t, err, "trace: "+name+" has more than 268435456 bytes, and is no dump")
}

// TestEscapes: a dump has no text that a terminal obeys.
func TestEscapes(t *testing.T) {
	j, err := Merge([]*File{{
		Name: "rank_0", Groups: map[string][]int{"0": {0, 1}},
		Entries: []Entry{{Group: "0", Op: "all_\x1b[2Jreduce", Collective: 1, State: "started", Called: time.Unix(1, 0), Error: "\x1b]0;title\a\nline\u202e"}},
	}})
	require.NoError(t, err)
	var text strings.Builder
	require.NoError(t, j.Print(&text, 1))
	require.Contains(t, text.String(), "stuck: all_?[2Jreduce, collective 0")
	require.Contains(t, text.String(), "?]0;title?\nline?\n")
}
