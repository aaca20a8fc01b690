// Package cluster plans collectives of ranks that form clusters. Ranks inside a cluster reach each
// other fast, for example through the memory of a host. Clusters are connected by a network. A
// collective goes in three stages: inside the clusters, between them, and inside them again. Each
// byte then enters another cluster once, however many ranks that has.
//
//	l := cluster.New([]int{0, 0, 1, 1, 1}, nil)
//	p, err := l.Plan(cluster.Call{Op: plan.OpAllReduce, Rank: 0, Bytes: 1 << 24, Elem: 4, Chunk: 2 << 20})
//
// The planner is pure, as package plan is. Plans can be printed, and run on plain slices. A [Cache] keeps them. Package gloo
// runs them on CPU tensors, package clusterway on devices.
//
// # Clusters
//
// [Find] makes a [Layout] of what the ranks publish: host, device, network interface, speed. The
// ranks of a cluster carry its traffic in proportion to the speed of their links. Two clusters may differ in their ranks: a buffer is cut
// wherever the share of a rank of any cluster begins, and one rank of each cluster is responsible for
// each piece.
//
// # Stages
//
//	                before                    between               after
//	all-reduce      reduce-scatter            all-reduce            all-gather
//	reduce          reduce-scatter            reduce                gather to the root
//	broadcast       broadcast (root's)        broadcast             all-gather (others)
//	reduce-scatter  reduce-scatter            reduce                -
//	all-gather      -                         broadcast             all-gather
//	gather          gather (others)           message to the root   gather (root's)
//	scatter         -                         message from it       scatter
//	all-to-all      all-to-all, by cluster    message               all-to-all
//	barrier         barrier                   barrier               barrier
//
// "root's" is the step of the root's cluster alone, and "others" of the other ones. What goes between
// two clusters directly goes around a ring, or along a chain or a tree, between more ([Way]).
// Short buffers are carried by one rank of each cluster ([Call.Single]). Short blocks of a gather, a
// scatter or an all-to-all go together, in one message for a cluster or a pair of them.
//
// # Overlap
//
// A buffer goes through the stages in chunks. A step between clusters only begins where it stands in
// the plan. The rank then does steps inside for other chunks. A step with Finish waits for the chunk.
// Ranks wait for chunks in the same order, so they cannot wait for each other in a circle. With
// equal times for the stages inside and between, three clusters take 0.67 of the time that the steps
// take one after the other (TestF26Overlap).
//
// # Balance
//
// Ranks with equal links send equally much. In clusters of 3 and 2 ranks, or of 3, 2 and 4, the most
// that a rank sends is 1.00 of the mean. With one rank for each cluster it is 3 and 4 times the mean
// (TestF24Balance).
//
// # Bits
//
// All ranks of an all-reduce get the same bits, and the same call gives the same bits again. The
// order of the operands depends on the clusters, the length of the buffer and the chunks.
package cluster
