// Package storetest is the conformance suite that every store.Store of this
// module passes. A store of your own passes it too, or is not one:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Config{
//			New:  func(t *testing.T) store.Store { return mystore.Open(t.TempDir()) },
//			Peer: func(t *testing.T, s store.Store) store.Store { return s.(*mystore.Store).Reopen() },
//		})
//	}
//
// Every subtest begins with an empty store from New. Where it needs another
// rank it asks Peer for a second handle on the same data, because some stores
// serve one call after another on one handle, and a wait there would hold up
// the call that ends it. Without Peer the suite takes Clone where the store has
// it, and else the store itself.
//
// The suite closes what it was given. It starts goroutines but none outlives
// its subtest, so that goleak can be used in TestMain.
//
// What a store cannot do is named in Config.No; for a missing operation the
// suite then checks that it says so with errors.ErrUnsupported.
package storetest
