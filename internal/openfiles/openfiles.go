// Package openfiles explains the errors of a process or a host that has no file descriptor left.
package openfiles

import (
	"errors"
	"fmt"
	"syscall"
)

// Exhausted reports whether err says that no file descriptor was left. To try again seldom helps.
func Exhausted(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// Explain returns err with what happened and what to do, if no file descriptor was left. It returns
// any other error as it is.
func Explain(err error) error {
	var e *exhausted
	switch {
	case !Exhausted(err) || errors.As(err, &e):
		return err
	case errors.Is(err, syscall.ENFILE):
		return &exhausted{"this host has no file descriptor left: raise the sysctl fs.file-max", err}
	}
	may := ""
	if n := Limit(); n > 0 {
		may = fmt.Sprintf(" (it may have %d)", n)
	}
	return &exhausted{fmt.Sprintf("this process has no file descriptor left%s: raise the limit before the program starts, for example `ulimit -n 65536`", may), err}
}

type exhausted struct {
	what string
	err  error
}

func (e *exhausted) Error() string { return e.what + " (" + e.err.Error() + ")" }
func (e *exhausted) Unwrap() error { return e.err }
