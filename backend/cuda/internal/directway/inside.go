package directway

import (
	"errors"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// Connect connects the members, unless one of them has a reason why not. All ranks of the engine call
// it at the same time, in an operation of Engine.Together, and those of a cluster get the same reason.
// An error ends the group.
func (d *Group) Connect(q *group.Operation, dev int, why error) (reason, err error) {
	d.connecting.Lock()
	defer d.connecting.Unlock()
	d.Forbidden, d.heard = why, 0
	if n := d.Size(); n < 2 || n > window.MostRanks {
		reason = errMeshRanks
	} else {
		reason, err = d.connect(q, dev)
	}
	for ; err == nil && d.heard < hearings; d.heard++ {
		_, _, err = d.B.Hear(q.Ctx, q.Left(), nil, make([]byte, messageLen))
	}
	if err != nil {
		return reason, errors.Join(err, d.giveUp())
	}
	d.why = reason
	d.opened()
	return reason, nil
}

// Kernels returns the collectives of the members, their device and the stream on which they run in
// order. It is for members that are connected.
func (d *Group) Kernels() (*direct.Comm, int, driver.Stream) { return d.comm, d.Dev, d.stream }

// Next counts an operation, for Left, and tells the other ranks. The caller holds the engine's Calls.
func (d *Group) Next() (number uint32) {
	number = d.made
	d.made++
	word(d.own, d.Rank(), wordMade).Store(d.made)
	return number
}
