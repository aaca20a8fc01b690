// Package rules holds the rules of the tree that a compiler does not know, as
// tests: who may import whom, what the core module may depend on, that nothing
// needs cgo, that no file speaks of one machine, and that documents point to
// what exists. It has no code of its own and depends on nothing.
package rules
