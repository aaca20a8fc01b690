package shm

import (
	"crypto/rand"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// here returns this process's mark. It is drawn once, not once a group, so that two
// ranks of one process find out that they are.
var here = sync.OnceValue(func() *mark {
	m := new(mark)
	rand.Read(m[:])
	return m
})

// window is what a reader of other processes' memory needs; one at a time uses it.
type window struct {
	local  [2]unix.Iovec
	remote [2]unix.RemoteIovec
	got    mark
}

// read is glimpse by process_vm_readv(2). With the data comes the mark, out of the same
// address space: should the process have died and its number been given to another, the
// mark is not there.
func (w *window) read(p *place, dst []byte, addr uint64) error {
	w.local[0].Base = unsafe.SliceData(dst)
	w.local[0].SetLen(len(dst))
	w.local[1].Base = &w.got[0]
	w.local[1].SetLen(len(w.got))
	w.remote[0] = unix.RemoteIovec{Base: uintptr(addr), Len: len(dst)}
	w.remote[1] = unix.RemoteIovec{Base: uintptr(p.at), Len: len(w.got)}
	clear(w.got[:])
	n, _, e := unix.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(p.pid),
		uintptr(unsafe.Pointer(&w.local)), 2, uintptr(unsafe.Pointer(&w.remote)), 2, 0)
	w.local[0].Base = nil
	switch {
	case e != 0:
		return e
	case int(n) != len(dst)+len(w.got):
		return unix.EFAULT
	case w.got != p.mark:
		return errStranger
	}
	return nil
}
