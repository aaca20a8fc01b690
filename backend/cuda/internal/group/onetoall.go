package group

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// oneToAll is the hosts' part of a broadcast from rank to rank. A rank posts the receive of a
// chunk, and then tells the sender that the chunk may come. The sender sends the chunk to each
// rank that has said so, and does not wait for the others.
type oneToAll struct {
	Route
	tag uint32

	mu    sync.Mutex
	cond  sync.Cond
	begun int   // chunks that can be sent
	sent  []int // for each chunk, to how many ranks it has been
	err   error // the first
}

func NewOneToAll(r Route, chunks int) *oneToAll {
	x := &oneToAll{Route: r, sent: make([]int, chunks)}
	x.cond.L = &x.mu
	return x
}

// A message of a broadcast has a tag that no user's has: the group's, then the
// number of the broadcast, then what it is.
const (
	OwnTags  = 1 << 31
	clearTag = 1 // clear to send, from who receives
)

// fillOneToAll enqueues a broadcast. At the root a chunk is copied from the source to the host, which
// sends it. Elsewhere the host receives a chunk. While the host sends it on, it is copied to the
// first tensor, and from there to the others, alone or together with chunks before it.
func (o *Operation) fillOneToAll(batch *feed) {
	l := &o.Legs[0]
	base := o.staging.Ptr()
	every := spreads(o.pieces, len(l.Dst))
	for k := range o.pieces {
		slot := base + driver.Ptr(k%o.slots)*driver.Ptr(o.slot)
		lo, hi := o.elements(l, k)
		n := (hi - lo) * l.size()
		if l.Src != nil {
			if n > 0 {
				batch.Copy(l.Src.Down, slot, l.Src.At(lo), n)
			}
		} else {
			batch.host(&o.turns, o.line.host, driver.Writes(slot, n))
			if n > 0 {
				batch.Copy(l.Dst[0].Up, l.Dst[0].At(lo), slot, n)
			}
		}
		if len(o.Relay.To) > 0 {
			batch.host(&o.relayed, o.line.relay, driver.Reads(slot, n))
		}
		if l.Src == nil && ((k+1)%every == 0 || k+1 == o.pieces) {
			from, _ := o.elements(l, k-k%every)
			Spread(batch, l.Dst, from, (hi-from)*l.size())
		}
	}
	if l.Src != nil {
		Spread(batch, append([]*place.Place{l.Src}, l.Dst...), 0, l.N*l.size())
	}
}

// Spread copies n bytes, from element lo on, from the first place to all others.
// The writer of an edge of the tree is the stream of its source's device.
func Spread(to Commander, all []*place.Place, lo, n int) {
	if n == 0 {
		return
	}
	for step := 1 << bits.Len(uint(len(all)-1)) >> 1; step > 0; step >>= 1 {
		for i := 0; i+step < len(all); i += 2 * step {
			to.Copy(all[i].Up, all[i+step].At(lo), all[i].At(lo), n)
		}
	}
}

// runOneToAll does the host's part of what fillOneToAll enqueued.
func (o *Operation) runOneToAll() error {
	x := o.Relay
	var wg sync.WaitGroup
	for _, rank := range x.To {
		wg.Go(func() { o.sendChunks(rank) })
	}
	receives := o.Legs[0].Src == nil
	if receives {
		wg.Go(func() { o.relayChunks() })
	}
	if receives {
		if err := o.receiveChunks(); err != nil {
			o.stop(err)
		}
	} else {
		o.relayChunks()
	}
	wg.Wait()
	return x.err
}

// PassChunk is the host's part of a chunk in an operation of one turn: it is
// received, unless this is the root, and then sent to all at once.
func (o *Operation) PassChunk(chunk []byte) error {
	x := o.Relay
	if x.From >= 0 {
		a, err := o.expect(chunk)
		if err == nil {
			err = o.arrived(a)
		}
		if err != nil {
			return err
		}
	}
	var wg sync.WaitGroup
	for _, rank := range x.To {
		wg.Go(func() {
			if err := o.sendChunk(rank, chunk); err != nil {
				o.stop(err)
			}
		})
	}
	wg.Wait()
	return x.err
}

// relayChunks says of each chunk that it may be sent, when it is on the host.
func (o *Operation) relayChunks() {
	x := o.Relay
	for k := 0; k < o.pieces && len(x.To) > 0; k++ {
		if err := o.begin(&o.relayed, k); err != nil {
			o.stop(err)
			return
		}
		x.mu.Lock()
		x.begun++
		x.cond.Broadcast()
		x.mu.Unlock()
	}
}

