// Package gloo is the backend for tensors in CPU memory. It speaks the wire of
// PyTorch's gloo backend, with the same rendezvous, messages and order of
// additions, so that a Go rank can sit in a PyTorch group and gets the same bits.
// Groups without PyTorch ranks use a wire of this library's own.
//
// Importing the package registers it:
//
//	import _ "github.com/c10d-go/c10d/backend/gloo"
//
// Package pg does so already; a program that uses pg gets gloo for the CPU.
//
// # Which wire
//
// A rank of this library publishes a record beside its Gloo address. When all
// addresses are there, all ranks see the same records, and so come to the same
// answer without a word more:
//
//   - a rank has none, because it is one of PyTorch or was told not to
//     (Options.Wire, C10D_WIRE): Gloo's wire;
//   - all have one: the native wire. A rank with TLS, or with Options.Wire native or tcp,
//     takes no other: it does not listen for Gloo's, and where a rank has no record
//     New returns an error on every rank. Ranks that truly share memory, which each host
//     tries out, do their collectives and messages there (transport/shm); others
//     over connections of our own (transport/tcp), by the algorithm that a table of
//     measurements has for the operation, its size and the group (internal/choice);
//     several hosts with several ranks each in two levels.
//
// In two levels, the ranks of a host first do together what they can in its memory, so that
// bytes cross the network once for a host and not for each of its ranks, and small
// blocks in one message for a host or a pair of hosts. Reductions in rank order are left out, as no
// host may add up its own operands first. Messages between ranks of a host go through its memory, others over
// connections; a receive from any rank takes the first on either.
//
// Tensors of Backend.Alloc lie in memory that all ranks of the host see. Operations
// take them from there, with no copy in between.
//
// Backend.Explain tells what a group has and why, as "c10d doctor" prints it.
//
// # How an operation runs
//
// A call checks its arguments, takes the next tag and goes into a queue. A
// small collective is run by the goroutine that waits for its Work, which saves
// two wake-ups; what nobody waits for within a fraction of a millisecond, and
// what is large, by a worker. In shared memory collectives run one at a time, in
// the order of the calls; over a mesh, two at a time for each network interface.
//
// Over a mesh, an operation is a plan: the list of sends, receives, reductions
// and copies that a schedule gives this rank. On Gloo's wire the schedules are Gloo's.
// Point-to-point operations skip the queue.
//
// # Sums
//
// All ranks get the same bits, and the same call gives them again. On Gloo's
// wire they are PyTorch's. On the native wire Options.Sums says what they may
// depend on: by default on the algorithm too, in rank order on nothing but the
// operands and their order, exact not even on that.
//
// # Sparse tensors
//
// AllReduce of a sparse tensor makes the sum that tensor.SumSparse would make of
// all ranks' tensors, each summed up before: coalesced, in order, in new memory. On
// Gloo's wire it is done as PyTorch does it: every rank gets all entries of all
// ranks and adds up all of them. On the native wire ranks first say what they have, so that
// tensors that do not fit are an error on all ranks which names the same one, and
// nothing has changed. Then, as Options.Sparse and the numbers have it:
//
//   - gather: few entries go to every rank as they are;
//   - owners: the coordinates are cut into one range a rank, such that each holds
//     about as many entries, by samples that the ranks have told. Owners get the
//     coordinates in their ranges, find the union, spread it, get the values, add
//     them up, and spread the sums. A rank receives its share of all entries, and the
//     result once; so does a host with as many ranks as the others;
//   - dense: with the union known as above, an all-reduce of the values at all of its
//     coordinates, where ranks that share memory have most of them, or those of
//     several hosts so many that it moves less. It takes no more memory than the result.
//
// Coordinates travel as distances of one to eight bytes, or as one bit for each
// that there could be, whichever is shorter. Equal coordinates are added in
// the order of the ranks, or exactly (Options.Sums); the dense form adds as an
// all-reduce of a dense tensor does, and has a sum of -0 as 0. What a peer announces
// is made room for up to 256 MiB; beyond that, room grows with what has come.
// BenchmarkSparse compares the forms.
//
// # Copies
//
// Between ranks that share memory small data are copied twice, into the shared memory and
// out of it, and large ones once, straight out of the other process, if the kernel
// lets all ranks of the host do that. Explain says from which size on, or why not.
// Options.Copy, or C10D_COPY=staged, keeps to two.
//
// # When something goes wrong
//
// Gloo's wire cannot take a message back, so an operation that fails ends the
// group, as in PyTorch, but at once and on all ranks, with a reason: a rank
// that died, a rank that did not answer in time (asked before it is blamed), a
// cancelled context, messages that do not fit. Every pending and later
// operation fails with a *work.Error that names the rank whose fault it was.
// A rank that is asked has a third of a second to answer, or ten times that while the one
// that asks is itself kept waiting for a CPU, or others answer late.
// A panic in a custom operator ends the operation with a *work.PanicError on its rank. The other
// ranks' errors name that rank.
// Ranks of PyTorch in the group see a closed connection. The native wire keeps
// to the same rules. Death and faults are always told over connections: memory
// does not know who is alive.
//
// # The end
//
// Close takes about a second. Operations that have not ended fail with work.ErrClosed. If there are
// collectives among them, the group ends on all ranks, and their errors name the one that
// closed. The same happens when Close is deferred and the program panics. Shutdown waits first.
//
// # Messages and monitored barriers
//
// PyTorch's monitored barrier sends messages whose tags are the numbers of collectives, from 0 on.
// Between a PyTorch rank and rank 0 they meet messages of the program with the same tags. Use tags
// above the number of collectives there. Among ranks of this library they have slots of their
// own.
//
// # Calls that do not fit
//
// The native wires compare what the ranks call: operation, operator, dtype, root, and how many
// elements. What a collective sends carries these words and a digest of all calls before, in
// memory, over connections and in two levels alike. A rank that takes something from another one
// compares first. If the calls differ the group ends, on all ranks, with work.ErrMismatch:
//
//	the ranks disagree on the operation: as collective number 3 rank 0 called all_reduce(sum) of
//	float32[5], rank 1 called all_reduce(max) of float32[5]
//
// So no collective in which a rank needs all others succeeds there, if any call before it or the
// collective itself differs. Some need fewer: the root of a broadcast or scatter, and the ranks of a
// reduce or gather other than the root, only send. They may return nil, and find out in the next
// collective that needs all ranks. If there is none, Close returns the error: it waits for up to
// 300 ms for ranks that have not called as much.
//
// Calls count elements, not shapes: [2 3] fits [6]. Operations that move the same may be mixed, as
// AllReduce and AllReduceCoalesced or AllGather and AllGatherIntoTensor. Ranks may differ in
// the factor of PreMulSum, the number of tensors of one AllReduce, and in sizes that only some of
// them know (GatherV, AllToAll). Messages are compared by their sizes only.
//
// Gloo's wire has no room for it: there only sizes that differ are noticed, when the messages do not
// fit. Package backend/detail compares calls on every wire, before they run.
//
// # What it does not do
//
// On Gloo's wire ReduceScatter and its relatives move as much as an all-reduce, because Gloo
// does them so.
package gloo
