package shm

import (
	"crypto/rand"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ownMark returns this process's mark. There is one for the process, not for each group, so
// that two ranks of one process recognise each other.
var ownMark = sync.OnceValue(func() *mark {
	m := new(mark)
	rand.Read(m[:])
	return m
})

// vmReader holds the arguments of process_vm_readv(2), for one goroutine at a time.
type vmReader struct {
	local  [2]unix.Iovec
	remote [2]unix.RemoteIovec
	got    mark
}

// read implements readMemory by process_vm_readv(2). It reads the mark in the same call: if the
// process has died and its number belongs to another one, the mark is not there.
func (w *vmReader) read(p *process, dst []byte, addr uint64) error {
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
		return errOtherProcess
	}
	return nil
}
