// Package transport says what the Gloo backend asks of the thing that carries
// its messages, so that one executor of collectives runs over sockets, over
// shared memory and inside one process.
//
// # Messages
//
// A [Mesh] joins one rank with all the others of its group. Everything on it is
// a [Request]: a send to a peer, a receive from a peer, or a receive from
// whoever sends first. A request names a slot, a 64-bit channel number, and
// messages match by peer and slot in the order of the calls: the third receive
// from rank 2 on slot 7 gets the third message that rank 2 sent here on slot 7.
// Slots cost nothing before and after their use, so every collective takes a
// new one.
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
// A request and its buffer belong to the mesh from the call until Done
// delivers. There is no way to take back a single request: a rank whose
// receive has gone missing is out of step with its group, and what it would
// receive next belongs to something else. So a rank that gives up aborts the
// mesh, and all its requests end.
//
// Nothing here takes a context, because nothing here waits, but for
// [Mesh.Diagnose], which has a limit, and [Mesh.Close], which is bounded.
//
// # Faults
//
// A mesh works until it has a [Fault]. From then on every request on it ends
// with that fault, on every rank that can be told, so that all ranks of a group
// give the same reason. A fault names the rank that caused it and the rank that
// noticed. What makes a mesh fail by itself:
//
//   - a peer dies: its connection ends without a goodbye (FaultPeerDied);
//   - an operation needs a peer that said goodbye (FaultPeerLeft); a goodbye
//     alone is no fault, because a rank may be done earlier than others;
//   - a message has another length than its receive (FaultMismatch);
//   - bytes come that are no message (FaultProtocol);
//   - a peer reports a fault of its own.
//
// The words of a fault's cause go to the other ranks as well, up to [MaxWords] bytes of them.
//
// # Implementations
//
// Package wire speaks Gloo's TCP protocol and so reaches PyTorch ranks. Package
// tcp speaks one of this library's own, with fewer messages and no more memory than
// it is told. Package shm carries messages, and collectives whole, through memory that
// the ranks of a host share. Package mem joins ranks within one process, for tests.
// Package transporttest is what each of them has to pass.
package transport
