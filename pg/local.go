package pg

import (
	"os"

	"github.com/c10d-go/c10d/internal/launch"
)

// LocalRank returns the rank on this host, -1 if no launcher says.
func LocalRank() int {
	e, err := launch.Detect(os.Getenv)
	if err != nil {
		return -1
	}
	return e.LocalRank
}

// LocalSize returns the job's ranks on this host, 0 if no launcher says.
func LocalSize() int {
	e, err := launch.Detect(os.Getenv)
	if err != nil {
		return 0
	}
	return e.LocalSize
}
