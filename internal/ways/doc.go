// Package ways tells which way a collective of CUDA tensors takes, from a table of measurements.
//
//	w := ways.New(ways.Default(), ways.Group{Link: ways.Peers, Ranks: 2})
//	r := w.Of(plan.OpAllReduce, 1<<20)
//	fmt.Println(r.Way, r.Why)
//
// # Tables
//
// The format is that of package choice. The wire is a [Link], the algorithm a way. A way of kernels
// may have the most blocks of a kernel behind a colon. The time is that of a call when calls follow
// each other without a wait.
//
//	c10d-table 1
//	command c10d bench -world 2 -device cuda -tune FILE
//	machine 2 H200
//	# op        wire   ranks  hosts  bytes    algorithm    time_us
//	all_reduce  peers  2      1      1048576  one-shot     12.3
//	all_reduce  peers  2      1      1048576  one-shot:16  14
//	all_reduce  peers  2      1      1048576  host-shared  74.9
//
// # Choice
//
// Only rows with the group's number of ranks and its link count, or with - for any link. Between two
// measured sizes a time is on the straight line between the two. The fastest way wins. If no row fits,
// a rule decides: kernels, else memory that the ranks share, else the CPU backend.
//
// New computes the ranges of sizes when a group is made. A call looks its range up and allocates
// nothing.
//
// # Agreement
//
// All ranks must choose alike. The table has a fingerprint, which the ranks compare when the group
// is made. The link is one on which all ranks agree. Everything else is computed from these, in
// integers.
package ways
