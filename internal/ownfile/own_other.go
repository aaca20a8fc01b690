//go:build !unix

package ownfile

import (
	"io/fs"
	"net"
	"os"
)

// The mode does not say who can use a file.
const (
	dontWait = 0
	noLink   = 0
	hasModes = false
)

func follow(path string, _ func(string, fs.FileInfo, bool) error) (fs.FileInfo, error) {
	return os.Stat(path)
}

func trusted(path string) (fs.FileInfo, error) { return os.Stat(path) }

// Foreign returns false: the mode does not say who has made a file.
func Foreign(fs.FileInfo) bool { return false }

// Listen listens on a socket.
func Listen(path string) (net.Listener, error) { return net.Listen("unix", path) }
