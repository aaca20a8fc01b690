//go:build amd64

package nvidia

import "golang.org/x/sys/windows"

// load loads the library from Windows' own folder and no other.
func load() (uintptr, error) {
	h, err := windows.LoadLibraryEx("nvcuda.dll", 0, windows.LOAD_LIBRARY_SEARCH_SYSTEM32)
	return uintptr(h), err
}

func symbol(library uintptr, name string) (uintptr, error) {
	return windows.GetProcAddress(windows.Handle(library), name)
}

// connect leaves CUDA its own number of queues: see [Open].
func connect() int { return 0 }
