package ownfile

import "syscall"

// hasACL reports whether single users or groups may have rights besides those of the mode. Then the mode's group has the
// most that any of them has.
func hasACL(path string) bool {
	n, _ := syscall.Getxattr(path, "system.posix_acl_access", nil)
	return n > 0
}
