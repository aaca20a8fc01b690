// Package window has the memory that the ranks of one host map for kernels that talk to
// each other.
//
// Each rank makes a [Window] on its device, and connects it with those of the others:
//
//	w, err := window.New(ctx, window.Options{Driver: d, Device: gpu, Rank: rank, Ranks: n})
//	...
//	err = w.Connect(ctx, exchange) // all ranks call it
//	...
//	w.Detach()                     // no kernel of this rank uses the memory any more
//	...                            // all ranks have detached
//	w.Close()
//
// The package sends nothing by itself. Exchange is a function of the caller that gathers
// the bytes of all ranks, such as an all_gather of a CPU backend. Connect, Reset and
// nothing else call it.
//
// docs/kernels.md has what is in a window, and how kernels use it. All counters are in device memory, so a launch can be
// captured in a CUDA graph and replayed.
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
