package transport

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
)

// Mesh connects one rank of a group with all the others. Messages match by (peer, slot) in the
// order in which they were posted, each receive with one send, as Gloo's unbound buffers do.
//
// Send, Recv and RecvAny post a request and return at once. They may be called from many
// goroutines. The mesh owns a request and its buffer until the request completes, with or
// without an error. Then it no longer reads or writes the buffer.
type Mesh interface {
	Rank() int
	Size() int

	// Send posts r.Buf to r.Peer on r.Slot. It completes when the buffer may be
	// used again; the peer need not have received it.
	Send(r *Request)

	// Recv posts a receive of exactly len(r.Buf) bytes from r.Peer on r.Slot. A
	// message of another length ends the request with a *SizeError and never
	// writes outside r.Buf.
	Recv(r *Request)

	// RecvAny posts a receive from the first rank that sends on r.Slot. On
	// completion r.Peer is that rank. If a Recv waits for a message too, the Recv gets it.
	RecvAny(r *Request)

	// Abort ends every pending and later request with f, and tells the other ranks if possible.
	// Only the first fault of a mesh counts. Abort does not wait. Close still has to be called.
	Abort(f *Fault)

	// Fault returns what ended the mesh, nil while it works.
	Fault() *Fault

	// Failed is closed once the mesh has a fault. A mesh also fails when a peer reports a fault, or
	// when a request needs a peer that has died or left.
	Failed() <-chan struct{}

	// OnDeath has f called with the fault of each peer that dies while no request needs it: the mesh
	// goes on. f is called for earlier deaths too. It must not block, nor call the mesh.
	OnDeath(f func(*Fault))

	// SetProgress sets the number of operations that this rank has issued and completed. The
	// mesh tells them to other ranks that diagnose a timeout.
	SetProgress(issued, completed uint64)

	// SetWaiting sets what says for whom this rank waits besides the requests on this mesh, and in
	// which operations. It is called with locks of the mesh held.
	SetWaiting(f func() Waiting)

	// Diagnose asks every peer that can answer for its progress and for its connections. These
	// are the ones with the ranks that it waits for, and with the ranks about, two at most. It
	// waits at most limit, and returns one Health for each rank. The ranks that are asked ask
	// those ranks in turn, so a second Diagnose knows more.
	Diagnose(limit time.Duration, about ...int) []Health

	// Close tells the peers that this rank leaves. It sends queued messages, for a second at
	// most, or for ten while this process has to wait for a CPU. It frees everything, and waits
	// for its goroutines. Pending requests end with
	// ErrClosed. It may be called more than once.
	Close() error
}

// Poller is a mesh that works faster in a goroutine that waits for it.
type Poller interface {
	// PollUntil returns when w has finished, or soon.
	PollUntil(w Waiter)
	// ResumeReaders is for those who wait without PollUntil.
	ResumeReaders()
}

// Waiter is what a goroutine waits for while it polls.
type Waiter interface {
	// Finished reports whether the wait is over. It is called often, without locks of the mesh.
	Finished() bool
}

// Waiting says for whom a rank waits.
type Waiting struct {
	Op    uint8 // of the oldest collective under way (a work.OpType), NoOp if there is none
	Peers map[int]Needs
}

// Needs is why a rank waits for a peer.
type Needs uint8

const (
	NeedsData Needs = 1 << iota // in a collective
	NeedsSend                   // to send it a message
	NeedsRecv                   // to receive one
)

// Health is what a rank knows of a peer when it diagnoses a timeout.
type Health struct {
	Rank      int
	Native    bool   // the peer is a rank of this library, so it can answer
	Answered  bool   // it did
	Departed  bool   // it has closed the group, or has died
	Died      bool   // it has died
	Issued    uint64 // operations it has issued, if it answered
	Completed uint64 // operations it has completed, if it answered
	Op        uint8  // of the oldest collective under way, NoOp if there is none, if it answered
	Links     []Link // its connections with ranks that it waits for or that Diagnose asked about, all of this rank's
}

// Link is what a rank knows of its connection with a peer when somebody diagnoses a timeout.
type Link struct {
	Peer     int
	Waits    bool          // the rank waits for the peer
	Sends    bool          // then: to send it a message
	Recvs    bool          // or to receive one
	Answered bool          // the peer has answered the rank's last question
	Silent   time.Duration // if it has not: since when
	Quiet    time.Duration // for how long nothing has come from it; 0 if that is unknown
	RTT      time.Duration // the median time of the last answers, 0 if there was none
	Rate     uint64        // bytes a second of messages that went to and fro between the last questions
}

