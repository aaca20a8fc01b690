// Package clusterway has the collectives of device tensors in groups of several clusters, such as
// hosts. They go inside each cluster by kernels, then between clusters over the network, and then
// inside again. The three stages overlap (decision 34).
//
// # Stages
//
// [cluster.Layout.Plan] has the steps of each rank. A buffer goes through them in chunks. For each chunk
// of an all-reduce, a rank in a cluster of several devices does this:
//
//	inside    reduce-scatter kernel                                          all-gather kernel
//	down                       copy of this rank's part to a slot
//	host                                                   the network
//	up                                                                 copy back
//
// Inside, down and up are streams. Of an operation of several chunks, the engine's feeder enqueues all
// commands, after the call. Package edges computes the order between the streams:
//
//   - an event after the kernel,
//   - a word that the stream writes when the slot is filled,
//   - a word that the host writes when the network is done,
//   - an event after the copy back.
//
// The kernels of the next chunks run meanwhile. Only the goroutine that serves the network waits between
// the first command and the end of the Work.
//
// Copies down and up are on streams of their own. On one stream, in the order of the plan, the copy down of
// a chunk would delay the copy up of an earlier one. Kernels wait for that copy. Then only the network
// overlapped (TestF26Overlap).
//
// # Clusters without kernels
//
// A cluster of one rank has nothing to do inside. A cluster of more has no kernels if its devices do not reach
// each other, if a rank has no device, or if it has more than eight ranks. Its devices then copy chunks to
// page-locked memory and back. [Group.Inside] does the steps inside there. All kinds of clusters may be in one
// group: what they send to each other is the same.
//
// On one host, clusters may be cliques: ranks whose devices reach each other. There all clusters of several ranks have
// kernels, or no call goes through them (Group.KernelsOnly, decision 58).
//
// # Tensors on the CPU
//
// A rank in a cluster without kernels may pass tensors in CPU memory. In other clusters package cuda copies them
// to the rank's device first.
package clusterway
