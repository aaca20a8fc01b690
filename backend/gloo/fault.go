package gloo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/work"
)

// canceled says why a context ended. A context that ended by its deadline is a timeout, whatever
// its cause.
func canceled(ctx context.Context) error {
	err := ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) {
		if cause := context.Cause(ctx); cause != err {
			return fmt.Errorf("%w: %w: %w", work.ErrTimeout, err, cause)
		}
		return fmt.Errorf("%w: %w", work.ErrTimeout, err)
	}
	return &cancellation{err: err, cause: context.Cause(ctx)}
}

// cancellation is the end of a context that was cancelled.
type cancellation struct{ err, cause error }

func (c *cancellation) Error() string {
	if c.cause != c.err {
		return fmt.Sprintf("%v: %v: %v", work.ErrCanceled, c.err, c.cause)
	}
	return fmt.Sprintf("%v: %v", work.ErrCanceled, c.err)
}

func (c *cancellation) Unwrap() []error { return []error{work.ErrCanceled, c.err, c.cause} }

// Words is what other ranks are told: the cause that the program gave, or nothing.
func (c *cancellation) Words() string {
	if c.cause != c.err {
		return c.cause.Error()
	}
	return ""
}

// dueOf describes an operation on m that has begun at a time and waits for a rank. That is less than 0 if it is unknown.
func (s *session) dueOf(m transport.Mesh, o *called, peer int, since time.Time) *due {
	d := &due{wait: waitOf(o, peer, since), mesh: m, work: o.Work(), ctx: o.ctx, timeout: o.timeout, blame: s.blame}
	if s.checks {
		d.Turn = 1
	}
	d.waitsFor.Store(int64(peer))
	return d
}

// ask makes this rank ask the others why an operation runs out of time. The group ends soon after the end of that
// time, unless the operation ends before.
func (s *session) ask(d *due) {
	i := max(0, slices.Index(s.meshes, d.mesh))
	s.inquiries[i].add(s.meshes[i], d)
}

// giveUp ends the group because the context of an operation has ended. If that was by its deadline, the other ranks
// are asked first.
func (s *session) giveUp(d *due) {
	if cause := d.cause(); errors.Is(cause, work.ErrTimeout) {
		s.ask(d)
	} else {
		f := transport.NewFault(kindOf(cause), s.rank, s.rank, cause)
		f.Op, f.Seq = uint8(d.Op), d.seq
		d.mesh.Abort(f)
	}
}

// fail ends the group on all ranks because of something that happened here.
func (s *session) fail(m transport.Mesh, o *called, cause error, culprit int) {
	m.Abort(&transport.Fault{Kind: kindOf(cause), Rank: culprit, Reporter: s.rank, Op: uint8(o.Info().Op), Seq: o.Info().Seq, Err: cause})
}

// blame ends the group because an operation ran out of time, with the verdict on why.
func (s *session) blame(d *due, v blame.Verdict) { s.blameFor(d, v, d.cause()) }

// blameFor is blame with another cause.
func (s *session) blameFor(d *due, v blame.Verdict, cause error) {
	if s.direct != nil {
		s.direct.PollOnce() // a message that has come wins
	}
	if d.mesh.Fault() != nil || d.work.IsCompleted() {
		return
	}
	if g := s.memory(); g != nil && g.Err() != nil && time.Now().Before(d.Latest.Add(wordOfFault)) {
		return // a rank has ended the group, its reason is on the way, and this rank waits for nobody any more
	}
	if !errors.Is(cause, work.ErrTimeout) {
		return // its context was cancelled, and the operation says so
	}
	if v.Why == "" {
		v.Why = fmt.Sprintf("no rank sent on tag %d", d.Tag)
	}
	f := faultOf(v, s.rank, cause)
	f.Op, f.Seq = uint8(d.Op), d.seq
	d.mesh.Abort(f)
}

// faultOf is what self tells the other ranks of its verdict. cause is the error that made it look
// for one.
func faultOf(v blame.Verdict, self int, cause error) *transport.Fault {
	f := transport.NewFault(transport.FaultTimeout, v.Rank, self, fmt.Errorf("%w; %s", cause, v.Why))
	if v.Other >= 0 {
		f.Kind, f.Reporter, f.Err = transport.FaultLink, v.Other, &relayed{f.Err, v.Why}
	}
	return f
}

