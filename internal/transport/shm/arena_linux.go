package shm

import (
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// arenaSize returns the size of each rank's arena, or why there are none.
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

// arenasAllowed returns why this process should have no arenas. A process whose files or
// mappings are limited would hit the limit, now or later.
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

// mapArenas maps the arenas of all ranks, each of size bytes, from offset off in fd: this
// rank's for writing, the others' for reading only.
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

// unmapPart unmaps b, which may be a part of a mapping.
func unmapPart(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}
