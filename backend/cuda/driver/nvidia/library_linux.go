//go:build !android && (amd64 || arm64)

package nvidia

import (
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

// libraries is where the driver's library may be; the second is Windows' Linux.
var libraries = []string{"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}

func load() (uintptr, error) {
	// The reason why a library cannot be loaded is told to the thread that tried.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var first error
	for _, name := range libraries {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err == nil {
			return h, nil
		}
		if first == nil {
			first = err
		}
	}
	return 0, fmt.Errorf("%w, nor any of %q", first, libraries[1:])
}

func symbol(library uintptr, name string) (uintptr, error) {
	return purego.Dlsym(library, name)
}
