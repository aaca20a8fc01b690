// Package simulate runs the plans of package plan over a modelled network in virtual time.
// It runs the same steps as a group, for groups of thousands of ranks.
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
// Ranks are on hosts: one each, unless a [plan.Layout] says otherwise. A message between
// hosts takes these steps:
//
//  1. The sender pays [Network.Overhead] of CPU time.
//  2. The message leaves through a network interface of the host at [Network.Bandwidth],
//     one message after another.
//  3. Its first byte reaches the other host after [Network.Latency].
//  4. The message comes in at the same bandwidth, one message after another.
//  5. The receiver pays the overhead when it waits for the message.
//
// An undisturbed message of n bytes therefore takes
//
//	alpha + n beta,  alpha = latency + 2 overhead,  beta = 1 / bandwidth
//
// and an interface is never faster than its bandwidth, in each direction. Links in the
// middle of the network are not modelled: switches have room for all messages.
//
// Messages on a host have a latency and bandwidth of their own, and share the bandwidth of
// the host's memory. Reductions and copies take CPU time of their rank, gamma for each
// byte. An interface takes requests in the order of virtual time.
//
// A send ends when its bytes have left. Receivers have room for messages of at most
// [Network.Eager] bytes. A longer message does not leave before the sender could know that
// the receive was posted. This finds plans that get stuck with long messages.
//
// # Stragglers
//
// [Stragglers] chooses ranks at random that begin late or compute slowly, and delays some
// messages. The same seed gives the same run, to the picosecond.
//
// # Results
//
// [Run] reports the time when the last rank ends, and the bytes of every interface.
// [Formula] has the closed formulas of textbooks for the same model. On an even network
// runs take the time of the formula, or less if a schedule overlaps terms that the formula
// adds. If ranks wait for messages that nobody sends, or lengths do not fit, the error
// names ranks and steps.
//
// The simulation computes no values: the tests of package plan do. It does not model
// caches, page faults, the operating system or congestion control.
//
// # Limits
//
// Plans are made while they run, a few steps at a time. Memory therefore depends on the
// messages under way: 25 KiB for each rank and 100 bytes for each message. The ring
// all-reduce of 4096 ranks has 34 million messages. It takes about 140 MiB and 13 s of a
// server's core (BenchmarkRing). An all-to-all of 4096 ranks posts everything at once and
// has 17 million messages under way.
//
// There is one goroutine. Plans are coroutines of it.
package simulate
