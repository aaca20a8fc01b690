// Package plan turns collectives into steps: what one rank sends, receives, reduces and copies,
// and in which order. Planning is pure: its inputs are ranks, sizes and counts, and it touches no
// socket, clock or memory. Plans can therefore be printed, compared with golden files and
// run without a network.
//
// There are two sets of schedules. [AllReduceRing], [Broadcast] and the other functions named
// after a collective are Gloo's, message by message, for groups with PyTorch ranks. They never
// change: one message more, or one of another length, makes a PyTorch rank hang or abort. The
// order of the reductions is Gloo's too, because a floating-point sum in another order has other
// bits.
//
// Groups without such ranks choose an [Algorithm] by [Lookup]. It carries out a collective for
// any number of ranks, any length and any root. The best one depends on sizes and on the network.
// internal/choice has a table of measurements.
//
// # A plan
//
// Each rank makes its own plan from its rank and common arguments. This is the beginning of rank
// 0's plan, as [Plan.String] writes it, if three ranks all-reduce seven float32:
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
// Send and Recv post a request and go on. Wait ends a request; its index is then free. Nothing
// else blocks. An executor runs the steps once, in order, with [Plan.Requests] requests and
// [Plan.Scratch] bytes of scratch memory.
//
// All messages of a plan use one slot. The k-th send from a to b matches the k-th receive that b
// posts from a. The plans of a group agree in the number, order and length of messages.
//
// # Buffers
//
// A step names one of three buffers: Out, In or scratch. Contents of Out and In:
//
//	all-reduce      Out: operand, then result
//	reduce          Out: operand, then on root the result; elsewhere partial
//	                results remain
//	reduce-scatter  In: all blocks; Out: own block of the result
//	broadcast       Out: on root the data, elsewhere the result
//	all-gather      In: own block; Out: all blocks by rank
//	gather          In: own block; Out, only on root: all blocks
//	scatter         In, only on root: all blocks; Out: own block
//	all-to-all      In: blocks by destination; Out: by source
//	barrier         none
//
// Blocks are in rank order without gaps. A Copy step moves a rank's own block; the executor may
// skip it if both sides are the same memory.
//
// # Algorithms
//
// P is the number of ranks, n the bytes of an operand or of all blocks, and s the number of
// chunks of a part. Messages are counted along the longest path. Bytes are those that the busiest
// rank sends. log is to base two, rounded up; h is (P-1)/P; G is the sum of g-1 over the factors
// g into which bcube divides P.
//
//	                                    messages          bytes
//	all-reduce      direct              P-1               (P-1) n
//	                recursive-doubling  log P             n log P
//	                halving-doubling    2 log P           2 h n
//	                bcube               2 G               2 h n
//	                two-step            2 (P-1)           2 h n
//	                ring                2 (P-1) s         2 h n
//	                chain               2 (P-1+s)         2 n
//	                binomial            2 log P           n log P
//	reduce          binomial            log P             n
//	                halving-gather      log P + P-1       n
//	                direct              P-1               n
//	reduce-scatter  direct              P-1               h n
//	                halving             log P             h n
//	                ring                (P-1) s           h n
//	all-gather      direct              P-1               h n
//	                recursive-doubling  log P             h n
//	                bruck               log P             h n
//	                ring                P-1               h n
//	broadcast       binomial            log P             n log P
//	                flat                P-1               (P-1) n
//	                chain               P-2+s             n
//	                scatter-doubling    2 log P           2 h n
//	                scatter-ring        log P + P-1       2 h n
//	all-to-all      direct              P-1               h n
//	gather,         direct              P-1               h n
//	scatter         binomial            log P             about n/2 log P
//	barrier         dissemination       log P             0
//
// Halving and doubling work for every P without folding. Halves may differ by one rank, and the
// odd rank sends to another rank's counterpart. If P is not a power of two, a few ranks receive
// up to twice as much as they send. In a reduce-scatter every rank sends h n for any P.
//
// # Bits
//
// A floating-point sum depends on the order of its operands. All ranks of an all-reduce always
// get the same bits. Either one rank combines an element and others copy it, or several combine
// it from the same operands in the same order. Beyond that, an algorithm has one of two orders:
//
//   - [AnyOrder]: the bits depend on the algorithm, the number of ranks, the length of the
//     buffer, and the element's place in it. The same call gives the same bits again, whatever
//     the timing.
//   - [RankOrder]: every element is ((x0 op x1) op x2) and so on, and x0 is the local operand of
//     the first step. The bits depend on the operands only. The algorithm, the chunks, and
//     tensors that share a buffer do not matter. Groups in shared memory give the same order.
//     All-reduce has direct, two-step and chain in this order, for small to large buffers; reduce
//     and reduce-scatter have direct.
//
// RankOrder costs no bytes on the wire: two-step sends as much as the ring. It costs scratch
// memory for waiting operands (n bytes, or a few chunks with chain) and a number of messages
// proportional to P.
//
// No fixed order makes a sum independent of the number of ranks, since that is the number of
// operands. For integers, which wrap, and bitwise operators the order does
// not matter. For Min and Max it matters only for NaN and the sign of zero.
//
// # Empty operations
//
// Algorithms send no empty messages, except in barriers. In Gloo's planners the protocol decides.
// All-reduce, reduce and the all-gathers send nothing if the whole result is empty. Broadcast,
// gather, scatter and all-to-all send empty messages. So does an all-gather for an empty block if
// the result is not empty. A group of one rank has copies only.
//
// # Misuse
//
// The caller has checked the user's arguments. A rank or root outside the group causes a panic,
// as do a negative size and bytes that are no whole number of elements. The plan would write
// outside its buffers.
package plan
