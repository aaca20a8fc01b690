// Package testsize says how much the tests do. There are three sizes:
//
//   - short, with -short: .ci/run uses it under the race detector;
//   - usual: make test;
//   - long, with C10D_NIGHTLY=1: make nightly.
//
// Only tests import it.
package testsize

import (
	"os"
	"testing"
)

// Of returns the value for the size of this run, for example a number of seeds. C10D_NIGHTLY goes before -short.
func Of[T any](short, usual, long T) T {
	switch {
	case Long():
		return long
	case testing.Short():
		return short
	}
	return usual
}

// Long reports whether make nightly runs the tests.
func Long() bool { return os.Getenv("C10D_NIGHTLY") == "1" }
