package pg

import (
	"os"

	"github.com/c10d-go/c10d/internal/launch"
)

// LocalRank returns this process's rank among the job's processes on its host, as the launcher's
// environment has it: c10d's get_node_local_rank, for all launchers that Init knows. It returns -1
// if the launcher does not say. It needs no group, so a program can choose its GPU before Init.
func LocalRank() int {
	e, err := launch.Detect(os.Getenv)
	if err != nil {
		return -1
	}
	return e.LocalRank
}

// LocalSize returns how many of the job's processes the launcher has started on this host, 0 if the
// launcher does not say.
func LocalSize() int {
	e, err := launch.Detect(os.Getenv)
	if err != nil {
		return 0
	}
	return e.LocalSize
}
