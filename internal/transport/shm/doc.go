// Package shm runs the collectives of ranks on one host, and carries their
// messages, through memory that the ranks share. It uses no socket. Data are copied
// into the shared memory and out of it, unless they lie in memory of [Group.Alloc]. A few collectives
// of large data copy once, straight out of the other process.
//
// # A group
//
// Every rank makes an [Endpoint] and tells the others its address, by whatever
// means it has. Then all call [Endpoint.Join] with all addresses:
//
//	e, err := shm.NewEndpoint()
//	... // publish e.Addr(), collect those of the other ranks
//	g, err := e.Join(ctx, rank, addrs, shm.Options{})
//	if err != nil {
//		... // why these ranks cannot share memory: use sockets
//	}
//	defer g.Close()
//	err = g.AllReduce(buf, shm.Operator{Elem: 4, Combine: add}, stop)
//
// If a group spans several hosts, the ranks of each host make a group of their own,
// in which they have new numbers.
//
// # The memory
//
// Rank 0 makes an anonymous file (memfd_create) and seals its size, so that no rank can shrink
// it. It passes the file to the other ranks over a socket in the abstract namespace. They must
// know the group's secret. So the size of /dev/shm is no limit, joining takes one connection for
// each rank, and nothing is left when the processes end, in whatever way. A group keeps the
// mapping and no descriptor.
//
// Containers and virtual machines can make different hosts look like one. Ranks with
// different boot identifiers or network namespaces see that in the addresses.
// Otherwise rank 0 writes a random number that the others must find, and every rank
// writes a word of its own. Join succeeds once every rank has seen all these words.
//
// Each rank has a segment: 16 slots for small pieces of its data, four places for large ones, and the
// words that others wait for. Each word has one writer and a cache line of its own.
//
// # The protocol
//
// A collective is a sequence of pieces, which are numbered through the life of the
// group. Piece p has slot p modulo 16. If it is large, its data lie in place p modulo 4.
// For each piece, a rank
//
//   - waits until no rank needs the old contents, which it usually knows
//     already: a rank that has published piece p is done with those before p-1;
//   - copies its data into the slot, with a header that says which call it is;
//   - publishes the piece: it stores p+1 in the slot's first word;
//   - waits for the words of the ranks whose data it needs, and takes the data.
//
// The header has the collective, its size and root, and a digest of all operations
// of the rank so far ([Group.Enter], [Group.Begin]). Other ranks compare it before
// they take the data. A rank that only sends looks, when it has published, at the headers that are there for
// the same piece. So if two ranks only send, and their calls differ, the later one notices.
// Each rank also keeps a list of its latest 64 operations in its segment. The others read it to say
// how the ranks disagree, during long waits, and before they close ([Group.CompareCalls]).
//
// A piece of up to 32 bytes lies beside its header, in the cache line of the slot's first word, so
// one line brings it. Behind that line is room for a small piece: one of up to 8 KiB that goes to a
// root or comes from it. In a scatter it has the blocks of all ranks. A rank that only sends such pieces
// can be 14 calls ahead of the others. Then it waits until they are 8 behind.
//
// A rank publishes piece p+1 before it takes piece p, so that no rank runs out of
// work. Pieces fit in the CPU cache. Only the ranks' buffers go through memory.
//
// In a small all-reduce, every rank reduces the one piece by itself. In a large one,
// each rank reduces a share of every piece. It reads the other ranks' slots, writes
// the result to rank 0's slot, and publishes it with a second word. Then all ranks
// copy the piece out. A rank does not stage its own share, so it copies twice the
// length of the buffer, for any number of ranks.
//
// Blocks of different sizes ([Group.AllToAllV]) begin with a piece that holds their
// lengths, and the blocks that fit in beside them.
//
// # A single copy
//
// Where that is faster, a large AllGather, AllToAllV or Scatter copies other memory once. [Group.ReadLimits] has the sizes. Join finds out whether every rank can read the memory of
// every other rank, with process_vm_readv(2). Each rank publishes its process number and the address of a random
// mark, and reads the marks of the others. A wrong mark shows that the number belongs to another process, in another
// pid namespace. An error shows that Yama, seccomp or another user forbids it. If one rank cannot read the others, all
// ranks stage. [Group.WhyStaged] names the rank. The package does nothing to get the permission.
//
// On AMD's processors two copies are faster (package copies). If all ranks find that, they stage. They also
// stage if they share CPUs.
//
// Such a collective takes two pieces. In the first, ranks expose their buffers: they publish the address and length
// beside the usual header. The other ranks read from there into their own buffers, each beginning with the next
// rank. In the second piece they say that they are done, and the exposing ranks wait for that.
//
// Ranks read other ranks' memory and never write to it. So a rank that gives up can
// use its buffer again at once, after it has told the others. A reader looks for that
// after each read of at most 1 MiB, and then discards what it has read. Each read also
// fetches the mark, in the same system call. So a reader notices if the process has
// died and its number belongs to another one.
//
// The kernel cannot read some device memory. The owner of a buffer tries both ends first, and if that fails all
// ranks stage the call.
//
// # Memory of Alloc
//
// Behind the segments, the file has an arena for each rank: address space whose pages
// become memory when they are used. Join maps the rank's own arena for writing and the
// others' for reading only, so no error here can write to another rank's data. An
// arena is as large as the host's memory, and those of a group take 512 GiB of addresses
// at most. A rank with limits on addresses or files (ulimit -v, -f) has no arenas,
// because they would hit the limit later. If one rank has none, all have none, and
// [Group.WhyNoArenas] names it. Core dumps leave arenas out.
//
// [Group.Alloc] returns memory in the rank's arena. Other ranks copy or reduce such a
// buffer straight from their mapping, without a system call or staging. The rules for
// exposed buffers hold. In one call some buffers may be from Alloc and others not. If those
// cannot be read as above, all ranks stage the call. Alloc is a collective because of the limits: after
// the first call, all ranks use [Group.MappedLimits]. A group without such memory is not affected.
// The reduced shares of an all-reduce lie in the users' buffers, those of a reduce in the slots.
//
// An all-reduce runs in sections. A rank reduces its share of a section in its own buffer, from
// all ranks' buffers in one pass if the operator has Join. Then it copies the other shares of the
// section before. No barrier lies between: each rank publishes each section.
//
// A rank that gives up, closes or dies does not harm the others. A reader's mapping stays until
// it closes the group, which waits for its operation. The file cannot shrink, and freed pages
// read as zeros, so a read never faults. An owner that gives up may change memory that others
// read, but it tells them first. A reader looks for that after each stretch, and returns an
// error. Only the owner ever writes to an arena, so its buffers are its own again when a call
// returns. If a rank dies, its last data stay. Something else has to notice the death.
//
// The garbage collector does not know this memory. Only [Group.Free] gives it back, and
// its pages go back to the system at once. After Close, this rank's arena stays mapped
// until the last allocation is freed, so data outlive their group.
//
// # Memory order
//
// Words that ranks wait for are read and written with sync/atomic only, which is
// sequentially consistent. So a rank that reads p+1 in a slot's word sees all earlier
// writes of the owner. The data are plain memory. The owner writes them before it
// publishes, and the others read them afterwards. The owner writes a slot again only
// after it has seen words that all readers stored after reading. The race detector does
// not see through two mappings of one file. So this rests on the argument, and on tests
// that compare every byte.
//
// # Messages
//
// A [Mesh] is a transport.Mesh over a group and another mesh of the same ranks. The
// other mesh notices dead peers and carries faults.
//
//	m, err := shm.NewMesh(g, rest, shm.MeshOptions{})
//
// A ring buffer of frames leads from each rank to each other. It takes memory once it is
// used. The first frame of a message has its slot, its length and up to 8 KiB of data.
// The rest follows at once if the message is at most 64 KiB and fits. Otherwise it
// follows in pieces when the receiver has asked for it, and the receiver takes out one
// piece while the sender writes the next. So a small send ends at once, and a large one
// when its last piece is in the ring. From Limits.Message on, the first frame has the
// message's address, or its place in the sender's arena, and no data. The receiver reads
// the message there and says so. If it cannot, it asks for the rest.
//
// If the receiver's CPU is far, the sender writes frames past the caches, because the lines of the ring
// would come slowly from there. It times a frame now and then to find out.
//
// The receiver takes frames in their order. A message matches the oldest receive from that rank
// for its slot, else the oldest one from any rank. Up to 1 MiB of unexpected messages from each
// rank are kept. Then that rank is told to announce messages without data. A rank reads
// only the rings of ranks that it has requests with. Other frames stay in the ring, and
// when the ring is full, at the sender.
//
// A goroutine that waits in [Mesh.PollUntil] does all this work, one goroutine at a time.
// Otherwise a goroutine of the mesh does it, which sleeps while no request is under way.
// A rank in a collective does not move messages. The mesh's goroutine does that.
//
// # Results
//
// One rank reduces an element, in the order of the ranks: ((b0 op b1) op b2) ... with
// rank 0's value as the first operand. So all ranks get the same bits. They depend
// neither on timing, nor on the size, nor on the collective.
//
// # Waiting
//
// A waiting rank
//
//   - polls ten times, and for 5 us if each rank can have a CPU;
//   - then yields to other goroutines and threads for 200 us, and polls in between;
//   - then sleeps on a futex in the shared memory.
//
// A rank that publishes makes a system call only if another rank sleeps. Join counts the
// CPUs that the ranks may use together, and the quotas of their control groups. If there
// are enough, and two waiting ranks are on one CPU, one of them moves to a free CPU,
// because the kernel would leave both there.
//
// # Ending
//
// [Group.Abort] sets a word in every segment and wakes sleeping ranks. All operations then
// end on all ranks, and the group with them, because nobody knows how far each rank had
// come. The group also ends when the function stop of a waiting call returns an error,
// when ranks disagree, or when a rank that is needed has died or closed it. Sleeping ranks
// look for the end every few milliseconds.
//
// This package does not notice that a rank has died. Something else does, on every living
// rank, and calls [Group.Died]. What the dead rank has published stays, and a collective
// that it has done its part of succeeds. One that waits for it ends, and so does one that it
// has not called.
//
// A rank that cannot read the memory of another one any more ends the group with
// [ErrUnreadable]. Most likely the other rank has died.
//
// Ranks trust each other. A rank that writes wrong data into the memory makes the results
// of others wrong, but cannot make them read or write outside their buffers.
//
// # Other systems
//
// On other systems than Linux NewEndpoint returns an error that wraps
// errors.ErrUnsupported.
package shm
