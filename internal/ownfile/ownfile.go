// Package ownfile makes and reads files in directories to which other users may write, such as /tmp. A file that it makes
// is new, so no other user has it open or has chosen where it lies. Only this user can read it. No function waits for
// another process. ReadTrusted reads files that other users could not replace, such as keys.
package ownfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// MkdirAll makes a directory that only this user can use, and its parents, if they do not exist. A path that leads
// through a link of another user is refused.
func MkdirAll(dir string) error {
	_, err := follow(dir, noForeignLink)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		_, err = follow(dir, noForeignLink) // that another user has made meanwhile
	}
	return err
}

func noForeignLink(path string, info fs.FileInfo, _ bool) error {
	if info.Mode()&fs.ModeSymlink != 0 && Foreign(info) {
		return fmt.Errorf("%s is a link that another user has made: choose a directory of your own", path)
	}
	return nil
}

// Create makes a file to append to. It fails if there is one.
func Create(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	return file, Explain(path, err)
}

// Replace writes a file so that a reader sees the last content or all of the new one. It replaces a link, too.
func Replace(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		err = errors.Join(Explain(path, err), os.Remove(file.Name()))
	}
	return err
}

// Read returns the first limit bytes of a file. It follows links, and refuses what is no regular file.
func Read(path string, limit int64) ([]byte, error) {
	file, _, err := open(path, os.O_RDONLY|dontWait, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, limit))
}

// Open is os.OpenFile for regular files. It follows no link.
func Open(path string, flags int, mode fs.FileMode) (*os.File, fs.FileInfo, error) {
	return open(path, flags|dontWait|noLink, mode)
}

// open is os.OpenFile for regular files.
func open(path string, flags int, mode fs.FileMode) (*os.File, fs.FileInfo, error) {
	file, err := os.OpenFile(path, flags, mode)
	if err != nil {
		return nil, nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", path)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

// Explain returns err, an error of a call that makes, replaces or removes a file, with what to do if the file is another
// user's.
func Explain(path string, err error) error {
	if err == nil {
		return nil
	}
	if info, no := os.Lstat(path); no == nil && Foreign(info) {
		return fmt.Errorf("%s belongs to another user: choose a directory of your own: %w", path, err)
	}
	return err
}
