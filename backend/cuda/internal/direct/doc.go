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
// A warp is a channel. Tiles of 512 bytes or 2 KiB, or 1 KiB with more than two ranks, are dealt to the channels in turn.
// Channel c of a rank has a ring of K slots at each peer, for its tiles, and pushes tile
// number t into slot t mod K. Slot 0 of all channels comes first in memory, then slot 1 of all. A warp pushes one tile ahead, then takes the tile that it
// waits for. Two shots in one launch differ, see Forms.
//
// There are no flags. A free slot is all ones, and a word of data never is. A lane polls its own words until none is
// all ones. It then has them, and fills them with ones again. So a tile needs no fence, and only words of 4 bytes have to
// be written as a whole.
//
// Floats that are all ones are changed to another NaN. Other dtypes may have any bits. There a tile with a word of
// all ones gets a key: all its words are XORed with it. The key is the first one of a fixed row that leaves no word
// all ones; the row is longer than a tile. A fixed word takes the place of the first word. The key and the first word
// go to the slot's place for a key. A tile that begins with the fixed word gets a key too. So a rank waits for a key
// before it takes a tile that begins with that word. Then it changes the tile back, and fills the place of the key
// with ones.
//
// A push may overwrite a slot only when the peer has emptied it. A channel keeps {cur,
// prev}, the tiles before this call and before the last one. Tile t may be pushed if
//
//   - t < prev + K. The last call has ended, so the peer's last call had begun, so all its
//     earlier ones had ended and emptied their slots. This needs that every call takes
//     something from every peer on every channel that it uses: a rank's part is padded with
//     zeros up to the longest part.
//   - or t < credit + K, where credit is what the peer has published. Each time a channel has
//     taken K/2 tiles in a call, it publishes its count, by a store that releases the emptied
//     slots. The warp's lanes meet before. A call that passes a multiple of 2^30 tiles gives credit at
//     its end: a credit that is 2^31 tiles old would seem to be new.
//
// That is enough for every call to end. At the start of a call, prev or credit is at most
// K/2 - 1 tiles behind. If the last call had fewer than K/2 tiles, prev is its start; otherwise
// its last credit is that near. So tiles 0 to K/2 can be pushed. A rank needs K/2 tiles of
// each peer to publish the next credit, and it pushes one tile ahead.
//
// # Moves
//
// Gather, scatter, barrier, all_to_all of unequal parts and broadcasts of two ranks are one kernel, Mover in
// direct.cu. It gets a span of bytes for each peer that this rank sends, and one that it takes. Lengths
// may be 0. Other broadcasts are in Forms.
//
// The rings, the counters and the credits are those of the other kernels, with three more rules:
//
//   - Tile 0 of each channel goes to every peer. It is 16 bytes of lane 0. So every call takes something
//     from every peer, as the first rule for pushes needs.
//   - Tile 0 tells the length that its sender sends there, and the longest span that it knows of. A
//     rank that expects another length fails. All ranks take the longest of what they hear. So all of
//     them count the same tiles.
//   - A tile that does not travel counts all the same, and leaves its slot free. Each rank gives credit
//     for it, whether or not it takes anything.
//
// The first tile of data is pushed with tile 0. Where not all ranks know the longest span, they have a
// fixed grid.
//
// # Straight stores
//
// A rank may let its peers write their spans to where they are to be ([Form].Into). The peers have to have
// mapped that memory; package registered does that. Tile 0 tells each peer where, and whether all peers may.
// If all ranks say so, and the longest span has more than 8 tiles for each channel, the call counts three tiles:
//
//   - tile 0
//   - the first tile of data, which was pushed with it
//   - after all other tiles have been written and the lanes have fenced and voted: the end. A rank waits for
//     the ends of all its peers.
//
// Who writes looks every 16 tiles whether the peer has failed, and after 1 ms if it also waits for third ranks. A
// rank that fails stays for 5 ms, so nothing comes after its kernel has ended.
//
// Sums and averages of 2 ranks do the same if they have up to 32 blocks. The dtype is float32, float16 or bfloat16: other
// dtypes, which gradients do not have, go without these kernels. The head of one tile tells where the peer may write. If both are open, each combines its half as in a reduce_scatter, and writes each tile of the result to
// both. The end is told as above. If not, the call is one-shot.
//
// With more ranks the same holds for any operator of these dtypes in a call of two shots, and for a broadcast. A rank
// that gets no results counts as open. If a rank is not open, results go through the rings.
//
// # Reads
//
// The root of a reduce of two ranks reads the other one's input, if that is registered. It does so for sums and
// averages of float32, float16 and bfloat16, from 128 MiB on. Tile 0 tells where the root may read, and whether both
// ranks are open. If both are, the call counts two tiles:
//
//   - tile 0; the input was there before
//   - when the root has read and its lanes have fenced: the end. The other rank waits for it, so its input stays as it
//     is until then.
//
// A rank that fails does not wait for the end. Its input may then change, or be freed. So a channel of the root looks
// before each 64 tiles whether the other rank has failed, and reads no more if it has. That rank stays for 5 ms, as
// above. The root looks once more after it has read, and before it tells the end. If the other rank has not failed, its
// kernel was still there, and so was its input.
//
// The tests have a model of the protocol, with ranks of any pace and stores that overtake each
// other. They show that each rule is needed.
//
// Block i waits only for the peers' blocks i, so blocks need not all run at the same time.
//
// Every wait looks at the abort word and at the clock, each 1024 polls. A kernel that gives up
// reports for which rank it waited. It sets a word that makes this rank's later kernels return at
// once.
//
// # Lanes
//
// [Comm.Lane] returns a lane to another rank, or from there, if the window has lanes. A message is a move of
// the two ranks, and a lane is their window. Its calls follow each other, and are in no order with those of
// other lanes and with collectives. Whoever launches them has to see that the kernels that may wait at the
// same time have room on the device.
//
// # Rings
//
// An all_reduce, a reduce_scatter or an all_gather can go round the window's ring ([Form].Ring, ring.cu). Src and
// dst have a part for each rank. A warp is a channel, with slots at the next rank and a flag beside each. It has one
// tile of 2 KiB of each part at a time. All channels count the tiles that they have sent, from call to call.
//
//   - In step s of a combination a rank adds its operand to the part that belongs to the rank s + 1 places before it,
//     and sends it on. In step n - 1 the part is its own, and the sum is ready.
//   - In the steps after that the sums go on, and each rank keeps them. An all_gather has these steps alone.
//   - The lanes of a warp meet when a tile is written. Then lane 0 fences, and writes the tile's number to its flag.
//     Who takes the tile has lane 0 wait for that number, and the lanes meet again.
//   - A rank sends tile t when it has taken tile t - 1. So the rank before it had taken t - 2, and the next rank,
//     n - 1 places before it, has taken t - n. A channel has at least n slots, so the slot of tile t is free. There
//     are no credits.
//
// A tile of a part that is shorter than the longest one is padded with zeros, and travels all the same. Waits end as
// those of the other kernels do. ring_model_test.go has a model of this, and shows that each rule is needed. Rings
// were not measured on GPUs.
//
// # Forms
//
// An all_reduce is one-shot: each rank sends everything to all others, in one launch. Or it is
// two-shot: a reduce_scatter and an all_gather within the output, with two ranks in two launches. With 2 ranks both
// send as many bytes. [Form] says which; package internal/ways chooses it for the backend. [ShapeOf] has the grids.
//
// A one-shot reduce or broadcast is an all_reduce or an all_gather in which ranks have roles. Givers have operands or
// data, and owners get them. Whoever gets nothing of a rank takes one vector of its tile 0: every call takes something
// from every peer. With two ranks a broadcast is a move.
//
// With more than two ranks two shots are one launch (both in direct.cu). Ranks have roles. Givers have operands, owners
// combine a part each, and takers get the results. In an all_reduce all ranks are all of that. In a reduce the root is
// the only taker, in a broadcast it is the only giver, and in both the others own the parts. In a reduce of up to 4 MiB
// the root owns one too. Whoever gets nothing else of a rank takes tile 0 from it.
//
// Each round of a channel has two tiles: an operand for the owner, and the result for the takers. A rank pushes the
// operands of the next round before it takes those of this one. So tiles 0 to 4 have to find room without a
// credit of this call, as they do in a ring of 8 slots. A channel gives credit after its first round. At its end it does so too, if K/2 tiles or
// more have had none.
//
// # Measurements
//
// docs/benchmarks.md has the times of two and four GPUs, and how to repeat them.
//
// New takes 2 s on a machine that has not compiled the kernels before. With more than two ranks it takes 7 s, and up
// to 10 s when four ranks compile at once. CUDA keeps the result. The kernels of the other dtypes take 2 s more.
package direct
