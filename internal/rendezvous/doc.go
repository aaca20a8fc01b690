// Package rendezvous connects the ranks of a Gloo group with each other, as Gloo does
// it over a c10d store, so that PyTorch ranks can be among them.
//
//	mesh, err := rendezvous.Connect(ctx, rendezvous.Config{
//		Store: store.Prefix("0", st), // below it are the group's own keys
//		Rank:  rank,
//		Size:  size,
//	})
//
// # How ranks meet
//
// Every rank listens, publishes its address, and reads the addresses of the others. Two
// ranks compare their addresses: the greater one connects, the other accepts. Address
// bytes count first, then ports, which Gloo compares in network byte order read as
// little-endian. A rank reads up to 64 addresses in one call of the store, if all of them
// are there, and else the next one.
//
// Under <r> a rank publishes its host name, one address, and for each rank the number that it says when
// it connects. One listener serves all; a connection begins with those 8 bytes.
//
// PyTorch up to 2.0 has another form, which the store tells ([store.IsTorch1]): under rank_<r> the host
// name, and under <r> one address of 136 bytes for each other rank. Every pair has a listener of its own,
// and connections begin with the first message. The two forms do not mix.
//
// Since PyTorch 2.7 ranks may connect late, when they first need a peer, and then publish
// no numbers. A rank of this library with the greater address connects to them at once.
// With the lesser address it lets them come later. Both sides say their rank instead of a
// number.
//
// PyTorch's keys, with the address of rank 1 as an example:
//
//   - default group: default_pg/0//cpu//0/1. Up to 2.0 it is default_pg/0/0/1, and the host name is in
//     default_pg/0/0/rank_1
//   - first sub-group: default_pg/0//1//cpu//0/1. Up to 2.0 it is default_pg/1/0/1
//   - after the group is made: nothing. Up to 2.0 they are default_pg/store_based_barrier_key:1 and
//     default_pg/0/SEQ_NUM_STORE_KEY
//
// The numbers that a rank of this library publishes are random. A connection that says
// one comes from a process that can read the store.
//
// Ranks that have another wire publish a record of it under native_<r>, before their
// address. So a rank that has all addresses knows which ranks have one, and all ranks come
// to the same decision ([Native]). A rank that takes only the other wire does not listen,
// and publishes 0.0.0.0:0 as its address. If all ranks are of this library (Config.Meeting), each publishes a record, which may
// be empty. They read these first, and listen for Gloo's wire only if one has none.
//
// # When ranks do not come
//
// Connect returns when all ranks are connected, or when its context or timeout ends. It
// fails early when an address is invalid, refuses connections or has the other form, and
// when a connected rank dies or reports a fault. Its [Error] lists the missing ranks and
// what each did last. The connected ranks are told, so that they fail now and not at their
// own deadlines.
//
// A rank whose time runs out lacks ranks that may themselves wait for others. Config.Meeting asks
// all ranks. The Error then lists only ranks that did not answer: "published no address", or
// "published its address and does not answer". Of ranks that do answer it
// says that they do not reach each other ([Error.Unconnected]). Without Config.Meeting it leaves out ranks that
// probably wait for others.
//
// # Strangers
//
// A connection that says the number published for a rank is that rank. A connection that
// says anything else is closed at once. A silent one is closed after 10 s, or earlier if
// there are more than 1024. None of them costs the group anything.
//
// Two kinds of ranks have no proof: ranks of PyTorch up to 2.0, which say nothing, and those that say their rank. The
// first connection that may be such a rank is taken for it, as in PyTorch. So a stranger that comes before the rank, and
// knows its port or number, keeps the group from being made. Gloo's wire could not tell the two apart later either.
// It encrypts nothing. Use the native wire with TLS, or a network that keeps strangers out.
package rendezvous
