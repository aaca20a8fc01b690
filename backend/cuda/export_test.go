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
