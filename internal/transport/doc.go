// Package transport is what the Gloo backend needs of the layer that carries its
// messages: the interface [Mesh]. Collectives run in the same way over sockets, over
// shared memory and inside one process.
//
// # Messages
//
// A [Mesh] joins one rank with all the others of its group. A [Request] is a send to
// a peer, a receive from a peer, or a receive from any rank. It names a slot, a 64-bit
// number. Messages match receives by peer and slot, in the order of the calls. For
// example, the third receive from rank 2 on slot 7 gets the third message that rank 2
// sends here on slot 7. An unused slot takes no memory, so every collective uses a new
// one.
//
//	r := transport.NewRequest()
//	r.Peer, r.Slot, r.Buf = 2, 7, buf
//	mesh.Recv(r)            // returns at once
//	select {
//	case <-r.Done():        // r.Err() tells how it ended
//	case <-ctx.Done():
//		mesh.Abort(&transport.Fault{Kind: transport.FaultTimeout, Rank: 2, ...})
//		<-r.Done()          // the buffer is ours again
//	}
//
// A request and its buffer belong to the mesh from the call until Done delivers. A
// single request cannot be taken back: the rank would be out of step with its group,
// and its next receive would take a message of another operation. So a rank that gives
// up aborts the mesh, and all its requests end.
//
// No method takes a context, because none waits, except [Mesh.Diagnose], which has a
// limit, and [Mesh.Close], which ends within seconds.
//
// # Faults
//
// A mesh works until it has a [Fault]. From then on every request on it ends with that
// fault. The other ranks are told, so that all ranks of a group give the same reason. A
// fault names the rank that caused it and the rank that noticed it. A mesh fails when
//
//   - an operation needs a peer that has died: its connection has ended without a
//     goodbye (FaultPeerDied);
//   - an operation needs a peer that said goodbye (FaultPeerLeft). Neither end alone is a
//     fault, because a rank may finish earlier than others. What it has sent is received;
//   - a message has another length than its receive (FaultMismatch);
//   - a peer sends invalid bytes (FaultProtocol);
//   - bytes were changed on the way (FaultCorrupted; only tcp notices);
//   - a peer reports a fault.
//
// The text of a fault's cause goes to the other ranks too, up to [MaxWords] bytes.
//
// # Implementations
//
//   - wire: Gloo's TCP protocol, which PyTorch ranks speak
//   - tcp: a protocol of this library, with fewer messages and bounded memory
//   - shm: memory that the ranks of a host share, also for whole collectives
//   - mem: ranks within one process, for tests
//
// Package mesh has what wire and tcp have in common. All implementations pass the tests
// of package transporttest.
package transport
