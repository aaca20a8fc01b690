// Package tcp carries messages between ranks of this library over TCP: a
// transport.Mesh for groups that need not speak Gloo's protocol.
//
// # A group
//
// Every rank listens and tells the others its address, by whatever means it
// has; then all call Join with all addresses:
//
//	e, err := tcp.Listen(tcp.Options{})
//	... // publish e.Addr(), collect those of the other ranks
//	m, err := e.Join(ctx, rank, addrs)
//	if err != nil {
//		... // a *JoinError says which ranks are missing and why
//	}
//	defer m.Close()
//
// An address is a version, every place at which the rank can be reached, and a
// secret. A connection begins with a hello of 96 bytes that holds the secret of
// who listens, and an answer that holds the secret of who has connected. So a
// stranger, a rank of another group and another host with the same private
// address are found out before anything is kept for them; handshakes are bounded
// in number and time. Over plain TCP whoever sees the traffic sees the secrets:
// with Options.TLS all of it is TLS 1.3, and both sides need a certificate.
//
// # Messages
//
// Everything between two ranks is a sequence of frames with a header of 72 bytes. A
// message goes one of two ways, by its size:
//
//	up to Options.Eager   EAGER with the message behind it, at once
//	above                 the receiver says GRANT when the receive is posted;
//	                      the sender says START and then DATA, in pieces
//
// So a large message is read from the socket into the buffer that waits for it
// and nowhere else. If the sender comes first, it says OFFER and is granted when
// the receive is posted, as is a send to a receive from any rank. EAGER, OFFER and
// START are what meets receives, by slot and in their order; they travel on the first
// connection. DATA names its place in the message and may come on any.
//
// The rules are those of a pure state machine, type stream, which knows no
// sockets. Both of its sides, receives that meet messages and sends that meet grants,
// are a callback.Match.
//
// # Agreement
//
// Slots of collectives have the operation's number in them. With Enter a rank tells the mesh
// what it calls under a number, in words that have to be the same on all ranks:
//
//	m.Enter(number, call, op, seq) // call is a transport.Call
//
// The messages of the operation carry the call: its words, those of the call before, and a digest of
// all calls up to it. The mesh compares it with the first call that it knows of for
// that number, its own or another's. Ranks that disagree find out with the first message between
// them. The ABORT then shows both calls to every rank. A message is compared before a
// receive can take it. So an operation that needs something of every rank, directly or by way of
// others, does not succeed if a call of any rank differs, up to this one.
//
// Two ranks that wait for each other send nothing: a rank that has waited for 20 ms says CALL
// (Announce). A rank that has only sent asks all others with CALL before it closes (Settle). They
// answer once they have called as much. Numbers are remembered for the latest 256 operations.
//
// # Back-pressure
//
// What a rank has to store because it came unasked for is bounded: each peer
// may have Options.Window bytes of EAGER messages out that no receive has taken, counting
// 128 bytes more for each. What has been taken is given back with the next frame,
// or with a CREDIT once it is a quarter of the window. A sender without credit says OFFER
// instead, and sends when it is asked to: a slow receiver costs its peers
// nothing but waiting, and nothing is lost. A peer that does not keep to this is at
// fault, before anything is allocated for it.
//
// # Connections
//
// Each pair has a first connection. Large messages to other hosts get more,
// opened on the first one, each carrying DATA one way; they take pieces of
// 1 MiB from one queue as they get rid of them, so a slow connection carries less.
// If they cannot be opened the first connection does it all.
//
// Who posts a request writes what it makes necessary, as far as the socket takes it
// without waiting, and leaves the rest to the connection's goroutine. What several requests
// make necessary leaves together if they are posted together (Mesh.Post), and who is
// about to offer a message looks first whether its GRANT has come: of two ranks that trade
// large messages, one says GRANT and OFFER, and the other answers with GRANT, START and the
// whole message in one system call. A message
// to a waiting receive thus costs one system call here, one wake-up of the reader
// there and one of the goroutine that waits for the request. In the steady state
// a message allocates nothing.
//
// # Who waits polls
//
// Waking a goroutine takes several times as long as a small message. So who waits for a
// request may lend its goroutine meanwhile:
//
//	m.Recv(r)
//	m.Help(w) // w.Finished() is len(r.Done()) > 0
//	<-r.Done()
//
// Help reads the first connections of the ranks from which something is to come, without
// waiting, until w has finished or 100 us are over (Options.Poll); then the connections'
// goroutines take over. While somebody helps, and for some milliseconds after, what comes
// wakes no goroutine and no thread of the runtime's poller either, because these sockets
// are not its own: each has an epoll instance, which is told to look away. Whatever
// comes from a rank that nobody expects anything from, a PING or a goodbye, is noticed
// then at the latest; Mesh.See makes it at once. Who has polled in vain leaves it for
// some times: on a host that is busy with something else it would do harm.
//
// Where ranks share CPUs, who polls offers its own to the other processes after each look.
//
// That is for plain connections on Linux. Otherwise Help does nothing.
//
// # The end
//
// BYE is the last frame of a rank that closes, ABORT that of one whose mesh
// failed, with up to 512 bytes of why, for people. The end of a first connection without either is the death of the peer. The
// end of another connection is not, for a moment: the first one will tell why. A host
// that vanishes is noticed by TCP's own means, after Options.Silence.
package tcp
