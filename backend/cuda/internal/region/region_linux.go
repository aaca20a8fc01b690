package region

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/hostmem"
	"github.com/c10d-go/c10d/internal/memfd"
)

// seals keep anybody from making a region smaller under the others' feet.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// createShared returns n bytes of zeros that processes of this host open by their
// name. They are a file without a directory: nothing is left of it once nobody has
// it, however the processes end. All bytes are there from the start, so that a lack
// of memory is an error here and no bus error later. This process passes the file, as
// those of a host pass memory for CPU tensors: they have to be in one network namespace.
func createShared(id string, n int) (*SharedMemory, error) {
	if err := Before("memfd_create", n); err != nil {
		return nil, err
	}
	fd, err := memfd.Create(memfdName(id), n)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), memfdName(id))
	m, err := reserve(f, n)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	m.Name = id
	if !Passes && OwnProcess {
		m.forget = f.Close
		return m, nil
	}
	server, err := memfd.Serve(memfdName(id), fd)
	if err != nil {
		return nil, errors.Join(err, m.unmap(), f.Close())
	}
	m.forget = func() error { return errors.Join(server.Close(), f.Close()) }
	return m, nil
}

// memfdName is the name of a region's file, and of the socket by which this process passes it to others.
func memfdName(id string) string { return "c10d-cuda-" + id }

// host has /proc and /sys; a variable for tests.
var host = hostmem.Host

// Regions of roomFrom bytes and more are only made where the process may take that, and roomFrom bytes more. Where it may
// not, the system ends the process and does not return an error.
const roomFrom = 1 << 20

func reserve(f *os.File, n int) (*SharedMemory, error) {
	err := Before("fallocate", n)
	if err == nil && n >= roomFrom {
		if left := hostmem.Available(host); left < int64(n)+roomFrom {
			return nil, fmt.Errorf("%d bytes of shared memory: the system, a limit of the process or its cgroup leaves %d bytes", n, left)
		}
	}
	if err == nil {
		for err = unix.EINTR; err == unix.EINTR; {
			err = unix.Fallocate(int(f.Fd()), 0, 0, int64(n))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("reserving %d bytes of shared memory: %w", n, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("sealing shared memory: %w", err)
	}
	return mapShared(f, n)
}

// openShared opens n bytes of another process, which has them open.
func openShared(name string, n int) (*SharedMemory, error) {
	if err := Before("open", n); err != nil {
		return nil, err
	}
	f, err := memfd.Take(memfdName(name))
	if err != nil {
		return nil, fmt.Errorf("asking another process for shared memory: %w", err)
	}
	defer f.Close()
	s, err := f.Stat()
	if err != nil {
		return nil, err
	}
	have, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("seals of shared memory: %w", err)
	}
	if s.Size() != int64(n) || have&seals != seals {
		return nil, fmt.Errorf("shared memory has %d bytes and seals %#x, want %d and %#x", s.Size(), have, n, seals)
	}
	return mapShared(f, n)
}

func mapShared(f *os.File, n int) (*SharedMemory, error) {
	err := Before("mmap", n)
	var b []byte
	if err == nil {
		b, err = unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes of shared memory: %w", n, err)
	}
	return &SharedMemory{Bytes: b, unmap: func() error { return unix.Munmap(b) }}, nil
}
