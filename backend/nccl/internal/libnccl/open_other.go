//go:build !(linux && !android && (amd64 || arm64))

package libnccl

import (
	"fmt"
	"runtime"
)

// Open returns an error: there is no NCCL for this system.
func Open(string) (API, error) {
	return nil, fmt.Errorf("%w: there is none for %s/%s", ErrNoLibrary, runtime.GOOS, runtime.GOARCH)
}
