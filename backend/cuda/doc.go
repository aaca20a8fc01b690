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
//	w, err := g.AllReduce(cuda.WithStreams(ctx, stream), []*tensor.Tensor{grad}, backend.AllReduceOptions{Op: backend.Avg()})
//	...
//	err = w.Synchronize(stream)        // stream goes on when grad is there; nobody blocks
//
// # Streams
//
// Go has no current stream, so the caller says which streams use the tensors of a
// call: WithStreams in the call's context, or OnStream for all tensors that lie
// in some memory. The operation comes after everything that these streams had
// been given when it was called. Without a stream it begins at once: the caller
// knows that the tensors are ready.
//
// Only the Work orders later work of the streams after the operation, unless the call is part of a
// stream (InStream). Its Synchronize
// makes a stream wait. It blocks only while that stream has no room, and may be called
// for any number of streams. Wait blocks the goroutine until the devices are done too.
// Until one of the two the tensors belong to the operation.
//
// Operations of one backend on the same memory are ordered among themselves as they were called.
// Two groups must not share streams unless all ranks call them in the same order. Else rank 0's
// stream could wait for one group and rank 1's for the other.
//
// # The way through the host
//
// Every collective of dense tensors can go through the host: from the devices to page-locked memory, through the same
// collective of a CPU backend, and back. The CPU backend is gloo, which makes a group of its own from
// the same store. Streams get all copies, with waits for words between them. The host writes
// these words. No stream and no caller waits for the host in any other way. Larger tensors go in
// chunks of Options.Chunk through a few slots of memory. So the way down, the CPU's part and the way
// up overlap. All ranks cut alike, at borders of elements; New fails if they would not. With sums in
// rank order, the default, the bits are those of the unchunked operation.
//
// all_to_all, gather of unequal sizes, send and receive go through the host in one piece, because
// a rank does not know the sizes of the other ranks' tensors. Tensors that are not contiguous are
// copied run by run of their bytes, and the host brings the elements in order. If the tensors of
// a call have more than 240 runs, kernels on their devices do that. They need device memory of as
// many bytes, which is kept for the next call like the page-locked memory. What lies between the
// elements is not written. Where there are no kernels, on devices of compute capability below
// 8.0, it works all the same, and is slow.
//
// Operations that share memory come one after the other, whoever calls them. The memory of
// a tensor with more than 16384 runs is all between its first and its last byte. A send of
// one column of such a matrix therefore waits for an earlier receive into another column.
//
// Page-locked memory comes from a pool and streams are made once: in the steady state an
// operation makes neither. Nothing is freed while an operation of the process is under way. To
// free memory CUDA may wait for all streams, and a stream may wait for another rank. A later
// call, or Close, frees it.
//
// # Queues
//
// A stream of CUDA's has room for some 1000 commands. A caller that gives it more waits in the driver and holds locks
// that others need. So an operation gives a stream at most 256 at a time, however large its tensors are. An operation
// through the host goes in up to 60 pieces. It goes in parts if it has more than 57 tensors, or many runs of bytes
// where there are no kernels. Only all-reduces through memory that ranks share have
// more commands, three for each of up to 256 chunks.
//
// A call through the host or clusters does not wait for room. It leaves its operation to the feeder, a goroutine of
// the group, in these cases:
//
//   - The operation goes in parts, or through clusters in several chunks.
//   - Operations before it have left more than 512 commands on a stream.
//   - The feeder has not yet enqueued an earlier operation.
//
// The feeder enqueues operations in the order of the calls. It gets their memory when there is room. Such a call only
// records an event on each stream of its tensors, and takes a word for the end of the operation. Synchronize has
// streams wait for that word. A call of direct work waits while those before it have left more than 256 commands.
//
// With CUDA_LAUNCH_BLOCKING=1, and under some profilers and debuggers, a launch returns when its kernel has ended. A
// call without the feeder then returns when the ranks have done nearly all of its operation. It ends at the operation's
// timeout. A call of the driver that does not return even then keeps the caller. Close gives up waiting for it, also
// for the feeder's, after 5 s.
//
// The streams of collectives wait for other ranks. A group has two a device, one more with direct work,
// and one for each lane that it has used (see Messages). Sends and receives through the host share two
// more, however many are under way, and sparse all-reduces use one of these for their outcomes. These wait for nobody:
// a message gets its copies there when the tensor is ready, or the bytes have come. A stream that Synchronize orders after a receive waits for a word,
// which Close keeps until the stream has gone on, for 5 s at most.
//
// # All-reduces within a host
//
// Dense all-reduces through the host may use memory that the ranks share, and not the CPU
// backend. All ranks have to be on one host, whose system shares memory between processes
// (Linux). The CPU backend has to be gloo. Each device then copies
// a chunk there. Each rank's CPUs combine a part of it, in rank order. Then each device
// copies the result. Custom operators and tensors of more than 256 chunks take the
// other way, and so do ranks whose Options.Slots differ.
//
// The memory has (ranks+1) * Slots * Chunk bytes, each chunk rounded up to 4 KiB. By default that is
// about 128 MiB, more than a CPU keeps in caches of its own: devices are slow to read from those. It is
// reserved when the group is made or, where devices could reach each other, when they
// turn out not to. If a rank cannot have it, none has, and all-reduces go by
// the CPU backend; Explain says which rank and why. A rank that cannot page-lock it
// uses it all the same: its host copies.
//
// While an operation is under way its rank's goroutines poll, on up to 6 CPUs, and
// 0.2 ms longer where a rank has four CPUs or more.
//
// # The choice of a way
//
// A table of measurements chooses the way of a call, by operation, bytes, ranks and what is between
// the devices: see Options.Table. Where it has no row, calls go by kernels if there are some for them. All ranks have
// the same table, and so choose alike. Explain tells the ways by size, and why. "c10d bench -device
// cuda -tune" measures a table.
//
// An all-reduce is done by a work: DirectWork, RingWork, HostWork, or one that is
// registered in internal/allreduce. The work of the highest priority that can do
// the call does it. But DirectWork leaves a size to another work if the table has a faster way
// through the host. Options.AllReduce forces a work. Sparse tensors have works of their own: SparseWork, and those
// that are registered for them.
//
// # By kernels that wait
//
// DirectWork is for groups of 2 to 8 ranks with a device each. One kernel of each rank does a whole
// collective: it writes the rank's elements into the other ranks' memory, waits for theirs, and
// combines them. All collectives can be such work, except sparse all_reduces. There are kernels for SUM, AVG,
// PRODUCT, MIN, MAX and PREMUL_SUM of float32, float64, float16, bfloat16, int8, uint8, int32 and int64,
// AVG of floats only, and for BAND, BOR and BXOR of the integers. Other dtypes and operators go through the host, in the same group. All
// ranks add in the order of the ranks. Float NaNs may change their payload in a reduction. Calls that
// only move bytes keep every bit, and take any dtype.
//
// The tensors of a coalesced call that have up to 256 KiB are one collective. A kernel brings up to 128 of
// them in order before it, and one puts them back. Larger ones are collectives of their own.
//
// Long messages, broadcasts, gathers, scatters and all_to_alls go straight into the tensors that get them, and
// all_reduces of few blocks too, once the peers have mapped the memory. The ranks do that on their own in the
// first calls with it. A rank has up to 16 such regions, of whatever length: a program with one large
// driver.Memory for many tensors needs one. Peers let go of memory that was freed when they make another call
// and no operation is under way. The device gets it back only then. Memory that was borrowed (Device.Borrow) has
// to stay until its Memory is closed. Explain tells how much is mapped.
//
// In an all_to_all and in GatherV a rank knows its own sizes only. The kernels tell each other the
// longest part. If a rank sends another size than its peer expects, the group fails. A barrier is a
// kernel without data if kernels did all collectives since the last barrier through the hosts.
//
// The call enqueues a launch and an event, and returns. Tensors that are not in order, or that are on
// another device than those of the group's first collective, cost kernels and copies besides. The
// operation is on a stream of the group, beside the caller's later work. A large one fills the device
// until the other ranks have come and it has ended. With [Beside] it takes 16 multiprocessors. With
// [InStream] it is on the caller's own stream. That saves the waits between two streams, and later
// commands of that stream come after it without Synchronize. No goroutine has to be woken: who waits
// for the Work asks the event.
//
// A kernel that waits for another rank keeps its part of the device busy. If that rank does not
// come, the kernel ends with the group: by timeout, death, context or Close.
//
// The kernels of all groups of a process must fit on the device at once, those of their messages too. So
// the first groups on a device have kernels of 128 blocks, and later ones kernels of 16, which are slower
// from 4 MiB on. On an H200 two groups of 2 ranks have the large ones, and 11 more have room. Where the
// kernels of messages would leave no room for another group, messages go through the host. All ranks must call the operations of several groups in the same order.
//
// The first call makes 78 MiB of device memory for 2 ranks, 68 MiB for 4 and 142 MiB for 8, or less on
// devices with little memory.
//
// New loads the kernels that move elements, and those that combine float32. The first reduction of another dtype loads
// its kernels, before it begins, on all ranks at the same time. The group's timeout counts for that, and the call's
// does not. Options.DTypes has New load them. A captured call needs kernels that are loaded. The first program on a
// machine compiles what it loads. For all eight dtypes together that took 4 to 7 s, or 20 to 36 s with more than two
// ranks. CUDA keeps the result.
//
// Everything goes through the host in four cases, and [Backend.Explain] says which:
//
//   - the ranks' devices do not reach each other in a ring;
//   - two ranks share a device;
//   - there are more than 16 ranks;
//   - the kernels of one more group would not fit on a device.
//
// # Round a ring
//
// RingWork is for groups of 2 to 16 ranks with a device each. In a ring each device has to reach the next one only.
// Groups of 4 to 8 ranks take it if some devices do not reach each other, and groups of 9 to 16 ranks always. Others
// take it if Options.AllReduce or the table of ways asks for it. One kernel of each rank does an all_reduce, a
// reduce_scatter or an all_gather, also coalesced, for the dtypes and operators above. It writes into the next rank's
// memory. Explain tells the order of the ranks. Such calls can be captured. Other operations and messages go through
// the host where some devices do not reach each other, and with more than 8 ranks.
//
// All ranks get the same bits in all runs, but not those of a sum in the order of the ranks. Each part of a tensor
// is added up round the ring, from another rank on. A ring takes 9 MiB of each device for 4 ranks, 17 MiB for up to
// 8, and 34 MiB for more. It was not measured on GPUs.
//
// Ranks of one process must use one Driver, or drivers that both may register the
// same host memory. CUDA holds a lock of the process while a call waits for streams, to
// make memory or to load kernels. The groups of a Driver share kernels, which New loads, or the first reduction of a
// dtype once all ranks have enqueued their earlier calls;
// but memory is made by the first operations of a size, by sparse ones while they run. So ranks of one process can stop
// each other for good where such a one is called while streams wait for another rank. Give
// each rank a process of its own then.
//
// Close lets operations end by themselves for half a second, and ends what is left then. It
// waits for other ranks to let go of this rank's memory: 5 s, or 1 s after a
// failure. If they have not, the memory is kept until the process ends.
//
// Simulated devices have these kernels with those of package driver/sim/simkernels.
//
// # Sparse tensors
//
// SparseWork all-reduces sparse tensors, in every group. The call enqueues the copies of indices and values to
// page-locked memory. The CPU backend adds the entries of all ranks. The outcome goes to new device memory: it is that of
// tensor.SumSparse, coalesced. The operators are the CPU backend's, SUM and AVG, and those that are refused are refused
// at the call.
//
// Before the Work has ended nobody knows how many entries the outcome has, and the tensor has its old ones. So
// Synchronize waits for the Work, as Wait does, and such calls cannot be captured. With InStream later commands of the
// stream come after the copies of the old entries. Take Indices and Values after the wait, and begin the next call with
// the same tensor then.
//
// The new memory is the caller's, as the old is. Close gives it back to the group, which keeps it for later calls:
//
//	err = t.Indices().Memory().(driver.Memory).Close() // and that of t.Values()
//
// Nobody has looked at coordinates on a device before the call. Those outside of the shape end the group, with an error
// that tells the first one.
//
// # Messages
//
// In a group with DirectWork a send or a receive is one kernel on each of the two ranks. It must have the
// default tag 0, and a collective must have connected the ranks before. Each pair of ranks has two lanes,
// one in each direction, with memory, a stream and room on the device of their own. So messages wait neither
// for collectives nor for those of other lanes, and only for earlier ones of the same lane. A send ends when
// its receive has the bytes. Two ranks may post their sends first, and then the receives, unless the calls
// are part of one stream (InStream). If a rank receives another length than is sent, the group fails.
//
// Messages with other tags go through the host. So do those of a pair before its ranks have connected, up to
// the larger number that one of the two ranks has posted by then. A group whose ranks have posted a receive
// from any rank before that has no lanes.
//
// A receive from any rank waits in a goroutine until a rank has called its send. It goes by page-locked
// memory. So do receives behind it, and tensors on other devices than that of the group's first
// collective. A lane has room for some 60 messages that are under way. More messages go by page-locked
// memory, too.
//
// # Graphs
//
// A call with InStream can be captured in the caller's graph, and replayed:
//
//	graph, err := driver.Capture(stream, func() error {
//		_, err := g.AllReduce(cuda.InStream(ctx, stream), ts, o) // has ended when it returns
//		return err
//	})
//	...
//	err = graph.Launch(stream) // on all ranks, in the same order among their other calls
//
// The host does nothing more for a replay. All that kernels do can be captured, once a collective has connected the
// ranks. Calls through the host and tensors in CPU memory are refused with driver.ErrCapture. So are tensors on
// other devices than that of the group's first collective. After an error, give up the capture.
//
// The caller orders replays: before one, the stream must come after the group's earlier calls
// (Work.Synchronize), unless these were part of the same stream. Calls after it must come after the stream
// (WithStreams). Replays must have ended before Close. What calls need of memory besides their tensors is
// kept until Close. A replay has no timeout. It ends when the group fails, or when a rank closes it.
//
// # Several clusters
//
// Ranks of different hosts are in different clusters, and so are those with devices and those without.
// gloo.Options.Cluster, or C10D_CLUSTER, splits a host. In such groups all_reduce, reduce, broadcast, all_gather
// and reduce_scatter, also coalesced, go inside the clusters, between them, and inside again (ClustersWork). A
// cluster of 2 to 8 ranks with a device each has the kernels above. Each rank copies only its own part of the
// tensor to the host, and the network carries it to the other clusters. Tensors go in chunks whose stages
// overlap. The call enqueues none of several chunks: see Queues. Clusters without kernels do the steps inside on
// their hosts.
//
// All ranks get the same bits in all runs, but not those of a sum in the order of the ranks. Options.CPUOptions
// with sums in rank order, or exact ones, keep the way through the host. So do several tensors in one
// all_reduce, and coalesced calls of more than 32 tensors. Gather, scatter and all_to_all always go that way.
//
// # Tensors in CPU memory
//
// A rank may pass tensors in CPU memory where others pass device tensors, in every operation. A group has one
// backend for both if pg.Options.Backend is "cuda" or "cpu:cuda,cuda:cuda". A rank with a device copies such
// tensors there and back where the call needs a device. A call waits for earlier collectives that are to be copied back
// to memory of its tensors. A rank may have no device (Options.NoDevice). The Work's
// Synchronize waits for an operation with such tensors.
//
// # Broadcasts
//
// A broadcast takes any number of tensors of a rank, on any of its devices: gloo's CudaBroadcastOneToAll.
// Where there is direct work it is one or two kernels of each rank, and no byte is staged on a host.
// Otherwise it goes from host to host in chunks. A rank that receives makes room for a chunk and then
// says so (clear to send). A rank that has the chunk sends it to each rank that has said so, and does not
// wait for the others. Meanwhile the next chunks come down and the last ones go up. The root sends to all
// ranks, or down a binomial tree, or along a chain. For the number of ranks and chunks it takes the way
// with the fewest messages one after the other. Options.Broadcast asks for a way, Explain tells which it
// is.
//
// On each rank the tensor with the root tensor's number is the first to have the
// data. The others have them from there, down a tree of copies between the devices.
//
// # Several devices of one process
//
// An all_reduce or a broadcast takes several tensors of a rank, on any of its devices. So a group of one rank has what
// gloo calls local collectives: pg.Options with size 1, for a process with all devices. Contiguous device tensors do
// not go through the host then. Kernels combine the tensors in their order, on the device of the first one. A tree of
// copies gives all of them the result. That is for the dtypes and operators of direct work but PREMUL_SUM. The host
// combines the others, and all where there are no kernels, with the same bits.
//
// # Failures
//
// A call that is wrong is refused before the first byte. The calls of a host's ranks may differ
// in operation, operator, dtype, elements or root. Then all these ranks end at once with a
// work.ErrMismatch that names two of the calls. Between hosts each rank of a broadcast compares
// its call with its sender's. The CPU backend compares what it is given. An operation that fails
// on a device or on the wire ends the group on all ranks. The error of its Work names operation,
// number and rank. The streams then go on. Their copies are of no use, but they still come after
// all earlier commands of the callers' streams. Should something else hold them up, the Work ends
// without them. Then Synchronize orders a stream after the rest, and their memory stays reserved
// until Close has seen them end.
//
// # What it is not
//
// It speaks to other ranks of this package only:
// PyTorch has no CUDA group that cuts as this one does.
package cuda
