// Package pg has process groups as in c10d. It is what a trainer imports.
//
// A job is a number of processes, its world. Each process has a rank, from 0 on. Every
// rank makes the default group, and then all ranks call the same operations in the same
// order:
//
//	g, err := pg.Init(ctx, "env://") // torchrun, c10d run, Slurm, mpirun, Kubernetes
//	if err != nil {
//		return err
//	}
//	defer g.Close()
//
//	w, err := g.AllReduce(ctx, pg.Slice(grad), pg.Avg()) // over the slice, no copy
//	if err != nil {
//		return err // the call was wrong: nothing was sent
//	}
//	if err := w.Wait(ctx); err != nil {
//		return err // what happened on the wire
//	}
//
// Wait does both: pg.Wait(g.AllReduce(ctx, t, pg.Avg())). Operations take tensors over any memory; Slice, Slices and
// Parts make them of slices. Options are the last argument everywhere: leave them out, or pass one struct. Package pgtest
// runs all ranks inside one test.
//
// NewGroup, NewSubgroups, Split, SplitRanks and NewMesh make groups of some ranks. A rank in none of them holds a group
// for which IsMember is false. Ranks in calls are the group's.
//
// # Guarantees
//
// Every rank gets the same bits from a reduction. Operations of one group begin in the order of their calls; operations of
// different groups run at the same time.
//
// Nothing hangs. An operation ends with its result, its timeout, its context, the death of a rank, or Close. A failed
// operation ends the group, at once and on every rank. The error, a *work.Error, names the operation, its number, and any
// rank at fault. A rank that waits longer than 10 s says in the log for which ranks, and until when.
//
// If ranks call different operations, the native wires return an error with two of them. Gloo's wire notices only
// different sizes. Options.Detail compares calls before they run.
//
// # Going on after a failure
//
// A failed operation ends an epoch of its group. The ranks that are left begin the next epoch of the default group:
//
//	var ended *pg.EpochError
//	if err := step(ctx, g); errors.As(err, &ended) {
//		_, err = g.Reconfigure(ctx, pg.ReconfigureOptions{Min: 2})
//		// g.Rank() and g.Size() may have changed. Repeat the step.
//	}
//
// Reconfigure also takes in newcomers, which call Join. The store has to outlive all of them, as that of "c10d run" does.
// Set Options.Elastic if ranks are going to come and go. Package ddp has a training loop.
//
// # Beside PyTorch, and one store for several runs
//
// Ranks of a PyTorch gloo group can be in the world. Keys and bytes on the wire are then PyTorch's, each run needs its own
// store or prefix, and the group cannot be reconfigured. Other runs have keys of their own: a store may serve several, with
// a prefix for each that starts at the same time.
package pg
