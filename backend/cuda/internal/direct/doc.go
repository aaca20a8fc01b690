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
// docs/kernels.md has it, with the forms of a call and the rules that the tests show to be needed.
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
