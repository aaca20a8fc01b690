//go:build unix

package credentials

import (
	"errors"
	"os"
)

// private returns an error if all users can read a file. Its group may: Kubernetes mounts secrets so.
func private(info os.FileInfo) error {
	if info.Mode().Perm()&0o007 != 0 {
		return errors.New("can be read by every user: chmod 600")
	}
	return nil
}