// failed turns the error of a request into the error of its operation. The mesh fails with any
// request.
func (s *session) failed(m transport.Mesh, o *called, r *transport.Request, err error) error {
	if m.Fault() == nil && !errors.Is(err, transport.ErrClosed) {
		s.fail(m, o, err, r.Peer)
	}
	var size *transport.SizeError
	if f := m.Fault(); f != nil && !errors.As(err, &size) {
		return s.faultError(o.Info(), f)
	}
	return s.requestError(o.Info(), r.Peer, err)
}

// mismatch ends the group because what rank sent for o does not fit.
func (s *session) mismatch(m transport.Mesh, o *called, rank int, err error) error {
	err = fmt.Errorf("%w: %w", work.ErrMismatch, err)
	s.mismatchTold.Store(true)
	s.fail(m, o, err, rank)
	return s.tell(&work.Error{Info: o.Info(), Peer: rank, Err: err})
}

// tell reports the failure of the group to backend.Options.Failed.
func (s *session) tell(err *work.Error) error {
	if s.onFailure != nil {
		s.onFailure(err)
	}
	return err
}

func (s *session) requestError(info work.Info, peer int, err error) error {
	var size *transport.SizeError
	var f *transport.Fault
	switch {
	case errors.As(err, &size):
		s.mismatchTold.Store(true)
		return s.tell(&work.Error{Info: info, Peer: size.Peer, Err: fmt.Errorf("%w: %w", work.ErrMismatch, err)})
	case errors.As(err, &f):
		return s.faultError(info, f)
	case errors.Is(err, transport.ErrClosed):
		err, peer = work.ErrClosed, -1
	}
	return &work.Error{Info: info, Peer: peer, Err: err}
}

