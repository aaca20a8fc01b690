// Package chain runs collectives as chains of callbacks: no goroutine waits for a message. The
// arrival of one step's message sends the next.
//
// A [Node] is one rank's end. It receives all messages of its peers from a transport.Mesh and
// passes each to the callback for its group, collective and step. Early messages wait in a
// callback.Registry. When that is full, peers wait, and no message is lost. Members of a [Group]
// call the same collectives in the same order:
//
//	n := chain.NewNode(mesh, chain.Options{})
//	g, err := n.Group("all", []int{0, 1, 2})
//	c := g.AllReduce(ctx, out, in, 4, sum, nil)
//	c.AndThen(func(err error) { ... })
//
// An operation sets all of its callbacks, sends, and returns a [Chain] at once. The callbacks run
// on the node's workers. The chain ends when all of them have run and all messages have been
// sent. The buffers then belong to the caller again.
//
// # Collectives
//
//   - AllReduce: a ring, for any number of members and elements, also for more members than
//     elements;
//   - Broadcast: down a chain of all members in chunks, so that a member sends and
//     receives the data once;
//   - AllGather and AllGatherAny: around the ring, along any axis, with equal shapes, or with
//     different shapes, which are sent first;
//   - Send and Recv: bytes under a key.
//
// # Errors
//
// A member whose part fails (a value of another size, the end of its context) tells all members.
// Their chains end with an error that names it, and the group can go on with the next collective.
// The loss of a rank ends all chains with the mesh's fault. When a collective is over, nothing of
// it stays in the registry, and later messages for it are refused.
//
// Package gloo does not use this package: it runs plans on the mesh, where receives have buffers.
package chain
