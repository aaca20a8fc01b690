package sim

import (
	"errors"
	"fmt"
	"strings"
	"sync"
)

// Race is two uses of the same bytes that nothing orders.
type Race struct {
	First, Second string // the operations, with their streams and where they were enqueued
	Memory        string // which memory
	From, To      int    // the bytes of it that both use
	Missing       string // the order that is missing
}

func (r *Race) Error() string {
	return fmt.Sprintf("sim: nothing orders\n\t%s\nand\n\t%s\nwhich both use bytes [%d, %d) of %s\n\tmissing: %s",
		r.First, r.Second, r.From, r.To, r.Memory, r.Missing)
}

// Lifetime is a use of something that was closed, freed or released.
type Lifetime struct {
	What  string
	Where string // where it was freed, or released again
}

func (l *Lifetime) Error() string { return "sim: " + l.What + " (" + l.Where + ")" }

// Unused is an event that was recorded for nobody: no stream waited for it and
// the host did not ask.
type Unused struct {
	Stream string
	Where  string // where it was recorded
}

func (u *Unused) Error() string {
	return fmt.Sprintf("sim: an event of %s, recorded at %s, was released and nobody had waited for it", u.Stream, u.Where)
}

// Fault is a kernel that failed.
type Fault struct {
	Kernel string
	Err    error
}

func (f *Fault) Error() string { return "sim: " + f.Kernel + " failed: " + f.Err.Error() }

// Unwrap returns what the kernel returned.
func (f *Fault) Unwrap() error { return f.Err }

// Leak is something that was not closed.
type Leak struct {
	Process string
	What    string
	Where   string // where it was made
}

func (l *Leak) Error() string {
	s := "sim: "
	if l.Process != "" {
		s += l.Process + ": "
	}
	return s + l.What + " was not closed, it was made at " + l.Where
}

// Stuck is streams that can never go on.
type Stuck struct {
	Waits []string // each stream and what it waits for
}

func (s *Stuck) Error() string {
	return "sim: nothing can go on:\n\t" + strings.Join(s.Waits, "\n\t")
}

// mostFindings is how many are kept.
const mostFindings = 100

type findings struct {
	mu   sync.Mutex
	list []error
	more int
}

func (f *findings) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) == mostFindings {
		f.more++
		return
	}
	f.list = append(f.list, err)
}

func (f *findings) all() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := append([]error(nil), f.list...)
	if f.more > 0 {
		list = append(list, fmt.Errorf("sim: %d more findings", f.more))
	}
	return list
}

func (f *findings) err() error { return errors.Join(f.all()...) }
