//go:build unix

package ownfile

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const maxLinks = 40 // as in Linux

// trusted returns what path names if no other user could change it.
func trusted(path string) (os.FileInfo, error) {
	if !filepath.IsAbs(path) {
		dir, err := os.Getwd()
		if err != nil {
			return nil, err
		}
		path = dir + "/" + path // not cleaned: the directory before ".." may be a link
	}
	return follow(path, check)
}

// follow returns what path names. It goes there as the kernel does, and checks each step. A check learns
// whether its step is only on the way.
func follow(path string, check func(at string, info os.FileInfo, onTheWay bool) error) (os.FileInfo, error) {
	at, rest := ".", path
	if filepath.IsAbs(path) {
		at = "/"
	}
	links := 0
	for {
		rest = strings.TrimLeft(rest, "/")
		info, err := os.Lstat(at)
		if err == nil {
			err = check(at, info, rest != "")
		}
		if err != nil {
			return nil, err
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(at)
			if err != nil {
				return nil, err
			}
			if links++; links > maxLinks {
				return nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
			}
			if at = filepath.Dir(at); filepath.IsAbs(target) {
				at = "/"
			}
			rest = target + "/" + rest
			continue
		}
		if rest == "" {
			return info, nil
		}
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		at = filepath.Join(at, name) // at has no links, so ".." is the directory above
	}
}

// check returns an error if another user could change the file, directory or link at path. It may be
// a sticky directory if it is only on the way.
func check(path string, info os.FileInfo, onTheWay bool) error {
	mode := info.Mode()
	s := info.Sys().(*syscall.Stat_t)
	switch {
	case Foreign(info) && (mode.IsRegular() || mapped(int(s.Uid))):
		return fmt.Errorf("%s belongs to another user (uid %d), who could change it: it must be this user's (uid %d) or root's, so chown it, or run as its owner", path, s.Uid, os.Geteuid())
	case mode&fs.ModeSymlink != 0 || onTheWay && mode&fs.ModeSticky != 0:
		return nil
	case mode.Perm()&0o002 != 0:
		return fmt.Errorf("%s can be written by every user: chmod go-w, or choose another directory", path)
	case mode.Perm()&0o020 != 0 && hasACL(path):
		return fmt.Errorf("%s can be written by users or groups of its access control list: setfacl -b, or choose another directory", path)
	case mode.Perm()&0o020 != 0 && s.Gid != 0 && int(s.Gid) != os.Getegid():
		return fmt.Errorf("%s can be written by group %d, which is not this process's own: chmod go-w, or choose another directory", path, s.Gid)
	}
	return nil
}

// mapped reports whether uid is a user of this process's user namespace. If not, it stands for all
// others.
func mapped(uid int) bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	for line := range strings.Lines(string(text)) {
		var first, outside, count int
		if _, e := fmt.Sscan(line, &first, &outside, &count); e != nil || uid >= first && uid < first+count {
			return true
		}
	}
	return err != nil
}
