// Package meet lets the ranks of one run find each other in a store that other
// runs use, too. It also finds out whether PyTorch ranks take part, and which rank keeps the others waiting.
//
//	run, err := meet.New(meet.Config{Store: st, Name: "0", Rank: rank, Size: size}).Meet(ctx)
//
// # How it works
//
// A meeting is a row of turns. Keys are under "c10d-go/meet/JOB/NAME"; T is the number of a turn.
//
//   - A rank that waits in a turn adds one to turn/T/log, and writes a record of itself to turn/T/log/I, where I is the
//     sum. Then it waits for turn/T/end.
//   - CompareSet on turn/T/end ends the turn. So every rank sees the same end. All that waited go on to the next turn, or
//     end.
//
// A turn ends in one of four ways:
//
//  1. Rank 0 has come. The end holds its record with a nonce, a new random number. The ranks of its run meet in the next
//     turn.
//  2. All have come. Rank 0 reads one entry of the log after the other, and waits for each. When it has one of every rank
//     it writes so. Its nonce is the name of the run. Keys that the ranks use from then on are under it, so nothing that
//     an earlier run left can be read.
//  3. A PyTorch rank has come.
//  4. A rank is at fault: it has ended, has a second process, or its time ran out. All that wait get the same fault.
//
// The key "turn" has the number of a turn that has ended. A new process looks from there for the turn that has not.
//
// A store may hold the turns of an earlier run whose processes were killed. Its ranks are in the log of a turn, and rank
// 0 does not answer. The next rank 0 ends that turn and begins another one, to which the ranks of its run follow. So
// only ranks that run now are in the log that a rank 0 reads.
//
// Waiting costs a TCP store no requests, because a Get of a missing key waits in its server. Clients of Redis and of a
// file look again and again.
//
// # Who is missing
//
// Rank 0 alone knows who has come. A rank that wants to know, for a line of its log or at its timeout, asks: it writes
// turn/T/ask/K and waits for turn/T/answer/K. Ranks that ask at the same time share one question. Rank 0 looks for
// questions four times a second. While there is no rank 0, the log of the turn says who is there.
//
// # Mistakes that are recognised
//
// Records have rank, number of ranks, job, process and host. A process also counts itself under rank/R, and waits for the
// entry of the next process of its rank. If one comes, both are at fault. Rank 0 sees it in the log, too. A rank compares
// its number of ranks with that of rank 0. In all these cases every process that is there gets the same error, which
// names both sides.
//
// Two runs without a job's name, with one prefix, that start at the same moment look like two
// processes for each rank, and get that error. If one run has all its ranks before the other
// begins, both run.
//
// # Deaths
//
// A rank leaves a will (store.Willer) that ends its turn when its process ends. While rank 0 is away it leaves one for
// the next turn as well. Once it knows the name of the run, it also leaves one in the run's [Notice], which counts
// when all have come. In a store without wills the timeout names what is missing. A launcher sees the end of a process
// that never came, see Config.Ended.
//
// A rank that comes after all others have failed waits: it may as well be the first of the next run. At its timeout it
// says why the last meeting has failed.
//
// # PyTorch
//
// PyTorch's ranks write no entries. They write their addresses to keys that Config.Foreign lists.
// Rank 0 looks for the keys of missing ranks, and other ranks wait for rank 0's. A rank 0 of this
// library writes its own once it knows of a PyTorch rank. The place of the first key shows the
// generation of PyTorch. The run then has PyTorch's keys and no name. Keys of an earlier run are
// then an error, ErrStale.
//
// # Notices
//
// When all have come they connect, and so do the ranks of later groups. A [Notice] lets them tell each other why they
// cannot.
//
//	ctx, cancel := context.WithCancelCause(ctx)
//	n, err := meet.Join(ctx, meet.NoticeConfig{Store: st, Ranks: ranks, Rank: rank}, cancel)
//	err = connect(ctx)
//	if err != nil {
//		n.Post(meet.Fault{Rank: rank, Text: err.Error()})
//	}
//	n.Close()
//
// Every rank waits for the key "first". The first rank that fails writes there which rank is at
// fault and why, and all waiting ranks fail with that. A rank also leaves a will
// that writes the key when its process ends. In a store without wills the others notice a death by
// what else it breaks, or at their deadline.
//
// A rank whose time runs out does not know the culprit: the ranks that it lacks may lack others
// themselves. It writes "first" as a question. Every rank that runs writes to here/RANK which ranks
// it lacks. At fault are the ranks that some rank lacks and that have not answered: they have
// stopped, or never came. The rank that asked writes them to "last", for all to read.
//
// The keys must be the group's own: a fault of an earlier run would end this one. All of them
// are left in the store if the group fails, none otherwise.
package meet
