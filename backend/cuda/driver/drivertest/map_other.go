//go:build !(linux || darwin || freebsd || netbsd || openbsd)

package drivertest

import "errors"

func mapFile(string, int) ([]byte, func() error, error) {
	return nil, nil, errors.ErrUnsupported
}
