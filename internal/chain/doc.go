// Package chain runs collectives as chains of callbacks: nobody waits for a
// message in a goroutine of its own, the arrival of one step's message sends the
// next.
//
// A [Node] is one rank's end. It takes all messages of its peers from a
// transport.Mesh and hands each to the callback that waits for it, by group,
// number of the collective and step; what comes early waits in a
// callback.Registry, whose limits hold up the peers rather than lose anything.
// Members of a [Group] call the same collectives in the same order:
//
//	n := chain.NewNode(mesh, chain.Options{})
//	g, err := n.Group("all", []int{0, 1, 2})
//	c := g.AllReduce(ctx, out, in, 4, sum, nil)
//	c.AndThen(func(err error) { ... })
//
// An operation sets all of its callbacks before it sends anything, sends, and
// returns a [Chain] at once. The callbacks run on the node's workers. The
// chain ends when all of them have run and all that was sent has gone out; then the
// buffers are the caller's again.
//
// # Collectives
//
//   - AllReduce: a ring, for any number of members and of elements, more members than
//     elements included;
//   - Broadcast: down a chain of all members in chunks, so that a member sends and
//     receives the data once;
//   - AllGather and AllGatherAny: around the ring, along any axis, with equal shapes
//     or with shapes that travel first;
//   - Send and Recv: bytes under a key.
//
// # Errors
//
// A member whose part fails (a value of another size, the end of its context) tells
// all others, whose chains end with an error that names it; the group can go on
// with its next collective. The loss of a rank ends all chains, with the mesh's
// fault. Nothing of a collective that is over stays in the registry, and what
// comes for it later is refused.
//
// This is the general form of the receive side; the data plane of package gloo
// runs its plans on the mesh itself, where receives have buffers.
package chain
