package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

// noticeStore is where the ranks of a group tell each other why it cannot be made. st is for this
// run alone.
func noticeStore(st store.Store, group string) store.Store {
	return store.Prefix("c10d-go/notice/"+group, st)
}

// culprit is an error that knows which rank caused it, -1 if none did.
type culprit interface{ Culprit() int }

// kindLists is the kind of a fault that matches ErrGroupMismatch.
const kindLists = "lists"

// told is another rank's fault.
type told struct {
	*meet.Fault
	own error // what happened to this rank
}

func (t told) Error() string {
	cause := t.own
	for next := errors.Unwrap(cause); next != nil; next = errors.Unwrap(cause) {
		cause = next
	}
	text := t.Fault.Error()
	if errors.As(t.own, new(*meet.Fault)) || strings.Contains(text, cause.Error()) {
		return text // the fault has ended what this rank did, or both have one cause
	}
	return fmt.Sprintf("%s (this rank: %v)", text, t.own)
}

func (t told) Unwrap() []error {
	errs := []error{t.Fault, t.own}
	if t.Kind == kindLists {
		errs = append(errs, ErrGroupMismatch)
	}
	return errs
}

// tell posts err, the reason why this rank cannot make the group. It returns the error for the
// caller: err, unless another rank had failed before. ranks are the members, rank is this one's place.
func tell(ctx context.Context, n *meet.Notice, ranks []int, rank int, err error) error {
	var f *meet.Fault
	if errors.As(err, &f) || errors.As(context.Cause(ctx), &f) {
		return told{f, err}
	}
	if why := context.Cause(ctx); errors.Is(err, context.Canceled) && why != nil && !errors.Is(err, why) {
		err = fmt.Errorf("%w: %w", err, why)
	}
	mine := meet.Fault{Rank: ranks[rank], Text: err.Error(), Late: errors.Is(err, context.DeadlineExceeded)}
	var c culprit
	if errors.As(err, &c) && c.Culprit() < len(ranks) {
		if mine.Rank = -1; c.Culprit() >= 0 {
			mine.Rank = ranks[c.Culprit()]
		}
	}
	if errors.Is(err, ErrGroupMismatch) {
		mine.Kind = kindLists
	}
	if first := n.Post(mine); first.By != ranks[rank] {
		return told{&first, err}
	}
	return err
}

// tellOthers makes a group. The ranks that make it tell each other if they cannot, but in a job with PyTorch ranks.
func (w *world) tellOthers(ctx context.Context, s groupSpec) (*ProcessGroup, error) {
	rank := slices.Index(s.ranks, w.rank)
	n := s.notice
	if n == nil && (rank < 0 || len(s.ranks) == 1 || !w.tells) {
		g, err := w.makeGroup(ctx, s, nil)
		if err != nil {
			w.tellOwn(s, err)
		}
		return g, err
	}
	if n == nil {
		var stop context.CancelCauseFunc
		ctx, stop = context.WithCancelCause(ctx)
		defer stop(nil)
		var err error
		n, err = meet.Join(ctx, meet.NoticeConfig{Store: noticeStore(w.store, cmp.Or(s.key, s.name)), Rank: rank, Ranks: s.ranks}, stop)
		if err != nil {
			defer n.Close()
			return nil, tell(ctx, n, s.ranks, rank, fmt.Errorf("pg: group %q: %w", s.name, err))
		}
	}
	defer n.Close()
	g, err := w.makeGroup(ctx, s, n)
	if err != nil {
		err = tell(ctx, n, s.ranks, rank, err)
		w.note(&foreign{err})
		return nil, err
	}
	return g, nil
}

// sayHost adds to err which rank hosts the store, if the store has ended or does not answer.
func (o origin) sayHost(st store.Store, rank int, err error) error {
	if o.hosted < 0 || o.hosted == rank || errors.As(err, new(*meet.Fault)) {
		return err
	}
	if errors.Is(err, tcp.ErrDisconnected) || errors.As(err, new(*store.Error)) && errors.Is(err, syscall.ECONNREFUSED) {
		return &hostLost{o.hosted, "has ended or closed it", err}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		ctx, cancel := context.WithTimeout(context.Background(), lastLook)
		defer cancel()
		if _, e := st.Check(ctx, "asked"); errors.Is(e, context.DeadlineExceeded) {
			return &hostLost{o.hosted, "does not answer: it has stopped, or its host is away", err}
		}
	}
	return err
}

// hostLost says that the rank that hosts the store is gone.
type hostLost struct {
	rank int
	what string
	err  error
}

func (e *hostLost) Error() string {
	return fmt.Sprintf("rank %d, which hosts the store, %s: %v", e.rank, e.what, e.err)
}

func (e *hostLost) Unwrap() error { return e.err }

// Culprit returns the rank that hosted the store.
func (e *hostLost) Culprit() int { return e.rank }
