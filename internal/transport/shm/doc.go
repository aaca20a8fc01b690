// Package shm does the collectives of ranks on one host, and carries their messages,
// through memory that they share: no socket, no kernel, and one copy into the memory
// and one out of it. Large data it reads straight out of the other process, with a single
// copy, where the kernel allows that.
//
// # A group
//
// Every rank makes an [Endpoint] and tells the others its address, by whatever
// means it has; then all call [Endpoint.Join] with all addresses:
//
//	e, err := shm.NewEndpoint()
//	... // publish e.Addr(), collect those of the other ranks
//	g, err := e.Join(ctx, rank, addrs, shm.Options{})
//	if err != nil {
//		... // why these ranks cannot share memory: use sockets
//	}
//	defer g.Close()
//	err = g.AllReduce(buf, 4, combine, stop)
//
// The ranks of a group that spans several hosts make one group a host, in which
// they are numbered anew.
//
// # The memory
//
// Rank 0 makes one anonymous file (memfd_create), seals its size, so that nobody
// can pull it from under the others, and hands it over a socket in the abstract
// namespace to those who know the group's secret. So there is no limit of /dev/shm
// to run into, joining takes one connection a rank, and nothing is left when the
// processes are gone, however they went. A group holds a mapping and no descriptor.
//
// Being on one host is not enough, for containers and virtual machines lie. Ranks
// whose boot or network namespace differs find that out from the addresses alone, all
// of them at once. Otherwise rank 0 writes a random number, which the others
// have to find; each writes a word of its own, and Join succeeds once every rank has
// seen all of them.
//
// Each rank has a segment: four slots for pieces of its data, and the words that
// others wait for, one writer each and on lines of their own.
//
// # The protocol
//
// A collective is a sequence of pieces, numbered through the life of the group;
// number p goes to slot p modulo 4. For each, a rank
//
//   - waits until nobody needs what the slot holds, which it nearly always knows
//     already: a rank that has published piece p has done with those before p-1;
//   - copies its data into the slot, and with it what call they belong to;
//   - publishes: it stores p+1 in the slot's first word;
//   - waits for the words of those whose data it needs, and takes the data.
//
// With the data come the collective, its size and root, and a digest of all operations that the
// rank has called ([Group.Enter], [Group.Begin]). Another rank compares them before it takes the
// data. A rank that only sends compares it two pieces later, when it looks
// whether a slot is free. Each rank also shows its latest 64 operations in a list. The others look
// into it to say how the ranks disagree, while they wait for long, and before they close
// ([Group.Settle]).
//
// It publishes piece p+1 before it takes piece p, so that the others have
// something to do while it is busy. Pieces are small enough to stay in cache:
// what goes to memory is the buffers of the ranks, once in and once out.
//
// Small all-reduces are one piece that every rank reduces by itself. In large
// ones each rank reduces a share of every piece, straight out of the slots of the
// others, into the slot of rank 0, and publishes that with a second word; then all
// copy the piece out. A rank does not stage its own share, so it copies twice as many
// bytes as the buffer has, whatever the number of ranks.
//
// Blocks of different sizes ([Group.AllToAllV]) begin with a piece that has their
// lengths, and those blocks that fit in beside them.
//
// # A single copy
//
// The second copy is what large data pay for. So Join finds out whether every rank can read
// the memory of every other, with process_vm_readv(2): each publishes its process number
// and the address of a random mark, and reads the marks of the others. A number that
// means another process, in another pid namespace, is found out by the mark; Yama,
// seccomp and other users by the error. One rank that cannot, or was told not to
// ([Options].Staged), is enough for all to stage; [Group.WhyStaged] says which. Nothing is
// done to get the permission.
//
// A collective from a certain size on ([Group.Limits]) then takes two pieces. With the first,
// ranks lend: they publish where their buffer is and how long, beside the same
// header as always. The others read, each beginning with the next rank, into their own
// buffers. With the second piece they say that they are done, and those who lent wait for
// that. In a reduction a rank reads the others' operands of its share into a scratch
// buffer that stays in cache; the shares of an all-reduce come about in the users' buffers
// and are read there, those of a reduce in the slots.
//
// Ranks read from others and never write to them. So a rank that gives up can take its
// memory back at once: it only has to tell the others first. A reader looks for that after each
// read, of 1 MiB at most, and then does not trust what it has read. With the data it
// always reads the mark, in the same call, which shows that it read from the process that
// it meant, should that have died.
//
// Ranks of one process copy without the system call. There, memory that has been taken back
// might not be mapped any more, so each says from whom it copies at the moment, and who gives
// up waits for that. Memory that the kernel does not read for others (of some devices) is
// not lent: its owner tries both ends first, and then all ranks stage this call.
//
// # Memory of Alloc
//
// The file has, behind all that, an arena for each rank: address space, which becomes memory
// page by page as it is used. Every rank maps all of them in Join, its own to be written and the
// others' only to be read, so that no mistake here can write to another rank's. An
// arena is as large as the host's memory; those of a group together have 512 GiB of
// addresses at most. A rank whose addresses or files are limited (ulimit -v, -f) takes
// none, for the limit would strike elsewhere later. One rank without them is enough for all to have
// none; [Group.WhyNoArenas] says which. They are left out of core dumps, which would fill them.
//
// [Group.Alloc] returns memory there. In a collective a rank whose buffer lies in its arena
// lends the place in the arena instead of the address: the others copy or reduce from
// their mapping of it, without a system call, a scratch buffer or staging. All rules of lending hold, and
// any rank may lend any memory: what is in no arena is read with process_vm_readv from the
// same sizes on as ever, and if that may not be, or is too small for it, all ranks stage that
// call. Alloc is a collective because of the limits ([Group.MappedLimits]): before the first one
// no rank lends below those of a single copy, after it all do. So a group without memory
// of Alloc does what it always did. Options.Staged is about the memory of processes; what
// ranks have put where all see it is lent all the same, and so it is where reading is forbidden.
//
// A large all-reduce goes by sections, of which each rank reduces a share in its own buffer, straight
// out of the others', and takes the others' shares of the section before.
//
// No rank can harm another by giving up, closing or dying. What a reader has mapped stays
// mapped until it closes the group itself, which waits for its operation; the file
// cannot shrink, and memory that its owner has given back to the system reads as
// zeros. So a read never faults, whatever the owner does. What is read may be anything once
// the owner has given up, for it uses its memory again at once: but it has said so before, and a
// reader looks for that after each stretch, as it does when it reads a process, and ends
// with an error, after which its buffers do not count. Nobody ever writes to an arena
// but its rank, so what a rank has there is its own again as soon as its call returns. If a rank dies,
// its last data stay; somebody else has to notice, as always.
//
// A slice of this memory keeps nothing alive, for the garbage collector does not know it. So it
// goes back only with [Group.Free]: then its pages go back to the system at once. This rank's
// arena stays mapped when the group is closed, until the last allocation is freed, so that
// data survive their group.
//
// # Memory order
//
// Words that ranks wait for are written and read with sync/atomic only, which
// is sequentially consistent: whoever reads p+1 in a slot's word sees all that its
// owner wrote before. The data are plain memory, written by one rank before it
// publishes and read by others after; a slot is written again only after words of all
// readers, which they stored after reading. The race detector does not see through
// two mappings of one memory, so this rests on the argument and on tests that
// look at every byte.
//
// # Messages
//
// A [Mesh] is a transport.Mesh over a group and another mesh of the same ranks, to
// which it leaves what memory cannot do: to notice a death, and to carry a reason.
//
//	m, err := shm.NewMesh(g, rest, shm.MeshOptions{})
//
// From each rank to each other goes a ring of frames, which exists once it has been
// used. A message begins with a frame that has its slot, its length and up to 8 KiB of
// it. The rest follows at once if the message is not longer than 64 KiB and there is
// room, else when the receiver has asked for it; in pieces that the receiver takes
// out while the sender puts in the next. So a small send ends at once, and a large one
// when its end is in the ring. From Limits.Message on the first frame has the message's address,
// or its place in the sender's arena, instead, and the receiver reads it there and says so. If it cannot, it asks for
// the rest as if nothing had been.
//
// Frames are taken in their order and matched by the receiver, the first message
// with the receive that was posted first, among those from that rank and those from
// any. What nobody expects is kept aside, up to 1 MiB from each rank; then that rank is
// told to announce messages without their contents, and to keep those. Only rings
// of ranks are looked at with which something is under way: what else is sent stays
// there, and when a ring is full, with the sender.
//
// All that is done by whoever calls [Mesh.Help] because he waits, one goroutine at a
// time, or by a goroutine of the mesh that sleeps while nothing is under way. A
// rank in a collective does not look after messages; that goroutine does.
//
// # Results
//
// An element is reduced by one rank, in the order of the ranks, beginning with
// rank 0's as the local operand: ((b0 op b1) op b2) ... So all ranks get the same
// bits, and they depend neither on timing, nor on the size, nor on which
// collective it was.
//
// # Waiting
//
// A waiting rank polls ten times; if each rank can have a CPU of its own, for
// 5 us; then it gives way to others for 200 us, goroutines and threads, looking in
// between; then it sleeps on a futex in the shared memory. Who publishes makes a
// system call only if somebody sleeps. Whether there are CPUs enough is found out in
// Join, from the CPUs that the ranks may use, taken together, and the quotas of
// their control groups. Where there are, a rank that waits for another on the CPU it
// has itself moves to one that no rank was seen on: the kernel would leave both.
//
// # Ending
//
// Nothing here notices that a rank has died: somebody else does, and calls
// [Group.Abort], on any rank that lives. That sets a word in every segment and
// wakes those who sleep. All operations end, on all ranks, and so does the group: there is
// no telling how far each rank had come. The same happens when the function stop
// of a waiting call returns an error, when ranks turn out to disagree, and when one has
// closed the group that is still needed. No wait lasts longer than that: sleeping
// ranks look around every few milliseconds.
//
// A rank that cannot read the memory of another one any more ends the group with
// [ErrUnreadable]; most likely the other one has died.
//
// Ranks trust each other: one that writes nonsense into the memory makes nonsense of
// the results of others, though it cannot make them read or write outside their
// buffers.
//
// # Elsewhere
//
// On other systems than Linux NewEndpoint returns an error that wraps
// errors.ErrUnsupported, and so there are no groups.
package shm
