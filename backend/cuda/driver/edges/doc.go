// Package edges orders operations of several streams, and of the host, by what
// they read and write. It is the only place that records events and waits for
// them.
//
// A [Tracker] knows what the streams of a group have done to which memory. A
// [Batch] is a list of operations that are enqueued together, each with its
// stream:
//
//	b := tracker.Batch()
//	b.Before(caller, driver.Writes(grad, n))        // what the caller's stream did is there first
//	b.Copy(down, staging, grad, n)
//	turn := b.Host(host, driver.Writes(staging, n)) // then it is the host's turn
//	b.Copy(up, grad, staging, n)
//	b.After(caller, driver.Reads(grad, n))          // and the caller's stream may go on
//	p, err := b.Run()
//
// Run enqueues them in order of the list. Two operations conflict if they use the
// same bytes and one of them writes. If nothing orders them yet, Run adds an edge.
// Between streams that is an event, recorded right after the first operation and
// waited for right before the second. Between a stream and the host it is a word in
// page-locked memory, which one writes and the other waits for. There are no other
// edges: none for operations that do not conflict, none between operations of
// one stream, none that follow from others. Taking any of them away leaves two
// operations without an order.
//
// Run blocks only while a stream has no room for another command. That may be a
// caller's stream, which waits for an earlier batch. So the methods of earlier
// Pendings do not wait for Run: the host goes on with them, or gives them up.
//
// The host takes its turns in a goroutine of its own, while the streams wait for it
// where they must:
//
//	err = p.Begin(ctx, turn) // until the bytes are there
//	...
//	p.End(turn)              // lets the streams go on
//
// # The caller's streams
//
// A caller's stream does things that the tracker does not see. Before says what it
// may have done up to now: the stream records an event, and others wait for it. After
// says what it may do from now on: the stream waits. Work that may be ordered later
// keeps the [Pending]: Order makes any stream wait for all of the batch, Done and
// Sync tell the host that it has ended.
//
// # From batch to batch
//
// The tracker remembers, for each byte, who used it last, until it learns from a Pending that
// this has ended. If an operation conflicts with one of an earlier batch, it waits for an event
// on the stream of the earlier one. The event is recorded when it is needed. So it stands for all
// that the stream had been given by then, which may be more than the one operation.
//
// # Failures
//
// When an operation cannot be enqueued, Run lets the host's turns go, so that the streams do not wait for
// ever. It returns the error, and a Pending of what had been enqueued. Memory may be freed when the
// Pending is done. What later batches enqueue comes after all that other streams have been given by then,
// unless it has ended. When the host cannot do its part, Abort does the same. The memory then has no
// useful contents. But every stream goes on, in the same order as if the host had taken its turns.
//
// # What it is not
//
// It knows addresses, not allocations: memory that is mapped at two addresses is
// two memories to it. It does not know what other processes do; WaitValue and
// WriteValue of a Batch carry what they stand for as accesses. It chooses no
// streams.
package edges
