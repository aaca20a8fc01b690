package shm

import (
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// arenaSize returns how large each rank's arena is, or why there are none.
func arenaSize(ranks int, o Options) (int, error) {
	if err := arenasAllowed(o); err != nil {
		return 0, err
	}
	n := o.arena
	if n == 0 {
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err != nil {
			return 0, arenasFailed(err)
		}
		n = int(min(uint64(info.Totalram)*uint64(info.Unit), maxArenas/uint64(ranks)))
	}
	return max(n&^(hugePage-1), hugePage), nil
}

// arenasAllowed returns why this process should have none: it would find a limit where
// the sizes of files and mappings are restricted, with arenas or, later, because of them.
func arenasAllowed(o Options) error {
	if o.noArenas != 0 {
		return o.noArenas
	}
	if strconv.IntSize < 64 {
		return errArenas(arenasNarrow)
	}
	for _, what := range []int{unix.RLIMIT_AS, unix.RLIMIT_FSIZE} {
		var l unix.Rlimit
		if err := unix.Getrlimit(what, &l); err != nil {
			return arenasFailed(err)
		}
		if l.Cur != unix.RLIM_INFINITY {
			return errArenas(arenasLimited)
		}
	}
	return nil
}

// mapArenas maps all ranks' arenas, each of size bytes, from off bytes on in fd: this rank's
// to be written, the others' only to be read.
func (g *Group) mapArenas(fd, off, size int) error {
	n := size * g.size
	at, err := unix.MmapPtr(fd, int64(off), nil, uintptr(n), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return arenasFailed(err)
	}
	all := unsafe.Slice((*byte)(at), n)
	// A core dump would fill them. Huge pages there are only if the system has them for
	// shared memory, and then nothing is lost without.
	err = unix.Madvise(all, unix.MADV_DONTDUMP)
	unix.Madvise(all, unix.MADV_HUGEPAGE)
	if err == nil {
		err = unix.Mprotect(all[g.rank*size:][:size], unix.PROT_READ|unix.PROT_WRITE)
	}
	if err != nil {
		unmapPart(all)
		return arenasFailed(err)
	}
	for r := range g.size {
		g.arenas = append(g.arenas, all[r*size:][:size:size])
	}
	return nil
}

// empty gives back the pages of b, which are zeros from then on.
func empty(b []byte) {
	if unix.Madvise(b, unix.MADV_REMOVE) != nil {
		clear(b)
	}
}

// unmapPart unmaps b, which need not be a mapping of its own.
func unmapPart(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}
