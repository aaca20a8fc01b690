// Package direct has collectives for 2 to 8 ranks of a host, each with a device. Their kernels write
// into the memory of the other ranks. It also has three for 2 to 16 ranks that only write into the next rank's memory:
// see Rings.
//
//	w, err := window.New(ctx, window.Options{Driver: d, Device: gpu, Rank: rank, Ranks: n})
//	err = w.Connect(ctx, exchange)
//	c, err := direct.New(w, direct.Options{})
//	...
//	err = c.AllReduce(stream, out, in, n, tensor.Float32, backend.Sum(), direct.Form{})
//
// A call is one launch on the given stream, the caller's own if it has one; an all_reduce of two ranks in two shots is two. It allocates
// nothing, and nothing is done on the host afterwards. The call may be captured in a graph and
// replayed (driver.Capture), with other calls between the replays.
//
// # Rules for the caller
//
// All ranks make the same calls in the same order: the same kind, element count, dtype, root and
// operator, and the same Options and Form. In AllToAllV and GatherV ranks may have any lengths. Calls
// of one window must not overlap on the device: use one stream, or events between streams. Do not use programmatic dependent launches.
//
// A call may wait for the peers' calls, on the device. Its kernels take at most
// Options.Blocks blocks of 512 threads.
//
// Input and output may be the same memory, but must not overlap otherwise. They may begin
// and end at any element. 16-byte alignment is fastest.
//
// After a failure all calls return it, see Comm.Err. The caller then ends its group, or
// resets the window on all ranks.
//
// # Bits
//
// Every rank combines the operands in the order of the ranks, so all get the same bits in
// all runs. They are those of package internal/reduce: narrow floats are rounded after each
// step, and the sign of zero is exact. Infinite results and subnormal numbers stay as they
// are. A NaN stays a NaN, but its payload may change:
//
//   - a float32 of 0xffffffff is taken as 0x7fff7fff
//   - a pair of float16 or bfloat16 of 0xffff each, in a word of 4 bytes, as 0x7fff each
//   - the payload of a NaN that was computed is the device's
//
// Integers, float64 and calls that combine nothing are exact in every bit.
//
// In a ring (Form.Ring) a part is combined from the rank after its owner on, in the order of the ring. All ranks get
// the same bits there too, and no NaN is changed that is not computed.
//
// # The protocol
//
// docs/kernels.md has it, with the rules that the tests show to be needed. Calls have Forms, and those round a ring
// have rules of their own: see Rings.
//
// # Forms
//
// An all_reduce is one-shot: each rank sends everything to all others, in one launch. Or it is two-shot: a
// reduce_scatter and an all_gather within the output, with two ranks in two launches. With 2 ranks both send as many
// bytes. [Form] says which; package internal/ways chooses it for the backend. ShapeOf has the grids.
//
// A one-shot reduce or broadcast is an all_reduce or an all_gather in which ranks have roles. Givers have operands or
// data, and owners get them. A rank that gets nothing of another takes one vector of its tile 0: every call takes
// something from every peer. With two ranks a broadcast is a move.
//
// With more than two ranks two shots are one launch. Givers have operands, owners combine a part each, and takers
// get the results. In an all_reduce all ranks are all of that. In a reduce the root is the only taker, in a
// broadcast it is the only giver, and in both the others own the parts. In a reduce of up to 4 MiB the root owns one
// too. A rank that gets nothing else of another takes tile 0 from it.
//
// Each round of a channel has two tiles: an operand for the owner, and the result for the takers. A rank pushes the
// operands of the next round before it takes those of this one. So tiles 0 to 4 have to find room without a credit of
// this call, as they do in a ring of 8 slots. A channel gives credit after its first round. At its end it does so too,
// if K/2 tiles or more have had none.
//
// # Rings
//
// An all_reduce, a reduce_scatter or an all_gather can go round the window's ring (Form.Ring, ring.cu). Src and dst
// have a part for each rank. A warp is a channel, with slots at the next rank and a flag beside each. It has one
// tile of 2 KiB of each part at a time. All channels count the tiles that they have sent, from call to call.
//
//   - In step s of a combination a rank adds its operand to the part that belongs to the rank s + 1 places before
//     it, and sends it on. In step n - 1 the part is its own, and the sum is ready.
//   - In the steps after that the sums go on, and each rank keeps them. An all_gather has these steps alone.
//   - The lanes of a warp meet when a tile is written. Then lane 0 fences, and writes the tile's number to its flag.
//     To take the tile, lane 0 waits for that number, and the lanes meet again.
//   - A rank sends tile t when it has taken tile t - 1. So the rank before it had taken t - 2, and the next rank,
//     n - 1 places before it, has taken t - n. A channel has at least n slots, so the slot of tile t is free. There
//     are no credits.
//
// A tile of a part that is shorter than the longest one is padded with zeros, and travels all the same. Waits end as
// those of the other kernels do. Rings were not measured on GPUs.
//
// # Lanes
//
// [Comm.Lane] returns a lane to another rank, or from there, if the window has lanes. A message is a move of
// the two ranks, and a lane is their window. Its calls follow each other, and are in no order with those of
// other lanes and with collectives. Whoever launches them has to see that the kernels that may wait at the
// same time have room on the device.
//
// # Measurements
//
// docs/benchmarks.md has the times of two and four GPUs, and how to repeat them.
//
// New takes 2 s on a machine that has not compiled the kernels before. With more than two ranks it takes 7 s, and up
// to 10 s when four ranks compile at once. CUDA keeps the result. The kernels of the other dtypes take 2 s more.
package direct
