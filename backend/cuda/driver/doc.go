// Package driver is what this module needs of CUDA, as a small interface.
//
// A [Driver] has devices; a [Device] has memory, streams and kernels; a [Stream]
// is a queue of operations that the device carries out in order. Calls enqueue
// and return. What orders operations of different streams are events and words:
//
//	e, err := producer.Record()   // passes when the work so far has ended
//	if err != nil {
//		return err
//	}
//	defer e.Release()
//	err = consumer.Wait(e)        // the consumer's later work comes after it
//	...
//	err = producer.WriteValue(word, n)                   // stream to host, or to a stream of another process
//	err = consumer.WaitValue(word, n, driver.AtLeast)    // host to stream
//
// # Implementations
//
// They are chosen by the program, and the code above them is the same:
//
//   - driver/sim is a GPU in software. Its streams are goroutines over Go
//     memory, its kernels Go functions, and it reports operations that nothing
//     orders. All tests of the works on device tensors run on it.
//   - driver/nvidia is the real driver, loaded when the program runs, so that a
//     plain build gives a program that uses GPUs where there are some.
//   - backend/cuda/gorgonia is the same on gorgonia.org/cu.
//
// All pass the suite in driver/drivertest, and so must one of your own.
//
// # Addresses
//
// [Ptr] is a number. Device memory and page-locked memory of a process live in one address space
// (CUDA's unified addressing). So a copy needs no kind, and the address of a part is a sum. A
// device can touch page-locked memory from the start, another device's memory in kernels only
// after EnablePeer, another process's only through a [MemoryHandle].
//
// # Events are used once
//
// Record returns a new event each time, and nothing records an event again. In CUDA a wait has
// the event's state at the moment of the call. Other vendors leave open whether a later record
// moves a wait that is already in a queue. With events that are used once both come to the same,
// and the edges between operations cannot form a cycle: a wait can only be enqueued after its
// record. Events come from a pool; recording one allocates nothing in the steady state.
//
// # Who says what needs an order
//
// Nobody types waits by hand. Operations declare what they read and write ([Access]).
// Package driver/edges works out which operations need an order that they do not have, and
// records and waits for exactly these. The simulator checks the result by itself.
//
// # Words
//
// A word is four bytes that streams wait for and write in order with their
// other work. In page-locked memory the host takes part, with Load32, Store32
// and AwaitWord. So the host does its share of an operation between two commands
// of a stream, without a callback from the driver and without blocking a caller.
// In page-locked memory that several processes registered it
// orders streams of different processes.
//
// # Graphs
//
// A stream that is a [Capturer] can be captured. Its calls become a [Graph]. One call
// launches the graph, any number of times:
//
//	g, err := driver.Capture(s, func() error {
//		return s.Launch(l) // runs nothing; l may be changed afterwards
//	})
//	...
//	err = g.Launch(s)
//
// Another stream is part of the capture once it waits for an event that the capture
// has recorded. The first stream must wait for the end of its work before EndCapture.
//
// A graph has the arguments of its calls: addresses, and the values of parameters and
// words. What differs between launches must lie in memory. The memory and the modules
// must stay until the last launch has ended.
//
// During a capture:
//
//   - Whatever goroutine uses a captured stream, its calls are captured too.
//   - Other streams, and all other calls to the Driver, are as usual. Captures are
//     CUDA's relaxed ones: the others forbid calls of other threads, or tie the
//     capture to a thread, which goroutines do not have.
//   - An event of the capture has no state: its Done and Sync return ErrCapture.
//
// Calls that cannot be captured return ErrCapture. They may end the capture: then
// EndCapture returns ErrCapture as well, and there is no graph. They are
//
//   - waits for an event that was recorded outside of the capture, and waits for an
//     event of a capture that has ended: order the stream before and after,
//   - copies from page-locked memory to page-locked memory, with a real driver,
//   - words, where CUDA's driver cannot capture them,
//   - launches of graphs.
//
// # Queues
//
// Streams share queues of the hardware. A stream that waits for a word holds up the other streams
// in its queue. A device has a number of queues for kernels, and for copies to and from
// page-locked memory. It is the value of the environment variable CUDA_DEVICE_MAX_CONNECTIONS
// when the first context is made, at most 32. Without the variable copies have four. So
// driver/nvidia and backend/cuda/gorgonia set it to 32 for their process, unless it is set.
// Copies that a stream fetches from another device have one queue, however many streams there
// are. Copies that a stream of the source's device sends there share the others. This was seen
// with driver 580 on H200s.
//
// # Errors
//
// Errors are of type [*Error], which has the call, the device and the driver's own error. Callers
// branch on the sentinels (ErrOutOfMemory, ErrPeerAccess, ErrDeviceLost, ...). A call that is
// refused has done nothing. An operation that fails on the device breaks the device for the
// process, as it does in CUDA: its events, and all calls after it, return ErrDeviceLost.
//
// # Lifetimes
//
// Everything is closed by who made it; there are no finalisers. Memory may be
// closed when the last event of the last stream that used it has passed. A
// stream may be closed at any time, what it has been given still runs.
//
// # What it is not
//
// It has no textures, no stream-ordered allocation, no callbacks into Go, and no
// multicast. There is no way to block on a whole stream: record and wait for the
// event.
package driver
