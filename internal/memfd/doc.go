// Package memfd makes files without a name for memory that processes share. They are on Linux only.
package memfd
