// Package sim is GPUs in software, to run and to test programs that use streams.
//
// A stream is a goroutine, device memory is Go memory, a kernel is a Go function
// under the name that it has in a PTX text. To the program above it is a
// driver.Driver like the real ones; nothing else is needed to run it on a laptop
// or in CI:
//
//	d, err := sim.Open(sim.Config{Devices: 2, Seed: seed})
//	...
//	err = d.Close() // what the program did wrong
//
// # What it finds
//
// Operations of different streams run at the same time unless an event or a word
// orders them. A program that forgets one is right most of the time: that is why
// such bugs live long. The simulator finds them in three ways.
//
// The checker keeps a vector clock for every stream and for the host and compares each use of
// memory with the earlier ones. Two uses of a byte are a [Race] if one of them writes and nothing
// orders them. They need not have met in this run. The report names both operations, where they
// were enqueued, the bytes, and the order that is missing:
//
//	sim: nothing orders
//		Memset of 20 bytes at 0x7f0000000000 of device 0 (operation 2 of stream a, x/x.go:60), which writes 20 bytes
//	and
//		Copy of 10 bytes from ... to ... (operation 1 of stream b, x/x.go:59), which reads 10 bytes
//	which both use bytes [10, 20) of device 0's memory that begins at 0x7f0000000000
//		missing: stream b waits, before operation 1, for an event that stream a records after operation 2, or the other way round
//
// Go's race detector sees the same, because the streams' goroutines share nothing but the
// memory, the events and the words. So it finds accesses of kernels that were not declared,
// and accesses of the host to page-locked memory at the wrong time. And delays drawn
// from the seed before, after and in the middle of operations make wrong results
// likely.
//
// It also finds:
//
//   - memory that is freed while operations may use it, or used afterwards ([Lifetime])
//   - accesses outside an allocation
//   - kernels that touch what their launch does not declare ([Fault])
//   - kernels that reach another device without peer access
//   - events that nobody waited for ([Unused])
//   - what was not closed ([Leak])
//   - streams that can never go on ([Stuck])
//
// # Making things fail
//
// Machine.Inject makes any call fail: with FailCall(k) for every k a program's
// clean-up is tried at every place, which [FailEach] does. Machine.Lose breaks a
// device. Machine.Skip leaves calls out, so that a test can show that each wait
// and each record is needed, as [LeaveOut] does.
//
// # Processes
//
// A [Machine] has several processes, each with a [Driver] of its own. They share devices but not
// addresses. They reach each other's memory through handles. Each has its own vector clocks. This
// is how the ranks of a group run in one test. Words order their streams. To open a handle comes
// after its export, and to free memory after the ends of mappings that other processes have closed.
// Of other messages between the processes those are seen that driver.HostMeets tells of.
//
// With Config.Dir memory lies in files, and the processes are real ones. Handles
// and words work between them. The checker of each process sees its own operations
// only. It takes a word that another process wrote as an order after everything
// that its own streams had done by then.
//
// # Time
//
// The simulator does not measure how long things take. Timeline and Makespan give the
// operations times on a virtual clock. They follow from the orders that the program made and
// the [Topology]'s bandwidths, so they are the same in every run.
//
// # Kernels
//
// A [Kernel] does the work of a whole launch. It gets its memory from [Run], which
// holds it to Launch.Access. Kernels that talk to each other while they run use
// words, with Run.Store and Run.Await, or sync/atomic on Run.Common. The checker
// understands the first, and only the race detector understands the second.
//
// # Graphs
//
// Streams can be captured (driver.Capturer), with their words. Each launch of a graph
// gives streams the captured operations as new ones. Operations of the stream that was
// captured first run on the stream of the launch. Those of each other stream run on a
// stream of the graph with that stream's name. So the checker sees the accesses of
// every launch, and finds races within a launch and between launches. Its report names
// the line where the operation was captured. The first call that cannot be captured
// ends the capture.
//
// # Other semantics
//
// [RawEvent] is an event that can be recorded again, with CUDA's meaning or the
// worst that other vendors leave open. It is there to run programs written
// elsewhere, and to show why package driver has no such events.
//
// # What it is not
//
// It does not run PTX. It does not model what limits how many kernels run at a
// time, so a kernel that waits for another one always meets it. The goroutines of
// a process are one host to the vector clocks. What a kernel does between two
// words is to the checker one step: memory has to be asked for again after each.
package sim
