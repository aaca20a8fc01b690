// Package option has the one form of options in this module: the last parameter of a function is variadic, and a
// caller leaves it out or passes one struct.
package option

// Last returns the options of a call: the zero value if there are none. The last ones count if there are several.
func Last[T any](o []T) (last T) {
	if n := len(o); n > 0 {
		last = o[n-1]
	}
	return last
}
