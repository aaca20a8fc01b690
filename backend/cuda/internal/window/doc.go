// Package window has the memory that the ranks of one host map for kernels that talk to
// each other.
//
// Each rank makes a [Window] on its device, and connects it with those of the others:
//
//	w, err := window.New(ctx, window.Options{Driver: d, Device: gpu, Rank: rank, Ranks: n})
//	...
//	reason, err := w.Connect(ctx, exchange) // all ranks call it
//	...
//	w.Detach()                     // no kernel of this rank uses the memory any more
//	...                            // all ranks have detached
//	w.Close()
//
// The package sends nothing by itself. [Exchange] is a function of the caller. Connect, Reset and
// nothing else call it.
//
// # What is in a window
//
// docs/kernels.md says how kernels use it. A rank's device memory holds, for each other rank, a ring of
// Options.Depth slots for each of Options.Channels channels. Only that rank pushes data into it, and only the owner
// takes data out. A slot has room for SlotBytes of data, and KeyBytes for a key. A free slot holds ones only. The
// first slots of all channels lie side by side, then their second ones. Beside the rings are:
//
//   - credits: for each channel and rank, how many tiles that rank has taken. That rank writes it.
//   - state: for each channel, the tiles before and after the last call. Behind them, for each rank, how many parts of
//     a span the channels have taken in the call under way. Only the owner uses it.
//   - failed: not 0 once a call of the owner has failed. Its later kernels do nothing.
//   - a count of the channels that have ended in the call under way. Only the owner uses it.
//
// With Options.LaneChannels there are lanes, for messages of two ranks: one from each rank to each other one
// ([Window.Lane]). A lane has a ring in the memory of both of its ranks, and credits and state of its own. Messages
// therefore need no order with collectives and with messages of other lanes.
//
// With Options.RingChannels there is a ring ([Window.Ring]): an order of the ranks, in which each one writes to the
// next one. It has slots, a flag beside each, and counts. With Options.Next there is nothing else, and a rank maps
// the memory of the next rank alone. Connect first finds out which ranks reach which.
//
// Page-locked memory of the rank's own process holds the abort word, the report, and the number of the last call that
// has ended. The host writes the abort word, and kernels poll it. The first kernel that fails writes the report. The
// last channel of a call writes the number. Each lane has such words too, but for the number.
//
// All counters are in device memory, so a launch can be captured in a CUDA graph and replayed.
//
// # Ranks of one process, and of several
//
// A rank opens a peer's memory by its handle if the peer is another process. It uses the
// peer's address, with peer access of the devices, if they share a process. The last window of
// the process that needs it takes the access back.
//
// Ranks may share a device; [Window.SharedDevice] tells. Kernels that wait for each other
// must not run then: the first one could keep the second one from starting.
//
// # Failures
//
// [Window.Abort] ends the waits of this rank's kernels. [Window.Err] returns what the first
// failing kernel reported. After a failure the rings hold anything. [Window.Reset] clears
// them, when the kernels of all ranks have ended.
package window
