// Package nccl is the backend for tensors in device memory that NCCL moves and combines. A program imports it, and its
// groups name it as PyTorch's do:
//
//	import _ "github.com/c10d-go/c10d/backend/nccl"
//	...
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Backend: "cpu:gloo,cuda:nccl"}})
//
// NCCL's library is loaded when the first group is made, without cgo: see [Options].Library. There has to be one rank a
// device, and the same version on all ranks. Tensors are contiguous, in memory of the driver (package driver); the calls'
// streams are given by cuda.InStream and its relatives, as with backend cuda.
//
// # With PyTorch
//
// Ranks of this package and of PyTorch's NCCL backend can be in one group: keys, communicators and calls are the same. Two
// options say what the store does not: pg.Options.PyTorch, because a PyTorch rank of a group without gloo writes nothing,
// and Options.Eager if init_process_group has a device_id. PREMUL_SUM of bfloat16 is refused there: PyTorch's ranks pass
// NCCL a factor of the wrong type.
//
// # Calls
//
// A call returns when its stream has the operation. The first one on a communicator waits for the other ranks, at most
// until its context ends; NCCL's own wait then goes on without it, on a thread of its own. Work.Wait waits for the device, and Work.Synchronize has a stream wait. In a stream that is captured ([driver.Capture]) the
// operation becomes part of the graph, if it is made in that stream (cuda.InStream). Make one such call before.
//
// What NCCL has not is refused: tags, receiving from any rank, bitwise operators, own operators, sparse tensors, several
// tensors of a rank in one collective, monitored barriers. Backend cuda has them. A sum's bits do not depend on ranks'
// order alone.
//
// # Faults
//
// Among ranks of this library a second group, of backend gloo, tells of deaths, aborts and cancelled calls. The communicator
// is then aborted, so that its kernels end, and the errors name the rank. At a timeout the others are asked how far they
// are. PyTorch's ranks tell nobody until their own timeout; then they write exception_dump into the store, which this
// package reads once a second.
//
// # Files
//
// A file calls only those below it: collectives; nccl; call; fault; comm; ids, types. Package libnccl has the functions
// of the library, and ncclsim stands in for it on simulated devices.
package nccl
