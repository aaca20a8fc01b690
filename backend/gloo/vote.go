package gloo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// vote is how ranks agree that something has succeeded on all of them: each
// tells each other why it has not.
type vote struct {
	mesh  transport.Mesh
	mine  [voteSize]byte
	sends []*transport.Request
	recvs []*transport.Request // by rank, nil for the own one
	votes votes
	late  sync.Once
}

const (
	voteSlot = 9 << 56 // no prefix of Gloo's

	// A vote is one byte that says yes or no, and why not, padded.
	voteSize = 256
	voteYes  = 1
)

// newVote is ready to hear the others.
func newVote(m transport.Mesh) *vote {
	v := &vote{mesh: m, recvs: make([]*transport.Request, m.Size())}
	for peer := range v.recvs {
		if peer != m.Rank() {
			v.recvs[peer] = v.post(peer, make([]byte, voteSize), m.Recv)
		}
	}
	return v
}

func (v *vote) post(peer int, buf []byte, how func(*transport.Request)) *transport.Request {
	r := transport.NewRequest()
	r.Peer, r.Slot, r.Buf = peer, voteSlot, buf
	how(r)
	return r
}

// cast tells the others how it went here.
func (v *vote) cast(err error) {
	if err == nil {
		v.mine[0] = voteYes
	} else {
		copy(v.mine[1:], err.Error())
	}
	for peer := range v.recvs {
		if peer != v.mesh.Rank() {
			v.sends = append(v.sends, v.post(peer, v.mine[:], v.mesh.Send))
		}
	}
}

// hear returns once all other ranks have voted. It calls against with the first vote against at
// once: this rank may be waiting for that rank in vain.
func (v *vote) hear(ctx context.Context, against func(error)) error {
	heard := make(chan error)
	for peer, r := range v.recvs {
		if r == nil {
			continue
		}
		go func() {
			err := v.wait(ctx, peer, r)
			v.votes.add(peer)
			if err == nil && r.Buf[0] != voteYes {
				err = &dissent{peer, text(r.Buf[1:])}
			}
			heard <- err
		}()
	}
	var first error
	for range v.mesh.Size() - 1 {
		if err := <-heard; err != nil && first == nil {
			first = err
			against(err)
		}
	}
	return first
}

// dissent is a vote against.
type dissent struct {
	rank int
	why  string
}

func (d *dissent) Error() string { return fmt.Sprintf("rank %d: %s", d.rank, d.why) }

// text is the part of b before the padding, made fit to print.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			b = b[:i]
			break
		}
	}
	return fmt.Sprintf("%q", b)
}

// end returns once the others have this rank's vote.
func (v *vote) end(ctx context.Context) error {
	for _, r := range v.sends {
		if err := v.wait(ctx, r.Peer, r); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for a request. When ctx ends, so does the mesh: a rank that is missing now would be
// missed later.
func (v *vote) wait(ctx context.Context, peer int, r *transport.Request) error {
	select {
	case <-r.Done():
	case <-ctx.Done():
		v.late.Do(func() { v.giveUp(ctx, peer) })
		<-r.Done()
	}
	return r.Err()
}

// giveUp ends the mesh because ctx has ended before peer has voted. If time has run out, it asks all
// ranks whom they wait for: peer may itself wait for a rank that has stopped.
func (v *vote) giveUp(ctx context.Context, peer int) {
	self := v.mesh.Rank()
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		v.mesh.Abort(transport.CanceledBy(ctx, self))
		return
	}
	now := time.Now()
	c := blame.Call{Until: now, Latest: now.Add(blame.LeadMost)}
	d := &due{wait: wait{Call: c}, work: new(work.Work), ctx: ctx, mesh: v.mesh}
	d.waitsFor.Store(int64(peer))
	d.blame = func(_ *due, why blame.Verdict) { v.mesh.Abort(faultOf(why, self, ctx.Err())) }
	q := newInquiry(slog.New(slog.DiscardHandler), nil, false)
	q.add(v.mesh, d)
	q.wg.Wait()
}

// votes are the ranks that have voted.
type votes struct {
	mu   sync.Mutex
	have map[int]bool
}

func (v *votes) add(rank int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.have == nil {
		v.have = make(map[int]bool)
	}
	v.have[rank] = true
}

// report says which ranks are connected but have not said whether they share memory.
func (v *vote) report(context.Context) (string, []slog.Attr) {
	v.votes.mu.Lock()
	defer v.votes.mu.Unlock()
	var ranks []int
	for r := range v.recvs {
		if r != v.mesh.Rank() && !v.votes.have[r] {
			ranks = append(ranks, r)
		}
	}
	if len(ranks) == 0 {
		return "", nil
	}
	return "waiting for " + waiting.Ranks(ranks) + " to say whether they share memory", nil
}
