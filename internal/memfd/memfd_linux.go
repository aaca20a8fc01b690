package memfd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/openfiles"
)

// memfdCreate is replaced by tests.
var memfdCreate = unix.MemfdCreate

// Create returns the descriptor of an empty file that can be sealed, closed on exec. The caller makes it size bytes long.
// If files of this process may not have so many, Create returns an error: the process would get a signal, which ends a
// Go program.
//
// The file can never be executed. Linux 6.3 to 6.5 refuse other files if the sysctl vm.memfd_noexec is 2. Earlier kernels do
// not know the flag for that, and make a plain file.
func Create(name string, size int) (int, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &l); err != nil {
		return -1, fmt.Errorf("limit of file sizes: %w", err)
	}
	if l.Cur < uint64(size) {
		return -1, fmt.Errorf("%d bytes of shared memory: files of this process may have %d bytes (ulimit -f): %w", size, l.Cur, unix.EFBIG)
	}
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := memfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = memfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", openfiles.Explain(err))
	}
	return fd, nil
}
