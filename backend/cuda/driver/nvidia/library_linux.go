//go:build !android && (amd64 || arm64)

package nvidia

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"unsafe"

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

const (
	// connections is how CUDA is told how many queues a device has.
	connections     = "CUDA_DEVICE_MAX_CONNECTIONS"
	mostConnections = 32
)

// connect asks for as many queues as CUDA has, unless somebody has asked for others. CUDA
// looks in the C library's environment, which without cgo is not Go's. It returns how many
// there are, 0 if that is CUDA's own choice.
func connect() int {
	asked := cmp.Or(os.Getenv(connections), strconv.Itoa(mostConnections))
	setenv, err := symbol(purego.RTLD_DEFAULT, "setenv")
	if err != nil {
		return 0
	}
	name, value := []byte(connections+"\x00"), []byte(asked+"\x00")
	purego.SyscallN(setenv, uintptr(unsafe.Pointer(&name[0])), uintptr(unsafe.Pointer(&value[0])), 1)
	runtime.KeepAlive(name)
	runtime.KeepAlive(value)
	n, _ := strconv.Atoi(asked)
	return min(max(n, 0), mostConnections)
}
