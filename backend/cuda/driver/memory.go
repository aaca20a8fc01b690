package driver

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/c10d-go/c10d/tensor"
)

// Ptr is an address in the one address space that the devices and the
// page-locked memory of a process share.
type Ptr uint64

func (p Ptr) String() string { return "0x" + strconv.FormatUint(uint64(p), 16) }

// Memory is device memory. It is a tensor.Memory, so a tensor can lie in it.
// The Device of opened memory is the one that it was opened for.
type Memory interface {
	tensor.Memory // Device and Len

	// Ptr returns the address of the first byte.
	Ptr() Ptr

	// Address returns the same for package tensor, which tells by it which tensors share memory.
	Address() uint64

	// Export returns a handle with which other processes of this host can open
	// the memory.
	Export() (MemoryHandle, error)

	// Close frees the memory, or ends the mapping if it was opened. No operation
	// may be using it: its time ends with the last event of the last stream that
	// did. It may be called more than once.
	Close() error
}

// HostMemory is page-locked host memory. Devices reach it at Ptr, the process through Bytes. The
// caller has to order the two. The process may read a byte that a stream's operation writes in
// two cases. Either the operation's event has passed, or Load32 has seen a word that the stream
// wrote later.
type HostMemory interface {
	Ptr() Ptr
	Len() int

	// Bytes returns the memory itself.
	Bytes() []byte

	// Load32 reads the word at an offset that is a multiple of 4. What was written
	// before the value it returns can be read after it.
	Load32(offset int) uint32

	// Store32 writes the word at an offset that is a multiple of 4. Whoever has seen the value
	// can read all that was written before it.
	Store32(offset int, v uint32)

	// Close frees the memory, or ends the registration. As with Memory, nothing
	// may be using it. It may be called more than once.
	Close() error
}

// Mode is how an operation uses memory.
type Mode uint8

const (
	// Read: the bytes are read.
	Read Mode = 1 << iota
	// Write: the bytes are written, perhaps after they were read.
	Write
	// Shared: the bytes are read and written while others do the same, in ways
	// that the kernels order among themselves, as flags and staging areas are.
	// Shared uses need no order against each other; against Read and Write they do.
	Shared
)

func (m Mode) String() string {
	switch m {
	case Read:
		return "reads"
	case Write:
		return "writes"
	case Shared:
		return "shares"
	}
	return "mode(" + strconv.Itoa(int(m)) + ")"
}

// Conflicts reports whether two uses of the same bytes need an order.
func (m Mode) Conflicts(o Mode) bool {
	switch {
	case m == Read && o == Read, m == Shared && o == Shared:
		return false
	}
	return true
}

// Access is what an operation does with a range of bytes.
type Access struct {
	Ptr  Ptr
	Len  int
	Mode Mode
}

// Reads, Writes and Shares make an Access.
func Reads(p Ptr, n int) Access  { return Access{p, n, Read} }
func Writes(p Ptr, n int) Access { return Access{p, n, Write} }
func Shares(p Ptr, n int) Access { return Access{p, n, Shared} }

// Conflicts reports whether a and b need an order: they overlap, and not both
// only read or both only share.
func (a Access) Conflicts(b Access) bool {
	return a.Len > 0 && b.Len > 0 && a.Mode.Conflicts(b.Mode) &&
		a.Ptr < b.Ptr+Ptr(b.Len) && b.Ptr < a.Ptr+Ptr(a.Len)
}

func (a Access) String() string {
	return fmt.Sprintf("%v [%v, +%d)", a.Mode, a.Ptr, a.Len)
}

// MemoryHandle is device memory as one process shows it to others of the host.
type MemoryHandle struct {
	Raw    [64]byte // the driver's own handle, of the allocation that the memory lies in
	Owner  [16]byte // the process that exported it
	UUID   [16]byte // the device
	ID     uint64   // the allocation, never used again in its process
	Offset uint64   // of the memory within the allocation
	Len    uint64   // of the memory
}

// MemoryHandleSize is the length of a handle's bytes.
const MemoryHandleSize = 64 + 16 + 16 + 8 + 8 + 8

// AppendBinary appends the handle as bytes for another process.
func (h MemoryHandle) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, h.Raw[:]...)
	b = append(b, h.Owner[:]...)
	b = append(b, h.UUID[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.ID)
	b = binary.LittleEndian.AppendUint64(b, h.Offset)
	return binary.LittleEndian.AppendUint64(b, h.Len), nil
}

// MarshalBinary returns the handle as bytes for another process.
func (h MemoryHandle) MarshalBinary() ([]byte, error) {
	return h.AppendBinary(make([]byte, 0, MemoryHandleSize))
}

// UnmarshalBinary reads what MarshalBinary wrote. It checks the form only;
// whether there is such memory is found out by OpenMemory.
func (h *MemoryHandle) UnmarshalBinary(b []byte) error {
	if len(b) != MemoryHandleSize {
		return &Error{Call: "MemoryHandle", Device: -1, Err: fmt.Errorf("%w: a handle has %d bytes, got %d", ErrInvalid, MemoryHandleSize, len(b))}
	}
	var n MemoryHandle
	copy(n.Raw[:], b)
	copy(n.Owner[:], b[64:])
	copy(n.UUID[:], b[80:])
	n.ID = binary.LittleEndian.Uint64(b[96:])
	n.Offset = binary.LittleEndian.Uint64(b[104:])
	n.Len = binary.LittleEndian.Uint64(b[112:])
	const most = 1 << 62
	if n.Len == 0 || n.Len > most || n.Offset > most {
		return &Error{Call: "MemoryHandle", Device: -1, Err: fmt.Errorf("%w: a handle of %d bytes at offset %d", ErrInvalid, n.Len, n.Offset)}
	}
	*h = n
	return nil
}
