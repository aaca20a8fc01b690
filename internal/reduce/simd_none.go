//go:build !amd64 || purego

package reduce

// assembly returns nothing: here the portable loops do everything.
func assembly() fast { return fast{} }