// Request is one posted send or receive. Its owner sets Peer, Slot and Buf,
// posts it, and may use it again after it has received from Done. Make one
// with NewRequest or call Init.
type Request struct {
	Peer int
	Slot uint64
	Buf  []byte

	// Grows, if not 0, makes a Recv take so many bytes into memory that grows as they arrive. It is
	// for lengths that a peer has chosen. Buf is nil in the post, and the message at the end. Only
	// meshes of package wire know it.
	Grows int

	// Owner, if not nil, is told of the end instead of Done.
	Owner Owner

	// Next and Tag are for the mesh that holds the request.
	Next *Request
	Tag  uint64

	err  error
	done chan struct{}
}

// Owner is told when a request ends. The mesh may hold locks then, and so may the goroutine
// that posts, if the request ends in the post. So Ended neither waits nor calls the mesh. The
// request may be used again from then on.
type Owner interface {
	Ended(r *Request)
}

// Sharer owns a receive-from-any that is posted on several meshes at once, as a request on
// each. Exactly one of its requests takes a message. Such meshes have a method
// Withdraw(*Request), which forgets a request that has no message yet. If no peer is left on a
// mesh, the request there ends with FaultPeerLeft, and the mesh goes on.
type Sharer interface {
	Owner
	// Claim is called when there is a message for r, perhaps more than once. If it returns
	// false, another mesh has a message, and r is forgotten without an end. Like Ended, it
	// neither waits nor calls a mesh.
	Claim(r *Request) bool
}

// Shared reports whether the request has a Sharer.
func (r *Request) Shared() bool {
	_, ok := r.Owner.(Sharer)
	return ok
}

// Claim asks the Sharer, if there is one, whether the mesh may take a message for r.
func (r *Request) Claim() bool {
	s, ok := r.Owner.(Sharer)
	return !ok || s.Claim(r)
}

// NewRequest returns a request that is ready to be posted.
func NewRequest() *Request {
	r := new(Request)
	r.Init()
	return r
}

// Init makes the zero Request ready to be posted. One that has an Owner needs no Init.
func (r *Request) Init() { r.done = make(chan struct{}, 1) }

// Len returns how many bytes the request sends or receives.
func (r *Request) Len() int { return max(len(r.Buf), r.Grows) }

// Complete ends the request. Only the mesh calls it, once for each post.
func (r *Request) Complete(err error) {
	r.err = err
	if r.Owner != nil {
		r.Owner.Ended(r)
		return
	}
	r.done <- struct{}{}
}

// Link implements Linked.
func (r *Request) Link() **Request { return &r.Next }

// Done delivers one value for each completed post.
func (r *Request) Done() <-chan struct{} { return r.done }

// Err returns how the request ended; it is valid after a receive from Done, and in Ended.
func (r *Request) Err() error { return r.err }

// ErrClosed ends requests on a mesh that was closed by its own rank.
var ErrClosed = errors.New("transport: mesh closed")

// SizeError ends a receive whose message had another length.
type SizeError struct {
	Peer      int
	Slot      uint64
	Want, Got uint64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("transport: rank %d sent %d bytes on slot %#x where %d were expected: the ranks disagree on operation, size or dtype", e.Peer, e.Got, e.Slot, e.Want)
}

// FaultKind tells why a mesh ended.
type FaultKind uint8

const (
	// FaultPeerDied: an operation needed a rank whose connection had ended without a goodbye.
	FaultPeerDied FaultKind = iota + 1
	// FaultPeerLeft: an operation needed a rank that had closed the group.
	FaultPeerLeft
	// FaultTimeout: an operation ran out of time; Rank was missing.
	FaultTimeout
	// FaultCanceled: the context of an operation was cancelled on Rank.
	FaultCanceled
	// FaultAborted: Rank aborted the group or a Work.
	FaultAborted
	// FaultMismatch: ranks disagreed on an operation; the message of Rank did not fit.
	FaultMismatch
	// FaultProtocol: Rank sent bytes that no rank sends.
	FaultProtocol
	// FaultPanicked: a function of Rank's program panicked in an operation.
	FaultPanicked

	// Faults of the link between Rank and Reporter. Both ranks are alive, and neither is to blame.

	// FaultCorrupted: bytes from Rank to Reporter were changed on the way.
	FaultCorrupted
	// FaultLink: the ranks cannot reach each other.
	FaultLink

	// FaultLast is the last kind.
	FaultLast = FaultLink
)

