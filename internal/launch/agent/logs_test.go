//go:build unix

package agent

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

// TestLogsAreOwn: only this user can read what a job leaves, also in a directory that exists. What another process puts
// in the place of a log during the job gets nothing.
func TestLogsAreOwn(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	for name, trap := range map[string]string{"link": `ln -s "$1/behind"`, "fifo": "mkfifo", "file": "touch"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			behind, logs := filepath.Join(dir, "behind"), filepath.Join(dir, "new", "logs")
			require.NoError(t, os.WriteFile(behind, []byte("as it was"), 0o666))
			j := sh(1, `set -e
				case $TORCHELASTIC_ERROR_FILE in "$1"/new/*) echo the files of the ranks are beside their logs; exit 0;; esac
				echo $TORCHELASTIC_RESTART_COUNT
				[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
				mv "$1/new/logs/rank0.log" "$1/kept"
				`+trap+` "$1/new/logs/rank0.log"
				`+strings.ReplaceAll(trap, "touch", ":")+` "$1/new/logs/rank0.error.json"
				echo reason > $TORCHELASTIC_ERROR_FILE
				exit 1`)
			j.Command = append(j.Command, "sh", dir)
			j.LogDir, j.MaxRestarts = logs, 1
			s, _, _ := run(t, j)
			require.True(t, s.OK)
			for path, want := range map[string]string{
				behind: "as it was", filepath.Join(dir, "kept"): "0\n--- restart 1 ---\n1\n", filepath.Join(logs, "rank0.error.json"): "reason\n",
			} {
				require.Equal(t, want, string(must.Get(os.ReadFile(path))))
			}
			for path, want := range map[string]fs.FileMode{
				"kept": 0o600, "new/logs/rank0.error.json": 0o600, "new": fs.ModeDir | 0o700, "new/logs": fs.ModeDir | 0o700,
			} {
				require.Equal(t, want, must.Get(os.Lstat(filepath.Join(dir, path))).Mode(), path)
			}
			if info, err := os.Stat(filepath.Join(logs, "rank0.log")); name == "file" {
				require.NoError(t, err)
				require.Zero(t, info.Size())
			}
		})
	}
}

// TestForeignLogs: what other users have put into a directory like /tmp before is not used. Root removes it, and other
// users, who cannot, get an error.
func TestForeignLogs(t *testing.T) {
	if os.Geteuid() != 0 || runtime.GOOS != "linux" {
		t.Skip("only root can make files of other users")
	}
	const user, other = 65534, 65533
	t.Setenv("TMPDIR", "/tmp")
	for name, trap := range map[string]func(behind, path string) error{
		"link":      os.Symlink,
		"hard link": os.Link,
		"fifo":      func(_, path string) error { return syscall.Mkfifo(path, 0o666) },
		"file":      func(_, path string) error { return os.WriteFile(path, nil, 0o666) },
	} {
		for _, uid := range []int{user, 0} {
			for _, file := range []string{"rank0.log", "rank0.error.json", "rank7.log"} {
				t.Run(strings.Join([]string{name, file}, " "), func(t *testing.T) {
					dir, err := os.MkdirTemp("", "c10d-test") // t.TempDir is in a directory of root alone
					require.NoError(t, err)
					defer os.RemoveAll(dir)
					require.NoError(t, os.Chmod(dir, 0o777|fs.ModeSticky))
					behind, path := filepath.Join(dir, "behind"), filepath.Join(dir, file)
					require.NoError(t, os.WriteFile(behind, []byte("as it was"), 0o666))
					require.NoError(t, trap(behind, path))
					require.NoError(t, os.Lchown(path, other, other))
					require.NoError(t, syscall.Setreuid(-1, uid))
					defer func() { require.NoError(t, syscall.Setreuid(-1, 0)) }()
					j := sh(1, "echo secret; echo secret > $TORCHELASTIC_ERROR_FILE; exit 1")
					j.LogDir = dir
					_, err = Run(t.Context(), j)
					text, no := os.ReadFile(behind)
					require.NoError(t, no)
					require.Equal(t, "as it was", string(text))
					if uid != 0 {
						require.ErrorContains(t, err, path+" belongs to another user: choose a directory of your own")
						return
					}
					require.NoError(t, err)
					if info, err := os.Lstat(path); err == nil {
						require.Equal(t, fs.FileMode(0o600), info.Mode())
						require.Zero(t, info.Sys().(*syscall.Stat_t).Uid)
					}
				})
			}
		}
	}
}

// TestForeignLogDir: a link of another user in the path of a log directory is not followed.
func TestForeignLogDir(t *testing.T) {
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "logs")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rank0.log"), []byte("as it was"), 0o600))
	require.NoError(t, os.Symlink(dir, link))
	if err := os.Lchown(link, 1, 1); err != nil {
		t.Skip("only root can make links of other users")
	}
	j := sh(1, "echo secret")
	j.LogDir = link
	_, err := Run(t.Context(), j)
	require.ErrorContains(t, err, link+" is a link that another user has made: choose a directory of your own")
	require.Equal(t, "as it was", string(must.Get(os.ReadFile(filepath.Join(dir, "rank0.log")))))
}

// TestTrapsOfRanks: the launcher does not wait for what a rank puts in the place of its files.
func TestTrapsOfRanks(t *testing.T) {
	j := sh(1, `mkfifo "$TORCHELASTIC_ERROR_FILE" "$C10D_FAILURE_FILE"; exit 3`)
	j.LogDir = t.TempDir()
	s, _, _ := run(t, j)
	require.Equal(t, 3, s.ExitCode)
	j = sh(1, `dd if=/dev/zero of="$TORCHELASTIC_ERROR_FILE" bs=1024 count=1 seek=1000000 2>/dev/null; exit 3`)
	j.LogDir = t.TempDir()
	s, _, _ = run(t, j)
	require.Equal(t, 3, s.ExitCode)
	require.Len(t, s.First.Message, maxErrorMessage)
	require.Equal(t, int64(maxErrorFile), must.Get(os.Stat(s.First.ErrorFile)).Size())
}
