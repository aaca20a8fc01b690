// Package nvidia is the driver of NVIDIA's GPUs. It loads CUDA's driver library when [Open] is
// called. So it needs no toolkit, no C compiler and no build tag. A program with it also runs
// without GPUs:
//
//	d, err := nvidia.Open()
//	if errors.Is(err, driver.ErrNoDevice) {
//		log.Printf("on the CPU: %v", err) // says what is missing
//	}
//	defer d.Close()
//
// # What it needs
//
// It needs Linux on amd64 or arm64, or Windows on amd64, and a driver for CUDA 11.8 or later.
// Functions are taken in the version of that release. Later drivers keep them. Two newer ones, of
// 12.4, are used where they are there: cuFuncLoad, and cuFuncGetParamInfo, by which a launch with
// the wrong parameters is refused. Elsewhere Open returns driver.ErrNoDevice.
//
// On Linux a program with this package is linked to the C library (glibc), even
// without cgo, because CUDA's library is.
//
// # Contexts
//
// A device's context is the primary one, which the process's other users of
// CUDA share. Their memory and streams can be borrowed. A call makes the context
// current on the calling thread, and restores the thread's context afterwards. So
// goroutines need not be locked to threads, and a locked one keeps its context.
//
// # What CUDA may wait for
//
// Closing memory, page-locked memory and modules may wait until the device has
// nothing to do. A program must not close any while a stream waits for a word
// that the same goroutine is going to write.
//
// Streams that share a queue of the hardware wait for each other, with those of
// other processes behind them. Open asks for 32 queues a device, the most there are, by
// setting CUDA_DEVICE_MAX_CONNECTIONS for the C library of its process, unless the
// environment has it. It is too late if the program has made a context before. On Windows
// Open does not set the variable. See package driver.
//
// # Memory that can be registered
//
// Linux locks pages of the process itself, of memfd and of /dev/shm. It refuses
// those of files that a file system writes back, and RegisterHost then returns
// driver.ErrInvalid.
//
// # Structures by value
//
// Handles of other processes are structures of 64 bytes, passed by value. SyscallN
// passes words only. Some C calling conventions put such a structure on the stack: then
// it is eight words after the six in registers. Others pass a pointer to a copy.
package nvidia
