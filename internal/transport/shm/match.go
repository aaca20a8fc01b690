package shm

import (
	"math/bits"

	"github.com/c10d-go/c10d/internal/transport"
)

// buckets is how many lists the waiting requests and messages are spread over, by slot.
const buckets = 256

func bucketOf(slot uint64) int { return int(slot * 0x9e3779b97f4a7c15 >> 56) }

// arrival is a message that came before its receive was posted.
type arrival struct {
	next  *arrival
	from  int
	slot  uint64
	total uint64
	addr  uint64 // its place in the sender's arena, 0 if the data are sent
	id    uint32 // the sender's transfer of the rest
	data  []byte // what has come so far
	class int
}

// transfer is a message of several frames, at the sender or at the receiver.
type transfer struct {
	next *transfer
	r    *transport.Request
	peer int
	id   uint32 // at this rank
	far  uint32 // at the other rank
	n    int    // bytes that are through
	addr uint64 // the message's place in the sender's arena, from which the receiver copies it; 0 if it is sent
}

func (a *arrival) Link() **arrival { return &a.next }

func (x *transfer) Link() **transfer { return &x.next }

// table numbers the transfers of one direction, from 1.
type table struct {
	all  []*transfer
	free *transfer
}

func (m *Mesh) transfer(t *table, r *transport.Request, p *peer) *transfer {
	x := t.free
	if x != nil {
		t.free = x.next
	} else {
		x = &transfer{id: uint32(len(t.all)) + 1}
		t.all = append(t.all, x)
	}
	*x = transfer{id: x.id, r: r, peer: p.rank}
	return x
}

func (m *Mesh) release(t *table, x *transfer) {
	x.r, x.next = nil, t.free
	t.free = x
}

func (t *table) get(id uint32, p *peer) *transfer {
	if id == 0 || id > uint32(len(t.all)) {
		return nil
	}
	if x := t.all[id-1]; x.r != nil && x.peer == p.rank {
		return x
	}
	return nil
}

func (t *table) drop(err error) {
	for _, x := range t.all {
		if r := x.r; r != nil {
			x.r = nil
			r.Complete(err)
		}
	}
}

// stashClasses is the number of sizes in which arrivals have memory: none, 64 bytes, and then
// twice as much each, up to eager.
const stashClasses = 12

func classOf(n int) int {
	if n == 0 {
		return 0
	}
	return max(bits.Len(uint(n-1))-6, 0) + 1
}

func (m *Mesh) getArrival(n int) *arrival {
	c := classOf(n)
	a := m.spares[c]
	if a == nil {
		a = &arrival{class: c}
		if c > 0 {
			a.data = make([]byte, 32<<c)
		}
	} else {
		m.spares[c], a.next = a.next, nil
		m.spare -= a.cost()
	}
	a.data = a.data[:n]
	return a
}

func (m *Mesh) putArrival(a *arrival) {
	if m.spare < maxSpare {
		a.next = m.spares[a.class]
		m.spares[a.class] = a
		m.spare += a.cost()
	}
}

// cost is about the memory that a takes.
func (a *arrival) cost() int { return 128 + cap(a.data) }
