package ownfile_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// as calls f as another user, and group. Only this thread changes.
func as(t *testing.T, uid, gid int, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	runtime.LockOSThread()
	set := func(call uintptr, id int) {
		_, _, errno := syscall.RawSyscall(call, ^uintptr(0), uintptr(id), ^uintptr(0))
		require.Zero(t, errno)
	}
	set(syscall.SYS_SETRESGID, gid)
	set(syscall.SYS_SETRESUID, uid)
	defer runtime.UnlockOSThread()
	defer set(syscall.SYS_SETRESGID, 0)
	defer set(syscall.SYS_SETRESUID, 0)
	f()
}

// TestRootsFiles: an ordinary user takes files of root. OpenShift gives a container any user, with group
// 0, and files of root. The group 0 may write to their directories, too.
func TestRootsFiles(t *testing.T) {
	x := tree{t, t.TempDir()}
	require.NoError(t, os.Chmod(x.at+"/..", 0o755)) // of the test's name
	x.chmod(".", 0o755)
	x.dir("d", 0o775)
	x.file("d/f", 0o640)
	as(t, other, 0, func() {
		text, _, err := ownfile.ReadTrusted(x.path("d/f"), true)
		require.NoError(t, err)
		require.Equal(t, "text", string(text))
	})
	x.give("d", other+1, 0)
	as(t, other, 0, func() {
		_, _, err := ownfile.ReadTrusted(x.path("d/f"), true)
		require.ErrorContains(t, err, "/d belongs to another user (uid 4243)")
		require.ErrorContains(t, ownfile.CheckTrusted(x.path("d")), "must be this user's (uid 4242) or root's")
	})
}

// TestACL: an access control list that lets another user write shows as rights of the group.
func TestACL(t *testing.T) {
	x := tree{t, t.TempDir()}
	x.dir("d", 0o755)
	x.file("d/f", 0o600)
	list := func(rights byte) []byte {
		b := []byte{2, 0, 0, 0}
		for _, e := range [][3]byte{{1, 6}, {2, rights, other & 0xff}, {4, 0}, {16, rights}, {32, 0}} { // owner, user, group, mask, others
			b = append(b, e[0], 0, e[1], 0, e[2], 0, 0, 0)
		}
		return b
	}
	set := func(name string, rights byte) {
		if err := syscall.Setxattr(x.path(name), "system.posix_acl_access", list(rights), 0); err != nil {
			t.Skip("access control lists are not permitted here: ", err)
		}
	}
	set("d/f", 4)
	_, _, err := ownfile.ReadTrusted(x.path("d/f"), true)
	require.NoError(t, err, "the user may read it, as a group may")
	set("d/f", 6)
	_, _, err = ownfile.ReadTrusted(x.path("d/f"), true)
	require.ErrorContains(t, err, "/d/f can be written by users or groups of its access control list: setfacl -b")
	x.file("d/g", 0o600)
	set("d", 7)
	_, _, err = ownfile.ReadTrusted(x.path("d/g"), true)
	require.ErrorContains(t, err, "/d can be written by users or groups of its access control list")
}

const namespaced = "OWNFILE_TEST_PATH"

// TestUserNamespace: in a namespace that has only this user, all other owners look alike. Directories of
// unknown users are taken, files are not.
func TestUserNamespace(t *testing.T) {
	if path := os.Getenv(namespaced); path != "" {
		_, _, err := ownfile.ReadTrusted(path, true)
		require.NoError(t, err)
		return
	}
	x := tree{t, t.TempDir()}
	x.dir("d", 0o755)
	x.file("d/f", 0o600)
	inside := func() (string, error) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestUserNamespace$")
		cmd.Env = append(os.Environ(), namespaced+"="+x.path("d/f"))
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 1000, HostID: os.Geteuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 1000, HostID: os.Getegid(), Size: 1}},
		}
		out, err := cmd.CombinedOutput()
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
			t.Skip("user namespaces are not permitted here: ", err)
		}
		return string(out), err
	}
	out, err := inside()
	require.NoError(t, err, out)
	x.give("d", other, -1)
	_, _, err = ownfile.ReadTrusted(x.path("d/f"), true)
	require.ErrorContains(t, err, "/d belongs to another user", "outside")
	out, err = inside()
	require.NoError(t, err, out)
	x.give("d/f", other, -1)
	x.chmod("d/f", 0o640)
	out, err = inside()
	require.Error(t, err)
	require.Contains(t, out, "/d/f belongs to another user")
}
