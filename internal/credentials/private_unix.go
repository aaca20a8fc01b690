//go:build unix

package credentials

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// private returns an error if all users can read a file. Its group may: Kubernetes mounts secrets so.
func private(info os.FileInfo) error {
	if info.Mode().Perm()&0o007 != 0 {
		return errors.New("can be read by every user: chmod 600")
	}
	return nil
}

// own returns an error if another user could have put files into a directory.
func own(info os.FileInfo) error {
	if info.Mode().Perm()&0o002 != 0 {
		return errors.New("can be written by every user, who could put an authority there: choose a directory of your own")
	}
	me := os.Geteuid()
	if s, ok := info.Sys().(*syscall.Stat_t); ok && me != 0 && int(s.Uid) != me && s.Uid != 0 {
		return fmt.Errorf("belongs to another user (uid %d), who could put an authority there: choose a directory of your own", s.Uid)
	}
	return nil
}
