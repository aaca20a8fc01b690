package gloo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
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
	late  sync.Once

	mu    sync.Mutex
	voted []bool // by rank
}

const (
	voteSlot = 9 << 56 // no prefix of Gloo's

	// A vote is one byte that says yes or no, and why not, padded.
	voteSize = 256
	voteYes  = 1
)

// newVote is ready to hear the others.
func newVote(m transport.Mesh) *vote {
	v := &vote{mesh: m, recvs: make([]*transport.Request, m.Size()), voted: make([]bool, m.Size())}
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
			v.mu.Lock()
			v.voted[peer] = true
			v.mu.Unlock()
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
	c := blame.Call{Until: now, Latest: now.Add(4 * blame.AskFor)}
	o := &ask.Operation{Call: c, Mesh: v.mesh, Work: new(work.Work), Ctx: ctx}
	o.WaitsFor(peer)
	o.Blame = func(_ *ask.Operation, why blame.Verdict) { v.mesh.Abort(why.Fault(self, ctx.Err())) }
	q := ask.New(slog.New(slog.DiscardHandler), nil, false)
	q.Add(v.mesh, o)
	q.Wait()
}

// report says which ranks are connected but have not said whether they share memory.
func (v *vote) report(context.Context) (string, []slog.Attr) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var ranks []int
	for r := range v.recvs {
		if r != v.mesh.Rank() && !v.voted[r] {
			ranks = append(ranks, r)
		}
	}
	if len(ranks) == 0 {
		return "", nil
	}
	return "waiting for " + waiting.Ranks(ranks) + " to say whether they share memory", nil
}
