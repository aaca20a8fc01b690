// Package chain is the network stage of clusters: collectives among one rank of each cluster, of
// data that become ready in chunks while the collective runs.
//
// # Model
//
// A cluster is a set of ranks with a faster way to each other than the network. A collective over
// several clusters has three stages that overlap: inside, between, inside. A [Stage] is the one
// between. The data are cut into chunks. The stage before says Call.Ready for each chunk, from any
// goroutine; the stage after is told of each result.
//
//	s := chain.New(mesh)
//	call, err := s.Begin(&chain.Collective{
//		Kind: chain.AllReduce, Members: []int{0, 4, 8}, Slot: slot, Chunks: 16, Elem: 4,
//		Chunk:   func(k int) []byte { return buf[k*size:][:size] },
//		Combine: add,
//		Result:  func(k int) { ... }, // chunk k is complete
//	})
//	go func() {
//		for k := range 16 {
//			... // the stage inside the cluster
//			call.Ready(k)
//		}
//	}()
//	err = s.Wait(ctx)
//
// # Arrivals and callbacks
//
// A chunk of another cluster and this rank's own may come in either order. Each message has a key
// in a registry. When the own chunk is ready, it registers its callbacks: what to do with each
// block of the others. When a block has arrived and its callback is there, whichever comes second,
// the key is due. The driver then reduces the block and sends it on, which is the arrival that the
// next member's callback waits for. So no goroutine waits for a step, and no step waits for a
// chunk that is not its own.
//
// # Schedules
//
// All members have the same list, in the same order. N is its length.
//
//	all-reduce      a chunk has N blocks, which go around the ring twice: 2(N-1) messages
//	                a member, 2(N-1)/N of the bytes. Two members exchange chunks of up to
//	                64 KiB at once: one message
//	reduce-scatter  once around the ring: N-1 messages
//	all-gather      the same
//	broadcast       down the chain of all members: one message
//
// Up to four chunks are under way, each with a slot of its own for each message, so they may become
// ready in any order, another one on every member. The block of member b is combined in the order
// b+1, b+2, up to b, and computed once: all members have the same bits in every run. If two members
// exchange a chunk, both combine the same operands in the same order. Empty blocks have no
// messages.
//
// # Memory
//
// Receives are posted where the payload belongs: reduced blocks in the place of the operand, as
// soon as the operand's block has left, others in scratch memory. The stage keeps scratch memory
// for eight blocks. What comes earlier than its receive waits in the mesh, which makes the sender
// wait. Nothing is allocated once a collective of the same shape has run.
//
// # Progress
//
// The stage has no goroutine. Whoever waits for the collective drives it with Wait, or with Advance
// between waits of its own:
//
//	for !s.Advance() {
//		select {
//		case <-s.Awake():
//		case <-mesh.Failed():
//			call.Fail(mesh.Fault())
//		}
//	}
//
// For a mesh that polls, a Stage is a transport.Waiter: transport.Poller.PollUntil(s) runs steps
// until the collective ends or nothing has come for some time.
//
// # Errors
//
// An [Error] names the collective, the chunk, the step and the other end of the message that
// failed; the transport.Fault in it names the rank at fault. As everywhere, a failure ends the
// mesh. The stage returns when the mesh has let go of all memory, and nothing is left in the
// registry. After a failure on this rank alone, such as a panic in Combine, somebody has to end the
// mesh: Wait does it.
package chain
