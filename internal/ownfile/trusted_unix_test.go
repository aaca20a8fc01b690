//go:build unix

package ownfile_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// other is a user and a group that own nothing else.
const other = 4242

// tree is a folder of a test, in which names are relative.
type tree struct {
	t  testing.TB
	at string
}

func (x tree) path(name string) string { return filepath.Join(x.at, name) }

func (x tree) dir(name string, mode os.FileMode) {
	require.NoError(x.t, os.MkdirAll(x.path(name), 0o755))
	x.chmod(name, mode)
}

func (x tree) file(name string, mode os.FileMode) {
	require.NoError(x.t, os.WriteFile(x.path(name), []byte("text"), 0o600))
	x.chmod(name, mode)
}

func (x tree) chmod(name string, mode os.FileMode) {
	require.NoError(x.t, os.Chmod(x.path(name), mode))
}

func (x tree) link(target, name string) { require.NoError(x.t, os.Symlink(target, x.path(name))) }

// give makes user and group the owners of a file or link, or keeps those that are -1.
func (x tree) give(name string, uid, gid int) {
	if os.Geteuid() != 0 {
		x.t.Skip("only root can give files to other users")
	}
	require.NoError(x.t, os.Lchown(x.path(name), uid, gid))
}

const sticky = os.ModeSticky | 0o777

// TestReadTrusted: each case makes a file "f" with mode 0600, and spoils it or what is above it.
func TestReadTrusted(t *testing.T) {
	for name, c := range map[string]struct {
		path string // "" is d/f
		make func(tree)
		want string // in the error, after the folder's path; "" means none
	}{
		"own":                               {"", func(tree) {}, ""},
		"its group can read it":             {"", func(x tree) { x.chmod("d/f", 0o440) }, ""},
		"in a sticky directory":             {"", func(x tree) { x.chmod("d", sticky) }, ""},
		"a directory of its own group":      {"", func(x tree) { x.chmod("d", 0o775) }, ""},
		"a link":                            {"l", func(x tree) { x.link("d/f", "l") }, ""},
		"a link to a directory":             {"e/../d/f", func(x tree) { x.dir("d/e", 0o755); x.link("d/e/..", "e"); x.link("../d", "d/d"); x.chmod("d", 0o755) }, ""},
		"a link with an absolute target":    {"l/f", func(x tree) { x.link(x.path("d"), "l") }, ""},
		"every user can read it":            {"", func(x tree) { x.chmod("d/f", 0o604) }, "/d/f can be read by every user: chmod 600, or set defaultMode: 0440"},
		"every user can write it":           {"", func(x tree) { x.chmod("d/f", 0o602) }, "/d/f can be read by every user"},
		"every user can write above":        {"", func(x tree) { x.chmod("d", 0o757) }, "/d can be written by every user"},
		"every user can write further up":   {"d/e/f", func(x tree) { x.dir("d/e", 0o700); x.file("d/e/f", 0o600); x.chmod("d", 0o777) }, "/d can be written by every user"},
		"a link where every user can write": {"e/l", func(x tree) { x.dir("e", 0o777); x.link("../d/f", "e/l") }, "/e can be written by every user"},
		"a target where every user can":     {"l", func(x tree) { x.chmod("d", 0o777); x.link("d/f", "l") }, "/d can be written by every user"},
		"links in a circle":                 {"l", func(x tree) { x.link("l", "l") }, "/l: too many levels"},
		"missing":                           {"no/f", func(tree) {}, "/no/f: no such file"},
		"a directory":                       {"d", func(tree) {}, "/d is no regular file"},
		"too large":                         {"", func(x tree) { require.NoError(x.t, os.Truncate(x.path("d/f"), 1<<40)) }, "/d/f has more than 1048576 bytes, and is no key"},
		"a FIFO":                            {"p", func(x tree) { require.NoError(x.t, syscall.Mkfifo(x.path("p"), 0o600)) }, "/p is no regular file"},
		"another user's":                    {"", func(x tree) { x.give("d/f", other, -1) }, "/d/f belongs to another user (uid 4242)"},
		"another user's directory":          {"", func(x tree) { x.give("d", other, -1) }, "/d belongs to another user (uid 4242)"},
		"another user's sticky directory":   {"", func(x tree) { x.chmod("d", sticky); x.give("d", other, -1) }, "/d belongs to another user (uid 4242)"},
		"another user's link in such as /tmp": {"e/l", func(x tree) {
			x.dir("e", sticky)
			x.link("../d/f", "e/l")
			x.give("e/l", other, -1)
		}, "/e/l belongs to another user (uid 4242)"},
		"another group can write above": {"", func(x tree) { x.give("d", -1, other); x.chmod("d", 0o775) }, "/d can be written by group 4242"},
		"another group can write it":    {"", func(x tree) { x.give("d/f", -1, other); x.chmod("d/f", 0o660) }, "/d/f can be written by group 4242"},
		"another group can read":        {"", func(x tree) { x.give("d/f", -1, other); x.chmod("d/f", 0o640) }, ""},
		"a Secret of Kubernetes with fsGroup": {"mount/key", func(x tree) {
			x.dir("mount", sticky|os.ModeSetgid)
			x.dir("mount/..2026_01_01", 0o755|os.ModeSetgid)
			x.file("mount/..2026_01_01/key", 0o440)
			x.link("..2026_01_01", "mount/..data")
			x.link("..data/key", "mount/key")
			x.give("mount", -1, other)
			x.give("mount/..2026_01_01", -1, other)
			x.give("mount/..2026_01_01/key", -1, other)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := tree{t, t.TempDir()}
			x.dir("d", 0o755)
			x.file("d/f", 0o600)
			c.make(x)
			path := c.path
			if path == "" {
				path = "d/f"
			}
			path = x.at + "/" + path
			text, _, err := ownfile.ReadTrusted(path, true)
			if c.want == "" {
				require.NoError(t, err)
				require.Equal(t, "text", string(text))
				return
			}
			require.ErrorContains(t, err, x.at+c.want)
		})
	}
}

// TestReadTrustedPublic: every user may read a certificate, and none may write it.
func TestReadTrustedPublic(t *testing.T) {
	x := tree{t, t.TempDir()}
	x.file("f", 0o644)
	t.Chdir(x.at)
	text, info, err := ownfile.ReadTrusted("./f", false)
	require.NoError(t, err)
	require.Equal(t, "text", string(text))
	require.Equal(t, int64(4), info.Size())
	x.chmod("f", 0o666)
	_, _, err = ownfile.ReadTrusted("f", false)
	require.ErrorContains(t, err, "/f can be written by every user")
}

// TestCheckTrusted: a directory in which files are made is not for everybody, not even if it is sticky.
func TestCheckTrusted(t *testing.T) {
	x := tree{t, t.TempDir()}
	x.dir("sticky/mine", 0o755)
	x.chmod("sticky", sticky)
	require.NoError(t, ownfile.CheckTrusted(x.path("sticky/mine")))
	require.NoError(t, ownfile.CheckTrusted(x.path("sticky/none/below")))
	require.ErrorContains(t, ownfile.CheckTrusted(x.path("sticky")), "/sticky can be written by every user")
	require.ErrorContains(t, ownfile.CheckTrusted(x.at+"/sticky/."), "/sticky can be written by every user")
	x.chmod("sticky", 0o777)
	require.ErrorContains(t, ownfile.CheckTrusted(x.path("sticky/none")), "/sticky can be written by every user")
}
