//go:build !unix

package openfiles

func limit() string { return "" }
