package ddp

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrModelMismatch is matched when ranks hold different models.
	ErrModelMismatch = errors.New("ddp: ranks hold different models")

	// ErrUnfinished is matched when an iteration ends, or the next one begins, before every
	// gradient was ready. c10d says "Expected to have finished reduction in the prior iteration
	// before starting a new one".
	ErrUnfinished = errors.New("ddp: expected to have finished reduction in the prior iteration before starting a new one")

	// ErrMarkedTwice is matched when a gradient is ready twice in one
	// iteration: c10d's "Expected to mark a variable ready only once".
	ErrMarkedTwice = errors.New("ddp: expected to mark a variable ready only once")

	// ErrGraphChanged is matched when, with Options.StaticGraph, an iteration
	// differs from the first.
	ErrGraphChanged = errors.New("ddp: the training graph has changed, which is not compatible with StaticGraph")

	// ErrEarlyEnd is matched on every rank when one has no more inputs, with
	// JoinOptions.ErrorOnEarlyEnd.
	ErrEarlyEnd = errors.New("ddp: a rank exhausted its inputs")

	// ErrNotBegun is matched by calls outside of Begin and Finish.
	ErrNotBegun = errors.New("ddp: no iteration has begun")

	// ErrFailed is matched by every call after a failure that left this rank out of step with
	// other ranks. The error also has that failure.
	ErrFailed = errors.New("ddp: cannot be used after an earlier failure; use Elastic, or start again from a checkpoint with a new group")
)

// ParamError is an error of one parameter.
type ParamError struct {
	Index int    // in the slice that New was given
	Name  string // may be empty
	Err   error
}

func (e *ParamError) Error() string {
	// The causes begin with the package; so does this.
	return "ddp: " + paramName(e.Index, e.Name) + ": " + strings.TrimPrefix(e.Err.Error(), "ddp: ")
}

// Unwrap returns the cause.
func (e *ParamError) Unwrap() error { return e.Err }

func paramName(index int, name string) string {
	if name == "" {
		return fmt.Sprintf("parameter %d", index)
	}
	return fmt.Sprintf("parameter %d (%s)", index, name)
}

// UnfinishedError names the parameters whose gradients were missing.
// errors.Is finds ErrUnfinished in it, and ErrGraphChanged under StaticGraph.
type UnfinishedError struct {
	Rank    int
	Indices []int    // of the parameters that were not ready
	Names   []string // their names, which may be empty
	Static  bool     // Options.StaticGraph is set
	Unused  bool     // Options.FindUnused is set
}

func (e *UnfinishedError) Error() string {
	var b strings.Builder
	b.WriteString(ErrUnfinished.Error())
	if len(e.Indices) > 0 {
		fmt.Fprintf(&b, "; parameters which did not receive grad for rank %d: %s", e.Rank, nameList(e.Indices, e.Names))
	}
	switch {
	case len(e.Indices) == 0 || e.Unused && !e.Static:
		b.WriteString("; call Finish after the backward pass")
	case e.Static:
		b.WriteString("; they were used in the first iteration, which is not compatible with StaticGraph")
	default:
		b.WriteString("; if they took no part in the loss, set FindUnused")
	}
	return b.String()
}

// Is makes errors.Is(err, ErrUnfinished) hold.
func (e *UnfinishedError) Is(target error) bool {
	return target == ErrUnfinished || e.Static && target == ErrGraphChanged
}

// nameList names at most eight parameters.
func nameList(indices []int, names []string) string {
	const most = 8
	var b strings.Builder
	for k, i := range indices {
		if k == most {
			fmt.Fprintf(&b, ", and %d more", len(indices)-most)
			break
		}
		if k > 0 {
			b.WriteString(", ")
		}
		if names[k] == "" {
			fmt.Fprint(&b, i)
		} else {
			fmt.Fprintf(&b, "%d (%s)", i, names[k])
		}
	}
	return b.String()
}

// BucketError describes the failed reduction of a bucket.
type BucketError struct {
	Bucket  int
	Indices []int    // of the bucket's parameters
	Names   []string // their names, which may be empty
	Err     error
}

func (e *BucketError) Error() string {
	return fmt.Sprintf("ddp: bucket %d with parameters %s: %v", e.Bucket, nameList(e.Indices, e.Names), e.Err)
}

// Unwrap returns the cause.
func (e *BucketError) Unwrap() error { return e.Err }

// MismatchError says how the models of two ranks differ. errors.Is finds ErrModelMismatch in it.
type MismatchError struct {
	Rank, Other int    // Other differs from Rank
	Index       int    // of the first parameter that differs; -1 if it is something else
	Have, Want  string // what Other has, and what Rank has
}

func (e *MismatchError) Error() string {
	what := "the model"
	if e.Index >= 0 {
		what = fmt.Sprintf("parameter %d", e.Index)
	}
	return fmt.Sprintf("ddp: ranks disagree on %s: rank %d has %s, rank %d has %s", what, e.Rank, e.Want, e.Other, e.Have)
}

// Unwrap makes errors.Is(err, ErrModelMismatch) hold.
func (e *MismatchError) Unwrap() error { return ErrModelMismatch }
