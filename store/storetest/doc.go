// Package storetest is the conformance suite of store.Store. Every store of this
// module passes it, and a store of your own should:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Config{
//			New:  func(t *testing.T) store.Store { return mystore.Open(t.TempDir()) },
//			Peer: func(t *testing.T, s store.Store) store.Store { return s.(*mystore.Store).Reopen() },
//		})
//	}
//
// Every subtest begins with an empty store from New. Where it needs another rank it asks Peer for
// a second handle on the same data, since some stores serve one call at a time on a handle.
// Without Peer the suite calls Clone if the store has it, and otherwise uses the store itself.
//
// The suite closes the stores. Its goroutines end before the subtest does, so goleak can be
// used in TestMain.
//
// Config.No names what a store cannot do. For a missing operation the suite checks that the
// error is errors.ErrUnsupported.
package storetest
