// Package plan turns collectives into steps: what one rank sends, receives,
// reduces and copies, and in which order. Planning is pure. It sees ranks,
// sizes and counts, and touches no socket, clock or memory, so that what a
// group will do can be printed, compared with a golden file and simulated.
//
// The schedules are Gloo's, message by message: PyTorch ranks run them in
// their own code, and a rank that sends one message more, or one of another
// length, makes its peer hang or abort. The order of the reductions is Gloo's
// too, because a floating-point sum in another order has other bits.
//
// # A plan
//
// Each rank makes its own plan from its rank and arguments common to all. Rank
// 0 of three that all-reduce seven float32 begins like this, as
// [Plan.String] writes it:
//
//	plan.AllReduceRing(0, 3, 28, 4)
//
//	requests 4, scratch 16
//	send   #0 to 2 out[16:24]
//	send   #1 to 2 out[24:28]
//	wait   #0
//	recv   #0 from 1 scratch[0:8]
//	wait   #1
//	recv   #1 from 1 scratch[8:16]
//	wait   #0
//	reduce out[0:8] scratch[0:8]
//	...
//
// Send and Recv post a request and go on. Wait ends a request, whose index is
// then free for another post. Nothing else blocks, so a plan is a straight
// line that an executor walks once, with a table of [Plan.Requests] requests
// and [Plan.Scratch] bytes of memory of its own.
//
// All messages of a plan use one slot. The k-th send from a to b meets the
// k-th receive that b posts from a; the plans of a group agree in number,
// order and length of these.
//
// # Buffers
//
// A step names one of three buffers. What Out and In hold, by planner:
//
//	AllReduceRing, AllReduceBcube  Out: operand, then result
//	ReduceRing                     Out: operand, then on root the result;
//	                               elsewhere partial results remain
//	Broadcast                      Out: on root the data, elsewhere the result
//	AllGather, AllGatherV          In: own block; Out: all blocks by rank
//	Gather, GatherV                In: own block; Out, only on root: all blocks
//	Scatter, ScatterV              In, only on root: all blocks; Out: own block
//	AllToAll, AllToAllV            In: blocks by destination; Out: by source
//	Barrier                        none
//
// Blocks lie one after the other in rank order without gaps. A rank's own
// block travels by a Copy step; the executor may skip it where both sides are
// the same memory.
//
// # Empty operations
//
// Whether nothing to do still means a message is part of the protocol:
// all-reduce, reduce and the all-gathers send nothing if the whole result is
// empty. Broadcast, gather, scatter and all-to-all send empty messages, as
// does an all-gather for an empty block of a result that is not. A group of
// one rank has copies only.
//
// # Misuse
//
// Arguments come from code that has checked the user's. A rank or root outside
// the group, a negative size, or bytes that are no whole number of elements
// panic: the plan would write where it must not.
package plan
