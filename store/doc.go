// Package store is where the ranks of a job meet before they can talk to each
// other: a small key-value service with waiting, c10d's Store.
//
// # The model
//
// A store maps keys to byte strings. A rank publishes what others need to know
// with Set, and takes what others published with Get, which waits for the key:
// no rank has to come first. Add counts, CompareSet decides who of several is
// the one, Wait and Barrier hold ranks until all are there. What makes it a
// rendezvous and not a database is that every reader waits, and that every wait
// ends.
//
//	s := store.NewHash()
//	n, err := s.Add(ctx, "joined", 1)
//	if err != nil {
//		return err
//	}
//	if n == 1 {
//		err = s.Set(ctx, "leader", []byte(address))
//	}
//	leader, err := s.Get(ctx, "leader")
//
// # The stores
//
//   - Hash, in this package: in memory, for ranks that are goroutines.
//   - File, in this package: a file that processes share; PyTorch's FileStore.
//   - store/tcp: client and server of PyTorch's TCPStore, the usual choice.
//   - store/redis: a Redis server.
//   - Prefix, in this package: a view of another store under a name, so that
//     groups and jobs share one without meeting each other's keys.
//
// File and store/tcp can be used by Go and Python ranks together. All pass the
// suite in store/storetest, and so should a store of your own; WithTimeout,
// ParseNumber and the ...By... functions are there to write one.
//
// # How a wait ends
//
// A wait ends when its keys exist; when its context does; when the store is
// closed; and, if the context has no deadline, after the store's timeout, which
// is DefaultTimeout until SetTimeout. The limit is c10d's and the deadline
// plays the part of the timeout argument that c10d's methods have: it replaces
// the store's, whichever is shorter.
//
// A wait that ran out of time returns an error that matches ErrTimeout and is a
// net.Error, whether a deadline or the store's limit ended it; in the first case
// it matches context.DeadlineExceeded too. Errors of this module's stores are of
// type *Error and name the store, the operation and the keys, for a wait those
// that were missing where the store knows them:
//
//	store: tcp 10.0.0.1:29500: wait "rank_3" "rank_7": timed out after 5m0s
//
// # Differences from c10d
//
// Stores here agree with each other where c10d's do not: every change wakes the
// waiters of its key, in particular Add in Hash and CompareSet everywhere;
// ListKeys of a prefix store takes the slash as part of the prefix; Delete
// reports whether there was something to delete, File's too. A timeout of zero
// is the default and a negative one is for ever, in every store.
//
// # What it is not
//
// It is not for bulk data: values are copied, often more than once. It
// remembers nothing beyond its server or its file. It does not know which run
// wrote a key; package pg does. It keeps nobody out who can reach it, unless the
// store's own documentation says how.
package store
