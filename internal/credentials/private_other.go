//go:build !unix

package credentials

import "os"

// private returns nil: the mode does not say who can read a file.
func private(os.FileInfo) error { return nil }

// own returns nil: the mode does not say who can write to a directory.
func own(os.FileInfo) error { return nil }
