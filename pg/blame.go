package pg

import (
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/work"
)

// blameFile returns the file in which "c10d run" wants to find why this rank's groups
// failed, "" if this rank is not one that it started: a program may have ranks of its own
// in one process.
func (w *world) blameFile() string {
	if os.Getenv("RANK") != strconv.Itoa(w.rank) || os.Getenv("WORLD_SIZE") != strconv.Itoa(w.size) {
		return ""
	}
	return os.Getenv(launch.FailureVariable)
}

// noteFailure returns what tells the launcher which rank ended the group, nil without such
// a launcher. The first failure of a process's groups counts, from when the default group
// was made.
func (g *ProcessGroup) noteFailure() func(*work.Error) {
	path := g.world.blameFile()
	if path == "" {
		return nil
	}
	var once sync.Once
	return func(err *work.Error) {
		once.Do(func() {
			b := launch.Blame{Time: time.Now(), Rank: g.world.rank, Peer: -1, Message: err.Error()}
			if err.Peer >= 0 && err.Peer < len(g.ranks) {
				b.Peer = g.ranks[err.Peer]
			}
			// The launcher has the rank's output too, and judges by that if need be.
			_ = launch.WriteBlame(path, b)
		})
	}
}
