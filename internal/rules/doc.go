// Package rules tests the rules of the tree that a compiler does not check: which package may
// import which, which modules the core may require, no cgo, no file about one machine, no broken
// links between documents. It also compares documents with the sources: the tour's places, the
// environment variables, the error texts. It has tests only and imports nothing.
package rules
