// Package gloo is the backend for tensors in CPU memory. It speaks the wire of PyTorch's gloo
// backend, with the same rendezvous, messages and order of additions. A Go rank can therefore sit
// in a PyTorch group, and gets the same bits. Groups without PyTorch ranks use a wire of this
// library's own, the native wire.
//
// Importing the package registers the backend:
//
//	import _ "github.com/c10d-go/c10d/backend/gloo"
//
// Package pg imports it; a program that uses pg has gloo for the CPU.
//
// # Which wire
//
// Each rank of this library publishes a record beside its Gloo address in the store. Every rank
// reads the same records, so all pick the same wire:
//
//   - Gloo's wire if a rank has no record. Ranks of PyTorch have none, and ranks with
//     Options.Wire or C10D_WIRE set to gloo.
//   - The native wire if all ranks have a record.
//
// A rank with TLS, or with Options.Wire native or tcp, takes the native wire only. It does not listen
// for Gloo's. If a rank has no record, New then returns an error on every rank.
//
// On the native wire the hosts decide the route of the collectives:
//
//   - One host: the ranks try to share memory. If all can, collectives and messages go through it
//     (internal/transport/shm).
//   - Several hosts with one rank each: TCP connections (internal/transport/tcp). A table of
//     measurements picks the algorithm by operation, size and group (internal/choice).
//   - Several hosts with several ranks each: clusters. The ranks of a host first combine in memory,
//     so that bytes cross the network once for each host, and each rank carries a share of them. Long
//     buffers go in chunks: one is in memory while another one is on the network. Small blocks for
//     another host go in one message (internal/cluster). With Options.Sums "rank-order", reductions
//     go from rank to rank: a host must not add its own operands first. Options.Cluster splits a
//     host into several clusters. Backend.Stage runs what goes between clusters for others, such as
//     groups of devices.
//
// Options.AllReduce names an algorithm for all dense all_reduces instead: one of the table's, or CallbackRing. Its
// messages go like those of sends and receives, through memory where ranks share it. AllReduceAlgorithms has the names.
//
// Sends and receives between ranks of one host go through memory, others over connections. A receive
// from any rank takes the message that comes first on either.
//
// Tensors of Backend.Alloc lie in memory that all ranks of the host see. Operations read them there
// and make no copy in between.
//
// Backend.Explain returns the wire and the algorithms of a group, with the reasons. "c10d doctor"
// prints them.
//
// # How an operation runs
//
// A call checks its arguments, takes the next tag and joins a queue. The goroutine that waits for
// the Work of a small collective also runs it, which saves two wake-ups. A worker goroutine runs
// large collectives, and small ones that nobody has waited for within 0.2 ms. In shared memory
// one collective runs at a time, in the order of the calls. Over connections two run at a time for
// each network interface.
//
// Over connections an operation is a plan: the list of this rank's sends, receives, reductions and
// copies. On Gloo's wire the plans are Gloo's. Sends and receives of the program do not queue.
//
// # Sums
//
// All ranks get the same bits, and the same call gives the same bits again. On Gloo's wire they are
// PyTorch's. On the native wire Options.Sums says what they depend on:
//
//	SumsFast         the operands, their order, and the algorithm
//	SumsInRankOrder  the operands and their order
//
// # Sparse tensors
//
// AllReduce of a sparse tensor coalesces each rank's tensor and adds them up. The result is that of
// tensor.SumSparse: coalesced, in order, in new memory. Every rank gets all entries of
// all ranks and adds them in rank order, as in PyTorch. On the native wire the ranks first exchange a description of
// their tensors. If two do not match, every rank returns an error that names the same rank, and no
// tensor has changed. A rank allocates at most 256 MiB for data that peers announce, on every wire. Beyond that, memory
// grows with the data that has arrived.
//
// # Copies
//
// Ranks that share memory use tensors of Alloc where they are. They copy all other data twice: into the shared memory
// and out of it. Large all_gathers, all_to_alls and scatters copy once, straight out of the other process. They do so
// where that is faster, and where the kernel allows it to all ranks of the host. Explain says from which size on, or
// why not.
//
// # When something goes wrong
//
// A failed operation ends the group on all ranks, because Gloo's wire cannot take a message back.
// PyTorch does so too, but not at once.
//
// Every pending and later operation then fails with a *work.Error. It names the rank at fault and
// the reason: the rank died, did not answer in time, was cancelled, or sent messages that do not
// fit.
//
//   - A rank is asked before it is blamed for a timeout, from 4 s before its end on, or from half of a
//     shorter one on. The others wait for the answer at most 0.3 s longer, or a tenth of the timeout.
//   - A panic in a custom operator ends the operation with a *work.PanicError on its rank. The other
//     ranks' errors name that rank.
//   - Ranks of PyTorch in the group see a closed connection.
//   - Faults are told over connections, also where ranks share memory: memory does not show who is
//     alive.
//
// # The end
//
// Close takes at most about a second. Operations that have not ended fail with work.ErrClosed. If a collective
// is among them, the group ends on all ranks, and their errors name the rank that closed. Shutdown
// waits for operations first.
//
// # Messages and monitored barriers
//
// PyTorch's monitored barrier sends messages whose tags are the numbers of collectives, from 0 on.
// Between a PyTorch rank and rank 0 these meet messages of the program with the same tag. Use tags
// above the number of collectives there. Among ranks of this library monitored barriers have
// tags of their own.
//
// # Calls that do not fit
//
// The native wire compares what the ranks call: operation, operator, dtype, root and number of
// elements. Each message of a collective carries a digest of these and of all calls before. A rank
// compares before it uses the data. If the calls differ, the group ends on all ranks with
// work.ErrMismatch:
//
//	the ranks disagree on the operation: as collective number 3 rank 0 called all_reduce(sum) of
//	float32[5], rank 1 called all_reduce(max) of float32[5]
//
// A collective in which a rank needs data from all others fails on that rank, if this call or an
// earlier one differs. Some ranks only send: the root of a broadcast or scatter, and the other ranks of
// a reduce or gather. They may return nil. In shared memory they compare their call with those that other
// ranks have made by then. So if two ranks only send, and their calls differ, the later one gets the error in
// that call. Every rank gets it at the latest from its next collective that needs all ranks, from Shutdown or
// from Close. These two wait up to 300 ms for ranks that have called less. A rank that has closed the group is not
// told of calls that others make later. They are.
//
// Elements count, not shapes: [2 3] fits [6]. AllReduce fits AllReduceCoalesced, and AllGather fits
// AllGatherIntoTensor: they move the same data. Not compared are the factor of PreMulSum, the number
// of tensors in one AllReduce, sizes that only some ranks know (GatherV, AllToAll), and messages
// apart from their sizes. Of GatherV and AllToAll a rank compares the sizes that it receives. If one
// differs, the group ends with work.ErrMismatch too.
//
// Gloo's wire has no room for the digest. There a rank notices only messages of another size. Package
// backend/detail compares calls before they run, on every wire.
//
// # What it does not do
//
// On Gloo's wire ReduceScatter and its variants move as much data as an all_reduce: Gloo has no other
// algorithm for them.
package gloo
