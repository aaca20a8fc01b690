// Package detail is PyTorch's ProcessGroupWrapper, which TORCH_DISTRIBUTED_DEBUG=DETAIL puts
// around each group. It wraps a backend and compares the ranks' calls before every collective.
//
// On Gloo's wire nothing else compares the calls. If one rank calls a barrier while others
// all-reduce, or passes int32 where they pass float32, the ranks hang, get wrong numbers, or get
// an error about sizes. The native wires compare calls too, but while they run. With this package
// every rank gets an error that names both sides:
//
//	detail: ranks disagree on the operation: rank 0 of group "0" calls
//	all_reduce with sum of float32 [5] on cpu, but rank 2 calls barrier
//
// Set pg.Options.Detail on all ranks of a job, or the variable for pg.Init.
//
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Detail: true}})
//	...
//	w, err := g.AllReduce(ctx, grad, pg.Avg())
//	var mismatch *detail.MismatchError
//	if errors.As(err, &mismatch) {
//		log.Printf("rank %d does something else: %v", mismatch.Peer(), err)
//	}
//
// # How a check works
//
// The ranks have a second group, the control group. For each collective they call its monitored
// barrier, whose error names missing ranks. Then they all-gather the length of a Fingerprint, and
// if all lengths are equal, the Fingerprint: the operation, its number, and dtype, device and
// shape of the tensors that must agree. If all are equal, the call goes to the wrapped backend.
// Sends, receives and MonitoredBarrier are not checked.
//
// If the calls differ, every rank gets a *MismatchError. Nothing of the operation was sent, and
// both groups can be used on. If the control group fails, because a rank died or was late, the
// whole group ends. The error names the rank and the operation.
//
// # Beside PyTorch
//
// Fingerprints, their order and their keys in the store are PyTorch's, so its ranks can be in the
// group. PyTorch 2's have a sequence number, 1.13's do not. PyTorch's gloo also counts sends,
// receives, each message of a monitored barrier, and some calls that it refuses. If two of three
// ranks exchange a message, the next collective therefore reports a false mismatch. Beside
// PyTorch 2 a Go rank must count the same way. Ranks of this library alone count collectives.
//
// PyTorch's ranks do not exchange fingerprints of different lengths, for example those of an
// all-reduce and a barrier. The error then says of PyTorch ranks what the length shows. Ranks of
// this library exchange the rest.
//
// # Cost
//
// A check and its operation together have the operation's timeout. Each collective takes a round trip through rank 0 and two all-gathers more, and its call waits
// for all ranks. Collectives no longer overlap with computation. Ranks that issue collectives of
// two groups in different orders wait for each other until the timeout. Use it to find a fault,
// not in production.
//
// # Limits
//
// Splits and the tensors of all-to-alls are not compared. Operators, roots and the tensors of
// coalesced operations are compared only if all ranks are of this library.
package detail
