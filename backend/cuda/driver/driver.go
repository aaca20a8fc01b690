package driver

import (
	"fmt"

	"github.com/c10d-go/c10d/tensor"
)

// Driver is one process's access to the GPUs of a host. All methods may be
// called from many goroutines, and from any thread: an implementation sets the
// device's context itself, in the same call.
//
// Everything that comes out of a Driver belongs to it: memory, streams, events
// and functions of one Driver given to another are refused with ErrInvalid.
type Driver interface {
	// Name tells implementations apart: "nvidia", "gorgonia", "sim".
	Name() string

	// Count returns the number of devices, numbered from 0 in the order in which
	// the process sees them (CUDA_VISIBLE_DEVICES counts).
	Count() int

	// Device returns device i, and makes it ready on the first call. Later calls
	// return the same Device.
	Device(i int) (Device, error)

	// Link tells how device from reaches the memory of device to.
	Link(from, to int) (Link, error)

	// AllocHost returns n bytes of zeroed page-locked host memory that every
	// device can reach. Zero bytes are as good as any other number.
	AllocHost(n int) (HostMemory, error)

	// RegisterHost page-locks host memory that exists already, so that every
	// device can reach it, until the HostMemory is closed. The bytes stay the
	// caller's. It must not be empty; a range that this Driver has registered already,
	// also in part, is refused, while several Drivers of a process may register
	// the same range. Memory that several processes map and register is
	// page-locked memory which they share.
	RegisterHost(b []byte) (HostMemory, error)

	// Close gives back what the Driver still holds. What was made with it must
	// have been closed before; an implementation may report what was not.
	// It may be called more than once.
	Close() error
}

// Device is one GPU. All methods may be called from many goroutines.
type Device interface {
	// ID returns the device as tensors name it.
	ID() tensor.Device

	// Info returns the device's properties.
	Info() Info

	// MemInfo returns how many bytes of device memory are free, and how many there are.
	MemInfo() (free, total uint64, err error)

	// Alloc returns n bytes of device memory with undefined contents, aligned to
	// 256 bytes. Zero bytes give a Memory that takes no room and whose Ptr is 0.
	Alloc(n int) (Memory, error)

	// Borrow returns a Memory for n bytes at p that somebody else allocated on
	// this device, in this process, and keeps until the Memory is closed. Close
	// does not free them.
	Borrow(p Ptr, n int) (Memory, error)

	// OpenMemory maps memory that another process exported, into the address
	// space of this device. The other process must keep it until this one has
	// closed the mapping. A process cannot open its own handle: ErrOwnHandle.
	// Opening is slow (100 us and more); keep what was opened.
	OpenMemory(h MemoryHandle) (Memory, error)

	// EnablePeer lets this device's kernels reach the memory of another device.
	// Each call is taken back by one DisablePeer. Copies between devices need no call.
	// Without a link between the devices it returns ErrPeerAccess.
	EnablePeer(peer int) error

	// DisablePeer takes one EnablePeer back, if there is one.
	DisablePeer(peer int) error

	// NewStream returns a stream of its own; it does not synchronise with the
	// device's default stream.
	NewStream(o ...StreamOptions) (Stream, error)

	// BorrowStream returns a Stream for one that somebody else made on this
	// device, by the driver's own handle (a CUstream). Close does not destroy it.
	BorrowStream(handle uintptr) (Stream, error)

	// Load returns the kernels of a PTX text (or another image that the driver
	// takes), compiled for this device.
	Load(image []byte) (Module, error)

	// SeesWords has the answer to whether kernels of this device see what the host writes
	// while they run. Nil means that they do.
	SeesWords() *Once
}

// Keeper is what a Driver has that can have kernels ready before they are needed.
// While CUDA loads kernels it may wait for streams of the process. If such a stream waits
// for a word, nobody may be able to write the word, because CUDA holds a lock meanwhile.
type Keeper interface {
	// Keep loads functions of an image on the devices that are ready, and on each other one when
	// it gets ready, until the Driver is closed. From then on Device.Load of this image returns
	// the loaded module, and closing that unloads nothing. What cannot be loaded is an error of
	// Load or Function.
	Keep(image []byte, functions ...string)
}

// Keep has d keep functions of an image, if it can. See Keeper.
func Keep(d Driver, image []byte, functions ...string) {
	if k, ok := d.(Keeper); ok {
		k.Keep(image, functions...)
	}
}

// Info is what a device can do.
type Info struct {
	Name            string
	UUID            [16]byte
	PCI             string // "0000:1b:00.0"; "" if there is none
	Major, Minor    int    // compute capability
	Multiprocessors int
	CopyEngines     int
	Memory          uint64 // bytes
	ThreadsPerBlock int    // the most
	SharedMemory    int    // bytes a block can have after Function.SetShared
	L2              int    // bytes
	NUMA            int    // the host's node that is nearest; -1 if not known
	StreamValues    bool   // streams can wait for values and write them
	Cooperative     bool   // cooperative launches
	Driver          int    // 1000*major + 10*minor of the CUDA version that the driver implements
}

// Link is a way from one device to the memory of another.
type Link struct {
	Peer    bool // kernels can be given access
	Atomics bool // atomic operations work across it
	Rank    int  // relative quality among the links of the host, 0 is the best
}

// Module is a loaded image.
type Module interface {
	// Function returns a kernel by its name, ErrNotFound if there is none.
	Function(name string) (Function, error)

	// Close unloads the image. Launches of its functions must have ended.
	Close() error
}

// Function is a kernel. It may be launched from many goroutines.
type Function interface {
	Name() string

	// Device returns the device that the kernel was loaded for.
	Device() tensor.Device

	// SetShared allows launches with up to n bytes of dynamic shared memory a
	// block. Without it 48 KiB are the limit.
	SetShared(n int) error

	// Blocks returns how many blocks of so many threads and bytes of dynamic
	// shared memory can be on one multiprocessor at the same time.
	Blocks(threads, shared int) (int, error)
}

// Dim counts the blocks of a grid or the threads of a block. A zero Y or Z
// stands for 1.
type Dim struct{ X, Y, Z uint32 }

// Full returns d with its zeros made 1.
func (d Dim) Full() Dim { return Dim{max(d.X, 1), max(d.Y, 1), max(d.Z, 1)} }

// Len returns the number of blocks or threads.
func (d Dim) Len() int {
	d = d.Full()
	return int(d.X) * int(d.Y) * int(d.Z)
}

func (d Dim) String() string {
	d = d.Full()
	return fmt.Sprintf("%dx%dx%d", d.X, d.Y, d.Z)
}

// Launch is one launch of a kernel. The driver does not keep it: it may be
// changed and used again as soon as Stream.Launch has returned.
type Launch struct {
	Function    Function
	Grid, Block Dim
	Shared      int   // bytes of dynamic shared memory a block
	Cooperative bool  // all blocks run at the same time, or the launch is refused
	Args        *Args // nil for a kernel without parameters

	// Access is what the kernel reads and writes. Package edges orders launches
	// by it and the simulator holds kernels to it; a real driver cannot know.
	Access []Access
}
