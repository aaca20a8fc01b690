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
// The published value changed with PyTorch 2.1, and the two forms do not mix:
//
//	G1  up to PyTorch 2.0. Under rank_<r> the host name, under <r> one address of
//	    136 bytes for each other rank: every pair has a listener of its own, and
//	    connections begin with the first message.
//	G2  since PyTorch 2.1. Under <r> the host name, one address, and for each
//	    rank the number that it says when it connects. One listener serves all;
//	    a connection begins with those 8 bytes.
//
// The store's dialect tells the form, where it has one. A file, Redis or memory has none.
// There, ranks of this library first set rank_<r>, as G1 ranks do, and auto_<r>. Then each
// waits until a rank has published an address, and uses that form. If all ranks have set
// auto_<r>, they use G2. So a group of Go ranks uses G2, and a group with PyTorch ranks
// uses theirs, in any order of arrival.
//
// Since PyTorch 2.7 ranks may connect late, when they first need a peer, and then publish
// no numbers. A rank of this library with the greater address connects to them at once.
// With the lesser address it lets them come later. Both sides say their rank instead of a
// number.
//
// The numbers that a rank of this library publishes are random. A connection that says
// one comes from a process that can read the store.
//
// Ranks that have another wire publish a record of it under native_<r>, before their
// address. So a rank that has all addresses knows which ranks have one, and all ranks come
// to the same decision ([Native]). A rank that takes only the other wire does not listen,
// and publishes 0.0.0.0:0 as its address.
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
// "published its address and does not answer". Without Config.Meeting it leaves out ranks that
// probably wait for others.
//
// # Strangers
//
// A connection that says the number published for a rank is that rank. A connection that
// says anything else is closed at once. A silent one is closed after 10 s, or earlier if
// there are more than 1024. None of them costs the group anything.
//
// Two kinds of ranks have no proof of who they are: G1 ranks, which say nothing, and ranks
// that say their rank. All connections that may be such a rank get the announcements meant
// for it, which are messages without payload. The connection from which a valid message of
// Gloo comes first is the rank, and the others are closed. So strangers that are silent, or
// send something else, cost the group nothing. At most 16 connections are kept for a rank,
// preferably those from the host where the rank listens.
//
// Gloo's wire cannot tell such a rank from a stranger that speaks Gloo. Nor can it tell a
// rank that died before it sent anything: that counts as dead 5 s after all ranks have met.
// It encrypts nothing. Use the native wire with TLS, or a network that keeps strangers out.
package rendezvous
