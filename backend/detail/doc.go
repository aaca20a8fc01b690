// Package detail is a backend around another that compares, before every
// collective, what the ranks are about to run: the ProcessGroupWrapper that
// PyTorch puts around each group under TORCH_DISTRIBUTED_DEBUG=DETAIL.
//
// Nothing else in a group matches the calls of its ranks. A rank that calls a
// barrier where the others all-reduce, or brings int32 where they bring
// float32, leads to a wait, to wrong numbers, or to an error about sizes that
// says nothing of the cause. Here it leads to an error on every rank that names
// both sides:
//
//	detail: ranks disagree on the operation: rank 0 of group "0" calls
//	all_reduce with sum of float32 [5] on cpu, but rank 2 calls barrier
//
// Set pg.Options.Detail, or the variable for pg.Init; all ranks of a job must.
//
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Detail: true}})
//	...
//	w, err := g.AllReduce(ctx, grads, backend.AllReduceOptions{})
//	var mismatch *detail.MismatchError
//	if errors.As(err, &mismatch) {
//		log.Printf("rank %d does something else: %v", mismatch.Peer(), err)
//	}
//
// # How a check goes
//
// The ranks have a second group, the control group. For each collective they
// meet in its monitored barrier, whose error names those that did not come.
// They all-gather the length of a Fingerprint, and if that is the same
// everywhere, the Fingerprint: the operation, its number, and dtype, device and
// shape of those tensors that must agree. Only when all say the same, the call
// goes to the wrapped backend. Sends, receives and MonitoredBarrier are not
// checked.
//
// A call that does not fit returns a *MismatchError on every rank. Nothing was
// sent of the operation and both groups are in step: the ranks may go on.
// When the control group fails, because a rank died or did not come in time,
// the whole group ends, with the rank named and the operation that was to be run.
//
// # Beside PyTorch
//
// Fingerprints, their order and their keys in the store are PyTorch's, so that
// its ranks can be in the group. Those of PyTorch 2 have a sequence number,
// those of 1.13 have not. That number is not of collectives alone: PyTorch's
// gloo counts sends, receives and each message of a monitored barrier as well.
// A group in which two of three ranks exchange a message reports a mismatch at
// its next collective although nothing is wrong. Beside PyTorch 2 a Go rank has
// to count the same way; ranks of this library alone count collectives.
// PyTorch also counts some calls that it refuses for their dtype or operator.
//
// Where fingerprints have different lengths, as those of an all-reduce and a
// barrier have, PyTorch's ranks do not exchange them. The error then says of
// them what the length tells; ranks of this library tell each other the rest.
//
// # What it costs
//
// A round trip through rank 0, two all-gathers, and that the call waits for all
// ranks: collectives of one group no longer overlap with anything, and ranks
// that issue collectives of two groups in different orders wait for each other
// for ever, or until the timeout. It is for finding a fault, not for every day.
//
// # What it does not find
//
// Splits, and the tensors of all-to-alls. Ranks of this library alone compare
// the operators of reductions, roots, and the tensors of coalesced operations;
// PyTorch does not, and beside its ranks nobody can.
package detail
