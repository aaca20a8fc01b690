package ownfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// maxTrusted is the most bytes of a file. The authorities of a whole system have 250 KB.
const maxTrusted = 1 << 20

// ReadTrusted returns the bytes of a regular file that no other user could have put there and none can
// change, and what the bytes belong to. Root is trusted, since it can do everything. The rule is that
// of sshd's StrictModes:
//
//   - The file, the directories above it up to the root, and the links on the way belong to this user
//     or to root. That holds for root, too: it takes no files of other users.
//   - Others cannot write to them. The group can if it is this process's own or root's. A directory
//     above may be writable by everybody if it is sticky as /tmp is: then each entry has to be owned.
//   - Other users cannot read a secret. Its group can: Kubernetes mounts secrets so.
//
// A user namespace may hide who owns a directory, as Apptainer's does for /home. Then it counts as
// root's. A file has to be this user's or root's even there.
//
// The file that is checked is the one that is open, so nobody can put another one in its place in between.
func ReadTrusted(path string, secret bool) ([]byte, os.FileInfo, error) {
	file, opened, err := open(path, os.O_RDONLY|dontWait, 0)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	if secret && opened.Mode().Perm()&0o007 != 0 && hasModes {
		return nil, nil, fmt.Errorf("%s can be read by every user: chmod 600, or set defaultMode: 0440 of a Kubernetes volume", path)
	}
	named, err := trusted(path)
	if err != nil {
		return nil, nil, err
	}
	if !os.SameFile(opened, named) {
		return nil, nil, fmt.Errorf("%s was replaced while it was read", path)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxTrusted+1))
	if err == nil && len(text) > maxTrusted {
		err = fmt.Errorf("%s has more than %d bytes, and is no key, certificate, secret or token", path, maxTrusted)
	}
	return text, opened, err
}

// CheckTrusted returns an error if another user could change the file or directory that path names, or
// could make files in that directory. What does not exist is checked as far as it does.
func CheckTrusted(path string) error {
	_, err := trusted(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
