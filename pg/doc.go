// Package pg has process groups as in c10d. It is what a trainer imports.
//
// A job is a number of processes, its world. Each process has a rank, from 0 on. Every
// rank makes the default group, and then all ranks call the same operations in the same
// order:
//
//	g, err := pg.Init(ctx, "env://", pg.InitOptions{}) // torchrun, c10d run, Slurm, mpirun, Kubernetes
//	if err != nil {
//		return err
//	}
//	defer g.Close()
//
//	t, err := tensor.Of(grad) // over the slice, no copy
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
// AllReduceSlice and its relatives take slices instead of tensors; AllReduceSliceAsync and its
// relatives return a Work. AllGatherObject and its relatives take values of any type.
//
// Tensors may be over any memory. Alloc returns tensors in memory that the ranks of a host
// share; large operations then make no intermediate copy. Free frees them.
//
// # Ways to meet
//
// Init takes a URL: env://, tcp://, file:// or redis://. New takes a store that
// the program opened itself, a rank and a size. Package pgtest runs all ranks
// inside one test.
//
// # Groups
//
// NewGroup makes a group of some ranks. NewSubgroups divides the default group, and Split any
// group, by a colour and a key of each rank. NewMesh arranges ranks in a grid with named dimensions,
// c10d's DeviceMesh. A rank outside a group of NewGroup holds a
// ProcessGroup for which IsMember is false, so that all ranks can run the same lines. Ranks
// in calls and options are those of the
// group called; GlobalRank and GroupRank translate.
//
// # Guarantees
//
// Every rank gets the same bits from a reduction. Operations of one group begin in
// the order of their calls. How many run at a time depends on the backend; package gloo
// runs one in shared memory and two for each network interface elsewhere. Operations of
// different groups run at the same time.
//
// Nothing hangs. An operation ends with its result, its timeout, its context, the death of
// a rank, or Close. After its timeout, or its context's deadline, it ends within 0.3 s, or within a
// tenth of that time if that is more. A failed operation ends the group, at once and on every rank. The error,
// a *work.Error, names the operation, its number, and the rank at fault: the one that died,
// stopped answering, did not call the operation, cancelled it, or panicked. Every rank's
// error has the text of the reason.
//
// # Going on after a failure
//
// A failed operation ends an epoch of its group. If all ranks are of this library, those that are
// left begin the next epoch of the default group:
//
//	err := step(ctx, g)
//	var ended *pg.EpochError
//	if errors.As(err, &ended) {
//		_, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 2})
//		// g.Rank() and g.Size() may have changed. Repeat the step.
//	}
//
// A call whose context is cancelled is such a failure. Every rank's error names the rank that
// cancelled and the cause, and Reconfigure goes on with the same members. A call whose context had
// ended before starts nothing: the rank may call again.
//
// Reconfigure also takes in newcomers, which call Join. Pending says how many wait. The ranks agree
// through the store, so it has to outlive all of them. The store of "c10d run", a server of its own
// and Redis do. If rank 0 hosts the store and dies, Reconfigure returns an error that says so. Set
// Options.Elastic if ranks are going to come and go. Package ddp has a training loop for that.
//
// # Closing a group
//
// Close takes about a second, whatever is pending. Operations of this rank that have not ended
// fail with ErrClosed; if collectives are among them, the group ends on all ranks. Wait for
// operations before Close, or call Shutdown, which waits for all that this rank has issued.
//
// A panic in a function that an operation calls, such as a custom operator, ends the
// operation with a *work.PanicError. Any other panic ends the program as usual. If a deferred Close
// runs before, ranks that need this one see that it left.
//
// # Waiting ranks
//
// A rank that waits longer than 10 s in Init, NewGroup or an operation writes a line to
// Options.Logger, or to slog.Default(). The line names the missing ranks and until when this
// rank waits. More lines follow at growing intervals.
//
// # Beside PyTorch
//
// Ranks of a PyTorch gloo group can be in the world, whichever rank or program hosts the
// store. The first key that a PyTorch rank writes shows it and its generation. Keys and
// bytes on the wire are then PyTorch's. Options.Dialect is not needed; if it does not fit,
// New returns an error.
//
// # One store, several runs
//
// A store may outlive a run, or serve several. New begins with a roll call: each
// rank writes a random number, and trusts only answers to that number. All keys of a run
// without PyTorch ranks are under a name that no other run has. Keys of earlier runs are
// never read and need not be removed. A group of such a run deletes its keys when all ranks
// have met; those that the program sets stay. Some mistakes are errors at once, on every rank that
// is there:
//
//   - ErrTwice: a rank has two processes.
//   - ErrDiffer: ranks were started with different sizes.
//   - ErrLists: ranks call NewGroup with different lists.
//
// With PyTorch ranks the keys are PyTorch's, and each run needs its own store or
// prefix. A rank that finds its own key of an earlier run gets ErrStale.
//
// Two runs may have the same size, store and prefix, and no name from a launcher. If
// both start at the same time, their ranks get ErrTwice. But if rank 0 of one run and rank 1
// of the other come first, they make a group and cannot notice.
//
// # Limits
//
// A group that has failed stays failed until Reconfigure. Groups with PyTorch ranks cannot be
// reconfigured: close such a group and make a new one. Groups made by NewGroup and Split end with
// the epoch of the default group: make them again.
//
// # Calls that do not match
//
// All ranks of a group call the same collectives in the same order. If they do not, the
// result depends on the wire:
//
//   - The native wires compare operation, operator, dtype, root and number of elements. Every
//     rank gets an error that shows two calls which differ: in that call if the rank needs all
//     other ranks for it, else at the latest in the next such call, in Shutdown or in Close. These
//     two wait up to 300 ms for ranks that have called less. Data may be wrong by then, and the
//     group has ended. Shapes are not compared: [2 3] matches [6].
//   - On Gloo's wire only different sizes are noticed.
//   - With Options.Detail calls are compared before they run, on every wire. That makes
//     them slower.
package pg
