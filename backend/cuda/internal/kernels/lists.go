package kernels

import (
	_ "embed"
	"encoding/binary"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Lists has the kernel List, for devices of compute capability 8.0 and later.
//
//go:embed lists.ptx
var Lists []byte

// List is c10d_list(list): it copies up to MostParts tensors to where they are in order, or back.
const List = "c10d_list"

// MostParts is how many tensors a launch of List takes. A kernel's parameter has at most 4 KiB.
const MostParts = 128

// ListPart is N bytes of a tensor at At, which are at Off in order.
type ListPart struct {
	At     driver.Ptr
	Off, N int
}

const (
	listPart  = 24
	listBytes = 16 + MostParts*listPart
)

// ListLaunch returns a launch of List. F is the kernel, and back says that the tensors are written.
func ListLaunch(f driver.Function, packed driver.Ptr, back bool, parts []ListPart) *driver.Launch {
	var b [listBytes]byte
	l := &driver.Launch{Function: f, Block: driver.Dim{X: 256}, Access: make([]driver.Access, 0, len(parts)+1)}
	binary.NativeEndian.PutUint64(b[:], uint64(packed))
	read, write := driver.Reads, driver.Writes
	if back {
		binary.NativeEndian.PutUint64(b[8:], 1)
		read, write = driver.Writes, driver.Reads
	}
	most, end := 0, 0
	for i, p := range parts {
		at := b[16+i*listPart:]
		binary.NativeEndian.PutUint64(at, uint64(p.At))
		binary.NativeEndian.PutUint64(at[8:], uint64(p.Off))
		binary.NativeEndian.PutUint64(at[16:], uint64(p.N))
		most, end = max(most, p.N), max(end, p.Off+p.N)
		l.Access = append(l.Access, read(p.At, p.N))
	}
	first := end
	for _, p := range parts {
		first = min(first, p.Off)
	}
	l.Access = append(l.Access, write(packed+driver.Ptr(first), end-first))
	// A block takes 16 KiB of a tensor, and of long ones more.
	l.Grid = driver.Dim{X: uint32(len(parts)), Y: uint32(min(max((most+16<<10-1)/(16<<10), 1), 32))}
	l.Args = new(driver.Args).Struct(b[:], 8)
	return l
}

// ParseList reads the parameter of a launch of so many parts, for kernels in Go.
func ParseList(b []byte, n int) (packed driver.Ptr, back bool, parts []ListPart) {
	get := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
	for i := range n {
		at := 16 + i*listPart
		parts = append(parts, ListPart{driver.Ptr(get(at)), int(get(at + 8)), int(get(at + 16))})
	}
	return driver.Ptr(get(0)), get(8) != 0, parts
}