// OfLink reports whether faults of kind k are those of a link.
func (k FaultKind) OfLink() bool { return k == FaultCorrupted || k == FaultLink }

func (k FaultKind) String() string {
	switch k {
	case FaultPeerDied:
		return "died"
	case FaultPeerLeft:
		return "left the group while others needed it"
	case FaultTimeout:
		return "did not take part in time"
	case FaultCanceled:
		return "cancelled the operation"
	case FaultAborted:
		return "aborted the group"
	case FaultMismatch:
		return "sent a message that does not fit"
	case FaultProtocol:
		return "sent bytes that are no message"
	case FaultPanicked:
		return "panicked"
	case FaultCorrupted:
		return "changed bytes"
	case FaultLink:
		return "does not work"
	}
	return fmt.Sprintf("fault %d", uint8(k))
}

// Values of Fault.Op that are no work.OpType.
const (
	NoOp     = 0xff // the fault belongs to no operation
	Uncalled = 0xfe // it belongs to an operation that the reporter has not called
)

// NewFault returns a fault that belongs to no operation.
func NewFault(kind FaultKind, rank, reporter int, err error) *Fault {
	return &Fault{Kind: kind, Rank: rank, Reporter: reporter, Op: NoOp, Err: err}
}

// CanceledBy returns the fault of rank self, whose context was cancelled while it connected. If the
// cause blames a rank, so does the fault.
func CanceledBy(ctx context.Context, self int) *Fault {
	f := NewFault(FaultCanceled, self, self, context.Cause(ctx))
	var of interface{ Culprit() int }
	if errors.As(f.Err, &of) {
		f.Kind, f.Rank = FaultAborted, of.Culprit()
	}
	return f
}

// Fault is why a mesh ended and who caused it.
type Fault struct {
	Kind     FaultKind
	Rank     int    // the rank that caused it, -1 if unknown; of a link, one end
	Reporter int    // the rank that noticed it, -1 if unknown; of a link, the other end
	Op       uint8  // the operation (a work.OpType) in which it was noticed, NoOp if none, or Uncalled
	Seq      uint64 // that operation's sequence number
	Err      error  // what the reporter noticed; may be nil
}

func (f *Fault) Error() string {
	if why := f.why(); f.Kind == FaultTimeout && f.Rank < 0 && why != "" {
		if f.Reporter >= 0 {
			why += fmt.Sprintf(" (noticed by rank %d)", f.Reporter)
		}
		return why // nobody is to blame
	}
	s := fmt.Sprintf("rank %d %v", f.Rank, f.Kind)
	if f.Rank < 0 {
		s = fmt.Sprintf("some rank %v", f.Kind)
	}
	switch {
	case f.Kind.OfLink():
		s = fmt.Sprintf("link between %d and %d", min(f.Rank, f.Reporter), max(f.Rank, f.Reporter))
	case f.Reporter != f.Rank && f.Reporter >= 0:
		s += fmt.Sprintf(" (noticed by rank %d)", f.Reporter)
	}
	if why := f.why(); why != "" {
		s += ": " + why
	}
	return s
}

// Unwrap returns Err.
func (f *Fault) Unwrap() error { return f.Err }

// Culprit returns the rank to blame, -1 if there is none.
func (f *Fault) Culprit() int {
	if f.Kind.OfLink() {
		return -1
	}
	return f.Rank
}

// MaxWords is how many bytes of text about a fault's cause go to other ranks.
const MaxWords = 512

// why returns the text about the cause: f.Err.Words() if there is such a method, else
// f.Err.Error().
func (f *Fault) why() string {
	if w, ok := f.Err.(interface{ Words() string }); ok {
		return w.Words()
	}
	if f.Err == nil {
		return ""
	}
	return f.Err.Error()
}

// Words returns the text about the cause that other ranks get: at most MaxWords bytes in one
// line, up to the first empty line.
func (f *Fault) Words() string {
	said, _, _ := strings.Cut(f.why(), "\n\n")
	said = strings.ReplaceAll(strings.TrimSpace(said), "\n", "; ")
	if len(said) > MaxWords {
		said = strings.ToValidUTF8(said[:MaxWords], "")
	}
	return said
}

// RemoteCause returns the cause of a fault from the text that another rank sent, nil if it is empty.
// Characters that cannot be printed become question marks.
func RemoteCause(words []byte) error {
	if len(words) == 0 {
		return nil
	}
	return errors.New(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, string(words)))
}
