// Package rules tests the rules of the tree that a compiler does not check: which package may
// import which, which modules the core may require, no cgo, no file about one machine, no broken
// links between documents, and no document that says something else than the code. It has tests only and imports nothing.
package rules
