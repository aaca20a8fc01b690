// Package plan turns collectives into steps: what one rank sends, receives,
// reduces and copies, and in which order. Planning is pure. It sees ranks,
// sizes and counts, and touches no socket, clock or memory, so that what a
// group will do can be printed, compared with a golden file and simulated.
//
// There are two sets of schedules. [AllReduceRing], [Broadcast] and the other
// functions named after a collective are Gloo's, message by message: PyTorch
// ranks run them in their own code, and a rank that sends one message more, or
// one of another length, makes its peer hang or abort. The order of the
// reductions is Gloo's too, because a floating-point sum in another order has
// other bits. They are for groups with PyTorch ranks, and never change.
//
// Groups without such ranks choose: an [Algorithm], found by [Lookup], is a way
// to carry out a collective, for any number of ranks, any length and any root.
// Which is best depends on sizes and on the network; internal/choice has a table
// of measurements, and internal/simulate runs the plans in a model.
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
// A plan of a large group is long: a ring has steps in proportion to the number
// of ranks. [Algorithm.Steps] hands the steps over as they are made.
//
// # Buffers
//
// A step names one of three buffers. What Out and In hold, by collective:
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
// Blocks lie one after the other in rank order without gaps. A rank's own
// block travels by a Copy step; the executor may skip it where both sides are
// the same memory.
//
// # Algorithms
//
// With P ranks, n bytes (of an operand, or of all blocks), and s messages for a
// part that is cut into chunks. Messages are those that a rank sends one after
// another on the longest way; bytes are what the busiest rank sends. log is to
// base two, rounded up; h is (P-1)/P; G is the sum of g-1 over the factors g into
// which bcube divides P.
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
// Halving and doubling work for every P without folding: a group parts into
// halves that may differ by a rank, of which the odd one sends to another's
// counterpart. Where P is no power of two a few ranks receive up to twice what
// they send. Reduce-scatters send h n from every rank for any P.
//
// Hierarchical algorithms need a [Layout], and do the same in two levels: on a
// host as two-step does, between hosts by the algorithm that their name ends
// with. Each byte leaves a host as if the host were one rank.
//
// # Bits
//
// A floating-point sum depends on the order of its operands. All ranks of an
// all-reduce end with the same bits in any case: an element is either combined by
// one rank and copied, or combined by several from the same operands on the same
// sides. Beyond that, an algorithm promises one of two things:
//
//   - [AnyOrder]: which bits is a matter of the algorithm, the number of ranks,
//     the length of the buffer, and the element's place in it. The same call gives
//     the same bits again; timing never matters.
//   - [RankOrder]: every element is ((x0 op x1) op x2) and so on, x0 being the
//     local operand of the first step. So it depends on the operands alone, not on
//     which of these algorithms ran, nor on how a buffer was cut into chunks or
//     several tensors into one buffer. Groups in shared memory promise the same.
//     All-reduce has direct, two-step and chain in this order, from a few bytes to
//     the largest buffers; reduce and reduce-scatter have direct.
//
// RankOrder costs no bytes on the wire: two-step sends what the ring does. It
// costs scratch for the operands that wait for their turn (n bytes, or a few
// chunks with chain) and messages in proportion to P.
//
// No fixed order makes a sum independent of the number of ranks, since that
// number says how many operands there are. What can be had is a sum that does
// not depend on order at all, because it is exact and rounded once; see
// internal/exact. It needs all operands of an element in one place, which is what
// an all-to-all does, for the same bytes as a reduce-scatter. Integers (which
// wrap) and bitwise operators need no such care; nor do Min and Max but for NaN
// and the sign of zero.
//
// # Empty operations
//
// Algorithms send nothing that both sides know to be empty, except for barriers. For
// Gloo's planners, whether nothing to do still means a message is part of the protocol:
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
