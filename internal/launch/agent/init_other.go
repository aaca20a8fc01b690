//go:build !unix

package agent

import (
	"errors"
	"os"
)

// RunsInit reports whether this process is process 1, which these systems do not have.
func RunsInit() bool { return false }

// Init is not called here.
func Init([]string, <-chan os.Signal) (int, error) { return 0, errors.ErrUnsupported }
