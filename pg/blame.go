package pg

import (
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/work"
)

// blameFile returns the file in which "c10d run" looks for the reason why this rank's
// groups failed. It is "" for a rank that no such launcher started, such as one of several
// in a process.
func blameFile(rank, size int) string {
	if os.Getenv("RANK") != strconv.Itoa(rank) || os.Getenv("WORLD_SIZE") != strconv.Itoa(size) {
		return ""
	}
	return os.Getenv(launch.FailureVariable)
}

// noteUnmade tells the launcher, if there is one, which rank kept the default group from being made.
func noteUnmade(rank, size int, err error) {
	path, named := blameFile(rank, size), blamed(err)
	if path != "" && len(named) > 0 && named[0] >= 0 {
		_ = launch.WriteBlame(path, launch.Blame{Time: time.Now(), Rank: rank, Peer: named[0], Message: err.Error()})
	}
}

// noteFailure returns the function that makes operations' errors an *EpochError and tells the
// launcher, if there is one, which rank ended the group. The first failure since the default group was made counts.
func (g *epoch) noteFailure() func(*work.Error) {
	path, elastic := blameFile(g.world.rank, g.world.size), g.world.elastic() == nil
	if path == "" && !elastic {
		return nil
	}
	var once sync.Once
	return func(err *work.Error) {
		if elastic {
			g.suspect(err)
		}
		once.Do(func() {
			if path == "" {
				return
			}
			b := launch.Blame{Time: time.Now(), Rank: g.world.rank, Peer: -1, Message: err.Error()}
			if err.Peer >= 0 && err.Peer < len(g.ranks) {
				b.Peer = g.ranks[err.Peer]
			}
			_ = launch.WriteBlame(path, b)
		})
	}
}
