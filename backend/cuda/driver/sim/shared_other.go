//go:build !(linux || darwin || freebsd || netbsd || openbsd)

package sim

import "errors"

// canShare tells that memory in files does not work here.
const canShare = false

func createShared(string, string, int) ([]byte, func(unmap bool), error) {
	return nil, nil, errors.ErrUnsupported
}

func openShared(string, string) ([]byte, func(unmap bool), error) {
	return nil, nil, errors.ErrUnsupported
}
