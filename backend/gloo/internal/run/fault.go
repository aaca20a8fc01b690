package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/backend/gloo/internal/hostmesh"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/work"
)

// dueOf describes an operation on m that has begun at a time and waits for a rank. That is less than 0 if it is unknown.
func (s *session) dueOf(m transport.Mesh, o *called, peer int, since time.Time) *ask.Operation {
	d := &ask.Operation{Call: o.wait(peer, since), Mesh: m, Work: o.Work(), Ctx: o.ctx, Timeout: o.timeout, Blame: s.blame}
	if s.checks {
		d.Turn = 1
	}
	d.WaitsFor(peer)
	return d
}

// ask makes this rank ask the others why an operation runs out of time. The group ends soon after the end of that
// time, unless the operation ends before.
func (s *session) ask(d *ask.Operation) {
	i := max(0, slices.Index(s.Meshes, d.Mesh))
	s.inquiries[i].Add(s.Meshes[i], d)
}

// giveUp ends the group because the context of an operation has ended. If that was by its deadline, the other ranks
// are asked first.
func (s *session) giveUp(d *ask.Operation) {
	if cause := d.Cause(); errors.Is(cause, work.ErrTimeout) {
		s.ask(d)
	} else {
		f := transport.NewFault(blame.KindOf(cause), s.rank, s.rank, cause)
		f.Op, f.Seq = uint8(d.Op), d.Seq
		d.Mesh.Abort(f)
	}
}

// fail ends the group on all ranks because of something that happened here.
func (s *session) fail(m transport.Mesh, info work.Info, cause error, culprit int) {
	m.Abort(&transport.Fault{Kind: blame.KindOf(cause), Rank: culprit, Reporter: s.rank, Op: uint8(info.Op), Seq: info.Seq, Err: cause})
}

// blame ends the group because an operation ran out of time, with the verdict on why.
func (s *session) blame(d *ask.Operation, v blame.Verdict) { s.blameFor(d, v, d.Cause()) }

// blameFor is blame with another cause.
func (s *session) blameFor(d *ask.Operation, v blame.Verdict, cause error) {
	if s.Direct != nil {
		s.Direct.PollOnce() // a message that has come wins
	}
	if d.Mesh.Fault() != nil || d.Work.IsCompleted() {
		return
	}
	if g := s.Memory; g != nil && g.Err() != nil && time.Now().Before(d.Latest.Add(wordOfFault)) {
		return // a rank has ended the group, its reason is on the way, and this rank waits for nobody any more
	}
	if !errors.Is(cause, work.ErrTimeout) {
		return // its context was cancelled, and the operation says so
	}
	if v.Why == "" {
		v.Why = fmt.Sprintf("no rank sent on tag %d", d.Tag)
	}
	f := v.Fault(s.rank, cause)
	f.Op, f.Seq = uint8(d.Op), d.Seq
	d.Mesh.Abort(f)
}

// failed turns the error of a request into the error of its operation. The mesh fails with any
// request.
func (s *session) failed(m transport.Mesh, info work.Info, r *transport.Request, err error) error {
	if m.Fault() == nil && !errors.Is(err, transport.ErrClosed) {
		s.fail(m, info, err, r.Peer)
	}
	var size *transport.SizeError
	var f *transport.Fault
	switch {
	case errors.As(err, &size):
		s.mismatchTold.Store(true)
		return s.tell(&work.Error{Info: info, Peer: size.Peer, Err: fmt.Errorf("%w: %w", work.ErrMismatch, err)})
	case m.Fault() != nil:
		return s.faultError(info, m.Fault())
	case errors.As(err, &f):
		return s.faultError(info, f)
	case errors.Is(err, transport.ErrClosed):
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	return &work.Error{Info: info, Peer: r.Peer, Err: err}
}

// mismatch ends the group because what rank sent for an operation does not fit.
func (s *session) mismatch(m transport.Mesh, info work.Info, rank int, err error) error {
	err = fmt.Errorf("%w: %w", work.ErrMismatch, err)
	s.mismatchTold.Store(true)
	s.fail(m, info, err, rank)
	return s.tell(&work.Error{Info: info, Peer: rank, Err: err})
}

// abort ends the group with a cause, in the operation of info unless that is nil.
func (s *session) abort(cause error, info *work.Info) {
	if errors.Is(cause, work.ErrMismatch) {
		s.mismatchTold.Store(true)
	}
	f := blame.FaultBy(cause, s.rank, s.size)
	if info != nil {
		f.Op, f.Seq = uint8(info.Op), info.Seq
	}
	s.end(f)
}

// tell reports the failure of the group to backend.Options.Failed.
func (s *session) tell(err *work.Error) error {
	if s.onFailure != nil {
		s.onFailure(err)
	}
	return err
}

// faultError is the error of an operation in a group that has failed with f, or was closed if that is nil.
func (s *session) faultError(info work.Info, f *transport.Fault) error {
	err := blame.Error(info, s.rank, f)
	if err.Err == work.ErrClosed {
		return err
	}
	if f.Kind == transport.FaultMismatch {
		s.mismatchTold.Store(true)
	}
	return s.tell(err)
}

// wordOfFault is how long a rank waits for the mesh to report the reason. The other ranks end an
// operation in shared memory before they report on the mesh. On busy CPUs the report may take more than a second.
const wordOfFault = 5 * time.Second

// deathCheck is how often it looks meanwhile whether the rank that ended the operation has died.
const deathCheck = 2 * time.Millisecond

// ended is for comparing the calls that have been made, without waiting for others.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// inMemory turns an error from shared memory into the error of an operation, and tells the other
// ranks.
func (s *session) inMemory(m transport.Mesh, info work.Info, err error) error {
	if err == nil {
		return nil
	}
	var at *shm.RankError
	if errors.As(err, &at) && m.Fault() == nil {
		culprit := at.Rank
		if s.members != nil {
			culprit = s.members[culprit]
		}
		err = hostmesh.Renumbered(err, s.members)
		f := &transport.Fault{Rank: culprit, Reporter: s.rank, Op: uint8(info.Op), Seq: info.Seq, Err: err}
		var calls *transport.Disagreement
		switch {
		case errors.As(err, &calls):
			f.Kind, f.Err = transport.FaultMismatch, calls
		case errors.Is(err, shm.ErrMismatch):
			f.Kind = transport.FaultMismatch
		case errors.Is(err, shm.ErrLeft):
			f.Kind = transport.FaultPeerLeft
		default:
			f.Kind = transport.FaultAborted
			if died := s.awaitWord(m, at.Rank); died != nil {
				f.Kind, f.Err = died.Kind, died.Err
			} else if m.Fault() == nil && errors.As(hostmesh.Renumbered(s.Memory.CompareCalls(ended), s.members), &calls) {
				f.Kind, f.Err = transport.FaultMismatch, calls
			}
		}
		if m.Fault() == nil {
			m.Abort(f)
		}
	}
	if f := m.Fault(); f != nil {
		return s.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: err}
}

// awaitWord waits until the mesh has failed or a rank of the host, which has ended the memory, is known to
// have died, wordOfFault at most. It returns the fault of the death.
func (s *session) awaitWord(m transport.Mesh, rank int) *transport.Fault {
	t := time.NewTicker(deathCheck)
	defer t.Stop()
	for end := time.Now().Add(wordOfFault); m.Fault() == nil && time.Now().Before(end); {
		if died := s.Memory.Death(rank); died != nil {
			return died
		}
		select {
		case <-m.Failed():
		case <-t.C:
		}
	}
	return nil
}
