// Package shm does the collectives of ranks on one host through memory that they
// share: no socket, no kernel, and one copy into the memory and one out of it.
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
//   - copies its data into the slot, and with it what call they belong to, by which a
//     rank that calls something else is found out;
//   - publishes: it stores p+1 in the slot's first word;
//   - waits for the words of those whose data it needs, and takes the data.
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
// # Results
//
// An element is reduced by one rank, in the order of the ranks, beginning with
// rank 0's as the local operand: ((b0 op b1) op b2) ... So all ranks get the same
// bits, and they depend neither on timing, nor on the size, nor on which
// collective it was.
//
// # Waiting
//
// A waiting rank polls a hundred times; if each rank can have a CPU of its own, for
// 5 us; then it gives way to others for 200 us, goroutines and threads, looking in
// between; then it sleeps on a futex in the shared memory. Who publishes makes a
// system call only if somebody sleeps. Whether there are CPUs enough is found out in
// Join, from the CPUs that the ranks may use, taken together, and the quotas of
// their control groups.
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
// Ranks trust each other: one that writes nonsense into the memory makes nonsense of
// the results of others, though it cannot make them read or write outside their
// buffers.
//
// # Elsewhere
//
// On other systems than Linux NewEndpoint returns an error that wraps
// errors.ErrUnsupported, and so there are no groups.
package shm
