//go:build !(linux && !android && (amd64 || arm64)) && !(windows && amd64)

package nvidia

import (
	"runtime"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func open() (driver.Driver, error) {
	return nil, noDevice("there is no CUDA for %s, or this package does not know it", runtime.GOOS+"/"+runtime.GOARCH)
}
