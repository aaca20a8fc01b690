package directway

import (
	"bytes"
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

// hear gathers what the ranks that take part tell.
func (d *Group) hear(q *group.Operation, why error, more []byte) (reason error, all [][]byte, err error) {
	if d.Members == nil {
		return d.B.Hear(q.Ctx, q.Left(), group.Told(why, more))
	}
	d.heard++
	told := group.Told(why, more)
	head := len(told) - len(more)
	if len(told) > messageLen {
		return nil, nil, fmt.Errorf("cuda: a message of %d bytes, want at most %d", len(told), messageLen)
	}
	mine := make([]byte, messageLen)
	copy(mine, told)
	_, every, err := d.B.Hear(q.Ctx, q.Left(), group.Told(nil, mine))
	if err != nil {
		return nil, nil, err
	}
	for _, r := range d.Members {
		x := every[r][:len(told)]
		if x[0] != 0 && reason == nil {
			reason = fmt.Errorf("rank %d: %s", r, bytes.TrimRight(x[1:head], "\x00"))
		}
		all = append(all, x[head:])
	}
	return reason, all, nil
}
