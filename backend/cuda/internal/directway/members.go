package directway

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/internal/group"
)

// A group whose ranks form several clusters has direct work within each cluster: Group.Members. The
// operations are those of package clusterway. They use the kernels and the stream.

// Size returns how many ranks take part.
func (d *Group) Size() int {
	if d.Members == nil {
		return d.B.Size
	}
	return len(d.Members)
}

// Rank returns this rank's place among those that take part.
func (d *Group) Rank() int {
	if d.Members == nil {
		return d.B.Rank
	}
	return slices.Index(d.Members, d.B.Rank)
}

// Of returns the rank of the engine at a place among those that take part.
func (d *Group) Of(place int) int {
	if d.Members == nil {
		return place
	}
	return d.Members[place]
}

// A message of Connect has a fixed length, because ranks of other clusters send at the same time.
// A rank of a cluster hears the others at most hearings times.
const (
	messageLen = 1 << 10
	hearings   = 6
)

// hear is Engine.Hear for the ranks that take part.
func (d *Group) hear(q *group.Operation, why error, more []byte) (reason error, all [][]byte, err error) {
	if d.Members == nil {
		return d.B.Hear(q.Ctx, q.Left(), why, more)
	}
	d.heard++
	if len(more) > messageLen {
		return nil, nil, fmt.Errorf("cuda: a message of %d bytes, want at most %d", len(more), messageLen)
	}
	mine := make([]byte, messageLen)
	copy(mine, more)
	reasons, every, err := d.B.HearEach(q.Ctx, q.Left(), why, mine)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range d.Members {
		reason, all = cmp.Or(reason, reasons[r]), append(all, every[r][:len(more)])
	}
	return reason, all, nil
}
