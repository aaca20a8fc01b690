package run

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// session has what the ranks of a group share. A session fails as one and is closed as one.
type session struct {
	Connections
	rank, size int
	native     bool  // all ranks have this library's wire
	members    []int // the ranks of this rank's cluster, if there are several clusters
	planner    planner

	trace        func(s *cluster.Step, begins bool, posted func() int) // for tests; else nil
	log          *slog.Logger
	onFailure    func(*work.Error) // may be nil
	mismatchTold atomic.Bool       // an operation has returned how the ranks disagree
	checks       bool              // see backend.Options.Checks
	inquiries    []*ask.Inquiry    // one for each mesh

	dead atomic.Pointer[transport.Fault] // of the first rank that has died while no operation needed it
	told sync.Once                       // of tellFirst

	closed   chan struct{} // by close
	watchers sync.WaitGroup
}

// watch makes the failure of one mesh the failure of all.
func (s *session) watch() {
	if len(s.Meshes) < 2 {
		return
	}
	for _, m := range s.Meshes {
		s.watchers.Go(func() {
			select {
			case <-s.closed:
			case <-m.Failed():
				for _, other := range s.Meshes {
					if other != m {
						other.Abort(m.Fault())
					}
				}
			}
		})
	}
}

// close ends what is under way and frees the connections and the memory.
func (s *session) close() error {
	err := s.Connections.Close()
	close(s.closed)
	s.watchers.Wait()
	for _, q := range s.inquiries {
		q.Close()
	}
	return err
}

// inTurn reports whether all ranks run one collective of the queue at a time.
func (s *session) inTurn() bool { return s.Shared != nil || s.Clusters != nil }

// meshFor returns the mesh for an operation with a tag: operations take turns over the interfaces.
func (s *session) meshFor(tag uint32) transport.Mesh { return s.Meshes[tag%uint32(len(s.Meshes))] }

// meshOfMessages returns the mesh for a send or a receive.
func (s *session) meshOfMessages(tag uint32) transport.Mesh {
	if s.Direct != nil {
		return s.Direct
	}
	return s.meshFor(tag)
}

// moveBySelf makes a mesh move data by itself, without a goroutine that waits for it.
func moveBySelf(m transport.Mesh) {
	if h, ok := m.(transport.Poller); ok {
		h.ResumeReaders()
	}
}

// tellWithin is how long the first error of a group that has failed may wait for tellFirst.
const tellWithin = 50 * time.Millisecond

// tellFirst waits until the other ranks have been sent the fault, before an operation returns it. Many programs end
// with their first error. Other ranks would otherwise take this rank for the one that died.
func (s *session) tellFirst() {
	if s.fault() == nil {
		return
	}
	s.told.Do(func() {
		limit := time.NewTimer(tellWithin)
		defer limit.Stop()
		for _, m := range s.Meshes {
			if t, ok := m.(interface{ Told() <-chan struct{} }); ok && m.Fault() != nil {
				select {
				case <-t.Told():
				case <-limit.C:
					return
				}
			}
		}
	})
}

// fault returns what ended the group, nil while it works.
func (s *session) fault() *transport.Fault {
	for _, m := range s.Meshes {
		if f := m.Fault(); f != nil {
			return f
		}
	}
	return nil
}

// end ends the group with f on all ranks.
func (s *session) end(f transport.Fault) {
	for _, m := range s.Meshes {
		g := f
		m.Abort(&g)
	}
}
