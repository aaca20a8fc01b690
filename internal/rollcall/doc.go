// Package rollcall lets the ranks of one run find each other in a store that other
// runs use, too. It also finds out whether PyTorch ranks take part.
//
//	run, err := rollcall.Meet(ctx, rollcall.Config{Store: st, Name: "0", Rank: rank, Size: size})
//
// # How it works
//
// A key in the store may be from an earlier run, whose processes are gone. A rank therefore
// trusts only an answer to its nonce, a new random number. Keys are under
// "c10d-go/rollcall/JOB/NAME":
//
//  1. Rank r writes a record of itself with its nonce to rank/r. The record of an
//     earlier run is overwritten.
//  2. Rank 0 answers each record that it sees under answer/<nonce of r>, with a
//     record of its own. Only a rank that runs now reads such a key.
//  3. Rank r compares the two records and writes to joined/<nonce of 0>/r.
//  4. When all have joined, rank 0 writes to begun/<nonce of 0>, and all go on.
//
// Rank 0's nonce is the name of the run. Keys that the ranks use from then on are
// under it, so nothing that an earlier run left can be read.
//
// # Mistakes that are recognised
//
// Records have rank, number of ranks, job, process and host. If a rank has two processes, the
// first finds its record overwritten, and tells the second. Step 3 finds different numbers of
// ranks and different jobs. In all these cases every process that is there gets the same error,
// which names both sides.
//
// Two runs without a job's name, with one prefix, that start at the same moment look like two
// processes for each rank, and get that error. If one run has all its ranks before the other
// begins, both run.
//
// # Deaths
//
// A rank leaves a will (store.Willer) that writes to "gone" when its process ends. A rank trusts
// that key if it has changed since the rank came, or if this process hosts the store: then it is not
// of an earlier run. The wills are withdrawn at the end of the call, also of one that fails. From the moment when a rank
// knows the run's name it can leave another one there: see Config.Known.
//
// A launcher sees the end of a process that never came. See Config.Ended.
//
// A rank with two processes writes there too if rank 0 has not come. A rank that comes after all others have failed
// waits: it may as well be the first of the next run. At its timeout it says why the last roll call has failed.
//
// # PyTorch
//
// PyTorch's ranks do not take part. They write their addresses to keys that Config.Foreign lists.
// Rank 0 looks for the keys of missing ranks, and other ranks look for rank 0's. A rank 0 of this
// library writes its own once it knows of a PyTorch rank. The place of the first key shows the
// generation of PyTorch. The run then has PyTorch's keys and no name. Keys of an earlier run are
// then an error, ErrStale.
package rollcall
