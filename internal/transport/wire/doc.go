// Package wire is Gloo's TCP pair protocol as a transport.Mesh: the transport that
// reaches PyTorch ranks.
//
// # The protocol
//
// Two ranks share one connection. Every message is a header of 48 bytes, six
// little-endian 64-bit numbers, and for DATA the payload:
//
//	nbytes   48 + payload
//	opcode   1 DATA, 2 SEND_READY, 3 RECV_READY
//	slot     the channel
//	offset   0
//	length   of the payload, or of the message that is announced
//	roffset  0
//
// A posted send transmits SEND_READY, and a posted receive RECV_READY. DATA is sent only
// after a RECV_READY for its slot has come. SEND_READY is for receives from any rank:
// such a receive waits for the first SEND_READY and then sends RECV_READY to that rank
// alone. A transfer is exactly one message of each kind. Gloo has a fourth opcode, 0,
// for buffers that are registered in advance. PyTorch does not use it over TCP. Here it
// is a protocol fault.
//
// # Lengths are checked at both ends
//
// Gloo ignores the length in notifications, accepts a message that is too short, and
// ends the process if one is too long. A Mesh compares the announced length of each
// send with its receive before DATA is sent or accepted. So it never sends a message
// that would kill a PyTorch peer, and a wrong length is a fault that names the peer.
// Payloads are read straight into the posted buffer and never beyond it.
//
// # Goodbyes
//
// Gloo has no message for "I am leaving" or "I failed because of rank 3". Ranks of this
// library use headers that Gloo accepts too: a SEND_READY on a slot whose top byte is
// 0xC1. No PyTorch operation uses such slots. Gloo notes that a rank wants to send there,
// and never asks for the message. To post a request on such a slot is an error.
//
//   - HELLO is first on each connection, and shows a rank of this library.
//   - BYE is the last message of a rank that closes the group.
//   - ABORT is the last message of a rank whose mesh failed. It has the fault's kind,
//     rank, reporter and operation.
//   - WORDS brings a part of the text of the ABORT that follows. It goes to peers whose
//     HELLO has version 2.
//   - PING asks how many operations the peer has issued and completed, and about its
//     connections with other ranks.
//   - PONG answers. LINKS go before it, to peers whose HELLO has version 4: what the rank
//     knows of its connections with ranks that it waits for.
//   - A PING of round 0 asks nothing, and no rank answers it. 32 KiB of them before a PING make
//     a long question, which a slow network answers late. One before a PING makes the peer ask
//     long questions.
//
// If the connection ends after HELLO and without BYE or ABORT, the peer is dead. The mesh
// fails if a request needs the peer, now or later. After BYE it is the same, with another
// fault. PyTorch ranks cannot say goodbye. Messages that the peer sent before are delivered.
//
// Nothing here has a checksum but TCP itself, since the bytes are PyTorch's. Package tcp has
// one.
//
// # Goroutines and limits
//
// Each connection has a reader and a writer. The reader waits only for its socket. It
// notes notifications without a request, up to a limit for each peer. Its own messages
// go through the writer's queue, which is bounded because only this rank's requests fill
// it. The writer sends all queued messages in one system call, so a send to a waiting
// receive leaves as one segment. In the steady state a message allocates nothing.
package wire
