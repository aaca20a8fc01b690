package run

import (
	"errors"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
)

// Connections are the ways from a rank to the others of its group, and what the ranks have agreed on. The group that
// New makes of them closes them.
type Connections struct {
	Meshes []transport.Mesh // one for each network interface, or one on the native wire
	TCP    *tcp.Mesh        // the mesh of the native wire, which all ranks have; else nil
	Memory *shm.Group       // the memory that this rank shares with others of its host, nil if it shares none
	Shared *shm.Group       // Memory, if all ranks share it; else nil
	Direct MessageMesh      // carries sends and receives if some go through memory, else nil

	Clusters *cluster.Layout // nil unless the ranks of each of several clusters share memory
	HostOf   []int           // the number of each rank's cluster; nil if each rank is one, or if that is unknown
	Parts    int             // how many clusters there are; 0 if unknown

	// Of the native wire, and the same on all ranks:
	Table     *choice.Table
	RankOrder bool // sums add in rank order

	AllReduce string // the algorithm of dense all_reduces, "" for the route's
	Workers   int    // how many collectives run at a time, where they need not run in turn; 0 means two for each mesh
}

// MessageMesh carries sends and receives, some of them through memory. Memory moves data only while
// a rank looks after it.
type MessageMesh interface {
	transport.Mesh
	// PollUntil moves w's message in the calling goroutine until w has finished or is over, or done is
	// closed. It returns at once if it cannot help.
	PollUntil(w shm.Waiter, done <-chan struct{})
	// PollOnce moves the data that can be moved at once.
	PollOnce()
	// MoveInBackground starts a goroutine that moves the messages under way.
	MoveInBackground()
}

// Close closes the connections and the memory.
func (c *Connections) Close() error {
	var errs []error
	if c.Direct != nil {
		errs = append(errs, c.Direct.Close())
	}
	for _, m := range c.Meshes {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