// faultError is the error of an operation in a group that has failed with f, or was closed if that is nil.
func (s *session) faultError(info work.Info, f *transport.Fault) error {
	var left *departure
	if f == nil || f.Rank == s.rank && errors.As(f.Err, &left) {
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	if f.Kind == transport.FaultMismatch {
		s.mismatchTold.Store(true)
	}
	where := ""
	if f.Op != noOp && (f.Op != uint8(info.Op) || f.Seq != info.Seq) {
		where = fmt.Sprintf(" (in %v seq %d)", work.OpType(f.Op), f.Seq)
	}
	kind := sentinels[f.Kind]
	if f.Kind.OfLink() {
		kind = &work.LinkError{Ranks: [2]int{min(f.Rank, f.Reporter), max(f.Rank, f.Reporter)}, Err: kind}
	}
	return s.tell(&work.Error{Info: info, Peer: f.Culprit(), Err: &fault{what: f.Error() + where, kind: kind, f: f}})
}

// sentinels are work's errors for the kinds of faults.
var sentinels = map[transport.FaultKind]error{
	transport.FaultPeerDied: work.ErrPeerDied, transport.FaultPeerLeft: work.ErrPeerLeft,
	transport.FaultTimeout: work.ErrTimeout, transport.FaultCanceled: work.ErrCanceled,
	transport.FaultAborted: work.ErrAborted, transport.FaultMismatch: work.ErrMismatch,
	transport.FaultProtocol: work.ErrMismatch, transport.FaultPanicked: work.ErrPanicked,
	transport.FaultCorrupted: work.ErrCorrupted, transport.FaultLink: work.ErrTimeout,
}

// kindOf returns the kind of a fault whose cause is err.
func kindOf(err error) transport.FaultKind {
	var was *transport.Fault
	if errors.As(err, &was) {
		return was.Kind
	}
	for _, k := range []transport.FaultKind{
		transport.FaultPanicked, transport.FaultPeerDied, transport.FaultPeerLeft,
		transport.FaultTimeout, transport.FaultCanceled, transport.FaultMismatch, transport.FaultCorrupted,
	} {
		if errors.Is(err, sentinels[k]) {
			return k
		}
	}
	return transport.FaultAborted
}

// noOp stands for no operation in a transport.Fault.
const noOp = 0xff

// fault is the cause of an operation's error in a failed group. errors.Is finds the sentinel of
// package work in it, errors.As the transport.Fault.
type fault struct {
	what string
	kind error
	f    *transport.Fault
}

func (e *fault) Error() string { return e.what }

func (e *fault) Unwrap() []error { return []error{e.kind, e.f} }

// causedBy returns the fault for an abort with a cause. Backends above this one abort it when an
// operation of theirs fails. If the cause is such an operation's error, the fault takes its kind
// and its Peer.
func (s *session) causedBy(cause error) transport.Fault {
	f := transport.Fault{Kind: transport.FaultAborted, Rank: s.rank, Reporter: s.rank, Op: noOp, Err: cause}
	var e *work.Error
	var was *transport.Fault
	switch {
	case cause == nil || cause == work.ErrAborted:
		f.Err = nil
	case errors.As(cause, &e) && e.Peer >= 0 && e.Peer < s.size:
		kind, told := kindOf(e), errors.As(e, &was) && was.Reporter < s.size
		if e.Peer == s.rank && !told && blamesOthers(kind) {
			break // other ranks said nothing of the kind
		}
		f.Kind, f.Rank = kind, e.Peer
		if kind != transport.FaultMismatch { // which the backend above tells on every rank, see compareCalls
			f.Op, f.Seq = uint8(e.Op), e.Seq
		}
		first := &transport.Fault{Err: e.Err}
		if told {
			first, f.Reporter = was, was.Reporter
		}
		f.Err = &relayed{cause, first.Words()}
	case errors.As(cause, &was) && was.Kind == transport.FaultTimeout && was.Rank < 0 && was.Reporter < s.size,
		errors.As(cause, &was) && was.Kind.OfLink() && was.Rank < s.size && was.Reporter < s.size:
		f = *was // no rank is to blame
	case e == nil && errors.As(cause, &was) && was.Rank >= 0 && was.Rank < s.size: // of a rendezvous
		f.Kind, f.Rank, f.Reporter = was.Kind, was.Rank, was.Reporter
		f.Err = &relayed{cause, was.Words()}
	case errors.Is(cause, work.ErrMismatch):
		f.Kind = transport.FaultMismatch
	}
	return f
}

// blamesOthers reports whether a fault of kind k can only be another rank's.
func blamesOthers(k transport.FaultKind) bool {
	return k == transport.FaultPeerDied || k == transport.FaultTimeout || k == transport.FaultProtocol
}

// relayed is the cause of an abort after another fault. It keeps that fault's words.
type relayed struct {
	error
	words string
}

func (r *relayed) Unwrap() error { return r.error }

// Words returns the words of the first fault.
func (r *relayed) Words() string { return r.words }

// wordOfFault is how long a rank waits for the mesh to report the reason. The other ranks end an
// operation in shared memory before they report on the mesh.
const wordOfFault = time.Second

// deathCheck is how often it looks meanwhile whether the rank that ended the operation has died.
const deathCheck = 2 * time.Millisecond

// inMemory turns an error from shared memory into the error of an operation, and tells the other
// ranks.
func (s *session) inMemory(m transport.Mesh, info work.Info, err error) error {
	if err == nil {
		return nil
	}
	var at *shm.RankError
	if errors.As(err, &at) && m.Fault() == nil {
		culprit := at.Rank
		if s.clusters != nil {
			culprit = s.clusters.members[culprit]
		}
		err = s.renumbered(err)
		f := &transport.Fault{Rank: culprit, Reporter: s.rank, Op: uint8(info.Op), Seq: info.Seq, Err: err}
		var calls *transport.Disagreement
		switch {
		case errors.As(err, &calls):
			f.Kind, f.Err = transport.FaultMismatch, calls
			m.Abort(f)
		case errors.Is(err, shm.ErrMismatch):
			f.Kind = transport.FaultMismatch
			m.Abort(f)
		case errors.Is(err, shm.ErrLeft):
			f.Kind = transport.FaultPeerLeft
			m.Abort(f)
		default:
			died := s.awaitWord(m, at.Rank)
			switch {
			case m.Fault() != nil:
			case died != nil:
				f.Kind, f.Err = died.Kind, died.Err
				m.Abort(f)
			default:
				f.Kind = transport.FaultAborted
				if errors.As(s.renumbered(s.memory().CompareCalls(ended)), &calls) {
					f.Kind, f.Err = transport.FaultMismatch, calls
				}
				m.Abort(f)
			}
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
		if died := s.memory().Death(rank); died != nil {
			return died
		}
		select {
		case <-m.Failed():
		case <-t.C:
		}
	}
	return nil
}

// renumbered returns err with ranks of the group in place of ranks of the host.
func (s *session) renumbered(err error) error {
	if s.clusters == nil {
		return err
	}
	return renumbered(err, s.clusters.members)
}
