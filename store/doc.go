// Package store is c10d's Store: a small key-value service in which the ranks of a job find
// each other. A reader waits until a key exists.
//
// # The model
//
// A store maps keys to byte strings. Set publishes a value. Get waits for the key and
// returns its value, so no rank has to come first. Add counts, CompareSet chooses one of
// several ranks, and Wait and Barrier hold ranks until all are there. Every wait ends, see
// below.
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
//   - store/redis: a Redis server, through go-redis v9. Only programs that import it have it.
//   - Prefix, in this package: a view of another store under a name, so that
//     groups and jobs can share one.
//
// Go and Python ranks can share a File or a store/tcp. All stores pass the suite in
// store/storetest, and so should a store of your own. WithTimeout, ParseNumber and
// AppendByCompareSet, MultiGetByGet and MultiSetBySet help to write one.
//
// # How a wait ends
//
// A wait ends when its keys exist, when its context ends, or when the store is closed. If
// the context has no deadline, it also ends after the store's timeout: DefaultTimeout, or
// what SetTimeout sets. A context deadline replaces the store's timeout, even if it is longer.
//
// The error of a wait that ran out of time matches ErrTimeout and is a net.Error. If a
// deadline ended it, it also matches context.DeadlineExceeded. Errors of this module's
// stores are of type *Error. They name the store, the operation and the keys, for a wait the
// missing keys where the store knows them:
//
//	store: tcp 10.0.0.1:29500: wait "rank_3" "rank_7": timed out after 5m0s
//
// # Differences from c10d
//
// Stores here agree where c10d's differ. Every change wakes the waiters of its key, in
// particular Add in Hash and CompareSet in every store. ListKeys of a prefix store takes the
// slash as part of the prefix. Delete reports whether there was something to delete, in File
// too. In every store a timeout of zero is the default, and a negative one means no limit.
//
// # Limits
//
// A store is not for bulk data: values are copied, often more than once. It does not outlive
// its server or its file. It does not know which run wrote a key; package pg does. Every
// process that can reach it can read and write, unless the store's documentation says
// otherwise.
package store
