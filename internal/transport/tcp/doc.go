// Package tcp carries messages between ranks of this library over TCP: a
// transport.Mesh for groups that need not speak Gloo's protocol.
//
// # A group
//
// Every rank listens and tells the others its address, by whatever means it
// has. Then all call Join with all addresses:
//
//	e, err := tcp.Listen(tcp.Options{})
//	... // publish e.Addr(), collect those of the other ranks
//	m, err := e.Join(ctx, rank, addrs)
//	if err != nil {
//		... // a *JoinError says which ranks are missing and why
//	}
//	defer m.Close()
//
// An address holds a version, all places where the rank can be reached, and a
// secret. A connection begins with a hello of 96 bytes, which contains the
// secret of the listening rank, and an answer with the secret of the connecting
// rank. So a stranger, a rank of another group, and another host with the same
// private address are rejected before any memory is spent on them. The number
// and duration of handshakes are bounded. Plain TCP shows the secrets to anyone
// who sees the traffic. With Options.TLS all traffic is TLS 1.3, and both sides
// need a certificate.
//
// # Messages
//
// Two ranks exchange frames with a header of 80 bytes. A message goes one of two
// ways, by its size:
//
//	up to Options.Eager   EAGER with the message behind it, at once
//	above                 the receiver says GRANT when the receive is posted;
//	                      the sender says START and then DATA, in pieces
//
// So a large message is read from the socket straight into its buffer. If the
// sender comes first, it says OFFER, and the receiver answers GRANT when the
// receive is posted. A receive from any rank is answered the same way. EAGER,
// OFFER and START match receives, by slot and in their order, and travel on the
// first connection. DATA names its place in the message and may travel on any.
//
// These rules are a state machine without sockets, the type stream. It matches
// receives with messages, and sends with grants, in a callback.Match each.
//
// # Changed bytes
//
// TCP has a checksum of 16 bits, and hosts and switches lose it on the way. So every
// header has a CRC-32C, and with Options.Checksum every message has one too. The sender
// computes it right before it writes, and the receiver after each read, while the bytes
// are in the cache. A header is compared before anything in it is used, and a message
// before its request completes. If a checksum does not fit, the mesh fails with
// FaultCorrupted, which names both ends of the link. TLS protects messages by itself.
//
// Header checksums cost 20 ns a frame. Those of messages cost a pass over the bytes
// on each side, at about 20 GB/s.
//
// # Agreement
//
// The slot of a collective contains the operation's number. Enter tells the mesh
// what this rank calls under a number. All ranks must call the same:
//
//	m.Enter(number, call, op, seq) // call is a transport.Call
//
// Messages of the operation carry the call: its properties, those of the call
// before, and a digest of all calls so far. The mesh compares it with the first
// call that it knows for that number, its own or another rank's, before a receive
// takes the message. So ranks that disagree find out with the first message
// between them, and the ABORT shows both calls to every rank. An operation that
// needs data of every rank succeeds only if all ranks made the same calls.
//
// Two ranks that wait for each other send no message. So a rank that has waited
// for 20 ms sends a CALL frame (Announce). A rank that has only sent data asks all
// others with CALL before it closes (CompareCalls). They answer once they have made as
// many calls. A mesh remembers the latest 256 operations.
//
// # Back-pressure
//
// Unexpected messages take a bounded amount of memory: each peer may send
// Options.Window bytes of EAGER messages before receives take them. A message
// counts 128 bytes more than its length. Credit goes back with the next frame, or
// with a CREDIT frame once a quarter of the window is due. A sender without credit
// says OFFER instead and waits for the GRANT. So a slow receiver delays its peers
// and loses nothing. A peer that exceeds the window fails the mesh.
//
// # Connections
//
// Each pair has a first connection. For large messages to another host, a rank
// opens more, and each carries DATA one way. Within a host it opens one, if there
// are 8 CPUs for each rank: the first connection of a pair carries both ways. They
// take pieces of 1 MiB from one queue, so a slow connection carries less. Within a
// host, a message of less than 1 MiB stays on the first connection if no other large
// one is on its way. If they cannot be opened, the first connection carries
// everything.
//
// A goroutine that posts a request also writes the frames that result, as far as the socket takes
// them without waiting. The connection's own goroutine writes the rest. Requests that are posted
// together (Mesh.Post) leave together. Before a rank offers a message, it looks whether the GRANT
// has come. Two ranks may exchange large messages. Then one sends GRANT and OFFER, and the other
// answers with GRANT, START and the whole message in one system call. A message to a waiting
// receive costs one system call at the sender. At the receiver it wakes the reader, and the
// goroutine that waits for the request. In the steady state a message allocates nothing.
//
// # Polling
//
// To wake a goroutine takes several times as long as a small message. So a
// goroutine that waits for a request can poll meanwhile:
//
//	m.Recv(r)
//	m.PollUntil(w) // w.Finished() is len(r.Done()) > 0
//	<-r.Done()
//
// PollUntil reads the first connections of the ranks that have to send something. It
// returns when w has finished, or after 100 us (Options.Poll). While some goroutine
// polls, and for a few milliseconds after, arriving data wake neither a reader
// goroutine nor a thread of the Go runtime. The runtime does not watch these
// sockets. They share two epoll instances of the mesh, for reading and for writing. The
// one for reading is told to ignore a socket. So a peer costs one descriptor. A PING or
// BYE from a rank that has nothing to send is therefore noticed late, unless Mesh.ResumeReaders
// is called. Where ranks share CPUs, a polling rank yields its CPU after each look.
//
// Polling needs Linux and plain TCP. Otherwise PollUntil does nothing.
//
// # The end
//
// BYE is the last frame of a rank that closes. ABORT is the last frame of a rank
// whose mesh failed, with up to 512 bytes of text. If the first connection ends
// without either, the peer is dead. If another connection ends, the first one has
// a few seconds to tell why. TCP itself detects a host that vanishes, after
// Options.Silence.
package tcp
