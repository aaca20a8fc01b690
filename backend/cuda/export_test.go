package cuda

import "time"

// SetCloseLimit changes how long Close waits for devices that do not go on after an
// operation has failed, until the function that it returns is called.
func SetCloseLimit(d time.Duration) func() {
	old := closeLimit
	closeLimit = d
	return func() { closeLimit = old }
}

// SetHostIdentity changes what tells hosts apart, until the function that it
// returns is called.
func SetHostIdentity(f func() [32]byte) func() {
	old := hostIdentity
	hostIdentity = f
	return func() { hostIdentity = old }
}

// KeepRegions leaves the memory that ranks shared where it is, for tests of programs
// that use it for too long, until the function that it returns is called.
func KeepRegions() func() {
	unmap = (*page).hide
	return func() { unmap = (*page).close }
}

// SetCrew changes how many goroutines of a rank combine its share, and the least that
// one of them does, until the function that it returns is called.
func SetCrew(n, part int) func() {
	oldCrew, oldPart := crewOf, smallestPart
	crewOf, smallestPart = func(int) int { return n }, part
	return func() { crewOf, smallestPart = oldCrew, oldPart }
}
