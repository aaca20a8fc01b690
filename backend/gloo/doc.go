// Package gloo is the backend for tensors in CPU memory. It speaks the wire of
// PyTorch's gloo backend, with the same rendezvous, messages and order of
// additions, so that a Go rank can sit in a PyTorch group and gets the same bits.
//
// Importing the package registers it:
//
//	import _ "github.com/c10d-go/c10d/backend/gloo"
//
// Package pg does so already; a program that uses pg gets gloo for the CPU.
//
// # How an operation runs
//
// A call checks its arguments, takes the next tag and goes into a queue; two
// workers take operations from it in order. A worker gets a plan for the
// operation, the list of sends, receives, reductions and copies that Gloo's
// schedule gives this rank, and runs it over a transport.Mesh: TCP connections
// to every other rank (transport/wire), or memory when all ranks live in one
// process (transport/mem). Point-to-point operations skip the queue.
//
// # When something goes wrong
//
// Gloo's wire cannot take a message back, so an operation that fails ends the
// group, as in PyTorch, but at once and on all ranks, with a reason: a rank
// that died, a rank that did not answer in time (asked before it is blamed), a
// cancelled context, messages that do not fit. Every pending and later
// operation fails with a *work.Error that names the rank whose fault it was.
// Ranks of PyTorch in the group see a closed connection.
//
// # What it does not do
//
// It does not check that ranks call the same operation with the same dtype;
// only sizes that differ are noticed, when the messages do not fit. ReduceScatter and
// its relatives move as much as an all-reduce, because Gloo does them so and
// the ranks of a group have to agree.
package gloo
