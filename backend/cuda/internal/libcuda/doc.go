// Package libcuda is driver.Driver over the functions of CUDA's driver API,
// however they are called.
//
// An [API] calls the functions and nothing else: package driver/nvidia has one
// that finds them when the program runs, backend/cuda/gorgonia one on
// gorgonia.org/cu. What a Driver promises beyond them is here, once:
//
//   - the device's context is current on the calling thread during a call, and
//     what was current before is so again after it;
//   - an address that is not in memory which came out of the Driver is refused.
//     CUDA would take it for ordinary host memory, copy while the caller waits,
//     or end the process;
//   - a copy from page-locked memory to page-locked memory is enqueued like any
//     other. CUDA's is carried out during the call: here it goes through a
//     buffer on the device;
//   - parameters of a launch are compared with the kernel's, where the driver
//     tells them (CUDA 12.4 and later);
//   - kernels are on the device when Function returns, whatever
//     CUDA_MODULE_LOADING says: loading one for its first launch could wait for
//     a kernel that waits for that launch;
//   - an image that is to be kept is loaded when its device gets ready, and unloaded
//     with the Driver: both may wait for what streams wait for;
//   - an error that ends the context is remembered, and every later call on the
//     device returns it without asking the driver;
//   - events come from a pool, handles of other processes are opened once and
//     counted, and Close says what was not closed, and closes it.
//
// # Handles
//
// CUDA's handle is for an allocation, whatever address within it was given, and
// opening it gives the allocation's beginning. A driver.MemoryHandle carries the
// offset beside it.
//
// # Events
//
// Waiting for an event takes its state at the moment of the call. So a released event can be
// recorded again at once, even if it has not passed.
package libcuda
