// Package rollcall lets the ranks of one run find each other in a store that other
// runs use, too. It also finds out whether PyTorch ranks take part.
//
//	run, err := rollcall.Meet(ctx, rollcall.Config{Store: st, Name: "0", Rank: rank, Size: size})
//
// # How it works
//
// A key that a rank reads may be of an earlier run, whose processes are gone. So a
// rank trusts only an answer to something that it has just made up. Every rank has
// a nonce, a random number. Keys are under "c10d-go/rollcall/JOB/NAME":
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
// # What is recognised
//
// Records hold rank, number of ranks, job, process and host. Two processes with one
// rank see each other's records: the first finds its own overwritten, and tells the
// second. Other numbers of ranks or other jobs are found in step 3. In all these
// cases every process that is there gets the same error, which names both sides.
//
// Two runs that nothing tells apart (no job's name, one prefix, started at the same
// moment) are two processes for each rank, and named as such. If one of them has
// all its ranks before the other begins, both run.
//
// # PyTorch
//
// PyTorch's ranks know nothing of this. They write their addresses to keys that
// Config.Foreign lists. Rank 0 looks for the keys of the ranks that have not come.
// The other ranks look for rank 0's. A rank 0 of this library writes its own once it
// knows of a PyTorch rank. The place of the first key tells the generation of PyTorch.
// The run then has PyTorch's keys and no name, and keys of an earlier run that
// are still there are an error, ErrStale.
package rollcall
