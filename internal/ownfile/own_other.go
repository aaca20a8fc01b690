//go:build !unix

package ownfile

import (
	"io/fs"
	"net"
)

const atOnce = 0

// Foreign returns false: the mode does not say who has made a file.
func Foreign(fs.FileInfo) bool { return false }

// Listen listens on a socket.
func Listen(path string) (net.Listener, error) { return net.Listen("unix", path) }
