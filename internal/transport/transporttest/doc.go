// Package transporttest is the conformance suite that every transport.Mesh of
// this module passes:
//
//	func TestMesh(t *testing.T) {
//		transporttest.Run(t, transporttest.Config{
//			New: func(t testing.TB, size int) []transport.Mesh { return join(t, size) },
//		})
//	}
//
// It looks at what all meshes promise: which message meets which receive, what
// is in the buffers, how requests end when lengths differ, when a rank leaves,
// dies or aborts, and what Diagnose says. Messages that are random come from a
// seed that is printed; C10D_SEED sets it.
//
// What a mesh may do either way, the suite accepts either way: a send may
// complete before its receive is posted or wait for it.
//
// What a mesh cannot do is named in Config.No. The suite closes the meshes that
// it was given and leaves no goroutine behind.
package transporttest