// sendChunks sends all chunks to a rank.
func (o *Operation) sendChunks(to int) {
	x := o.Relay
	for k := range o.pieces {
		x.mu.Lock()
		for x.begun <= k && x.err == nil {
			x.cond.Wait()
		}
		over := x.err != nil
		x.mu.Unlock()
		if over {
			return
		}
		if err := o.sendChunk(to, o.chunk(k)); err != nil {
			o.stop(err)
			return
		}
		x.mu.Lock()
		x.sent[k]++
		last := x.sent[k] == len(x.To)
		x.mu.Unlock()
		if last {
			o.done(&o.relayed, k)
		}
	}
}

// sendChunk sends a chunk when its receiver is clear to send, and has called the
// same: there may be no board between the two.
func (o *Operation) sendChunk(to int, chunk []byte) error {
	ready := make([]byte, 16)
	t, err := tensor.Of(ready, len(ready))
	if err != nil {
		return err
	}
	cpu, opts := o.B.CPU, backend.P2POptions{Tag: o.Relay.tag | clearTag, Timeout: o.Left()}
	if err := o.Wait(cpu.Recv(o.Ctx, t, to, opts)); err != nil {
		return err
	}
	theirs := board.Said{binary.LittleEndian.Uint64(ready), binary.LittleEndian.Uint64(ready[8:])}
	if mine := o.Print.Said(); theirs != mine {
		return &work.Error{Info: o.Info(), Peer: to, Err: fmt.Errorf("cuda: %w", board.Disagree(o.number, o.B.Rank, mine, to, theirs))}
	}
	if t, err = tensor.Of(chunk, len(chunk)); err != nil {
		return err
	}
	opts.Tag = o.Relay.tag
	return o.Wait(cpu.Send(o.Ctx, t, to, opts))
}

// receiveChunks receives all chunks. It makes room for those to come as far
// ahead as there are slots, less the one that is on its way to the device.
func (o *Operation) receiveChunks() error {
	ahead := make([]arrival, o.slots)
	next := 0
	for k := range o.pieces {
		for ; next < o.pieces && next < k+max(o.slots-1, 1); next++ {
			err := o.begin(&o.turns, next)
			if err == nil {
				ahead[next%o.slots], err = o.expect(o.chunk(next))
			}
			if err != nil {
				return err
			}
		}
		if err := o.arrived(ahead[k%o.slots]); err != nil {
			return err
		}
		o.done(&o.turns, k)
	}
	return nil
}

// arrival is a chunk that may come.
type arrival struct{ data, clear *work.Work }

// expect makes room for a chunk and says so.
func (o *Operation) expect(chunk []byte) (a arrival, err error) {
	t, err := tensor.Of(chunk, len(chunk))
	if err != nil {
		return a, err
	}
	cpu, from, opts := o.B.CPU, o.Relay.From, backend.P2POptions{Tag: o.Relay.tag, Timeout: o.Left()}
	if a.data, err = cpu.Recv(o.Ctx, t, from, opts); err != nil {
		return a, err
	}
	mine := o.Print.Said()
	ready := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, mine[0]), mine[1])
	if t, err = tensor.Of(ready, len(ready)); err != nil {
		return a, err
	}
	opts.Tag |= clearTag
	a.clear, err = cpu.Send(o.Ctx, t, from, opts)
	return a, err
}

func (o *Operation) arrived(a arrival) error {
	if err := o.Wait(a.clear, nil); err != nil {
		return err
	}
	return o.Wait(a.data, nil)
}

// Chunk returns the bytes of a chunk on the host.
func (o *Operation) chunk(k int) []byte {
	lo, hi := o.elements(&o.Legs[0], k)
	return o.staging.Bytes()[k%o.slots*o.slot:][:(hi-lo)*o.Legs[0].size()]
}

// stop ends a broadcast on all ranks. The first error counts.
func (o *Operation) stop(err error) {
	x := o.Relay
	x.mu.Lock()
	first := x.err == nil
	if first {
		x.err = err
	}
	x.cond.Broadcast()
	x.mu.Unlock()
	if first {
		err = o.named(err)
		o.B.Fail(fmt.Errorf("the group has failed: %w", err), err)
	}
}
