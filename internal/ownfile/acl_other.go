//go:build unix && !linux

package ownfile

func hasACL(string) bool { return false }
