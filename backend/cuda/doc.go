// Package cuda is the backend for tensors in device memory. Importing it is enough
// for groups to find it:
//
//	import _ "github.com/c10d-go/c10d/backend/cuda"
//
// The devices are those of a driver (package driver): the machine's GPUs, or the
// simulated ones of driver/sim, given in Options. A tensor is on a device if its
// memory came from that driver:
//
//	d, err := cuda.Default()           // the process's GPUs
//	gpu, err := d.Device(0)
//	mem, err := gpu.Alloc(4 * n)
//	grad, err := tensor.OnDevice(tensor.Float32, mem, n)
//	...
//	w, err := g.AllReduce(cuda.WithStreams(ctx, stream), grad, pg.Avg())
//	...
//	err = w.Synchronize(stream)        // stream goes on when grad is there; nobody blocks
//
// Go has no current stream, so the caller says which streams use the tensors of a call: [WithStreams], [InStream] and
// [Beside] for one call, [OnStream] for memory. Only the Work orders later work of other streams after the operation:
// its Synchronize makes a stream wait, and its Wait blocks the goroutine. Until one of the two the tensors belong to the
// operation. A caller with several groups calls their operations in the same order on all ranks.
//
// A table chooses the work that does a call: [DirectWork], [RingWork], [ClustersWork] or [HostWork], for sparse tensors
// [SparseDirectWork] or [SparseWork]. [Backend.Explain] says which, and why not another one. Every collective of dense
// tensors has HostWork, so it works between any ranks, on any devices, in any dtype.
//
// docs/gpu.md is the manual: streams, the works, memory, messages, graphs, clusters, tensors in CPU memory, failures.
//
// A file of this package calls only those below it:
//
//   - cuda: New
//   - explain, collectives: what a group would do; checks of a call
//   - works, call: the table of works, and the way of a call through it
//   - kernels, clusters, host, sparse: the works
//   - operations: what the works need to know of an operation
//   - mixed: tensors in CPU memory
//   - choose: tables of measurements
//   - stream, cast: the caller's streams; copies to another dtype
//
// CUDA groups cannot include PyTorch ranks, because PyTorch does not cut tensors into the same pieces.
package cuda
