// Package simulate runs the plans of package plan over a modelled network in
// virtual time: the same steps that a group would execute, for groups that no
// machine at hand could hold.
//
//	a, err := plan.Lookup(plan.OpAllReduce, "ring")
//	...
//	r, err := simulate.Run(ctx, simulate.Job{
//		Network: simulate.Network{Latency: 10 * time.Microsecond, Bandwidth: 12.5e9},
//	}, a, plan.Call{Size: 4096, Bytes: 1 << 30, Elem: 4})
//	fmt.Println(r.Time, r.Messages, r.Sent)
//
// # The model
//
// Ranks stand on hosts, one each without a [plan.Layout]. A message between
// hosts costs its sender [Network.Overhead] of CPU time; then it goes out by a
// network interface of the host, one message after another, at
// [Network.Bandwidth]; its first byte reaches the other host after
// [Network.Latency], where it comes in at the same rate, again one message after
// another; and the receiver pays the overhead once more when it waits for it. So
// an undisturbed message of n bytes takes
//
//	alpha + n beta,  alpha = latency + 2 overhead,  beta = 1 / bandwidth
//
// and an interface is never faster than its bandwidth, each way. Links in the
// middle of the network are not modelled, as if switches had room for all.
//
// Messages on a host have a latency and bandwidth of their own, and share the
// bandwidth of the host's memory. Reductions and copies take CPU time of their
// rank, gamma for each byte. Requests are taken by an interface in the order
// of virtual time.
//
// A send ends when its bytes have left. Receivers have room for any message of
// at most [Network.Eager] bytes; a longer one does not leave before the receive
// was posted and the sender could have heard of it. A plan that gets stuck only
// where messages are long is found so.
//
// # Stragglers
//
// [Stragglers] makes ranks, drawn by a seed, begin late or compute slowly, and
// messages take longer than the latency now and then. The same seed gives the
// same run, to the picosecond.
//
// # What it tells
//
// [Run] reports the time when the last rank ends, and what every interface has
// carried. [Formula] has the textbooks' closed formulas for the same model; on
// an even network, runs meet those exactly, or, where a schedule overlaps what
// the formula adds up, are faster. If ranks wait for what nobody sends, or
// lengths do not fit, the error names ranks and steps.
//
// It computes no values: the tests of package plan do that. Nor does it know of
// caches, page faults, the operating system, or congestion control.
//
// # Limits
//
// Plans are made as they are run, a few steps at a time, so that memory depends
// on the messages under way: some 25 KiB for each rank, and 100 bytes for each
// message. The ring all-reduce of 4096 ranks, with its 34 million messages, takes
// about 140 MiB and 13 s of a server's core (BenchmarkRing). What
// posts everything at once does not scale so: an all-to-all of 4096 ranks has
// 17 million messages under way.
//
// There is one goroutine. Plans are coroutines of it.
package simulate
