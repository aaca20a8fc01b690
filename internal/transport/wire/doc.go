// Package wire is Gloo's TCP pair protocol as a transport.Mesh: the transport
// that reaches PyTorch ranks.
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
// The receiver is in charge. A posted send transmits SEND_READY, a posted
// receive transmits RECV_READY, and DATA may go out only against a RECV_READY
// that has come in for its slot. SEND_READY is there for receives from any
// rank: they wait for the first one and then send RECV_READY to that rank
// alone. One transfer is exactly one message of each kind. Gloo has a fourth
// opcode, 0, for buffers that are registered in advance; PyTorch does not use
// it over TCP, and here it is a protocol fault.
//
// # Lengths are checked at both ends
//
// Gloo ignores the length in notifications, accepts a message that is too short
// and ends the process over one that is too long. A Mesh compares each send
// with the receive that it meets, as announced, before DATA is sent or
// accepted: a PyTorch peer never gets a message that kills it, and a wrong
// length is a fault that names the peer on either side. What comes is read
// straight into the posted buffer and never beyond it.
//
// # Goodbyes
//
// Gloo has no message for "I am leaving" or "I failed because of rank 3". Ranks
// of this library tell each other in headers that Gloo also accepts: a
// SEND_READY on a slot whose top byte is 0xC1, which no PyTorch operation uses.
// Gloo takes note that somebody would like to send there, and never asks for
// it. Posting a request on such a slot is an error.
//
//	HELLO  first on each connection: this is a rank of this library
//	BYE    the last message of a rank that closes the group
//	WORDS  part of the cause of the ABORT that follows, for people; for peers whose HELLO has version 2
//	ABORT  the last message of a rank whose mesh failed: kind, rank, reporter, operation
//	PING   asks how many operations the peer has issued and completed
//	PONG   answers
//
// So the end of a connection means different things. After HELLO and without
// BYE or ABORT it is the death of the peer, and the mesh fails at once. After
// BYE, and from a PyTorch rank, which cannot say goodbye, only requests that
// need that peer make the mesh fail; what it sent before is still delivered.
//
// # Goroutines and limits
//
// Each connection has a reader and a writer. The reader never waits for
// anything but its socket: notifications that nobody has asked for yet are
// noted, up to a limit per peer, and everything that it wants to say goes
// through the writer's queue, which holds only what this rank's own requests
// put there. The writer takes all that is queued and gathers it into one
// system call, so a send that meets a waiting receive leaves as one segment.
// In the steady state a message allocates nothing.
package wire
