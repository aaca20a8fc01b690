// Package transporttest is the conformance suite that every transport.Mesh of
// this module passes:
//
//	func TestMesh(t *testing.T) {
//		transporttest.Run(t, transporttest.Config{
//			New: func(t testing.TB, size int) []transport.Mesh { return join(t, size) },
//		})
//	}
//
// It tests what all meshes promise:
//
//   - which message matches which receive, and what is in the buffers;
//   - how requests end when lengths differ, and when a rank leaves, dies or aborts;
//   - what Diagnose reports.
//
// Random messages come from a seed that is printed. C10D_SEED sets it.
//
// Where meshes may differ, the suite accepts both: a send may complete before its
// receive is posted, or wait for it. Config.No lists what a mesh does not promise. The
// suite closes the meshes that it was given and leaves no goroutine behind.
package transporttest
