// Package rendezvous connects the ranks of a Gloo group with each other, the
// way Gloo does it over a c10d store, so that PyTorch ranks can be among them.
//
//	mesh, err := rendezvous.Connect(ctx, rendezvous.Config{
//		Store: store.Prefix("0", st), // below it are the group's own keys
//		Rank:  rank,
//		Size:  size,
//	})
//
// # How ranks meet
//
// Every rank listens, publishes where, reads where the others listen, and for
// each pair the two compare their addresses: the greater one connects, the
// other accepts. Address bytes count first, then ports, which Gloo compares in
// the byte order of the network read as little-endian.
//
// What is published changed with PyTorch 2.1, and the two forms do not mix:
//
//	G1  up to PyTorch 2.0. Under rank_<r> the host name, under <r> one address of
//	    136 bytes for each other rank: every pair has a listener of its own, and
//	    connections begin with the first message.
//	G2  since PyTorch 2.1. Under <r> the host name, one address, and for each
//	    rank the number that it says when it connects. One listener serves all;
//	    a connection begins with those 8 bytes.
//
// Which one to use is told by the store's dialect where it has one. Where it
// has none (a file, redis, memory), ranks of this library first show
// themselves, under rank_<r> as G1 ranks do and under auto_<r>; then each waits
// until any rank has published an address, and uses that form, or until all
// have shown themselves, and uses G2. So a group of Go ranks settles on G2, and
// one with PyTorch ranks in it on theirs, whoever comes first.
//
// Since PyTorch 2.7 ranks may connect late, when they first need a peer, and
// publish no numbers then. A rank of this library connects to them at once
// where that is its part, lets them come later where it is theirs, and both
// sides say their rank in place of a number.
//
// The numbers that a rank of this library publishes are random: who says one has
// read it in the store.
//
// Ranks that have another wire, too, publish a record of it, under native_<r>,
// before their address. So whoever has all addresses knows which ranks have one,
// and all come to the same decision ([Native]). A rank that takes only the other wire
// does not listen, and publishes 0.0.0.0:0 as its address.
//
// # When ranks do not come
//
// Connect returns when all are connected, when its context or timeout ends, or
// when something makes success impossible: a peer's address is refused, is no
// address, or is of the other form; a connected rank dies or reports a fault.
// Its [Error] lists the ranks that are missing and what each of them did last.
// Ranks that are connected already are told, so that they fail now and not at
// their own deadlines.
//
// # Strangers
//
// A connection that says the number published for a rank is that rank. A connection
// that says anything else is closed at once. A silent one is closed after 10 s, or
// earlier if there are more than 1024. None of them costs the group anything.
//
// Two kinds of ranks have nothing to prove who they are: G1 ranks, which say nothing,
// and those that say their rank. All connections that may be such a rank get the
// announcements meant for it, which are messages without payload. The connection from
// which a valid message of Gloo comes first is the rank, and the others are closed. So
// strangers who are silent, or send something else, cost the group nothing; at most
// 16 are kept a rank, and those from where the rank listens stay longest.
//
// Gloo's wire cannot tell such a rank from a stranger who speaks Gloo. Nor can it tell
// a rank that died before it sent anything: that counts as dead 5 s after all ranks have
// met. It encrypts nothing. Use the native wire with TLS, or a network that keeps
// strangers out.
package rendezvous
