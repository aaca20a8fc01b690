// Package pg is what a trainer imports: process groups as c10d has them, in Go.
//
// A job is a number of processes, its world; each is a rank from 0 on. Every
// rank makes the default group and then calls the same operations in the same
// order:
//
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{}) // torchrun, c10d run, Slurm, mpirun, Kubernetes
//	if err != nil {
//		return err
//	}
//	defer g.Close()
//
//	t, err := tensor.Of(grad, len(grad)) // over the slice, no copy
//	if err != nil {
//		return err
//	}
//	w, err := g.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: backend.Avg()})
//	if err != nil {
//		return err // the call was wrong: nothing was sent
//	}
//	// ... compute something else ...
//	if err := w.Wait(ctx); err != nil {
//		return err // what happened on the wire
//	}
//
// For people without tensors there are AllReduceSlice and its relatives, and
// for values of any type AllGatherObject and its relatives.
//
// Tensors may be over any memory. Those of Alloc are in memory that the ranks of a host share,
// so that large operations need no copy on the way; they are given back with Free.
//
// # Ways to meet
//
// Init takes a URL: env://, tcp://, file:// or redis://. New takes a store that
// the program opened itself, a rank and a size. Package pgtest runs all ranks
// inside one test.
//
// # Groups
//
// NewGroup makes a group of some ranks. NewSubgroups cuts the default group into parts, and Split
// any group, by a colour and a key of each rank. Ranks outside a group of NewGroup hold one for
// which IsMember is false, so that all ranks can run the same lines. Ranks in calls and options are those of the
// group called; GlobalRank and GroupRank translate.
//
// # What is promised
//
// Every rank gets the same bits from a reduction. Operations of one group run in
// the order of their calls, two at a time; different groups run side by side.
//
// Nothing hangs: an operation ends with its result, with its timeout, with its
// context, with the death of a rank, or with Close. When it fails, so does the
// group, at once and on every rank, and the error (a *work.Error) names the
// operation, its number, and the rank whose fault it was: who died, who stopped
// answering, who has not called the operation, who cancelled, who panicked. What that
// rank knew of the reason is in the text, on all ranks.
//
// # The end
//
// Close takes about a second, whatever is pending. Operations of this rank that have not ended
// fail with ErrClosed. If there are collectives among them, the group ends on all ranks. Wait for
// operations before Close, or call Shutdown, which waits for all that this rank has
// issued.
//
// A panic in a function that an operation calls, such as a custom operator, ends the
// operation with a *work.PanicError. A panic elsewhere ends the program as always; a deferred
// Close notices it and tells the other ranks.
//
// A rank that waits longer than 10 s writes a line to Options.Logger, or to
// slog.Default(). The line names the missing ranks and until when this one waits. More
// follow at growing intervals. This holds for Init, NewGroup and operations.
//
// # Beside PyTorch
//
// Ranks of a PyTorch gloo group can be in the world. They show themselves in the
// store, whoever hosts it and whenever they come, and their first keys tell the
// generation of PyTorch. Keys and bytes on the wire are then PyTorch's. Options.Dialect
// is not needed; if it is given and wrong, New says so.
//
// # One store, several runs
//
// A store may outlive a run, or serve several. New begins with a roll call: each
// rank makes up a random number, and trusts only what answers to it. So keys of
// runs that have ended are never read, and need not be removed. All keys of a run of
// this library's ranks are under a name that no other run has. Some mistakes are
// errors at once, on every rank that is there:
//
//   - ErrTwice: a rank has two processes.
//   - ErrDiffer: ranks were started with different numbers of ranks.
//   - ErrLists: ranks call NewGroup with different lists.
//
// With PyTorch ranks keys are where PyTorch has them, and each run needs a store or
// a prefix of its own. A rank that finds its own key of an earlier run gets ErrStale.
//
// Two runs may have the same size, store and prefix, and no name from a launcher. If
// both start at the same time, their ranks get ErrTwice. But a rank 0 of one run and
// a rank 1 of the other that come first make a group, and cannot know it.
//
// # What it does not do
//
// A group that has failed stays failed: close it and make a new one.
//
// # Calls that do not fit
//
// All ranks of a group call the same collectives in the same order. What happens if they do not
// depends on the wire:
//
//   - On the native wires every rank gets an error that shows two calls which differ, in
//     operation, operator, dtype, root or number of elements. It is the error of that call if the
//     rank needs all others for it, else of a later one, or of Close. Data may be wrong by then, and
//     the group has ended. A shape of [2 3] fits one of [6].
//   - On Gloo's wire only sizes that differ are noticed.
//   - With Options.Detail calls are compared before they run, on every wire, at the price of speed.
package pg
