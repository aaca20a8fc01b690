package direct

// SetShape makes all calls have one shape.
func SetShape(c *Comm, s Shape) { c.shape = func(_, _, _, _ int, _ Kind) Shape { return s } }

// ShareDevices returns options with which ranks may share devices. All their blocks have to
// run at the same time.
func ShareDevices(o Options) Options {
	o.shareDevices = true
	return o
}

// RootReduces returns options with which the root of a reduce combines a part up to so many bytes.
func RootReduces(o Options, bytes int) Options {
	o.rootReduces = bytes
	return o
}

// Straight returns options with which spans of so many bytes go straight to where they are to be.
func Straight(o Options, bytes int) Options {
	o.straight = bytes
	return o
}
