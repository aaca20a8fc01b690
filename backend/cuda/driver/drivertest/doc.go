// Package drivertest is the conformance suite that every driver.Driver of this
// module passes: the simulator anywhere, the real drivers where there are
// devices.
//
//	func TestDriver(t *testing.T) {
//		drivertest.Run(t, drivertest.Config{
//			Open:  func(t *testing.T) driver.Driver { return mydriver.Open(t) },
//			Child: func(*testing.T, driver.Driver) []string { return nil },
//		})
//	}
//
//	func TestMain(m *testing.M) {
//		drivertest.Child(mydriver.Open)
//		os.Exit(m.Run())
//	}
//
// A test binary made with go test -c carries all it needs. The kernels are text in
// the package ([PTX]). Other processes are the binary itself, started again, and run
// [Child].
//
// Every subtest opens a driver of its own, and closes it with all that the subtest made
// there. Drivers like the simulator report what was not closed. Subtests that need more devices than there are, or links
// that are not there, skip and say so.
//
// Nothing is asserted about times. Commands that have to wait do so for a word, which the test
// writes when it is ready.
package drivertest
