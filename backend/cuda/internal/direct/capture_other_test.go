//go:build !linux || !(amd64 || arm64)

package direct_test

import "errors"

// capture makes a graph of what enqueue gives the stream, and returns what launches it.
func (m *member) capture(func() error) (launch func() error, err error) {
	return nil, errors.ErrUnsupported
}
