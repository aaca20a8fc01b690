package memfd

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/must"
)

// TestCreate makes a file on this kernel, and with the answers of others.
func TestCreate(t *testing.T) {
	defer func() { memfdCreate = unix.MemfdCreate }()
	unless := func(fine bool, err error) error {
		if fine {
			return nil
		}
		return err
	}
	for name, answer := range map[string]func(flags int) error{
		"this kernel":                          func(int) error { return nil },
		"before 6.3":                           func(flags int) error { return unless(flags&unix.MFD_NOEXEC_SEAL == 0, unix.EINVAL) },
		"6.3 to 6.5 with vm.memfd_noexec at 2": func(flags int) error { return unless(flags&unix.MFD_NOEXEC_SEAL != 0, unix.EACCES) },
	} {
		t.Run(name, func(t *testing.T) {
			memfdCreate = func(name string, flags int) (int, error) {
				if err := answer(flags); err != nil {
					return -1, err
				}
				return unix.MemfdCreate(name, flags)
			}
			fd := must.Get(Create("c10d", 4096))
			defer unix.Close(fd)
			require.NoError(t, unix.Ftruncate(fd, 4096))
			must.Get(unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL))
			if _, err := os.Stat("/proc/sys/vm/memfd_noexec"); err == nil && name != "before 6.3" {
				var s unix.Stat_t
				require.NoError(t, unix.Fstat(fd, &s))
				require.Zero(t, s.Mode&0o111, "nobody can execute it")
			}
		})
	}
}
