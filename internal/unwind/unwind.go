// Package unwind tells a function whether a panic is why it runs.
package unwind

import "runtime"

// ByPanic reports whether the calling goroutine runs deferred functions because of a panic.
//
// Only recover tells so officially, but it stops the panic. The runtime calls the deferred functions
// of a panic from runtime.gopanic, so that is among the callers; it had this name in all releases
// of Go so far. Should a later one rename it, ByPanic returns false.
func ByPanic() bool {
	var pcs [64]uintptr
	for skip := 2; ; skip += len(pcs) {
		n := runtime.Callers(skip, pcs[:])
		frames := runtime.CallersFrames(pcs[:n])
		for more := n > 0; more; {
			var f runtime.Frame
			if f, more = frames.Next(); f.Function == "runtime.gopanic" {
				return true
			}
		}
		if n < len(pcs) {
			return false
		}
	}
}
