package gloo

import (
	"cmp"
	"fmt"
	"os"
)

// Copy is how data get from one rank's memory into another's where ranks share memory, on
// the native wire.
type Copy string

const (
	// CopyAuto copies large data once, straight out of the other process, if the
	// kernel lets every rank of the host read the memory of every other. "" stands for it
	// too, unless C10D_COPY says otherwise.
	CopyAuto Copy = "auto"
	// CopyStaged copies into the shared memory and out of it, whatever the size. It is enough
	// that one rank of a host says so.
	CopyStaged Copy = "staged"
)

// copyVariable is the environment variable for Options.Copy.
const copyVariable = "C10D_COPY"

func (o Options) copies() (Copy, error) {
	switch c := cmp.Or(o.Copy, Copy(os.Getenv(copyVariable)), CopyAuto); c {
	case CopyAuto, CopyStaged:
		return c, nil
	default:
		return "", fmt.Errorf("gloo: unknown copy %q, want %s or %s", string(c), CopyAuto, CopyStaged)
	}
}
