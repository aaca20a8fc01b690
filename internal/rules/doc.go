// Package rules tests the rules of the tree that a compiler does not check. They say which package
// may import which, and which modules the core may require. There is no cgo, no file about one
// machine, and no broken link between documents. It also compares documents with the sources: the tour's places, the
// environment variables, the error texts. It has tests only and imports nothing.
package rules
