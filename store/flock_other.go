//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package store

import (
	"errors"
	"fmt"
	"os"
)

func flock(*os.File, bool) (bool, error) {
	return false, fmt.Errorf("file locks on this system: %w", errors.ErrUnsupported)
}
